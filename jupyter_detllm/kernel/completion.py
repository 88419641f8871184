"""Tab completion for the magics, through IPython's matcher API."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jupyter_detllm.core.options import option_flag
from jupyter_detllm.engines.base import FAKE, named_engines
from jupyter_detllm.kernel.arguments import (
    ArgumentParser,
    detgen_parser,
    setup_parser,
)
from jupyter_detllm.kernel.commands import VERBS

__all__ = ["candidates", "complete"]

_LINE = re.compile(r"(?:\s*%?|.*?=\s*%)detllm\s+(.*)$", re.DOTALL)
_CELL = re.compile(r"\s*%%detgen\s+([^\n]*)$")
_POLICIES = ("tokens", "bitwise", "within(", "prefix(")
_TYPES = ("float32", "bfloat16", "float16", "auto")
_MOST_ENTRIES = 200


def candidates(text: str, *, first_line: bool, names: Iterable[str] = ()) -> list[str] | None:
    """Return what can follow at the end of `text`, a line up to the cursor.

    Parameters
    ----------
    text
        The line, up to the cursor.
    first_line
        Whether it is the cell's first: `%%detgen` is a magic only there.
    names
        Names of the cells stamped so far.

    Returns
    -------
    list of str or None
        Whole words; None if the line belongs to another magic.
    """
    found = _CELL.match(text) if first_line else None
    if found:
        return _cell_words(found.group(1), names)
    found = _LINE.match(text)
    return _line_words(found.group(1), names) if found else None


def _cell_words(rest: str, names: Iterable[str]) -> list[str]:
    words, fragment = _split(rest)
    values = _values(detgen_parser(), words, names)
    if values is not None:
        return _starting(values, fragment)
    own = [] if any(not word.startswith("-") for word in words) else list(names)
    return _starting([*own, *detgen_parser().option_strings], fragment)


def _line_words(rest: str, names: Iterable[str]) -> list[str]:
    words, fragment = _split(rest)
    if not words:
        return _starting([*VERBS, *setup_parser().option_strings], fragment)
    verb = words[0] if words[0] in VERBS else None
    if verb is None and not words[0].startswith("-"):
        return []
    parser = VERBS[verb].parser if verb else setup_parser()
    values = _values(parser, words, names)
    if values is not None:
        return _starting(values, fragment)
    if len(words) == 1 and not fragment.startswith("-"):
        source = _POSITIONAL.get(verb or "")
        given = source(names) if source is not None else []
        return _starting(given or parser.option_strings, fragment)
    engine = _engine_options(words[1]) if verb == "use" and len(words) > 1 else []
    return _starting([*parser.option_strings, *engine], fragment)


def _split(rest: str) -> tuple[list[str], str]:
    """Return the words before the one at the cursor, and that one so far."""
    words = rest.split()
    if not rest or rest[-1].isspace():
        return words, ""
    return words[:-1], words[-1]


def _values(parser: ArgumentParser, words: list[str], names: Iterable[str]) -> list[str] | None:
    """Return the values of the option before the cursor, None if it takes none."""
    action = parser.action(words[-1]) if words else None
    if action is None or action.nargs == 0:
        return None
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    source = _OPTION_VALUES.get(action.dest)
    return source(names) if source is not None else []


def _models(_names: Iterable[str] = ()) -> list[str]:
    """Return the known models: demo, fake, folders next to the notebook, the hub's cache."""
    from jupyter_detllm.models import DEMO_NAME
    from jupyter_detllm.models.resolve import cached_models

    folders = (f"./{entry.name}" for entry in _entries() if (entry / "config.json").is_file())
    return [DEMO_NAME, *named_engines(), *folders, *cached_models()]


def _notebooks(_names: Iterable[str]) -> list[str]:
    return [entry.name for entry in _entries() if entry.suffix == ".ipynb"]


def _entries() -> list[Path]:
    try:
        return sorted(Path().iterdir())[:_MOST_ENTRIES]
    except OSError:
        return []  # a folder that cannot be listed has nothing to offer


def _engine_options(model: str) -> list[str]:
    """Return engine options: the common ones, or all once vLLM is loaded."""
    from jupyter_detllm.engines.fake.model import ENGINE_DEFAULTS
    from jupyter_detllm.models.adapter import ADAPTER_OPTION

    known: Iterable[str] = ENGINE_DEFAULTS
    if model != FAKE and "vllm" in sys.modules:
        from jupyter_detllm.engines.vllm.options import option_names

        known = sorted(option_names())
    return [option_flag(name) for name in (*known, ADAPTER_OPTION)]


_POSITIONAL: Mapping[str, Callable[[Iterable[str]], list[str]]] = {
    "use": _models,
    "bisect": list,
    "check": _notebooks,
}
_OPTION_VALUES: Mapping[str, Callable[[Iterable[str]], list[str]]] = {
    "policy": lambda _: list(_POLICIES),
    "dtype": lambda _: list(_TYPES),
    "emit": list,
    "forget": list,
    "model": _models,
    "notebook": _notebooks,
}


def _starting(words: Iterable[str], fragment: str) -> list[str]:
    return [word for word in dict.fromkeys(words) if word.startswith(fragment)]


def complete(context: Any, names: Iterable[str]) -> Any:
    """Answer IPython's completer; `context` is its `CompletionContext`."""
    from IPython.core.completer import SimpleCompletion

    text = context.line_with_cursor[: context.cursor_position]
    before = "\n".join(context.full_text.split("\n")[: context.cursor_line])
    words = candidates(text, first_line=not before.strip(), names=names)
    if words is None:
        return {"completions": []}
    fragment = "" if not text or text[-1].isspace() else text.split()[-1]
    return {
        "completions": [SimpleCompletion(text=word, type="magic") for word in words],
        "matched_fragment": fragment,
        # Python names do not belong on a magic's line.
        "suppress": bool(words),
        "ordered": True,
    }
