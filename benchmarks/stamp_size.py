"""How large stamps are in a notebook, in both stored forms.

``python benchmarks/stamp_size.py [--out FILE]`` writes notebooks as nbformat does and counts bytes
per generated token: all metadata of this package in the cells and their outputs, without the
generated text itself and without what the notebook's references share (fingerprint, model). Also
counted: the size of ``examples/evaluation.ipynb``, which is of the first form, as it is and in
the second form, and the lines that `git diff` shows when two drifted cells of 400 tokens are
accepted.

Token ids are drawn uniformly from the vocabulary, which needs the widest packing; texts are words.
"""

from __future__ import annotations

import argparse
import datetime
import difflib
import json
import platform
import random
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "stamp_size.json"
sys.path.insert(0, str(ROOT))

from jupyter_detllm.core.canonical import digest_of  # noqa: E402
from jupyter_detllm.core.fingerprint import Fingerprint  # noqa: E402
from jupyter_detllm.core.generation import (  # noqa: E402
    Generation,
    Prompt,
    ResolvedPrompt,
    Sampling,
    TokenEvidence,
    build_requests,
)
from jupyter_detllm.core.levels import Level, Reach  # noqa: E402
from jupyter_detllm.core.notebook import KEY, RUN_KEY, read_notebook  # noqa: E402
from jupyter_detllm.core.promotion import Update, promote, strip  # noqa: E402
from jupyter_detllm.core.shown import stamp_bundle, text_bundles  # noqa: E402
from jupyter_detllm.core.stamp import (  # noqa: E402
    Call,
    ModelIdentity,
    Run,
    Stamp,
    StoredForm,
    assemble_stamp,
    source_digest,
)

Book = dict[str, Any]
SOURCE = "%%detgen answer --max-tokens 400\nExplain in plain words why the sky is blue."
VOCABULARIES = {"49,152 tokens": 49_152, "151,936 tokens": 151_936}
CELLS = {"1 x 400": (1, 400), "1 x 2,000": (1, 2000), "12 x 64": (12, 64)}
MODEL = ModelIdentity(
    "demo",
    *(digest_of(part) for part in ("weights", "tokenizer", "template")),
    generation_config=digest_of("generation config"),
    joint=digest_of("joint"),
)
FIELDS: dict[str, str | int] = {f"engine.field{i}": "a value" for i in range(60)}


def generation(prompt: int, tokens: int, vocabulary: int, draw: random.Random) -> Generation:
    """Return a generation of words, with evidence that no packing could shorten."""
    words = [" " + "x" * draw.randint(1, 8) for _ in range(tokens)]
    starts = [sum(map(len, words[:i])) for i in range(tokens)]
    chosen = [-draw.random() for _ in range(tokens)]
    return Generation(
        prompt,
        0,
        tuple(draw.randrange(vocabulary) for _ in range(tokens)),
        "length",
        "".join(words),
        tuple(starts),
        TokenEvidence(
            tokens,
            tuple(chosen),
            tuple(value - draw.random() for value in chosen),
            tuple(draw.randrange(vocabulary) for _ in range(tokens)),
        ),
    )


def stamp(shape: tuple[int, int], vocabulary: int, seed: int, *, evidence: bool = True) -> Stamp:
    """Return the stamp of a cell of (prompts, tokens each)."""
    prompts, tokens = shape
    draw = random.Random(seed)
    sampling = Sampling(temperature=0.7, top_p=0.95, max_tokens=tokens, stop_token_ids=(2,))
    resolved = [
        ResolvedPrompt(Prompt.chat(f"Explain, part {i}."), (1, 2, i), sampling)
        for i in range(prompts)
    ]
    generations = [generation(i, tokens, vocabulary, draw) for i in range(prompts)]
    if not evidence:
        generations = [replace(one, evidence=None) for one in generations]
    call = Call(build_requests(resolved, root_seed=0, name="answer"), tuple(generations))
    run = Run(
        MODEL,
        Level.INVARIANT,
        0,
        Fingerprint({**FIELDS}),
        self_test="held: alone, batched, other order, other neighbours, repeated",
        reach=Reach(4096, 64),
    )
    return assemble_stamp(run, [call], name="answer", source=source_digest(SOURCE))


def notebook(stamps: list[Stamp], run_id: str = "1" * 32) -> Book:
    """Return a notebook of executed cells, as a kernel leaves them."""
    return {"cells": [_cell(one, run_id) for one in stamps], **_EMPTY}


_EMPTY: Book = {"metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def _cell(made: Stamp, run_id: str) -> Book:
    stored = made.to_json()
    run = {"run_id": run_id, "version": "0.1.0", "seconds": 1.234, "tokens_per_second": 123.4}
    run |= {"cached_tokens": 0, "preemptions": 0, "verdict": "unstamped"}
    outputs: list[Book] = [{"data": data, "metadata": {}} for data in text_bundles(made)]
    metadata = {KEY: stored, RUN_KEY: run}
    outputs.append({"data": stamp_bundle(made, str(stored["digest"])), "metadata": metadata})
    return {
        "cell_type": "code",
        "execution_count": 1,
        "id": "0123abcd",
        "metadata": {},
        "outputs": [{**output, "output_type": "display_data"} for output in outputs],
        "source": SOURCE.splitlines(keepends=True),
    }


def written(book: Book) -> str:
    """Return a notebook as nbformat writes it."""
    return json.dumps(book, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def per_token(made: Stamp) -> float:
    """Return the bytes per token that a recorded cell takes in its notebook."""
    book, _ = promote(notebook([made]), Update.NEW)
    own = {**book, "metadata": {}}
    size = len(written(own).encode()) - len(written(strip(own)[0]).encode())
    texts = sum(len(json.dumps(g.text)) for g in made.generations)
    copies = written(own).count('"finish_reason"') // len(made.generations)
    return (size - copies * texts) / sum(len(g.token_ids) for g in made.generations)


def accepted_lines(form: StoredForm) -> int:
    """Return the lines of a diff in which two drifted cells of 400 tokens are accepted."""
    sides = [[stamp((1, 400), 49_152, seed) for seed in seeds] for seeds in ((1, 2), (3, 4))]
    if form is StoredForm.FIRST:
        sides = [[one.as_first() for one in side] for side in sides]
    before = promote(notebook(sides[0]), Update.NEW)[0]
    fresh = notebook(sides[1], "2" * 32)["cells"]
    rerun = [{**a, "outputs": b["outputs"]} for a, b in zip(before["cells"], fresh, strict=True)]
    after = promote({**before, "cells": rerun}, Update.ALL)[0]
    lines = difflib.unified_diff(written(before).splitlines(), written(after).splitlines(), n=0)
    return sum(1 for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---"))


def evaluation() -> dict[str, int]:
    """Return the bytes of the example: without stamps, as committed, and in the second form."""
    book = json.loads((ROOT / "examples" / "evaluation.ipynb").read_text(encoding="utf-8"))
    bare = strip(book)[0]
    cells = list(bare["cells"])
    for view in read_notebook(book).cells:
        if view.actual is None:
            continue
        at = view.number - 1
        model = replace(view.actual.model, is_joint=False)
        made = replace(view.actual, form=StoredForm.SECOND, renderer=1, model=model)
        outputs = [dict(output) for output in book["cells"][at]["outputs"]]
        shown = next(o for o in outputs if KEY in o.get("metadata", {}))
        stored = made.to_json()
        shown["metadata"] = {**shown["metadata"], KEY: stored}
        shown["data"] = stamp_bundle(made, str(stored["digest"]))
        cells[at] = {**cells[at], "outputs": outputs}
    second = promote({**bare, "cells": cells}, Update.NEW)[0]
    forms = {"without stamps": bare, "first form": book, "second form": second}
    return {name: len(written(one).encode()) for name, one in forms.items()}


def measured() -> dict[str, Any]:
    """Return every figure."""
    sizes: dict[str, Any] = {}
    for cell, shape in CELLS.items():
        for name, vocabulary in VOCABULARIES.items():
            for evidence in (True, False):
                made = stamp(shape, vocabulary, 1, evidence=evidence)
                kind = "with evidence" if evidence else "without evidence"
                sizes[f"{cell}, {name}, {kind}"] = {
                    "first form": round(per_token(made.as_first()), 1),
                    "second form": round(per_token(made), 1),
                }
    return {
        "bytes_per_token": sizes,
        "evaluation_ipynb_bytes": evaluation(),
        "diff_lines_of_accepting_2_x_400_tokens": {
            "first form": accepted_lines(StoredForm.FIRST),
            "second form": accepted_lines(StoredForm.SECOND),
        },
    }


def main() -> None:
    """Measure, print, and write the result with what it was measured on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": "python benchmarks/stamp_size.py",
        "commit": commit.stdout.strip(),
        "machine": f"{platform.machine()} (sizes do not depend on it)",
        "python": platform.python_version(),
        "jupyter_detllm": version("jupyter-detllm"),
        "results": measured(),
    }
    text = json.dumps(result, indent=1) + "\n"
    args.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
