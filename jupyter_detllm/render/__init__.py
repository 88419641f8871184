"""Reports as text, JSON, HTML and JUnit XML. Pure: a report in, a string out.

A format is a module with ``render(report) -> str`` and a row here.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from jupyter_detllm.errors import UsageError

if TYPE_CHECKING:
    from jupyter_detllm.verify.report import Report

__all__ = ["FORMATS", "render_report"]

FORMATS: dict[str, str] = {
    "text": "jupyter_detllm.render.text",
    "json": "jupyter_detllm.render.json",
    "html": "jupyter_detllm.render.html",
    "junit": "jupyter_detllm.render.junit",
}
"""Format name to the module that renders it, imported on use."""


def render_report(report: Report, form: str) -> str:
    """Return `report` in the format `form`; it ends with a line end.

    Raises
    ------
    UsageError
        When there is no such format.
    """
    if form not in FORMATS:
        raise UsageError(f"there is no report format {form!r}", expected=", ".join(FORMATS))
    render: Callable[[Report], str] = import_module(FORMATS[form]).render
    return render(report)
