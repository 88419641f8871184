"""Run pip in the environment: all of its output in a log, a line of progress here."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PipResult", "PipRunner", "SetupError", "cause_of", "say"]

_NOTABLE = re.compile(r"^\s*(Collecting|Downloading|Building|Preparing|Installing|Using cached) ")
_UNREACHABLE = re.compile(r"connection broken by '(\w+)")
_BEAT_SECONDS = 5.0


class SetupError(Exception):
    """A setup that cannot continue: one line for the user."""


def say(text: str) -> None:
    """Print one line of progress at once."""
    sys.stdout.write(f"setup: {text}\n")
    sys.stdout.flush()


@dataclass(frozen=True, slots=True)
class PipResult:
    """How a pip command ended, and what it printed."""

    code: int
    output: str


def cause_of(output: str) -> str:
    """Return the one line of pip's output that says why it failed."""
    if "No space left on device" in output:
        return "no space left on the device"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    if any("ResolutionImpossible" in line for line in errors):
        errors = [line for line in errors if line.startswith("Cannot install")]
    if "no matching distribution" in output.lower():
        unreachable = _UNREACHABLE.findall(output)
        if unreachable:
            return f"the package index cannot be reached ({unreachable[-1]})"
        if errors and errors[-1].startswith("Cannot install"):
            return "it is not there"
    return (errors or lines or ["pip printed nothing"])[-1][:300]


@dataclass(frozen=True, slots=True)
class PipRunner:
    """pip of one environment.

    Attributes
    ----------
    python
        The environment's interpreter.
    log
        File that all output is appended to.
    """

    python: Path
    log: Path

    def __call__(
        self, arguments: Sequence[str], step: str, counter: Callable[[], str] = str
    ) -> PipResult:
        """Run ``pip ARGUMENTS``, with a line every five seconds.

        Parameters
        ----------
        arguments
            The command and its options.
        step
            What the progress lines begin with.
        counter
            Returns how far it is, such as ``80 of 170 packages``.
        """
        command = [str(self.python), "-m", "pip", *arguments]
        command += ["--disable-pip-version-check", "--no-input"]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace",
        )  # fmt: skip
        lines: list[str] = []
        reader = threading.Thread(target=self._read, args=(process, lines), daemon=True)
        reader.start()
        try:
            self._wait(process, lines, step, counter)
        finally:
            if process.poll() is None:
                process.terminate()
            code = process.wait()
            reader.join(timeout=5)
            if process.stdout is not None:
                process.stdout.close()
        return PipResult(code, "".join(lines))

    def _read(self, process: subprocess.Popen[str], lines: list[str]) -> None:
        with self.log.open("a", encoding="utf-8") as log:
            for line in process.stdout or ():
                lines.append(line)
                log.write(line)
                log.flush()

    @staticmethod
    def _wait(
        process: subprocess.Popen[str], lines: list[str], step: str, counter: Callable[[], str]
    ) -> None:
        start = time.monotonic()
        while True:
            try:
                process.wait(timeout=_BEAT_SECONDS)
                return
            except subprocess.TimeoutExpired:
                latest = next((x for x in reversed(lines) if _NOTABLE.match(x)), "")
                detail = counter() or _brief(latest)
                say(f"  {step}, {time.monotonic() - start:.0f} s" + (detail and f": {detail}"))


def _brief(line: str) -> str:
    text = re.sub(r"(https?|file)://\S*/|\(from .*", "", " ".join(line.split())).strip()
    return text if len(text) <= 70 else text[:67] + "..."
