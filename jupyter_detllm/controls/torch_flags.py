"""torch's own switches: deterministic algorithms, cuDNN, TF32.

They are set on an imported torch only; `jupyter_detllm.controls.seeding` calls this
when torch arrives.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from jupyter_detllm.errors import ControlError

__all__ = ["TorchDeterministic", "TorchFlags", "apply_torch_flags", "parse_deterministic"]


class TorchDeterministic(StrEnum):
    """What `torch.use_deterministic_algorithms` is told; `off` leaves the user's choice."""

    OFF = "off"
    WARN = "warn"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TorchFlags:
    """What is wanted of torch.

    Attributes
    ----------
    deterministic
        Deterministic algorithms: off, warn where there is none, or fail.
    no_tf32
        Never round float32 operands to TF32.
    """

    deterministic: TorchDeterministic = TorchDeterministic.OFF
    no_tf32: bool = False


def parse_deterministic(value: str) -> TorchDeterministic:
    """Return the mode named `value`; refuse another in one line."""
    try:
        return TorchDeterministic(value)
    except ValueError:
        raise ControlError(
            f"{value[:40]!r} is no mode of --torch-deterministic",
            expected=", ".join(TorchDeterministic),
            fix="%detllm --torch-deterministic warn",
        ) from None


# Whether deterministic algorithms are on because of us: only then `off` turns them off.
_on_by_us = False


def apply_torch_flags(torch: Any, flags: TorchFlags) -> None:
    """Set the switches on an imported torch.

    cuDNN never chooses kernels by timing, at every level; a user who wants that sets
    it afterwards.
    """
    global _on_by_us
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    if flags.deterministic is not TorchDeterministic.OFF:
        warn_only = flags.deterministic is TorchDeterministic.WARN
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        _on_by_us = True
    elif _on_by_us:
        torch.use_deterministic_algorithms(False)
        _on_by_us = False
    if flags.no_tf32:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
