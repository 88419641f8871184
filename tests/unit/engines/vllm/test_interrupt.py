# ruff: noqa: PT012 - a signal is raised at one place, and felt at another
from __future__ import annotations

import signal
import threading
import time

import pytest

from jupyter_detllm.engines.vllm.steps import DeferredInterrupt


def test_an_interrupt_waits_for_the_check() -> None:
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        reached = True
        interrupt.check()
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_after_the_last_step_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt():
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_during_the_clean_up_does_not_break_it() -> None:
    cleaned = False
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt() as interrupt:
        try:
            signal.raise_signal(signal.SIGINT)
            interrupt.check()
        except KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
            cleaned = True
            raise
    assert cleaned


def test_another_exception_is_not_replaced() -> None:
    with pytest.raises(ValueError, match="mine"), DeferredInterrupt():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("mine")


def test_patience_ends_inside_a_step_only() -> None:
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt(patience=0.05) as interrupt:
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.06)
        signal.raise_signal(signal.SIGINT)  # outside: held
        outside = True
        with interrupt.impatient():
            signal.raise_signal(signal.SIGINT)
            pytest.fail("it must have raised")
    assert outside


def test_a_start_is_interrupted_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt(patience=0.0) as interrupt:  # noqa: SIM117
        with interrupt.impatient():
            signal.raise_signal(signal.SIGINT)
            pytest.fail("it must have raised")


def test_an_ignored_signal_stays_ignored() -> None:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with DeferredInterrupt():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)


def test_other_threads_leave_signals_alone() -> None:
    seen: list[object] = []

    def work() -> None:
        with DeferredInterrupt():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
