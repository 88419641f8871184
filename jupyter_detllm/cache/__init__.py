"""Results kept on this machine, so that an equal request need not be generated again."""

import os

__all__ = ["SWITCH_VARIABLE", "switched_off"]

SWITCH_VARIABLE = "JUPYTER_DETLLM_RESULT_CACHE"
"""Environment variable: with ``off`` nothing is looked up or kept; set by reruns."""


def switched_off() -> bool:
    """Tell whether the environment says that results are neither looked up nor kept."""
    return os.environ.get(SWITCH_VARIABLE, "").strip().lower() in ("off", "0", "no", "false")
