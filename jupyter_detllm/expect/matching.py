"""Texts held against an expectation, within a limit of work.

A text whose check does not end is neither as expected nor not: that would depend on the
machine's speed, and so would the number of tries. It is an error.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jupyter_detllm.core.attempts import ExpectationKind
from jupyter_detllm.errors import ExpectationError
from jupyter_detllm.expect.expectation import Expectation

__all__ = ["CPU_SECONDS", "MAX_CHARACTERS", "mismatches"]

CPU_SECONDS = 10
"""Processor time for all texts of one try, what is loaded for it left out."""
MAX_CHARACTERS = 2_000_000
"""Most characters of all texts of one try."""
_WALL_SECONDS = 120.0
_CHILD = Path(__file__).with_name("child.py")
# A preloaded allocator is of no use there, and slow to load.
_NOT_PASSED = ("LD_PRELOAD", "PYTHONSTARTUP", "COVERAGE_PROCESS_START")


def mismatches(
    expectation: Expectation, texts: Sequence[str], *, seconds: int = CPU_SECONDS
) -> dict[int, str]:
    """Return which texts are not as expected, by index, with the reason.

    Raises
    ------
    ExpectationError
        When the texts are too long, the check takes more than `seconds` of processor
        time, or the expectation cannot be checked.
    """
    size = sum(map(len, texts))
    if size > MAX_CHARACTERS:
        raise ExpectationError(
            f"the texts have {size:,} characters", expected=f"at most {MAX_CHARACTERS:,}"
        )
    asked = {
        "kind": expectation.kind.value,
        "text": expectation.text,
        "flags": expectation.flags,
        "texts": list(texts),
        "seconds": seconds,
    }
    # A pattern needs nothing that is installed, and starts sooner without.
    flags = () if expectation.kind is ExpectationKind.SCHEMA else ("-S",)
    answer = _ask(json.dumps(asked), flags, seconds)
    if "problem" in answer:
        raise ExpectationError(f"the expectation cannot be checked: {answer['problem']}")
    found = answer["found"]
    if not isinstance(found, list) or len(found) != len(texts):
        raise ExpectationError("the check of the texts gave no answer")
    return {index: str(reason) for index, reason in enumerate(found) if reason is not None}


def _ask(line: str, flags: Sequence[str], seconds: int) -> dict[str, object]:
    environ = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED}
    try:
        done = subprocess.run(
            # -P: nothing beside the notebook is imported.
            [sys.executable, "-P", *flags, str(_CHILD)],
            input=line + "\n",
            capture_output=True,
            text=True,
            encoding="utf-8",
            env=environ,
            timeout=_WALL_SECONDS,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _too_long(seconds) from None
    if done.returncode in _killed_by_limit():
        raise _too_long(seconds)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise ExpectationError(f"the check of the texts failed: {last:.200}")
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def _too_long(seconds: int) -> ExpectationError:
    return ExpectationError(
        f"the expectation was not checked within {seconds} s of work",
        expected="one that does not backtrack without end",
        fix="a pattern without nested repeats such as (a+)+",
    )


def _killed_by_limit() -> set[int]:
    names = ("SIGXCPU", "SIGKILL")
    return {-getattr(signal, name) for name in names if hasattr(signal, name)}
