"""The process in which texts are held against an expectation: it can be ended at any time.

A regular expression can run for ever, and Python cannot stop one in a thread. Reads one
line of JSON, writes one, imports nothing of this package.
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
"""Text to why it is not as expected, None where it is."""


def _limit(seconds: int) -> None:
    """Let the system end this process after so much work, also when its parent has died.

    What takes too much memory fails here, and not in the notebook's kernel.
    """
    try:
        import resource
    except ImportError:
        return  # Windows: the parent's clock alone
    used = resource.getrusage(resource.RUSAGE_SELF)
    end = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (end, end + 1))
    with contextlib.suppress(ValueError, OSError):  # not every system has this limit
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, hard))


def _pattern(text: str, flags: int) -> Check:
    compiled = re.compile(text, flags)
    return lambda candidate: None if compiled.search(candidate) else "no match"


def _load_schemas() -> None:
    # jsonschema takes this for one format, where it is there, and that takes seconds;
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
    """Return where and which keyword: the library's sentences change with its version."""
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
        return {"problem": "it recurses without end"}
    except MemoryError:
        return {"problem": "it takes more than 2 GiB of memory"}
    except (ValueError, re.error) as error:
        return {"problem": str(error) or type(error).__name__}


def main() -> None:
    """Answer one question."""
    sys.stdout.write(json.dumps(_answer(json.loads(sys.stdin.readline()))))


if __name__ == "__main__":
    main()
