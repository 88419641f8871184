"""What the GitHub action runs: patterns to files, a check, its report in the job's summary.

Everything comes in as ``DETLLM_*`` variables, so that no input is pasted into a script.
"""

from __future__ import annotations

import glob
import html
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["command", "files_of", "main", "summary_of"]

_OPTIONS = ("policy", "accept", "html", "junit")


def files_of(patterns: str) -> list[str]:
    """Return the files that patterns name, each once, in order.

    One pattern a line, or several separated by spaces; a line that is a file is that
    file. ``**`` goes through folders, hidden ones are left out.

    Raises
    ------
    ValueError
        When a pattern fits nothing.
    """
    found: list[str] = []
    for line in filter(None, map(str.strip, patterns.splitlines())):
        for pattern in [line] if Path(line).is_file() else line.split():
            fitting = [pattern] if Path(pattern).is_file() else glob.glob(pattern, recursive=True)
            if not fitting:
                raise ValueError(f"no notebook fits {pattern}")
            found += sorted(fitting)
    if not found:
        raise ValueError("no notebooks are named")
    return list(dict.fromkeys(found))


def command(environ: Mapping[str, str], files: list[str]) -> list[str]:
    """Return the command line of the check."""
    chosen = {name: environ.get(f"DETLLM_{name.upper()}", "") for name in _OPTIONS}
    options = [f"--{name}={value}" for name, value in chosen.items() if value]
    return [sys.executable, "-m", "jupyter_detllm", "check", *options, "--", *files]


def summary_of(report: str) -> str:
    """Return a report as Markdown that shows text of models as text."""
    return f"### jupyter detllm check\n\n<pre>\n{html.escape(report, quote=False)}\n</pre>\n"


def main() -> int:
    """Run the check and return its exit code."""
    try:
        files = files_of(os.environ.get("DETLLM_NOTEBOOKS", "**/*.ipynb"))
    except ValueError as error:
        print(f"::error::{error}")
        _append("GITHUB_OUTPUT", "exit-code=2\n")
        return 2
    done = subprocess.run(
        command(os.environ, files), stdout=subprocess.PIPE, encoding="utf-8", check=False
    )
    print(done.stdout, end="", flush=True)
    _append("GITHUB_STEP_SUMMARY", summary_of(done.stdout))
    _append("GITHUB_OUTPUT", f"exit-code={done.returncode}\n")
    return done.returncode


def _append(variable: str, text: str) -> None:
    path = os.environ.get(variable)
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    sys.exit(main())
