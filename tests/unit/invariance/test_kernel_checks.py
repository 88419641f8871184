"""The self-test's kernel-level part: what it finds, how far it goes in the time it has."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_detllm.errors import InvarianceError
from jupyter_detllm.invariance import cpu, kernel_checks
from jupyter_detllm.invariance.base import KernelRow
from jupyter_detllm.invariance.cpu import FixedTiles
from jupyter_detllm.invariance.kernel_checks import Rows, check_attention, check_linear

torch = pytest.importorskip("torch", reason="torch is not installed")

NEVER = float("inf")
PAST = float("-inf")


def product(rows: Any) -> Any:
    """Return rows that do not see each other."""
    return rows[:, :5] * 2


def linear(call: Callable[[Any], Any], *, most: int = 300, until: float = NEVER) -> Any:
    return check_linear(call, "linear", 8, torch.float32, most=most, until=until)


def test_a_product_whose_rows_do_not_see_each_other_holds() -> None:
    row, reached = linear(product)
    assert row == KernelRow("linear", row.compared, row.compared)
    assert row.compared > 300
    assert reached == 300


@pytest.mark.parametrize(
    ("broken", "first"),
    [
        (lambda out: out + (len(out) > 200), "row 0 of 201: different bits than alone"),
        (lambda out: out + (len(out) == 300), "row 0 of 300: different bits than alone"),
        (lambda out: torch.cat([out[:-1], out[-1:] + len(out) % 2]), "row 2 of 3: "),
    ],
)
def test_a_product_that_follows_its_rows_is_found(broken: Any, first: str) -> None:
    def call(rows: Any) -> Any:
        return broken(product(rows)) if len(rows) > 1 else product(rows)

    row, _ = linear(call)
    assert not row.held
    assert row.first.startswith(first)


def test_few_rows_are_tried_whatever_the_time() -> None:
    row, reached = linear(product, until=PAST)
    assert row.held
    assert reached == 65
    assert linear(product, most=3, until=PAST)[1] == 3


class Attention:
    """Attention whose output is a function of position and sequence, and of what is broken."""

    def __init__(self, broken: Callable[[Sequence[Rows]], bool] = lambda rows: False) -> None:
        self.broken = broken
        self.lengths: list[int] = []
        self.most = 0

    def __call__(self, lengths: Sequence[int]) -> Any:
        self.lengths.append(lengths[0])

        def attend(rows: Sequence[Rows]) -> list[Any]:
            self.most = max(self.most, len(rows))
            assert all(0 <= item.start < item.end <= lengths[item.sequence] for item in rows)
            off = int(self.broken(rows))
            return [
                torch.arange(item.start + off, item.end + off)[:, None, None].repeat(1, 2, 3)
                + 1000 * item.sequence
                for item in rows
            ]

        return attend


def attention(
    made: Attention, *, tokens: int = 1200, sequences: int = 16, until: float = NEVER
) -> Any:
    return check_attention(made, "attention", tokens=tokens, sequences=sequences, until=until)


def test_attention_that_sees_nobody_holds_up_to_the_longest() -> None:
    made = Attention()
    row, reached = attention(made)
    assert row.held
    assert row.compared > 2 * 1200
    assert reached == 1200
    assert made.lengths == [1, 9, 70, 333, 700, 1150, 1200]
    assert made.most == 16


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (lambda rows: len(rows) == 4, "batched"),
        (lambda rows: rows[0].start == 1199, "1200 tokens, after a cached prefix of 1199"),
        (lambda rows: len(rows) == 2 and rows[1].end > 1100, "chunked"),
        (lambda rows: len(rows) == 16, "decoded"),
    ],
)
def test_every_way_of_computing_a_prompt_is_compared(broken: Any, what: str) -> None:
    row, _ = attention(Attention(broken))
    assert not row.held
    assert what in row.first


@pytest.mark.parametrize("sequences", [1, 2, 3])
def test_an_engine_of_few_sequences_is_never_given_more(sequences: int) -> None:
    made = Attention()
    assert attention(made, tokens=100, sequences=sequences)[0].held
    assert made.most == sequences


def test_what_the_time_does_not_allow_lies_outside_the_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(kernel_checks, "time", SimpleNamespace(monotonic=lambda: clock.now))

    class Slow(Attention):
        def __call__(self, lengths: Sequence[int]) -> Any:
            clock.now += (lengths[0] / 1000) ** 2
            return super().__call__(lengths)

    assert attention(Slow(), tokens=8192, until=20.0)[1] == 2500
    clock.now = 0.0
    assert attention(Slow(), tokens=8192, until=0.5)[1] == 1150
    clock.now = 0.0
    assert attention(Slow(), tokens=8192, until=1000.0)[1] == 8192


# --- the CPU method's share ----------------------------------------------------------


def checked(monkeypatch: pytest.MonkeyPatch, attentions: Any, linears: Any) -> Any:
    monkeypatch.setattr(cpu, "ask_ranks", lambda llm, question: [attentions])
    llm = SimpleNamespace(apply_model=lambda question: [linears])
    return FixedTiles().check_kernels(
        llm, tokens=8192, sequences=256, step_tokens=8192, seconds=20.0
    )


def test_the_reach_is_the_least_of_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    full, window = KernelRow("full", 5, 5), KernelRow("window", 5, 5)
    found = checked(
        monkeypatch, [(full, 8192), (window, 1150)], [(KernelRow("linear", 9, 9), 8192)]
    )
    assert found.held
    assert (found.reach.tokens, found.reach.sequences) == (1150, 256)
    assert [row.name for row in found.rows] == ["full", "window", "linear"]
    found = checked(monkeypatch, [(full, 8192)], [(KernelRow("linear", 9, 8), 65)])
    assert not found.held
    assert found.reach.sequences == 65


@pytest.mark.parametrize(
    ("attentions", "linears"),
    [
        ([], [(KernelRow("linear", 9, 9), 70)]),
        ([(KernelRow("full", 5, 5), 70)], []),
        ([(KernelRow("full", 0, 0), 0)], [(KernelRow("linear", 9, 9), 70)]),
    ],
)
def test_a_part_that_compared_nothing_is_no_pass(
    monkeypatch: pytest.MonkeyPatch, attentions: Any, linears: Any
) -> None:
    with pytest.raises(InvarianceError, match="nothing was compared"):
        checked(monkeypatch, attentions, linears)


def test_every_distinct_shape_is_called_as_it_is_wrapped_now() -> None:
    seen: list[int] = []

    def own(x: Any, weight: Any, bias: Any) -> Any:
        seen.append(len(x))
        return x[:, :4] * 3

    def layer(width: int, **more: Any) -> Any:
        sizes = {"input_size_per_partition": width, "output_size_per_partition": 4}
        return SimpleNamespace(cpu_linear=own, weight=None, input_size=width, **sizes, **more)

    # As in vLLM, it has the attributes of a linear layer as well.
    logits = layer(5, embedding_dim=5, num_embeddings=4, num_embeddings_per_partition=4)
    modules = {
        "a": layer(8),
        "b": layer(8),
        "c": layer(6),
        "head": logits,
        "bias": layer(8, bias=1),
    }
    model = SimpleNamespace(
        named_modules=lambda: modules.items(),
        parameters=lambda: iter([torch.zeros(1, dtype=torch.float32)]),
    )
    found = cpu._check_rows(model, most=200, logits=70, until=time.monotonic() + 60)
    assert [(row.name, reached) for row, reached in found] == [
        ("linear 8 -> 4", 200),
        ("linear 6 -> 4", 200),
        ("linear 5 -> 4", 70),
        ("linear 8 -> 4, bias", 200),
    ]
    assert max(seen) == 200
