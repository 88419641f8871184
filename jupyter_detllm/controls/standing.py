"""The controls as a bare environment has them: nothing is set, nothing was started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jupyter_detllm.controls.environ import ENV_CONTROLS, RECORDED
from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.redact import redact_text
from jupyter_detllm.probes.process import home_and_user

__all__ = ["StandingControls"]


@dataclass(frozen=True, slots=True)
class StandingControls:
    """The variables of an environment that are controls, or change results otherwise."""

    environ: Mapping[str, str]

    def fields(self) -> dict[str, FieldValue]:
        """Return them as ``controls.NAME``; what is not set is left out."""
        home, user = home_and_user()
        known = {row.name for row in ENV_CONTROLS} | {row.name for row in RECORDED}
        return {
            f"controls.{name}": redact_text(self.environ[name], home=home, user=user)[:100]
            for name in sorted(known & set(self.environ))
        }
