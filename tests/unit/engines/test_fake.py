from __future__ import annotations

import signal
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_detllm.core.compare import first_divergence
from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.generation import Generation, Message, Prompt, PromptKind, build_requests
from jupyter_detllm.core.levels import Level
from jupyter_detllm.engines.base import EngineSpec, SamplingOptions
from jupyter_detllm.engines.fake.engine import FakeEngine
from jupyter_detllm.engines.fake.model import ENGINE_DEFAULTS, EOS, Tokenizer
from jupyter_detllm.errors import EngineError, EngineStartError, RequestError, UsageError

Options = Mapping[str, FieldValue]
PROMPTS = ("Hello", "World", "Good morning")
SAMPLED = SamplingOptions(temperature=0.8, max_tokens=32)


def engine(options: Options | None = None, level: Level = Level.REPEATABLE) -> FakeEngine:
    return FakeEngine(EngineSpec("demo", level, options or {}))


def generate(
    options: Options | None = None,
    *,
    prompts: tuple[str, ...] = PROMPTS,
    level: Level = Level.REPEATABLE,
    sampling: SamplingOptions = SamplingOptions(max_tokens=32),  # noqa: B008 - it is frozen
    n: int = 1,
    seed: int | None = None,
) -> tuple[Generation, ...]:
    running = engine(options, level)
    resolved = [running.resolve(Prompt.chat(p), sampling) for p in prompts]
    return running.generate(build_requests(resolved, root_seed=0, n=n, seed=seed)).generations


def tokens(generations: tuple[Generation, ...]) -> list[tuple[int, ...]]:
    return [generation.token_ids for generation in generations]


@given(st.text(st.characters(codec="utf-8")), st.integers(0, 99))
def test_the_tokenizer_is_reversible(text: str, shift: int) -> None:
    tokenizer = Tokenizer(shift)
    assert tokenizer.decode(tokenizer.encode(text))[0] == text


@given(st.lists(st.integers(0, Tokenizer().size - 1)))
def test_offsets_fit_whatever_the_tokens(ids: list[int]) -> None:
    text, offsets = Tokenizer().decode(ids)
    assert len(offsets) == len(ids)
    assert list(offsets) == sorted(offsets)
    assert all(0 <= offset <= len(text.encode()) for offset in offsets)


def test_words_bytes_and_special_tokens() -> None:
    tokenizer = Tokenizer()
    assert len(tokenizer.encode(" river山の")) == 2
    assert tokenizer.encode("🌊") == (0xF0, 0x9F, 0x8C, 0x8A)
    assert max(tokenizer.encode("<|end|>")) < 256
    ids = tokenizer.chat([Message("system", "Be brief."), Message("user", "Hi")])
    assert [token for token in ids if EOS <= token < EOS + 4] == [257, 256, 258, 256, 259]
    assert tokenizer.decode(ids)[0] == "\nBe brief.\nHi\n"
    with pytest.raises(RequestError, match="'tool'"):
        tokenizer.chat([Message("tool", "x")])
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode("\ud800")


def test_texts_exercise_what_reports_must_show() -> None:
    many = generate(prompts=tuple(f"prompt {i}" for i in range(60)))
    text = "".join(g.text for g in many)
    for piece in ("山", "🌊", "é", "\n", " river"):
        assert piece in text
    assert any(0xF0 in g.token_ids for g in many)
    assert {g.finish_reason for g in many} == {"stop", "length"}
    margins = [g.evidence.margin(i) for g in many if g.evidence for i in range(len(g.token_ids))]
    assert 0.0 in margins
    assert len([m for m in margins if m is not None and 0 < m < 0.5]) > 30


def test_evidence_is_exact_in_float32() -> None:
    for generation in generate({"drift_salt": "x"}, sampling=SAMPLED):
        assert generation.evidence is not None
        for value in (*generation.evidence.chosen, *generation.evidence.runner_up):
            assert struct.unpack("<f", struct.pack("<f", value))[0] == value


@pytest.mark.parametrize(
    "other",
    [
        replace(SAMPLED, temperature=0.7),
        replace(SAMPLED, top_p=0.5),
        replace(SAMPLED, top_k=5),
        replace(SAMPLED, min_p=0.1),
        replace(SAMPLED, presence_penalty=0.5),
        replace(SAMPLED, repetition_penalty=1.1),
        SamplingOptions(max_tokens=32),
        SamplingOptions(max_tokens=32, beam_width=3),
    ],
)
def test_parameters_change_the_tokens(other: SamplingOptions) -> None:
    assert tokens(generate(sampling=SAMPLED)) != tokens(generate(sampling=other))


def test_more_tokens_continue_the_same_text() -> None:
    short = generate(sampling=SamplingOptions(max_tokens=5, ignore_eos=True))
    long = generate(sampling=SamplingOptions(max_tokens=50, ignore_eos=True))
    for a, b in zip(short, long, strict=True):
        assert len(b.token_ids) == 50
        assert b.token_ids[:5] == a.token_ids
        assert a.finish_reason == "length"


def test_min_tokens_and_the_end_of_text() -> None:
    for generation in generate(sampling=SamplingOptions(max_tokens=200, min_tokens=60)):
        assert len(generation.token_ids) >= 60
    ends = generate(sampling=SamplingOptions(max_tokens=500))
    assert all(g.finish_reason == "stop" and g.token_ids[-1] == EOS for g in ends)


def test_stop_strings_end_the_text_before_them() -> None:
    plain = generate(sampling=SamplingOptions(max_tokens=40))[0]
    cut = plain.text[6:9]
    stopped = generate(sampling=SamplingOptions(max_tokens=40, stop=("\x00", cut)))[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == plain.text[: plain.text.index(cut)]
    assert stopped.token_ids == plain.token_ids[: len(stopped.token_ids)]
    assert max(stopped.offsets) <= len(stopped.text.encode())
    late = generate(sampling=SamplingOptions(max_tokens=40, stop=(cut,), min_tokens=20))[0]
    assert len(late.token_ids) >= 20


def test_generation_ends_where_the_context_does() -> None:
    sampling = SamplingOptions(max_tokens=4000, ignore_eos=True)
    found = generate({"max_model_len": 64}, sampling=sampling)
    assert all(g.finish_reason == "length" and len(g.token_ids) < 64 for g in found)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": 2.0},
        {"max_tokens": 0},
        {"min_tokens": 9, "max_tokens": 8},
        {"stop": ("",)},
        {"beam_width": 65},
        {"repetition_penalty": 0.0},
    ],
)
def test_parameters_out_of_range_are_one_line(options: dict[str, object]) -> None:
    with pytest.raises(RequestError) as caught:
        engine().resolve(Prompt.chat("x"), SamplingOptions(**options))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_top_k_one_is_greedy() -> None:
    resolved = engine().resolve(Prompt.chat("x"), SamplingOptions(temperature=1.0, top_k=1))
    assert resolved.sampling.greedy


def test_a_prompt_longer_than_the_context_is_one_line() -> None:
    with pytest.raises(RequestError, match="max_model_len"):
        engine({"max_model_len": 8}).resolve(Prompt.chat("a long prompt"), SamplingOptions())


def test_raw_text_and_token_ids() -> None:
    text = Prompt(PromptKind.TEXT, text=" river")
    ids = engine().resolve(text, SamplingOptions()).token_ids
    again = engine().resolve(Prompt(PromptKind.TOKENS, token_ids=ids), SamplingOptions())
    assert again.token_ids == ids


@pytest.mark.parametrize("name", ["weights", "tokenizer", "chat_template"])
def test_another_model_has_other_digests_and_results(name: str) -> None:
    one, other = engine().model(), engine({name: "other"}).model()
    different = [part for part, digest in one.digests().items() if digest != other.digests()[part]]
    assert different == [name]
    assert tokens(generate()) != tokens(generate({name: "other"}))


OTHER_SETTINGS: Options = {
    "dtype": "float32",
    "quantization": "fp8",
    "kv_cache_dtype": "fp8",
    "attention_backend": "FLASH_ATTN",
    "tensor_parallel_size": "2",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "max_model_len": 512,
    "block_size": 128,
    "enable_prefix_caching": "true",
    "enable_chunked_prefill": False,
    "enforce_eager": False,
    "logprobs_mode": "processed_logprobs",
}


@pytest.mark.parametrize("name", OTHER_SETTINGS)
def test_an_engine_setting_shows_in_its_field_and_drifts(name: str) -> None:
    assert set(OTHER_SETTINGS) == set(ENGINE_DEFAULTS)
    options = {name: OTHER_SETTINGS[name]}
    plain, other = engine().fields(), engine(options).fields()
    assert [field for field in plain if plain[field] != other[field]] == [ENGINE_DEFAULTS[name][0]]
    # A shorter context changes nothing until it is full.
    drifts = tokens(generate()) != tokens(generate(options))
    assert drifts is (name != "max_model_len")


def test_defaults_spelled_out_are_defaults() -> None:
    options = {name: default for name, (_, default) in ENGINE_DEFAULTS.items()}
    assert generate(options) == generate()


def test_a_simulated_field_drifts_if_its_role_is_numerics() -> None:
    options = {"drift_field": "software.vllm=0.33.0"}
    assert engine(options).fields()["software.vllm"] == "0.33.0"
    assert tokens(generate(options)) != tokens(generate())
    assert generate({"drift_field": "software.os=Plan 9"}) == generate()
    assert engine({"drift_field": "torch.threads"}).fields()["torch.threads"] == "drifted"
    other = {"drift_field": "software.vllm=0.34.0"}
    assert tokens(generate(options)) != tokens(generate(other))


def test_drift_takes_the_runner_up_at_the_first_near_tie_from_token_2_on() -> None:
    for plain, drifted in zip(generate(), generate({"drift_salt": "x"}), strict=True):
        position = first_divergence(plain.token_ids, drifted.token_ids)
        assert position == 2
        assert plain.evidence is not None
        margin = plain.evidence.margin(position)
        assert margin is not None
        assert margin < 0.5
        assert plain.evidence.runner_up_ids[position] == drifted.token_ids[position]


@pytest.mark.parametrize("position", [0, 1, 12])
def test_drift_position_is_where_it_says(position: int) -> None:
    sampling = SamplingOptions(max_tokens=40, ignore_eos=True)
    drifted = generate({"drift_position": position}, sampling=sampling)
    for plain, other in zip(generate(sampling=sampling), drifted, strict=True):
        assert plain.token_ids[:position] == other.token_ids[:position]
        # An emoji is one choice of four tokens.
        assert plain.token_ids[: position + 5] != other.token_ids[: position + 5]


def test_evidence_drift_changes_bits_only() -> None:
    for plain, other in zip(generate(), generate({"drift_evidence": True}), strict=True):
        assert replace(plain, evidence=None) == replace(other, evidence=None)
        assert plain.evidence is not None
        assert other.evidence is not None
        pairs = zip(plain.evidence.chosen, other.evidence.chosen, strict=True)
        assert all(0 < abs(a - b) < 1 / 64 for a, b in pairs)


def test_batches_matter_only_if_asked_and_below_invariant() -> None:
    def alone_and_together(options: Options, level: Level) -> tuple[object, object]:
        alone = [tokens(generate(options, prompts=(p,), level=level))[0] for p in PROMPTS]
        return alone, tokens(generate(options, level=level))

    sensitive = {"batch_sensitive": True}
    for options, level, equal in [
        ({}, Level.REPEATABLE, True),
        (sensitive, Level.REPEATABLE, False),
        (sensitive, Level.SEEDED, False),
        (sensitive, Level.INVARIANT, True),
    ]:
        alone, together = alone_and_together(options, level)
        assert (alone == together) is equal
    turned = generate(sensitive, prompts=PROMPTS[::-1])[::-1]
    assert tokens(turned) != tokens(generate(sensitive))


def test_more_completions_than_beams_are_refused() -> None:
    with pytest.raises(RequestError, match="3 completions of 2 beams"):
        generate(sampling=SamplingOptions(beam_width=2), n=3)


def test_failures_are_one_line_and_leave_the_engine_whole() -> None:
    failing = engine({"fail_at": 9})
    long = [failing.resolve(Prompt.chat("Hello"), SamplingOptions(ignore_eos=True))]
    with pytest.raises(EngineError, match="failed at token 9"):
        failing.generate(build_requests(long, root_seed=0))
    short = [failing.resolve(Prompt.chat("Hello"), SamplingOptions(max_tokens=8))]
    found = failing.generate(build_requests(short, root_seed=0)).generations
    expected = generate(prompts=("Hello",), sampling=SamplingOptions(max_tokens=8))
    assert found == expected


def test_a_failed_start_is_one_line_and_logged(tmp_path: Path) -> None:
    log, lines = tmp_path / "engine.log", []
    spec = EngineSpec("demo", options={"fail_start": "true"})
    with pytest.raises(EngineStartError, match="did not start"):
        FakeEngine(spec, progress=lines.append, log_path=log)
    assert "ERROR" in log.read_text()
    assert len(lines) == 1


def test_the_log_names_start_and_end(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    FakeEngine(EngineSpec("demo"), log_path=str(log)).shutdown()
    assert [line.split(": ")[1].split()[0] for line in log.read_text().splitlines()] == [
        "starting",
        "started",
        "shut",
    ]


def test_slow_mode_gives_way_to_an_interrupt() -> None:
    slow = engine({"delay_ms": 3_600_000, "start_delay_ms": "1"})
    resolved = [slow.resolve(Prompt.chat("Hello"), SamplingOptions(ignore_eos=True))]
    requests = build_requests(resolved, root_seed=0)

    def interrupted() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        slow.generate(requests)  # sleeps for an hour

    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drift_postion": 1}, "drift_position"),
        ({"--drift-sallt": 1}, "drift_salt"),
        ({"max_num_seq": 1}, "max_num_seqs"),
        ({"drift_field": "software.vlm=1"}, "software.vllm"),
        ({"drift_field": "model.weights=1"}, "weights=OTHER"),
        ({"delay_ms": "soon"}, "an integer"),
        ({"delay_ms": -2}, "not less than 0"),
        ({"evidence": "maybe"}, "true or false"),
    ],
)
def test_wrong_options_are_one_line_with_the_nearest(options: Options, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        engine(options)
    assert "\n" not in str(caught.value)


def test_options_are_read_as_from_a_command_line() -> None:
    spelled = {"--batch-sensitive": "True", "drift-position": "3", "quantization": "none"}
    assert generate(spelled) == generate({"batch_sensitive": True, "drift_position": 3})
