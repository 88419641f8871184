"""``export --check``: the running environment beside an exported file."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

from jupyter_detllm.cli._output import notice, write, write_json
from jupyter_detllm.core.canonical import Json
from jupyter_detllm.errors import UsageError
from jupyter_detllm.export.departures import Departure, Running, departures, unexpected
from jupyter_detllm.export.reader import Expected, read_export
from jupyter_detllm.render.visible import visible

__all__ = ["check_file"]

_MOST_BYTES = 20_000_000
_SHOWN = 8
_OTHERS = 20


def check_file(path: str, *, as_json: bool) -> int:
    """Print where this environment departs from a file, and return the exit code."""
    expected = read_export(_text(path))
    running = _running()
    found = departures(expected, running)
    extra = unexpected(expected, running)
    code = 1 if found else 3 if expected.unread else 0
    if as_json:
        write_json(_json(path, expected, found, extra, code))
        return code
    write("\n".join(_lines(path, expected, found, extra)))
    for line in expected.unread[:_SHOWN]:
        notice(f"{path}: not compared, it pins no version: {line}")
    return code


def _text(path: str) -> str:
    try:
        file = Path(path)
        if file.is_file() and file.stat().st_size > _MOST_BYTES:
            raise UsageError(f"{path} is larger than {_MOST_BYTES // 1_000_000} MB")
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text") from None


def _running() -> Running:
    from jupyter_detllm.controls.standing import StandingControls
    from jupyter_detllm.probes import collect_environment
    from jupyter_detllm.probes.distributions import build_values, distributions

    torch = build_values("torch", "torch/version.py").get("__version__")
    return Running(
        packages={name: found.version for name, found in distributions().items()},
        builds={"torch": torch} if torch else {},
        environ=dict(os.environ),
        python=platform.python_version(),
        fingerprint=collect_environment(control_report=StandingControls(os.environ)),
    )


def _lines(
    path: str, expected: Expected, found: Sequence[Departure], extra: Sequence[str]
) -> list[str]:
    telling = [departure for departure in found if departure.matters]
    others = [departure for departure in found if not departure.matters]
    checked = f"{len(expected.pins)} packages, {len(expected.variables)} variables"
    lines = [f"{visible(path)} ({expected.form}): {checked}"]
    for departure in telling:
        lines += [f"  {visible(str(departure))}", f"      {departure.why}"]
    lines += [f"  {visible(str(departure))}" for departure in others[:_OTHERS]]
    if len(others) > _OTHERS:
        lines.append(f"  {len(others) - _OTHERS} other packages differ (--json names them)")
    if extra:
        names = ", ".join(extra[:_SHOWN]) + (", ..." if len(extra) > _SHOWN else "")
        lines.append(f"  installed beside it: {len(extra)} packages ({visible(names)})")
    if found:
        return [*lines, f"{len(found)} departures, {len(telling)} known to change results"]
    return [*lines, "no departure in what was compared"]


def _json(
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
