"""What every engine must do. Each function takes a running engine and asserts one thing.

`CHECKS` lists them all, so that a test of an engine is one parametrised line; the last
one, `shutdown_twice`, is apart because it ends the engine.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from jupyter_detllm.core.fields import spec_of
from jupyter_detllm.core.generation import (
    Generation,
    GenerationRequest,
    Prompt,
    PromptKind,
    build_requests,
)
from jupyter_detllm.engines.base import Engine, Progress, SamplingOptions, Scorer
from jupyter_detllm.errors import DetLLMError, RequestError

__all__ = ["CHECKS", "ask", "run", "shutdown_twice", "unknown_option"]

QUESTIONS = ("Name three colours.", "What is a river?", "Count to ten.", "Why is the sky blue?")


def ask(
    engine: Engine,
    prompts: Sequence[str | Prompt],
    *,
    n: int = 1,
    seed: int | None = None,
    options: SamplingOptions | None = None,
) -> tuple[GenerationRequest, ...]:
    wanted = options or SamplingOptions(max_tokens=16)
    full = [Prompt.chat(p) if isinstance(p, str) else p for p in prompts]
    resolved = [engine.resolve(prompt, wanted) for prompt in full]
    return build_requests(resolved, root_seed=7, n=n, seed=seed)


def run(engine: Engine, requests: Sequence[GenerationRequest]) -> tuple[Generation, ...]:
    return engine.generate(requests).generations


def order_and_count(engine: Engine) -> None:
    sampled = SamplingOptions(max_tokens=8, temperature=0.9)
    result = engine.generate(ask(engine, QUESTIONS, n=2, options=sampled))
    places = [(g.prompt_index, g.completion_index) for g in result.generations]
    assert places == [(i, j) for i in range(len(QUESTIONS)) for j in range(2)]
    assert result.stats.tokens == sum(len(g.token_ids) for g in result.generations)
    assert all(0 < len(g.token_ids) <= 8 for g in result.generations)
    assert {g.finish_reason for g in result.generations} <= {"stop", "length"}


def nothing_asked_nothing_returned(engine: Engine) -> None:
    assert engine.generate(()).generations == ()


def equal_requests_give_equal_generations(engine: Engine) -> None:
    for options in (SamplingOptions(max_tokens=12), SamplingOptions(max_tokens=12, temperature=1)):
        requests = ask(engine, QUESTIONS[:2], options=options)
        assert run(engine, requests) == run(engine, requests)


def seeds_matter_when_sampling(engine: Engine) -> None:
    options = SamplingOptions(max_tokens=24, temperature=1.0)
    first, other = (
        run(engine, ask(engine, QUESTIONS[:1], n=3, seed=seed, options=options)) for seed in (1, 99)
    )
    assert len({g.token_ids for g in (*first, *other)}) > 3


def seeds_do_not_matter_when_greedy(engine: Engine) -> None:
    first, other = (run(engine, ask(engine, QUESTIONS[:1], seed=seed)) for seed in (1, 99))
    assert first == other


def evidence_fits_the_tokens(engine: Engine) -> None:
    for options in (SamplingOptions(max_tokens=12), SamplingOptions(max_tokens=12, temperature=1)):
        for generation in run(engine, ask(engine, QUESTIONS[:2], options=options)):
            found = generation.evidence
            if not engine.capabilities.evidence:
                assert found is None
                continue
            assert found is not None
            assert found.tokens == len(generation.token_ids) == len(found.chosen)
            assert all(value <= 0.0 for value in found.chosen)
            pairs = zip(found.runner_up_ids, generation.token_ids, strict=True)
            assert all(other != token for other, token in pairs)


def greedy_takes_the_best(engine: Engine) -> None:
    if not engine.capabilities.evidence:
        return
    for generation in run(engine, ask(engine, QUESTIONS[:2])):
        assert generation.evidence is not None
        pairs = zip(generation.evidence.chosen, generation.evidence.runner_up, strict=True)
        assert all(chosen >= other for chosen, other in pairs)


def offsets_cover_the_text(engine: Engine) -> None:
    for generation in run(engine, ask(engine, QUESTIONS)):
        data = generation.text.encode()
        assert len(generation.offsets) == len(generation.token_ids)
        assert list(generation.offsets) == sorted(generation.offsets)
        assert all(0 <= offset <= len(data) for offset in generation.offsets)
        pieces = [generation.token_bytes(i) for i in range(len(generation.token_ids))]
        assert b"".join(pieces) == data


def greedy_is_normalised(engine: Engine) -> None:
    prompt = Prompt.chat(QUESTIONS[0])
    plain = engine.resolve(prompt, SamplingOptions(temperature=0.0)).sampling
    filtered = engine.resolve(prompt, SamplingOptions(temperature=0.0, top_p=0.5, top_k=9)).sampling
    assert plain == filtered
    assert plain.greedy


def resolved_leaves_nothing_open(engine: Engine) -> None:
    resolved = engine.resolve(Prompt.chat(QUESTIONS[0]), SamplingOptions())
    assert resolved.token_ids
    assert resolved.sampling == resolved.sampling.normalised()
    assert resolved.sampling.max_tokens >= 1


def empty_prompts_are_one_line(engine: Engine) -> None:
    for prompt in (Prompt(PromptKind.TEXT), Prompt(PromptKind.TOKENS)):
        with pytest.raises(RequestError, match="empty") as error:
            engine.resolve(prompt, SamplingOptions())
        assert "\n" not in str(error.value)


def unknown_token_ids_are_one_line(engine: Engine) -> None:
    for wrong in (-1, 2**31):
        with pytest.raises(RequestError, match=str(wrong)) as error:
            engine.resolve(Prompt(PromptKind.TOKENS, token_ids=(1, wrong)), SamplingOptions())
        assert "\n" not in str(error.value)


def an_exception_leaves_the_engine_whole(engine: Engine) -> None:
    requests = ask(engine, QUESTIONS[:3], options=SamplingOptions(max_tokens=12))
    expected = run(engine, requests)
    longer = ask(engine, QUESTIONS, options=SamplingOptions(max_tokens=64, ignore_eos=True))
    for kind in (KeyboardInterrupt, RuntimeError):

        def fail(progress: Progress, kind: type[BaseException] = kind) -> None:
            raise kind

        with pytest.raises((kind, DetLLMError)):
            engine.generate(longer, progress=fail)
        assert run(engine, requests) == expected


def a_signal_leaves_the_engine_whole(engine: Engine) -> None:
    requests = ask(engine, QUESTIONS[:3], options=SamplingOptions(max_tokens=12))
    expected = run(engine, requests)
    longer = ask(engine, QUESTIONS, options=SamplingOptions(max_tokens=64, ignore_eos=True))
    with pytest.raises(KeyboardInterrupt):
        engine.generate(longer, progress=lambda progress: signal.raise_signal(signal.SIGINT))
    assert run(engine, requests) == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def progress_only_grows(engine: Engine) -> None:
    seen: list[Progress] = []
    requests = ask(engine, QUESTIONS, options=SamplingOptions(max_tokens=48, ignore_eos=True))
    engine.generate(requests, progress=seen.append)
    assert seen
    for before, after in pairwise(seen):
        assert before.tokens <= after.tokens
        assert before.prompts_done <= after.prompts_done
    assert all(0 <= p.prompts_done <= p.prompts == len(QUESTIONS) for p in seen)


def beams_are_ordered_and_repeat(engine: Engine) -> None:
    if not engine.capabilities.beam_search:
        return
    options = SamplingOptions(max_tokens=6, beam_width=2)
    requests = ask(engine, QUESTIONS[:2], n=2, options=options)
    found = run(engine, requests)
    assert [(g.prompt_index, g.completion_index) for g in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert found == run(engine, requests)
    assert found[0].token_ids != found[1].token_ids
    with pytest.raises(RequestError):
        run(engine, [replace(requests[0], seeds=(1, 2, 3))])


def fields_have_rows(engine: Engine) -> None:
    fields = engine.fields()
    assert fields["engine.name"] == engine.name
    assert all(spec_of(name) is not None for name in fields)
    assert engine.model().name


def recorded_tokens_are_scored(engine: Engine) -> None:
    """A greedy text scores as its own; what no text holds scores far below."""
    if not engine.capabilities.score:
        return
    assert isinstance(engine, Scorer)
    request = ask(engine, QUESTIONS[:1])[0]
    (generation,) = run(engine, (request,))
    scores = engine.score(request, generation)
    assert len(scores) == len(generation.token_ids)
    assert all(s.logprob <= s.best_logprob <= 0.0 for s in scores)
    behind = [s.best_logprob - s.logprob for s in scores]
    # A prefill rounds in another way than a decode did.
    assert max(behind) <= 0.5
    assert generation.evidence is not None
    pairs = zip(generation.evidence.chosen, scores, strict=True)
    assert max(abs(recorded - s.logprob) for recorded, s in pairs) <= 0.5
    ids = generation.token_ids
    wrong = replace(generation, token_ids=(ids[0], ids[0], *ids[2:]))
    changed = engine.score(request, wrong)
    assert changed[0] == scores[0]
    assert changed[1].best_logprob - changed[1].logprob > 0.5
    # Scoring leaves the engine as it was.
    assert run(engine, (request,)) == (generation,)


def scoring_what_does_not_fit_is_one_line(engine: Engine) -> None:
    if not isinstance(engine, Scorer):
        return
    request = ask(engine, QUESTIONS[:1])[0]
    (generation,) = run(engine, (request,))
    for ids in ((2**31 - 1,), generation.token_ids * 10_000):
        with pytest.raises(RequestError) as error:
            engine.score(request, replace(generation, token_ids=ids))
        assert "\n" not in str(error.value)


CHECKS: tuple[Callable[[Engine], None], ...] = (
    order_and_count,
    nothing_asked_nothing_returned,
    equal_requests_give_equal_generations,
    seeds_matter_when_sampling,
    seeds_do_not_matter_when_greedy,
    evidence_fits_the_tokens,
    greedy_takes_the_best,
    offsets_cover_the_text,
    greedy_is_normalised,
    resolved_leaves_nothing_open,
    empty_prompts_are_one_line,
    unknown_token_ids_are_one_line,
    an_exception_leaves_the_engine_whole,
    a_signal_leaves_the_engine_whole,
    progress_only_grows,
    beams_are_ordered_and_repeat,
    fields_have_rows,
    recorded_tokens_are_scored,
    scoring_what_does_not_fit_is_one_line,
)


def unknown_option(start: Callable[[dict[str, str]], Engine]) -> None:
    """An option that no engine has is refused in one line, before anything is allocated."""
    with pytest.raises(DetLLMError, match="max_model_lne") as error:
        start({"max_model_lne": "64"})
    assert "\n" not in str(error.value)
    assert "max_model_len" in str(error.value)


def shutdown_twice(engine: Engine) -> None:
    """The second shutdown does nothing, and a stopped engine says so in one line."""
    assert engine.shutdown().freed
    assert engine.shutdown().freed == ()
    with pytest.raises(DetLLMError, match="shut down"):
        engine.generate(())
