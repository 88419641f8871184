"""Checks texts against an expectation, in a process that can be killed at any time.

A regular expression can run forever, and Python cannot stop one in a thread. The process
reads one line of JSON, writes one, and imports nothing from this package.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["main"]

_MEMORY = 2 << 30

Check = Callable[[str], "str | None"]
"""Maps a text to the reason why it is not as expected, or to None if it is."""


def _limit(seconds: int) -> None:
    """Set limits, so that the system ends this process even if its parent has died.

    A check that takes too much memory fails here, not in the notebook's kernel.
    """
    try:
        import resource
    except ImportError:
        return  # Windows: only the parent's timeout
    used = resource.getrusage(resource.RUSAGE_SELF)
    end = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (end, end + 1))
    with contextlib.suppress(ValueError, OSError):  # not every system supports this limit
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, hard))


def _pattern(text: str, flags: int) -> Check:
    compiled = re.compile(text, flags)
    return lambda candidate: None if compiled.search(candidate) else "no match"


def _load_schemas() -> None:
    # jsonschema imports this for one format if it is installed, which takes seconds;
    # formats are not checked here.
    sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
    import jsonschema  # noqa: F401


def _schema(text: str) -> Check:
    from jsonschema import exceptions, validators
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    schema = json.loads(text)
    kind = validators.validator_for(schema, default=validators.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except exceptions.SchemaError as error:
        raise ValueError(f"it is not a JSON schema: {_place(error)}") from None
    validator = kind(schema, registry=Registry())

    def check(candidate: str) -> str | None:
        try:
            value = json.loads(candidate, parse_constant=_refused)
        except (ValueError, RecursionError):
            return "not JSON"
        try:
            places = sorted(_place(error) for error in validator.iter_errors(value))
        except Unresolvable as error:
            raise ValueError(f"its reference {error.ref!r:.60} leads nowhere") from None
        return places[0] if places else None

    return check


def _place(error: Any) -> str:
    """Return place and keyword, since the library's messages change with its version."""
    return f"{error.json_path} fails {error.validator!r}"


def _refused(name: str) -> None:
    raise ValueError(name)


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    schema = asked["kind"] == "schema"
    try:
        if schema:
            _load_schemas()
        _limit(asked["seconds"])
        check = _schema(asked["text"]) if schema else _pattern(asked["text"], asked["flags"])
        return {"found": [check(text) for text in asked["texts"]]}
    except ImportError as error:
        return {"problem": f"{error.name} is missing: pip install jsonschema"}
    except RecursionError:
        return {"problem": "it recurses without limit"}
    except MemoryError:
        return {"problem": "it takes more than 2 GiB of memory"}
    except (ValueError, re.error) as error:
        return {"problem": str(error) or type(error).__name__}


def main() -> None:
    """Answer one question."""
    sys.stdout.write(json.dumps(_answer(json.loads(sys.stdin.readline()))))


if __name__ == "__main__":
    main()
