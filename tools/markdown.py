"""Small pieces of Markdown that generated pages are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["NOTE", "table"]

NOTE = "<!-- Written by `python -m tools.make_docs`; change the table in the code instead. -->\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; bars and line ends inside of cells are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    cells = ([_cell(cell) for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


def _cell(text: str) -> str:
    return text.replace("\\|", "|").replace("|", "\\|").replace("\n", " ")
