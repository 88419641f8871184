"""Where a cell's source asks for generations: its `%%detgen` line. Nothing is executed.

The line may be under other cell magics that run their body (`%%time`, `%%capture`), and a cell may
call the magic by `run_cell_magic`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["CELL_NAME", "DetgenLine", "detgen_line", "emits_stamps", "magic_line"]

# labextension/src/core/source.ts has the same two patterns and the same names.
_OUTER = re.compile(r"\s*%%(\S+)(?:[^\S\n][^\n]*)?\n")
_MAGIC = re.compile(rf"(?P<outer>(?:{_OUTER.pattern})*?)\s*%%detgen(?![\w?])(?P<line>.*)")
# fmt: off
_NOT_RUN = frozenset((
    "!", "bash", "cmd", "file", "html", "HTML", "javascript", "js", "latex", "markdown", "perl",
    "pypy", "python", "python2", "python3", "ruby", "script", "sh", "svg", "SVG", "sx", "system",
    "writefile",
))
# fmt: on
"""Cell magics of IPython whose body is no code of this kernel."""

CELL_NAME = re.compile(r"[A-Za-z_][\w.-]{0,199}")
"""What names a cell, in its line and in its stamp."""

_HELP = re.compile(r"\s+(?:-h|--help)(?:\s.*)?|.*\s(?:-h|--help)\s*")
"""A line that asks for help, as `kernel.arguments` reads it: nothing is generated."""

_CALL = "run_cell_magic"
_ESCAPED = re.compile(r"^([ \t]*)[%!?].*$", re.MULTILINE)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


_EMITS = re.compile(r"^[ \t]*%detllm[ \t]+stamps\b[^\n]*--emit\b", re.MULTILINE)


def emits_stamps(source: str) -> bool:
    """Return whether a cell shows stamps of other cells (`%detllm stamps --emit`)."""
    return _EMITS.search(source) is not None


class DetgenLine(NamedTuple):
    """What follows `%%detgen` in a cell.

    Attributes
    ----------
    text
        The rest of its line.
    shows
        Whether what it generates is shown by the cell itself: not known of a call inside other
        code.
    """

    text: str
    shows: bool


def magic_line(source: str) -> str | None:
    """Return the rest of the `%%detgen` line; None if the cell has none.

    A line under a magic that writes or sends its body elsewhere generates nothing.
    """
    found = _MAGIC.match(source)
    if found is None or not _NOT_RUN.isdisjoint(_OUTER.findall(found["outer"])):
        return None
    return found["line"]


def detgen_line(source: str) -> DetgenLine | None:
    """Return the `%%detgen` line of a cell, also one that is passed to `run_cell_magic`.

    None if nothing is generated: there is no such line, or it only asks for help.
    """
    line = magic_line(source)
    if line is not None:
        return None if _HELP.fullmatch(line) else DetgenLine(line, shows=True)
    return _called(source) if _CALL in source and "detgen" in source else None


def _called(source: str) -> DetgenLine | None:
    code = source
    while (outer := _OUTER.match(code)) is not None:
        if outer[1] in _NOT_RUN:
            return None
        code = code[outer.end() :]
    try:
        tree = ast.parse(_ESCAPED.sub(r"\1pass", code))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    statements = {id(node.value) for node in tree.body if isinstance(node, ast.Expr)}
    for call in _calls(tree):
        name, line = _argument(call, 0, "magic_name"), _argument(call, 1, "line")
        if name == "detgen":
            # Inside another statement its output may go elsewhere, or nowhere.
            return DetgenLine(f" {line or ''}", shows=id(call) in statements)
    return None


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls of `run_cell_magic` in code that runs with the cell, in order."""
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, _SCOPES):
            continue
        if isinstance(node, ast.Call):
            target = node.func
            if _CALL in (getattr(target, "attr", None), getattr(target, "id", None)):
                yield node
        nodes.extend(reversed(list(ast.iter_child_nodes(node))))


def _argument(call: ast.Call, index: int, name: str) -> str | None:
    """Return an argument that is a text in the source; None for anything else."""
    named = (word.value for word in call.keywords if word.arg == name)
    given = call.args[index] if index < len(call.args) else next(named, None)
    return given.value if isinstance(given, ast.Constant) and isinstance(given.value, str) else None
