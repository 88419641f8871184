from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from jupyter_detllm.core.generation import (
    Message,
    Prompt,
    PromptKind,
    ResolvedPrompt,
    Sampling,
    build_requests,
)
from jupyter_detllm.engines import requests as vllm_sampling
from jupyter_detllm.engines.base import SamplingOptions
from jupyter_detllm.engines.requests import (
    check_requests,
    completions_of,
    eos_ids,
    fit_length,
    resolve_sampling,
)
from jupyter_detllm.engines.vllm.engine import prompt_tokens
from jupyter_detllm.errors import RequestError


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's judgement of values is its own; the real tests ask it."""

    def judge(sampling: Sampling, seed: int) -> None:
        if not math.isfinite(sampling.temperature) or sampling.temperature < 0:
            raise ValueError(f"temperature must be non-negative, got {sampling.temperature}.\nMore")

    monkeypatch.setattr(vllm_sampling, "to_vllm", judge)


def resolve(model=None, **options) -> Sampling:
    return resolve_sampling(
        SamplingOptions(**options), model or {}, eos=(2, 5), tokenizer_eos=2, max_logprobs=20
    )


def test_our_defaults_are_greedy() -> None:
    found = resolve()
    assert found == Sampling(stop_token_ids=(2, 5))
    assert found.greedy
    assert found.max_tokens == 128


def test_the_models_defaults_come_first_and_the_users_before_them() -> None:
    model = {"temperature": 0.6, "top_p": 0.9, "max_tokens": 7, "repetition_penalty": 1.1}
    found = resolve(model, top_p=0.5)
    assert (found.temperature, found.top_p, found.max_tokens) == (0.6, 0.5, 7)
    assert found.repetition_penalty == 1.1
    assert resolve(model, temperature=0.0).top_p == 1.0


def test_a_tiny_temperature_is_recorded_as_it_runs() -> None:
    assert resolve(temperature=0.001).temperature == 0.01
    assert resolve(temperature=0.01).temperature == 0.01


def test_one_candidate_is_greedy() -> None:
    found = resolve(temperature=0.8, top_k=1)
    assert found.greedy
    assert found.top_k == 0
    assert resolve(temperature=0.8, top_k=-1).top_k == 0


def test_ignoring_the_end_leaves_no_stop_tokens() -> None:
    assert resolve(ignore_eos=True).stop_token_ids == ()


def test_a_refusal_of_vllm_is_its_first_line() -> None:
    with pytest.raises(RequestError, match=r"non-negative, got -1\.0$"):
        resolve(temperature=-1.0)


def test_beam_search() -> None:
    found = resolve({"temperature": 0.6, "repetition_penalty": 1.3}, beam_width=4, max_tokens=9)
    assert found == Sampling(max_tokens=9, beam_width=4, stop_token_ids=(2,))


@pytest.mark.parametrize(
    "options",
    [
        {"beam_width": 0},
        {"beam_width": 11},
        {"beam_width": 2, "temperature": 0.5},
        {"beam_width": 2, "stop": ("x",)},
        {"beam_width": 2, "max_tokens": 0},
        {"length_penalty": 2.0},
    ],
)
def test_what_beam_search_cannot_do(options: dict) -> None:
    with pytest.raises(RequestError) as error:
        resolve(**options)
    assert "\n" not in str(error.value)


def test_a_default_length_shrinks_and_an_asked_one_is_refused() -> None:
    sampling = Sampling(max_tokens=128, min_tokens=100)
    assert fit_length(sampling, 10, 1000, asked=None) == sampling
    fitted = fit_length(sampling, 60, 100, asked=None)
    assert (fitted.max_tokens, fitted.min_tokens) == (40, 40)
    with pytest.raises(RequestError, match="--max-tokens 40"):
        fit_length(sampling, 60, 100, asked=128)
    with pytest.raises(RequestError, match="--max-model-len 228"):
        fit_length(sampling, 100, 100, asked=None)


def test_end_of_sequence_ids() -> None:
    assert eos_ids(2, {"eos_token_id": [7, 2]}) == (2, 7)
    assert eos_ids(None, {"eos_token_id": 3}) == (3,)
    assert eos_ids(None, {}) == ()


class Tokenizer:
    chat_template = "template"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return ([0] if add_special_tokens else []) + [ord(c) for c in text]

    def apply_chat_template(self, messages, *, chat_template, tokenize, add_generation_prompt):
        if any(m["role"] == "system" for m in messages):
            raise ValueError("System role\nnot supported")
        return "".join(m["content"] for m in messages) + "!"


def tokens(prompt: Prompt, tokenizer: object | None = None) -> tuple[int, ...]:
    return prompt_tokens(prompt, tokenizer or Tokenizer(), vocabulary=200)


def test_three_kinds_of_prompts() -> None:
    assert tokens(Prompt.chat("a")) == (97, 33)
    assert tokens(Prompt(PromptKind.TEXT, text="a")) == (0, 97)
    assert tokens(Prompt(PromptKind.TOKENS, token_ids=(5, 199))) == (5, 199)


@pytest.mark.parametrize(
    "prompt",
    [
        Prompt(PromptKind.CHAT),
        Prompt.chat("  "),
        Prompt(PromptKind.TEXT),
        Prompt(PromptKind.TOKENS),
    ],
)
def test_an_empty_prompt_is_refused(prompt: Prompt) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        tokens(prompt)


@pytest.mark.parametrize("wrong", [-1, 200])
def test_ids_outside_the_vocabulary_are_refused(wrong: int) -> None:
    with pytest.raises(RequestError, match=f"token id {wrong}"):
        tokens(Prompt(PromptKind.TOKENS, token_ids=(1, wrong)))


def test_a_template_that_refuses_a_role_gives_one_line() -> None:
    with pytest.raises(RequestError, match="System role not supported") as error:
        tokens(Prompt.chat("a", system="b"))
    assert "\n" not in str(error.value)
    assert "--system" in str(error.value)


def test_a_model_without_template_says_how_to_go_on() -> None:
    with pytest.raises(RequestError, match="--text"):
        tokens(Prompt.chat("a"), SimpleNamespace(chat_template=None))


def test_messages_keep_their_order() -> None:
    messages = (Message("user", "a"), Message("assistant", "b"), Message("user", "c"))
    assert tokens(Prompt(PromptKind.CHAT, messages)) == (97, 98, 99, 33)


def requests(sampling: Sampling, n: int = 1, length: int = 3):
    prompt = Prompt(PromptKind.TOKENS, token_ids=tuple(range(length)))
    return build_requests([ResolvedPrompt(prompt, prompt.token_ids, sampling)], root_seed=1, n=n)


def test_every_completion_is_a_job_with_its_own_seed() -> None:
    both = (*requests(Sampling(temperature=1.0), n=2), *requests(Sampling()))
    jobs = completions_of(both)
    assert [(j.prompt_index, j.completion_index) for j in jobs] == [(0, 0), (0, 1), (1, 0)]
    assert [j.seed for j in jobs] == [*both[0].seeds, *both[1].seeds]


def test_requests_are_checked_before_any_runs() -> None:
    check_requests(requests(Sampling(max_tokens=7)), 10)
    with pytest.raises(RequestError, match="do not fit"):
        check_requests(requests(Sampling(max_tokens=8)), 10)
    with pytest.raises(RequestError, match="2 beams"):
        check_requests(requests(Sampling(beam_width=2), n=3), 1000)
    with pytest.raises(RequestError, match="no prompt tokens"):
        check_requests(requests(Sampling(), length=0), 1000)
