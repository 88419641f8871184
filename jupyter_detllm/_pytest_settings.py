"""What the options of a pytest run say, read and checked once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from jupyter_detllm.core.policy import Policy
from jupyter_detllm.core.promotion import Update
from jupyter_detllm.errors import DetLLMError, UsageError
from jupyter_detllm.verify.report import Mode, Standing, parse_accept

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """The options, as `pytest --help` describes them.

    Attributes
    ----------
    mode
        Check, rerun or replay.
    update
        None where nothing is promoted.
    policy
        None where cells and defaults decide.
    cell_timeout, startup_timeout
        Seconds.
    models
        What a replay may load.
    max_tokens_total
        Tokens of a replay; None for the default.
    """

    mode: Mode
    update: Update | None
    policy: Policy | None
    accept: frozenset[Standing]
    strict_fingerprint: bool
    kernel: str | None
    cell_timeout: float
    startup_timeout: float
    models: tuple[str, ...]
    max_tokens_total: int | None

    @classmethod
    def of(cls, config: pytest.Config) -> Settings:
        """Read the options of a run.

        Raises
        ------
        UsageError
            When one does not fit, one line that names it.
        """
        option = config.getoption
        update = option("detllm_update")
        policy = option("detllm_policy")
        settings = cls(
            mode=Mode(option("detllm_mode")),
            update=None if update == "none" else Update(update),
            policy=None if policy is None else _policy(policy),
            accept=_accept(option("detllm_accept")),
            strict_fingerprint=option("detllm_strict_fingerprint"),
            kernel=option("detllm_kernel"),
            cell_timeout=option("detllm_cell_timeout"),
            startup_timeout=option("detllm_startup_timeout"),
            models=tuple(option("detllm_allow_model")),
            max_tokens_total=option("detllm_max_tokens_total"),
        )
        settings._check(option("dist", "no"))
        return settings

    def _check(self, dist: str) -> None:
        for name in ("cell_timeout", "startup_timeout", "max_tokens_total"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                option = f"--detllm-{name.replace('_', '-')}"
                raise UsageError(f"{option} is {value:g}", expected="1 or more")
        if self.update is None:
            return
        if self.mode is Mode.REPLAY:
            raise UsageError(
                "--detllm-update does not go with --detllm-mode=replay: a replay has no outputs",
                fix="--detllm-mode=rerun",
            )
        if dist == "each":
            raise UsageError("--detllm-update does not go with --dist=each", fix="--dist=load")


def _policy(text: str) -> Policy:
    try:
        return Policy.parse(text)
    except DetLLMError as error:
        raise UsageError(f"--detllm-policy: {error}") from None


def _accept(text: str) -> frozenset[Standing]:
    try:
        return parse_accept(text)
    except UsageError as error:
        fix = error.fix and error.fix.replace("--policy", "--detllm-policy")
        raise UsageError(
            f"--detllm-accept: {error.what}", expected=error.expected, fix=fix
        ) from None
