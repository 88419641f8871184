"""The fake engine's methods of batch invariance, and the ways in which they fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jupyter_detllm.core.canonical import Digest
from jupyter_detllm.core.generation import GenerationRequest
from jupyter_detllm.core.levels import Level, Reach
from jupyter_detllm.engines.fake_options import KERNELS, FakeOptions

if TYPE_CHECKING:
    from jupyter_detllm.invariance.base import KernelCheck

__all__ = ["Breaking", "check_kernels"]

_ROWS = 16


class Breaking:
    """Which method is in force, and what makes a completion drift under it.

    Parameters
    ----------
    way
        One of `fake_options.BREAKS`, "" for none.
    level
        Only `invariant` has methods.
    sequential
        Whether one at a time follows when the first method fails.
    """

    def __init__(self, way: str, level: Level, sequential: bool) -> None:
        invariant = level is Level.INVARIANT
        self._methods = ["fake", *(["sequential"] if sequential else [])] if invariant else []
        self._way = way if invariant else ""
        self._seen: Counter[Digest] = Counter()

    @property
    def method(self) -> str:
        """Name of the method in force; "off" where none is."""
        return self._methods[0] if self._methods else "off"

    @property
    def only_bits(self) -> bool:
        """Whether no token changes, only logprobs."""
        return self._way == "bit"

    def fall_back(self) -> str:
        """Take the next method; return its name, "" when there is none left."""
        if len(self._methods) < 2:
            return ""
        self._methods.pop(0)
        return self.method

    def ran(self, requests: Sequence[GenerationRequest]) -> None:
        """Take note of a call."""
        self._seen.update(request.prompt_tokens for request in requests)

    def cause(self, requests: Sequence[GenerationRequest], index: int) -> str:
        """Return what makes request `index` of a call drift; "" for nothing."""
        if self._way == "repeat":
            count = self._seen[requests[index].prompt_tokens]
            return f"run {count}" if count else ""
        if self.method == "sequential":
            return ""
        completions = sum(len(request.seeds) for request in requests)
        if self._way in ("batch", "bit") and completions > 1:
            return f"one of {completions}"
        if self._way == "order" and index:
            return f"place {index}"
        if self._way == "completions" and len(requests[index].seeds) > 1:
            return "several completions"
        return ""


def check_kernels(options: FakeOptions, method: str, asked: Reach) -> KernelCheck | None:
    """Return what the fake engine's kernels show: what its options say."""
    # Whoever asks has the methods loaded; an engine at another level needs none of them.
    from jupyter_detllm.invariance.base import KernelCheck, KernelRow

    if method != "fake" or not options.kernel_check:
        return None
    rows = tuple(
        KernelRow(name, _ROWS, 1, f"row 2 of {_ROWS}: other bits")
        if name == options.broken_kernel
        else KernelRow(name, _ROWS, _ROWS)
        for name in KERNELS
    )
    reach = Reach(
        min(options.kernel_tokens or asked.tokens, asked.tokens),
        min(options.kernel_sequences or asked.sequences, asked.sequences),
    )
    return KernelCheck(rows, reach)
