"""``jupyter detllm fingerprint``: of this environment, or those a notebook holds."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from jupyter_detllm.cli._options import add_json
from jupyter_detllm.cli._output import notice, target_file, write, write_json
from jupyter_detllm.core.canonical import Json
from jupyter_detllm.core.fields import Group
from jupyter_detllm.core.fingerprint import FieldValue, Fingerprint
from jupyter_detllm.core.notebook import NotebookView, read_notebook
from jupyter_detllm.core.stamp import ModelIdentity
from jupyter_detllm.errors import StampError, UsageError
from jupyter_detllm.render.visible import clip, visible
from jupyter_detllm.verify.sources import read_file
from jupyter_detllm.verify.update import replace_file

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("notebook", nargs="?", metavar="NOTEBOOK", help="a notebook file")
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

    fingerprint = collect_environment(control_report=StandingControls(os.environ))
    _save(args, [fingerprint])
    if args.json:
        write_json(_json(fingerprint))
    else:
        write("\n".join(_lines(fingerprint)))
        write("engine fields are read from a running engine: `%detllm status` shows them")
    return 0


def _of_notebook(args: argparse.Namespace) -> int:
    view = read_notebook(read_file(args.notebook).data)
    found, users = _used(view)
    problems = [*view.problems, *(p for cell in view.cells for p in cell.problems)]
    for problem in problems:
        notice(f"error: {args.notebook}: {problem}")
    _save(args, list(found.values()))
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


def _save(args: argparse.Namespace, found: list[Fingerprint]) -> None:
    if args.out is None:
        return
    if len(found) != 1:
        raise UsageError(
            f"--out writes one fingerprint, and {len(found)} were found",
            fix="--json prints all of them",
        )
    expected = "a new file, or an older one"
    target = target_file(args.out, _is_fingerprint, "holds no fingerprint", expected)
    data = json.dumps(_json(found[0]), indent=2) + "\n"
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
