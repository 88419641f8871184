"""A notebook's code as statements: parsed, never executed.

Magics and shell lines are removed, by their form alone, before Python's parser sees a cell. A
cell that still cannot be parsed is reported, so that silence does not look like success.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["MISSING", "OPAQUE", "Assignment", "CallSite", "Code", "MagicLine", "Place", "read_code"]

_LINE = re.compile(r"(?P<indent>[ \t]*)(?P<target>[\w.,\[\]'\" ]+=[ \t]*)?(?P<text>[%!?].*)")
#: Magics that IPython takes without their sign.
_AUTOMAGIC = re.compile(r"[ \t]*(?:pip3?|conda|mamba|ls|cd|cat|load_ext)[ \t]+[^\s=(.,].*")
_CELL = re.compile(r"\s*%%(?P<name>\w+)(?P<rest>[^\n]*)(?:\n(?P<body>.*))?\Z", re.DOTALL)
_PYTHON_CELLS = frozenset({"time", "timeit", "capture", "prun", "memit", "python", "python3"})
_SHELL_CELLS = frozenset({"bash", "sh", "script", "system", "sx"})


class _Absent:
    """A value that is missing or unknown."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


MISSING = _Absent("MISSING")
"""No value was given."""

OPAQUE = _Absent("OPAQUE")
"""A value was given, but only execution would show which."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A place in a notebook: the cell, counted from 1 over all cells, and the line."""

    cell: int
    line: int

    def __str__(self) -> str:
        return f"cell {self.cell}, line {self.line}"


@dataclass(frozen=True, slots=True)
class MagicLine:
    """A magic or shell line; a cell magic with its body."""

    place: Place
    text: str
    body: str = ""

    @property
    def shell(self) -> str:
        """The shell commands in it, "" for a magic of another kind."""
        if self.text.startswith("!"):
            return self.text.lstrip("!")
        name = self.text.removeprefix("%%").split(maxsplit=1)[:1]
        return self.body if name and name[0] in _SHELL_CELLS else ""


@dataclass(frozen=True, slots=True)
class CallSite:
    """A call, its name resolved through the notebook's imports (``numpy.random.seed``).

    If the receiver is a value, its name comes first (``model.train``), or nothing if it is an
    expression (``.train``).
    """

    place: Place
    name: str
    node: ast.Call

    def keyword(self, name: str) -> object:
        """Return the literal value of a keyword, or `MISSING` or `OPAQUE`."""
        for item in self.node.keywords:
            if item.arg == name:
                return literal(item.value)
        opaque = any(item.arg is None for item in self.node.keywords)
        return OPAQUE if opaque else MISSING

    def spells(self, name: str) -> bool:
        """Return whether a keyword is written out, not perhaps in ``**options``."""
        return any(item.arg == name for item in self.node.keywords)

    def argument(self, index: int) -> object:
        """Return the literal value of a positional argument."""
        if index < len(self.node.args):
            return literal(self.node.args[index])
        return MISSING


@dataclass(frozen=True, slots=True)
class Assignment:
    """An assignment to an attribute or an item, target resolved as a call's name is."""

    place: Place
    target: str
    value: object


@dataclass(frozen=True, slots=True)
class Code:
    """The code of one notebook's cells, in order.

    Attributes
    ----------
    label
        The notebook's file, or another source of the cells; "" where there are none.
    imports
        Dotted module name to where it is first imported.
    unparsed
        Numbers of cells whose code could not be parsed.
    kernel
        Name of the notebook's kernel; "" if it has none.
    """

    label: str = ""
    calls: tuple[CallSite, ...] = ()
    lines: tuple[MagicLine, ...] = ()
    assignments: tuple[Assignment, ...] = ()
    imports: Mapping[str, Place] = field(default_factory=dict)
    unparsed: tuple[int, ...] = ()
    kernel: str = ""

    def calls_to(self, *names: str) -> tuple[CallSite, ...]:
        """Return the calls whose name is, or ends in, one of `names`."""
        return tuple(call for call in self.calls if ends_in(call.name, names))

    def magics(self, name: str) -> tuple[MagicLine, ...]:
        """Return the lines of one magic, such as ``%detllm`` or ``%%detgen``."""
        return tuple(line for line in self.lines if line.text.split(maxsplit=1)[0] == name)

    def first_import(self, *modules: str) -> Place | None:
        """Return where the first of `modules`, or a part of one, is imported."""
        found = [
            place
            for name, place in self.imports.items()
            if any(name == module or name.startswith(f"{module}.") for module in modules)
        ]
        return min(found, default=None)


def ends_in(name: str, endings: Iterable[str]) -> bool:
    """Return whether a dotted name is one of `endings`, or ends in ``.ENDING``."""
    return any(name == end or name.endswith(f".{end}") for end in endings)


def literal(node: ast.expr) -> object:
    """Return the value of a literal, `OPAQUE` for anything that would have to run."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return OPAQUE


def read_code(cells: Sequence[tuple[int, str]], *, label: str, kernel: str = "") -> Code:
    """Parse code cells.

    Parameters
    ----------
    cells
        Number and source of each code cell, in order.
    label, kernel
        As `Code` has them.
    """
    reader = _Reader()
    for number, source in cells:
        reader.cell(number, source)
    return Code(
        label,
        tuple(reader.calls),
        tuple(reader.lines),
        tuple(reader.assignments),
        dict(reader.imports),
        tuple(reader.unparsed),
        kernel,
    )


class _Reader:
    """Visits the cells; names bound by imports are kept from cell to cell."""

    def __init__(self) -> None:
        self.calls: list[CallSite] = []
        self.lines: list[MagicLine] = []
        self.assignments: list[Assignment] = []
        self.imports: dict[str, Place] = {}
        self.unparsed: list[int] = []
        self._bound: dict[str, str] = {}

    def cell(self, number: int, source: str) -> None:
        first = 1
        magic = _CELL.match(source)
        if magic:
            text, body = f"%%{magic['name']}{magic['rest']}", magic["body"] or ""
            first = 2 + source[: source.index("%%")].count("\n")
            self.lines.append(MagicLine(Place(number, first - 1), text.rstrip(), body))
            if magic["name"] not in _PYTHON_CELLS:
                return
            source = body
        tree = _parse(source)
        if tree is None:
            source = self._without_magics(number, first, source)
            tree = _parse(source)
        if tree is None:
            self.unparsed.append(number)
            return
        try:
            for node in _in_order(tree):
                self._node(Place(number, getattr(node, "lineno", 1) + first - 1), node)
        except RecursionError:  # a name of a thousand parts
            self.unparsed.append(number)

    def _without_magics(self, number: int, first: int, source: str) -> str:
        """Return the source with magics replaced by placeholders, and record each magic."""
        out = []
        for index, text in enumerate(_joined(source)):
            if _AUTOMAGIC.fullmatch(text):
                text = f"%{text.lstrip()}"
            found = _LINE.fullmatch(text.rstrip()) if text.strip() else None
            help_line = text.rstrip().endswith("?") and not text.lstrip().startswith("#")
            if found is None and not help_line:
                out.append(text)
                continue
            if found is not None:
                self.lines.append(MagicLine(Place(number, first + index), found["text"].strip()))
            indent = text[: len(text) - len(text.lstrip())]
            out.append(f"{indent}{(found and found['target']) or ''}None")
        return "\n".join(out)

    def _node(self, place: Place, node: ast.AST) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            self._import(place, node)
        elif isinstance(node, ast.Call):
            self.calls.append(CallSite(place, self._dotted(node.func), node))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute | ast.Subscript):
                    name = self._dotted(target)
                    self.assignments.append(Assignment(place, name, literal(node.value)))

    def _import(self, place: Place, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.Import):
                self.imports.setdefault(alias.name, place)
                self._bound[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
            elif node.module and not node.level:
                self.imports.setdefault(node.module, place)
                self._bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def _dotted(self, node: ast.AST) -> str:
        """Return the name of a function or target; "" at the front for an expression."""
        if isinstance(node, ast.Name):
            return self._bound.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return f"{self._dotted(node.value)}.{node.attr}"
        if isinstance(node, ast.Subscript):
            key = literal(node.slice)
            return f"{self._dotted(node.value)}[{key if isinstance(key, str) else ''}]"
        return ""


def _parse(source: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():  # an invalid escape is not this check's concern
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _joined(source: str) -> Iterator[str]:
    """Yield lines; a magic continued by backslashes is one line, followed by empty ones."""
    lines = source.split("\n")
    index = 0
    while index < len(lines):
        text, extra = lines[index], 0
        if text.lstrip()[:1] in ("%", "!"):
            while text.endswith("\\") and index + extra + 1 < len(lines):
                extra += 1
                text = f"{text[:-1].rstrip()} {lines[index + extra].strip()}"
        yield text
        yield from [""] * extra
        index += extra + 1


def _in_order(tree: ast.Module) -> list[ast.AST]:
    nodes = [node for node in ast.walk(tree) if hasattr(node, "lineno")]
    return sorted(nodes, key=lambda node: (node.lineno, node.col_offset))  # type: ignore[attr-defined]
