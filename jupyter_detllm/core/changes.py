"""Requests that differ: paired with the nearest of the other side, named, traced to texts.

Tries after the first are left out: they follow from the texts of the try before.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jupyter_detllm.core.canonical import Digest
from jupyter_detllm.core.generation import (
    Generation,
    GenerationRequest,
    Prompt,
    PromptKind,
    Sampling,
    derive_seed,
    occurrences,
)
from jupyter_detllm.core.stamp import Stamp

__all__ = [
    "DifferingText",
    "RequestChange",
    "RequestDifference",
    "change_lines",
    "origins_of",
    "request_changes",
]

_MOST_NEAREST = 200
"""With more requests left on a side, they are paired in order: the nearest takes n * n steps."""

_MOST_COMPARED = 4000
_MOST_LINES = 4
_SHOWN = 40
_LONGEST_GROWTH = 64
_SHORTEST_PART = 12
"""A shorter part of a text may be in a prompt by chance."""


@dataclass(frozen=True, slots=True)
class RequestDifference:
    """One thing in which two requests differ.

    Attributes
    ----------
    name
        ``prompt``, ``system message``, ``seed``, or the name of a sampling parameter.
    left, right
        Both values; of a text, the words around the first character that differs.
    position
        Index of the first character (or prompt token) that differs; None of a value.
    unit
        What `position` counts.
    """

    name: str
    left: str
    right: str
    position: int | None = None
    unit: str = "character"

    def __str__(self) -> str:
        """Return the difference as a clause."""
        if self.position is None:
            return f"{self.name} {self.left} -> {self.right}"
        at = f"{self.unit} {self.position + 1}"
        return f"the {self.name} differs from {at}: {self.left} -> {self.right}"


@dataclass(frozen=True, slots=True)
class RequestChange:
    """A request of one side without an equal one on the other.

    `reference` is None for a request that is new, `actual` for one that is gone. The
    generations belong to them.
    """

    reference: GenerationRequest | None
    actual: GenerationRequest | None
    differences: tuple[RequestDifference, ...] = ()
    reference_generations: tuple[Generation, ...] = ()
    actual_generations: tuple[Generation, ...] = ()

    @property
    def of_prompt(self) -> bool:
        """Whether both sides are there and differ only in texts of the prompt."""
        return bool(self.differences) and all(d.position is not None for d in self.differences)

    def texts(self, origin: str) -> list[DifferingText]:
        """Return the texts of its generations that differ, as texts of `origin`."""
        pairs = zip(self.reference_generations, self.actual_generations, strict=False)
        return [DifferingText(origin, a.text, b.text) for a, b in pairs if a.text != b.text]


@dataclass(frozen=True, slots=True)
class DifferingText:
    """A generated text that is another one now; `origin` names the cell."""

    origin: str
    left: str
    right: str

    def forms(self) -> list[tuple[str, str]]:
        """Return both sides as a prompt may hold them: whole, stripped, their first lines."""
        ends = self.left.strip(), self.right.strip()
        firsts = ends[0].partition("\n")[0], ends[1].partition("\n")[0]
        found = dict.fromkeys([(self.left, self.right), ends, firsts])
        return [(a, b) for a, b in found if a and a != b]


def origins_of(
    changes: Sequence[RequestChange], texts: Iterable[DifferingText], own: str = ""
) -> tuple[str, ...]:
    """Return the origins of the texts from which all changes follow; empty if one does not.

    Parameters
    ----------
    changes
        The requests of one cell that differ, in order.
    texts
        What was generated before and is another text now.
    own
        Name of the cell itself: its later requests may contain texts of its earlier ones.
    """
    known = list(texts)
    used: dict[str, None] = {}
    for change in changes:
        found = _origins(change, known)
        if not found:
            return ()
        used |= dict.fromkeys(found)
        known += change.texts(own)
    return tuple(used)


def _origins(change: RequestChange, texts: Sequence[DifferingText]) -> list[str]:
    if not change.of_prompt or change.reference is None or change.actual is None:
        return []
    left, right = change.reference.prompt, change.actual.prompt
    if left is None or right is None or left.kind is PromptKind.TOKENS:
        return []
    out: list[str] = []
    for (_, a), (_, b) in zip(_parts(left), _parts(right), strict=True):
        found = _origins_of_text(a, b, texts) if a != b else [""]
        if not found:
            return []
        out += [origin for origin in found if a != b]
    return out


def _origins_of_text(left: str, right: str, texts: Sequence[DifferingText]) -> list[str]:
    """Return whose texts, put in place of the recorded ones, make `right` of `left`."""
    for text in texts:
        if any(_one_replaced(left, right, a, b) for a, b in text.forms()):
            return [text.origin]
    forms = {a: (b, text.origin) for text in reversed(texts) for a, b in text.forms()}
    inside = [a for a in forms if a in left]
    if inside:
        pattern = "|".join(map(re.escape, sorted(inside, key=len, reverse=True)))
        made = re.sub(pattern, lambda found: forms[found.group()][0], left)
        if made == right:
            return [forms[a][1] for a in dict.fromkeys(re.findall(pattern, left))]
    return [t.origin for t in texts if _part_replaced(left, right, t.left, t.right)][:1]


def _one_replaced(left: str, right: str, old: str, new: str) -> bool:
    """Return whether one occurrence of `old` in `left`, replaced, gives `right`."""
    if len(left) - len(old) != len(right) - len(new):
        return False
    at = _common(left, right)
    start = left.find(old, max(at - len(old), 0))
    while 0 <= start <= at:
        if left[:start] + new + left[start + len(old) :] == right:
            return True
        start = left.find(old, start + 1)
    return False


def _part_replaced(left: str, right: str, old: str, new: str) -> bool:
    """Return whether the sides differ in parts of `old` and `new` that are long enough."""
    start = _common(left, right)
    rest = min(len(left), len(right)) - start
    end = _common(left[start:][::-1][:rest], right[start:][::-1][:rest])
    a, b = left[start : len(left) - end], right[start : len(right) - end]
    if a not in old or b not in new:
        return False
    for char in left[:start][::-1][:_LONGEST_GROWTH]:
        if char + a not in old or char + b not in new:
            break
        a, b = char + a, char + b
    for char in left[len(left) - end :][:_LONGEST_GROWTH]:
        if a + char not in old or b + char not in new:
            break
        a, b = a + char, b + char
    return min(len(a), len(b)) >= _SHORTEST_PART


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request as it stands in a stamp; `call` and `index` say where."""

    stamp: Stamp
    request: GenerationRequest
    generations: tuple[Generation, ...]
    occurrence: int
    call: int
    index: int
    peers: int

    @property
    def derived(self) -> bool:
        """Whether its seeds are derived from the session's."""
        request, stamp = self.request, self.stamp
        return request.seeds == tuple(
            derive_seed(stamp.root_seed, stamp.name, request.prompt_tokens, self.occurrence, j)
            for j in range(len(request.seeds))
        )


def request_changes(reference: Stamp, actual: Stamp) -> tuple[RequestChange, ...]:
    """Return the requests that differ, in the order of the reference, then what is new."""
    left, right = _unequal(_asked(reference), _asked(actual))
    pairs: list[_Pair] = _paired(left, right)
    taken = {id(other) for _, other in pairs if other is not None}
    pairs += [(None, asked) for asked in right if id(asked) not in taken]
    return tuple(_change(one, other) for one, other in pairs)


def _asked(stamp: Stamp) -> list[_Asked]:
    out: list[_Asked] = []
    first = [call for call in stamp.calls if call.attempt is None or call.attempt.number == 1]
    counts = iter(occurrences([r.prompt_tokens for call in first for r in call.requests]))
    for number, call in enumerate(first):
        for index, (request, generations) in enumerate(call.by_request()):
            size = len(call.requests)
            out.append(_Asked(stamp, request, generations, next(counts), number, index, size))
    return out


def _unequal(left: list[_Asked], right: list[_Asked]) -> tuple[list[_Asked], list[_Asked]]:
    """Return what has no equal request on the other side; repeats count one by one."""
    ours, theirs = _by_digest(left), _by_digest(right)
    return (
        [asked for key, asked in ours.items() if key not in theirs],
        [asked for key, asked in theirs.items() if key not in ours],
    )


def _by_digest(asked: list[_Asked]) -> dict[tuple[Digest, int], _Asked]:
    digests = [item.request.digest for item in asked]
    return dict(zip(zip(digests, occurrences(digests), strict=True), asked, strict=True))


_Pair: TypeAlias = tuple[_Asked | None, _Asked | None]
_Key: TypeAlias = Callable[[_Asked], Hashable]


def _paired(left: list[_Asked], right: list[_Asked]) -> list[_Pair]:
    """Pair the same prompt first, then the same place in an equally large call, then texts."""
    found: dict[int, _Asked] = {}
    rest = _match(found, left, right, lambda a: (a.request.prompt_tokens, 0))
    rest = _match(found, left, rest, lambda a: ((a.call, a.index), a.peers))
    open_ = [asked for asked in left if id(asked) not in found]
    if len(open_) > _MOST_NEAREST or len(rest) > _MOST_NEAREST:
        found |= {id(one): other for one, other in zip(open_, rest, strict=False)}
    else:
        _match_nearest(found, open_, rest)
    return [(asked, found.get(id(asked))) for asked in left]


def _match(
    found: dict[int, _Asked], left: list[_Asked], right: list[_Asked], key: _Key
) -> list[_Asked]:
    """Pair what has the same key, in order, and return what is left of `right`."""
    waiting: dict[Hashable, list[_Asked]] = {}
    for asked in right:
        waiting.setdefault(key(asked), []).append(asked)
    for asked in left:
        others = waiting.get(key(asked)) if id(asked) not in found else None
        if others:
            found[id(asked)] = others.pop(0)
    taken = {id(other) for other in found.values()}
    return [asked for asked in right if id(asked) not in taken]


def _match_nearest(found: dict[int, _Asked], left: list[_Asked], right: list[_Asked]) -> None:
    texts = {id(asked): _text(asked.request) for asked in (*left, *right)}
    order = sorted(
        (-_likeness(texts[id(one)], texts[id(other)]), abs(i - j), i, j)
        for i, one in enumerate(left)
        for j, other in enumerate(right)
    )
    taken: set[int] = set()
    for _, _, i, j in order:
        if id(left[i]) not in found and j not in taken:
            found[id(left[i])] = right[j]
            taken.add(j)


def _text(request: GenerationRequest) -> str:
    parts = _parts(request.prompt) if request.prompt is not None else []
    return "\n".join(text for _, text in parts)


def _likeness(left: str, right: str) -> float:
    """Return how much of the longer text both share at its two ends, 0 to 1."""
    a, b = left[:_MOST_COMPARED], right[:_MOST_COMPARED]
    start = _common(a, b)
    end = _common(left[start:][-_MOST_COMPARED:][::-1], right[start:][-_MOST_COMPARED:][::-1])
    return (start + end) / max(len(left), len(right), 1)


def _common(left: Sequence[object], right: Sequence[object]) -> int:
    """Return the length of the common beginning."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def _change(one: _Asked | None, other: _Asked | None) -> RequestChange:
    if one is None or other is None:
        return RequestChange(
            one.request if one else None,
            other.request if other else None,
            (),
            one.generations if one else (),
            other.generations if other else (),
        )
    return RequestChange(
        one.request, other.request, _differences(one, other), one.generations, other.generations
    )


def _differences(one: _Asked, other: _Asked) -> tuple[RequestDifference, ...]:
    left, right = one.request, other.request
    found = _prompt_differences(left, right)
    if len(left.seeds) != len(right.seeds):
        found.append(RequestDifference("n", str(len(left.seeds)), str(len(right.seeds))))
    found += _seed_differences(one, other)
    for name in Sampling.__slots__:
        a, b = getattr(left.sampling, name), getattr(right.sampling, name)
        if a != b:
            found.append(RequestDifference(name, _value(a), _value(b)))
    return tuple(found)


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.12g}"
    if isinstance(value, tuple):
        shown = ", ".join(_quoted(v) if isinstance(v, str) else str(v) for v in value)
        return f"[{shown}]"
    return str(value)


def _seed_differences(one: _Asked, other: _Asked) -> list[RequestDifference]:
    left, right = one.derived, other.derived
    if not left and not right:
        a, b = one.request.seeds[0], other.request.seeds[0]
        return [RequestDifference("seed", str(a), str(b))] if a != b else []
    if left != right:
        return [RequestDifference("seed", _seed(one), _seed(other))]
    out = []
    if one.stamp.root_seed != other.stamp.root_seed:
        roots = str(one.stamp.root_seed), str(other.stamp.root_seed)
        out.append(RequestDifference("the session's seed", *roots))
    if one.stamp.name != other.stamp.name:
        before, after = (
            _quoted(asked.stamp.name) if asked.stamp.name else "none" for asked in (one, other)
        )
        out.append(RequestDifference("the cell's name (seeds derive from it)", before, after))
    same_prompt = one.request.prompt_tokens == other.request.prompt_tokens
    if same_prompt and one.occurrence != other.occurrence:
        places = str(one.occurrence + 1), str(other.occurrence + 1)
        out.append(RequestDifference("place among equal prompts", *places))
    return out


def _seed(asked: _Asked) -> str:
    if asked.derived:
        return f"derived from the session's ({asked.stamp.root_seed})"
    return str(asked.request.seeds[0])


def _prompt_differences(
    left: GenerationRequest, right: GenerationRequest
) -> list[RequestDifference]:
    if left.prompt_tokens == right.prompt_tokens:
        return []
    if left.kind is not right.kind:
        return [RequestDifference("kind of prompt", left.kind.value, right.kind.value)]
    if left.prompt is None or right.prompt is None:
        return [RequestDifference("prompt (only digests are stored)", *_digests(left, right))]
    if left.kind is PromptKind.TOKENS:
        return [_ids_difference(left.prompt.token_ids, right.prompt.token_ids)]
    ours, theirs = _parts(left.prompt), _parts(right.prompt)
    if [label for label, _ in ours] != [label for label, _ in theirs]:
        return _other_messages(ours, theirs)
    found = [
        _text_difference(label, a, b)
        for (label, a), (_, b) in zip(ours, theirs, strict=True)
        if a != b
    ]
    # The same words, but other tokens: another template or tokenizer turned them into ids.
    return found or [RequestDifference("tokens of the same prompt", *_digests(left, right))]


def _digests(left: GenerationRequest, right: GenerationRequest) -> tuple[str, str]:
    return left.prompt_tokens.short, right.prompt_tokens.short


def _parts(prompt: Prompt) -> list[tuple[str, str]]:
    """Return the texts of a prompt, each with what it is called."""
    if not prompt.messages:
        return [("prompt", prompt.text)]
    last = len(prompt.messages) - 1
    out = []
    for number, message in enumerate(prompt.messages):
        label = f"{message.role[:_SHOWN]} message"
        if message.role == "user" and number == last:
            label = "prompt"
        elif message.role != "system":
            label = f"{label} {number + 1}"
        out.append((label, message.content))
    return out


def _other_messages(
    ours: list[tuple[str, str]], theirs: list[tuple[str, str]]
) -> list[RequestDifference]:
    systems = [dict(parts).get("system message") for parts in (ours, theirs)]
    if systems.count(None) == 1:
        left, right = ("none" if text is None else _quoted(_clip(text)) for text in systems)
        return [RequestDifference("system message", left, right)]
    return [RequestDifference("number of messages", str(len(ours)), str(len(theirs)))]


def _text_difference(label: str, left: str, right: str) -> RequestDifference:
    at = _common(left, right)
    rest = min(len(left), len(right)) - at
    end = _common(left[at:][::-1][:rest], right[at:][::-1][:rest])
    start = at
    while start > max(at - 16, 0) and not left[start - 1].isspace():
        start -= 1
    a, b = (_excerpt(text, start, len(text) - end) for text in (left, right))
    return RequestDifference(label, a, b, at)


def _excerpt(text: str, start: int, end: int) -> str:
    """Return the words of ``text[start:end]``, the last one whole."""
    while end < len(text) and not text[end - 1 : end + 1].isspace() and not text[end].isspace():
        end += 1
    part = text[start:end]
    return _quoted(_clip(part)) if part else "(nothing)"


def _ids_difference(left: tuple[int, ...], right: tuple[int, ...]) -> RequestDifference:
    at = _common(left, right)
    a, b = (str(ids[at]) if at < len(ids) else "(end)" for ids in (left, right))
    return RequestDifference("prompt", a, b, at, "token")


def _clip(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'


def change_lines(
    changes: Iterable[RequestChange],
    gone: str = "recorded, but not made",
    new: str = "made, but not recorded",
) -> tuple[str, ...]:
    """Return what differs in one line each, equal changes together.

    Parameters
    ----------
    changes
        The requests that differ.
    gone, new
        What is said of a request without a counterpart on either side.
    """
    paired: Counter[tuple[str, ...]] = Counter()
    single: Counter[str] = Counter()
    for change in changes:
        if change.reference is None or change.actual is None:
            single[new if change.reference is None else gone] += 1
        else:
            paired[tuple(map(str, change.differences))] += 1
    lines = [f"{_requests(n, 'differs', 'differ')}: {'; '.join(k)}" for k, n in paired.items()]
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], f"and {len(lines) - _MOST_LINES} other differences"]
    return (*lines, *(_requests(n, word, word) for word, n in single.items()))


def _requests(count: int, one: str, many: str) -> str:
    return f"1 request {one}" if count == 1 else f"{count} requests {many}"
