"""The self-test: the same completions alone and in company, compared bit by bit.

No level `invariant` is believed without it, whatever method is in force.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from jupyter_detllm.core.canonical import Json
from jupyter_detllm.core.compare import EvidenceState, PairComparison, compare_generations
from jupyter_detllm.core.evidence import MarginClass
from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.generation import (
    Generation,
    GenerationRequest,
    Prompt,
    PromptKind,
    build_requests,
)
from jupyter_detllm.engines.base import Engine, RunStats, SamplingOptions
from jupyter_detllm.errors import RequestError
from jupyter_detllm.invariance.plan import Ask, Composition, Form, Question, Room, TestPlan

__all__ = ["Row", "SelfTest", "room_of", "run_test"]

_FEWEST_WORDS = 8
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
        """Whether every completion was equal bit by bit."""
        return self.bitwise == self.completions

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
    """

    method: str
    form: Form
    rows: tuple[Row, ...]
    evidence: bool = True
    cached: bool = False

    @property
    def held(self) -> bool:
        """Whether every composition held, and there was one."""
        return bool(self.rows) and all(row.held for row in self.rows)

    @property
    def first(self) -> str:
        """The first difference, with its composition; "" without one."""
        return next((f"{row.composition}: {row.first}" for row in self.rows if not row.held), "")

    def summary(self) -> str:
        """Return one line, the same whether it is remembered or not."""
        total = sum(row.completions for row in self.rows)
        equal = sum(row.bitwise for row in self.rows)
        what = "bitwise equal" if self.evidence else "equal in tokens (no logprobs to compare)"
        return (
            f"{self.form} self-test: {equal} of {total} completions {what} "
            f"in {len(self.rows)} compositions"
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
        fast_prefill=fast_prefill,
        prefix_cache=fields.get("engine.prefix_cache") is True,
    )


def run_test(
    engine: Engine,
    plan: TestPlan,
    *,
    method: str,
    progress: Callable[[str], None] | None = None,
    stop_early: bool = False,
) -> SelfTest:
    """Run a plan on a live engine; its generations are kept nowhere.

    Parameters
    ----------
    engine
        Nothing but `resolve` and `generate` of it is used.
    plan
        What to try.
    method
        Name of the method in force.
    progress
        Called with one line per composition.
    stop_early
        Leave the rest out after the first composition that does not hold.

    Raises
    ------
    RequestError
        When a prompt of the plan does not fit the engine.
    EngineError
        When the engine fails.
    """
    questions = [_request(engine, item, i) for i, item in enumerate(plan.questions)]
    fillers = [_request(engine, item, 1000 + i) for i, item in enumerate(plan.fillers)]
    bench = _Bench(engine, questions, fillers, tuple(item.label for item in plan.questions))
    if progress is not None:
        progress(f"self-test ({method}): every completion alone")
    alone, _ = bench.run(Composition("alone", plan.alone))
    rows: list[Row] = []
    for composition in plan.compositions:
        if progress is not None:
            progress(f"self-test ({method}): {composition.name}")
        rows.append(bench.row(composition, alone))
        if stop_early and not rows[-1].held:
            break
    return SelfTest(method, plan.form, tuple(rows), engine.capabilities.evidence)


def _request(engine: Engine, question: Question, seed: int) -> GenerationRequest:
    options = SamplingOptions(
        temperature=question.temperature,
        max_tokens=question.max_tokens,
        ignore_eos=True,
    )
    words = question.text.split()
    while True:
        try:
            prompt = Prompt(PromptKind.TEXT, text=" ".join(words))
            resolved = engine.resolve(prompt, options)
            break
        except RequestError:
            # A tokenizer that makes more of a word than others do.
            if len(words) < _FEWEST_WORDS:
                raise
            words = words[len(words) // 2 :]
    (request,) = build_requests([resolved], root_seed=seed, name="self-test", n=question.n)
    return request


@dataclass(frozen=True, slots=True)
class _Bench:
    """The engine and the requests that every composition is made of."""

    engine: Engine
    questions: list[GenerationRequest]
    fillers: list[GenerationRequest]
    labels: tuple[str, ...]

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

    def row(self, composition: Composition, alone: _Results) -> Row:
        """Run a composition and compare it with the completions alone."""
        found, stats = self.run(composition)
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
