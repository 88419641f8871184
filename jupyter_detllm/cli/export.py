"""``jupyter detllm export``: a stamped environment for pip, a container or a shell.

``export --check`` compares the running environment with an exported file.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence
from pathlib import Path

from jupyter_detllm.cli._options import add_json
from jupyter_detllm.cli._output import notice, target_file, write, write_json
from jupyter_detllm.core.canonical import Json
from jupyter_detllm.errors import UsageError
from jupyter_detllm.export.departures import (
    Departure,
    Expected,
    Running,
    departures,
    read_export,
    unexpected,
)
from jupyter_detllm.export.environment import MARK, Environment, environment_of
from jupyter_detllm.export.formats import EXPORT_SCHEMA, FORMATS, PYLOCK
from jupyter_detllm.render.visible import visible
from jupyter_detllm.verify.sources import read_file
from jupyter_detllm.verify.update import replace_file

__all__ = ["configure", "run"]

_SHOWN = 8


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("notebook", nargs="?", metavar="NOTEBOOK", help="a stamped notebook")
    parser.add_argument(
        "--to",
        choices=[*FORMATS, PYLOCK],
        help="requirements (pip), pylock (PEP 751, with hashes from the package index), "
        "dockerfile, env (a shell file with the controls), json",
    )
    parser.add_argument("--out", metavar="FILE", help="write to FILE instead of stdout")
    parser.add_argument(
        "--fingerprint",
        metavar="DIGEST",
        default="",
        help="which environment, if the notebook was stamped in several",
    )
    parser.add_argument(
        "--check", metavar="FILE", help="list how the running environment differs from FILE"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Export, or check, and return the exit code.

    0: exported, or no difference. 1: the environment differs from the file. 2: usage, or a
    file that cannot be read. 3: something recorded could not be exported or compared.
    """
    if args.check is not None:
        if args.notebook is not None or args.to is not None or args.out is not None:
            raise UsageError("--check takes a file and nothing else", fix="export --check FILE")

        return check_file(args.check, as_json=args.json)
    if args.notebook is None or args.to is None:
        raise UsageError(
            "nothing to export",
            expected="a notebook and a format",
            fix="jupyter detllm export NOTEBOOK --to requirements",
        )
    target = _target(args.out, args.to)
    environment = environment_of(read_file(args.notebook).data, args.fingerprint)
    text, refused, remarks = _rendered(environment, args.to)
    for line in (*remarks, *_few(refused, "left out")):
        notice(f"{args.notebook}: {line}")
    if target is not None:
        replace_file(target, [text.encode("utf-8")], lambda: True)
    if args.json:
        write_json(
            {
                "notebook": args.notebook,
                "format": args.to,
                "out": args.out,
                "content": text,
                "refused": [*refused],
                "missing": [*remarks],
            }
        )
    elif target is None:
        write(text)
    return 3 if refused else 0


def _rendered(environment: Environment, form: str) -> tuple[str, Sequence[str], Sequence[str]]:
    """Return the text, what was left out, and what to know."""
    if form != PYLOCK:
        return FORMATS[form](environment), environment.refused, environment.missing
    from jupyter_detllm.export.locking import lock

    locked = lock(environment)
    refused = (*environment.refused, *locked.omitted)
    return locked.text, refused, (*environment.missing, *locked.remarks)


def _few(lines: Sequence[str], verb: str) -> list[str]:
    shown = [f"{verb}: {line}" for line in lines[:_SHOWN]]
    more = len(lines) - _SHOWN
    return [*shown, f"{verb}: {more} more (--json names them)"] if more > 0 else shown


def _target(out: str | None, form: str) -> Path | None:
    """Return the file to write, which is new or an earlier export; None for stdout."""
    if out is None:
        return None
    if form == PYLOCK:
        from packaging.pylock import is_valid_pylock_path

        if not is_valid_pylock_path(Path(out).resolve()):
            raise UsageError(
                f"{out} is not a name for a lock file", expected="pylock.toml or pylock.NAME.toml"
            )
    return target_file(out, _is_export, "is not an export", "a new file, or an earlier export")


def _is_export(target: Path) -> bool:
    try:
        start = target.read_bytes()[:200].decode("utf-8", "replace")
    except OSError as error:
        raise UsageError(f"{target} cannot be read: {error.strerror}") from None
    return MARK in start.partition("\n")[0] or f'"{EXPORT_SCHEMA}"' in start


_MOST_BYTES = 20_000_000

_MOST_OTHERS = 20


def check_file(path: str, *, as_json: bool) -> int:
    """Print how this environment differs from a file, and return the exit code."""
    expected = read_export(_file_text(path))
    running = _running_environment()
    found = departures(expected, running)
    extra = unexpected(expected, running)
    code = 1 if found else 3 if expected.unread else 0
    if as_json:
        write_json(_departures_json(path, expected, found, extra, code))
        return code
    write("\n".join(_departure_lines(path, expected, found, extra)))
    for line in expected.unread[:_SHOWN]:
        notice(f"{path}: not compared, it pins no version: {line}")
    return code


def _file_text(path: str) -> str:
    try:
        file = Path(path)
        if file.is_file() and file.stat().st_size > _MOST_BYTES:
            raise UsageError(f"{path} is larger than {_MOST_BYTES // 1_000_000} MB")
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text") from None


def _running_environment() -> Running:
    from jupyter_detllm.controls.ledger import StandingControls
    from jupyter_detllm.probes import collect_environment
    from jupyter_detllm.probes.software import build_values, distributions

    torch = build_values("torch", "torch/version.py").get("__version__")
    return Running(
        packages={name: found.version for name, found in distributions().items()},
        builds={"torch": torch} if torch else {},
        environ=dict(os.environ),
        python=platform.python_version(),
        fingerprint=collect_environment(control_report=StandingControls(os.environ)),
    )


def _departure_lines(
    path: str, expected: Expected, found: Sequence[Departure], extra: Sequence[str]
) -> list[str]:
    telling = [departure for departure in found if departure.matters]
    others = [departure for departure in found if not departure.matters]
    checked = f"{len(expected.pins)} packages, {len(expected.variables)} variables"
    lines = [f"{visible(path)} ({expected.form}): {checked}"]
    for departure in telling:
        lines += [f"  {visible(str(departure))}", f"      {departure.why}"]
    lines += [f"  {visible(str(departure))}" for departure in others[:_MOST_OTHERS]]
    if len(others) > _MOST_OTHERS:
        lines.append(f"  {len(others) - _MOST_OTHERS} other packages differ (--json names them)")
    if extra:
        names = ", ".join(extra[:_SHOWN]) + (", ..." if len(extra) > _SHOWN else "")
        lines.append(f"  installed in addition: {len(extra)} packages ({visible(names)})")
    if found:
        return [*lines, f"{len(found)} differences, {len(telling)} known to change results"]
    return [*lines, "no difference in what was compared"]


def _departures_json(
    path: str, expected: Expected, found: Sequence[Departure], extra: Sequence[str], code: int
) -> dict[str, Json]:
    return {
        "file": path,
        "format": expected.form,
        "exit_code": code,
        "departures": [
            {"what": d.what, "expected": d.expected, "found": d.found, "why": d.why} for d in found
        ],
        "installed_beside": list(extra),
        "not_compared": list(expected.unread),
    }
