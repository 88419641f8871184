"""A cell that had a reference is seen when it is gone, whatever took it away."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.cli import main
from jupyter_detllm.core.notebook import KEY, CellView, check_cell, read_notebook
from jupyter_detllm.core.promotion import ChangeKind, Update, promote, store_once
from jupyter_detllm.core.verdict import Verdict
from jupyter_detllm.server.judge import PROTOCOL, Judge
from jupyter_detllm.verify.report import Standing, parse_accept
from jupyter_detllm.verify.service import check_paths
from tests.builders import cell, make_stamp, notebook, promoted, stamped_cell, with_actual

Book = dict[str, Any]
ONE, TWO = "%%detgen one\nWrite a haiku.", "%%detgen two\nWrite two."
THREE = "%%detgen three\nx"


def book_of(*sources: str) -> Book:
    """Return a notebook whose stamped cells were all run again since: every verdict is match.

    What equals its reference is stored once, as `rerun --save` and `stamp` leave it.
    """
    stamps = [make_stamp(source, name=source.split()[1]) for source in sources]
    book = promoted(*map(stamped_cell, sources, stamps))
    for number, stamp in enumerate(stamps, start=1):
        book = with_actual(book, number, stamp)
    return copy.deepcopy(store_once(book))


def old_form(book: Book) -> Book:
    """Return the notebook as it was stamped before there was a list by cell."""
    out = copy.deepcopy(book)
    cells = [c for c in read_notebook(out).cells if c.reference is not None]
    shared = out["metadata"][KEY]
    del shared["cells"]
    shared["schema"] = "detllm.notebook/1"
    shared["model"] = cells[0].reference.model.to_json()  # type: ignore[union-attr]
    shared["generations"] = [str(c.reference.generation_digest) for c in cells if c.reference]
    for raw in out["cells"]:
        raw["metadata"].get(KEY, {}).pop("entry", None)
    return out


def delete(book: Book) -> None:
    del book["cells"][1]


def become(kind: str) -> Callable[[Book], None]:
    def change(book: Book) -> None:
        raw = book["cells"][1]
        raw["cell_type"] = kind
        del raw["outputs"], raw["execution_count"]

    return change


def become_plain_text(book: Book) -> None:
    become("markdown")(book)
    del book["cells"][1]["metadata"][KEY]


def lose_both(book: Book) -> None:
    book["cells"][1]["outputs"] = []
    del book["cells"][1]["metadata"][KEY]


def lose_the_reference(book: Book) -> None:
    """Remove the reference of a cell that was run since: its output holds a whole stamp."""
    del book["cells"][1]["metadata"][KEY]
    book["cells"][1] = with_actual(book, 2, make_stamp(TWO, name="two"))["cells"][1]


def become_other_code(book: Book) -> None:
    lose_both(book)
    book["cells"][1]["source"] = "print(1)"


def lose_the_stamp(book: Book) -> None:
    book["cells"][1]["outputs"] = []


WAYS = {
    "deleted": delete,
    "markdown": become("markdown"),
    "raw": become("raw"),
    "markdown without metadata": become_plain_text,
    "no stamp, no reference": lose_both,
    "no reference": lose_the_reference,
    "other code": become_other_code,
    "no stamp": lose_the_stamp,
}


def lost_cells(book: Book) -> list[CellView]:
    return [c for c in read_notebook(book).judged if check_cell(c).verdict is Verdict.STRIPPED]


@pytest.mark.parametrize("form", ["old", "new"])
@pytest.mark.parametrize("way", WAYS)
def test_a_cell_that_is_lost_is_listed_and_ends_with_3(
    way: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = book_of(ONE, TWO)
    book = old_form(made) if form == "old" else made
    assert not lost_cells(book)
    WAYS[way](book)
    (lost,) = lost_cells(book)
    assert lost.lost or way == "no stamp"
    path = tmp_path / "nb.ipynb"
    path.write_text(json.dumps(book))
    assert check_paths([path]).exit_code == 3
    hook = parse_accept("recorded,unstamped")
    assert check_paths([path], accept=hook).exit_code == 3
    assert check_paths([path], accept=hook | {Standing.STRIPPED}).exit_code == 0
    assert main(["check", str(path)]) == 3
    shown = capsys.readouterr().out
    assert "stripped" in shown
    assert "every cell was compared" not in shown


@pytest.mark.parametrize("way", [w for w in WAYS if w not in ("no stamp", "no reference")])
def test_a_deletion_is_accepted_by_a_command(way: str, tmp_path: Path) -> None:
    for book in (book_of(ONE, TWO), old_form(book_of(ONE, TWO))):
        WAYS[way](book)
        path = tmp_path / "nb.ipynb"
        path.write_text(json.dumps(book))
        assert main(["stamp", str(path)]) == 3
        assert json.loads(path.read_text()) == book
        assert main(["check", str(path)]) == 3
        assert main(["stamp", "--forget-lost", str(path)]) == 0
        assert check_paths([path]).verdicts.get(Verdict.STRIPPED) is None
        path.write_text(json.dumps(book))
        main(["stamp", "--update", "all", str(path)])
        assert check_paths([path]).verdicts.get(Verdict.STRIPPED) is None


def test_a_lost_reference_is_not_replaced_by_the_next_output_unless_all_is_asked() -> None:
    book = book_of(ONE, TWO)
    lose_the_reference(book)
    after, changes = promote(book, Update.NEW)
    assert after is book
    assert [c.kind for c in changes] == [ChangeKind.UNCHANGED, ChangeKind.LOST]
    after, changes = promote(book, Update.ALL)
    assert [c.kind for c in changes] == [ChangeKind.UNCHANGED, ChangeKind.ADDED]
    assert [check_cell(c).verdict for c in read_notebook(after).judged] == [
        Verdict.MATCH,
        Verdict.RECORDED,
    ]


@pytest.mark.parametrize("way", [w for w in WAYS if w != "no stamp"])
def test_storing_another_cell_once_does_not_touch_what_was_lost(way: str) -> None:
    book = book_of(ONE, TWO)
    WAYS[way](book)
    run_again = with_actual(book, 1, make_stamp(ONE, name="one"))
    after, changes = promote(run_again, Update.NEW)
    assert [c.kind for c in changes] == [ChangeKind.UNCHANGED, ChangeKind.LOST]
    assert after == book


def test_what_was_lost_stays_listed_while_others_are_stamped_and_comes_back() -> None:
    for book in (book_of(ONE, TWO), old_form(book_of(ONE, TWO))):
        kept = book["cells"][1]
        delete(book)
        drifted = with_actual(book, 1, make_stamp(ONE, ["A new pond."], name="one"), "run-3")
        drifted["cells"].append(stamped_cell(THREE, make_stamp(THREE, ["3"], name="three")))
        after, _ = promote(drifted, Update.NEW)
        assert [c.deleted for c in read_notebook(after).lost] == [True]
        back = {**after, "cells": [*after["cells"], kept]}
        assert not read_notebook(back).lost


def test_moving_pasting_and_stamping_again_lose_nothing() -> None:
    book = book_of(ONE, TWO)
    book["cells"].reverse()
    book["cells"][0]["id"] = "pasted"
    assert not lost_cells(book)
    fresh = with_actual(book, 1, make_stamp(TWO, ["Other."], name="two"), "run-3")
    after, _ = promote(fresh, Update.ALL)
    assert after["metadata"][KEY] == book["metadata"][KEY]
    assert not read_notebook(after).lost


def test_a_copy_gets_an_entry_of_its_own_when_it_is_stamped() -> None:
    source = "%%detgen\nx"
    book = promoted(stamped_cell(source))
    again = {**copy.deepcopy(book["cells"][0]), "id": "copy"}
    doubled = {**book, "cells": [*book["cells"], again]}
    stamp = make_stamp(source, ["Other."])
    after, _ = promote(with_actual(doubled, 2, stamp), Update.ALL)
    assert set(after["metadata"][KEY]["cells"]) == {book["cells"][0]["id"], "copy"}


def test_notebooks_without_cell_ids_are_listed_by_source() -> None:
    book = notebook(stamped_cell(ONE), stamped_cell(TWO))
    for raw in book["cells"]:
        del raw["id"]
    listed, _ = promote(book, Update.NEW)
    assert len(listed["metadata"][KEY]["cells"]) == 2
    gone = copy.deepcopy(listed)
    delete(gone)
    assert [c.name for c in read_notebook(gone).lost] == ["two"]


def test_an_open_notebook_lists_what_was_deleted() -> None:
    book = book_of(ONE, TWO)
    delete(book)
    asked = {"protocol": PROTOCOL, "cells": [0], "metadata": book["metadata"][KEY]}
    asked |= {"update": None, "chosen": None, "ran": []}
    body = "\n".join(map(json.dumps, (asked, book["cells"][0]))).encode()
    rows = Judge().answer(body)["cells"]
    assert [(row["verdict"], row["number"]) for row in rows] == [("match", 1), ("stripped", 2)]
    assert rows[1]["label"].startswith("deleted cell")


@pytest.mark.parametrize("cells", [3, [], "x", None])
def test_a_list_that_is_none_is_an_error(cells: object) -> None:
    book = book_of(ONE)
    book["metadata"][KEY]["cells"] = cells
    assert read_notebook(book).problems


def test_a_stripped_cell_is_its_own_state() -> None:
    book = book_of(ONE)
    book["cells"].append(cell("%%detgen new\nx"))
    lose = copy.deepcopy(book)
    lose["cells"][0]["outputs"] = []
    assert [check_cell(c).verdict for c in read_notebook(lose).judged] == [
        Verdict.STRIPPED,
        Verdict.UNSTAMPED,
    ]


@pytest.mark.parametrize("line", ["%detllm stamps --emit one", "x = 1\n%detllm stamps --emit"])
def test_a_cell_that_shows_the_stamp_of_another_can_be_verified(line: str) -> None:
    stamp = make_stamp(ONE, name="one")
    shown = {**stamped_cell(ONE, stamp), "id": "shown", "source": line}
    book = promoted(stamped_cell(ONE, stamp), shown)
    assert [check_cell(c).verdict for c in read_notebook(book).cells] == [Verdict.RECORDED] * 2
    again = copy.deepcopy(with_actual(book, 1, stamp))
    again["cells"][1]["outputs"] = again["cells"][0]["outputs"]
    assert [check_cell(c).verdict for c in read_notebook(again).cells] == [Verdict.MATCH] * 2
    other = make_stamp(ONE, ["A new pond."], name="one")
    again["cells"][1]["outputs"] = with_actual(book, 1, other)["cells"][0]["outputs"]
    assert check_cell(read_notebook(again).cells[1]).verdict is Verdict.DIVERGED
    again["cells"][1]["source"] = "%detllm stamps"
    assert check_cell(read_notebook(again).cells[1]).verdict is Verdict.STALE
