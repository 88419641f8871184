"""What subcommands print with: results to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import sys

from jupyter_detllm.core.canonical import Json
from jupyter_detllm.errors import UsageError
from jupyter_detllm.render.visible import visible

__all__ = ["notice", "use_color", "write", "write_json"]


def write(text: str) -> None:
    """Print a result."""
    try:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(f"the result cannot be written: {error.strerror}") from None


def write_json(value: Json) -> None:
    """Print a result as JSON."""
    write(json.dumps(value, indent=2))


def notice(text: str) -> None:
    """Print one line about the run itself."""
    sys.stderr.write(f"{visible(text)}\n")
    sys.stderr.flush()


def use_color() -> bool:
    """Tell whether stdout is a terminal that wants colour (no-color.org)."""
    environ = os.environ
    return sys.stdout.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
