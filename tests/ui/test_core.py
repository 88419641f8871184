"""The pure part of the committed bundle, in the browser, against Python's: same vectors."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jupyter_detllm.core.levels import Level, Reach
from jupyter_detllm.core.notebook import check_cell, read_notebook
from jupyter_detllm.core.promotion import Update, promote
from jupyter_detllm.errors import NotebookError
from tests.builders import cell, make_stamp, notebook, promoted, stamped_cell, with_actual
from tests.ui.lab import Front
from tests.unit.core.test_promotion import books
from tests.vectors.make_vectors import FOLDER

Book = dict[str, Any]


@pytest.fixture(scope="module")
def core(lab_page: Front) -> Front:
    return lab_page.start_app()


def cases(name: str) -> list[Book]:
    found: list[Book] = json.loads((FOLDER / f"{name}.json").read_text())["cases"]
    return found


def test_canonical_text_and_digest(core: Front) -> None:
    # As JSON text: a key __proto__ must arrive as a key.
    text = (FOLDER / "canonical.json").read_text()
    found = core.core(
        "(core, text) => JSON.parse(text).cases.map("
        "c => [c.name, core.canonicalText(c.value), core.digestOf(c.value)])",
        text,
    )
    assert found == [[c["name"], c["canonical"], c["digest"]] for c in cases("canonical")]


def test_floats_are_spelt_as_python_does(core: Front) -> None:
    values = [0.1, 0.7, 1.5, 1e-4, 1.25e-5, 1e15, 123456789.125, 1e16, 1.5e300, 5e-324, -2.5]
    found = core.core("(core, values) => values.map(core.floatText)", values)
    assert found == [repr(value) for value in values]
    short = core.core("(core, values) => values.map(core.threeDigits)", values)
    assert short == [f"{value:.3g}" for value in values]


def test_sources(core: Front) -> None:
    found = core.core(
        "(core, cases) => cases.map("
        "c => [core.normaliseSource(c.source), core.sourceDigest(c.source)])",
        cases("sources"),
    )
    assert found == [[c["normal"], c["digest"]] for c in cases("sources")]


def test_evidence_and_margins(core: Front) -> None:
    found = core.core(
        """(core, cases) => cases.map(c => {
          const e = core.readEvidence(c.stored, c.stored.tokens);
          const margins = [...Array(e.tokens).keys()].map(i => core.margin(e, i));
          return [core.evidenceJson(e), margins.map(m => (m === null ? null : core.floatText(m)))];
        })""",
        cases("evidence"),
    )
    for (stored, margins), case in zip(found, cases("evidence"), strict=True):
        assert stored == case["stored"]
        assert [m and float(m) for m in margins] == [m and float(m) for m in case["margins"]]


def test_stamps_and_every_digest_in_them(core: Front) -> None:
    found = core.core(
        """(core, cases) => cases.map(c => {
          const s = core.readStamp(c.stamp, 'stamp');
          core.readStamp(c.reference, 'reference');
          core.readStamp(c.without_prompts, 'stamp');
          return {
            digest: core.knownDigest(s), stored: s.storedDigest,
            reference: core.referenceJson(c.stamp), fingerprint_digest: s.fingerprint.digest,
            generation_digest: core.generationDigest(s), call_digests: s.calls.map(x => x.digest),
            request_digests: s.calls.flatMap(x => x.requests.map(r => r.digest)),
          };
        })""",
        cases("stamps"),
    )
    for got, case in zip(found, cases("stamps"), strict=True):
        assert got.pop("stored") == case["digest"]
        assert got == {key: case[key] for key in got}


# As text both ways: the driver loses a key like __proto__.
_PROMOTE = """(core, text) => JSON.stringify(JSON.parse(text).map(book => {
  try {
    const view = core.readNotebook(book);
    const outcomes = view.cells.map(c => core.checkCell(c, view));
    const out = {verdicts: outcomes.map(o => o.verdict), problems: view.problems.length,
      reasons: outcomes.map(o => o.verdict === 'error' ? null : o.reasons)};
    for (const update of ['new', 'all']) {
      const { notebook, changes } = core.promote(book, update);
      out[update] = {after: notebook, changes: changes.map(c => ({cell: c.label, kind: c.kind})),
        same: notebook === book};
    }
    return out;
  } catch (error) {
    return {refused: error instanceof core.NotebookError ? 'notebook' : String(error)};
  }
}))"""


def in_browser(core: Front, *found: Book) -> list[Any]:
    out: list[Any] = json.loads(core.core(_PROMOTE, json.dumps(found)))
    return out


def in_python(book: Book) -> Book:
    try:
        view = read_notebook(book)
        outcomes = [check_cell(found) for found in view.cells]
        out: Book = {
            "verdicts": [o.verdict.value for o in outcomes],
            "problems": len(view.problems),
            "reasons": [None if o.verdict == "error" else list(o.reasons) for o in outcomes],
        }
        for update in Update:
            after, changes = promote(book, update)
            kinds = [{"cell": c.label, "kind": c.kind.value} for c in changes]
            out[update.value] = {"after": after, "changes": kinds, "same": after is book}
    except NotebookError:
        return {"refused": "notebook"}
    return out


def test_promotion_and_verdicts_of_the_vectors(core: Front) -> None:
    found = in_browser(core, *(case["before"] for case in cases("promotion")))
    for got, case in zip(found, cases("promotion"), strict=True):
        assert got == in_python(case["before"]), case["name"]
        assert got["verdicts"] == case["verdicts"]
        for update in ("new", "all"):
            assert got[update]["after"] == case[update]["after"]


@pytest.mark.parametrize("beyond", [(True, False), (False, True), (False, False)])
def test_a_possible_cause_beyond_a_reach_is_named_alike(
    core: Front, beyond: tuple[bool, bool]
) -> None:
    source = "%%detgen haiku\nx"
    left, right = (
        replace(
            make_stamp(source, [text], name="haiku", level=Level.INVARIANT),
            reach=Reach(1608, 1),
            beyond_reach=is_beyond,
        )
        for text, is_beyond in zip(("An old pond.", "An old well."), beyond, strict=True)
    )
    book = with_actual(promoted(stamped_cell(source, left)), 1, right)
    (found,) = in_browser(core, book)
    assert found == in_python(book)
    assert ("beyond" in str(found["reasons"])) is any(beyond)


_EXAMPLES = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@_EXAMPLES
@given(found=st.lists(books(), min_size=4, max_size=4))
def test_both_sides_promote_any_notebook_alike(core: Front, found: list[Book]) -> None:
    assert in_browser(core, *found) == [in_python(book) for book in found]


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    out = [path]
    if isinstance(value, dict):
        out += [p for key in value for p in _paths(value[key], (*path, key))]
    elif isinstance(value, list):
        out += [p for index in range(len(value)) for p in _paths(value[index], (*path, index))]
    return out


ODD: list[Any] = [
    *(None, True, False, 0, -1, 7, 2**31, 2**53 - 1, 0.5, "", "x", "7", [], {}, [None], [[]]),
    *({"schema": "detllm.stamp/1"}, "sha256:" + "0" * 64, "detllm.stamp/2", "__proto__"),
    *({"__proto__": {"a": 1}}, {"constructor": 1}, "NaN", "1e3", "0x10", "007", " \u2028"),
]


def damaged(book: Book, path: tuple[Any, ...], value: Any) -> Book:
    out = copy.deepcopy(book)
    target: Any = out
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return out


def test_both_sides_take_any_damage_alike(core: Front) -> None:
    stamp = make_stamp("%%detgen haiku\nx", ["An old pond."], name="haiku", late=["A"])
    stamp = replace(stamp, reach=Reach(8, 2), beyond_reach=True)
    book = promoted(stamped_cell("%%detgen haiku\nx", stamp), cell("1 + 1"))
    book = promote(
        {**book, "cells": [*book["cells"], stamped_cell("%%detgen b\ny", run_id="r")]}, Update.NEW
    )[0]
    paths = [path for path in _paths(book) if path and "data" not in path]
    pairs = [(path, ODD[i % len(ODD)]) for i, path in enumerate(paths)]
    broken = [damaged(book, path, value) for path, value in pairs]
    assert len(broken) > 200
    for at in range(0, len(broken), 100):
        part = broken[at : at + 100]
        for (path, value), got, each in zip(
            pairs[at : at + 100], in_browser(core, *part), part, strict=True
        ):
            expected = in_python(each)
            assert got == expected, (path, value)


@pytest.mark.parametrize(
    "line",
    [
        *("haiku --policy bitwise", "--policy='within(1e-3)'", '"--policy" prefix(3) x'),
        *("--policy", "--policy 'open", "--policy a\\", "-x \\--policy tokens", "a --policy= b"),
        *("--policy within(1_0.5)", "--policy within(inf)", "--policy prefix(0)", "--policy nope"),
    ],
)
def test_a_magic_line_reads_alike(core: Front, line: str) -> None:
    source = f"%%detgen {line}\nx"
    book = notebook(stamped_cell(source), stamped_cell(source.replace("%%detgen", " \n%%detgen")))
    script = (
        "(core, book) => core.readNotebook(book).cells.map("
        "c => [c.name, c.policy && core.policyText(c.policy), c.problems.length])"
    )
    expected = [
        [c.name, None if c.policy is None else str(c.policy), len(c.problems)]
        for c in read_notebook(book).cells
    ]
    assert core.core(script, book) == expected
