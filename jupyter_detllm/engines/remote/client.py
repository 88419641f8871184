"""HTTP client for one server: its address, responses and retries.

An address is checked before anything is sent to it. Requests are retried if that can help;
otherwise a failure is one clear line.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import ipaddress
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from jupyter_detllm.errors import (
    DetLLMError,
    EngineError,
    EngineStartError,
    RequestError,
    UsageError,
    installing,
)

__all__ = [
    "API_KEY_VARIABLE",
    "Address",
    "Connection",
    "CutOffError",
    "RetryPolicy",
    "StatusError",
    "printable",
]

API_KEY_VARIABLE = "VLLM_API_KEY"
"""The only source of an API key: the variable that `vllm serve` itself reads."""

_EXAMPLE_ADDRESS = "http://127.0.0.1:8000"
_SCHEMES = ("http", "https")


@dataclass(frozen=True, slots=True)
class Address:
    """A server's address.

    Attributes
    ----------
    base
        Scheme, host, port and path, without a slash or ``/v1`` at the end.
    loopback
        Whether it is on this machine.
    encrypted
        Whether certificates must be loaded, which takes a tenth of a second. Not for plain
        HTTP on this machine, where neither a proxy nor a redirect is followed.
    """

    base: str
    loopback: bool = False
    encrypted: bool = True

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read an address.

        Raises
        ------
        UsageError
            If it is malformed, or holds a user name, a password or a query: addresses end up in
            outputs and logs.
        """
        try:
            parts = urlsplit(text.strip())
            port = parts.port
        except ValueError:
            raise _malformed() from None
        if parts.scheme.lower() not in _SCHEMES or not parts.hostname:
            raise _malformed()
        if parts.username is not None or parts.password is not None:
            raise UsageError(
                "the address of a server holds a user name or a password",
                expected=f"an API key in the variable {API_KEY_VARIABLE}, and {_EXAMPLE_ADDRESS}",
            )
        if parts.query or parts.fragment:
            raise UsageError(
                "the address of a server has a query or a fragment", expected=_EXAMPLE_ADDRESS
            )
        loopback = _is_loopback(parts.hostname)
        encrypted = not (loopback and parts.scheme.lower() == "http")
        return cls(_base(parts, port), loopback, encrypted)

    def __str__(self) -> str:
        """Return the address for display."""
        return self.base


def _malformed() -> UsageError:
    return UsageError(
        "that is not the address of a server", expected=f"one like {_EXAMPLE_ADDRESS}"
    )


def _base(parts: SplitResult, port: int | None) -> str:
    host = parts.hostname or ""
    name = f"[{host}]" if ":" in host else host
    place = name if port is None else f"{name}:{port}"
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme.lower()}://{place}{path}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_LONGEST_LINE = 300
_LARGEST_ERROR = 1 << 16


class StatusError(Exception):
    """An error response: its status, the server's message, and when to retry."""

    def __init__(self, status: int, message: str, retry_after: float | None = None) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message
        self.retry_after = retry_after


class CutOffError(Exception):
    """A stream that ended before it was complete."""


def refusal(answer: Any) -> StatusError:
    """Return the error for a response whose body was read."""
    return StatusError(
        answer.status_code,
        _message(answer.text[:_LARGEST_ERROR]),
        _seconds(answer.headers.get("retry-after")),
    )


def _message(text: str) -> str:
    """Return the one-line message of a server's error: vLLM's, OpenAI's or FastAPI's."""
    with contextlib.suppress(ValueError):
        text = _message_of(json.loads(text))
    line = printable(" ".join(text.split())).rstrip(".")
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}..."


def printable(text: str) -> str:
    """Return a server's text without control characters."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _message_of(data: Any) -> str:
    """Return the message out of an error object."""
    while isinstance(data, Mapping):
        data = next((data[k] for k in ("error", "message", "detail") if k in data), "")
    return data if isinstance(data, str) else json.dumps(data)


def _seconds(header: str | None) -> float | None:
    """Return the delay of a ``Retry-After``, given in seconds or as a date."""
    if not header:
        return None
    with contextlib.suppress(ValueError):
        return float(header)
    with contextlib.suppress(ValueError, TypeError):
        return email.utils.parsedate_to_datetime(header).timestamp() - time.time()
    return None


async def events_of(answer: Any) -> AsyncIterator[Any]:
    """Yield the JSON of each event up to ``[DONE]``.

    Raises
    ------
    StatusError
        For an event that is an error.
    CutOffError
        If the end is missing.
    """
    async for line in answer.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise CutOffError from None
        if isinstance(event, Mapping) and event.get("error"):
            raise StatusError(_code(event["error"]), _message(data))
        yield event
    raise CutOffError


def _code(error: Any) -> int:
    code = error.get("code") if isinstance(error, Mapping) else None
    return code if type(code) is int and 400 <= code < 600 else 500


def reason(error: Exception) -> str:
    """Return an error of the HTTP client on one line."""
    text = " ".join(str(error).split())[:_LONGEST_LINE]
    return f"{text} ({type(error).__name__})" if text else type(error).__name__


Result = TypeVar("Result")

_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Timeouts and retries for a server.

    Attributes
    ----------
    tries
        Maximum number of times a request is sent.
    first_pause, longest_pause
        Seconds before the second try, doubled for each further one; maximum seconds between
        two, whatever ``Retry-After`` says.
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

    def __init__(self, address: Address, retries: RetryPolicy, most: int) -> None:
        self.address = address
        self.retries = retries
        self._most = most
        self._httpx = _import_httpx()
        self._opened: Any = None

    def _client(self) -> Any:
        if self._opened is None:
            httpx, retries = self._httpx, self.retries
            key = os.environ.get(API_KEY_VARIABLE, "")
            self._opened = httpx.AsyncClient(
                base_url=self.address.base,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=httpx.Timeout(retries.silence, connect=retries.connect, pool=None),
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
        """Return the JSON at `path`; None if it is `optional` and does not exist.

        Raises
        ------
        EngineError
            If the server does not respond, or not with JSON.
        """
        return await self._json("GET", path, may_lack=optional)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send JSON and return the JSON response.

        Raises
        ------
        RequestError
            If the server refuses the request, with its message.
        EngineError
            If it does not respond.
        """
        return await self._json("POST", path, body)

    async def _json(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        may_lack: bool = False,
    ) -> Any:
        async def once() -> Any:
            answer = await self._client().request(method, path, json=body)
            if answer.status_code >= 300:
                raise refusal(answer)
            try:
                return answer.json()
            except ValueError:
                raise StatusError(501, f"what it sends at {path} is not JSON") from None

        try:
            return await self._patiently(once)
        except StatusError as error:
            if may_lack and error.status in {404, 405, 501}:
                return None
            raise self.plain(error) from None

    async def stream(
        self,
        path: str,
        body: Mapping[str, Any],
        take: Callable[[AsyncIterator[Any]], Awaitable[Result]],
    ) -> Result:
        """Send JSON and return the result of `take` on the response's events.

        A stream that breaks off is requested again from its start.

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

    async def _patiently(self, once: Callable[[], Awaitable[Result]]) -> Result:
        """Try until it works, or the error is permanent."""
        for attempt in range(1, self.retries.tries + 1):
            last = attempt == self.retries.tries
            asked: float | None = None
            try:
                return await once()
            except StatusError as error:
                if error.status not in _RETRIED or last:
                    raise
                asked = error.retry_after
            except (self._httpx.TransportError, CutOffError) as error:
                # A server that is only slow would get the same work twice.
                if last or isinstance(error, self._httpx.ReadTimeout):
                    raise self._silent(error, attempt) from None
            await asyncio.sleep(self.retries.pause(attempt, asked))
        raise AssertionError("the last try returns or raises")

    def _silent(self, error: Exception, attempts: int) -> EngineError:
        if isinstance(error, self._httpx.ReadTimeout):
            what = f"the server {self.address} said nothing for {self.retries.silence:g} s"
            return EngineError(what, fix="%detllm use URL --timeout SECONDS")
        why = "the answer broke off" if isinstance(error, CutOffError) else reason(error)
        tried = f" ({attempts} tries)" if attempts > 1 else ""
        return EngineError(
            f"no answer from the server {self.address}: {why}{tried}",
            expected="a running `vllm serve`",
            fix="jupyter detllm serve MODEL",
        )

    def plain(self, error: StatusError) -> DetLLMError:
        """Convert an error response to an error of this package."""
        said = f"{error.status}: {error.message}" if error.message else str(error.status)
        if error.status in {401, 403}:
            return EngineError(
                f"the server {self.address} refuses access ({said})",
                expected=f"its API key in the variable {API_KEY_VARIABLE}",
            )
        if error.status in _RETRIED or error.status >= 500:
            tries = self.retries.tries
            return EngineError(f"the server {self.address} answers {said} ({tries} tries)")
        if error.status < 400:
            return EngineError(
                f"the server {self.address} redirects to another address ({error.status})",
                expected="the address it moved to",
            )
        return RequestError(f"the server refuses the request ({said})")


def _import_httpx() -> Any:
    try:
        import httpx
    except ImportError:
        raise EngineStartError(
            "httpx, which is needed to connect to a server, is not installed",
            fix=installing("remote"),
        ) from None
    return httpx
