"""``jupyter detllm fingerprint``: of this environment, or those a notebook holds."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jupyter_detllm.cli._options import add_json
from jupyter_detllm.cli._output import notice, target_file, write, write_json
from jupyter_detllm.core.canonical import Json
from jupyter_detllm.core.fields import Group
from jupyter_detllm.core.fingerprint import PACKAGES_FIELD, FieldValue, Fingerprint
from jupyter_detllm.core.notebook import NotebookView, Which, read_notebook
from jupyter_detllm.core.packages import package_lists
from jupyter_detllm.core.stamp import ModelIdentity
from jupyter_detllm.errors import StampError, UsageError
from jupyter_detllm.render.visible import clip, visible
from jupyter_detllm.verify.sources import read_file
from jupyter_detllm.verify.update import replace_file

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("notebook", nargs="?", metavar="NOTEBOOK", help="a notebook file")
    parser.add_argument(
        "--side",
        choices=[Which.REFERENCE.value, Which.ACTUAL.value],
        help="only the fingerprints of references, or of outputs",
    )
    parser.add_argument("--cell", metavar="CELL", help="only those of this cell: name or number")
    parser.add_argument("--out", metavar="FILE", help="also write the fingerprint to FILE, as JSON")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the fingerprint; 3 when a notebook holds none."""
    if args.notebook is None:
        return _environment(args)
    return _of_notebook(args)


def _environment(args: argparse.Namespace) -> int:
    from jupyter_detllm.controls.ledger import StandingControls
    from jupyter_detllm.probes import collect_environment
    from jupyter_detllm.probes.software import package_list

    if args.side or args.cell:
        raise UsageError("--side and --cell choose among the stamps of a notebook", expected="one")
    fingerprint = collect_environment(control_report=StandingControls(os.environ))
    _save(args, fingerprint, package_list())
    if args.json:
        write_json(_json(fingerprint))
    else:
        write("\n".join(_lines(fingerprint)))
        write("engine fields are read from a running engine: `%detllm status` shows them")
    return 0


def _of_notebook(args: argparse.Namespace) -> int:
    data = read_file(args.notebook).data
    view = read_notebook(data)
    found, users = _used(_chosen(view, args.cell, Which(args.side or Which.BOTH)))
    problems = [*view.problems, *(p for cell in view.cells for p in cell.problems)]
    for problem in problems:
        notice(f"error: {args.notebook}: {problem}")
    if args.out is not None:
        only = _only(view, found, args)
        listed = only.informational.get(PACKAGES_FIELD)
        _save(args, only, package_lists(data).get(str(listed), ()))
    if args.json:
        write_json([{**_json(f), "used_by": [*users[d]]} for d, f in found.items()])
    for digest, fingerprint in [] if args.json else found.items():
        write("\n".join(_lines(fingerprint, users[digest])))
    if problems:
        return 2
    if not found:
        notice(f"{args.notebook} holds no fingerprint: no cell is stamped")
        return 3
    return 0


def _used(view: NotebookView) -> tuple[dict[str, Fingerprint], dict[str, list[str]]]:
    """Return the fingerprints by digest, with the model where it is one, and who used each."""
    users: dict[str, list[str]] = {digest: [] for digest in view.fingerprints}
    models: dict[str, dict[ModelIdentity, Fingerprint]] = {}
    for cell in view.cells:
        for side, stamp in (("reference", cell.reference), ("output", cell.actual)):
            environment = stamp.environment if stamp is not None else None
            if stamp is not None and environment is not None:
                digest = str(stamp.fingerprint_digest)
                users.setdefault(digest, []).append(f"{cell.label}, {side}")
                models.setdefault(digest, {}).setdefault(stamp.model, environment)
    found = dict(view.fingerprints)
    for digest, (first, *others) in ((d, [*m.values()]) for d, m in models.items()):
        plain = Fingerprint(first.numerics, {}, first.informational)
        found[digest] = found.get(digest, plain) if others else first
    return found, users


def _json(fingerprint: Fingerprint) -> dict[str, Json]:
    return {**fingerprint.to_json(), "digest": str(fingerprint.digest)}


def _chosen(view: NotebookView, cell: str | None, side: Which) -> NotebookView:
    """Return the notebook with only the stamps that the options choose."""
    cells = view.cells
    if cell is not None:
        cells = tuple(c for c in cells if cell in (c.name, str(c.number)))
        if not cells:
            names = ", ".join(c.name or str(c.number) for c in view.cells[:8])
            raise UsageError(f"no stamped cell is {cell[:40]!r}", expected=names or "none")
    if side is Which.REFERENCE:
        cells = tuple(replace(c, actual=None) for c in cells)
    elif side is Which.ACTUAL:
        cells = tuple(replace(c, reference=None) for c in cells)
    if cell is None and side is Which.BOTH:
        return view
    stamps = [stamp for c in cells for stamp in (c.reference, c.actual) if stamp is not None]
    used = {str(stamp.fingerprint_digest) for stamp in stamps}
    kept = {digest: f for digest, f in view.fingerprints.items() if digest in used}
    return replace(view, cells=cells, fingerprints=kept)


def _only(
    view: NotebookView, found: dict[str, Fingerprint], args: argparse.Namespace
) -> Fingerprint:
    """Return the fingerprint to write: the only one, or the only recorded one."""
    if len(found) > 1 and args.side is None:
        recorded, _ = _used(_chosen(view, args.cell, Which.REFERENCE))
        if len(recorded) == 1:
            notice("written: the recorded one (that of the outputs: --side actual)")
            return next(iter(recorded.values()))
    if len(found) != 1:
        raise UsageError(
            f"--out writes one fingerprint, and {len(found)} were found",
            fix="--side reference, --side actual or --cell NAME; --json prints all of them",
        )
    return next(iter(found.values()))


def _save(args: argparse.Namespace, found: Fingerprint, packages: Sequence[str]) -> None:
    if args.out is None:
        return
    expected = "a new file, or an older one"
    target = target_file(args.out, _is_fingerprint, "holds no fingerprint", expected)
    listed: dict[str, Json] = {"packages": list(packages)} if packages else {}
    data = json.dumps({**_json(found), **listed}, indent=2) + "\n"
    replace_file(target, [data.encode("utf-8")], lambda: True)


def _is_fingerprint(target: Path) -> bool:
    try:
        Fingerprint.from_json(json.loads(target.read_bytes()))
    except (OSError, ValueError, StampError):
        return False
    return True


def _lines(fingerprint: Fingerprint, users: list[str] | None = None) -> list[str]:
    values = fingerprint.values()
    lines = [f"fingerprint {fingerprint.digest.short}  (digest over the numerics fields)"]
    lines += [f"  used by {visible(user)}" for user in users or []]
    for group in Group:
        names = [name for name in values if name.split(".")[0] == group.value]
        if names:
            lines += ["", group.value]
            lines += [_line(fingerprint, name, values[name]) for name in names]
    others = [n for n in values if n.split(".")[0] not in set(Group)]
    if others:
        lines += ["", "of another version", *(_line(fingerprint, n, values[n]) for n in others)]
    return [*lines, ""]


def _line(fingerprint: Fingerprint, name: str, value: FieldValue) -> str:
    role = fingerprint.role_of(name)
    shown = clip(visible(str(value)), 80)
    return f"  {visible(name.partition('.')[2]):<26} {role:<14} {shown}"
