"""Reports as text, JSON, HTML and JUnit XML. Pure: a report in, a string out.

A format is a module with ``render(report) -> str`` and a row here; another package registers
such a function, under the format's name, as an entry point of ``jupyter_detllm.report_formats``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from jupyter_detllm.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from jupyter_detllm.verify.report import Report

__all__ = ["FORMATS", "file_formats", "render_report"]

FORMATS: dict[str, str] = {
    "text": "",
    "json": "",
    "html": "one HTML page without scripts",
    "junit": "JUnit XML",
}
"""Format, which is the name of the module that renders it, to what a file of it is; "" for those
that are printed. Every other one is an option of the commands that make a report."""

_GROUP = "jupyter_detllm.report_formats"
_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")


@cache
def _installed() -> dict[str, EntryPoint]:
    """Return the formats of other packages, by name; they never replace built-in ones."""
    from importlib.metadata import entry_points

    found = {point.name: point for point in entry_points(group=_GROUP)}
    return {n: found[n] for n in sorted(found) if _NAME.fullmatch(n) and n not in FORMATS}


def file_formats() -> dict[str, str]:
    """Return the formats that are written to files, and what a file of each is."""
    ours = {name: text for name, text in FORMATS.items() if text}
    return ours | {name: f"{name}, by {_package(point)}" for name, point in _installed().items()}


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.module


def render_report(report: Report, form: str) -> str:
    """Return `report` in the format `form`, with a final newline.

    Raises
    ------
    UsageError
        When there is no such format, or an installed one cannot be loaded.
    """
    render: Callable[[Report], str]
    if form in FORMATS:
        render = import_module(f"{__name__}.{form}").render
        return render(report)
    if form not in _installed():
        known = ", ".join([*FORMATS, *_installed()])
        raise UsageError(f"there is no report format {form!r}", expected=known)
    try:
        render = _installed()[form].load()
    except (ImportError, AttributeError) as error:
        package = _package(_installed()[form])
        raise UsageError(f"the report format {form!r} of {package} is broken: {error}") from None
    text = render(report)
    return text if text.endswith("\n") else f"{text}\n"
