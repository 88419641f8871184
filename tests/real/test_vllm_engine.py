from __future__ import annotations

import os
import random
import stat
import struct
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from jupyter_detllm.core.fields import FIELDS, Group
from jupyter_detllm.core.generation import Generation, Message, Prompt, PromptKind
from jupyter_detllm.engines.base import SamplingOptions
from jupyter_detllm.engines.vllm.engine import VLLMOfflineEngine
from jupyter_detllm.engines.vllm.options import check_options, option_names
from jupyter_detllm.errors import EngineError, RequestError, UsageError
from tests.engine_contract import QUESTIONS, ask, run

SHARED = "The museum keeps a list of rules for its visitors, and every rule is long. " * 8


def text_prompt(text: str) -> Prompt:
    return Prompt(PromptKind.TEXT, text=text)


def bits(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def pieces(generation: Generation) -> list[bytes]:
    return [generation.token_bytes(i) for i in range(len(generation.token_ids))]


# --- the start left no trace -----------------------------------------------------------


def test_every_setting_is_read_back(vllm_engine: VLLMOfflineEngine) -> None:
    fields = vllm_engine.fields()
    table = {row.name for row in FIELDS if row.group is Group.ENGINE}
    # The batch is each call's, the reach a self-test's; servers and several ranks have the others.
    not_here = {
        "engine.batch",
        "engine.invariance_reach",
        "engine.all_reduce",
        "engine.server",
        "engine.unproven",
    }
    assert table - set(fields) == not_here
    absent = {name for name in table if fields.get(name) is None}
    eager = fields["engine.compile"] == "eager"
    assert absent == {*not_here, *(["engine.compile_cache"] if eager else [])}
    assert fields["engine.dtype"] == fields["engine.kv_cache_dtype"] == "bfloat16"
    assert fields["engine.executor"] == "uni, in process"
    if sys.modules["torch"].cuda.is_available():
        assert fields["engine.attention_backend"] == "FLASH_ATTN"
        assert str(fields["engine.compile"]).startswith("mode=VLLM_COMPILE")
    else:
        assert fields["engine.attention_backend"] == "CPU_ATTN"
        assert fields["engine.compile"] == "eager"
        # A fixed number of bytes: as many times more blocks as the model has fewer layers.
        layers = vllm_engine._llm.llm_engine.model_config.hf_config.num_hidden_layers
        assert fields["engine.kv_blocks"] == 364 * 30 // layers
    assert fields["engine.prefix_cache"] is fields["engine.async_scheduling"] is False
    assert fields["model.architecture"] == "LlamaForCausalLM"


def test_the_model_has_its_three_digests(vllm_engine: VLLMOfflineEngine) -> None:
    identity = vllm_engine.model()
    assert identity.name == "demo"
    without = [part for part, digest in identity.digests().items() if digest is None]
    assert without == ["adapter"]


def test_nothing_of_vllm_reaches_a_command(
    vllm_engine: VLLMOfflineEngine, environment_before: dict[str, str]
) -> None:
    names = ("LD_PRELOAD", "LD_LIBRARY_PATH", "LOCAL_WORLD_SIZE", "NUMEXPR_MAX_THREADS")
    ours = [name for name in os.environ if name.startswith("VLLM_")]
    for name in (*names, *ours):
        assert os.environ.get(name) == environment_before.get(name)
    assert sys.excepthook is sys.__excepthook__


def test_torch_obeys_the_user_and_the_engine_does_not_notice(
    vllm_engine: VLLMOfflineEngine,
) -> None:
    import torch

    requests = ask(vllm_engine, [SHARED])
    expected, threads = run(vllm_engine, requests), torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.get_num_threads() == 1
        assert run(vllm_engine, requests) == expected
        assert torch.get_num_threads() == 1
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("highest")


def test_random_streams_go_on_as_if_there_were_no_engine(vllm_engine: VLLMOfflineEngine) -> None:
    import numpy as np
    import torch

    def seed() -> None:
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    seed()
    expected = [draw(), draw()]
    seed()
    found = [draw()]
    options = SamplingOptions(max_tokens=6, temperature=1.0)
    run(vllm_engine, ask(vllm_engine, QUESTIONS, n=2, options=options))
    assert [*found, draw()] == expected


def test_the_log_is_the_users_and_holds_what_vllm_said(
    vllm_engine: VLLMOfflineEngine, capfd: pytest.CaptureFixture[str]
) -> None:
    assert stat.S_IMODE(vllm_engine.log_path.stat().st_mode) == 0o600
    assert "Loading weights" in vllm_engine.log_path.read_text()
    run(vllm_engine, ask(vllm_engine, QUESTIONS[:1]))
    assert capfd.readouterr() == ("", "")


# --- what is run is what was asked --------------------------------------------------------


def test_chat_prompts_are_those_of_llm_chat(vllm_engine: VLLMOfflineEngine) -> None:
    messages = (Message("system", "Be brief."), Message("user", "Hello <|im_end|> there"))
    resolved = vllm_engine.resolve(Prompt(PromptKind.CHAT, messages), SamplingOptions())
    from vllm import SamplingParams

    (output,) = vllm_engine._llm.chat(
        [{"role": m.role, "content": m.content} for m in messages],
        SamplingParams(max_tokens=1, temperature=0.0),
        use_tqdm=False,
    )
    assert list(resolved.token_ids) == output.prompt_token_ids


def bare(engine: VLLMOfflineEngine, prompts: Sequence[Any], params: Sequence[Any]) -> list[Any]:
    out: list[Any] = engine._llm.generate(prompts, params, use_tqdm=False)
    return out


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_generations_are_bitwise_those_of_llm_generate(
    vllm_engine: VLLMOfflineEngine, temperature: float
) -> None:
    from vllm import SamplingParams

    options = SamplingOptions(max_tokens=16, temperature=temperature)
    n = 1 if temperature == 0.0 else 3
    requests = ask(vllm_engine, [*QUESTIONS, text_prompt(SHARED)], n=n, options=options)
    found = run(vllm_engine, requests)
    jobs = [(list(r.token_ids), seed) for r in requests for seed in r.seeds]
    outputs = bare(
        vllm_engine,
        [{"prompt_token_ids": ids} for ids, _ in jobs],
        [
            SamplingParams(temperature=temperature, max_tokens=16, seed=s, logprobs=2)
            for _, s in jobs
        ],
    )
    for generation, output in zip(found, outputs, strict=True):
        completion = output.outputs[0]
        assert list(generation.token_ids) == list(completion.token_ids)
        assert generation.text == completion.text
        assert generation.finish_reason == completion.finish_reason
        assert generation.evidence is not None
        chosen = [
            row[t].logprob for row, t in zip(completion.logprobs, completion.token_ids, strict=True)
        ]
        assert bits(generation.evidence.chosen) == bits(chosen)
        others = [
            max(item.logprob for token, item in row.items() if token != t)
            for row, t in zip(completion.logprobs, completion.token_ids, strict=True)
        ]
        assert bits(generation.evidence.runner_up) == bits(others)


def test_batches_beyond_4096_tokens_run_seeded(vllm_engine: VLLMOfflineEngine) -> None:
    options = SamplingOptions(max_tokens=3, temperature=0.8)
    ids = tuple(range(100, 1100))
    prompts = [Prompt(PromptKind.TOKENS, token_ids=(i, *ids)) for i in range(5, 9)]
    long = Prompt(PromptKind.TOKENS, token_ids=ids * 5)
    requests = ask(vllm_engine, [*prompts, long], options=options)
    assert sum(r.prompt_length for r in requests) > 8192
    found = run(vllm_engine, requests)
    assert [g.prompt_index for g in found] == list(range(5))
    assert all(len(g.token_ids) == 3 for g in found)


def test_stop_strings_cut_the_text(vllm_engine: VLLMOfflineEngine) -> None:
    plain = run(vllm_engine, ask(vllm_engine, QUESTIONS[:1]))[0]
    words = plain.text.split()
    word = words[min(2, len(words) - 1)]
    options = SamplingOptions(max_tokens=16, stop=(word,))
    cut = run(vllm_engine, ask(vllm_engine, QUESTIONS[:1], options=options))[0]
    assert cut.text == plain.text[: plain.text.index(word)]
    assert cut.finish_reason == "stop"
    assert cut.token_ids == plain.token_ids[: len(cut.token_ids)]
    assert b"".join(pieces(cut)) == cut.text.encode()
    assert max(cut.offsets) <= len(cut.text.encode())


@pytest.mark.slow  # only the whole model writes such text
def test_tokens_inside_characters_have_exact_offsets(vllm_engine: VLLMOfflineEngine) -> None:
    options = SamplingOptions(max_tokens=40, temperature=1.0)
    prompts = [
        Prompt.chat("Answer with emojis only: 😀🎉👩‍🚀"),
        text_prompt("日本の首都は東京です。中国的首都是"),
    ]
    tokenizer = vllm_engine._tokenizer
    alphabet = byte_alphabet()
    inside = 0
    for n in range(3, 8):  # more completions, until there is enough of what is looked at
        found = run(vllm_engine, ask(vllm_engine, prompts, n=n, options=options))
        inside += sum(map(partial(tokens_inside, tokenizer, alphabet), found))
        if inside > 20:
            break
    assert inside > 20


def tokens_inside(tokenizer: Any, alphabet: dict[str, int], generation: Generation) -> int:
    """Check the pieces of a text; return how many of its tokens are parts of characters."""
    data = generation.text.encode()
    assert b"".join(pieces(generation)) == data
    if "\ufffd" in generation.text:
        return 0
    inside = 0
    for piece, token in zip(pieces(generation), generation.token_ids, strict=True):
        if token in tokenizer.all_special_ids:
            assert piece == b""
        elif piece:
            own = bytes(alphabet[c] for c in tokenizer.convert_ids_to_tokens(token))
            assert piece == own
            inside += not is_text(piece)
    return inside


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's characters for bytes: printable ones stand for themselves."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


def is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.slow  # only the whole model ends by itself
def test_the_end_of_sequence_is_recorded_and_in_no_text(vllm_engine: VLLMOfflineEngine) -> None:
    options = SamplingOptions(max_tokens=64)
    asked = ["Say only: yes", "What is 2 + 2?", "Name a colour.", "What is the capital of France?"]
    requests = ask(vllm_engine, asked, options=options)
    assert requests[0].sampling.stop_token_ids == (2,)
    # Which of them end by themselves within 64 tokens is up to the processor.
    ended = [g for g in run(vllm_engine, requests) if g.finish_reason == "stop"]
    assert ended
    for generation in ended:
        assert generation.token_ids[-1] == 2
        assert generation.offsets[-1] == len(generation.text.encode())


def test_beams_of_vllm(vllm_engine: VLLMOfflineEngine) -> None:
    from vllm.sampling_params import BeamSearchParams

    options = SamplingOptions(beam_width=3, max_tokens=6, length_penalty=0.5)
    requests = ask(vllm_engine, QUESTIONS[:2], n=3, options=options)
    found = run(vllm_engine, requests)
    params = BeamSearchParams(beam_width=3, max_tokens=6, length_penalty=0.5)
    outputs = vllm_engine._llm.beam_search(
        [{"prompt_token_ids": list(r.token_ids)} for r in requests], params
    )
    beams = [sequence for output in outputs for sequence in output.sequences]
    for generation, beam in zip(found, beams, strict=True):
        length = requests[generation.prompt_index].prompt_length
        assert list(generation.token_ids) == beam.tokens[length:]
        assert generation.evidence is not None
        assert generation.evidence.k == 6
        assert sum(generation.evidence.chosen) == pytest.approx(beam.cum_logprob)
        assert generation.text.strip() in beam.text


# --- what cannot be run is one line ---------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (SamplingOptions(temperature=-1.0), "temperature must be non-negative"),
        (SamplingOptions(temperature=float("nan")), "temperature must be a finite number"),
        (SamplingOptions(top_p=1.5, temperature=1.0), "top_p"),
        (SamplingOptions(max_tokens=0), "max_tokens must be at least 1"),
        (SamplingOptions(min_tokens=9, max_tokens=3), "min_tokens"),
        (SamplingOptions(stop=("",)), "stop cannot contain an empty string"),
        (SamplingOptions(max_tokens=8192), "--max-model-len"),
    ],
)
def test_refusals(vllm_engine: VLLMOfflineEngine, options: SamplingOptions, line: str) -> None:
    with pytest.raises(RequestError, match=line) as error:
        vllm_engine.resolve(Prompt.chat("hello"), options)
    assert "\n" not in str(error.value)


def test_a_prompt_beyond_the_engine(vllm_engine: VLLMOfflineEngine) -> None:
    prompt = Prompt(PromptKind.TOKENS, token_ids=(5,) * 8192)
    with pytest.raises(RequestError, match="8192 tokens"):
        vllm_engine.resolve(prompt, SamplingOptions())
    almost = Prompt(PromptKind.TOKENS, token_ids=(5,) * 8190)
    assert vllm_engine.resolve(almost, SamplingOptions()).sampling.max_tokens == 2


def test_a_wrong_engine_option_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"did you mean max_model_len\?"):
        check_options({"max-modle-len": "2048"}, option_names())


def test_a_failure_in_vllm_is_one_line_and_leaves_it_whole(
    vllm_engine: VLLMOfflineEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = ask(vllm_engine, QUESTIONS[:2])
    expected = run(vllm_engine, requests)
    core = vllm_engine._llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    with monkeypatch.context() as patch:

        def fail(*args: object, **kwargs: object) -> None:
            raise RuntimeError("no more memory\nand much more to say")

        patch.setattr(runner, "sample_tokens", fail)
        with pytest.raises(EngineError, match="no more memory") as error:
            run(vllm_engine, requests)
    assert "\n" not in str(error.value)
    assert str(vllm_engine.log_path) in str(error.value)
    assert run(vllm_engine, requests) == expected


def test_statistics(vllm_engine: VLLMOfflineEngine) -> None:
    result = vllm_engine.generate(ask(vllm_engine, QUESTIONS))
    assert result.stats.tokens == sum(len(g.token_ids) for g in result.generations)
    assert result.stats.seconds > 0
    assert (result.stats.cached_tokens, result.stats.preemptions) == (0, 0)
    times = result.stats.timings
    assert len(times.completions) == len(times.first_tokens) == len(QUESTIONS)
    assert max(times.first_tokens) < max(times.completions) <= result.stats.seconds
    assert sum(count for _, count in times.gaps) == result.stats.tokens - len(QUESTIONS)
    assert result.stats.kv_peak is not None
    assert 0 < result.stats.kv_peak < 1
