"""Shared by subcommands that write notebooks: read, change, write, report changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from jupyter_detllm.cli._output import notice, write, write_json
from jupyter_detllm.core.canonical import Json
from jupyter_detllm.core.notebook import JsonObject
from jupyter_detllm.core.promotion import Change, ChangeKind
from jupyter_detllm.errors import DetLLMError
from jupyter_detllm.render.visible import visible
from jupyter_detllm.verify.sources import NotebookFile, read_file
from jupyter_detllm.verify.update import write_notebook

__all__ = ["Edit", "Editor", "edit", "print_edits", "worst"]

Editor: TypeAlias = Callable[[NotebookFile], tuple[JsonObject, tuple[Change, ...], int, str]]
"""Maps a file to the new notebook, the changes, an exit code and a closing line."""


@dataclass(frozen=True, slots=True)
class Edit:
    """The result for one file."""

    path: str
    code: int
    written: bool = False
    changes: tuple[Change, ...] = ()
    summary: str = ""
    error: str | None = None


def edit(path: str, editor: Editor) -> Edit:
    """Apply `editor` to a file; warnings go to stderr as they come."""
    try:
        file = read_file(path)
        notebook, changes, code, summary = editor(file)
        result = write_notebook(file, notebook)
    except DetLLMError as error:
        text = str(error)
        named = path in text or path.rpartition("/")[2] in text
        return Edit(path, error.exit_code, error=text if named else f"{path}: {text}")
    for warning in result.warnings:
        notice(f"warning: {warning}")
    return Edit(path, code, result.written, changes, summary)


def worst(edits: list[Edit]) -> int:
    """Return the exit code of several files: 2 before 1 before 3 before 0."""
    return max((e.code for e in edits), key=(0, 3, 1, 2).index, default=0)


def print_edits(edits: list[Edit], words: Mapping[ChangeKind, str], *, as_json: bool) -> None:
    """Print what was done: errors on stderr, the rest on stdout."""
    for done in edits:
        if done.error is not None:
            notice(f"error: {done.error}")
    if as_json:
        write_json([_json(done) for done in edits])
        return
    for done in edits:
        if done.error is None:
            write(_text(done, words))


def _text(done: Edit, words: Mapping[ChangeKind, str]) -> str:
    lines = [f"{visible(done.path)}: {'written' if done.written else 'not changed'}"]
    lines += [
        f"  {visible(change.label)}: {words[change.kind]}: {visible(change.why)}"
        for change in done.changes
    ]
    if done.summary:
        lines.append(f"  {done.summary}")
    return "\n".join(lines)


def _json(done: Edit) -> dict[str, Json]:
    changes: list[Json] = [
        {"cell": change.label, "change": change.kind.value, "why": change.why}
        for change in done.changes
    ]
    return {
        "path": done.path,
        "exit_code": done.code,
        "written": done.written,
        "changes": changes,
        "summary": done.summary,
        "error": done.error,
    }
