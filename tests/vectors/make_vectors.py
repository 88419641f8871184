"""Write the test vectors: stored forms and digests as they are, and must stay.

The lab extension shares those of sources.

``python tests/vectors/make_vectors.py`` rewrites the files beside it; a test fails while
they are not what this script writes. Every file is an object with ``about`` and ``cases``.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jupyter_detllm.core.canonical import canonical_bytes, digest_of  # noqa: E402
from jupyter_detllm.core.fingerprint import Fingerprint  # noqa: E402
from jupyter_detllm.core.generation import (  # noqa: E402  # noqa: E402
    Prompt,
    PromptKind,
    TokenEvidence,
    derive_seed,
    generation_digest,
    prompt_digest,
)
from jupyter_detllm.core.levels import Level  # noqa: E402
from jupyter_detllm.core.notebook import check_cell, read_notebook  # noqa: E402
from jupyter_detllm.core.promotion import Update, promote, strip  # noqa: E402
from jupyter_detllm.core.stamp import (  # noqa: E402
    content_digest,
    normalise_source,
    reference_json,
    source_digest,
)
from jupyter_detllm.engines.base import SamplingOptions  # noqa: E402
from tests.builders import (  # noqa: E402
    cell,
    make_stamp,
    notebook,
    stamped_cell,
    tried,
    with_actual,
)
from tests.fakes import Run  # noqa: E402

__all__ = ["KEPT", "VECTORS", "main", "rendered"]

Vectors = dict[str, Any]
FOLDER = Path(__file__).parent

SAMPLES = {
    "greedy chat": Run(),
    "two prompts, two completions, sampled": Run(
        prompts=(Prompt.chat("Hello", "Be brief."), Prompt.chat("山と🌊")),
        sampling=SamplingOptions(temperature=0.7, top_p=0.95, top_k=40, max_tokens=16),
        n=2,
        name="story",
        source="%%detgen story -n 2 --temperature 0.7\nHello\n---\n山と🌊",
        root_seed=2**62 + 1,
    ),
    "raw text, stopped, two calls, invariant": Run(
        prompts=(Prompt(PromptKind.TEXT, text="Once"), Prompt(PromptKind.TOKENS, token_ids=(1,))),
        sampling=SamplingOptions(max_tokens=40, stop=(".", "。", "…", "!", "?", ";", ",")),
        level=Level.INVARIANT,
        calls=((0,), (1,)),
    ),
    "beams without evidence": Run(
        sampling=SamplingOptions(beam_width=2, max_tokens=6),
        n=2,
        options={"evidence": False},
    ),
}


def canonical() -> Vectors:
    values: list[tuple[str, Any]] = [
        ("literals", [None, True, False]),
        ("empty", [{}, [], ""]),
        (
            "key order by UTF-16 unit",
            {"\ue000": 1, "😀": 2, "z": 3, "é": 4, "": 5, "10": 6, "9": 7},
        ),
        ("escapes", '\x00\x08\t\n\x0b\x0c\r\x1f"\\/\x7f\x80\u2028\u2029'),
        ("Unicode is not normalised", ["é", "e\u0301", "山", "🌊", "\uffff"]),
        ("integers", [0, -1, 2**53 - 1, -(2**53 - 1)]),
        ("nesting", {"b": [{"d": 1, "c": [2]}], "a": {}}),
        ("prototype keys", {"__proto__": {"x": 1}, "constructor": 2, "toString": 3}),
        ("a float is text", ["0.7", "1.0", "NaN", "-Infinity", "1e-07"]),
    ]
    return {
        "about": "JSON as stored, its RFC 8785 text and digest. No number is a float.",
        "cases": [
            {
                "name": name,
                "value": value,
                "canonical": canonical_bytes(value).decode(),
                "digest": str(digest_of(value)),
            }
            for name, value in values
        ],
    }


def encoding() -> Vectors:
    values: list[tuple[str, str, Any]] = [
        ("float", repr(value), value)
        for value in (0.1, 1.0, -0.0, 1e-7, 1e16, 1e22, 5e-324, 1.7976931348623157e308)
    ]
    values += [("float", str(v), v) for v in (math.nan, math.inf, -math.inf)]
    values += [("integer", str(v), v) for v in (2**53, -(2**53), 2**63 - 1)]
    values += [("bytes", v.hex(), v) for v in (b"", b"\x00", b"\xff\xfe\xfd")]
    return {
        "about": "What a Python value is stored as; bytes are given in hexadecimal.",
        "cases": [
            {"type": kind, "python": shown, "stored": json.loads(canonical_bytes(value))}
            for kind, shown, value in values
        ],
    }


def seeds() -> Vectors:
    cases = []
    for root, name, tokens, occurrence, completion in [
        (0, "", [1], 0, 0),
        (0, "", [1], 1, 0),
        (0, "", [1], 0, 1),
        (7, "haiku", [15, 3, 99999], 2, 3),
        (2**63 - 1, "山", [], 0, 0),
    ]:
        prompt = prompt_digest(tokens)
        cases.append(
            {
                "root_seed": str(root),
                "name": name,
                "token_ids": tokens,
                "occurrence": occurrence,
                "completion": completion,
                "prompt_tokens": str(prompt),
                "seed": str(derive_seed(root, name, prompt, occurrence, completion)),
            }
        )
    return {"about": "Prompt token digests and derived seeds.", "cases": cases}


def sources() -> Vectors:
    texts = [
        "%%detgen\nWrite a haiku.",
        "%%detgen\r\nWrite a haiku.\r\n",
        "\n \t\n%%detgen haiku --seed 3\nWrite.\n\n---\n\nAgain.  \n\n",
        "%%detgen\rone",
        "  %%detgen\n  kept",
        "",
        " \n\t",
        "%%detgen\nx\u3000",
        "%%detgen\nx\x85\u2028\ufeff",
        "%%detgen\nx\x1f\x0b\x0c \n",
        "%%detgen --text\nThe capital of France is \n \n",
        "%%time\n%%capture kept\n\n\x1f%%detgen\nx \n",
        "%%!\n%%detgen\nx ",
        "%%bash -x\n%%detgen\nx ",
        "%%detgenx\n%%detgen\nx ",
        "%%time\x85y\n%%detgen\nx ",
        "%%time\r%%detgen\rx \r",
        "det.generate('x') \t\n",
    ]
    return {
        "about": "A cell's source, how it is normalised, and its digest.",
        "cases": [
            {"source": t, "normal": normalise_source(t), "digest": str(source_digest(t))}
            for t in texts
        ],
    }


def evidence() -> Vectors:
    samples = {
        "empty": TokenEvidence(0, (), (), ()),
        "special values": TokenEvidence(
            4, (-0.0, math.nan, -math.inf, -1.5), (-1.0, -math.inf, -math.inf, -1.5), (5, 6, -1, 7)
        ),
        "kept positions": TokenEvidence(9, (-0.5, -0.25), (-0.5, -2.25), (1, 2), (3, 8)),
    }
    cases = []
    for name, value in samples.items():
        margins = [value.margin(position) for position in range(value.tokens)]
        stored: Mapping[str, Any] = value.to_json()
        cases.append(
            {
                "name": name,
                "stored": stored,
                "margins": [None if m is None else str(m) for m in margins],
            }
        )
    return {
        "about": "Evidence as stored, and the margin (nats) per position, null if unknown.",
        "cases": cases,
    }


def stamps() -> Vectors:
    cases = []
    for name, run in SAMPLES.items():
        stamp = run.stamp()
        stored = stamp.to_json()
        cases.append(
            {
                "name": name,
                "stamp": stored,
                "reference": reference_json(stored),
                "without_prompts": stamp.to_json(store_prompt=False),
                "digest": str(content_digest(stored)),
                "as_first": stamp.as_first().to_json()["digest"],
                "fingerprint_digest": str(Fingerprint.from_json(stored["fingerprint"]).digest),
                "generation_digest": str(stamp.generation_digest),
                "call_digests": [str(generation_digest(call.generations)) for call in stamp.calls],
                "request_digests": [str(request.digest) for request in stamp.requests],
            }
        )
    return {
        "about": "Stamps of the fake engine: their references, every digest recomputed.",
        "cases": cases,
    }


def _other_batch(level: Level) -> dict[str, Any]:
    """Return a notebook whose cell sent its prompts one by one, and got another text."""
    source = "%%detgen pair\nOne.\n---\nTwo."
    old = make_stamp(source, ["One.", "Two."], name="pair", level=level)
    new = make_stamp(source, ["One.", "2."], name="pair", level=level, one_call_each=True)
    return with_actual(promote(notebook(stamped_cell(source, old)), Update.NEW)[0], 1, new)


def _books() -> dict[str, dict[str, Any]]:
    source = "%%detgen haiku\nWrite a haiku."
    old = make_stamp(source, ["An old pond."], name="haiku")
    new = make_stamp(source, ["A new pond."], name="haiku", fields={"torch.threads": 4})
    two = "%%detgen haiku\nWrite two."
    changed = make_stamp(two, ["Two ponds."], name="haiku")
    plain = notebook(cell("1 + 1"), stamped_cell(source, old, tags=["mine"]), title="kept")
    done, _ = promote(plain, Update.NEW)
    drifted = with_actual(done, 2, new)
    edited = with_actual(done, 2, changed)
    edited["cells"][1] = {**edited["cells"][1], "source": two.splitlines(keepends=True)}
    cleared = {**done, "cells": [done["cells"][0], {**done["cells"][1], "outputs": []}]}
    markdown = {**done, "cells": [done["cells"][0], {**done["cells"][1], "cell_type": "markdown"}]}
    stale = {**plain, "cells": [plain["cells"][0], {**plain["cells"][1], "source": two}]}
    broken_stamp = replace(old, name="other").to_json() | {"name": "haiku"}
    broken = notebook(stamped_cell(source, old))
    broken["cells"][0]["outputs"][0]["metadata"]["detllm"] = broken_stamp
    hit = make_stamp(source, ["An old pond."], name="haiku", cached=[0])
    fields = {"torch.threads": 4}
    other_hit = make_stamp(source, ["A new pond."], name="haiku", fields=fields, cached=[0])
    from_cache, _ = promote(notebook(stamped_cell(source, hit)), Update.NEW)
    twice = tried(old, [0], ["A new pond."])
    retried, _ = promote(notebook(stamped_cell(source, twice)), Update.NEW)
    other_way = tried(old, [0], ["A newer pond."])
    new_first = tried(new, [0], ["A newer pond."])
    torn = replace(twice, calls=twice.calls[1:])
    torn_book = notebook(stamped_cell(source, torn))
    newer = json.loads(json.dumps(with_actual(done, 2, old)))
    carried = newer["cells"][1]["outputs"][0]["metadata"]["detllm"]
    carried["calls"][0]["requests"][0]["params"]["logit_bias"] = {}
    carried["digest"] = str(content_digest(carried))
    later = json.loads(json.dumps(done))
    later["cells"][1]["metadata"]["detllm"]["schema"] = "detllm.cell/2"
    return {
        **{f"another batch, {level}": _other_batch(level) for level in Level},
        "nothing of ours": notebook(cell("1 + 1")),
        "a first stamp": plain,
        "already promoted": done,
        "re-run, equal": with_actual(done, 2, old),
        "re-run, drifted": drifted,
        "drift accepted, then drifted back": with_actual(promote(drifted, Update.ALL)[0], 2, old),
        "source changed and run": edited,
        "source changed, not run": stale,
        "output cleared": cleared,
        "became markdown": markdown,
        "a stamp that disagrees with itself": broken,
        "a later schema": later,
        "re-run, with a parameter of a later version": newer,
        "a first stamp, of two tries": notebook(stamped_cell(source, twice)),
        "two tries, re-run, equal": with_actual(retried, 1, twice),
        "two tries, re-run, the second drifted": with_actual(retried, 1, other_way),
        "two tries, re-run, the first was as expected": with_actual(retried, 1, old),
        "two tries, re-run, the first drifted": with_actual(retried, 1, new_first),
        "a second try without its first": torn_book,
        "a first stamp, from the cache": notebook(stamped_cell(source, hit)),
        "re-run, from the cache, equal": with_actual(done, 2, hit),
        "re-run, from the cache, drifted": with_actual(done, 2, other_hit),
        "a reference from the cache, re-run": with_actual(from_cache, 1, old),
        "a reference from the cache, again from the cache": with_actual(from_cache, 1, hit),
    }


def promotion() -> Vectors:
    cases = []
    for name, book in _books().items():
        case: dict[str, Any] = {
            "name": name,
            "before": book,
            "verdicts": [check_cell(found).verdict for found in read_notebook(book).cells],
            "stripped": strip(book)[0],
        }
        for update in Update:
            after, changes = promote(book, update)
            case[update.value] = {
                "after": after,
                "changes": [{"cell": c.label, "kind": c.kind} for c in changes],
            }
        cases.append(case)
    return {
        "about": "Notebooks before and after promotion (new, all), stripped, and their verdicts.",
        "cases": cases,
    }


VECTORS = {
    "canonical": canonical,
    "encoding": encoding,
    "evidence": evidence,
    "promotion-2": promotion,
    "seeds": seeds,
    "sources": sources,
    "stamps-2": stamps,
}

KEPT = ("promotion", "stamps")
"""Vectors of a form that is read and no longer written: these files never change."""


def rendered(name: str) -> str:
    """Return the text of one vector file."""
    return json.dumps(VECTORS[name](), indent=1, ensure_ascii=True) + "\n"


def main() -> None:
    """Rewrite every vector file."""
    for name in VECTORS:
        (FOLDER / f"{name}.json").write_text(rendered(name), encoding="ascii")


if __name__ == "__main__":
    main()
