"""The self-test: kernels, then whole completions, alone and batched, compared bit by bit.

No level `invariant` is believed without it, whatever method is in force.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

from jupyter_detllm.core.canonical import Json
from jupyter_detllm.core.compare import EvidenceState, PairComparison, compare_generations
from jupyter_detllm.core.evidence import MarginClass
from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.generation import (
    Generation,
    GenerationRequest,
    Prompt,
    PromptKind,
    ResolvedPrompt,
    build_requests,
)
from jupyter_detllm.core.levels import ONE_AT_A_TIME, Reach
from jupyter_detllm.engines.base import Engine, KernelChecked, RunStats, SamplingOptions
from jupyter_detllm.errors import InvarianceError, RequestError
from jupyter_detllm.invariance.base import KernelCheck, KernelRow
from jupyter_detllm.invariance.plan import Ask, Composition, Form, Question, Room, TestPlan

__all__ = ["Row", "SelfTest", "check_kernels", "room_of", "run_test"]

_FEWEST_WORDS = 8
_WORDS_AT_ONCE = 256
_NOTHING = "nothing was compared"
_Key = tuple[int, int]
_Results = dict[_Key, Generation]


@dataclass(frozen=True, slots=True)
class Row:
    """What one composition showed.

    Attributes
    ----------
    composition
        Its name.
    completions
        How many were compared.
    tokens_equal, bitwise
        How many had equal tokens; how many equal tokens and logprobs.
    first
        The first difference, in words; "" without one.
    reached
        Whether what the composition is about happened.
    """

    composition: str
    completions: int
    tokens_equal: int
    bitwise: int
    first: str = ""
    reached: bool = True

    @property
    def held(self) -> bool:
        """Whether there was a completion, and every one was equal bit by bit."""
        return 0 < self.completions == self.bitwise

    def to_json(self) -> dict[str, Json]:
        """Return the stored form."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The result of one self-test.

    Attributes
    ----------
    method
        The method in force; "off" where none was.
    form
        How much was tried.
    rows
        One per composition.
    evidence
        Whether logprobs were compared; without them only tokens and texts were.
    cached
        Whether it is remembered from an earlier engine of the same fingerprint.
    kernels
        One per kernel and shape; none where the method has no kernel-level part.
    reach
        How far the level was shown to hold; None where it does not.
    """

    method: str
    form: Form
    rows: tuple[Row, ...]
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

    def summary(self) -> str:
        """Return one line, the same whether it is remembered or not."""
        reach = f"; reaches {self.reach}" if self.reach is not None else ""
        total = sum(row.completions for row in self.rows)
        equal = sum(row.bitwise for row in self.rows)
        what = "bitwise equal" if self.evidence else "equal in tokens (no logprobs to compare)"
        return (
            f"{self.form} self-test: {equal} of {total} completions {what} "
            f"in {len(self.rows)} compositions{reach}"
        )

    def __str__(self) -> str:
        """Return the line that stamps hold."""
        return self.summary()

    def to_json(self) -> dict[str, Json]:
        """Return the stored form; whether it is remembered is not part of it."""
        return {
            "method": self.method,
            "form": self.form.value,
            "evidence": self.evidence,
            "held": self.held,
            "reach": None if self.reach is None else asdict(self.reach),
            "kernels": [asdict(row) for row in self.kernels],
            "rows": [row.to_json() for row in self.rows],
        }


def room_of(fields: Mapping[str, FieldValue], *, fast_prefill: bool = False) -> Room:
    """Return what an engine has room for, from its `engine.*` fields."""

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
    """Return what the engine's kernels show by themselves, for all that it has room for.

    Kernels that cannot be called are a failure, with the reason in the row.

    Parameters
    ----------
    engine
        A live engine.
    room
        What it has room for.
    seconds
        How long it may take.

    Returns
    -------
    KernelCheck or None
        None for an engine or a method without a kernel-level part.
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
    """Run a plan on a live engine; its generations are kept nowhere.

    Parameters
    ----------
    engine
        Its kernels are checked first, where it offers that and the form has time for it;
        after that nothing but `resolve` and `generate` of it is used.
    plan
        What to try.
    method
        Name of the method in force.
    room
        What the engine has room for; read from its fields by default.
    progress
        Called with one line per composition.
    stop_early
        Leave the rest out after the first kernel or composition that does not hold.
    kernel_seconds
        How long the kernel-level part may take, as the form has it by default; 0 leaves
        it out.

    Raises
    ------
    RequestError
        When a prompt of the plan does not fit the engine.
    EngineError
        When the engine fails.
    """
    room = room or room_of(engine.fields())
    say = progress or _silent
    kernels: KernelCheck | None = None
    seconds = plan.form.seconds if kernel_seconds is None else kernel_seconds
    if seconds and method != "off" and isinstance(engine, KernelChecked):
        say(f"self-test ({method}): kernels")
        kernels = check_kernels(engine, room, seconds)
    rows: tuple[Row, ...] = ()
    shown = Reach(0, 0)
    if kernels is None or kernels.held or not stop_early:
        bench = _bench(engine, plan)
        rows = bench.rows(plan, lambda name: say(f"self-test ({method}): {name}"), stop_early)
        shown = bench.shown(plan, room)
    test = SelfTest(method, plan.form, rows, engine.capabilities.evidence)
    if kernels is not None:
        # A part without a row is a part that showed nothing.
        test = replace(test, kernels=kernels.rows or (KernelRow("kernels", 0, 0),))
    if not test.held:
        return test
    return replace(test, reach=_reach(method, room, kernels, shown))


def _silent(text: str) -> None:
    """Report to nobody."""


def _reach(method: str, room: Room, kernels: KernelCheck | None, shown: Reach) -> Reach:
    """Return how far a test that held reaches; `shown` is what whole completions showed."""
    if method == ONE_AT_A_TIME:
        # No sequence ever shares a step, so any number of them is as good as one.
        return Reach(room.max_model_len, 1)
    if kernels is None:
        return shown
    found = kernels.reach
    wider = shown.tokens >= found.tokens and shown.sequences >= found.sequences
    return shown if wider else found


def _bench(engine: Engine, plan: TestPlan) -> _Bench:
    questions = [_request(engine, item, i) for i, item in enumerate(plan.questions)]
    fillers = [_request(engine, item, 1000 + i) for i, item in enumerate(plan.fillers)]
    return _Bench(engine, questions, fillers, tuple(item.label for item in plan.questions))


def _request(engine: Engine, question: Question, seed: int) -> GenerationRequest:
    options = SamplingOptions(
        temperature=question.temperature,
        max_tokens=question.max_tokens,
        ignore_eos=True,
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
            # A tokenizer that makes more of a word than others do.
            if len(words) < _FEWEST_WORDS:
                raise
            words = words[len(words) // 2 :]


def _token_ids(engine: Engine, words: list[str], length: int) -> tuple[int, ...]:
    """Return exactly `length` tokens of prose, from the beginning again where it is short."""
    options = SamplingOptions(temperature=0.0, max_tokens=1)
    # In pieces: the whole text may have more tokens than the engine has room for.
    size = max(4, min(_WORDS_AT_ONCE, length // 2))
    out: list[int] = []
    for begin in itertools.cycle(range(0, len(words), size)):
        out += _resolved(engine, words[begin : begin + size], options).token_ids
        if len(out) >= length:
            return tuple(out[:length])
    raise RequestError("the prompt has no words")


@dataclass(frozen=True, slots=True)
class _Bench:
    """The engine and the requests that every composition is made of."""

    engine: Engine
    questions: list[GenerationRequest]
    fillers: list[GenerationRequest]
    labels: tuple[str, ...]

    def rows(self, plan: TestPlan, say: Callable[[str], None], stop_early: bool) -> tuple[Row, ...]:
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
    ) -> Row:
        """Compare what came of a composition with the completions alone."""
        pairs = [
            (key, compare_generations(self.questions[key[0]], alone[key], found[key]))
            for key in sorted(found)
        ]
        if not pairs:
            raise RequestError(f"the composition {composition.name!r} compares nothing")
        reached = not composition.needs or getattr(stats, composition.needs) > 0
        different = [item for item in pairs if not _bitwise(item[1])]
        return Row(
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
    """Return where two completions part, and by how little."""
    found = pair.divergence
    if found is not None:
        text = f"{where}: other token at {found.position}"
        if found.margin is not None:
            text += f", margin {found.margin:.4g} ({MarginClass.of(found.margin)})"
        return text
    if pair.gap is not None and pair.evidence is EvidenceState.DIFFERS:
        return f"{where}: logprob off by {pair.gap:.3g} at token {pair.gap_position}"
    if not pair.finish_equal:
        return f"{where}: it ended in another way"
    return f"{where}: text or evidence differ"
