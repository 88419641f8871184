"""Errors with one clear line each: what happened, what was expected, what fixes it.

IPython prints an exception through ``_render_traceback_`` when it has one, so a user's
mistake is one line in a cell and never a traceback. `nearest` finds the known word that a
misspelt one stands for; errors ask for it: "did you mean ...?".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

__all__ = [
    "FROM_CLONE",
    "UPGRADING",
    "CanonicalError",
    "ControlError",
    "DetLLMError",
    "EngineError",
    "EngineStartError",
    "ExecutionError",
    "ExpectationError",
    "GenerationInterrupted",
    "InvarianceError",
    "ModelError",
    "NotebookError",
    "RequestError",
    "StampError",
    "UsageError",
    "installing",
    "nearest",
    "show_errors_through",
]

_shown: Callable[[str], str] = str


def show_errors_through(redact: Callable[[str], str]) -> None:
    """Pass every message through `redact` from now on, since messages end up in notebooks."""
    global _shown
    _shown = redact


FROM_CLONE = "in a clone of the jupyter-detllm repository"
"""Where to run commands that install this package, which no package index has."""

UPGRADING = f"pip install -U . {FROM_CLONE} that is up to date"
"""The fix for data that only a newer version of this package can read."""


def installing(extra: str) -> str:
    """Return the command that installs this package with `extra`."""
    return f'pip install ".[{extra}]" {FROM_CLONE}'


class DetLLMError(Exception):
    """Base class of every error that this package raises on purpose.

    Parameters
    ----------
    what
        What happened, one sentence without a final full stop.
    meant
        The known word that a misspelt one stands for (`nearest`): asked for in place of `expected`.
    expected
        What was expected instead.
    fix
        The command or line that fixes it.
    """

    exit_code = 2

    def __init__(
        self,
        what: str,
        *,
        meant: str | None = None,
        expected: str | None = None,
        fix: str | None = None,
    ) -> None:
        if meant is not None:
            what, expected = f"{what}; did you mean {meant}?", None
        super().__init__(what, expected, fix)
        self.what = what
        self.expected = expected
        self.fix = fix

    def __str__(self) -> str:
        """Return the message on one line."""
        parts = [self.what]
        if self.expected:
            parts.append(f"expected {self.expected}")
        text = "; ".join(parts)
        if self.fix:
            text = f"{text}{'' if text.endswith('?') else '.'} Try: {self.fix}"
        return _shown(" ".join(text.split()))

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython prints instead of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class UsageError(DetLLMError):
    """An option, verb or argument that does not exist or is not valid."""


class CanonicalError(DetLLMError):
    """A value that has no canonical form (design: section 3)."""


class StampError(DetLLMError):
    """A stamp that is malformed, too large, of a newer schema, or disagrees with itself."""


class NotebookError(DetLLMError):
    """A file that is not a readable notebook, or that cannot be written."""


class RequestError(DetLLMError):
    """A generation request that cannot be run as specified."""


class ControlError(DetLLMError):
    """A determinism control that cannot be applied."""


class InvarianceError(DetLLMError):
    """A method of batch invariance that is not active, or a level that no method provides."""


class ModelError(DetLLMError):
    """A model that cannot be found, fetched, converted or verified."""


class EngineError(DetLLMError):
    """An engine that failed while it ran."""


class EngineStartError(EngineError):
    """An engine that could not be started."""


class ExecutionError(DetLLMError):
    """A notebook whose execution failed, timed out or lost its kernel."""


class ExpectationError(DetLLMError):
    """Texts that are not as expected after the last try, or that could not be checked."""


class GenerationInterrupted(DetLLMError):  # noqa: N818 - an interrupt is not an error
    """A generation that the user interrupted; it is not stamped."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that begins with `word`, or else the most similar; None without any."""
    import difflib  # every module imports this one, few words are misspelt

    names = list(known)
    begun = [name for name in names if name.startswith(word)] if len(word.lstrip("-")) > 1 else []
    if begun:
        return min(begun, key=len)
    return next(iter(difflib.get_close_matches(word, names, n=1)), None)
