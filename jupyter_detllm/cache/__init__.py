"""The result cache: equal requests on one machine are generated only once."""

import os

__all__ = ["SWITCH_VARIABLE", "switched_off"]

SWITCH_VARIABLE = "JUPYTER_DETLLM_RESULT_CACHE"
"""Environment variable; ``off`` disables the result cache. Set by `rerun`."""


def switched_off() -> bool:
    """Return whether the environment disables the result cache."""
    return os.environ.get(SWITCH_VARIABLE, "").strip().lower() in ("off", "0", "no", "false")
