"""The result of a self-test, as a table and as JSON. Pure."""

from __future__ import annotations

import json

from jupyter_detllm.engines.selftest import CompositionRow, SelfTest
from jupyter_detllm.invariance.base import KernelRow
from jupyter_detllm.render.visible import aligned, visible
from jupyter_detllm.verify.probing import Probing

__all__ = ["probing_json", "probing_text", "table_text"]


def table_text(test: SelfTest) -> str:
    """Return one test: its method, a line per kernel and per batch composition, its reach."""
    verdict = "holds" if test.held else "does not hold"
    lines = [f"batch invariance with method {test.method}: {verdict}"]
    if test.kernels:
        rows = [("kernel", "equal", "first difference"), *map(_kernel, test.kernels)]
        lines += [*aligned(rows), ""]
    if test.rows:
        head = ("composition", "equal", "tokens", "first difference")
        lines += aligned([head, *map(_row, test.rows)])
    if test.reach is not None:
        lines.append(f"  reach: {test.reach}")
    if not test.evidence:
        lines.append("  this engine gives no logprobs: only tokens and texts were compared")
    return "\n".join(lines)


def _kernel(row: KernelRow) -> tuple[str, ...]:
    first = row.first or ("-" if row.held else "nothing was compared")
    return (visible(row.name), f"{row.bitwise}/{row.compared}", visible(first))


def _row(row: CompositionRow) -> tuple[str, str, str, str]:
    first = row.first or ("-" if row.reached else "not reached: it did not happen")
    return (
        visible(row.composition),
        f"{row.bitwise}/{row.completions}",
        f"{row.tokens_equal}/{row.completions}",
        visible(first),
    )


def probing_text(found: Probing) -> str:
    """Return every method that was tried, and those that could not be."""
    parts = [f"{visible(found.model)} at level {found.level}"]
    parts += [table_text(test) for test in found.tests]
    parts += [visible(note) for note in found.notes]
    return "\n\n".join(parts) + "\n"


def probing_json(found: Probing) -> str:
    """Return the same as a JSON object."""
    value = {
        "schema": "detllm.probe/1",
        "model": found.model,
        "level": found.level.value,
        "held": found.held,
        "tests": [test.to_json() for test in found.tests],
        "notes": list(found.notes),
    }
    return json.dumps(value, indent=2) + "\n"
