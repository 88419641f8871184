"""The self-test: the same completions alone and batched, compared bit by bit.

The level `invariant` is never granted without it, whatever the method. A plan, which is pure,
lists the prompts and batch compositions. Every completion is first generated alone; each
composition then batches the same completions with others, and must give the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from jupyter_detllm.core.canonical import Json
from jupyter_detllm.core.circumstances import NOT_HELD
from jupyter_detllm.core.compare import EvidenceState, PairComparison, compare_generations
from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.generation import (
    Generation,
    GenerationRequest,
    MarginClass,
    Prompt,
    PromptKind,
    ResolvedPrompt,
    build_requests,
)
from jupyter_detllm.core.levels import ONE_AT_A_TIME, Reach
from jupyter_detllm.engines.base import Engine, KernelChecked, RunStats, SamplingOptions, no_report
from jupyter_detllm.errors import InvarianceError, RequestError
from jupyter_detllm.invariance.base import KernelCheck, KernelRow

__all__ = [
    "PLAN_VERSION",
    "Ask",
    "Composition",
    "CompositionRow",
    "Form",
    "Question",
    "Room",
    "SelfTest",
    "TestPlan",
    "check_kernels",
    "plan_preemption",
    "plan_test",
    "preemption_options",
    "room_of",
    "run_test",
]

PLAN_VERSION = 2
"""Part of the cache's key, so that an extended plan is not answered by an older pass."""

_SENTENCES = (
    "The harbour master writes down every ship that enters before noon.",
    "Nobody could say why the clock in the tower ran faster in winter.",
    "She counted the apples twice and found one more each time.",
    "A narrow road leads from the mill to the bridge over the stream.",
    "His letters from the north arrived in the wrong order.",
    "The choir practised the second part until the lamps went out.",
    "When the water rose, they carried the books to the upper floor.",
)
_PREEMPTION_LENGTH = 512

_LONG_LENGTHS = (1600, 1543, 1571)
"""Tokens of the long prompts: all different, some not a multiple of a block or tile."""
_MORE_LENGTHS = (2600, 700, 1100, 3900)
_SHORTEST_LONG = 64
_MANY = 128
_MOST_CHUNKED = 8192


class Form(StrEnum):
    """The extent of a test.

    ``spot`` accompanies a cached pass, ``short`` runs at an engine's start, ``long`` on
    request.
    """

    SPOT = "spot"
    SHORT = "short"
    LONG = "long"

    @property
    def seconds(self) -> float:
        """Time limit of the kernel-level part, in seconds."""
        return {Form.SPOT: 0.0, Form.SHORT: 20.0, Form.LONG: 60.0}[self]


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt of the test, with the settings of its completions.

    Attributes
    ----------
    label
        Its name in rows.
    text
        The prompt.
    max_tokens
        Tokens of each completion: ends of text are ignored.
    temperature
        0 is greedy.
    n
        Completions.
    length
        Length in tokens to which the prompt is cut or repeated; 0 keeps the text as it is.
    """

    label: str
    text: str
    max_tokens: int
    temperature: float = 0.0
    n: int = 1
    length: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """A question in a call, and some of its completions; fillers are not compared."""

    question: int
    completions: tuple[int, ...]
    filler: bool = False


@dataclass(frozen=True, slots=True)
class Composition:
    """Calls made one after the other; the last of each completion's results counts.

    `needs` names a statistic (``preemptions`` or ``cached_tokens``) that must be above 0, or
    else the composition was not reached.
    """

    name: str
    calls: tuple[tuple[Ask, ...], ...]
    needs: str = ""


@dataclass(frozen=True, slots=True)
class TestPlan:
    """Questions, fillers, and compositions.

    `first` holds the compositions that run before the completions alone, while no prompt is
    cached; `compositions` those after them.
    """

    __test__ = False  # not a pytest test

    form: Form
    questions: tuple[Question, ...]
    fillers: tuple[Question, ...]
    compositions: tuple[Composition, ...]
    first: tuple[Composition, ...] = ()

    @property
    def alone(self) -> tuple[tuple[Ask, ...], ...]:
        """Every completion in a separate call, the baseline of all comparisons."""
        return tuple(
            (Ask(i, (j,)),) for i, item in enumerate(self.questions) for j in range(item.n)
        )


@dataclass(frozen=True, slots=True)
class Room:
    """The limits of an engine.

    Attributes
    ----------
    max_model_len, step_tokens, sequences
        Longest sequence; maximum tokens and sequences in one step.
    fast_prefill
        Whether thousands of prompt tokens take negligible time.
    prefix_cache
        Whether a cached prefix is used.
    chunked_prefill
        Whether a prompt that does not fit in a step is computed in several.
    """

    max_model_len: int = 4096
    step_tokens: int = 4096
    sequences: int = 256
    fast_prefill: bool = False
    prefix_cache: bool = False
    chunked_prefill: bool = False

    def words(self, wanted: int) -> int:
        """Return as many of `wanted` words as may fit; the tokenizer decides the rest."""
        return max(4, min(wanted, self.max_model_len // 2))


def _text(words: int, start: int = 0) -> str:
    """Return `words` words of prose that begins with sentence `start`."""
    out: list[str] = []
    number = start
    while len(out) < words:
        out += _SENTENCES[number % len(_SENTENCES)].split()
        number += 1 + number // len(_SENTENCES)
    return " ".join(out[:words])


def plan_test(form: Form, room: Room | None = None) -> TestPlan:
    """Return the test of `form` for an engine that has `room`."""
    room = room or Room()
    if form is Form.SPOT:
        # A short and a sampled one: few and many rows, alone and together.
        questions = _questions(room, tokens=4)[::2]
        calls = (_together(questions),)
        return TestPlan(form, questions, (), (Composition("together", calls),))
    tokens = 8 if form is Form.SHORT else 32
    questions = _questions(room, tokens)
    if form is Form.LONG:
        questions += _more_questions(room, tokens)
    draft = _Draft(form, room, questions, _long_questions(room, form, tokens))
    return draft.plan(*_fillers(room, form, tokens))


def _questions(room: Room, tokens: int) -> tuple[Question, ...]:
    """Return prompts short and long, greedy and sampled; two share a long prefix.

    It takes about 250 tokens or more for attention to split its KV range.
    """
    long = _text(room.words(200))
    return (
        Question("short", _text(12, 1), tokens),
        Question("long", f"{long} In the end", tokens),
        Question("sampled", f"{long} Nobody", tokens, temperature=0.8, n=2),
    )


def _more_questions(room: Room, tokens: int) -> tuple[Question, ...]:
    return (
        Question("medium", _text(room.words(60), 2), tokens),
        Question("longest", _text(room.words(350), 3), tokens),
        Question("one word", "Once", tokens),
        Question("short sampled", _text(9, 5), tokens, temperature=1.0, n=3),
    )


def _long_questions(room: Room, form: Form, tokens: int) -> tuple[Question, ...]:
    """Return prompts of more than 1,500 tokens, if the model has room for them.

    From about that length, attention on CPU chooses different tiles if another prompt is in
    the batch; shorter prompts do not show it.
    """
    lengths = _LONG_LENGTHS if room.prefix_cache else _LONG_LENGTHS[:2]
    if form is Form.LONG:
        lengths = (*lengths, *_MORE_LENGTHS)
    out: dict[int, Question] = {}
    for number, wanted in enumerate(lengths):
        # With less room, their lengths still differ.
        fits = room.max_model_len - tokens - 1 - number
        length = min(wanted, fits)
        if length >= _SHORTEST_LONG:
            text = _text(length, 2 * number + 1)
            out[length] = Question(f"{length:,} tokens", text, tokens, length=length)
    return tuple(out.values())


def _fillers(
    room: Room, form: Form, tokens: int
) -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    """Return filler prompts: short ones, and long prefills.

    If prefill is fast, or in the long form, there are too many of these for one step, so that
    some share steps with decoding.
    """
    count = min(_MANY, room.sequences) if room.fast_prefill else 12
    short = tuple(
        Question(
            f"neighbour {i}",
            f"{_text(6 + 7 * (i % 12), i)}{'' if i < 12 else f' {i}'}",
            tokens + i % 12,
            0.9 if i % 2 else 0.0,
        )
        for i in range(count)
    )
    words = room.words(1400)
    several = room.fast_prefill or form is Form.LONG
    count = min(16, 2 + room.step_tokens // max(words, 1)) if several else 1
    if not several:
        words = room.words(600)
    return short, tuple(Question(f"long prefill {i}", _text(words, i), 2) for i in range(count))


def _together(questions: tuple[Question, ...], begin: int = 0) -> tuple[Ask, ...]:
    return tuple(Ask(i, tuple(range(item.n))) for i, item in enumerate(questions, begin))


@dataclass(frozen=True, slots=True)
class _Draft:
    """Builds a plan; its `long` questions come after the `mixed` ones."""

    form: Form
    room: Room
    mixed: tuple[Question, ...]
    long: tuple[Question, ...]

    def plan(self, neighbours: tuple[Question, ...], prefills: tuple[Question, ...]) -> TestPlan:
        """Return the plan, given the filler prompts of every test: short ones and long ones."""
        chunks = self._chunks()
        groups = (neighbours, prefills, self._prefixes(), chunks)
        asks = _Fillers.of(*groups)
        compositions = [*self._compositions(asks), *self._long_compositions(asks)]
        first: list[Composition] = []
        if self.room.prefix_cache:
            first = self._before_any_cache(asks)
        elif chunks or self._cut_anyway():
            call = (*asks.chunks, *self._long_asks, *self._unseeded(self._mixed_asks))
            compositions.append(Composition("prefill in chunks", (call,)))
        return TestPlan(
            self.form,
            (*self.mixed, *self.long),
            tuple(itertools.chain(*groups)),
            tuple(compositions),
            tuple(first),
        )

    @property
    def _mixed_asks(self) -> tuple[Ask, ...]:
        return _together(self.mixed)

    @property
    def _long_asks(self) -> tuple[Ask, ...]:
        return _together(self.long, len(self.mixed))

    def _unseeded(self, asks: tuple[Ask, ...]) -> tuple[Ask, ...]:
        """Leave out sampled completions: vLLM cannot chunk a seeded prefill on CPU."""
        return tuple(ask for ask in asks if not self.mixed[ask.question].temperature)

    def _compositions(self, asks: _Fillers) -> list[Composition]:
        every = self._mixed_asks
        apart = tuple(Ask(ask.question, (c,)) for ask in every for c in ask.completions)
        out = [
            Composition("together", (every,)),
            Composition("completions apart, other order", (apart[::-1],)),
            Composition("beside a long prefill", ((*asks.neighbours, *every, *asks.prefills),)),
        ]
        if self.form is Form.LONG:
            pairs = tuple(every[i : i + 2] for i in range(0, len(every), 2))
            out += [
                Composition("in twos", pairs),
                Composition("other order", (every[::-1],)),
                Composition("other neighbours", (_mixed(asks.neighbours[::-1], every),)),
                Composition("long prefill first", ((*asks.prefills, *every),)),
                Composition("repeated", (every, every)),
                Composition("alone again", tuple((ask,) for ask in apart[::-1])),
            ]
        if self.room.prefix_cache:
            calls = (every, every)
            out.append(Composition("after cache warm-up", calls, needs="cached_tokens"))
        return out

    def _long_compositions(self, asks: _Fillers) -> list[Composition]:
        """Return long prompts batched with each other and with short ones."""
        long = self._long_asks
        if not long:
            return []
        call = (*asks.neighbours, *self._mixed_asks, *long)
        out = [Composition("long prompts together", (call,))]
        if self.form is Form.LONG:
            pairs = tuple(long[i : i + 2] for i in range(0, len(long), 2))
            out += [
                Composition("long prompts in twos", pairs),
                Composition("long prompts only, other order", (long[::-1],)),
                Composition("long prompts alone again", tuple((ask,) for ask in long[::-1])),
            ]
        return out

    def _before_any_cache(self, asks: _Fillers) -> list[Composition]:
        """Return batches of prompts that are not cached, or only in part.

        A prompt that has run alone is cached, and later batches start from there. So some
        prompts run in a batch first, some after their beginning has run, and the others
        alone.
        """
        cold = self._mixed_asks[::2]
        if asks.chunks or self._cut_anyway():
            cold = self._unseeded(cold)
        cold = (*cold, *self._long_asks[1::3])
        name = "prefill in chunks, nothing cached" if asks.chunks else "together, nothing cached"
        out = [Composition(name, ((*(asks.chunks or asks.prefills[:2]), *cold[::-1]),))]
        if asks.prefixes:
            calls = (asks.prefixes, (*asks.neighbours[:4], *self._long_asks[2::3]))
            out.append(Composition("after a cached prefix", calls, needs="cached_tokens"))
        return out

    def _prefixes(self) -> tuple[Question, ...]:
        """Return the first three quarters of some long prompts, to be left in the cache."""
        if not self.room.prefix_cache:
            return ()
        return tuple(
            replace(item, label=f"prefix {i}", max_tokens=2, length=item.length * 3 // 4)
            for i, item in enumerate(self.long[2::3])
        )

    def _cut_anyway(self) -> bool:
        """Whether the first long prompt does not fit in a step and is chunked."""
        chunked = self.room.chunked_prefill and bool(self.long)
        return chunked and self.room.step_tokens < self.long[0].length

    def _chunks(self) -> tuple[Question, ...]:
        """Return prompts that leave room in a step for half of the long prompt after them."""
        room = self.room
        slow = self.form is Form.SHORT and not room.fast_prefill
        if not room.chunked_prefill or len(self.long) < 2 or self._cut_anyway():
            return ()
        if slow and room.step_tokens > _MOST_CHUNKED:
            return ()
        left = room.step_tokens - self.long[1].length // 2
        most = room.max_model_len - 3
        lengths = [most] * (left // most) + [left % most] * bool(left % most)
        if len(lengths) + len(self.mixed) + len(self.long) > room.sequences:
            return ()  # they would not share a step
        return tuple(
            Question(f"chunk {i}", _text(min(length, 4000), 3 * i + 2), 2, length=length)
            for i, length in enumerate(lengths)
        )


class _Fillers(NamedTuple):
    """The fillers of a plan, by purpose."""

    neighbours: tuple[Ask, ...]
    prefills: tuple[Ask, ...]
    prefixes: tuple[Ask, ...]
    chunks: tuple[Ask, ...]

    @classmethod
    def of(cls, *groups: tuple[Question, ...]) -> _Fillers:
        """Return the asks for each group of questions, numbered through."""
        numbers = itertools.count()
        return cls(*(tuple(Ask(next(numbers), (0,), filler=True) for _ in part) for part in groups))


def _mixed(left: tuple[Ask, ...], right: tuple[Ask, ...]) -> tuple[Ask, ...]:
    pairs = itertools.chain(*itertools.zip_longest(left, right))
    return tuple(ask for ask in pairs if ask is not None)


def plan_preemption(room: Room | None = None) -> TestPlan:
    """Return the test for an engine started with `preemption_options`."""
    words = (room or Room(max_model_len=_PREEMPTION_LENGTH)).words(75)
    questions = tuple(
        Question(f"prompt {i}", _text(words, i), 96, 0.8 if i % 2 else 0.0) for i in range(8)
    )
    together = Composition("preempted", (_together(questions),), needs="preemptions")
    return TestPlan(Form.LONG, questions, (), (together,))


def preemption_options(block_size: int) -> dict[str, int]:
    """Return engine options under which the prompts of `plan_preemption` crowd each other out.

    `block_size` is the engine's, in tokens: a sequence of full length just fits.
    """
    blocks = -(-_PREEMPTION_LENGTH // max(block_size, 1)) + 2
    return {"max_model_len": _PREEMPTION_LENGTH, "num_gpu_blocks_override": blocks}


_FEWEST_WORDS = 8
_WORDS_AT_ONCE = 256
_NOTHING = "nothing was compared"
_Key = tuple[int, int]
_Results = dict[_Key, Generation]


@dataclass(frozen=True, slots=True)
class CompositionRow:
    """The result of one composition.

    Attributes
    ----------
    composition
        Its name.
    completions
        Number compared.
    tokens_equal, bitwise
        Number with equal tokens, and with equal tokens and logprobs.
    first
        The first difference, in words; "" without one.
    reached
        Whether the situation that the composition tests occurred.
    """

    composition: str
    completions: int
    tokens_equal: int
    bitwise: int
    first: str = ""
    reached: bool = True

    @property
    def held(self) -> bool:
        """Whether there was a completion, and all were bitwise equal."""
        return 0 < self.completions == self.bitwise


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The result of one self-test.

    Attributes
    ----------
    method
        The active method; "off" if there was none.
    form
        How much was tried.
    rows
        One per composition.
    evidence
        Whether logprobs were compared, or only tokens and texts.
    cached
        Whether it comes from an earlier engine with the same fingerprint.
    kernels
        One per kernel and shape; empty if the method has no kernel-level part.
    reach
        The range for which the level was shown to hold; None if it does not.
    """

    method: str
    form: Form
    rows: tuple[CompositionRow, ...]
    evidence: bool = True
    cached: bool = False
    kernels: tuple[KernelRow, ...] = ()
    reach: Reach | None = None

    @property
    def held(self) -> bool:
        """Whether every kernel and every composition held, and there was a composition."""
        kernels = all(row.held for row in self.kernels)
        return kernels and bool(self.rows) and all(row.held for row in self.rows)

    @property
    def first(self) -> str:
        """The first difference, with its kernel or composition; "" without one."""
        failed = [(row.name, row.first) for row in self.kernels if not row.held]
        failed += [(row.composition, row.first) for row in self.rows if not row.held]
        if not failed:
            return "" if self.rows else _NOTHING
        where, what = failed[0]
        return f"{where}: {what or _NOTHING}"

    def __str__(self) -> str:
        """Return the line that stamps hold, the same whether it is cached or not."""
        reach = f"; reaches {self.reach}" if self.reach is not None else ""
        total = sum(row.completions for row in self.rows)
        equal = sum(row.bitwise for row in self.rows)
        what = "bitwise equal" if self.evidence else "equal in tokens (no logprobs to compare)"
        end = reach if self.held else f"; {NOT_HELD} ({self.first})"
        return (
            f"{self.form} self-test: {equal} of {total} completions {what} "
            f"in {len(self.rows)} compositions{end}"
        )

    def to_json(self) -> dict[str, Json]:
        """Return the stored form, without whether it is cached."""
        return {
            "method": self.method,
            "form": self.form.value,
            "evidence": self.evidence,
            "held": self.held,
            "reach": None if self.reach is None else asdict(self.reach),
            "kernels": [asdict(row) for row in self.kernels],
            "rows": [asdict(row) for row in self.rows],
        }


def room_of(fields: Mapping[str, FieldValue], *, fast_prefill: bool = False) -> Room:
    """Return an engine's limits, from its `engine.*` fields."""

    def number(name: str) -> int:
        value = fields.get(name)
        return value if isinstance(value, int) and value > 0 else 4096

    return Room(
        max_model_len=number("engine.max_model_len"),
        step_tokens=number("engine.max_num_batched_tokens"),
        sequences=number("engine.max_num_seqs"),
        fast_prefill=fast_prefill,
        prefix_cache=fields.get("engine.prefix_cache") is True,
        chunked_prefill=fields.get("engine.chunked_prefill") is True,
    )


def check_kernels(engine: Engine, room: Room, seconds: float) -> KernelCheck | None:
    """Check the engine's kernels directly, up to its limits.

    A kernel that cannot be called is a failure, with the reason in the row. None for an engine
    or a method without a kernel-level part.
    """
    if not isinstance(engine, KernelChecked):
        return None
    try:
        return engine.check_kernels(
            tokens=room.max_model_len,
            sequences=room.sequences,
            step_tokens=room.step_tokens,
            seconds=seconds,
        )
    except InvarianceError as error:
        return KernelCheck((KernelRow("kernels", 0, 0, error.what),), Reach(0, 0))


def run_test(
    engine: Engine,
    plan: TestPlan,
    *,
    method: str,
    room: Room | None = None,
    progress: Callable[[str], None] | None = None,
    stop_early: bool = False,
    kernel_seconds: float | None = None,
) -> SelfTest:
    """Run a plan on a live engine, without keeping its generations.

    Parameters
    ----------
    engine
        Its kernels are checked first, if it supports that and the form has time for it; after
        that, only its `resolve` and `generate` are used.
    method
        Name of the active method.
    room
        The engine's limits; read from its fields by default.
    progress
        Called with one line per composition.
    stop_early
        Stop after the first kernel or composition that fails.
    kernel_seconds
        Time limit of the kernel-level part, by default that of the form; 0 skips it.

    Raises
    ------
    RequestError
        When a prompt of the plan does not fit the engine.
    EngineError
        When the engine fails.
    """
    room = room or room_of(engine.fields())
    say = progress or no_report
    kernels: KernelCheck | None = None
    seconds = plan.form.seconds if kernel_seconds is None else kernel_seconds
    if seconds and method != "off" and isinstance(engine, KernelChecked):
        say(f"self-test ({method}): kernels")
        kernels = check_kernels(engine, room, seconds)
    rows: tuple[CompositionRow, ...] = ()
    shown = Reach(0, 0)
    if kernels is None or kernels.held or not stop_early:
        bench = _Bench(
            engine,
            [_request(engine, item, i) for i, item in enumerate(plan.questions)],
            [_request(engine, item, 1000 + i) for i, item in enumerate(plan.fillers)],
            tuple(item.label for item in plan.questions),
        )
        rows = bench.rows(plan, lambda name: say(f"self-test ({method}): {name}"), stop_early)
        shown = bench.shown(plan, room)
    test = SelfTest(method, plan.form, rows, engine.capabilities.evidence)
    if kernels is not None:
        # A part without a row has shown nothing.
        test = replace(test, kernels=kernels.rows or (KernelRow("kernels", 0, 0),))
    if not test.held:
        return test
    return replace(test, reach=_reach(method, room, kernels, shown))


def _reach(method: str, room: Room, kernels: KernelCheck | None, shown: Reach) -> Reach:
    """Return the reach of a test that passed; `shown` is that of the completions."""
    if method == ONE_AT_A_TIME:
        # No sequence ever shares a step, so their number does not matter.
        return Reach(room.max_model_len, 1)
    if kernels is None:
        return shown
    found = kernels.reach
    wider = shown.tokens >= found.tokens and shown.sequences >= found.sequences
    return shown if wider else found


def _request(engine: Engine, question: Question, seed: int) -> GenerationRequest:
    options = SamplingOptions(
        temperature=question.temperature, max_tokens=question.max_tokens, ignore_eos=True
    )
    words = question.text.split()
    if question.length:
        ids = _token_ids(engine, words, question.length)
        resolved = engine.resolve(Prompt(PromptKind.TOKENS, token_ids=ids), options)
    else:
        resolved = _resolved(engine, words, options)
    (request,) = build_requests([resolved], root_seed=seed, name="self-test", n=question.n)
    return request


def _resolved(engine: Engine, words: list[str], options: SamplingOptions) -> ResolvedPrompt:
    while True:
        try:
            return engine.resolve(Prompt(PromptKind.TEXT, text=" ".join(words)), options)
        except RequestError:
            # A tokenizer that makes more tokens per word than usual.
            if len(words) < _FEWEST_WORDS:
                raise
            words = words[len(words) // 2 :]


def _token_ids(engine: Engine, words: list[str], length: int) -> tuple[int, ...]:
    """Return exactly `length` tokens of prose, repeated if it is too short."""
    options = SamplingOptions(temperature=0.0, max_tokens=1)
    # In pieces, since the whole text may exceed the engine's limit.
    size = max(4, min(_WORDS_AT_ONCE, length // 2))
    out: list[int] = []
    for begin in itertools.cycle(range(0, len(words), size)):
        out += _resolved(engine, words[begin : begin + size], options).token_ids
        if len(out) >= length:
            return tuple(out[:length])
    raise RequestError("the prompt has no words")


@dataclass(frozen=True, slots=True)
class _Bench:
    """The engine, and the requests of every composition."""

    engine: Engine
    questions: list[GenerationRequest]
    fillers: list[GenerationRequest]
    labels: tuple[str, ...]

    def rows(
        self, plan: TestPlan, say: Callable[[str], None], stop_early: bool
    ) -> tuple[CompositionRow, ...]:
        """Run every composition and compare it with the completions alone."""
        first = []
        for composition in plan.first:
            say(composition.name)
            first.append((composition, *self.run(composition)))
        say("every completion alone")
        alone, _ = self.run(Composition("alone", plan.alone))
        rows = [self.row(*item, alone) for item in first]
        for composition in plan.compositions:
            if stop_early and not all(row.held for row in rows):
                break
            say(composition.name)
            rows.append(self.row(composition, *self.run(composition), alone))
        return tuple(rows)

    def shown(self, plan: TestPlan, room: Room) -> Reach:
        """Return the longest completion compared, and the most that shared a call."""
        calls = [call for item in (*plan.first, *plan.compositions) for call in item.calls]
        most = max((sum(len(ask.completions) for ask in call) for call in calls), default=0)
        compared = {ask.question for call in calls for ask in call if not ask.filler}
        requests = [self.questions[i] for i in compared]
        lengths = [item.prompt_length + item.sampling.max_tokens for item in requests]
        return Reach(max(lengths, default=0), min(most, room.sequences))

    def run(self, composition: Composition) -> tuple[_Results, RunStats]:
        """Make the calls of a composition; return the last result of each completion."""
        found: _Results = {}
        stats: list[RunStats] = []
        for call in composition.calls:
            result = self.engine.generate([self._asked(ask) for ask in call])
            stats.append(result.stats)
            for generation in result.generations:
                ask = call[generation.prompt_index]
                if not ask.filler:
                    which = ask.completions[generation.completion_index]
                    found[ask.question, which] = generation
        return found, RunStats(
            cached_tokens=sum(item.cached_tokens for item in stats),
            preemptions=sum(item.preemptions for item in stats),
        )

    def _asked(self, ask: Ask) -> GenerationRequest:
        request = (self.fillers if ask.filler else self.questions)[ask.question]
        return replace(request, seeds=tuple(request.seeds[i] for i in ask.completions))

    def row(
        self, composition: Composition, found: _Results, stats: RunStats, alone: _Results
    ) -> CompositionRow:
        """Compare a composition's results with the completions alone."""
        pairs = [
            (key, compare_generations(self.questions[key[0]], alone[key], found[key]))
            for key in sorted(found)
        ]
        if not pairs:
            raise RequestError(f"the composition {composition.name!r} compares nothing")
        reached = not composition.needs or getattr(stats, composition.needs) > 0
        different = [item for item in pairs if not _bitwise(item[1])]
        return CompositionRow(
            composition.name,
            len(pairs),
            sum(pair.tokens_equal for _, pair in pairs),
            len(pairs) - len(different),
            self._difference(*different[0]) if different else "",
            reached,
        )

    def _difference(self, key: _Key, pair: PairComparison) -> str:
        which = f" {key[1] + 1}" if len(self.questions[key[0]].seeds) > 1 else ""
        return _difference(f"{self.labels[key[0]]}{which}", pair)


def _bitwise(pair: PairComparison) -> bool:
    if not pair.tokens_equal or not pair.text_equal:
        return False
    if pair.evidence is EvidenceState.ABSENT:
        return pair.reference.evidence is None and pair.actual.evidence is None
    return pair.evidence is EvidenceState.BITWISE


def _difference(where: str, pair: PairComparison) -> str:
    """Return where two completions diverge, and by what margin."""
    found = pair.divergence
    if found is not None:
        text = f"{where}: different token at {found.position}"
        if found.margin is not None:
            text += f", margin {found.margin:.4g} ({MarginClass.of(found.margin)})"
        return text
    if pair.gap is not None and pair.evidence is EvidenceState.DIFFERS:
        return f"{where}: logprob off by {pair.gap:.3g} at token {pair.gap_position}"
    if not pair.finish_equal:
        return f"{where}: it ended differently"
    return f"{where}: text or evidence differ"
