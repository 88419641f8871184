"""The interface of every engine, the result of a call, and the lookup of engines by name.

The arrival times of tokens (`Timings`) are volatile like all of `RunStats`: never digested,
never compared.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.generation import Generation, GenerationRequest, Prompt, ResolvedPrompt
from jupyter_detllm.core.levels import Level, Reach
from jupyter_detllm.core.stamp import ModelIdentity
from jupyter_detllm.errors import UsageError, installing

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from jupyter_detllm.invariance.base import KernelCheck

__all__ = [
    "FAKE",
    "RESOLUTION",
    "VLLM",
    "VLLM_SERVER",
    "Capabilities",
    "Engine",
    "EngineSpec",
    "Gaps",
    "GenerationResult",
    "Invariant",
    "KernelChecked",
    "Lowerable",
    "Progress",
    "ProgressCallback",
    "RemoteEngine",
    "RunStats",
    "SamplingOptions",
    "Scorer",
    "ShutdownReport",
    "StepClock",
    "Timings",
    "TokenScore",
    "bucket_of",
    "engine_of",
    "load_engine",
    "named_engines",
    "no_report",
    "reach_field",
    "reach_of",
    "seconds_of",
]

RESOLUTION = 1.02
"""Gaps between tokens are stored to within 2 %, so that long calls take little space."""
_BUCKET_SCALE = 1 / math.log(RESOLUTION)
_LEAST_BUCKET = 1e-6

Gaps = tuple[tuple[int, int], ...]
"""Gaps between tokens: pairs of bucket (`bucket_of`) and count, ascending."""


def bucket_of(seconds: float) -> int:
    """Return the bucket of a time in seconds."""
    return round(math.log(max(seconds, _LEAST_BUCKET) / _LEAST_BUCKET) * _BUCKET_SCALE)


def seconds_of(bucket: int) -> float:
    """Return the time in the middle of a bucket."""
    return _LEAST_BUCKET * float(RESOLUTION**bucket)


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of one call, in seconds; empty if the engine does not measure them.

    Attributes
    ----------
    completions
        From a completion's submission to the engine to its last token.
    first_tokens
        The same to its first token.
    gaps
        From one token of a completion to its next.
    source
        Source of the first two: ``vLLM``, or ``steps`` for a clock around engine steps.
    """

    completions: tuple[float, ...] = ()
    first_tokens: tuple[float, ...] = ()
    gaps: Gaps = ()
    source: str = ""

    def plus(self, other: Timings) -> Timings:
        """Return the times of both."""
        gaps = Counter(dict(self.gaps)) + Counter(dict(other.gaps))
        sources = (self.source, other.source)
        return Timings(
            self.completions + other.completions,
            self.first_tokens + other.first_tokens,
            tuple(sorted(gaps.items())),
            ", ".join(dict.fromkeys(source for source in sources if source)),
        )


class StepClock:
    """Measures the times of one call from the results of each engine step."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = self._last = clock()
        self._completions: list[float] = []
        self._first: list[float] = []
        self._gaps: Counter[int] = Counter()

    def restart(self) -> None:
        """Add completions that are submitted only now."""
        self._start = self._last = self._clock()

    def step(self, *, going_on: int = 0, first: int = 0, finished: int = 0) -> None:
        """Note the end of a step.

        Parameters
        ----------
        going_on
            Completions that already had a token and got another one.
        first, finished
            Completions that got their first or last token.
        """
        now = self._clock()
        if going_on > 0:
            self._gaps[bucket_of(now - self._last)] += going_on
        if first:
            self._first += [now - self._start] * first
        if finished:
            self._completions += [now - self._start] * finished
        self._last = now

    def timings(self) -> Timings:
        """Return the measured times."""
        return Timings(
            tuple(self._completions),
            tuple(self._first),
            tuple(sorted(self._gaps.items())),
            "steps" if self._completions else "",
        )


ENTRY_POINTS = "jupyter_detllm.engines"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do; anything else is refused, never ignored."""

    evidence: bool = True
    beam_search: bool = False
    batch: bool = True
    levels: tuple[Level, ...] = (Level.SEEDED,)
    score: bool = False


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The settings that an engine is started with.

    Attributes
    ----------
    model
        The user's spelling: ``demo``, a folder, or a hub id.
    level
        The requested guarantee level.
    options
        Engine options, as vLLM spells them; empty means its defaults at this level.
    seed
        Root seed of the session.
    sequential
        Whether one sequence at a time is acceptable for the level `invariant`.
    fallback
        The level to fall back to if `invariant` does not hold; None insists on it.
    """

    model: str
    level: Level = Level.REPEATABLE
    options: Mapping[str, FieldValue] = field(default_factory=dict)
    seed: int = 0
    sequential: bool = True
    fallback: Level | None = None


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """The user's sampling options; None keeps the default of the model or of this package."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] | None = None
    ignore_eos: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a generate call."""

    prompts_done: int
    prompts: int
    tokens: int
    seconds: float


ProgressCallback: TypeAlias = Callable[[Progress], None]


def no_report(text: str) -> None:
    """Report a line of progress to nobody."""


@dataclass(frozen=True, slots=True)
class RunStats:
    """Statistics of one run: never digested, never compared.

    Attributes
    ----------
    seconds, tokens
        Duration of the call, and the number of generated tokens.
    cached_tokens, prompt_tokens
        Prompt tokens found in the prefix cache, and the total.
    preemptions
        How often a request was preempted.
    kv_peak
        Largest share of the KV cache in use, 0 to 1; None if the engine does not report it.
    timings
        Arrival times of the tokens.
    """

    seconds: float = 0.0
    tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    kv_peak: float | None = None
    timings: Timings = field(default_factory=Timings)


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """The generations of one call, ordered by (prompt, completion), and its statistics."""

    generations: tuple[Generation, ...]
    stats: RunStats


@dataclass(frozen=True, slots=True)
class ShutdownReport:
    """What a shutdown freed, and what it could not (one sentence each)."""

    freed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


@runtime_checkable
class Engine(Protocol):
    """One running engine. Construction starts it; `progress` is called with a line per stage.

    `name` is the one it is registered under, `fields` returns it as ``engine.name``, and
    `model` returns ``spec.model`` as the model's name: a replay finds the engine by the
    first and starts it with the second. A fingerprint field that it returns and an option of
    vLLM sets (`verify.engine_settings.ROWS`) is set by the option of that name.

    Errors raised on purpose are `DetLLMError`. After any exception from `generate`, including
    `KeyboardInterrupt`, the engine is consistent: no request is left scheduled, no cache holds
    anything that was not computed, and the next call answers only its own requests.
    """

    name: str
    capabilities: Capabilities
    spec: EngineSpec

    def __init__(
        self, spec: EngineSpec, *, progress: Callable[[str], None] | None = None
    ) -> None: ...

    def resolve(self, prompt: Prompt, options: SamplingOptions) -> ResolvedPrompt:
        """Apply chat template, tokenizer and defaults.

        Options that are not set come from the model's own sampling defaults, as far as the
        engine knows them, and then from this package: temperature 0, 128 new tokens.

        Raises
        ------
        RequestError
            For what cannot be run as asked.
        """
        ...

    def generate(
        self, requests: Sequence[GenerationRequest], *, progress: ProgressCallback | None = None
    ) -> GenerationResult:
        """Run one call: all prompts are enqueued before the first step.

        Raises
        ------
        RequestError
            For requests that cannot be run; none has run.
        EngineError
            If the engine fails. It is consistent afterwards, or says that it is not.
        KeyboardInterrupt
            As soon as the engine can stop.
        """
        ...

    def fields(self) -> dict[str, FieldValue]:
        """Return the `engine.*` fields as RESOLVED in the live engine."""
        ...

    def model(self) -> ModelIdentity:
        """Return name and digests of the model in use."""
        ...

    def shutdown(self) -> ShutdownReport:
        """Stop and free; a second call does nothing."""
        ...


@runtime_checkable
class Invariant(Engine, Protocol):
    """Additional interface of an engine with the level `invariant`.

    Attributes
    ----------
    self_test
        Result of its self-test (`str` gives the text); None before it, and at other levels.
    """

    self_test: object

    @property
    def method(self) -> str:
        """Name of the active method; "off" if there is none."""
        ...

    def fall_back(self) -> str | None:
        """Switch to the next method; return its name, None if there is none left."""
        ...


def reach_of(engine: Engine) -> Reach | None:
    """Return the reach of the engine's self-test; None if it showed nothing."""
    found = getattr(getattr(engine, "self_test", None), "reach", None)
    return found if isinstance(found, Reach) else None


def reach_field(engine: Engine) -> dict[str, FieldValue]:
    """Return the field `engine.invariance_reach`, if there is a reach."""
    found = reach_of(engine)
    return {} if found is None else {"engine.invariance_reach": str(found)}


@runtime_checkable
class KernelChecked(Invariant, Protocol):
    """Additional interface of an engine whose kernels can be called directly."""

    def check_kernels(
        self, *, tokens: int, sequences: int, step_tokens: int, seconds: float
    ) -> KernelCheck | None:
        """Call the kernels alone and in batches, as `invariance.base.Method.check_kernels` does.

        Raises
        ------
        EngineError
            If the engine fails.
        """
        ...


@runtime_checkable
class Lowerable(Invariant, Protocol):
    """Additional interface of an engine that can fall back to a lower level without a restart.

    Attributes
    ----------
    shortfall
        Why it runs at a lower level than requested, or one sequence at a time, as a clause;
        None if it does neither.
    """

    shortfall: str | None

    def lower(self, level: Level, why: str) -> bool:
        """Continue at `level`, like an engine started for it; False if that is not possible."""
        ...


@runtime_checkable
class RemoteEngine(Engine, Protocol):
    """Additional interface of an engine that runs in a process not started from here.

    The environment and the determinism controls of this process are then not part of the
    fingerprint.
    """

    def environment(self) -> dict[str, FieldValue]:
        """Return the fields of the engine's environment, as far as it reports them."""
        ...

    @property
    def unproven(self) -> tuple[str, ...]:
        """What cannot be verified from here, one sentence each."""
        ...


@dataclass(frozen=True, slots=True)
class TokenScore:
    """The score of a recorded token in its place.

    Logprobs are natural logarithms, of the model's own distribution: temperature,
    penalties and filters are not applied. `best_id` is the most likely token there.
    """

    logprob: float
    best_id: int
    best_logprob: float


@runtime_checkable
class Scorer(Protocol):
    """Additional interface of an engine with ``capabilities.score``."""

    def score(self, request: GenerationRequest, generation: Generation) -> tuple[TokenScore, ...]:
        """Score the tokens of `generation` after the prompt of `request`, in one prefill.

        Raises
        ------
        RequestError
            If prompt and tokens do not fit the engine.
        EngineError
            If the engine fails.
        """
        ...


FAKE = "fake"
VLLM = "vllm"
VLLM_SERVER = "vllm-server"


_NEED_A_MODEL = frozenset({VLLM, VLLM_SERVER, "http", "https"})


@cache
def _registered() -> dict[str, EntryPoint]:
    """Return the entry points of the installed engines: by name, or by URL scheme."""
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def named_engines() -> tuple[str, ...]:
    """Return the engines that are used by their name alone, without a model or an address."""
    return tuple(name for name in sorted(_registered()) if name not in _NEED_A_MODEL)


def engine_of(model: str) -> str:
    """Return the name of the engine that `model` asks for.

    It is the engine registered under the scheme of an address (``NAME://...``), or under
    `model` itself; any other model is loaded by vLLM.

    Raises
    ------
    UsageError
        For an address whose scheme no installed engine is registered for.
    """
    scheme, address, _ = model.partition("://")
    key = scheme.lower() if address else model
    if not address and key not in _registered():
        return VLLM
    return load_engine(key).name


def load_engine(name: str) -> type[Engine]:
    """Return the class of engine `name`: called with ``(spec, *, progress=None)`` it starts.

    Parameters
    ----------
    name
        A name, or a URL scheme, that an entry point of the group ``jupyter_detllm.engines`` has.

    Raises
    ------
    UsageError
        When no installed package registers that name, or the class has a name that is not
        registered.
    """
    known = _registered()
    if name not in known:
        raise UsageError(
            f"there is no engine {name!r:.60}",
            expected=", ".join(known) or "an installed engine",
            fix=installing("cpu"),
        )
    engine: type[Engine] = known[name].load()
    if engine.name not in known:
        raise UsageError(
            f"the engine {name!r} calls itself {engine.name!r:.60}, which is not registered",
            expected=f"an entry point of that name in the group {ENTRY_POINTS}",
        )
    return engine
