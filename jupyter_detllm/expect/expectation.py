"""Parses a user's expectation, and checks texts against it within limits.

A text whose check does not finish counts neither as a match nor as a mismatch, since then the
number of tries would depend on the machine's speed. It is an error.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from jupyter_detllm.core.canonical import Digest, digest_of
from jupyter_detllm.core.stamp import ExpectationKind
from jupyter_detllm.errors import ExpectationError, UsageError

__all__ = ["MAX_PATTERN", "MAX_SCHEMA", "Expectation", "expectation_of", "from_line", "mismatches"]

MAX_PATTERN = 2_000
MAX_SCHEMA = 200_000
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_DEEPEST = 64


@dataclass(frozen=True)
class Expectation:
    """What every text of a call must match.

    Attributes
    ----------
    kind
        Pattern or schema.
    text
        The regular expression, or the schema as JSON with sorted keys.
    flags
        Flags of a compiled regular expression, otherwise 0.
    """

    kind: ExpectationKind
    text: str
    flags: int = 0

    @cached_property
    def digest(self) -> Digest:
        """Digest of kind, text and flags."""
        return digest_of([self.kind.value, self.text, self.flags])


def from_line(text: str, namespace: Mapping[str, object], line: str) -> Expectation:
    """Parse the value of `--expect` on a magic's line.

    ``@NAME`` is a variable of the namespace, ``@FILE`` (with a dot or a slash) a file with
    a JSON schema; anything else is a regular expression.

    Parameters
    ----------
    text
        The option's value, without its quotes.
    namespace
        The user's variables.
    line
        The whole line, to see whether quoting has changed the pattern.

    Raises
    ------
    UsageError
        For anything else.
    """
    if not text.startswith("@"):
        if not _stands_in(text, line):
            raise UsageError(
                "--expect: a backslash or quote in the pattern was interpreted by the line",
                fix=r"single quotes around it: --expect '\d+'",
            )
        return expectation_of(text)
    name = text[1:]
    if name.isidentifier():
        if name not in namespace:
            raise UsageError(f"--expect: there is no variable {name!r:.60}")
        return expectation_of(namespace[name])
    return _schema(_read(Path(name)))


def _stands_in(text: str, line: str) -> bool:
    """Return whether a line holds a value exactly as parsed: quoted, or as a separate word."""
    word = rf"(?:^|[\s=]){re.escape(text)}(?:\s|$)"
    return f"'{text}'" in line or f'"{text}"' in line or re.search(word, line) is not None


def _read(path: Path) -> object:
    try:
        if path.stat().st_size > MAX_SCHEMA:
            raise UsageError(f"--expect: {path.name} is larger than {MAX_SCHEMA:,} bytes")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise UsageError(f"--expect: {path.name or path} cannot be read: {why}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"--expect: {path.name} is not JSON", expected="a JSON schema") from None


def expectation_of(value: object) -> Expectation:
    """Return the expectation of a pattern (text or compiled) or a schema (a mapping).

    Raises
    ------
    UsageError
        For any other type, a pattern that does not compile, or a schema that is too large,
        not JSON, or refers to anything outside itself.
    """
    if isinstance(value, Expectation):
        return value
    if isinstance(value, str):
        return _pattern(value, 0)
    if isinstance(value, re.Pattern) and isinstance(value.pattern, str):
        return _pattern(value.pattern, value.flags & ~(re.DEBUG | re.UNICODE))
    if isinstance(value, (Mapping, bool)):
        return _schema(dict(value) if isinstance(value, Mapping) else value)
    raise UsageError(
        f"an expectation is a {type(value).__name__}", expected="a pattern or a JSON schema"
    )


def _pattern(text: str, flags: int) -> Expectation:
    if not text:
        raise UsageError("an empty pattern matches every text", expected="a pattern")
    if len(text) > MAX_PATTERN:
        raise UsageError(f"the pattern has more than {MAX_PATTERN:,} characters")
    try:
        re.compile(text, flags)
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        raise UsageError(f"{text!r:.60} is not a regular expression: {error}") from None
    return Expectation(ExpectationKind.PATTERN, text, flags)


def _schema(value: object) -> Expectation:
    if not isinstance(value, (dict, bool)):
        raise UsageError(
            f"the schema is a {type(value).__name__}", expected="an object, true or false"
        )
    _check_references(value, 0)
    try:
        text = json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError):
        raise UsageError("the schema is not plain JSON", expected="plain JSON") from None
    if len(text) > MAX_SCHEMA:
        raise UsageError(f"the schema has more than {MAX_SCHEMA:,} characters")
    return Expectation(ExpectationKind.SCHEMA, text)


def _check_references(value: object, depth: int) -> None:
    """Refuse references that would be fetched: a schema must be self-contained."""
    if depth > _DEEPEST:
        raise UsageError(f"the schema nests deeper than {_DEEPEST} levels")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key in _REFERENCES and isinstance(item, str) and not item.startswith("#"):
                raise UsageError(
                    f"the schema refers to {item!r:.60}", expected="references within it: #/..."
                )
            _check_references(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_references(item, depth + 1)


CPU_SECONDS = 10
"""CPU time in seconds for all texts of one try, without start-up."""
MAX_CHARACTERS = 2_000_000
"""Maximum characters of all texts of one try."""
_WALL_SECONDS = 120.0
_CHILD_COMMAND = Path(__file__).with_name("child.py")
# A preloaded allocator is useless there and slow to load.
_NOT_PASSED = ("LD_PRELOAD", "PYTHONSTARTUP", "COVERAGE_PROCESS_START")


def mismatches(
    expectation: Expectation, texts: Sequence[str], *, seconds: int = CPU_SECONDS
) -> dict[int, str]:
    """Return which texts are not as expected, by index, with the reason.

    Raises
    ------
    ExpectationError
        If the texts are too long, the check takes more than `seconds` of CPU time, or the
        expectation cannot be checked.
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
    # A pattern needs no installed package, and the process starts faster without.
    flags = () if expectation.kind is ExpectationKind.SCHEMA else ("-S",)
    answer = _ask_child(json.dumps(asked), flags, seconds)
    if "problem" in answer:
        raise ExpectationError(f"the expectation cannot be checked: {answer['problem']}")
    found = answer["found"]
    if not isinstance(found, list) or len(found) != len(texts):
        raise ExpectationError("the process that checks the texts gave no answer")
    return {index: str(reason) for index, reason in enumerate(found) if reason is not None}


def _ask_child(line: str, flags: Sequence[str], seconds: int) -> dict[str, object]:
    environ = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED}
    try:
        done = subprocess.run(
            # -P: nothing next to the notebook is imported.
            [sys.executable, "-P", *flags, str(_CHILD_COMMAND)],
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
        f"the expectation was not checked within {seconds} s of CPU time",
        expected="one that does not backtrack indefinitely",
        fix="a pattern without nested repeats such as (a+)+",
    )


def _killed_by_limit() -> set[int]:
    names = ("SIGXCPU", "SIGKILL")
    return {-getattr(signal, name) for name in names if hasattr(signal, name)}
