"""The fields that differ between two fingerprints, likeliest first, as lines of text."""

from __future__ import annotations

from collections.abc import Iterable

from jupyter_detllm.core.fingerprint import FieldDiff
from jupyter_detllm.render.explain import field_value
from jupyter_detllm.render.visible import clip, visible
from jupyter_detllm.verify.report import EnvironmentReport, NotebookReport

__all__ = ["environment_lines", "heading_of", "informational_heading", "next_step"]

_MOST = 40
_SHOWN_CELLS = 4


def environment_lines(notebook: NotebookReport) -> list[str]:
    """Return the lines about the fingerprints of a comparison, not indented."""
    lines = []
    for found in notebook.environment:
        lines += _lines(found, notebook, several=len(notebook.environment) > 1)
    return lines


def _lines(found: EnvironmentReport, notebook: NotebookReport, *, several: bool) -> list[str]:
    lines = [heading_of(found, several=several)]
    for number, diff in enumerate(found.telling[:_MOST], start=1):
        lines += _field(f"{number:>2}.", diff)
    lines += _more(len(found.telling))
    step = next_step(found)
    lines += [f"    next: {step}"] if step else []
    if found.informational:
        lines.append(informational_heading(found, notebook))
        for diff in found.informational[:_MOST]:
            lines += _field("  -", diff)
        lines += _more(len(found.informational))
    return lines + [f"not compared: {visible(line)}" for line in found.missing]


def _field(mark: str, diff: FieldDiff) -> list[str]:
    sides = f"{field_value(diff.left)} -> {field_value(diff.right)}"
    role = " (identity)" if diff.role.value == "identity" else ""
    lines = [f"{mark} {clip(visible(diff.name), 40)}{role}: {sides}"]
    lines.append(f"    {clip(visible(diff.why), 110)}")
    if diff.align:
        lines.append(f"    align: {clip(visible(diff.align), 110)}")
    return lines


def _more(count: int) -> list[str]:
    return [f"    and {count - _MOST} more (--json lists them)"] if count > _MOST else []


def heading_of(found: EnvironmentReport, *, several: bool) -> str:
    """Return the heading of the fields that can change results."""
    where = f" ({_cells(found.cells)})" if several and found.cells else ""
    if found.telling:
        return f"fields that differ, likeliest to change results first{where}:"
    return f"no field that can change results differs{where}"


def _cells(labels: Iterable[str]) -> str:
    names = [visible(label) for label in labels]
    more = f" and {len(names) - _SHOWN_CELLS} more" if len(names) > _SHOWN_CELLS else ""
    return ", ".join(names[:_SHOWN_CELLS]) + more


def next_step(found: EnvironmentReport) -> str | None:
    """Say which field to align first, and what is left after that."""
    if not found.telling:
        return None
    first, *rest = (visible(diff.name) for diff in found.telling)
    if not rest:
        return f"align {first} and compare again; no other field that can change results differs"
    names = ", ".join(rest[:3]) + (f" and {len(rest) - 3} more" if len(rest) > 3 else "")
    return f"align {first} and compare again; left after that: {names}"


def informational_heading(found: EnvironmentReport, notebook: NotebookReport) -> str:
    """Return the heading of the informational fields, by what is known about outputs."""
    compared = [cell.outcome.facts.comparison for cell in notebook.cells]
    known = [comparison for comparison in compared if comparison is not None]
    if any(not comparison.tokens_equal for comparison in known) and not found.telling:
        return "informational fields that differ; none is known to change results by itself:"
    # Without a pair nothing was compared, and nothing is equal.
    if known and all(c.pairs and c.complete and c.tokens_equal for c in known):
        return "also different, unlikely to matter since the outputs are equal:"
    return "also different, unlikely to matter while outputs are equal:"
