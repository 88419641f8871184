"""The judge gives what `check` and `stamp` give, whatever it kept of earlier requests."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_detllm import __version__
from jupyter_detllm.core.notebook import KEY, RUN_KEY
from jupyter_detllm.core.promotion import Update, promote
from jupyter_detllm.errors import UsageError
from jupyter_detllm.server.judge import MAX_BODY, MAX_CELLS, Judge, UnknownCellsError
from jupyter_detllm.verify.service import check_notebook
from tests.builders import cell, make_stamp, notebook, promoted, stamped_cell, with_actual
from tests.hostile import HOSTILE
from tests.judging import Page, patched, request
from tests.unit.core.test_promotion import books

Book = dict[str, Any]
SOURCE = "%%detgen haiku\nWrite a haiku."


def verdicts(answer: Book) -> list[str]:
    return [row["verdict"] for row in answer["cells"]]


def assert_as_python_does(answer: Book, before: Book, update: str | None = None) -> None:
    """Assert that an answer holds what the commands `check` and `stamp` would find."""
    after = promote(before, Update(update))[0] if update else before
    assert patched(before, answer["patch"]) == after
    report = check_notebook("", after)
    assert [(row["number"], row["verdict"], row["standing"]) for row in answer["cells"]] == [
        (found.view.number, found.verdict, found.standing) for found in report.cells
    ]
    assert len(answer["problems"]) == len(report.problems)
    assert answer["in_order"] is (promote(after, Update.NEW, ())[0] is after)


_FEW = settings(max_examples=40, deadline=None)


@_FEW
@given(st.lists(st.tuples(books(), st.sampled_from([None, "new", "all"])), min_size=1, max_size=4))
def test_what_was_kept_changes_no_answer(found: list[tuple[Book, str | None]]) -> None:
    page = Page(Judge().answer)
    for book, update in found:
        answer = page.ask(book, update=update)
        assert_as_python_does(answer, book, update)
        fresh = Page(Judge().answer).ask(book, update=update)
        assert {**answer, "digests": 0} == {**fresh, "digests": 0}
        assert page.ask(book, update=update)["cells"] == answer["cells"]


def test_only_what_changed_is_sent_again() -> None:
    page = Page(Judge().answer)
    book = promoted(*(stamped_cell(f"%%detgen c{i}\nx") for i in range(5)))
    assert len(page.ask(book)["digests"]) == 5
    rerun = with_actual(book, 3, make_stamp("%%detgen c2\nx", ["other"], name="c2"))
    answer = page.ask(rerun)
    assert len(page.sent) == 1
    assert verdicts(answer) == ["recorded"] * 2 + ["diverged"] + ["recorded"] * 2


def test_a_cell_is_read_again_once_the_notebook_holds_its_fingerprint() -> None:
    page = Page(Judge().answer)
    stamp = make_stamp(SOURCE, ["other"], name="haiku", fields={"engine.dtype": "float32"})
    book = with_actual(promoted(stamped_cell(SOURCE)), 1, stamp)
    without = {**book, "metadata": {KEY: {**book["metadata"][KEY], "fingerprints": {}}}}
    (unknown,) = page.ask(without)["cells"]
    assert ["cause", "fingerprint"] in [[a, b.split(":")[0]] for a, b in unknown["lines"]]
    (known,) = page.ask(book)["cells"]
    assert page.sent == []
    assert ["cause", "engine.dtype: bfloat16 -> float32"] in known["lines"]


def test_names_and_numbers_follow_from_where_a_cell_stands() -> None:
    page = Page(Judge().answer)
    one, two = stamped_cell(SOURCE), stamped_cell(SOURCE)
    two["id"] = "other"
    page.ask(notebook(one, two))
    for cells in ([two, one], [one], [two], [cell("1"), two, one]):
        book = notebook(*cells)
        answer = page.ask(book)
        assert_as_python_does(answer, book)
        assert [row["number"] for row in answer["cells"]] == [
            number for number, found in enumerate(cells, 1) if found in (one, two)
        ]


def test_only_the_chosen_cells_are_promoted() -> None:
    book = notebook(*(stamped_cell(f"%%detgen c{i}\nx") for i in range(3)))
    answer = Page(Judge().answer).ask(book, update="new", chosen=[2])
    assert [number for number, _ in answer["patch"]["cells"]] == [2]
    assert len(answer["patch"]["metadata"]["cells"]) == 1
    assert [change["label"] for change in answer["changes"]] == ["cell 2 (c1)"]
    assert verdicts(answer) == ["unstamped", "recorded", "unstamped"]


def test_nothing_is_promoted_in_a_notebook_of_another_schema() -> None:
    book = promoted(stamped_cell(SOURCE))
    book["metadata"][KEY]["schema"] = "detllm.notebook/9"
    answer = Page(Judge().answer).ask(book, update="all")
    assert "detllm.notebook/9" in answer["refused"]
    assert answer["patch"] is None
    assert answer["in_order"] is False
    assert len(answer["problems"]) == 1


def test_a_row_says_what_the_panel_shows() -> None:
    stamp = replace(make_stamp(SOURCE, ["An old well."], name="haiku"), self_test="passed")
    book = with_actual(promoted(stamped_cell(SOURCE)), 1, stamp)
    (row,) = Page(Judge().answer).ask(book)["cells"]
    assert row["label"] == "cell 1 (haiku)"
    assert row["text"] == "diverged, not accepted by policy tokens (default)"
    assert (row["standing"], row["acceptable"], row["promotable"]) == ("failed", True, False)
    assert row["source"] == str(stamp.source)
    labels = [label for label, _ in row["lines"]]
    assert labels[0] == "cause"
    assert {"where", "recorded", "now", "margin", "stamp", "self-test"} <= set(labels)
    assert "next" not in labels


def test_late_controls_that_change_results_are_named() -> None:
    late = ("CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED")
    book = promoted(stamped_cell(SOURCE, make_stamp(SOURCE, name="haiku", late=late)))
    assert Page(Judge().answer).ask(book)["late"] == ["CUBLAS_WORKSPACE_CONFIG"]


def test_another_version_in_the_kernel_is_named_for_what_ran_just_now() -> None:
    book = notebook(stamped_cell(SOURCE), stamped_cell("%%detgen b\nx"), cell("1"))
    for raw, version in zip(book["cells"], ("9.9.9\n<b>", __version__), strict=False):
        raw["outputs"][0]["metadata"][RUN_KEY]["version"] = version
    page = Page(Judge().answer)
    (note,) = page.ask(book, ran=[1, 2, 3, 99, -1])["notes"]
    assert note.startswith("the kernel has jupyter-detllm 9.9.9\\n<b>, the Jupyter server has ")
    assert __version__ in note
    assert page.ask(book, ran=[2])["notes"] == []
    assert page.ask(book)["notes"] == []


def test_what_is_kept_is_bounded_and_asked_for_again() -> None:
    book = promoted(*(stamped_cell(f"%%detgen c{i}\nx") for i in range(4)))
    size = max(len(json.dumps(raw)) for raw in book["cells"])
    judge = Judge(kept_bytes=2 * size)
    page = Page(judge.answer)
    first = page.ask(book)
    with pytest.raises(UnknownCellsError):
        page.ask(book)
    page.digests = {}
    assert page.ask(book)["cells"] == first["cells"]
    assert judge._size <= 2 * size
    assert judge._size == sum(kept.size for kept in judge._cells.values())
    # What was used last is kept.
    assert list(judge._cells) == first["digests"][2:]


def test_a_digest_is_that_of_the_content_and_not_what_a_page_claims() -> None:
    judge = Judge()
    (digest,) = Page(judge.answer).ask(notebook(stamped_cell(SOURCE)))["digests"]
    assert len(digest) == 64
    with pytest.raises(UnknownCellsError):
        judge.answer(request(notebook())[0].replace(b"[]", json.dumps(["0" * 64]).encode()))


HEADS: list[tuple[Any, str]] = [
    ([], "does not speak protocol 2"),
    ({}, "does not speak protocol 2"),
    ({"protocol": 1, "cells": []}, "reload the page"),
    ({"protocol": 2, "cells": [], "path": "../../etc/passwd"}, "unknown key 'path'"),
    ({"protocol": 2}, "'cells' is malformed"),
    ({"protocol": 2, "cells": {}}, "'cells' is malformed"),
    ({"protocol": 2, "cells": [0]}, "'cells' is malformed"),
    ({"protocol": 2, "cells": [-1]}, "'cells' is malformed"),
    ({"protocol": 2, "cells": [True]}, "'cells' is malformed"),
    ({"protocol": 2, "cells": ["x"] * (MAX_CELLS + 1)}, "'cells' is malformed"),
    ({"protocol": 2, "cells": [], "update": "some"}, "'update' is malformed"),
    ({"protocol": 2, "cells": [], "update": ["new"]}, "'update' is malformed"),
    ({"protocol": 2, "cells": [], "chosen": "1"}, "'chosen' is malformed"),
    ({"protocol": 2, "cells": [], "ran": ["1"]}, "'ran' is malformed"),
    ({"protocol": 2, "cells": [], "ran": None}, "'ran' is malformed"),
]


@pytest.mark.parametrize(("head", "message"), HEADS)
def test_what_is_no_request_is_refused_on_one_line(head: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        Judge().answer(json.dumps(head).encode())
    assert "\n" not in str(caught.value)


BODIES = [
    b"",
    b"{",
    b"\xff\xfe",
    b"[" * 200_000,
    b'{"protocol": 2, "cells": [0]}\n[]',
    b'{"protocol": 2, "cells": [0]}\n"x"',
    b'{"protocol": 2, "cells": [0]}\n{"a": ',
    b'{"protocol": 2, "cells": [0]}\n{"a": ' + b"[" * 200_000,
    b'{"protocol": 2, "cells": [0]}\n{"a": ' + b"9" * 10_000 + b"}",
    b" " * (MAX_BODY + 1),
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_bodies_that_cannot_be_read_are_refused_on_one_line(body: bytes) -> None:
    judge = Judge()
    with pytest.raises(UsageError) as caught:
        judge.answer(body)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert judge._size == 0


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("odd", [None, 3, "x", [], {"schema": "x"}, {"a": deep(400)}, "\ud800"])
def test_odd_metadata_is_judged_as_python_judges_it(odd: Any) -> None:
    output = {"output_type": "display_data", "data": {}, "metadata": {KEY: odd, RUN_KEY: odd}}
    raw = cell("%%detgen\nx", outputs=[output])
    raw["metadata"] = {KEY: odd, "tags": odd}
    book = notebook(raw, stamped_cell(SOURCE))
    book["metadata"][KEY] = odd
    answer = Page(Judge().answer).ask(book, update="all")
    if not isinstance(odd, str | list | int | None.__class__):
        assert verdicts(answer)[0] == "error"
    json.dumps(answer)


def test_what_a_notebook_says_is_made_visible_and_cut() -> None:
    cells = []
    for index, text in enumerate(HOSTILE):
        source = f"x{index} = generate()"
        stamp = make_stamp(source, [text], prompts=[text], fields={"engine.dtype": text[:300]})
        long = replace(stamp, name=text * 20, self_test=text * 50)
        fresh = replace(long, model=replace(long.model, name=text * 20))
        cells.append(with_actual(promoted(stamped_cell(source, long)), 1, fresh)["cells"][0])
    answer = Page(Judge().answer).ask(notebook(*cells))
    rows = answer["cells"]
    assert len(rows) == len(HOSTILE)
    shown = [row["label"] for row in rows] + [text for row in rows for _, text in row["lines"]]
    for text in shown:
        assert len(text) <= 250
        assert text.translate(dict.fromkeys(map(ord, "\u3000\u200d\ufe0e\ufe0f"))).isprintable()


def test_threads_share_a_judge() -> None:
    judge = Judge(kept_bytes=20_000)
    found = [
        promoted(*(stamped_cell(f"%%detgen c{i}\nx", run_id=f"r{k}") for i in range(6)))
        for k in range(4)
    ]
    expected = [Page(Judge().answer).ask(book)["cells"] for book in found]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(5):
            if Page(judge.answer).ask(found[number])["cells"] != expected[number]:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert judge._size == sum(kept.size for kept in judge._cells.values()) <= 20_000
