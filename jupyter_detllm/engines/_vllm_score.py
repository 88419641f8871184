"""Recorded tokens scored by a `vllm.LLM` in one prefill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jupyter_detllm.core.generation import Generation, GenerationRequest
from jupyter_detllm.engines.base import TokenScore
from jupyter_detllm.errors import EngineError, RequestError

__all__ = ["check_scoring", "score_tokens", "scores_of"]


def check_scoring(
    request: GenerationRequest, generation: Generation, vocabulary: int, max_model_len: int
) -> None:
    """Refuse what cannot be scored.

    Raises
    ------
    RequestError
        Without prompt tokens, for a token the model does not have, or when prompt and
        recorded tokens leave no room for the one token that vLLM generates after them.
    """
    if not request.token_ids:
        raise RequestError(
            "a request holds no prompt tokens", expected="a request that was resolved here"
        )
    if any(token >= vocabulary for token in generation.token_ids):
        raise RequestError("a recorded token is none of this model's")
    total = len(request.token_ids) + len(generation.token_ids)
    if total >= max_model_len:
        raise RequestError(f"{total} prompt and recorded tokens leave no room in {max_model_len}")


def score_tokens(
    llm: Any, prompt: Sequence[int], tokens: Sequence[int], lora: Any = None
) -> tuple[TokenScore, ...]:
    """Return how likely each of `tokens` is after `prompt` and those before it."""
    from vllm import SamplingParams

    if not tokens:
        return ()
    # One token has to be generated; it is thrown away.
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    inputs = [{"prompt_token_ids": [*prompt, *tokens]}]
    outputs = llm.generate(inputs, params, use_tqdm=False, lora_request=lora)
    if len(outputs) != 1 or outputs[0].prompt_logprobs is None:
        raise EngineError("the engine returned no logprobs of the prompt")
    return scores_of(outputs[0].prompt_logprobs[len(prompt) :], tokens)


def scores_of(
    logprobs: Sequence[Mapping[int, Any] | None], tokens: Sequence[int]
) -> tuple[TokenScore, ...]:
    """Return the scores from vLLM's mappings of token id to an object with `logprob`.

    Raises
    ------
    EngineError
        When a token lacks its entry.
    """
    out = []
    for entry, token in zip(logprobs, tokens, strict=False):
        own = (entry or {}).get(token)
        if entry is None or own is None:
            raise EngineError(f"the engine returned no logprob for the recorded token {token}")
        # The recorded token is the most likely one also where another is equally likely.
        best = max(entry, key=lambda candidate: (entry[candidate].logprob, candidate == token))
        out.append(TokenScore(float(own.logprob), int(best), float(entry[best].logprob)))
    if len(out) != len(tokens):
        raise EngineError(f"the engine scored {len(out)} of {len(tokens)} recorded tokens")
    return tuple(out)
