"""What pages of Markdown tell a reader to type: commands, their expected output, cells."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PAGES", "ROOT", "Block", "Step", "blocks", "matches", "steps", "typed"]

ROOT = Path(__file__).resolve().parents[1]
_AT_THE_TOP = ("CONTRIBUTING.md", "README.md", "SECURITY.md")
PAGES = tuple(sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in _AT_THE_TOP)]))
_FENCE = re.compile(r"^(`{3,})([^\n`]*)\n(.*?)^\1[ ]*$", re.M | re.S)
_EXIT_CODE = re.compile(r"#.*\bexit code (\d+)")
_SYNOPSIS = re.compile(r"[\[\]|…]|\bCOMMAND\b")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, its text, and where it begins (line, from 1)."""

    language: str
    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Step:
    """A command of a console block, what it prints, and the exit code it ends with.

    Attributes
    ----------
    output
        None where the page shows none; ``...`` stands for any text.
    """

    command: str
    output: str | None
    code: int
    line: int


def blocks(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page in order."""
    for found in _FENCE.finditer(page):
        line = page.count("\n", 0, found.start()) + 1
        yield Block(found[2].strip(), found[3], line)


def steps(block: Block) -> Iterator[Step]:
    """Yield the commands of a console block: lines that begin with ``$``, then output."""
    for part in re.split(r"^(?=\$ )", block.text, flags=re.M):
        command, _, output = part.partition("\n")
        if not command.startswith("$ "):
            assert not part.strip(), f"line {block.line}: output before the first command"
            continue
        code = _EXIT_CODE.search(command)
        yield Step(command[2:], output.rstrip() or None, int(code[1]) if code else 0, block.line)


def matches(expected: str, shown: str) -> bool:
    """Return whether output is what a page shows.

    A line of ``...`` is any lines or none; inside a line it is any text of that line.
    """
    pattern = "".join(
        r"(?:[^\n]*\n)*?"
        if line == "..."
        else r"[^\n]*".join(map(re.escape, line.split("..."))) + r"\n"
        for line in expected.strip().splitlines()
    )
    return re.fullmatch(pattern, shown.strip() + "\n") is not None


def typed(page: str, first: str) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and words of each line in a block that begins with `first`.

    Synopses, which name a choice and not a command, are left out, and so are comments.
    """
    for block in blocks(page):
        if block.language == "text":
            continue
        for number, line in enumerate(block.text.splitlines(), start=block.line + 1):
            words = line.strip().removeprefix("$ ").strip()
            if not first.startswith("%%"):  # there a comment would be part of the line
                words = re.sub(r"\s#\s.*", "", words)
            if words.startswith(f"{first} ") and not _SYNOPSIS.search(words):
                yield number, shlex.split(words.removeprefix(first))
