"""What a cell shows is what its stamp renders to, by the renderer that the stamp names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from jupyter_detllm.core.canonical import digest_of
from jupyter_detllm.core.generation import Prompt
from jupyter_detllm.core.notebook import KEY, check_cell, read_notebook
from jupyter_detllm.core.promotion import Update, promote
from jupyter_detllm.core.shown import stamp_bundle, text_bundles
from jupyter_detllm.core.stamp import RENDERER, Stamp
from jupyter_detllm.core.verdict import Verdict
from jupyter_detllm.verify.service import check_notebook
from tests.builders import notebook, stamped_cell
from tests.fakes import Run

Book = dict[str, Any]
SOURCE = "%%detgen pair\nOne\n---\nTwo"
PROMPTS = (Prompt.chat("The capital of France?"), Prompt.chat("And <b>of</b> Italy?"))


def executed(stamp: Stamp) -> Book:
    """Return a promoted notebook of one cell, as the kernel leaves its outputs."""
    made = stamped_cell(SOURCE, stamp)
    output = {"output_type": "display_data", "metadata": {}}
    texts = [{**output, "data": data} for data in text_bundles(stamp)]
    made["outputs"] = [*texts, *made["outputs"]]
    return promote(notebook(made), Update.NEW)[0]


def pair() -> Stamp:
    return Run(prompts=PROMPTS, name="pair", source=SOURCE).stamp()


def edited(book: Book, change: Callable[[list[Any]], object]) -> Book:
    made = copy.deepcopy(book)
    change(made["cells"][0]["outputs"])
    return made


def joined(output: Any, kind: str) -> str:
    value = output["data"][kind]
    return value if isinstance(value, str) else "".join(value)


def replaced(index: int, kind: str, old: str, new: str) -> Callable[[list[Any]], object]:
    def change(outputs: list[Any]) -> None:
        text = joined(outputs[index], kind)
        assert old in text
        outputs[index]["data"][kind] = text.replace(old, new)

    return change


def stream(text: str) -> Book:
    return {"output_type": "stream", "name": "stdout", "text": text}


FORGED = {
    "text": replaced(0, "text/plain", "[prompt", "[Prompt"),
    "html": replaced(0, "text/html", "prompt 1/2", "prompt 1/3"),
    "text before": replaced(0, "text/plain", "[prompt 1", "No. [prompt 1"),
    "a format in front": lambda o: o[0]["data"].update({"text/markdown": "London"}),
    "a stream in its place": lambda o: o.__setitem__(0, stream("London")),
    "stamp line": replaced(-1, "text/plain", "pair", "pear"),
    "stamp details": replaced(-1, "text/html", "sha256:", "sha257:"),
    "stamp line only as HTML": lambda o: o[-1]["data"].pop("text/plain"),
}


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED)
def test_what_is_not_the_stamps_is_an_error(change: Callable[[list[Any]], object]) -> None:
    book = executed(pair())
    assert check_cell(read_notebook(book).cells[0]).verdict is Verdict.RECORDED
    outcome = check_cell(read_notebook(edited(book, change)).cells[0])
    assert outcome.verdict is Verdict.ERROR
    assert "run the cell again" in outcome.reasons[0]


FAIR = {
    "untouched": (lambda outputs: None, ()),
    "html removed": (lambda outputs: outputs[0]["data"].pop("text/html"), ()),
    "captured": (lambda outputs: outputs.pop(0), ()),
    "a stream before": (lambda o: o.insert(0, stream("ready")), ("1 other output",)),
    "two after": (lambda o: o.extend([stream("a"), stream("b")]), ("2 other outputs",)),
}


@pytest.mark.parametrize(("change", "uncovered"), FAIR.values(), ids=FAIR)
def test_other_outputs_are_reported_as_not_covered(
    change: Callable[[list[Any]], object], uncovered: tuple[str, ...]
) -> None:
    book = edited(executed(pair()), change)
    (found,) = read_notebook(book).cells
    assert (found.problems, found.uncovered) == ((), uncovered)
    notes = check_notebook("nb.ipynb", book).notes
    assert notes == tuple(f"not covered: {what} of cell 1" for what in uncovered)


def test_of_older_stamps_the_whole_text_is_compared_and_html_is_not() -> None:
    book = executed(pair().as_first())
    (found,) = read_notebook(book).cells
    assert found.problems == ()
    assert any("HTML" in what for what in found.uncovered)
    html = edited(book, FORGED["html"])
    assert check_cell(read_notebook(html).cells[0]).verdict is Verdict.RECORDED
    for change in (FORGED["text before"], FORGED["a stream in its place"]):
        forged = edited(book, change)
        assert check_cell(read_notebook(forged).cells[0]).verdict is Verdict.ERROR


def test_another_renderer_is_not_guessed() -> None:
    later = replace(pair(), renderer=RENDERER + 1)
    outcome = check_cell(read_notebook(executed(later)).cells[0])
    assert outcome.verdict is Verdict.ERROR
    assert "another version" in outcome.reasons[0]


def test_a_renderer_never_changes() -> None:
    # A failure here means that notebooks would be refused: raise RENDERER, and keep the old one.
    stamp = pair()
    shown = [*text_bundles(stamp), stamp_bundle(stamp, str(stamp.digest))]
    assert (RENDERER, str(digest_of(shown))[7:23]) == (1, "ba5342ca0062feda")


def test_a_stamp_read_back_renders_alike() -> None:
    stamp = pair()
    stored = executed(stamp)["cells"][0]["metadata"][KEY]["reference"]
    (found,) = read_notebook(executed(stamp)).cells
    assert found.actual is not None
    assert text_bundles(found.actual) == text_bundles(stamp)
    assert stamp_bundle(found.actual, stored["digest"]) == stamp_bundle(stamp, stored["digest"])
