"""The main job from end to end: generate, stamp, run again in a fresh kernel, check.

It works on a copy of ``examples/quickstart.ipynb`` in ``build/demo`` and shows each
command it runs. Exit code 0 means that every cell was compared and matched.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["main"]

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "examples" / "quickstart.ipynb"


def _steps(notebook: Path) -> list[tuple[str, list[str], frozenset[int]]]:
    """Return (what it is for, arguments, exit codes that are right) per step."""
    name = str(notebook)
    return [
        ("fetch the demo model, once", ["model", "fetch", "demo"], frozenset({0})),
        (
            "execute the notebook in a kernel; it has no references yet (exit code 3)",
            ["rerun", "--save", name],
            frozenset({3}),
        ),
        ("make its stamps references", ["stamp", name], frozenset({0})),
        (
            "check: the outputs are still the promoted run, nothing was compared (exit code 3)",
            ["check", name],
            frozenset({3}),
        ),
        ("run it again in a fresh kernel and compare", ["rerun", "--save", name], frozenset({0})),
        ("what the generations depended on", ["fingerprint", name], frozenset({0})),
        ("check the saved notebook: no engine is needed", ["check", name], frozenset({0})),
    ]


def _run(what: str, arguments: list[str], right: frozenset[int]) -> bool:
    shown = shlex.join(["jupyter", "detllm", *arguments]).replace(f"{ROOT}/", "")
    print(f"\n# {what}\n$ {shown}", flush=True)
    started = time.monotonic()
    command = [sys.executable, "-m", "jupyter_detllm", *arguments]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    print(f"  [exit code {code}, {time.monotonic() - started:.1f} s]", flush=True)
    if code not in right:
        expected = " or ".join(map(str, sorted(right)))
        print(f"demo: this step should have ended with exit code {expected}", file=sys.stderr)
    return code in right


def main(argv: list[str] | None = None) -> int:
    """Run every step; stop at the first that does not end as it should."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "demo")
    out: Path = parser.parse_args(argv).out
    out.mkdir(parents=True, exist_ok=True)
    notebook = out / SOURCE.name
    shutil.copyfile(SOURCE, notebook)
    started = time.monotonic()
    for what, arguments, right in _steps(notebook):
        if not _run(what, arguments, right):
            return 1
    print(f"\ndemo: every cell matched in a fresh kernel ({time.monotonic() - started:.0f} s)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
