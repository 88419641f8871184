"""Models and engine options as an output may show them: no home, no secret."""

from __future__ import annotations

from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.redact import REDACTED, looks_secret, redact_text
from jupyter_detllm.probes.process import home_and_user

__all__ = ["shown_option", "shown_text"]


def shown_text(text: str) -> str:
    """Return a path or model name without home folder, user name and secrets."""
    home, user = home_and_user()
    return redact_text(text, home=home, user=user)


def shown_option(name: str, value: FieldValue) -> str:
    """Return the value of an engine option; that of one like ``hf_token`` is hidden."""
    if isinstance(value, str) and value and looks_secret(name):
        return REDACTED
    return shown_text(str(value)) if isinstance(value, str) else str(value)
