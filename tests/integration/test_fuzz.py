"""Stamped notebooks of the real engine, damaged: no traceback, no hang, no false match.

The quick run has the same cases every time; the long one (`make test-full`) begins anywhere,
and names the seed of a case that fails. Both run a number of cases, not for a time: on a busy
machine they take longer.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.cli import main
from jupyter_detllm.core.verdict import Verdict
from jupyter_detllm.errors import DetLLMError
from jupyter_detllm.verify.job import Job, Listener, Runner
from jupyter_detllm.verify.replay import replay_paths
from jupyter_detllm.verify.rescore import rescore_paths
from jupyter_detllm.verify.service import check_paths
from tests.fuzzing import CORPUS, damaged, reforge, verified

QUICK = 1500  # cases
LONG = 30_000
SLOWEST = 20.0  # seconds of the processor; a case takes milliseconds


def source_of(cell: Any) -> str:
    source = cell["source"]
    return "".join(source).strip()


TRUE = {
    (source_of(cell), content)
    for raw in CORPUS.values()
    for cell in json.loads(raw)["cells"]
    for content in verified(cell) or ()
}
"""Sources with the content that they were stamped with."""


def nothing(job: Job, report: Listener) -> None:
    """Run no job: what is planned for a damaged notebook is what is looked at."""
    raise DetLLMError("no engine here")


def quietly(*argv: str) -> int:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return main(argv)


def test_the_corpus_is_whole(tmp_path: Path) -> None:
    assert len(CORPUS) == 2
    assert len(TRUE) == 4
    for raw in CORPUS.values():
        assert verdicts(tmp_path, raw) == {2: "match", 3: "match"}


def verdicts(folder: Path, raw: bytes) -> dict[int, str]:
    path = folder / "nb.ipynb"
    path.write_bytes(raw)
    (report,) = check_paths([path]).notebooks
    return {found.view.number: found.verdict.value for found in report.cells}


def judge_check(path: Path, forged: bool) -> None:
    """Assert that a match is one: by the file's JSON, and against what was stamped."""
    (report,) = check_paths([path]).notebooks
    matches = [c.view.number for c in report.cells if c.outcome.verdict is Verdict.MATCH]
    if matches:
        book = json.loads(path.read_bytes().removeprefix(b"\xef\xbb\xbf"))
    for number in matches:
        cell = book["cells"][number - 1]
        found = verified(cell)
        assert found is not None
        assert found[0] == found[1]
        # Nothing is signed: a forger who changes both sides alike is not found out.
        assert forged or (source_of(cell), found[0]) in TRUE


def judge_compare(path: Path, other: Path) -> None:
    assert quietly("compare", str(other), str(path)) in (0, 1, 2, 3)
    assert quietly("show", str(path)) in (0, 2)


def judge_writing(path: Path) -> None:
    """Assert that a second update, and a second strip, change no byte."""
    for command in (("stamp", "--update", "all"), ("strip",)):
        codes = []
        for _ in range(2):
            before = path.read_bytes()
            codes.append(quietly(*command, str(path)))
        assert set(codes) <= {0, 1, 2, 3}
        assert path.read_bytes() == before


def judge_replay(path: Path) -> None:
    runner: Runner = nothing
    for verify in (replay_paths, rescore_paths):
        with contextlib.suppress(DetLLMError):  # asks for more than is allowed
            verify([path], runner=runner)  # type: ignore[operator]


def run_case(seed: int, folder: Path) -> None:
    rng = random.Random(seed)
    name = rng.choice(sorted(CORPUS))
    path, other = folder / "damaged.ipynb", folder / "whole.ipynb"
    raw, forged = damaged(CORPUS[name], rng)
    path.write_bytes(raw)
    other.write_bytes(CORPUS[name])
    judge: Callable[[], None] = rng.choice(
        [
            *[lambda: judge_check(path, forged)] * 4,
            lambda: judge_compare(path, other),
            lambda: judge_writing(path),
            lambda: judge_replay(path),
        ]
    )
    start = time.process_time()
    judge()
    assert time.process_time() - start < SLOWEST


def fuzz(first: int, cases: int, folder: Path) -> None:
    """Run that many cases."""
    for seed in range(first, first + cases):
        try:
            run_case(seed, folder)
        except BaseException as error:
            error.add_note(f"tests.integration.test_fuzz.run_case({seed}, folder)")
            raise


def test_damage_is_never_a_traceback_nor_a_match(tmp_path: Path) -> None:
    fuzz(0, QUICK, tmp_path)


@pytest.mark.slow
def test_much_damage(tmp_path: Path) -> None:
    fuzz(random.SystemRandom().randrange(10**6, 10**12), LONG, tmp_path)


# Memory

FOREIGN = {
    "integers": b"[" + b"0," * 750_000 + b"0]",
    "arrays": b"[" + b"[]," * 500_000 + b"[]]",
    "objects": b"[" + b'{"a":{}},' * 150_000 + b"0]",
    "members": b"{" + b",".join(b'"%d":0' % i for i in range(150_000)) + b"}",
    "text": b'"' + b"A" * 6_000_000 + b'"',
    "escapes": b'"' + b"\\u00e9" * 1_000_000 + b'"',
    "deep": b"[" * 4_000_000,
}
PLACES = {
    "output": b'"text/html":',
    "metadata": b'"kernelspec":',
    "cell": b'"execution_count":',
}


def peak_of(action: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("kind", "place"),
    [*((kind, "output") for kind in FOREIGN), ("members", "metadata"), ("text", "cell")],
)
def test_foreign_values_take_no_memory(kind: str, place: str, tmp_path: Path) -> None:
    key = PLACES[place]
    head, found, tail = CORPUS["invariant"].partition(key)
    assert found
    path = tmp_path / "nb.ipynb"
    path.write_bytes(head + b'"large":' + FOREIGN[kind] + b"," + key + tail)
    peak = peak_of(lambda: check_paths([path]))
    assert peak < 2 * path.stat().st_size + 2_000_000  # what is compiled and imported once


OURS: dict[str, Callable[[Any], None]] = {
    "tokens": lambda g: g.update(token_ids=[0] * 1_200_000),
    "offsets": lambda g: g.update(offsets=[0] * 1_200_000),
    "text": lambda g: g.update(text="A" * 9_000_000),
    "evidence": lambda g: g["evidence"].update(chosen="A" * 9_000_000),
    "evidence claimed": lambda g: g["evidence"].update(tokens=10**12),
    "positions": lambda g: g["evidence"].update(positions="A" * 9_000_000),
    "k": lambda g: g["evidence"].update(k=10**9),
}


@pytest.mark.parametrize("kind", OURS)
def test_what_a_stamp_claims_is_bounded_before_it_is_believed(kind: str, tmp_path: Path) -> None:
    book = json.loads(CORPUS["invariant"])
    stamp = book["cells"][1]["outputs"][-1]["metadata"]["detllm"]
    OURS[kind](stamp["calls"][0]["generations"][0])
    reforge(stamp)
    path = tmp_path / "nb.ipynb"
    path.write_text(json.dumps(book), encoding="utf-8")
    found: list[Any] = []
    peak = peak_of(lambda: found.extend(check_paths([path]).notebooks[0].cells))
    assert found[0].verdict is Verdict.ERROR
    # The file, the text of the stamp and its values: no digest is taken of it.
    assert peak < 8 * path.stat().st_size
