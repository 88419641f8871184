"""A proxy before a server of vLLM: requests with one answer are answered once and kept.

Everything else passes through as it is, streams included.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

from jupyter_detllm.errors import EngineStartError, installing
from jupyter_detllm.serving.relay import HEADER, AnswerCache, Relay

__all__ = ["HEADER", "AnswerCache", "RunningProxy", "run_proxy"]


class RunningProxy:
    """A proxy in a thread of its own, until it is closed.

    Parameters
    ----------
    inner_url
        The server's address, such as ``http://127.0.0.1:8001``.
    listen
        ``HOST:PORT``; port 0 takes a free one.
    cache
        Where answers are kept.
    say
        Called with a line when a kept answer turns out to be wrong.

    Raises
    ------
    EngineStartError
        When it cannot listen there, or aiohttp is not installed.
    """

    def __init__(
        self, inner_url: str, listen: str, cache: AnswerCache, say: Callable[[str], None]
    ) -> None:
        self._relay = Relay(inner_url, cache, say)
        self._listen = listen
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._ready = threading.Event()
        self._problem: BaseException | None = None
        self.port = 0
        self._thread = threading.Thread(target=self._work, name="detllm-proxy", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._problem is not None:
            raise _not_started(listen, self._problem) from None

    @property
    def url(self) -> str:
        """Where it listens."""
        host, _ = _split(self._listen)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def close(self) -> None:
        """Stop listening and end what is under way; a second call does nothing."""
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has just ended
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _work(self) -> None:
        try:
            asyncio.run(self._serve())
        except (OSError, ImportError, ValueError) as error:
            self._problem = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        runner, self.port = await self._relay.start(*_split(self._listen))
        self._ready.set()
        try:
            await self._stop.wait()
        finally:
            await self._relay.close()
            await runner.cleanup()


def run_proxy(
    inner_url: str,
    listen: str,
    cache: AnswerCache,
    sample: float | None = None,
    *,
    say: Callable[[str], None] | None = None,
) -> None:
    """Run a proxy until the process is interrupted or terminated.

    Parameters
    ----------
    inner_url, listen, cache
        As `RunningProxy` takes them.
    sample
        Share of the hits that are generated again; None for that of `cache`.
    say
        Takes lines; on stderr by default.
    """
    chosen = cache if sample is None else replace(cache, sample=sample)
    ended = threading.Event()
    proxy = RunningProxy(inner_url, listen, chosen, say or _to_stderr)
    before = signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        with contextlib.suppress(KeyboardInterrupt):
            ended.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
        proxy.close()


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"detllm: {line}\n")


def _split(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{listen!r:.60} is no HOST:PORT")
    return host.strip("[]"), int(port)


def _not_started(listen: str, problem: BaseException) -> EngineStartError:
    if isinstance(problem, ImportError):
        return EngineStartError("the cache before a server needs aiohttp", fix=installing("cpu"))
    reason = getattr(problem, "strerror", None) or str(problem)
    return EngineStartError(f"cannot listen on {listen}: {reason}", fix="another --port")
