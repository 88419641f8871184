"""Create ``.venv`` and install this checkout with everything its tests and demo need.

``python -m tools.setup_env [--profile cpu|base]``: ``cpu`` brings the engine, ``base``
only what runs without one. A second run with the same inputs changes nothing. All of
pip's output is in ``.venv/setup.log``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.pip_runner import PipRunner, SetupError, cause_of, say
from tools.plan import Plan, find_torch, make_plan
from tools.requirements import CONSTRAINTS, PROFILES, ROOT, input_digest, requirements

__all__ = ["main", "remove_broken", "set_up"]

_STAMP = "setup.json"
# vLLM names them; text models use none, and a build for another torch breaks imports.
_OPTIONAL = ("torchvision", "torchaudio", "torchcodec")


def _venv_python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _is_current(folder: Path, profile: str) -> bool:
    """Return whether `folder` was set up whole, from these inputs, for this checkout."""
    try:
        done = json.loads((folder / _STAMP).read_text())
    except (OSError, ValueError):
        return False
    usable = [name for name, extras in PROFILES.items() if set(PROFILES[profile]) <= set(extras)]
    if done not in [{"profile": name, "inputs": input_digest(name)} for name in usable]:
        return False
    probe = (
        "import sys, importlib.util as u; print(sys.prefix, u.find_spec('jupyter_detllm').origin)"
    )
    try:
        # -P: what is installed counts, not what lies in the current folder.
        result = subprocess.run(
            [_venv_python(folder), "-P", "-c", probe], capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
    except OSError:
        return False
    expected = f"{folder} {ROOT / 'jupyter_detllm' / '__init__.py'}"
    return result.returncode == 0 and result.stdout.strip() == expected


def _create(folder: Path) -> PipRunner:
    say(f"creating {folder.name} with Python {sys.version.split()[0]}")
    result = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if result.returncode != 0:
        lines = (result.stdout + result.stderr).strip().splitlines() or ["no output"]
        raise SetupError(f"{folder} cannot be created: {lines[-1]}")
    pip = PipRunner(_venv_python(folder), folder / "setup.log")
    _require(pip, ["install", "--quiet", "--upgrade", "pip>=25"], "updating pip")
    return pip


def _require(
    pip: PipRunner, arguments: Sequence[str], step: str, counter: Callable[[], str] = str
) -> None:
    result = pip(arguments, step, counter)
    if result.code != 0:
        raise SetupError(f"{step} failed: {cause_of(result.output)}")


def _plan(pip: PipRunner, profile: str) -> Plan:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        options = find_torch(pip, folder) if "cpu" in PROFILES[profile] else ()
        say("resolving versions")
        plan = make_plan(pip, requirements(profile), options, CONSTRAINTS, folder)
    say(f"{len(plan.packages)} packages, none of them CUDA")
    return plan


def _install(pip: PipRunner, folder: Path, plan: Plan) -> None:
    listing = folder / "packages.txt"
    listing.write_text("\n".join(plan.packages) + "\n")

    def counter() -> str:
        found = folder.glob("lib/python3*/site-packages/*.dist-info")
        done = sum(1 for path in found if not path.name.startswith(("pip-", "setuptools-")))
        return f"{done} of {len(plan.packages)} packages unpacked" if done else ""

    say("downloading and installing")
    # Python compiles what is imported; compiling all of it would take as long as unpacking it.
    arguments = ["install", "--no-deps", "--no-compile", *plan.options, "-r", str(listing)]
    _require(pip, arguments, "installing", counter)
    say("installing this checkout, editable")
    arguments = ["install", "--no-deps", "--editable", str(ROOT)]
    _require(pip, arguments, "installing this checkout")


def remove_broken(pip: PipRunner, plan: Plan) -> list[str]:
    """Remove packages that cannot be imported with this torch; return their names."""
    planned = dict(package.split("==") for package in plan.packages)
    removed = []
    for name in (name for name in _OPTIONAL if name in planned):
        result = subprocess.run(
            [pip.python, "-P", "-c", f"import {name}"], capture_output=True, text=True, check=False
        )
        if result.returncode == 0:
            continue
        lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        cause = re.sub(r"/\S*/", "", lines[-1])[:100]
        say(
            f"removing {name} {planned[name]}: it cannot be imported beside "
            f"torch {planned.get('torch')} ({cause}); text models need none"
        )
        _require(pip, ["uninstall", "--yes", name], f"removing {name}")
        removed.append(name)
    return removed


def set_up(folder: Path, profile: str) -> None:
    """Bring `folder` to the state that `profile` asks for.

    Raises
    ------
    SetupError
        One line: which step failed, and why.
    """
    if _is_current(folder, profile):
        say(f"{folder.name} is up to date ({profile})")
        return
    start = time.monotonic()
    pip = _create(folder)
    plan = _plan(pip, profile)
    _install(pip, folder, plan)
    if "cpu" in PROFILES[profile]:
        remove_broken(pip, plan)
    stamp = {"profile": profile, "inputs": input_digest(profile)}
    (folder / _STAMP).write_text(json.dumps(stamp))
    say(f"ready in {time.monotonic() - start:.0f} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Set up and return the exit code."""
    parser = argparse.ArgumentParser(prog="setup_env", description=__doc__)
    parser.add_argument("--profile", choices=sorted(PROFILES), default="cpu")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    options = parser.parse_args(arguments)
    folder = options.venv.absolute()
    try:
        set_up(folder, options.profile)
    except SetupError as error:
        log = folder / "setup.log"
        say(f"FAILED: {error}" + (f" (all of pip's output: {log})" if log.exists() else ""))
        return 1
    except KeyboardInterrupt:
        say("interrupted; the same command starts again")
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
