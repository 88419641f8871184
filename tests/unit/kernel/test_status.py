"""The status as text: complete, stable, without the user's name."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jupyter_detllm.controls.environ import ENV_CONTROLS
from jupyter_detllm.controls.ledger import ControlEntry, ControlState
from jupyter_detllm.core.levels import Level
from jupyter_detllm.engines.base import EngineSpec, ShutdownReport
from jupyter_detllm.kernel import commands
from jupyter_detllm.kernel.live import RECORDED
from jupyter_detllm.kernel.session import Session, SessionSettings
from jupyter_detllm.kernel.stamping import StampRecord
from jupyter_detllm.kernel.status import release_text, setup_text, stamps_text, status_text
from jupyter_detllm.probes.process import home_and_user
from tests.fakes import Run, forget_seed


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give back the process as it was; for a control it is never too late meanwhile."""
    for name in ("torch", "vllm"):  # what another test of this process has imported
        monkeypatch.delitem(sys.modules, name, raising=False)
    before, state = dict(os.environ), random.getstate()
    yield
    forget_seed()
    random.setstate(state)
    os.environ.clear()
    os.environ.update(before)


def test_before_anything_it_says_how_to_begin() -> None:
    assert status_text(Session()) == (
        "detllm: nothing is set up yet. Try: %detllm --seed 42\n"
        "engine: none is running. Try: %detllm use demo"
    )


def test_every_control_stands_with_what_became_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASH_ATTENTION")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    session = Session()
    session.configure(SessionSettings(seed=9, level=Level.SEEDED))
    text = status_text(session)
    assert session.controls is not None
    for control in ENV_CONTROLS:
        entry = session.controls.entry(control.name)
        assert entry is not None
        (row,) = [r for r in text.splitlines() if r.startswith(f"  {control.name} ")]
        assert entry.reason in row
        assert str(entry.state).replace("_", " ") in row
    assert f"level    seeded: {Level.SEEDED.promise}" in text
    assert "seed     9" in text
    assert "no effect: VLLM_ATTENTION_BACKEND: this vLLM does not read it; use %detllm use" in text
    assert "set by you: OMP_NUM_THREADS=1" in setup_text(session)
    assert text == status_text(session)


def test_late_controls_stand_with_the_way_out() -> None:
    session = Session()
    session.configure(SessionSettings())
    assert session.controls is not None
    late = ControlEntry("OMP_NUM_THREADS", ControlState.LATE, "2", "4", "must be set before it")
    session.controls = replace(session.controls, entries=(*session.controls.entries, late))
    for shown in (status_text(session), setup_text(session)):
        assert "too late: OMP_NUM_THREADS must be set before it" in shown


def test_a_control_that_changes_no_result_raises_no_alarm() -> None:
    """PYTHONHASHSEED is late in every session, and nothing depends on it."""
    session = Session()
    session.configure(SessionSettings())
    assert session.controls is not None
    assert "PYTHONHASHSEED" not in session.controls.late
    assert "PYTHONHASHSEED" not in setup_text(session)
    assert "too late" not in status_text(session)


def test_the_log_is_named_without_the_users_name(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session()
    session.use("fake", {}, SessionSettings())
    monkeypatch.setattr(session.engine, "log_path", Path.home() / "state" / "x.log", raising=False)
    text = status_text(session)
    assert "log      ~/state/x.log" in text
    assert str(Path.home()) not in text


def test_secret_options_and_the_home_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    home_and_user.cache_clear()
    session = Session()
    session.use("fake", {}, SessionSettings())
    model = f"{os.environ['HOME']}/models/mine"
    session.spec = EngineSpec(model, options={"hf_token": "hunter2hunter2", "max_num_seqs": 4})
    shown = status_text(session)
    home_and_user.cache_clear()
    assert "hunter2" not in shown
    assert os.environ["HOME"] not in shown
    assert "ready: ~/models/mine (fake), level repeatable, hf_token=<redacted>" in shown
    assert "max_num_seqs=4" in shown


def test_stamped_cells_are_listed_in_order_with_their_digests() -> None:
    session = Session()
    one, two = Run(name="haiku").stamp(), Run(name="").stamp()
    session.ledger.add(StampRecord(one, one.to_json(), {"run_id": "r"}, None, 0))
    session.ledger.add(StampRecord(two, two.to_json(), {"run_id": "s"}, "c", 0, live=RECORDED))
    head, first, second = stamps_text(session.ledger).splitlines()
    assert head == "stamped cells"
    assert first.split()[:2] == ["haiku", one.generation_digest.short]
    assert first.endswith("not compared")
    assert second.split()[:2] == ["#2", two.generation_digest.short]
    assert second.endswith("recorded")


def test_what_is_sent_to_be_put_back_has_a_bound_and_starts_with_the_latest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = []
    for number in range(4):
        stamp = Run(name=f"c{number}").stamp()
        cell_id = None if number == 0 else f"id{number}"
        entries.append(StampRecord(stamp, stamp.to_json(), {"run_id": "r"}, cell_id, number))
    content, left_out = commands.ledger_content(entries)
    assert [cell["cell_id"] for cell in content["cells"]] == ["id3", "id2", "id1"]
    assert left_out == []
    size = len(json.dumps(content["cells"][0]))
    monkeypatch.setattr(commands, "_MOST_LEDGER_BYTES", 2 * size + 100)
    content, left_out = commands.ledger_content(entries)
    assert [cell["cell_id"] for cell in content["cells"]] == ["id3", "id2"]
    assert [entry.label for entry in left_out] == ["c1"]


def test_a_release_says_what_was_kept() -> None:
    report = ShutdownReport(freed=("the cache",), kept=("torch",))
    assert release_text("demo", report) == (
        "engine released: demo\n  freed: the cache\n  kept: torch"
    )
