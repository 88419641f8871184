from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.notebook import KEY, RUN_KEY, check_cell, read_notebook
from jupyter_detllm.core.promotion import Update, promote
from jupyter_detllm.core.stamp import source_digest
from jupyter_detllm.core.verdict import PolicyKind, Verdict
from jupyter_detllm.errors import NotebookError
from tests.builders import cell, make_stamp, notebook, promoted, stamped_cell, with_actual

SOURCE = "%%detgen haiku\nWrite a haiku."


def verdict_of(book: dict[str, Any], index: int = 0) -> Verdict:
    return check_cell(read_notebook(book).cells[index]).verdict


def only(book: dict[str, Any]) -> Any:
    (found,) = read_notebook(book).cells
    return found


@pytest.mark.parametrize(
    ("book", "message"),
    [
        (None, "not a notebook"),
        ([], "not a notebook"),
        ("x", "not a notebook"),
        ({}, "not a notebook"),
        ({"cells": []}, "not a notebook"),
        ({"nbformat": 4}, "not a notebook"),
        ({"nbformat": 4, "cells": {}}, "not a notebook"),
        ({"nbformat": 3, "worksheets": []}, "nbconvert"),
        ({"nbformat": 2}, "nbformat 2"),
        ({"nbformat": 5, "cells": []}, "nbformat 5"),
        ({"nbformat": "4", "cells": []}, "nbformat '4'"),
        ({"nbformat": True, "cells": []}, "nbformat True"),
        ({"nbformat": -(10**400), "cells": []}, r"nbformat -1000.*\.\.\.; expected nbformat 4"),
        ({"nbformat": [[4]], "cells": []}, "nbformat a list"),
        ({"nbformat": 4, "cells": [1]}, "cell 1 is not an object"),
    ],
)
def test_what_is_not_a_notebook_is_one_line(book: Any, message: str) -> None:
    with pytest.raises(NotebookError, match=message) as caught:
        read_notebook(book)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 160


def test_only_cells_that_generate_or_carry_something_are_seen() -> None:
    markdown = {"cell_type": "markdown", "source": "%%detgen", "metadata": {}}
    book = notebook(cell("1 + 1"), markdown, cell(SOURCE), stamped_cell("det.generate('x')"))
    view = read_notebook(book)
    assert [found.number for found in view.cells] == [3, 4]
    assert [found.label for found in view.cells] == ["cell 3 (haiku)", "cell 4"]
    assert view.cells[0].actual is None
    assert view.cells[1].actual is not None
    emptied = cell("1 + 1")
    emptied["metadata"][KEY] = {"schema": "detllm.cell/1"}
    assert only(notebook(emptied)).reference is None


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("%%detgen haiku\nx", "haiku"),
        ("%%detgen  a.b-c_1 --seed 3\nx", "a.b-c_1"),
        ("\n  %%detgen haiku\nx", "haiku"),
        ("%%detgen\nhaiku", ""),
        ("%%detgen --seed 3\nx", ""),
        ("%%detgen 3x\nx", ""),
    ],
)
def test_names(source: str, name: str) -> None:
    assert only(notebook(cell(source))).name == name


CALLED = "get_ipython().run_cell_magic('detgen', 'haiku --policy bitwise', 'Write.')"
NESTED = [
    "%%time\n%%detgen haiku --policy bitwise\nWrite.",
    "%%capture kept --no-stderr\n\n  %%time\n%%detgen haiku --policy=bitwise\nWrite.",
    CALLED,
    f"%%capture kept\n%matplotlib inline\n{CALLED}",
    f"if True:\n    print(1)\n    {CALLED}",
    "run_cell_magic(magic_name='detgen', line='haiku --policy bitwise', cell=text)",
]


@pytest.mark.parametrize("source", NESTED)
def test_a_line_under_another_magic_counts_as_one_at_the_top(source: str) -> None:
    found = only(notebook(cell(source)))
    assert (found.name, found.policy.kind) == ("haiku", PolicyKind.BITWISE)
    assert verdict_of(notebook(cell(source))) is Verdict.UNSTAMPED
    stamp = make_stamp(source, ["An old pond."], name="haiku")
    changed = copy.deepcopy(notebook(stamped_cell(source, stamp)))
    shown_data = changed["cells"][0]["outputs"][0]
    text = {"data": {"text/plain": "LONDON"}, "metadata": {}, "output_type": "display_data"}
    changed["cells"][0]["outputs"] = [text, {**shown_data, "data": {}}]
    # What a call inside other code generates may be shown elsewhere.
    assert bool(only(changed).problems) is not source.startswith("if")


@pytest.mark.parametrize(
    "source",
    [
        "%%writefile f.py\n%%detgen haiku\nWrite.",
        "%%script false --no-raise-error\n%%detgen haiku\nWrite.",
        f"%%bash\n{CALLED}",
        f"def later():\n    {CALLED}",
        f"later = lambda: {CALLED}",
        f"print({CALLED!r})",
        CALLED.replace("detgen", "time"),
        CALLED.replace("'detgen'", "name"),
        f"{CALLED} +",
        "%%time\nx = '%%detgen'",
        "%%detgen --help",
        "%%time\n%%detgen haiku -h\nWrite.",
        "%%time x\n\n# %%detgen\n%%detgen haiku",
    ],
)
def test_a_line_that_is_not_run_generates_nothing(source: str) -> None:
    assert not read_notebook(notebook(cell(source))).cells


def test_another_magic_is_not_ours() -> None:
    assert read_notebook(notebook(cell("%%detgenerate x\ny"), cell("x\n%%detgen"))).cells == ()


def test_a_name_twice_is_an_error_in_the_second() -> None:
    book = notebook(stamped_cell(SOURCE), stamped_cell(SOURCE))
    assert verdict_of(book, 0) is Verdict.UNSTAMPED
    outcome = check_cell(read_notebook(book).cells[1])
    assert outcome.verdict is Verdict.ERROR
    assert "already used by cell 1" in outcome.reasons[0]


def test_an_unnamed_cell_takes_the_name_of_its_stamp() -> None:
    source = "det.generate('x', name='story')"
    assert only(notebook(stamped_cell(source, make_stamp(source, name="story")))).name == "story"


def test_tags_and_policies() -> None:
    def policy_of(source: str, *tags: str) -> Any:
        return only(notebook(stamped_cell(source, tags=tags))).policy

    assert policy_of(SOURCE) is None
    assert policy_of(SOURCE, "detllm-policy-bitwise").kind is PolicyKind.BITWISE
    assert policy_of("%%detgen --policy prefix(3)\nx").n == 3
    assert policy_of("%%detgen --policy='within(0.1)'\nx").atol == 0.1
    assert policy_of("%%detgen --policy 'within( 0.5 )'\nx").atol == 0.5
    assert policy_of("%%detgen --policy tokens --policy bitwise\nx").kind is PolicyKind.BITWISE
    assert policy_of('%%detgen --system "say --policy prefix(1) aloud"\nx') is None
    assert policy_of("%%detgen --policy=prefix(1) --system 'it\nx") is None
    assert policy_of("%%detgen --policy\nx") is None
    line = policy_of('%%detgen --policy "tokens"\nx', "detllm-policy-bitwise")
    assert line.kind is PolicyKind.TOKENS
    wrong = only(notebook(stamped_cell(SOURCE, tags=["detllm-policy-exact"])))
    assert wrong.policy is None
    assert check_cell(wrong).verdict is Verdict.ERROR
    assert only(notebook(stamped_cell(SOURCE, tags=["detllm-skip"]))).skipped
    assert not only(notebook(stamped_cell(SOURCE))).skipped


@pytest.mark.parametrize("source", ["%%detgen?", "%%detgen??", " \n%%detgen?\n", "%%detgenx a"])
def test_a_cell_that_asks_for_help_generates_nothing(source: str) -> None:
    assert not read_notebook(notebook(cell(source))).cells


def test_verdicts_from_one_file() -> None:
    book = promoted(stamped_cell(SOURCE))
    stamp = only(book).actual
    other = make_stamp(SOURCE, ["A new pond."], name="haiku")
    assert verdict_of(notebook(cell(SOURCE))) is Verdict.UNSTAMPED
    assert verdict_of(notebook(stamped_cell(SOURCE))) is Verdict.UNSTAMPED
    assert verdict_of(book) is Verdict.RECORDED
    assert verdict_of(with_actual(book, 1, stamp)) is Verdict.MATCH
    assert verdict_of(with_actual(book, 1, other)) is Verdict.DIVERGED
    edited = copy.deepcopy(with_actual(book, 1, stamp))
    edited["cells"][0]["source"] = ["%%detgen haiku\n", "Write two."]
    assert verdict_of(edited) is Verdict.STALE
    cleared = copy.deepcopy(book)
    cleared["cells"][0]["outputs"] = []
    outcome = check_cell(only(cleared))
    assert outcome.verdict is Verdict.STRIPPED
    assert "reference is still there" in outcome.reasons[0]


@pytest.mark.parametrize("side", ["output", "cell", "both"])
def test_without_an_id_nothing_tells_a_rerun_from_the_recorded_run(side: str) -> None:
    book = copy.deepcopy(promoted(stamped_cell(SOURCE)))
    if side != "cell":
        book["cells"][0]["outputs"][0]["metadata"].pop(RUN_KEY)
    if side != "output":
        book["cells"][0]["metadata"][KEY].pop("recorded_run")
    assert verdict_of(book) is Verdict.RECORDED
    other = with_actual(book, 1, make_stamp(SOURCE, ["An old frog."], name="haiku"))
    assert verdict_of(other) is Verdict.DIVERGED


def test_another_content_is_compared_whatever_the_run_id_says() -> None:
    book = promoted(stamped_cell(SOURCE))
    other = make_stamp(SOURCE, ["An old frog."], name="haiku")
    assert verdict_of(with_actual(book, 1, other, run_id="run-1")) is Verdict.DIVERGED


def shown(text: str, *others: str) -> dict[str, Any]:
    """Return a re-run notebook as a kernel leaves it: text, then the line of the stamp."""
    stamp = make_stamp(SOURCE, ["An old pond.", "A frog\x1b jumps."], name="haiku")
    book = copy.deepcopy(with_actual(promoted(stamped_cell(SOURCE, stamp)), 1, stamp))
    outputs = book["cells"][0]["outputs"]
    for extra in (*others, text):
        output = {"output_type": "display_data", "metadata": {}, "data": {"text/plain": extra}}
        outputs.insert(len(outputs) - 1, output)
    return book


STAMPED = "[prompt 1/2]\nAn old pond.\n\n[prompt 2/2]\nA frog\\x1b jumps."


def test_an_edited_text_under_a_whole_stamp_is_no_match() -> None:
    assert verdict_of(shown(STAMPED)) is Verdict.MATCH
    assert verdict_of(shown(STAMPED, "engine ready: fake")) is Verdict.MATCH
    for edited in (
        *("LONDON", STAMPED.replace("pond", "bond"), STAMPED[:-1]),
        *(f"No. {STAMPED}", f"{STAMPED}\n", STAMPED.replace("\n", "\r\n")),
    ):
        outcome = check_cell(only(shown(edited)))
        assert outcome.verdict is Verdict.ERROR
        assert "the text that the output shows" in outcome.reasons[0]


def test_a_captured_text_is_nothing_to_compare() -> None:
    assert verdict_of(shown("")) is Verdict.MATCH
    book = shown(STAMPED)
    del book["cells"][0]["outputs"][0]
    assert verdict_of(book) is Verdict.MATCH


def test_a_name_after_options_is_used_once_too() -> None:
    source = "%%detgen --temperature 0 haiku\nx"
    cells = [stamped_cell(source, make_stamp(source, name="haiku")) for _ in range(2)]
    first, second = read_notebook(notebook(*cells)).cells
    assert not first.problems
    assert second.problems == ("the name 'haiku' is already used by cell 1",)


def test_the_last_stamp_of_a_cell_counts() -> None:
    first = stamped_cell(SOURCE, make_stamp(SOURCE, ["one"]))
    second = stamped_cell(SOURCE, make_stamp(SOURCE, ["two"]), run_id="run-2")
    stream = {"output_type": "stream", "name": "stdout", "text": "x"}
    first["outputs"] = [*first["outputs"], stream, *second["outputs"], stream]
    assert only(notebook(first)).actual.generations[0].text == "two"


def test_fingerprints_are_shared_and_checked() -> None:
    book = promoted(stamped_cell(SOURCE))
    (digest,) = book["metadata"][KEY]["fingerprints"]
    view = read_notebook(book)
    assert set(view.fingerprints) == {digest}
    reference = view.cells[0].reference
    assert reference is not None
    assert reference.fingerprint == view.fingerprints[digest]
    broken = copy.deepcopy(book)
    broken["metadata"][KEY]["fingerprints"][digest]["numerics"]["torch.threads"] = 3
    view = read_notebook(broken)
    assert "disagrees with its digest" in view.problems[0]
    assert view.cells[0].reference is not None
    assert view.cells[0].reference.fingerprint is None
    surrogate = copy.deepcopy(book)
    surrogate["metadata"][KEY]["fingerprints"][digest]["numerics"]["torch.blas"] = "\ud800"
    assert "surrogate" in read_notebook(surrogate).problems[0]


@pytest.mark.parametrize("where", ["cell", "notebook"])
def test_metadata_of_a_later_schema_is_a_problem_with_its_cure(where: str) -> None:
    book = copy.deepcopy(promoted(stamped_cell(SOURCE)))
    meta = book["metadata"] if where == "notebook" else book["cells"][0]["metadata"]
    meta[KEY]["schema"] = f"detllm.{where}/9"
    view = read_notebook(book)
    problems = view.problems if where == "notebook" else view.cells[0].problems
    assert "pip install -U" in problems[0]
    assert (verdict_of(book) is Verdict.ERROR) is (where == "cell")


@pytest.mark.parametrize("source", [None, 3, ["a", 3], {"a": 1}, "%%detgen \ud800", ["\udfff"]])
def test_a_source_that_is_no_text_is_an_error_of_its_cell(source: object) -> None:
    book = copy.deepcopy(promoted(stamped_cell(SOURCE), stamped_cell("%%detgen other\nx")))
    book["cells"][0]["source"] = source
    outcome = check_cell(read_notebook(book).cells[0])
    assert outcome.verdict is Verdict.ERROR
    assert "not Unicode text" in outcome.reasons[0]
    assert verdict_of(book, 1) is Verdict.RECORDED


def test_sources_as_text_and_as_lines_are_one() -> None:
    book = copy.deepcopy(promoted(stamped_cell(SOURCE)))
    stamp = only(book).actual
    book["cells"][0]["source"] = SOURCE.replace("\n", "\r\n") + "\r\n"
    assert verdict_of(with_actual(book, 1, stamp)) is Verdict.MATCH


def test_problems_name_the_side() -> None:
    book = copy.deepcopy(promoted(stamped_cell(SOURCE)))
    book["cells"][0]["metadata"][KEY]["reference"]["level"] = "best"
    book["cells"][0]["outputs"][0]["metadata"][KEY] = [1]
    problems = only(book).problems
    assert problems[0].startswith("the output's stamp is not an object")
    assert problems[1].startswith("the cell's reference disagrees with its own digest")


ODD = st.sampled_from([None, 0, True, "x", [], {}, [[1]], {"detllm": 1}, "\ud800", 10**40])


@given(st.data())
def test_odd_types_around_a_stamp_never_raise(data: st.DataObject) -> None:
    book: Any = json.loads(json.dumps(promoted(stamped_cell(SOURCE, tags=["a"]))))
    book["cells"][0]["metadata"][KEY]["previous"] = {"x": 1}
    places = [
        (book, "metadata"),
        (book["metadata"], KEY),
        (book["metadata"][KEY], "fingerprints"),
        (book["cells"][0], "metadata"),
        (book["cells"][0], "id"),
        (book["cells"][0], "outputs"),
        (book["cells"][0]["outputs"], 0),
        (book["cells"][0]["outputs"][0], "metadata"),
        (book["cells"][0]["outputs"][0]["metadata"], KEY),
        (book["cells"][0]["outputs"][0]["metadata"], RUN_KEY),
        (book["cells"][0]["outputs"][0]["metadata"][RUN_KEY], "run_id"),
        (book["cells"][0]["metadata"], "tags"),
        (book["cells"][0]["metadata"], KEY),
        (book["cells"][0]["metadata"][KEY], "reference"),
        (book["cells"][0]["metadata"][KEY], "previous"),
        (book["cells"][0]["metadata"][KEY], "recorded_run"),
    ]
    box, key = data.draw(st.sampled_from(places))
    box[key] = data.draw(ODD)
    for found in read_notebook(book).judged:
        assert check_cell(found).verdict in {
            Verdict.ERROR,
            Verdict.STRIPPED,
            Verdict.UNSTAMPED,
            Verdict.RECORDED,
            Verdict.MATCH,
        }


def test_an_unreadable_previous_is_no_problem() -> None:
    book = copy.deepcopy(promoted(stamped_cell(SOURCE)))
    book["cells"][0]["metadata"][KEY]["previous"] = {"schema": "x"}
    assert verdict_of(book) is Verdict.RECORDED
    assert only(book).previous is None


def test_a_fingerprint_that_no_notebook_holds_leaves_its_fields_unknown() -> None:
    book = copy.deepcopy(promoted(stamped_cell(SOURCE)))
    del book["metadata"][KEY]
    other = make_stamp(SOURCE, ["A new pond."], name="haiku", fields={"torch.threads": 8})
    outcome = check_cell(only(with_actual(book, 1, other)))
    assert outcome.verdict is Verdict.DRIFT
    assert outcome.reasons[0].startswith("fingerprint: ")
    assert isinstance(other.fingerprint, Fingerprint)


@pytest.mark.parametrize("head", ["%%detgen cap --text", "%%time\n%%detgen cap"])
def test_a_blank_at_the_end_of_a_prompt_is_another_source(head: str) -> None:
    source = f"{head}\nThe capital of France is"
    stamp = make_stamp(source, name="cap", prompts=["The capital of France is"])
    book = with_actual(promoted(stamped_cell(source, stamp)), 1, stamp)
    assert verdict_of(book) is Verdict.MATCH
    book["cells"][0]["source"] = f"{source}\n\n \n"
    assert verdict_of(book) is Verdict.MATCH
    for end in (" ", "\t\n"):
        changed = copy.deepcopy(book)
        changed["cells"][0]["source"] = source + end
        assert verdict_of(changed) is Verdict.STALE
        # Run again, it is a new reference without being asked for.
        prompt = f"The capital of France is{end.rstrip(chr(10))}"
        fresh = make_stamp(source + end, name="cap", prompts=[prompt])
        again = promote(with_actual(changed, 1, fresh), Update.NEW)[0]
        assert verdict_of(again) is Verdict.RECORDED


def test_stamps_of_sources_trimmed_at_the_end_stay_comparable() -> None:
    """Earlier versions digested `source` without the white space at its end."""
    source = "%%detgen cap --text\nThe capital of France is "
    old = make_stamp(source.rstrip(), name="cap", prompts=["The capital of France is "])
    book = with_actual(promoted(stamped_cell(source, old)), 1, old)
    assert verdict_of(book) is Verdict.MATCH
    now = replace(old, source=source_digest(source))
    assert verdict_of(with_actual(book, 1, now)) is Verdict.MATCH
    book["cells"][0]["source"] = source + " "
    assert verdict_of(book) is Verdict.STALE
