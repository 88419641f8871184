"""Recorded requests of any number of notebooks, grouped by the engine they need. Pure.

One group is one engine start. A recorded call stays one call, except at level `invariant`, where
batches may be anything. A notebook may only request what the user permits, and this is checked
before anything is started.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from jupyter_detllm.core.generation import MAX_COMPLETIONS, Generation, GenerationRequest
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.notebook import CellView, check_cell
from jupyter_detllm.core.stamp import Call, ModelIdentity, Stamp
from jupyter_detllm.core.verdict import Facts, Outcome, decide
from jupyter_detllm.engines.base import VLLM
from jupyter_detllm.errors import UsageError
from jupyter_detllm.models import DEMO_NAME
from jupyter_detllm.models.adapter import is_adapter, read_adapter
from jupyter_detllm.verify.engine_settings import Chooser, EngineSettings

__all__ = [
    "DEFAULT_TOKENS_TOTAL",
    "FREE_BATCH",
    "EngineGroup",
    "Key",
    "Permissions",
    "Plan",
    "PlannedCell",
    "Position",
    "allowed_models",
    "check_total",
    "excess",
    "most_tokens",
    "plan_replay",
    "recorded_tokens",
]

DEFAULT_TOKENS_TOTAL = 200_000
"""Prompt tokens and new tokens of one run, unless the user allows more."""


@dataclass(frozen=True, slots=True)
class Permissions:
    """What the user allows notebooks to ask for.

    Attributes
    ----------
    max_tokens_total
        Prompt and new tokens of the whole run.
    models
        Names and folders that may be loaded, besides ``demo``.
    """

    max_tokens_total: int = DEFAULT_TOKENS_TOTAL
    models: tuple[str, ...] = ()


def allowed_models(names: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return what may be loaded: models by recorded name, and adapters by digest.

    A stamp names a folder by its last part, so a folder that is allowed stands for
    that name, too. What is loaded is always the user's text.
    """
    models, adapters = {DEMO_NAME: DEMO_NAME}, {}
    for name in names:
        models.setdefault(name, name)
        folder = Path(name).expanduser()
        if folder.is_dir():
            models.setdefault(folder.resolve().name, name)
        if is_adapter(name):
            adapters[str(read_adapter(name).digest)] = name
    return models, adapters


_MOST_CHARACTERS = 1_000_000
_MOST_MESSAGES = 1_000
_MOST_BEAMS = 64
_MOST_STOPS = 64
_LONGEST_STOP = 1_000
_MOST_STOP_IDS = 1_024
_MOST_LENGTH = 1 << 24


def excess(request: GenerationRequest) -> str | None:
    """Return in which respect a request is more than is taken from a notebook, or None."""
    prompt, sampling = request.prompt, request.sampling
    messages = prompt.messages if prompt else ()
    characters = len(prompt.text) if prompt else 0
    characters += sum(len(m.content) + len(m.role) for m in messages)
    sizes = {
        "characters of prompt": (characters, _MOST_CHARACTERS),
        "messages": (len(messages), _MOST_MESSAGES),
        "prompt tokens": (request.prompt_length, _MOST_LENGTH),
        "new tokens": (sampling.max_tokens, _MOST_LENGTH),
        "completions": (len(request.seeds), MAX_COMPLETIONS),
        "beams": (sampling.beam_width, _MOST_BEAMS),
        "stop strings": (len(sampling.stop), _MOST_STOPS),
        "characters in a stop string": (max(map(len, sampling.stop), default=0), _LONGEST_STOP),
        "stop token ids": (len(sampling.stop_token_ids), _MOST_STOP_IDS),
    }
    for what, (size, most) in sizes.items():
        if size > most:
            return f"{size:,} {what}, more than the {most:,} taken from a notebook"
    numbers = (getattr(sampling, name) for name in sampling.__slots__)
    if not all(math.isfinite(value) for value in numbers if isinstance(value, float)):
        return "a sampling parameter that is not a finite number"
    return None


def most_tokens(request: GenerationRequest) -> int:
    """Return the most tokens a request can make an engine compute."""
    rows = len(request.seeds)
    if request.sampling.beam_width:
        rows = max(rows, request.sampling.beam_width)
    return rows * (request.prompt_length + request.sampling.max_tokens)


def check_total(sizes: Iterable[int], allowed: int) -> None:
    """Refuse more tokens than the user allows.

    Raises
    ------
    UsageError
        With the option that allows them.
    """
    total = sum(sizes)
    if total > allowed:
        raise UsageError(
            f"these notebooks ask for up to {total:,} tokens",
            expected=f"at most {allowed:,}",
            fix=f"--max-tokens-total {total}, or fewer notebooks",
        )


FREE_BATCH = 64
"""Completions in one call where batches are free: enough to fill a step, small enough that
an interrupt loses little."""

_DEFAULT_MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """A cell: the number of its notebook, from 0, and its own, from 1."""

    notebook: int
    cell: int


@dataclass(frozen=True, slots=True)
class Position:
    """Where a request is run: which batch of its group, and which request of it."""

    batch: int
    index: int


def recorded_tokens(batch: Call) -> int:
    """Return how many tokens were recorded of a batch."""
    return sum(len(generation.token_ids) for generation in batch.generations)


@dataclass(frozen=True, slots=True)
class PlannedCell:
    """A cell that is run: its reference, and per recorded call where each request goes."""

    key: Key
    view: CellView
    stamp: Stamp
    places: tuple[tuple[Position, ...], ...]

    @property
    def batches(self) -> frozenset[int]:
        """The batches it takes part in."""
        return frozenset(place.batch for call in self.places for place in call)


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """Cells that share one engine.

    Attributes
    ----------
    model
        What to load: a name the user allowed, never one out of a notebook.
    identity
        Name and digests as recorded.
    settings, level
        What the engine is started with.
    root_seed
        That of the first cell. Every request has its own seed, so it changes no result.
    batches
        The calls to make, with what was recorded of their requests.
    """

    model: str
    identity: ModelIdentity
    settings: EngineSettings
    level: Level
    root_seed: int
    cells: tuple[PlannedCell, ...]
    batches: tuple[Call, ...]

    @property
    def tokens(self) -> int:
        """How many tokens were recorded."""
        return sum(map(recorded_tokens, self.batches))

    @property
    def free(self) -> bool:
        """Whether batches need not be the recorded ones."""
        return self.level is Level.INVARIANT


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run, and what was settled without an engine."""

    groups: tuple[EngineGroup, ...]
    settled: Mapping[Key, Outcome] = field(default_factory=dict)

    @property
    def cells(self) -> tuple[PlannedCell, ...]:
        """All cells that are run, group by group."""
        return tuple(cell for group in self.groups for cell in group.cells)

    @property
    def requests(self) -> tuple[GenerationRequest, ...]:
        """All requests that are run."""
        batches = (batch for group in self.groups for batch in group.batches)
        return tuple(request for batch in batches for request in batch.requests)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A cell that can be run, and what it needs."""

    key: Key
    view: CellView
    stamp: Stamp
    model: str
    settings: EngineSettings

    def group_key(self) -> tuple[object, ...]:
        digests = tuple(self.stamp.model.digests().values())
        return (self.model, digests, self.settings, self.stamp.level)


def plan_replay(
    notebooks: Sequence[Iterable[CellView]], choose: Chooser, *, recorded: bool = False
) -> Plan:
    """Group the recorded requests of notebooks; settle what no engine is needed for.

    Parameters
    ----------
    notebooks
        The cells of each notebook.
    choose
        Says which engine a stamp's requests are sent to.
    recorded
        Take the output's stamp where a cell has no reference: for rescoring, which
        compares nothing. The source of a cell does not matter then.
    """
    settled: dict[Key, Outcome] = {}
    groups: dict[tuple[object, ...], list[_Recorded]] = {}
    for number, cells in enumerate(notebooks):
        for view in cells:
            key = Key(number, view.number)
            found = _recorded(key, view, choose, any_stamp=recorded)
            if isinstance(found, Outcome):
                settled[key] = found
            else:
                groups.setdefault(found.group_key(), []).append(found)
    return Plan(tuple(_group(members) for members in groups.values()), settled)


def _not_comparable(*reasons: str) -> Outcome:
    return decide(Facts(incomparable=reasons))


def _recorded(key: Key, view: CellView, choose: Chooser, *, any_stamp: bool) -> _Recorded | Outcome:
    stamp = view.reference or (view.actual if any_stamp else None)
    if view.problems or stamp is None:
        return check_cell(view)
    if view.skipped:
        return _not_comparable("skipped by its tag: not run")
    if not any_stamp and not view.is_of(stamp):
        return decide(Facts(source_changed=True))
    reasons = _unusable(stamp)
    if reasons:
        return _not_comparable(*reasons)
    choice = choose(stamp)
    if choice.settings is None:
        return _not_comparable(*choice.reasons)
    return _Recorded(key, view, stamp, choice.model, choice.settings)


def _unusable(stamp: Stamp) -> tuple[str, ...]:
    """Return why the requests of a stamp cannot be sent again; empty if they can."""
    if not stamp.requests:
        return ("it recorded no request",)
    if any(request.prompt is None for request in stamp.requests):
        return ("the prompt was not stored (--no-store-prompt): there is nothing to send",)
    found = [excess(request) for request in stamp.requests]
    return tuple(dict.fromkeys(f"it asks for {text}" for text in found if text is not None))


def _group(members: Sequence[_Recorded]) -> EngineGroup:
    first = members[0]
    level = first.stamp.level
    cells, batches = _pack(members, free=level is Level.INVARIANT)
    return EngineGroup(
        model=first.model,
        identity=first.stamp.model,
        settings=_widened(first.settings, batches),
        level=level,
        root_seed=first.stamp.root_seed,
        cells=cells,
        batches=batches,
    )


def _widened(settings: EngineSettings, batches: Sequence[Call]) -> EngineSettings:
    """Allow as many logprobs as the widest beam search asks for."""
    widths = [r.sampling.beam_width for batch in batches for r in batch.requests]
    needed = 2 * max(widths, default=0)
    if settings.engine != VLLM or needed <= _DEFAULT_MAX_LOGPROBS:
        return settings
    return settings.with_option("max_logprobs", needed)


_Packed = tuple[tuple[PlannedCell, ...], tuple[Call, ...]]
_Item = tuple[GenerationRequest, tuple[Generation, ...]]


def _batch(items: Iterable[_Item]) -> Call:
    """Return one call of requests; their generations are numbered by their place in it."""
    requests, recorded = zip(*items, strict=True)
    numbered = (
        replace(generation, prompt_index=index)
        for index, generations in enumerate(recorded)
        for generation in generations
    )
    return Call(requests, tuple(numbered))


def _pack(members: Sequence[_Recorded], *, free: bool) -> _Packed:
    """Make every recorded call a call of its own, or fill calls across cells and notebooks."""
    cells: list[PlannedCell] = []
    batches: list[list[_Item]] = []
    rows = 0
    for member in members:
        places = []
        for call in map(Call.by_request, member.stamp.calls):
            here = []
            for number, item in enumerate(call):
                size = len(item[0].seeds)
                if not batches or (rows + size > FREE_BATCH if free else number == 0):
                    batches.append([])
                    rows = 0
                here.append(Position(len(batches) - 1, len(batches[-1])))
                batches[-1].append(item)
                rows += size
            places.append(tuple(here))
        cells.append(PlannedCell(member.key, member.view, member.stamp, tuple(places)))
    return tuple(cells), tuple(map(_batch, batches))
