"""The panel's content, its static forms and the widget's kernel side."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.core.fields import Group
from jupyter_detllm.core.levels import Level
from jupyter_detllm.engines.selftest import CompositionRow, Form, SelfTest
from jupyter_detllm.invariance.base import KernelRow
from jupyter_detllm.kernel import panel_widget as panels
from jupyter_detllm.kernel.live import RECORDED
from jupyter_detllm.kernel.panel import (
    CellRow,
    Content,
    FieldRow,
    content_of,
    panel_html,
    panel_text,
)
from jupyter_detllm.kernel.session import Session, SessionSettings
from jupyter_detllm.kernel.stamping import StampRecord
from tests.fakes import Run, forget_seed
from tests.hostile import HOSTILE

FOLDER = Path(panels.__file__).parent


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    """Give back the process as it was."""
    before, state = dict(os.environ), random.getstate()
    yield
    forget_seed()
    random.setstate(state)
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def session() -> Session:
    made = Session()
    made.use("fake", {}, SessionSettings(seed=7, level=Level.REPEATABLE))
    one, two = Run(name="haiku").stamp(), Run(name="").stamp()
    made.ledger.add(StampRecord(one, one.to_json(), {"run_id": "r"}, "cell-1", 0, live=RECORDED))
    made.ledger.add(StampRecord(two, two.to_json(), {"run_id": "s"}, None, 0))
    return made


def test_the_content_is_the_session(session: Session) -> None:
    content = content_of(session)
    fingerprint = session.fingerprint()
    assert content.digest == str(fingerprint.digest)
    assert content.heading.startswith("level repeatable, seed 7: ")
    assert content.engine.startswith("engine ready: fake, level repeatable")
    assert content.late == ()
    shown = {row.name: row for row in content.fields}
    for name, value in fingerprint.numerics.items():
        assert (shown[name].value, shown[name].role) == (str(value), "numerics")
    assert {row.role for row in content.fields} == {"identity", "numerics", "informational"}
    assert "hardware.gpu_clocks" not in shown
    assert all(row.why for row in content.fields)
    groups = list(dict.fromkeys(row.group for row in content.fields))
    assert groups == [group.value for group in Group if group.value in groups]
    assert {"software", "hardware", "engine", "controls", "model"} <= set(groups)
    first, second = content.cells
    assert (first.label, first.cell_id, first.state) == ("haiku", "cell-1", "recorded")
    assert (second.label, second.cell_id, second.state) == ("#2", "", "")
    assert second.result == "not compared"


def test_before_anything_it_says_how_to_begin() -> None:
    content = content_of(Session())
    assert content.heading == "nothing is set up yet. Try: %detllm --seed 42"
    assert content.engine == "engine: none is running. Try: %detllm use demo"
    assert "stamped cells: none yet" in panel_text(content)


def test_self_test_results_stand_line_by_line(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert content_of(session).self_test == ()
    rows = (
        CompositionRow("alone", 4, 4, 4),
        CompositionRow("<b>other\x1b", 4, 3, 2, first="token 3 of a"),
    )
    test = SelfTest("m", Form.SHORT, rows)
    monkeypatch.setattr(session.engine, "self_test", test, raising=False)
    content = content_of(session)
    _, *lines = content.self_test
    assert content.self_test[0].endswith(
        "6 of 8 completions bitwise equal in 2 compositions; the level does not hold "
        "(<b>other\\x1b: token 3 of a)"
    )
    assert lines == ["alone: 4 of 4 equal", "<b>other\\x1b: 2 of 4 equal; token 3 of a"]
    assert "\n             alone: 4 of 4 equal\n             <b>other" in panel_text(content)
    assert "&lt;b&gt;other" in panel_html(content)
    monkeypatch.setattr(session.engine, "self_test", replace(test, cached=True))
    assert content_of(session) == content
    kernels = (KernelRow("linear", 4, 3, "row 2"),)
    monkeypatch.setattr(session.engine, "self_test", replace(test, kernels=kernels))
    assert content_of(session).self_test[1] == "linear: 3 of 4 equal; row 2"


def test_why_a_level_was_not_had_stands_in_place_of_a_self_test(session: Session) -> None:
    session.notice = "no method is proven here"
    assert content_of(session).self_test == ("no method is proven here",)


def test_the_static_forms_are_stable_and_hold_everything(session: Session) -> None:
    content = content_of(session)
    text, markup = panel_text(content), panel_html(content)
    again = content_of(session)
    assert (text, markup) == (panel_text(again), panel_html(again))
    assert os.environ["HOME"] not in text
    for row in content.fields:
        assert row.name in text
        assert row.value in text
        assert row.name in markup
    assert re.search(r"^  haiku +\w{12} +\d+ tokens  recorded$", text, re.MULTILINE)
    assert content.digest in text
    assert content.digest in markup


class Safe(HTMLParser):
    """Asserts that markup has no tag and no attribute that does anything."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in {"div", "pre", "details", "summary"}
        assert {name for name, _ in attrs} <= {"style", "dir"}


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_in_the_content_is_markup(text: str) -> None:
    content = Content(
        heading=text,
        engine=text,
        self_test=(text,),
        late=(text,),
        digest=text,
        fields=(FieldRow(text, text, text, text, text),),
        cells=(CellRow(text, text, text, text, text, text),),
    )
    parser = Safe()
    parser.feed(panel_html(content))
    parser.close()


def test_the_session_escapes_what_it_shows(session: Session) -> None:
    hostile = Run(name="x").stamp()
    hostile = replace(hostile, name="\x1b[31m</pre><script>\u202e")
    session.ledger.add(StampRecord(hostile, hostile.to_json(), {}, "<i>", 0))
    shown = content_of(session).cells[-1].label
    assert shown == "\\x1b[31m</pre><script>\\u202e"


@pytest.fixture
def opened(session: Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.setattr(panels, "_open", {})
    yield session
    for widget in panels._open.values():
        widget.close()


def view(session: Session, cell_id: str | None) -> tuple[Any, dict[str, Any]]:
    data, _ = panels.open_panel(session, content_of(session), cell_id)
    return list(panels._open.values())[-1], data


def test_the_widget_holds_the_content_and_little_else(opened: Session) -> None:
    widget, data = view(opened, "cell-1")
    (key,) = data
    assert key == "application/vnd.jupyter.widget-view+json"
    assert data[key]["model_id"] == widget.model_id
    assert widget.data == content_of(opened).to_json()
    json.dumps(widget.data)
    # nbclient stores a widget's source in the notebook.
    assert len(widget._esm) + len(widget._css) < 12_500


def test_a_cell_has_one_panel(opened: Session) -> None:
    first, _ = view(opened, "cell-1")
    second, _ = view(opened, "cell-1")
    third, _ = view(opened, None)
    assert first.comm is None
    assert list(panels._open.values()) == [second, third]
    second.close()
    panels.refresh_panels(opened)
    assert list(panels._open.values()) == [third]


def test_panels_follow_the_ledger_and_what_was_accepted(opened: Session) -> None:
    widget, _ = view(opened, "cell-1")
    stamp = Run(name="more").stamp()
    opened.ledger.add(StampRecord(stamp, stamp.to_json(), {}, "cell-9", 0))
    panels.refresh_panels(opened)
    assert [cell["label"] for cell in widget.data["cells"]] == ["haiku", "#2", "more"]
    cells = [["cell-9", stamp.generation_digest.short], 3, ["x" * 65, "x"], ["x", []], ["x"]]
    message = {"kind": "recorded", "cells": cells}
    widget._handle_custom_msg(message, [])
    assert widget.data["cells"][-1]["state"] == "recorded"


@pytest.mark.parametrize(
    "message",
    [None, 3, "x", [], {}, {"kind": "else"}, {"kind": ["recorded"]}, {"kind": "recorded"}]
    + [{"kind": "recorded", "cells": value} for value in ("cell-1", {"0": "cell-1"}, [[]], None)],
)
def test_other_messages_change_nothing(opened: Session, message: object) -> None:
    widget, _ = view(opened, None)
    before = widget.data
    widget._handle_custom_msg(message, [])
    assert widget.data == before
    assert content_of(opened).cells[1].state == ""


def test_data_becomes_text_nodes_only() -> None:
    source = (FOLDER / "panel.js").read_text(encoding="utf-8")
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval", "http"):
        assert way not in source.replace('"http://www.w3.org/2000/svg"', "")


def test_no_colour_is_fixed() -> None:
    style = (FOLDER / "panel.css").read_text(encoding="utf-8")
    colours = re.findall(r"(?:color|background|border[\w-]*|outline): *([^;]+);", style)
    assert colours
    for value in colours:
        bare = re.sub(
            r"var\(--jp-[\w-]+, *(?:inherit|currentColor|Field|FieldText|Highlight)\)", "", value
        )
        assert re.fullmatch(r"(?:[\d.]+px|solid|collapse|\s)*", bare), value
