"""The reference page of stored forms, made of the JSON schemas that ship with the package."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tools.markdown import NOTE, table
from tools.requirements import ROOT

__all__ = ["schemas"]

_FOLDER = ROOT / "jupyter_detllm" / "schemas"


def schemas() -> str:
    """Return the page of everything that is stored or printed as JSON, with its keys."""
    parts = [
        "# Stored forms\n",
        NOTE,
        "Everything that is stored in a notebook or printed as JSON has a schema in "
        "`jupyter_detllm/schemas`. Readers ignore keys that they do not know. Numbers that matter "
        "are strings, since JavaScript changes numbers when it saves a notebook.\n",
        table(
            ("where", "holds"),
            [
                ("`output.metadata.detllm`", "the stamp"),
                ("`output.metadata.detllm_run`", "what is true of one run only; never digested"),
                ("`cell.metadata.detllm`", "the reference, and the one before"),
                ("`notebook.metadata.detllm`", "what the references share"),
            ],
        ),
    ]
    for path in sorted(_FOLDER.glob("*.schema.json")):
        parts += _schema(path.name, json.loads(path.read_text(encoding="utf-8")))
    return "\n".join(parts)


def _schema(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {name.removesuffix('.schema.json').replace('-', '/')}\n"
    text = " ".join([f"{schema['title'].rstrip('.')}.", schema.get("description", "")])
    yield f"{text.strip()} (`{name}`)\n"
    if schema.get("type") == "array":
        schema = schema["items"]
    required = set(schema.get("required", ()))
    rows = [
        (f"`{key}`", "always" if key in required else "", _kind(value), _text(value))
        for key, value in schema.get("properties", {}).items()
    ]
    yield table(("key", "present", "type", "meaning"), rows)


def _text(value: Mapping[str, Any]) -> str:
    return str(value.get("description", ""))


def _kind(value: Mapping[str, Any]) -> str:
    """Return the type of a key in a few words."""
    if "const" in value:
        return f"`{value['const']}`"
    if "enum" in value:
        return " or ".join(f"`{choice}`" for choice in value["enum"])
    if "$ref" in value:
        return str(value["$ref"]).rpartition("/")[2].replace("_", " ")
    for word in ("anyOf", "oneOf"):
        if word in value:
            return " or ".join(_kind(choice) for choice in value[word])
    kind = value.get("type", "any")
    if kind == "array" and isinstance(value.get("items"), dict):
        return f"list of {_kind(value['items'])}"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)
