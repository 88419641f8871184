"""The method of batch invariance that a `vllm.LLM` computes with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jupyter_detllm.core.levels import Level
from jupyter_detllm.engines.base import EngineSpec
from jupyter_detllm.errors import InvarianceError
from jupyter_detllm.invariance import candidates
from jupyter_detllm.invariance.base import Candidate, KernelCheck, Method, prepared
from jupyter_detllm.invariance.host import this_host

__all__ = ["InForce"]


def _reasons(offered: Sequence[Candidate]) -> str:
    """Return why each method is not for the engine, equal reasons once."""
    names: dict[str, list[str]] = {}
    for item in offered:
        if item.refusal:
            names.setdefault(item.refusal, []).append(item.method.name)
    return "; ".join(f"{', '.join(some)}: {why}" for why, some in names.items())


class InForce:
    """Which method is in force; none at other levels than `invariant`.

    Parameters
    ----------
    spec
        Level and options decide which methods are tried, in which order.

    Raises
    ------
    InvarianceError
        When the level is `invariant` and no method is for this engine.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._left: list[Method] = []
        self._stack = contextlib.ExitStack()
        if spec.level is not Level.INVARIANT:
            return
        offered = candidates(this_host(spec.options))
        self._left = [
            item.method
            for item in offered
            if item.usable and (spec.sequential or not item.method.sequential)
        ]
        if not self._left:
            raise InvarianceError(
                f"no method of batch invariance is for this engine ({_reasons(offered)})",
                fix="--level invariant (one sequence at a time), or --level repeatable",
            )

    @property
    def name(self) -> str:
        """Name of the method; "off" where none is."""
        return self._left[0].name if self._left else "off"

    @property
    def sequential(self) -> bool:
        """Whether completions run one by one."""
        return bool(self._left) and self._left[0].sequential

    def arguments(self, chosen: Mapping[str, object]) -> dict[str, object]:
        """Return the engine options that the method needs."""
        return self._left[0].arguments(chosen) if self._left else {}

    @contextlib.contextmanager
    def around_start(self) -> Iterator[None]:
        """Patch what comes before the start; taken back if that fails, else at `close`.

        A method that finds its hooks missing is passed over.

        Raises
        ------
        InvarianceError
            When no method is left.
        """
        failed: list[str] = []
        while self._left:
            try:
                self._stack.enter_context(prepared(self._left[0]))
                break
            except InvarianceError as error:
                failed.append(error.what)
                self._left.pop(0)
        if failed and not self._left:
            raise InvarianceError("; ".join(failed), fix="--level repeatable")
        try:
            yield
        except BaseException:
            self.close()
            raise

    def install(self, llm: Any) -> None:
        """Put the method in force, or the next that can be.

        Raises
        ------
        InvarianceError
            When none can.
        """
        failed: list[str] = []
        while self._left:
            try:
                self._left[0].install(llm)
                return
            except InvarianceError as error:
                failed.append(error.what)
                self._left = [method for method in self._left[1:] if method.live]
        if failed:
            raise InvarianceError("; ".join(failed), fix="--level repeatable")

    def check_kernels(
        self, llm: Any, *, tokens: int, sequences: int, step_tokens: int, seconds: float
    ) -> KernelCheck | None:
        """Return what the kernels show under the method in force; None without one."""
        if not self._left:
            return None
        return self._left[0].check_kernels(
            llm, tokens=tokens, sequences=sequences, step_tokens=step_tokens, seconds=seconds
        )

    def fall_back(self, llm: Any) -> str:
        """Take the method back and the next one; return its name, "" when none is left."""
        following = [method for method in self._left[1:] if method.live]
        if not following:
            return ""
        self._left[0].uninstall(llm)
        self._left = following
        self.install(llm)
        return self.name

    def close(self) -> None:
        """Take back what was patched before the start."""
        self._stack.close()
