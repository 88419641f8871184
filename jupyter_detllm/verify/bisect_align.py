"""Fingerprint fields put back to their recorded value: which can be, and how. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from jupyter_detllm.controls.environ import ENV_CONTROLS, RECORDED
from jupyter_detllm.controls.ledger import UNKNOWN
from jupyter_detllm.core.fingerprint import FieldDiff, FieldValue
from jupyter_detllm.core.levels import Level
from jupyter_detllm.engines.start import FAKE
from jupyter_detllm.probes.platform import Platform
from jupyter_detllm.verify.bisect_change import Change, Composition
from jupyter_detllm.verify.engine_settings import ROWS

__all__ = ["aligned", "recorded_variable"]

_MAX_THREADS = 1024
_MODES = ("off", "warn", "error")
_PLAIN = re.compile(r"[A-Za-z0-9_.:,+-]{1,64}")
_VARIABLES = frozenset(row.name for row in ENV_CONTROLS) | {row.name for row in RECORDED}


def aligned(
    diff: FieldDiff, engine: str, platform: Platform, levels: Iterable[Level]
) -> Change | None:
    """Return the change that puts a field back to its recorded (`left`) value.

    None where nothing here can: another version, another processor, or a value that no
    reader of ours would have written.
    """
    value = diff.left
    if diff.name == "level":
        level = next((level for level in levels if level == value), None)
        return None if level is None else Change(level=level)
    if diff.name == "engine.batch":
        return Change(composition=Composition.RECORDED)
    if diff.name == "torch.deterministic_algorithms":
        return Change(torch_deterministic=str(value)) if value in _MODES else None
    if diff.name == "torch.threads" or diff.name.startswith("controls."):
        return recorded_variable(diff.name, value, platform)
    return _option(diff.name, value, engine, platform)


def recorded_variable(name: str, value: FieldValue, platform: Platform) -> Change | None:
    """Return the change that sets a recorded variable: only one that we know.

    The number of threads is one, too.
    """
    if name == "torch.threads":
        fits = type(value) is int and 0 < value <= _MAX_THREADS and platform is Platform.CPU
        return Change(environ={"OMP_NUM_THREADS": str(value)}) if fits else None
    variable = name.removeprefix("controls.")
    if variable not in _VARIABLES or value == UNKNOWN:
        return None
    if value is not None and not _PLAIN.fullmatch(str(value)):
        return None
    if value is not None and variable.endswith("_NUM_THREADS") and not _threads(str(value)):
        return None
    return Change(environ={variable: None if value is None else str(value)})


def _threads(text: str) -> bool:
    return text.isascii() and text.isdigit() and 0 < int(text) <= _MAX_THREADS


def _option(name: str, value: FieldValue, engine: str, platform: Platform) -> Change | None:
    if name == "engine.attention_backend" and engine != FAKE and platform is Platform.CPU:
        return None  # there is only one
    for row in ROWS:
        if row.name == name and row.option and engine in row.engines:
            try:
                # What the default reaches is reached by leaving the option out.
                return Change({row.option: row.read(value)})
            except ValueError:
                return None
    return None
