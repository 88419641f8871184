"""What a session is set up with, checked and compared."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from jupyter_detllm.controls.ledger import kernel_mark
from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.levels import DEFAULT_LEVEL, DEFAULT_SEED, LEVEL_VARIABLE, Level
from jupyter_detllm.core.seeds import MAX_SEED
from jupyter_detllm.errors import UsageError

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Root seed, guarantee level and the debugging modifiers of a session.

    Attributes
    ----------
    torch_deterministic
        ``off``, ``warn`` or ``error``.
    dtype
        Engine option `dtype`; "" leaves it to the model.
    level_asked
        Whether the user named the level: it is then had, or refused; without that
        `repeatable` will do where batch invariance is not proven.
    """

    seed: int = DEFAULT_SEED
    level: Level = DEFAULT_LEVEL
    torch_deterministic: str = "off"
    launch_blocking: bool = False
    no_tf32: bool = False
    dtype: str = ""
    eager: bool = False
    level_asked: bool = field(default=False, compare=False)

    @classmethod
    def initial(cls) -> Settings:
        """Return the settings of a session that names none.

        A kernelspec of ours may name them; a rerun's level comes before its level.

        Raises
        ------
        UsageError
            When the environment names a level that does not exist.
        """
        mark = kernel_mark(os.environ)
        level, seed = (mark.level, mark.seed) if mark else (None, None)
        return cls().changed({"level": os.environ.get(LEVEL_VARIABLE) or level, "seed": seed})

    def changed(self, values: Mapping[str, object]) -> Settings:
        """Return a copy with the values that are not None, checked.

        Raises
        ------
        UsageError
            For a seed out of range, or a level that does not exist.
        """
        given = {name: value for name, value in values.items() if value is not None}
        seed = given.get("seed", self.seed)
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
            raise UsageError(f"the seed {seed!r:.40} is out of range", expected="0 to 2**63 - 1")
        if "level" in given:
            given["level"] = _level(given["level"])
            given.setdefault("level_asked", True)
        return replace(self, **given)  # type: ignore[arg-type]

    def differences(self, other: Settings, *, engine_options: bool = True) -> list[str]:
        """Return what differs, as ``name is A, asked for B`` with A from self.

        Without `engine_options`, what `engine_options()` returns is left out.
        """
        names = [item.name for item in fields(self) if item.compare]
        kept = [n for n in names if engine_options or n not in ("dtype", "eager")]
        return [
            f"{name} is {getattr(self, name)}, asked for {getattr(other, name)}"
            for name in kept
            if getattr(self, name) != getattr(other, name)
        ]

    def engine_options(self) -> dict[str, FieldValue]:
        """Return the modifiers that are engine options."""
        out: dict[str, FieldValue] = {}
        if self.dtype:
            out["dtype"] = self.dtype
        if self.eager:
            out["enforce_eager"] = True
        return out


def _level(value: object) -> Level:
    try:
        return Level(str(value))
    except ValueError:
        raise UsageError(
            f"{value!r:.40} is not a guarantee level", expected=", ".join(Level)
        ) from None
