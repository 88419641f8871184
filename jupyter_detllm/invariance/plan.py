"""What a self-test asks and in which compositions. Pure.

Every completion is first generated alone; each composition then has the same completions
in other company, and must give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "PLAN_VERSION",
    "Ask",
    "Composition",
    "Form",
    "Question",
    "Room",
    "TestPlan",
    "plan_preemption",
    "plan_test",
    "preemption_options",
]

PLAN_VERSION = 1
"""Part of the cache's key: a plan that asks for more is not answered by an older pass."""

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


class Form(StrEnum):
    """How much is tried.

    ``spot`` stands beside a remembered pass, ``short`` at the start of an engine,
    ``long`` where a user asks for it.
    """

    SPOT = "spot"
    SHORT = "short"
    LONG = "long"


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt of the test, with how its completions are made.

    `temperature` 0 is greedy; ends of text are ignored, so that every completion has
    `max_tokens` tokens.
    """

    label: str
    text: str
    max_tokens: int
    temperature: float = 0.0
    n: int = 1


@dataclass(frozen=True, slots=True)
class Ask:
    """A question in a call and which of its completions; fillers are not compared."""

    question: int
    completions: tuple[int, ...]
    filler: bool = False


@dataclass(frozen=True, slots=True)
class Composition:
    """Calls made one after the other; the last of each completion's results counts.

    `needs` names a statistic of the run that must be above 0 for the composition to have
    been reached: ``preemptions`` or ``cached_tokens``.
    """

    name: str
    calls: tuple[tuple[Ask, ...], ...]
    needs: str = ""


@dataclass(frozen=True, slots=True)
class TestPlan:
    """Questions, fillers, and the compositions after the completions alone."""

    __test__ = False  # not a test of pytest's

    form: Form
    questions: tuple[Question, ...]
    fillers: tuple[Question, ...]
    compositions: tuple[Composition, ...]

    @property
    def alone(self) -> tuple[tuple[Ask, ...], ...]:
        """Every completion in a call of its own: what all else is compared with."""
        return tuple(
            (Ask(i, (j,)),) for i, item in enumerate(self.questions) for j in range(item.n)
        )


@dataclass(frozen=True, slots=True)
class Room:
    """What an engine has room for.

    Attributes
    ----------
    max_model_len, step_tokens
        Longest sequence, and most tokens in one step.
    fast_prefill
        Whether thousands of prompt tokens take no time worth naming.
    prefix_cache
        Whether a cached prefix is used.
    """

    max_model_len: int = 4096
    step_tokens: int = 4096
    fast_prefill: bool = False
    prefix_cache: bool = False

    def words(self, wanted: int) -> int:
        """Return as many of `wanted` words as may fit: which do, the tokenizer tells."""
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
        # The short and the sampled one: few rows and many, alone and together.
        questions = _questions(room, tokens=4)[::2]
        calls = (_together(questions),)
        return TestPlan(form, questions, (), (Composition("together", calls),))
    tokens = 8 if form is Form.SHORT else 32
    questions = _questions(room, tokens)
    if form is Form.LONG:
        questions += _more_questions(room, tokens)
    fillers = _fillers(room, form, tokens)
    return TestPlan(form, questions, fillers, _compositions(form, questions, fillers, room))


def _questions(room: Room, tokens: int) -> tuple[Question, ...]:
    """Return prompts short and long, greedy and sampled; two share a long prefix.

    About 250 tokens and more are needed to see attention split its range.
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


def _fillers(room: Room, form: Form, tokens: int) -> tuple[Question, ...]:
    """Return other neighbours, the last of them long prefills.

    Where prefill is fast, or in the long form, there are so many of these that they do
    not fit into one step, and so some are computed beside tokens that are decoded.
    """
    short = [
        Question(f"neighbour {i}", _text(6 + 7 * i, i), tokens + i, 0.9 if i % 2 else 0.0)
        for i in range(4 if form is Form.SHORT else 12)
    ]
    words = room.words(1400)
    several = room.fast_prefill or form is Form.LONG
    count = min(16, 2 + room.step_tokens // max(words, 1)) if several else 1
    if not several:
        words = room.words(600)
    long = [Question(f"long prefill {i}", _text(words, i), 2) for i in range(count)]
    return (*short, *long)


def _together(questions: tuple[Question, ...]) -> tuple[Ask, ...]:
    return tuple(Ask(i, tuple(range(item.n))) for i, item in enumerate(questions))


def _compositions(
    form: Form, questions: tuple[Question, ...], fillers: tuple[Question, ...], room: Room
) -> tuple[Composition, ...]:
    every = _together(questions)
    neighbours = tuple(
        Ask(i, (0,), filler=True)
        for i, item in enumerate(fillers)
        if not item.label.startswith("long prefill")
    )
    long = tuple(
        Ask(i, (0,), filler=True)
        for i, item in enumerate(fillers)
        if item.label.startswith("long prefill")
    )
    apart = tuple(Ask(ask.question, (c,)) for ask in every for c in ask.completions)
    out = [
        Composition("together", (every,)),
        Composition("completions apart, other order", (apart[::-1],)),
        Composition("beside a long prefill", ((*neighbours, *every, *long),)),
    ]
    if form is Form.LONG:
        pairs = tuple(every[i : i + 2] for i in range(0, len(every), 2))
        out += [
            Composition("in twos", pairs),
            Composition("other order", (every[::-1],)),
            Composition("other neighbours", (_mixed(neighbours[::-1], every),)),
            Composition("long prefill first", ((*long, *every),)),
            Composition("repeated", (every, every)),
            Composition("alone again", tuple((ask,) for ask in apart[::-1])),
        ]
    if room.prefix_cache:
        out.append(Composition("after cache warm-up", (every, every), needs="cached_tokens"))
    return tuple(out)


def _mixed(left: tuple[Ask, ...], right: tuple[Ask, ...]) -> tuple[Ask, ...]:
    out: list[Ask] = []
    for i in range(max(len(left), len(right))):
        out += [*left[i : i + 1], *right[i : i + 1]]
    return tuple(out)


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
