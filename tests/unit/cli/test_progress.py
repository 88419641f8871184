"""The bar of a run: on a terminal it redraws, elsewhere it writes few plain lines."""

from __future__ import annotations

import io

import pytest

from jupyter_detllm.cli import _output
from jupyter_detllm.cli._output import ProgressBar


class Screen(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._is_terminal = terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(_output.time, "monotonic", lambda: now[0])
    return now


def test_a_terminal_sees_a_bar_with_the_time_left(clock: list[float]) -> None:
    screen = Screen(True)
    with ProgressBar(screen) as bar:
        bar.say("starting")
        bar.advance(0, 400)
        clock[0] += 10
        bar.advance(100, 400)
        shown = screen.getvalue().rsplit("\r", 1)[1]
        assert shown.rstrip() == "[######..................] 100 of 400 tokens, 0:30 left"
    assert "\n" not in screen.getvalue()
    assert screen.getvalue().rsplit("\r", 1)[1] == ""  # the line is wiped for the report


def test_the_time_left_leaves_engine_starts_out(clock: list[float]) -> None:
    screen = Screen(True)
    bar = ProgressBar(screen)
    bar.say("engine 1")
    bar.advance(100, 400)
    bar.say("engine 2")
    clock[0] += 500  # it starts
    bar.advance(200, 400)
    clock[0] += 10
    bar.advance(300, 400)
    assert screen.getvalue().endswith("300 of 400 tokens, 0:10 left")


def test_a_log_gets_a_line_now_and_then(clock: list[float]) -> None:
    screen = Screen(False)
    with ProgressBar(screen) as bar:
        bar.say("engine: demo")
        for tokens in range(0, 401, 10):
            bar.advance(tokens, 400)
            clock[0] += 1
        bar.advance(400, 400)
    assert screen.getvalue().splitlines() == [
        "engine: demo",
        "100 of 400 tokens, 0:30 left",
        "200 of 400 tokens, 0:20 left",
        "300 of 400 tokens, 0:10 left",
        "400 of 400 tokens",
    ]


def test_quiet_is_silent(clock: list[float]) -> None:
    screen = Screen(True)
    with ProgressBar(screen, quiet=True) as bar:
        bar.say("engine")
        bar.advance(1, 1)
    assert screen.getvalue() == ""


def test_what_a_notebook_says_steers_no_terminal(clock: list[float]) -> None:
    screen = Screen(True)
    ProgressBar(screen).say("model \x1b[2J\n" + "x" * 200)
    assert "\x1b" not in screen.getvalue()
    assert len(screen.getvalue()) < 100
