from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_detllm.core.notebook import KEY, RUN_KEY, check_cell, output_stamp, read_notebook
from jupyter_detllm.core.promotion import Change, ChangeKind, Update, promote, store_once, strip
from jupyter_detllm.core.stamp import Stamp, content_digest, pointer_json
from jupyter_detllm.core.verdict import Verdict
from jupyter_detllm.errors import NotebookError
from tests.builders import cell, make_stamp, notebook, promoted, stamped_cell, with_actual

Book = dict[str, Any]
SOURCE = "%%detgen haiku\nWrite a haiku."
OTHER_SOURCE = "%%detgen haiku\nWrite two."


def stamp_of(
    text: str, source: str = SOURCE, fields: dict[str, str | int | bool | None] | None = None
) -> Stamp:
    return make_stamp(source, [text], name="haiku", fields=fields)


def kinds(changes: tuple[Change, ...]) -> list[ChangeKind]:
    return [change.kind for change in changes]


def meta_of(book: Book, index: int = 0) -> Any:
    return book["cells"][index]["metadata"].get(KEY)


def verdicts(book: Book) -> list[Verdict]:
    return [check_cell(found).verdict for found in read_notebook(book).cells]


def rerun(book: Book, stamp: Stamp, source: str | None = None) -> Book:
    fresh = copy.deepcopy(with_actual(book, 1, stamp))
    if source is not None:
        fresh["cells"][0]["source"] = source.splitlines(keepends=True)
    return fresh


def test_a_first_reference_is_the_stamp_without_its_fingerprint() -> None:
    before = notebook(cell("1"), stamped_cell(SOURCE))
    untouched = copy.deepcopy(before)
    after, changes = promote(before, Update.NEW)
    assert before == untouched
    assert kinds(changes) == [ChangeKind.ADDED]
    stored = before["cells"][1]["outputs"][0]["metadata"][KEY]
    assert meta_of(after, 1) == {
        "schema": "detllm.cell/1",
        "reference": {k: v for k, v in stored.items() if k != "fingerprint"},
        "recorded_run": "run-1",
        "entry": before["cells"][1]["id"],
    }
    assert after["metadata"][KEY] == {
        "schema": "detllm.notebook/2",
        "fingerprints": {stored["fingerprint_digest"]: stored["fingerprint"]},
        "cells": {before["cells"][1]["id"]: "haiku"},
    }
    assert after["cells"][0] is before["cells"][0]
    assert {k: v for k, v in after["metadata"].items() if k != KEY} == before["metadata"]
    assert verdicts(after) == [Verdict.RECORDED]


@pytest.mark.parametrize("update", Update)
def test_a_second_time_changes_nothing_and_returns_the_same_object(update: Update) -> None:
    after, _ = promote(notebook(stamped_cell(SOURCE), stamped_cell("%%detgen\nx")), Update.NEW)
    again, changes = promote(after, update)
    assert again is after
    assert set(kinds(changes)) == {ChangeKind.UNCHANGED}
    loaded = json.loads(json.dumps(after))
    assert json.dumps(promote(loaded, update)[0]) == json.dumps(after)


def test_an_equal_rerun_is_unchanged_and_keeps_its_recorded_run() -> None:
    book = promoted(stamped_cell(SOURCE))
    stamp = read_notebook(book).cells[0].actual
    assert stamp is not None
    fresh = rerun(book, stamp)
    for update in Update:
        after, changes = promote(fresh, update)
        # What equals the reference is stored once, in the cell.
        stored = output_stamp(after["cells"][0])[0]
        assert stored == pointer_json(meta_of(fresh)["reference"])
        assert meta_of(after) == meta_of(fresh)
        assert promote(after, update)[0] is after
        assert verdicts(after) == [Verdict.MATCH]
        assert kinds(changes) == [ChangeKind.UNCHANGED]
    assert verdicts(fresh) == [Verdict.MATCH]


def test_drift_under_the_same_source_is_kept_unless_all_is_asked() -> None:
    book = promoted(stamped_cell(SOURCE, stamp_of("old")))
    drifted = rerun(book, stamp_of("new"))
    kept, changes = promote(drifted, Update.NEW)
    assert kept is drifted
    assert kinds(changes) == [ChangeKind.KEPT]
    accepted, changes = promote(drifted, Update.ALL)
    assert kinds(changes) == [ChangeKind.REPLACED]
    assert verdicts(accepted) == [Verdict.RECORDED]
    assert meta_of(accepted)["previous"] == meta_of(book)["reference"]
    assert meta_of(accepted)["recorded_run"] == "run-2"


def test_a_deliberate_change_is_promoted_and_the_previous_kept() -> None:
    book = promoted(stamped_cell(SOURCE, stamp_of("old")))
    changed = rerun(book, stamp_of("new", OTHER_SOURCE), OTHER_SOURCE)
    after, changes = promote(changed, Update.NEW)
    assert kinds(changes) == [ChangeKind.REPLACED]
    assert meta_of(after)["previous"] == meta_of(book)["reference"]


def test_previous_never_has_a_previous() -> None:
    book = promoted(stamped_cell(SOURCE, stamp_of("0")))
    for text in "1234":
        before = meta_of(book)["reference"]
        book, _ = promote(rerun(book, stamp_of(text)), Update.ALL)
        assert meta_of(book)["previous"] == before
        assert "previous" not in meta_of(book)["previous"]
    assert set(meta_of(book)) == {"schema", "reference", "recorded_run", "previous", "entry"}


def test_fingerprints_of_previous_references_stay_and_others_go() -> None:
    def digest(threads: int) -> str:
        return str(stamp_of("x", fields={"torch.threads": threads}).fingerprint_digest)

    book = promoted(stamped_cell(SOURCE, stamp_of("x", fields={"torch.threads": 1})))
    for threads in (2, 3):
        fresh = rerun(book, stamp_of(f"x{threads}", fields={"torch.threads": threads}))
        book, _ = promote(fresh, Update.ALL)
        held = set(book["metadata"][KEY]["fingerprints"])
        assert held == {digest(threads), digest(threads - 1)}


def test_a_cleared_output_loses_no_reference() -> None:
    book = promoted(stamped_cell(SOURCE), stamped_cell("%%detgen b\nx"))
    cleared = copy.deepcopy(book)
    cleared["cells"][0]["outputs"] = []
    for update in Update:
        after, changes = promote(cleared, update)
        assert after is cleared
        assert kinds(changes) == [ChangeKind.UNCHANGED, ChangeKind.UNCHANGED]
    assert len(book["metadata"][KEY]["cells"]) == 2


def test_an_output_of_an_earlier_source_is_refused() -> None:
    book = notebook(stamped_cell(SOURCE))
    book["cells"][0]["source"] = OTHER_SOURCE
    for update in Update:
        after, changes = promote(book, update)
        assert after is book
        assert kinds(changes) == [ChangeKind.REFUSED]
        assert "run the cell first" in changes[0].why


@pytest.mark.parametrize("kind", ["markdown", "raw"])
def test_a_cell_that_is_no_longer_code_is_cleared(kind: str) -> None:
    book = copy.deepcopy(promoted(stamped_cell(SOURCE), stamped_cell("%%detgen b\nx")))
    book["cells"][0].update(cell_type=kind)
    del book["cells"][0]["outputs"]
    book["cells"][0]["metadata"]["tags"] = ["mine"]
    assert promote(book, Update.NEW)[0] is book  # it is lost until somebody says otherwise
    after, changes = promote(book, Update.NEW, forget=True)
    assert after["cells"][0]["metadata"] == {"tags": ["mine"]}
    assert (ChangeKind.REMOVED, "cell 1") in [(c.kind, c.label) for c in changes]
    assert len(after["metadata"][KEY]["cells"]) == 1
    assert promote(after, Update.NEW)[0] is after


def test_shared_metadata_goes_with_the_last_reference() -> None:
    book = copy.deepcopy(promoted(stamped_cell(SOURCE)))
    book["cells"][0] = cell("1 + 1")
    assert promote(book, Update.NEW)[0] is book
    after, _ = promote(book, Update.NEW, forget=True)
    assert KEY not in after["metadata"]


def test_an_odd_stamp_is_refused_and_the_rest_promoted() -> None:
    broken = stamped_cell("%%detgen b\nx")
    broken["outputs"][0]["metadata"][KEY]["level"] = "best"
    after, changes = promote(notebook(broken, stamped_cell(SOURCE)), Update.ALL)
    assert kinds(changes) == [ChangeKind.REFUSED, ChangeKind.ADDED]
    assert "digest" in changes[0].why
    assert meta_of(after, 0) is None


def with_reference(book: Book, edit: Callable[[Any], None]) -> Book:
    out = copy.deepcopy(book)
    edit(meta_of(out))
    return out


def test_a_broken_reference_is_replaced_only_if_all_is_asked() -> None:
    stamped = stamped_cell(SOURCE)
    book = promoted(stamped)
    whole = {**book, "cells": [{**book["cells"][0], "outputs": stamped["outputs"]}]}
    broken = with_reference(whole, lambda meta: meta["reference"].update(level="best"))
    refused, changes = promote(broken, Update.NEW)
    assert kinds(changes) == [ChangeKind.REFUSED]
    assert refused is broken
    fixed, changes = promote(broken, Update.ALL)
    assert kinds(changes) == [ChangeKind.REPLACED]
    assert meta_of(fixed)["reference"] == meta_of(book)["reference"]
    assert "previous" not in meta_of(fixed)


def test_an_output_that_points_at_a_reference_needs_that_very_one() -> None:
    book = promoted(stamped_cell(SOURCE))
    other = stamp_of("other").to_json()
    cases: dict[str, Callable[[Any], Any]] = {
        "is another one": lambda meta: meta.update(reference=other),
        "is gone": lambda meta: meta.pop("reference"),
        "disagrees with its own digest": lambda meta: meta["reference"].update(level="seeded"),
    }
    for why, damage in cases.items():
        broken = with_reference(book, damage)
        (found,) = read_notebook(broken).cells
        assert verdicts(broken) == [Verdict.ERROR]
        assert [why in problem for problem in found.problems] == [True]
        for update in Update:
            assert kinds(promote(broken, update)[1]) == [ChangeKind.REFUSED]


def test_a_cleared_output_loses_nothing() -> None:
    book = promoted(stamped_cell(SOURCE))
    cleared = {**book, "cells": [{**book["cells"][0], "outputs": []}]}
    (found,) = read_notebook(cleared).cells
    assert found.reference is not None
    assert found.reference == read_notebook(book).cells[0].reference
    assert promote(cleared, Update.NEW)[0] is cleared


def test_a_rerun_is_stored_once_where_the_notebook_holds_its_fingerprint() -> None:
    book = promoted(stamped_cell(SOURCE))
    stamp = read_notebook(book).cells[0].actual
    assert stamp is not None
    fresh = rerun(book, stamp)
    assert store_once(fresh) == promote(fresh, Update.NEW)[0]
    drifted = rerun(book, stamp_of("new"))
    assert store_once(drifted) is drifted
    without = {**fresh, "metadata": {}}
    assert store_once(without) is without


@pytest.mark.parametrize(
    "edit",
    [
        lambda meta: meta["reference"].update(schema="detllm.stamp/3"),
        lambda meta: meta.update(reference="x"),
        lambda meta: meta.update(schema="detllm.cell/2"),
    ],
)
def test_what_another_version_wrote_is_never_replaced(edit: Callable[[Any], None]) -> None:
    book = promoted(stamped_cell(SOURCE), stamped_cell("%%detgen b\nx"))
    later = with_reference(book, edit)
    fresh = rerun(later, stamp_of("new"))
    for update in Update:
        after, changes = promote(fresh, update)
        assert kinds(changes)[0] is ChangeKind.REFUSED
        assert after["cells"][0] is fresh["cells"][0]
        assert after["metadata"][KEY]["fingerprints"] == book["metadata"][KEY]["fingerprints"]


def test_shared_metadata_survives_if_no_reference_can_be_read() -> None:
    def later(meta: Any) -> None:
        meta["reference"]["schema"] = "detllm.stamp/3"

    book = with_reference(promoted(stamped_cell(SOURCE)), later)
    assert promote(book, Update.ALL)[0] is book


def test_shared_metadata_of_a_later_schema_is_refused_in_one_line() -> None:
    book = copy.deepcopy(promoted(stamped_cell(SOURCE)))
    book["metadata"][KEY]["schema"] = "detllm.notebook/9"
    with pytest.raises(NotebookError, match="pip install -U"):
        promote(book, Update.NEW)


def test_unknown_keys_of_shared_metadata_survive() -> None:
    book = copy.deepcopy(promoted(stamped_cell(SOURCE)))
    shared = book["metadata"][KEY]
    shared["added_later"] = 1
    next(iter(shared["fingerprints"].values()))["added_later"] = [2]
    assert promote(book, Update.ALL)[0] is book
    after, _ = promote(rerun(book, stamp_of("new")), Update.ALL)
    assert after["metadata"][KEY]["added_later"] == 1
    (stored,) = after["metadata"][KEY]["fingerprints"].values()
    assert stored["added_later"] == [2]


def test_a_damaged_shared_fingerprint_is_mended_from_an_output() -> None:
    stamped = stamped_cell(SOURCE)
    book = promoted(stamped)
    whole = {**book, "cells": [{**book["cells"][0], "outputs": stamped["outputs"]}]}
    for damage in ({"schema": "x"}, None, 3):
        broken = copy.deepcopy(whole)
        (digest,) = broken["metadata"][KEY]["fingerprints"]
        broken["metadata"][KEY]["fingerprints"][digest] = damage
        assert promote(broken, Update.NEW)[0] == book
    lost = copy.deepcopy(whole)
    lost["metadata"][KEY]["fingerprints"] = "gone"
    assert promote(lost, Update.NEW)[0] == book
    del lost["metadata"]
    assert promote(lost, Update.NEW)[0]["metadata"] == {KEY: book["metadata"][KEY]}


def test_a_run_without_an_id_is_promoted_without_one() -> None:
    for run in (None, {}, {"run_id": 3}, "x"):
        book = notebook(stamped_cell(SOURCE))
        book["cells"][0]["outputs"][0]["metadata"][RUN_KEY] = run
        after, _ = promote(book, Update.NEW)
        assert set(meta_of(after)) == {"schema", "reference", "entry"}
        assert verdicts(after) == [Verdict.RECORDED]


def test_outputs_after_the_stamp_and_other_metadata_are_kept() -> None:
    book = notebook(stamped_cell("det.generate(prompt)", tags=["mine"]))
    book["cells"][0]["outputs"].append({"output_type": "stream", "name": "stdout", "text": "x"})
    book["cells"][0]["outputs"].append("odd")
    after, _ = promote(book, Update.NEW)
    assert after["cells"][0]["metadata"]["tags"] == ["mine"]
    assert meta_of(after)["recorded_run"] == "run-1"
    outputs = after["cells"][0]["outputs"]
    assert outputs[1:] == book["cells"][0]["outputs"][1:]
    assert outputs[0]["data"] == book["cells"][0]["outputs"][0]["data"]
    assert outputs[0]["metadata"][RUN_KEY] == {"run_id": "run-1"}


def test_strip_removes_everything_of_ours_and_nothing_else() -> None:
    plain = notebook(cell("1 + 1"), stamped_cell(SOURCE, tags=["mine"]), "odd", title="T")  # type: ignore[arg-type]
    plain["cells"].pop(2)
    stripped, changes = strip(promote(plain, Update.NEW)[0])
    text = json.dumps(stripped)
    assert '"detllm"' not in text
    assert '"detllm_run"' not in text
    assert stripped["metadata"] == plain["metadata"]
    assert stripped["cells"][1]["metadata"] == {"tags": ["mine"]}
    assert stripped["cells"][1]["outputs"][0]["data"] == plain["cells"][1]["outputs"][0]["data"]
    assert stripped["cells"][0] is plain["cells"][0]
    assert kinds(changes) == [ChangeKind.REMOVED, ChangeKind.REMOVED]


def test_strip_of_nothing_returns_the_same_object() -> None:
    book = notebook(cell("1"), {"cell_type": "markdown", "source": "x", "metadata": {}})
    book["cells"].append(None)  # type: ignore[arg-type]
    book["cells"].append({"cell_type": "code", "outputs": [3, {"metadata": 4}]})
    assert strip(book) == (book, ())
    assert strip(book)[0] is book


@pytest.mark.parametrize("book", [{}, {"nbformat": 4, "cells": None}, {"nbformat": 3}])
def test_strip_and_promote_refuse_what_is_no_notebook(book: Book) -> None:
    for change in (strip, lambda b: promote(b, Update.NEW)):
        with pytest.raises(NotebookError):
            change(book)


@st.composite
def books(draw: st.DrawFn) -> Book:
    """Return a notebook in any state: plain, stamped, promoted, re-run, cleared, edited."""
    cells = []
    for index in range(draw(st.integers(0, 4))):
        source = f"%%detgen c{index}\nx"
        stamp = make_stamp(source, [draw(st.sampled_from(["a", "b"]))], name=f"c{index}")
        cells.append(draw(st.sampled_from([cell("1"), stamped_cell(source, stamp)])))
    book = notebook(*copy.deepcopy(cells))
    if draw(st.booleans()):
        book, _ = promote(book, Update.NEW)
    for index, raw in enumerate(book["cells"]):
        state = draw(st.sampled_from(["same", "same", "cleared", "edited", "rerun", "markdown"]))
        raw = book["cells"][index] = copy.deepcopy(raw)
        if state == "cleared":
            raw["outputs"] = []
        elif state == "edited":
            raw["source"] = f"%%detgen c{index}\ny"
        elif state == "markdown":
            raw["cell_type"] = "markdown"
        elif state == "rerun" and raw["outputs"]:
            source = "".join(raw["source"])
            text = draw(st.sampled_from(["a", "b", "c"]))
            threads = draw(st.sampled_from([2, 4]))
            stamp = make_stamp(source, [text], name=f"c{index}", fields={"torch.threads": threads})
            raw["outputs"] = stamped_cell(source, stamp, run_id="run-9")["outputs"]
    return book


@given(books(), st.sampled_from(Update))
def test_promotion_is_idempotent_and_stripping_undoes_it(book: Book, update: Update) -> None:
    before = copy.deepcopy(book)
    once, _ = promote(book, update)
    again, changes = promote(once, update)
    assert book == before
    assert again is once
    assert not {ChangeKind.ADDED, ChangeKind.REPLACED, ChangeKind.REMOVED} & set(kinds(changes))
    assert strip(once)[0] == strip(book)[0]


@given(books(), st.sampled_from(Update))
def test_no_reference_of_a_code_cell_is_ever_lost(book: Book, update: Update) -> None:
    once, changes = promote(book, update)
    replaced = {change.label for change in changes if change.kind is ChangeKind.REPLACED}
    for before, after in zip(book["cells"], once["cells"], strict=True):
        held = before["metadata"].get(KEY, {}).get("reference")
        if held is None or before["cell_type"] != "code":
            continue
        meta = after["metadata"][KEY]
        assert held in (meta["reference"], meta.get("previous"))
        assert (held != meta["reference"]) <= bool(replaced)
        assert held["fingerprint_digest"] in once["metadata"][KEY]["fingerprints"]
        assert str(content_digest(held)) == held["digest"]


@given(books())
def test_new_never_overwrites_under_the_same_source(book: Book) -> None:
    once, _ = promote(book, Update.NEW)
    for before, after in zip(book["cells"], once["cells"], strict=True):
        held = before["metadata"].get(KEY, {}).get("reference")
        if held is not None and before["cell_type"] == "code":
            now = after["metadata"][KEY]["reference"]
            assert now == held or now["source"] != held["source"]


@given(books())
def test_after_all_every_stamped_cell_is_recorded_matching_or_refused(book: Book) -> None:
    once, changes = promote(book, Update.ALL)
    refused = {change.label for change in changes if change.kind is ChangeKind.REFUSED}
    for found in read_notebook(once).cells:
        if found.actual is not None and found.label not in refused:
            assert check_cell(found).verdict in {Verdict.RECORDED, Verdict.MATCH}
