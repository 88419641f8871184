"""The event loop goes on while a notebook is judged, and too many of them are turned away."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from tornado.web import HTTPError

from jupyter_detllm.server import handler


class SlowJudge:
    """Answers when it is let; knows in which threads it was asked."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.threads: set[int] = set()

    def answer(self, body: bytes) -> dict[str, Any]:
        self.threads.add(threading.get_ident())
        assert self.go.wait(60)
        return {"asked": body.decode()}


def desk() -> tuple[Any, SlowJudge]:
    made: Any = handler._Desk()
    made.judge = SlowJudge()
    return made, made.judge


def test_the_loop_is_free_while_a_notebook_is_judged() -> None:
    async def scenario() -> str:
        made, judge = desk()
        asked = asyncio.ensure_future(made.answer(b"a"))
        start = time.monotonic()
        while not judge.threads and time.monotonic() < start + 60:
            await asyncio.sleep(0.01)
        assert not asked.done()
        judge.go.set()
        found: str = await asked
        assert threading.get_ident() not in judge.threads
        return found

    assert json.loads(asyncio.run(scenario())) == {"asked": "a"}


def test_too_many_at_once_are_turned_away_and_later_ones_are_not() -> None:
    async def scenario() -> None:
        made, judge = desk()
        most = handler._WAITING
        waiting = [asyncio.ensure_future(made.answer(b"%d" % i)) for i in range(most)]
        await asyncio.sleep(0)
        with pytest.raises(HTTPError, match="try again") as caught:
            await made.answer(b"one more")
        assert caught.value.status_code == 503
        judge.go.set()
        found = [json.loads(text)["asked"] for text in await asyncio.gather(*waiting)]
        assert found == [str(i) for i in range(most)]
        assert made.waiting == 0
        assert json.loads(await made.answer(b"later")) == {"asked": "later"}
        assert len(judge.threads) <= handler._THREADS

    asyncio.run(scenario())


def test_a_failure_does_not_count_as_waiting() -> None:
    async def scenario() -> None:
        made, _ = desk()
        made.judge = handler.Judge()
        for _ in range(handler._WAITING + 1):
            with pytest.raises(handler.UsageError):
                await made.answer(b"{")

    asyncio.run(scenario())


def test_judging_needs_no_engine_and_no_array_library() -> None:
    script = (
        "import sys, jupyter_detllm.server.judge;"
        "print([m for m in ('torch', 'vllm', 'numpy', 'nbformat', 'IPython') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
