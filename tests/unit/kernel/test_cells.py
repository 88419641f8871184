"""Cells inside cells, lost ends, names taken, and what is emitted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_detllm.errors import UsageError
from jupyter_detllm.kernel.cells import RunningCells
from jupyter_detllm.kernel.stamping import Ledger, StampRecord
from tests.fakes import Run


def info(source: str = "x", cell_id: str | None = None) -> Any:
    return SimpleNamespace(raw_cell=source, cell_id=cell_id)


def result(of: Any, success: bool = True) -> Any:
    return SimpleNamespace(info=of, success=success)


def test_only_the_outermost_cell_ends() -> None:
    running, outer, inner = RunningCells(), info("%%capture\nx", "c1"), info("x")
    running.began(outer)
    running.began(inner)
    assert running.outermost is outer
    assert running.ended(result(inner)) is None
    ending = running.ended(result(outer))
    assert ending is not None
    assert (ending.owner, ending.source, ending.cell_id) == (outer, "%%capture\nx", "c1")
    assert ending.success
    assert running.outermost is None


def test_a_failed_cell_ends_without_success() -> None:
    running, cell = RunningCells(), info()
    running.began(cell)
    ending = running.ended(result(cell, success=False))
    assert ending is not None
    assert not ending.success


def test_a_cell_whose_beginning_was_not_seen() -> None:
    ending = RunningCells().ended(result(info("%load_ext jupyter_detllm")))
    assert ending is not None
    assert ending.owner is None


def test_a_blank_cell_inside_a_cell_is_not_the_outer_ones_end() -> None:
    running, outer = RunningCells(), info()
    running.began(outer)
    assert running.ended(result(info("  "))) is None
    assert running.ended(result(outer)) is not None


def test_an_inner_end_that_was_lost_ends_with_the_outer_cell() -> None:
    running, outer = RunningCells(), info()
    running.began(outer)
    running.began(info())
    assert running.ended(result(outer)) is not None
    assert running.outermost is None


def test_a_torn_down_cell_counts_as_ended() -> None:
    running, cell = RunningCells(), info()
    running.began(cell)
    assert running.ended(None) is None
    assert running.outermost is None


def test_another_request_means_that_an_end_was_lost() -> None:
    running, second = RunningCells(), info()
    running.began(info(), "request 1")
    running.began(second, "request 2")
    assert running.outermost is second


def emitted(name: str, cell_id: str | None = None, **more: Any) -> StampRecord:
    stamp = Run(name=name, **more).stamp()
    return StampRecord(stamp, stamp.to_json(), {"run_id": "r"}, cell_id, 0)


def test_running_a_cell_again_replaces_its_entry() -> None:
    ledger = Ledger()
    ledger.add(emitted("a", "1"))
    ledger.add(emitted("", "2"))
    again = ledger.add(emitted("a", "1"))
    assert [e.label for e in ledger.entries()] == ["a", "#2"]
    assert ledger.find("a") is again
    assert ledger.names() == ("a",)


def test_a_name_taken_by_another_cell_is_refused() -> None:
    ledger = Ledger()
    ledger.add(emitted("a", "1"))
    ledger.check_name("a", "1")
    ledger.check_name("a", None)
    ledger.check_name("", "2")
    with pytest.raises(UsageError, match="'a' is already used by another cell"):
        ledger.check_name("a", "2")
    ledger.forget("a")
    ledger.check_name("a", "2")


def test_without_cell_ids_a_name_is_never_taken() -> None:
    ledger = Ledger()
    ledger.add(emitted("a"))
    ledger.check_name("a", "2")


def test_an_unknown_label_has_a_hint() -> None:
    ledger = Ledger()
    ledger.add(emitted("haiku"))
    with pytest.raises(UsageError, match=r"did you mean haiku\?"):
        ledger.find("haku")
