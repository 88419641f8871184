"""The only place that writes notebooks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jupyter_detllm.core.notebook import JsonObject
from jupyter_detllm.errors import NotebookError
from jupyter_detllm.verify.atomic import check_writable, clean_leftovers, replace_file
from jupyter_detllm.verify.layout import Part
from jupyter_detllm.verify.servers import servers_with
from jupyter_detllm.verify.sources import NotebookFile, digest_of_file
from jupyter_detllm.verify.trust import is_trusted, sign

__all__ = ["WriteResult", "write_notebook"]


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What came of a write.

    Attributes
    ----------
    path
        The file that was written, links followed.
    written
        False when nothing changed: the file is byte for byte as it was.
    trusted
        Whether Jupyter trusted the file, and so does again.
    warnings
        What the user should know, one line each.
    """

    path: Path
    written: bool
    trusted: bool = False
    warnings: tuple[str, ...] = ()


def write_notebook(file: NotebookFile, notebook: JsonObject) -> WriteResult:
    """Replace `file` by `notebook` in the same spelling, atomically.

    Raises
    ------
    NotebookError
        When the file is read-only, changed since it was read, or cannot be written.
    """
    target = _target(file.path)
    if notebook is file.data or notebook == file.data:
        clean_leftovers(target)
        return WriteResult(target, written=False)
    check_writable(target)
    if digest_of_file(target) != file.sha256:
        raise NotebookError(
            f"{file.path} was changed by another program meanwhile: nothing was written",
            fix="run the command again",
        )
    parts = file.style.parts(notebook, file.raw)
    if _are(parts, file.raw):
        return WriteResult(target, written=False)
    warnings = _warnings(file, target)
    trusted = is_trusted(file.data, file.raw)
    replace_file(target, parts, lambda: _unchanged(file, target))
    if trusted and not sign(notebook, file.raw):
        warnings.append(f"{file.path} could not be trusted again: run `jupyter trust {file.path}`")
    return WriteResult(target, True, trusted, tuple(warnings))


def _target(path: Path) -> Path:
    try:
        return path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise NotebookError(f"{path} cannot be followed to a file: {error}") from None


def _are(parts: list[Part], raw: bytes) -> bool:
    """Tell whether `parts` one after the other are `raw`."""
    view, at = memoryview(raw), 0
    for part in parts:
        if view[at : at + len(part)] != part:
            return False
        at += len(part)
    return at == len(raw)


def _unchanged(file: NotebookFile, target: Path) -> bool:
    try:
        return _target(file.path) == target and digest_of_file(target) == file.sha256
    except NotebookError:
        return False


def _warnings(file: NotebookFile, target: Path) -> list[str]:
    out = [
        f"{file.path} is open in the Jupyter server at {url}: reload it there before saving it"
        for url in servers_with(target)
    ]
    if not _are(file.style.parts(file.data, file.raw), file.raw):
        out.append(f"{file.path} had an unusual JSON layout, which was not kept everywhere")
    return out
