"""What `use URL` takes besides the address, and sampling values judged without vLLM."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.generation import Sampling
from jupyter_detllm.engines._remote_http import Patience
from jupyter_detllm.errors import RequestError, UsageError

__all__ = ["RemoteOptions", "check_sampling"]

_DEFAULT = Patience()
_CONCURRENCY = 128


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """The options of a remote engine.

    Attributes
    ----------
    model
        Name under which the server serves it; "" where it serves one.
    concurrency
        Most requests in flight.
    patience
        How long it is waited for.
    """

    model: str = ""
    concurrency: int = _CONCURRENCY
    patience: Patience = _DEFAULT

    @classmethod
    def read(cls, options: Mapping[str, FieldValue]) -> RemoteOptions:
        """Read ``model``, ``concurrency``, ``timeout`` (seconds of silence) and ``tries``.

        Raises
        ------
        UsageError
            For any other: how the engine is configured is the server's to say.
        """
        found: dict[str, FieldValue] = {}
        for given, value in options.items():
            name = given.removeprefix("--").replace("-", "_")
            if name not in _READERS:
                near = difflib.get_close_matches(name, _READERS, n=1, cutoff=0.6)
                known = ", ".join(sorted(_READERS))
                raise UsageError(
                    f"a server takes no engine option {given!r:.60} from here",
                    expected=f"perhaps {near[0]!r}" if near else known,
                    fix="jupyter detllm serve MODEL -- --OPTION VALUE, where it is started",
                )
            found[name] = _READERS[name](name, value)
        return cls(
            str(found.get("model", "")),
            int(found.get("concurrency") or _CONCURRENCY),
            Patience(
                tries=int(found.get("tries") or _DEFAULT.tries),
                silence=float(found.get("timeout") or _DEFAULT.silence),
            ),
        )


def _number(least: int, most: int) -> Callable[[str, FieldValue], FieldValue]:
    def read(name: str, value: FieldValue) -> FieldValue:
        try:
            number = int(str(value))
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise UsageError(f"{name} is {value!r:.40}", expected=f"{least} to {most}")
        return number

    return read


def _text(name: str, value: FieldValue) -> FieldValue:
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{name} is {value!r:.40}", expected="a name")
    return value


_READERS: Mapping[str, Callable[[str, FieldValue], FieldValue]] = {
    "model": _text,
    "concurrency": _number(1, 1024),
    "timeout": _number(1, 86_400),
    "tries": _number(1, 20),
}

_BOUNDS: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-9, 1.0),
    "top_k": (-1, 1 << 31),
    "min_p": (0.0, 1.0),
    "max_tokens": (1, 1 << 31),
    "min_tokens": (0, 1 << 31),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-9, 1e9),
}


def check_sampling(sampling: Sampling) -> None:
    """Refuse what no server would take; the rest is the server's to judge.

    Raises
    ------
    RequestError
        Naming the parameter and its range.
    """
    for name, (least, most) in _BOUNDS.items():
        value = getattr(sampling, name)
        if math.isnan(value) or not least <= value <= most:
            raise RequestError(
                f"{name.replace('_', ' ')} is {value}", expected=f"{least:g} to {most:g}"
            )
    if sampling.min_tokens > sampling.max_tokens:
        raise RequestError(
            f"min tokens is {sampling.min_tokens}", expected=f"at most {sampling.max_tokens}"
        )
