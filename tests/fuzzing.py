"""Damage done to stamped notebooks: to their bytes, to their JSON, and to what they claim."""

from __future__ import annotations

import base64
import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jupyter_detllm.core.generation import Generation, generation_digest
from jupyter_detllm.core.stamp import content_digest
from jupyter_detllm.errors import DetLLMError

__all__ = ["CORPUS", "damaged", "reforge", "verified"]

CORPUS: dict[str, bytes] = {
    path.stem: path.read_bytes()
    for path in sorted((Path(__file__).parent / "data").glob("*.ipynb"))
}
"""Notebooks stamped by the real engine, executed twice: every cell matches."""

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**53 + 1, 10**4000, 1.5, -0.0, 1e308, "", " ", "0", "-1",
    "NaN", "Infinity", "sha256:", "sha256:" + "0" * 64, "\ud800", "\x00", "é" * 3000, "A" * 70_000,
    [], {}, [[]], [None], [0] * 5000, {"schema": "detllm.stamp/9"}, {"": {}}, "detllm.stamp/2",
    {"fingerprints": []}, [[[[[[[[[[]]]]]]]]]],
)  # fmt: skip
RAW = (
    b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\x00", b"\xff", b"\xed\xa0\x80", b"NaN",
    b"-Infinity", b"1e999", b"\\ud800", b"\xef\xbb\xbf", b"\r\n", b"[" * 600, b'{"a":' * 600,
    b"9" * 5000, b'"nbformat":4,', b"/*", b"'",
)  # fmt: skip


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the places in a JSON value, without single tokens and offsets."""
    found = [path]
    if isinstance(value, dict):
        for key, item in value.items():
            found += paths_of(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value[:4]):
            found += paths_of(item, (*path, number))
    return found


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


def damaged(raw: bytes, rng: random.Random) -> tuple[bytes, bool]:
    """Return the notebook with one to three kinds of damage, and whether one was a forgery."""
    harms = [
        rng.choice((_bytes, _bytes, _json, _json, _json, _ours, _ours))
        for _ in range(rng.choice((1, 1, 1, 2, 3)))
    ]
    for harm in harms:
        raw = harm(raw, rng)
    return raw, _ours in harms


def _bytes(raw: bytes, rng: random.Random) -> bytes:
    at, other = (rng.randrange(len(raw) + 1) for _ in range(2))
    kind = rng.randrange(6)
    if kind == 0 and at < len(raw):
        return raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :]
    if kind == 1:
        return raw[:at] + raw[at + rng.choice((1, 1, 2, 10, 1000)) :]
    if kind == 2:
        return raw[:at]
    if kind == 3:
        low, high = sorted((at, other))
        return raw[:high] + raw[low:high][:20_000] + raw[high:]
    if kind == 4:  # one digit or letter for another
        places = [i for i in range(at, min(len(raw), at + 200)) if raw[i : i + 1].isalnum()]
        if places:
            place = rng.choice(places)
            return raw[:place] + rng.choice("0123456789abcdefA").encode() + raw[place + 1 :]
    return raw[:at] + rng.choice(RAW) + raw[at:]


def _edited(raw: bytes, edit: Callable[[Any], None]) -> bytes:
    try:
        book = json.loads(raw)
        edit(book)
        return json.dumps(book, indent=1).encode()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, DetLLMError):
        return raw  # damaged before: there is nothing to edit, or nothing that has a digest


def _json(raw: bytes, rng: random.Random) -> bytes:
    def edit(book: Any) -> None:
        *path, last = rng.choice(paths_of(book)[1:])
        holder = at(book, tuple(path))
        kind = rng.randrange(6)
        if kind == 0:
            del holder[last]
        elif kind == 1:
            source = rng.choice(paths_of(book)[1:])
            holder[last] = copy.deepcopy(at(book, source))
        elif kind == 2 and isinstance(holder, list):
            holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(rng.choice(holder)))
        elif kind == 3 and isinstance(holder, dict):
            holder[rng.choice(("extra", "schema", "\ud800", "", "digest"))] = rng.choice(ODD)
        elif kind == 4 and isinstance(holder[last], list):
            rng.shuffle(holder[last])
        else:
            holder[last] = rng.choice(ODD)

    return _edited(raw, edit)


def stamps_of(book: Any) -> list[Any]:
    """Return the stamps of outputs and cells that are whole enough to be edited."""
    found = []
    for cell in book["cells"]:
        found.append(cell["metadata"].get("detllm", {}).get("reference"))
        found += [output.get("metadata", {}).get("detllm") for output in cell["outputs"]]
    return [stamp for stamp in found if isinstance(stamp, dict)]


def _ours(raw: bytes, rng: random.Random) -> bytes:
    """Change something that is verified, as someone would who wants it to pass."""

    def edit(book: Any) -> None:
        stamp = rng.choice(stamps_of(book))
        call = rng.choice(stamp["calls"])
        generation = rng.choice(call["generations"])
        ids = generation["token_ids"]
        where = rng.randrange(len(ids))
        kind = rng.randrange(7)
        if kind == 0:
            ids[where] += rng.choice((-1, 1))
        elif kind == 1:
            ids.append(0)
        elif kind == 2:
            generation["text"] += rng.choice((".", "\ud800", "\x00", "é"))
        elif kind == 3:
            generation["finish_reason"] = rng.choice(("stop", "length", "abort", ""))
        elif kind == 4:
            evidence = generation["evidence"]
            key = rng.choice(("chosen", "runner_up", "runner_up_ids"))
            data = bytearray(base64.b64decode(evidence[key]))
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            evidence[key] = base64.b64encode(data).decode()
        elif kind == 5:
            rng.choice(call["requests"])["params"]["max_tokens"] += 1
        else:
            generation["evidence"]["tokens"] = rng.choice((10**9, -1, 2**40, 0))
        if rng.random() < 0.7:
            reforge(stamp)

    return _edited(raw, edit)


def reforge(stamp: Any) -> None:
    """Make the digests of a stamp those of its present content, as a forger can."""
    for call in stamp["calls"]:
        found = (
            Generation(
                g["prompt"], g["completion"], tuple(g["token_ids"]), g["finish_reason"], "", ()
            )
            for g in call["generations"]
        )
        call["digest"] = str(generation_digest(tuple(found)))
    stamp["digest"] = str(content_digest(stamp))


def verified(cell: Any) -> tuple[str, str] | None:
    """Return what a match asserts of a cell, once from each side; None where a side lacks.

    Read from the JSON itself, without the package: source, requests and generations.
    """
    outputs = [o.get("metadata") for o in cell["outputs"] if isinstance(o, dict)]
    stamps = [m["detllm"] for m in outputs if isinstance(m, dict) and "detllm" in m]
    reference = cell["metadata"].get("detllm", {}).get("reference")
    if not stamps or not isinstance(reference, dict):
        return None
    left, right = (_content(stamp) for stamp in (reference, stamps[-1]))
    return left, right


def _plain(value: Any) -> Any:
    """Return parameters with each number in one spelling: 0.0 for "-0.0", 0 and "0"."""
    if not isinstance(value, dict):
        return value
    out = {}
    for key, item in value.items():
        try:
            out[key] = float(item) + 0.0
        except (TypeError, ValueError, OverflowError):
            out[key] = item
    return out


def _content(stamp: Any) -> str:
    requests = ("kind", "messages", "prompt", "prompt_token_ids", "params", "seeds")
    generations = ("prompt", "completion", "token_ids", "finish_reason", "text", "offsets")
    evidence = ("k", "chosen", "runner_up", "runner_up_ids", "positions")
    return json.dumps(
        [
            [
                [[_plain(r.get(key)) for key in requests] for r in call["requests"]],
                [
                    [
                        [g.get(key) for key in generations],
                        [(g.get("evidence") or {}).get(key) for key in evidence],
                    ]
                    for g in call["generations"]
                ],
            ]
            for call in stamp["calls"]
        ]
    )
