from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_detllm.core.generation import (
    MAX_SEED,
    Generation,
    GenerationRequest,
    Message,
    Prompt,
    PromptKind,
    ResolvedPrompt,
    Sampling,
    build_requests,
    derive_seed,
    generation_digest,
    occurrences,
    prompt_digest,
)
from jupyter_detllm.errors import RequestError

SAMPLED = Sampling(temperature=0.8)
token_lists = st.lists(st.integers(0, 50_000), min_size=1, max_size=5).map(tuple)


def resolved(*prompts: tuple[int, ...], sampling: Sampling = SAMPLED) -> list[ResolvedPrompt]:
    return [ResolvedPrompt(Prompt(PromptKind.TOKENS, token_ids=p), p, sampling) for p in prompts]


def seeds_of(requests: tuple[GenerationRequest, ...]) -> list[tuple[int, ...]]:
    return [request.seeds for request in requests]


def test_derived_seed_is_the_first_63_bits_of_the_hash() -> None:
    prompt = prompt_digest([1, 2, 3])
    data = f'["7","haiku","{prompt}",2,1]'.encode()
    first = int.from_bytes(hashlib.sha256(data).digest()[:8], "big")
    assert derive_seed(7, "haiku", prompt, 2, 1) == first >> 1


def test_prompt_digest_is_of_the_plain_list() -> None:
    assert prompt_digest([1, 2]).hex == hashlib.sha256(b"[1,2]").hexdigest()


@given(st.integers(0, MAX_SEED), st.text(max_size=5), token_lists)
def test_every_input_of_a_seed_changes_it(root: int, name: str, tokens: tuple[int, ...]) -> None:
    prompt = prompt_digest(tokens)
    try:
        name.encode()
    except UnicodeEncodeError:
        name = ""
    seeds = {
        derive_seed(root, name, prompt, 0, 0),
        derive_seed(root + 1, name, prompt, 0, 0),
        derive_seed(root, name + "x", prompt, 0, 0),
        derive_seed(root, name, prompt_digest([*tokens, 1]), 0, 0),
        derive_seed(root, name, prompt, 1, 0),
        derive_seed(root, name, prompt, 0, 1),
    }
    assert len(seeds) == 6
    assert all(0 <= seed <= MAX_SEED for seed in seeds)


@given(st.lists(token_lists, min_size=1, max_size=6), st.integers(0, 6), token_lists)
def test_an_inserted_prompt_does_not_move_its_neighbours(
    prompts: list[tuple[int, ...]], index: int, extra: tuple[int, ...]
) -> None:
    index = min(index, len(prompts))
    if extra in prompts:
        extra = (*extra, 50_001)
    before = seeds_of(build_requests(resolved(*prompts), root_seed=3))
    changed = [*prompts[:index], extra, *prompts[index:]]
    after = seeds_of(build_requests(resolved(*changed), root_seed=3))
    assert after[:index] + after[index + 1 :] == before


@given(st.lists(token_lists, min_size=1, max_size=6, unique=True), st.randoms())
def test_a_seed_depends_on_its_prompt_not_on_the_order(
    prompts: list[tuple[int, ...]], random: object
) -> None:
    shuffled = list(prompts)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    first = dict(
        zip(prompts, seeds_of(build_requests(resolved(*prompts), root_seed=1)), strict=True)
    )
    again = dict(
        zip(shuffled, seeds_of(build_requests(resolved(*shuffled), root_seed=1)), strict=True)
    )
    assert first == again


def test_three_equal_prompts_differ_and_repeat() -> None:
    def run() -> list[tuple[int, ...]]:
        return seeds_of(build_requests(resolved((5,), (5,), (5,)), root_seed=0))

    assert len(set(run())) == 3
    assert run() == run()


def test_earlier_calls_of_the_cell_count() -> None:
    together = seeds_of(build_requests(resolved((5,), (5,)), root_seed=0))
    digest = prompt_digest((5,))
    second = seeds_of(build_requests(resolved((5,)), root_seed=0, seen={digest: 1}))
    assert second == together[1:]


def test_completions_of_one_prompt_differ() -> None:
    (request,) = build_requests(resolved((5,)), root_seed=0, n=4)
    assert len(set(request.seeds)) == 4


def test_an_explicit_seed_counts_up_by_occurrence_and_completion() -> None:
    requests = build_requests(resolved((5,), (6,), (5,)), root_seed=9, n=2, seed=100)
    assert seeds_of(requests) == [(100, 101), (100, 101), (102, 103)]


@pytest.mark.parametrize("seed", [-1, MAX_SEED])
def test_an_explicit_seed_stays_in_range(seed: int) -> None:
    with pytest.raises(RequestError, match="out of range"):
        build_requests(resolved((5,)), root_seed=0, n=2, seed=seed)


@pytest.mark.parametrize("n", [0, -1, 1025, 10**11])
def test_n_is_bounded_before_anything_is_made(n: int) -> None:
    with pytest.raises(RequestError, match="expected 1 to 1024"):
        build_requests(resolved((5,)), root_seed=0, n=n)


def test_greedy_with_several_completions_is_refused_in_one_line() -> None:
    with pytest.raises(RequestError, match="3 equal completions") as caught:
        build_requests(resolved((5,), sampling=Sampling()), root_seed=0, n=3)
    assert "\n" not in str(caught.value)


def test_beams_may_have_several_completions() -> None:
    beam = Sampling(beam_width=4)
    (request,) = build_requests(resolved((5,), sampling=beam), root_seed=0, n=3)
    assert len(request.seeds) == 3


def test_occurrences_count_what_precedes() -> None:
    a, b = prompt_digest([1]), prompt_digest([2])
    assert occurrences([a, b, a, a]) == [0, 0, 1, 2]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0, top_p=0.9, top_k=40, min_p=0.1),
        Sampling(temperature=0.0),
    ],
)
def test_greedy_has_one_spelling(sampling: Sampling) -> None:
    assert sampling.normalised() == Sampling()
    assert sampling.greedy


def test_beam_search_samples_nothing_and_top_k_off_is_zero() -> None:
    beam = Sampling(temperature=0.7, top_p=0.5, beam_width=2)
    assert beam.normalised() == Sampling(beam_width=2)
    assert not beam.greedy
    assert Sampling(temperature=1.0, top_k=-1).normalised().top_k == 0


def test_floats_of_parameters_are_strings_whatever_they_were_given_as() -> None:
    assert Sampling(temperature=1).to_json() == Sampling(temperature=1.0).to_json()
    assert Sampling(temperature=1.0).to_json()["temperature"] == "1.0"
    assert Sampling().to_json()["max_tokens"] == 128


def test_request_digest_covers_prompt_parameters_and_seeds_only() -> None:
    (base,) = build_requests(resolved((5, 6)), root_seed=0)
    (same,) = build_requests(
        [ResolvedPrompt(Prompt.chat("other words"), (5, 6), SAMPLED)], root_seed=0
    )
    others = [
        build_requests(resolved((5, 7)), root_seed=0)[0],
        build_requests(resolved((5, 6)), root_seed=1)[0],
        build_requests(resolved((5, 6), sampling=Sampling(temperature=0.9)), root_seed=0)[0],
        build_requests(resolved((5, 6)), root_seed=0, n=2)[0],
    ]
    assert base.digest == same.digest
    assert len({base.digest, *(other.digest for other in others)}) == 5


def test_prompts_in_their_stored_form() -> None:
    chat = Prompt.chat("Hi", "Be brief.")
    assert chat.messages == (Message("system", "Be brief."), Message("user", "Hi"))
    assert chat.to_json() == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        ]
    }
    assert Prompt.chat("Hi", "").messages[0] == Message("system", "")
    assert Prompt(PromptKind.TEXT, text="Once").to_json() == {"prompt": "Once"}
    assert Prompt(PromptKind.TOKENS, token_ids=(1, 2)).to_json() == {"prompt_token_ids": [1, 2]}


def generation(text: str, offsets: tuple[int, ...], finish: str = "stop") -> Generation:
    return Generation(0, 0, tuple(range(len(offsets))), finish, text, offsets)


def test_generation_digest_is_of_tokens_and_finish_reasons() -> None:
    one = generation("ab", (0, 1))
    assert generation_digest([one]) == generation_digest([generation("xy", (0, 0))])
    assert generation_digest([one]) != generation_digest([generation("ab", (0, 1), "length")])
    assert generation_digest([one]) != generation_digest([generation("ab", (0,))])
    assert generation_digest([one]) != generation_digest([one, one])


def test_token_bytes_cut_characters_where_tokens_do() -> None:
    emoji = generation("a🌊b", (0, 1, 2, 3, 4, 5))
    parts = [emoji.token_bytes(i) for i in range(6)]
    assert parts == [b"a", b"\xf0", b"\x9f", b"\x8c", b"\x8a", b"b"]
    assert generation("ab", (0, 9)).token_bytes(0) == b"ab"
    assert generation("ab", (0, 9)).token_bytes(1) == b""
