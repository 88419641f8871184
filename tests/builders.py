"""Notebooks with stamps, built from core objects: no engine, no kernel.

Every token is one piece of text; its id follows from the piece, so two equal texts
have equal token ids. Margins are given per position or are 1.0 everywhere.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

from jupyter_detllm.core.canonical import Digest, digest_of
from jupyter_detllm.core.fingerprint import FieldValue, Fingerprint
from jupyter_detllm.core.generation import (
    Generation,
    Prompt,
    ResolvedPrompt,
    Sampling,
    TokenEvidence,
    build_requests,
)
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.notebook import KEY, RUN_KEY
from jupyter_detllm.core.promotion import Update, promote
from jupyter_detllm.core.shown import stamp_bundle
from jupyter_detllm.core.stamp import (
    Attempt,
    Call,
    ExpectationKind,
    ModelIdentity,
    Stamp,
    next_requests,
    source_digest,
)

__all__ = [
    "FIELDS",
    "MODEL",
    "cell",
    "evidence",
    "generation",
    "make_stamp",
    "notebook",
    "of_another_run",
    "promoted",
    "stamped_cell",
    "tried",
    "with_actual",
    "with_fields",
]

FIELDS: Mapping[str, FieldValue] = {
    "engine.name": "fake",
    "engine.dtype": "bfloat16",
    "software.torch": "2.13.0+cpu",
    "software.vllm": "0.32.0",
    "torch.threads": 2,
}


def _digest(text: str) -> Digest:
    return digest_of(text)


MODEL = ModelIdentity("demo", _digest("weights"), _digest("tokenizer"), _digest("template"))


def with_fields(fingerprint: Fingerprint, values: Mapping[str, FieldValue]) -> Fingerprint:
    """Return a fingerprint with fields added or replaced."""
    return Fingerprint.build({**fingerprint.values(), **values})


def pieces_of(text: str) -> list[str]:
    """Split a text into words, each with the space before it."""
    return re.findall(r"\s*\S+|\s+$", text)


def token_id(piece: str | bytes) -> int:
    """Return the id of a piece of text: the same piece, the same id."""
    data = piece.encode() if isinstance(piece, str) else piece
    return crc32(data) % 50_000


def evidence(
    tokens: int, margins: Mapping[int, float] | None = None, runner_ups: Sequence[int] | None = None
) -> TokenEvidence:
    """Return evidence of `tokens` tokens, with a margin of 1.0 where none is given."""
    gaps = [(margins or {}).get(i, 1.0) for i in range(tokens)]
    return TokenEvidence(
        tokens,
        chosen=tuple(-0.5 for _ in gaps),
        runner_up=tuple(-0.5 - gap for gap in gaps),
        runner_up_ids=tuple(runner_ups) if runner_ups else tuple(7 + i for i in range(tokens)),
    )


def generation(
    text: str,
    *,
    prompt: int = 0,
    completion: int = 0,
    pieces: Sequence[str | bytes] | None = None,
    margins: Mapping[int, float] | None = None,
    runner_ups: Sequence[int] | None = None,
    finish: str = "stop",
    with_evidence: bool = True,
) -> Generation:
    """Return a generation of `text`, one token per word or per given piece."""
    parts = [p.encode() if isinstance(p, str) else p for p in pieces or pieces_of(text)]
    offsets, at = [], 0
    for part in parts:
        offsets.append(min(at, len(text.encode())))
        at += len(part)
    return Generation(
        prompt,
        completion,
        tuple(token_id(part) for part in parts),
        finish,
        text,
        tuple(offsets),
        evidence(len(parts), margins, runner_ups) if with_evidence else None,
    )


def make_stamp(
    source: str,
    texts: Sequence[str | Generation] = ("An old pond.",),
    *,
    prompts: Sequence[str] | None = None,
    name: str = "",
    level: Level = Level.REPEATABLE,
    fields: Mapping[str, FieldValue] | None = None,
    model: ModelIdentity = MODEL,
    sampling: Sampling | None = None,
    seed: int = 0,
    late: Sequence[str] = (),
    one_call_each: bool = False,
    cached: Sequence[int] = (),
) -> Stamp:
    """Return the stamp of a cell that sent `prompts` and got `texts`, some from a cache."""
    asked = prompts or [f"prompt {i}" for i in range(len(texts))]
    resolved = [
        ResolvedPrompt(Prompt.chat(p), tuple(map(token_id, pieces_of(p))), sampling or Sampling())
        for p in asked
    ]
    requests = build_requests(resolved, root_seed=seed, name=name)
    answers = [
        replace(t, prompt_index=i) if isinstance(t, Generation) else generation(t, prompt=i)
        for i, t in enumerate(texts)
    ]
    if one_call_each:
        calls = tuple(
            Call((r,), (replace(a, prompt_index=0),))
            for r, a in zip(requests, answers, strict=True)
        )
    else:
        calls = (Call(requests, tuple(answers), tuple(cached)),)
    fingerprint = Fingerprint.build({**FIELDS, **(fields or {})})
    return Stamp(
        name=name,
        level=level,
        source=source_digest(source),
        model=model,
        fingerprint=fingerprint,
        fingerprint_digest=fingerprint.digest,
        root_seed=seed,
        calls=calls,
        late=tuple(late),
    )


def tried(stamp: Stamp, unmet: Sequence[int], texts: Sequence[str], most: int = 3) -> Stamp:
    """Return a stamp of one call with a second try: `texts` in place of the texts `unmet`."""
    (first,) = stamp.calls
    expected = digest_of("a pattern")
    kind = ExpectationKind.PATTERN
    everything = tuple(range(len(first.generations)))
    requests = next_requests(first.requests, unmet, 2)
    second = Call(
        requests,
        tuple(generation(text, prompt=i) for i, text in enumerate(texts)),
        attempt=Attempt(kind, expected, 2, most, tuple(unmet)),
    )
    one = replace(first, attempt=Attempt(kind, expected, 1, most, everything, tuple(unmet)))
    return replace(stamp, calls=(one, second))


def cell(source: str, cell_id: str = "", outputs: Sequence[Any] = ()) -> dict[str, Any]:
    """Return a code cell without a stamp."""
    return {
        "cell_type": "code",
        "execution_count": 1,
        "id": cell_id or f"c{crc32(source.encode()):08x}",
        "metadata": {},
        "outputs": list(outputs),
        "source": source.splitlines(keepends=True),
    }


def stamped_cell(
    source: str = "%%detgen haiku\nWrite a haiku.",
    stamp: Stamp | None = None,
    *,
    run_id: str = "run-1",
    tags: Sequence[str] = (),
) -> dict[str, Any]:
    """Return a code cell whose output carries `stamp`, not promoted yet."""
    made = stamp if stamp is not None else make_stamp(source, name=_name_of(source))
    stored = made.to_json()
    data = stamp_bundle(made, str(stored["digest"])).items()
    output = {
        "data": {kind: text.splitlines(keepends=True) for kind, text in data},
        "metadata": {KEY: stored, RUN_KEY: {"run_id": run_id}},
        "output_type": "display_data",
    }
    # The texts are not in the output, as where it was captured.
    out = cell(source, outputs=[output])
    if tags:
        out["metadata"]["tags"] = list(tags)
    return out


def _name_of(source: str) -> str:
    found = re.match(r"%%detgen\s+([A-Za-z_]\w*)", source)
    return found.group(1) if found else ""


def notebook(*cells: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    """Return an nbformat 4.5 notebook."""
    return {
        "cells": list(cells),
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
            **metadata,
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def promoted(*cells: dict[str, Any]) -> dict[str, Any]:
    """Return a notebook whose stamps are also its references (verdict: recorded)."""
    return promote(notebook(*cells), Update.NEW)[0]


def of_another_run(book: dict[str, Any], run_id: str | None = "run-b") -> dict[str, Any]:
    """Return a copy of a notebook whose outputs and references are of another run."""
    out = copy.deepcopy(book)
    for made in out["cells"]:
        for output in made.get("outputs", []):
            output["metadata"]["detllm_run"]["run_id"] = run_id
        if "detllm" in made["metadata"]:
            made["metadata"]["detllm"]["recorded_run"] = run_id
    return out


def with_actual(
    book: dict[str, Any], number: int, stamp: Stamp, run_id: str = "run-2"
) -> dict[str, Any]:
    """Return the notebook as after a re-run: cell `number` (from 1) carries `stamp`."""
    cells = list(book["cells"])
    old = cells[number - 1]
    source = "".join(old["source"])
    fresh = stamped_cell(source, stamp, run_id=run_id)
    cells[number - 1] = {**old, "outputs": fresh["outputs"]}
    return {**book, "cells": cells}
