"""Asynchronous work in a thread of its own, waited for by a thread that can be interrupted."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["Background"]

Result = TypeVar("Result")

TICK_SECONDS = 0.1
_END_SECONDS = 5.0


class Background:
    """An event loop in a daemon thread: a notebook's own loop is never entered."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="detllm-remote", daemon=True
        )
        self._thread.start()

    def run(
        self,
        work: Coroutine[Any, Any, Result],
        tick: Callable[[], None] | None = None,
    ) -> Result:
        """Return what `work` returns; call `tick` in this thread meanwhile.

        After any exception here, an interrupt included, the work has been cancelled and
        has ended.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while True:
                done, _ = concurrent.futures.wait([future], timeout=TICK_SECONDS)
                if done:
                    return future.result()
                if tick is not None:
                    tick()
        except BaseException:
            self._end(future)
            raise

    def _end(self, future: concurrent.futures.Future[Result]) -> None:
        """Cancel, and wait until connections are closed: the server then aborts."""
        if future.cancel():
            # Cancelled here at once; the task itself ends in its loop, after its clean-up.
            barrier = asyncio.run_coroutine_threadsafe(_others(), self._loop)
            with contextlib.suppress(concurrent.futures.TimeoutError):
                barrier.result(_END_SECONDS)

    def close(self) -> None:
        """Stop the loop; a second call does nothing."""
        if self._loop.is_closed():
            return
        # What is closing, is closed in the next turns of the loop.
        self.run(_others())
        self.run(asyncio.sleep(0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()


async def _others() -> None:
    """Wait for every other task of the loop."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    if rest:
        await asyncio.wait(rest, timeout=_END_SECONDS)
