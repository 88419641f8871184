"""The address of a server as a user types it, checked before anything is sent there."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from jupyter_detllm.errors import UsageError

__all__ = ["API_KEY_VARIABLE", "Address", "is_address"]

API_KEY_VARIABLE = "VLLM_API_KEY"
"""The one place an API key is taken from: the variable that `vllm serve` itself reads."""

_EXAMPLE = "http://127.0.0.1:8000"
_SCHEMES = ("http", "https")


def is_address(text: str) -> bool:
    """Tell whether a model's name is the address of a server."""
    return text.strip().lower().startswith(tuple(f"{scheme}://" for scheme in _SCHEMES))


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server answers.

    Attributes
    ----------
    base
        Scheme, host, port and path, without a slash or ``/v1`` at the end.
    loopback
        Whether it is this machine's own.
    encrypted
        Whether certificates have to be loaded, which takes a tenth of a second: not for
        plain HTTP on this machine, where neither a proxy nor a redirect is followed.
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
            For one that is malformed, or that holds a name, a password or a query: what
            stands in an address ends up in outputs and logs.
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
                expected=f"an API key in the variable {API_KEY_VARIABLE}, and {_EXAMPLE}",
            )
        if parts.query or parts.fragment:
            raise UsageError("the address of a server has a query or a fragment", expected=_EXAMPLE)
        loopback = _is_loopback(parts.hostname)
        encrypted = not (loopback and parts.scheme.lower() == "http")
        return cls(_base(parts, port), loopback, encrypted)

    def __str__(self) -> str:
        """Return the address for people."""
        return self.base


def _malformed() -> UsageError:
    return UsageError("that is not the address of a server", expected=f"one like {_EXAMPLE}")


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
