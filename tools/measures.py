"""The measures of the package's shape: modules, circles, what one cell or replay runs through.

    python -m tools.measures            all of them, as a table
    python -m tools.measures --json     as JSON

"Entered" are the modules of which at least one function is called, in every process that
takes part; importing a module does not count. That there are no circles is also a contract of
import-linter (`make lint`).
"""

from __future__ import annotations

import argparse
import ast
import collections
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

__all__ = ["circles", "main", "measure", "package_imports"]

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "jupyter_detllm"
_CORE = Path("labextension", "src", "core")

# Loaded by every Python below: writes down each file of the package in which a function is
# called, once it is switched on. Written at once, since a worker may end without its exit hooks.
_TRACER = """
import os, sys, threading
_root, _out, _seen = os.environ["MEASURED_PACKAGE"], os.environ["MEASURED_OUT"], set()
def _note(frame, event, arg):
    code = frame.f_code
    if event == "call" and code.co_flags & 1 and code.co_filename.startswith(_root):
        if code.co_filename not in _seen:
            _seen.add(code.co_filename)
            with open(_out, "a") as file:
                file.write(code.co_filename + "\\n")
def switch_on():
    threading.setprofile(_note)
    sys.setprofile(_note)
if os.environ.get("MEASURED_FROM_START"):
    switch_on()
"""
_CELL = """
import contextlib, io, sitecustomize
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
with contextlib.redirect_stdout(io.StringIO()):
    shell.run_line_magic("load_ext", "jupyter_detllm")
    shell.run_cell("%detllm use fake").raise_error()
    sitecustomize.switch_on()
    shell.run_cell("%%detgen\\nA first line.").raise_error()
"""
_NOTEBOOK = ("%load_ext jupyter_detllm", "%detllm use fake", "%%detgen\nA first line.")


def main(argv: list[str] | None = None) -> int:
    """Print the measures."""
    parser = argparse.ArgumentParser(prog="python -m tools.measures")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    measured = measure()
    if arguments.json:
        sys.stdout.write(json.dumps(measured, indent=2) + "\n")
        return 0
    width = max(map(len, measured))
    for name, value in measured.items():
        text = ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
        sys.stdout.write(f"{name:<{width}}  {text}\n")
    return 0


def measure() -> dict[str, object]:
    """Return every measure by name."""
    modules = _modules()
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in modules.items()}
    length, longest = max(_lengths(trees))
    annotated, functions = _annotated(trees.values())
    found = circles(package_imports())
    return {
        "modules": len(modules),
        "lines": sum(_lines(path) for path in modules.values()),
        "modules entered by one %%detgen cell": len(_entered_by_cell()),
        "modules entered by one replay": len(_entered_by_replay()),
        "circles between folders or modules": [" <-> ".join(circle) for circle in found],
        "TypeScript core, lines": sum(_lines(path) for path in (ROOT / _CORE).rglob("*.ts")),
        "longest function, lines": f"{length} ({longest})",
        "annotated returns": f"{100 * annotated / functions:.2f} % ({annotated} of {functions})",
        "class names used twice or more": _repeated(trees.values()),
    }


def _modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _lengths(trees: Mapping[str, ast.Module]) -> Iterator[tuple[int, str]]:
    for name, tree in trees.items():
        for node in _functions(tree):
            yield (node.end_lineno or node.lineno) - node.lineno + 1, f"{name}.{node.name}"


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def _annotated(trees: Iterable[ast.Module]) -> tuple[int, int]:
    found = [node.returns is not None for tree in trees for node in _functions(tree)]
    return sum(found), len(found)


def _repeated(trees: Iterable[ast.Module]) -> list[str]:
    names = collections.Counter(
        node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )
    return sorted(f"{name} ({count})" for name, count in names.items() if count > 1)


def package_imports() -> dict[str, set[str]]:
    """Return what each module imports, lazily or not; imports for type checkers are left out."""
    modules, found = _modules(), {}
    for name, path in modules.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found[name] = {target for target in _imported(tree, modules) if target != name}
    return found


def _imported(tree: ast.AST, modules: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield from (name for name in (full, node.module) if name in modules)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        else:
            yield from _imported(node, modules)


def circles(imports: Mapping[str, set[str]]) -> list[tuple[str, ...]]:
    """Return the circles of imports, of folders and of modules, each as its sorted members.

    Parameters
    ----------
    imports
        What each module imports, by dotted names.
    """
    folders: dict[str, set[str]] = {}
    for name, targets in imports.items():
        source = _folder(name)
        folders.setdefault(source, set()).update(_folder(t) for t in targets)
        folders[source].discard(source)
    # A package of modules is a node, too: what is in `package/__init__.py` may be imported.
    own = {name: {t for t in targets if t != PACKAGE} for name, targets in imports.items()}
    found = [*_components(folders), *_components(own)]
    return sorted(set(found))


def _folder(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _components(graph: Mapping[str, set[str]]) -> list[tuple[str, ...]]:
    """Return the strongly connected components of two nodes or more."""
    reach = {node: _reachable(graph, node) for node in graph}
    found = {
        tuple(sorted(other for other in reach[node] if node in reach.get(other, ())))
        for node in graph
        if node in reach[node]
    }
    return sorted(one for one in found if len(one) > 1)


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += graph.get(node, ())
    return seen


def _entered_by_cell() -> list[str]:
    """Return the modules that one `%%detgen` cell runs through, its engine being there."""
    with tempfile.TemporaryDirectory() as folder:
        return _traced(["-c", _CELL], Path(folder), from_start=False)


def _entered_by_replay() -> list[str]:
    """Return the modules that a ``replay`` of one cell runs through, in all its processes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cells = [_cell(i, text) for i, text in enumerate(_NOTEBOOK)]
        book = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
        path = folder / "book.ipynb"
        path.write_text(json.dumps(book), encoding="utf-8")
        for verb in (["rerun", "--save"], ["stamp"]):
            _run(["-m", PACKAGE, *verb, str(path)], _environ(), accepted=(0, 3))
        return _traced(["-m", PACKAGE, "replay", str(path)], folder, from_start=True)


def _cell(number: int, source: str) -> dict[str, object]:
    return {
        "cell_type": "code",
        "id": f"cell-{number}",
        "source": source,
        "metadata": {},
        "outputs": [],
        "execution_count": None,
    }


def _traced(arguments: list[str], folder: Path, *, from_start: bool) -> list[str]:
    (folder / "sitecustomize.py").write_text(_TRACER, encoding="utf-8")
    out = folder / "entered.txt"
    environ = {
        **_environ(str(folder)),
        "MEASURED_PACKAGE": str(ROOT / PACKAGE),
        "MEASURED_OUT": str(out),
        "MEASURED_FROM_START": "1" if from_start else "",
        "JUPYTER_DETLLM_CACHE": str(folder / "cache"),
    }
    _run(arguments, environ, accepted=(0,))
    return sorted(set(out.read_text(encoding="utf-8").splitlines()))


def _environ(*first: str) -> dict[str, str]:
    """Return this process's variables, with this checkout's package before an installed one."""
    path = [*first, str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in path if part)}


def _run(arguments: list[str], environ: dict[str, str], *, accepted: tuple[int, ...]) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], env=environ, capture_output=True, text=True, timeout=300
    )
    if done.returncode not in accepted:
        raise RuntimeError(f"{arguments[:3]} ended with {done.returncode}: {done.stderr[-2000:]}")


if __name__ == "__main__":
    sys.exit(main())
