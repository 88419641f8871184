"""The method of batch invariance that a `vllm.LLM` computes with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jupyter_detllm.controls.guard import take_back
from jupyter_detllm.core.levels import Level
from jupyter_detllm.engines.base import EngineSpec
from jupyter_detllm.errors import InvarianceError
from jupyter_detllm.invariance import candidates, first_choice, reasons_against
from jupyter_detllm.invariance.base import Candidate, KernelCheck, Method, prepared
from jupyter_detllm.invariance.host import this_host

__all__ = ["InForce"]

_READ_EACH_STEP = frozenset({"VLLM_CPU_ATTN_SPLIT_KV"})
"""Variables of methods that vLLM reads in every step: taking them back takes effect."""


class InForce:
    """Which method is in force; none at other levels than `invariant`.

    Parameters
    ----------
    spec
        Level and options decide which methods are tried, in which order.

    Attributes
    ----------
    level
        The level that the engine computes at: the spec's, or its fallback.
    reason
        Why the methods before the one in force were passed over, as a clause.

    Raises
    ------
    InvarianceError
        When the level is `invariant` and no method is for this engine.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.level = spec.level
        self.reason = ""
        self._spec = spec
        self._left: list[Method] = []
        self._plain = True
        self._environ: Mapping[str, str] = {}
        self._stack = contextlib.ExitStack()
        if spec.level is not Level.INVARIANT:
            return
        host = this_host(spec.options)
        offered = candidates(host)
        self._environ = first_choice(host).environ()  # what the controls have set
        self._left = [
            item.method
            for item in offered
            if item.usable and (spec.sequential or not item.method.sequential)
        ]
        if not self._left:
            raise InvarianceError(
                f"no method of batch invariance is for this engine ({reasons_against(offered)})",
                fix="--level invariant (one sequence at a time), or --level repeatable",
            )
        if self.sequential:
            self.reason = reasons_against(offered, nearest=True)

    @property
    def name(self) -> str:
        """Name of the method; "off" where none is."""
        return self._left[0].name if self._left else "off"

    @property
    def sequential(self) -> bool:
        """Whether completions run one by one."""
        return bool(self._left) and self._left[0].sequential

    @property
    def shortfall(self) -> str:
        """Why the level is lower than was asked for, or held one by one; "" where neither is."""
        return self.reason if self.sequential or self.level is not self._spec.level else ""

    def arguments(
        self, arguments: Mapping[str, object], chosen: Mapping[str, object]
    ) -> dict[str, object]:
        """Return `arguments` with the engine options that the method needs.

        `chosen` are the options that the user named.
        """
        needed = self._left[0].arguments(chosen) if self._left else {}
        out = {**arguments, **needed}
        self._plain = out == dict(arguments)
        return out

    def look_at(self, config: Callable[[], Any]) -> None:
        """Refuse a model that no method is for, before its weights are loaded.

        Where one sequence at a time will do, nothing is refused.

        Parameters
        ----------
        config
            Returns the `vllm.config.ModelConfig`.

        Raises
        ------
        InvarianceError
            When no method is left.
        """
        if not self._left or self._spec.sequential:
            return
        model = config()
        # The others could not be put in force any more: this engine is started for the first.
        possible = [self._left[0], *(method for method in self._left[1:] if method.live)]
        seen = [Candidate(method, method.uncovered(model)) for method in possible]
        if not any(item.usable for item in seen):
            raise InvarianceError(reasons_against(seen), fix="--level repeatable")

    @contextlib.contextmanager
    def around_start(self) -> Iterator[None]:
        """Patch what comes before the start; taken back if that fails, else at `close`.

        A method that finds its hooks missing is passed over.

        Raises
        ------
        InvarianceError
            When no method is left.
        """
        failed: list[Candidate] = []
        while self._left:
            try:
                self._stack.enter_context(prepared(self._left[0]))
                break
            except InvarianceError as error:
                method = self._left.pop(0)
                failed.append(Candidate(method, _why(method, error)))
        self._note(failed)
        if failed and not self._left:
            raise InvarianceError(self.reason, fix="--level repeatable")
        try:
            yield
        except BaseException:
            self.close()
            raise

    def install(self, llm: Any) -> None:
        """Put the method in force, or the next that can be, or go on at the fallback.

        Raises
        ------
        InvarianceError
            When none can, and the engine cannot go on without.
        """
        failed: list[Candidate] = []
        while self._left:
            method = self._left[0]
            try:
                method.install(llm)
                break
            except InvarianceError as error:
                failed.append(Candidate(method, _why(method, error)))
                self._left = [other for other in self._left[1:] if other.live]
        self._note(failed)
        level = self._spec.fallback
        if not failed or self._left or (level and self.lower(llm, level, self.reason)):
            return
        raise InvarianceError(self.reason, fix="--level repeatable")

    def _note(self, failed: Sequence[Candidate]) -> None:
        if failed:
            self.reason = "; ".join(filter(None, (self.reason, reasons_against(failed))))

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
        self._note([Candidate(self._left[0], "its self-test did not hold")])
        self._left[0].uninstall(llm)
        self._left = following
        self.install(llm)
        return self.name

    def lower(self, llm: Any, level: Level, why: str) -> bool:
        """Go on at `level` with no method in force; False where that takes another engine.

        It does where a method's engine options or variables are not those of `level`, and
        cannot be taken back while the engine runs.
        """
        from vllm import envs

        frozen = getattr(envs, "disable_envs_cache", None), getattr(envs, "enable_envs_cache", None)
        here = getattr(llm.llm_engine.engine_core, "engine_core", None) is not None
        back = self._plain and here and set(self._environ) <= _READ_EACH_STEP
        if not back or not all(map(callable, frozen)) or any(not m.live for m in self._left):
            return False
        for method in self._left[:1]:
            method.uninstall(llm)
        self._left = []
        take_back(self._environ)
        envs.disable_envs_cache()
        envs.enable_envs_cache()
        llm.reset_prefix_cache()  # what a self-test left: an engine of that level has none
        self.level, self.reason = level, why
        return True

    def close(self) -> None:
        """Take back what was patched before the start."""
        self._stack.close()


def _why(method: Method, error: InvarianceError) -> str:
    """Return what a method says against itself, without its name, which is added later."""
    text = error.what
    for prefix in (f"{method.name} is not in force: ", f"{method.name}: ", f"{method.name} "):
        text = text.removeprefix(prefix)
    return text
