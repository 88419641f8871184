"""Request handling shared by all engines: resolve sampling, list completions, check.

Resolved parameters have no open defaults, and are as vLLM takes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jupyter_detllm.core.generation import EVIDENCE_K, GenerationRequest, Prompt, Sampling
from jupyter_detllm.engines.base import SamplingOptions
from jupyter_detllm.errors import RequestError

__all__ = [
    "MIN_TEMPERATURE",
    "Completion",
    "check_requests",
    "completion_parameters",
    "completions_of",
    "eos_ids",
    "fit_length",
    "given_ids",
    "resolve_sampling",
    "to_vllm",
]


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion to run: its place, its prompt's tokens, and its seed."""

    prompt_index: int
    completion_index: int
    token_ids: tuple[int, ...]
    seed: int


def completions_of(requests: Sequence[GenerationRequest]) -> list[Completion]:
    """Return the completions to run, ordered by (prompt, completion)."""
    return [
        Completion(i, j, request.token_ids, seed)
        for i, request in enumerate(requests)
        for j, seed in enumerate(request.seeds)
    ]


def check_requests(
    requests: Sequence[GenerationRequest],
    max_model_len: int,
    *,
    longer: str = "%detllm use MODEL --max-model-len N",
) -> None:
    """Refuse requests that cannot be run, before any of them runs.

    `longer` is what gives the engine more room.

    Raises
    ------
    RequestError
        If one has no token ids, does not fit, or has more completions than beams.
    """
    for request in requests:
        sampling = request.sampling
        if not request.token_ids:
            raise RequestError(
                "a request holds no prompt tokens", expected="a request that was resolved here"
            )
        if len(request.token_ids) + sampling.max_tokens > max_model_len:
            raise RequestError(
                f"{len(request.token_ids)} prompt tokens and {sampling.max_tokens} new ones "
                f"do not fit into {max_model_len}",
                fix=longer,
            )
        if sampling.beam_width and len(request.seeds) > sampling.beam_width:
            raise RequestError(
                f"beam search with {sampling.beam_width} beams has no {len(request.seeds)} results",
                fix=f"-n {sampling.beam_width}",
            )


def given_ids(prompt: Prompt, vocabulary: int) -> tuple[int, ...]:
    """Return the token ids that a prompt consists of.

    Raises
    ------
    RequestError
        If one is none of the `vocabulary` ids that the model knows.
    """
    wrong = next((i for i in prompt.token_ids if not 0 <= i < vocabulary), None)
    if wrong is not None:
        raise RequestError(
            f"the prompt holds the token id {wrong}", expected=f"0 to {vocabulary - 1}"
        )
    return tuple(prompt.token_ids)


MIN_TEMPERATURE = 0.01
"""vLLM raises positive temperatures to this minimum; so does the resolved value."""

_FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "repetition_penalty")
_AS_THEY_ARE = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "ignore_eos",
)  # fmt: skip
_NOT_IN_BEAM_SEARCH = (
    "top_p", "top_k", "min_p", "min_tokens", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "stop",
)  # fmt: skip


def resolve_sampling(
    options: SamplingOptions,
    model_defaults: Mapping[str, Any],
    *,
    eos: Iterable[int],
    tokenizer_eos: int | None,
    max_logprobs: int,
    check: Callable[[Sampling], None] | None = None,
) -> Sampling:
    """Return the parameters that will be used.

    Options that the user did not set come from the model's generation config, then from
    `Sampling`: temperature 0, 128 tokens.

    Parameters
    ----------
    options, model_defaults
        The user's options, and the model's sampling defaults by vLLM's names.
    eos, tokenizer_eos
        Every end-of-sequence id, and the tokenizer's own, the only one that beam
        search knows.
    max_logprobs
        The engine's limit, twice the widest beam.
    check
        Checks the values; by default vLLM's own parameters do.

    Raises
    ------
    RequestError
        For values that are out of range or exclude each other.
    """
    asked = {k: v for k, v in dataclasses.asdict(options).items() if v is not None}
    if options.beam_width is not None:
        return _beam(options, asked, tokenizer_eos, max_logprobs)
    if options.length_penalty is not None:
        raise RequestError("a length penalty goes with beam search only", fix="--beam-width 4")
    defaults = {name: model_defaults[name] for name in _FROM_MODEL if name in model_defaults}
    sampling = Sampling(**{**defaults, **asked})
    stops = () if sampling.ignore_eos else tuple(sorted(set(eos)))
    sampling = dataclasses.replace(sampling, stop_token_ids=stops)
    (check or _check)(sampling)
    return _as_it_runs(sampling).normalised()


def _as_it_runs(sampling: Sampling) -> Sampling:
    if sampling.top_k == 1:
        # Only one candidate is left: greedy, without a draw among exact ties.
        return dataclasses.replace(sampling, temperature=0.0)
    if 0 < sampling.temperature < MIN_TEMPERATURE:
        return dataclasses.replace(sampling, temperature=MIN_TEMPERATURE)
    return sampling


def _beam(
    options: SamplingOptions, asked: Mapping[str, Any], tokenizer_eos: int | None, max_logprobs: int
) -> Sampling:
    width = asked["beam_width"]
    refused = [name for name in _NOT_IN_BEAM_SEARCH if name in asked]
    if options.temperature:
        refused.insert(0, "temperature")
    if refused:
        names = ", ".join(name.replace("_", "-") for name in refused)
        raise RequestError(
            f"beam search takes no {names}", fix="the same without, or no beam width"
        )
    if not 1 <= width <= max_logprobs // 2:
        raise RequestError(
            f"the beam width is {width}",
            expected=f"1 to {max_logprobs // 2}",
            fix=f"%detllm use MODEL --max-logprobs {max(2 * width, 2)}" if width > 0 else None,
        )
    if tokenizer_eos is None:
        raise RequestError("beam search needs a tokenizer with an end-of-sequence token")
    taken = {k: v for k, v in asked.items() if k != "temperature"}
    stops = () if options.ignore_eos else (tokenizer_eos,)
    sampling = Sampling(**taken, stop_token_ids=stops)
    if sampling.max_tokens < 1:
        raise RequestError(f"max tokens is {sampling.max_tokens}", expected="at least 1")
    return sampling.normalised()


def _check(sampling: Sampling) -> None:
    """Let vLLM check the values; the error line is its first sentence."""
    try:
        to_vllm(sampling, seed=0)
    except Exception as error:
        # vLLM's own class, which is not a ValueError in every version.
        line = str(error).strip().splitlines()[0].rstrip(".") if str(error) else "not valid"
        raise RequestError(f"vLLM refuses the sampling parameters: {line}") from None


def fit_length(
    sampling: Sampling, prompt_tokens: int, max_model_len: int, *, asked: int | None
) -> Sampling:
    """Return `sampling` if prompt and completion fit the engine.

    A default limit is lowered to what is left; a limit set by the user is refused.

    Raises
    ------
    RequestError
        When they do not fit.
    """
    room = max_model_len - prompt_tokens
    longer = f"%detllm use MODEL --max-model-len {prompt_tokens + sampling.max_tokens}"
    if room < 1:
        raise RequestError(
            f"the prompt has {prompt_tokens} tokens",
            expected=f"at most {max_model_len - 1} in this engine",
            fix=longer,
        )
    if sampling.max_tokens <= room:
        return sampling
    if asked is None:
        return dataclasses.replace(
            sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room)
        )
    raise RequestError(
        f"{prompt_tokens} prompt tokens and {asked} new ones are more than {max_model_len}",
        expected=f"at most {room} new tokens",
        fix=f"--max-tokens {room}, or {longer}",
    )


def to_vllm(sampling: Sampling, seed: int) -> Any:
    """Return vLLM's parameters for one completion: always `EVIDENCE_K` logprobs."""
    from vllm import SamplingParams

    # Arrays in place of two objects per token: less for the garbage collector.
    return SamplingParams(**completion_parameters(sampling, seed), flat_logprobs=True)


def completion_parameters(sampling: Sampling, seed: int) -> dict[str, Any]:
    """Return every parameter of one completion as vLLM names it, here and in a server."""
    return {
        "seed": seed,
        **{name: getattr(sampling, name) for name in _AS_THEY_ARE},
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": EVIDENCE_K,
    }


def eos_ids(tokenizer_eos: int | None, generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return every end-of-sequence id of tokenizer and generation config, sorted."""
    listed = generation_config.get("eos_token_id")
    ids = set(listed if isinstance(listed, (list, tuple)) else [listed])
    return tuple(sorted(i for i in {*ids, tokenizer_eos} if isinstance(i, int)))
