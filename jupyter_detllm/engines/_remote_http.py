"""HTTP with one server: patience where it helps, and one clear line where it does not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from jupyter_detllm.engines._remote_address import API_KEY_VARIABLE, Address
from jupyter_detllm.engines._remote_answers import (
    CutOffError,
    StatusError,
    events_of,
    json_of,
    reason,
    refusal,
)
from jupyter_detllm.errors import (
    DetLLMError,
    EngineError,
    EngineStartError,
    RequestError,
    installing,
)

__all__ = ["Connection", "Patience"]

Result = TypeVar("Result")

_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a server is waited for.

    Attributes
    ----------
    tries
        How often a request is sent at most.
    first_pause, longest_pause
        Seconds before the second try, doubled with each; the most that is waited
        between two, whatever ``Retry-After`` says.
    connect, silence
        Seconds for a connection, and between two pieces of an answer.
    """

    tries: int = 5
    first_pause: float = 0.5
    longest_pause: float = 30.0
    connect: float = 5.0
    silence: float = 300.0

    def pause(self, attempt: int, asked: float | None) -> float:
        """Return the seconds to wait after try `attempt`, counted from 1."""
        wanted = self.first_pause * 2 ** (attempt - 1) if asked is None else asked
        return max(0.0, min(wanted, self.longest_pause))


class Connection:
    """A client of one server; its methods run in one event loop.

    Raises
    ------
    EngineStartError
        When the HTTP client is not installed.
    """

    def __init__(self, address: Address, patience: Patience, most: int) -> None:
        self.address = address
        self.patience = patience
        self._most = most
        self._httpx = _import_httpx()
        self._opened: Any = None

    def _client(self) -> Any:
        if self._opened is None:
            httpx, patience = self._httpx, self.patience
            key = os.environ.get(API_KEY_VARIABLE, "")
            self._opened = httpx.AsyncClient(
                base_url=self.address.base,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=httpx.Timeout(patience.silence, connect=patience.connect, pool=None),
                limits=httpx.Limits(
                    max_connections=self._most, max_keepalive_connections=self._most
                ),
                # A redirect would take the key somewhere else; a proxy has no loopback.
                follow_redirects=False,
                trust_env=not self.address.loopback,
                verify=self.address.encrypted,
            )
        return self._opened

    async def close(self) -> None:
        """Close every connection."""
        if self._opened is not None:
            opened, self._opened = self._opened, None
            await opened.aclose()

    async def get(self, path: str, *, optional: bool = False) -> Any:
        """Return the JSON at `path`; None where an `optional` one is not there.

        Raises
        ------
        EngineError
            When the server does not answer, or not with JSON.
        """

        async def once() -> Any:
            return json_of(await self._checked(self._client().get(path)), path)

        try:
            return await self._patiently(once)
        except StatusError as error:
            if optional and error.status in {404, 405, 501}:
                return None
            raise self.plain(error) from None

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send JSON and return the JSON that comes back.

        Raises
        ------
        RequestError
            When the server refuses the request, with its own words.
        EngineError
            When it does not answer.
        """

        async def once() -> Any:
            return json_of(await self._checked(self._client().post(path, json=body)), path)

        try:
            return await self._patiently(once)
        except StatusError as error:
            raise self.plain(error) from None

    async def stream(
        self,
        path: str,
        body: Mapping[str, Any],
        take: Callable[[AsyncIterator[Any]], Awaitable[Result]],
    ) -> Result:
        """Send JSON and return what `take` makes of the events that come back.

        A stream that breaks off is asked for again from its start.

        Raises
        ------
        RequestError, EngineError
            As `post` does.
        """

        async def once() -> Result:
            async with self._client().stream("POST", path, json=body) as answer:
                if answer.status_code >= 300:
                    await answer.aread()
                    raise refusal(answer)
                return await take(events_of(answer))

        try:
            return await self._patiently(once)
        except StatusError as error:
            raise self.plain(error) from None

    async def _checked(self, answer: Awaitable[Any]) -> Any:
        found = await answer
        if found.status_code >= 300:
            raise refusal(found)
        return found

    async def _patiently(self, once: Callable[[], Awaitable[Result]]) -> Result:
        """Try until it works, or the server has said something that stays true."""
        for attempt in range(1, self.patience.tries + 1):
            last = attempt == self.patience.tries
            asked: float | None = None
            try:
                return await once()
            except StatusError as error:
                if error.status not in _RETRIED or last:
                    raise
                asked = error.retry_after
            except (self._httpx.TransportError, CutOffError) as error:
                # One that is only slow would get the same work twice.
                if last or isinstance(error, self._httpx.ReadTimeout):
                    raise self._silent(error, attempt) from None
            await asyncio.sleep(self.patience.pause(attempt, asked))
        raise AssertionError("the last try returns or raises")

    def _silent(self, error: Exception, attempts: int) -> EngineError:
        if isinstance(error, self._httpx.ReadTimeout):
            what = f"the server {self.address} said nothing for {self.patience.silence:g} s"
            return EngineError(what, fix="%detllm use URL --timeout SECONDS")
        why = "the answer broke off" if isinstance(error, CutOffError) else reason(error)
        tried = f" ({attempts} tries)" if attempts > 1 else ""
        return EngineError(
            f"no answer from the server {self.address}: {why}{tried}",
            expected="a running `vllm serve`",
            fix="jupyter detllm serve MODEL",
        )

    def plain(self, error: StatusError) -> DetLLMError:
        """Return an answer that is an error as one of ours."""
        said = f"{error.status}: {error.message}" if error.message else str(error.status)
        if error.status in {401, 403}:
            return EngineError(
                f"the server {self.address} refuses us ({said})",
                expected=f"its API key in the variable {API_KEY_VARIABLE}",
            )
        if error.status in _RETRIED or error.status >= 500:
            tries = self.patience.tries
            return EngineError(f"the server {self.address} answers {said} ({tries} tries)")
        if error.status < 400:
            return EngineError(
                f"the server {self.address} sends us elsewhere ({error.status})",
                expected="the address it moved to",
            )
        return RequestError(f"the server refuses the request ({said})")


def _import_httpx() -> Any:
    try:
        import httpx
    except ImportError:
        raise EngineStartError(
            "httpx is not installed, and a server is spoken to with it",
            fix=installing("remote"),
        ) from None
    return httpx
