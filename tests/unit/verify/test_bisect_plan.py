from __future__ import annotations

import pytest

from jupyter_detllm.core.fields import Role
from jupyter_detllm.core.fingerprint import FieldDiff, FieldValue, Fingerprint
from jupyter_detllm.core.levels import Level
from jupyter_detllm.errors import UsageError
from jupyter_detllm.probes.software import Platform
from jupyter_detllm.verify.bisect import conditions_of
from jupyter_detllm.verify.bisect_plan import (
    SETTINGS,
    BatchComposition,
    Conditions,
    Override,
    aligned,
    plan,
    settings_named,
)
from tests.bisecting import Machine

LEVELS = (Level.SEEDED, Level.REPEATABLE)
CPU, CUDA = Platform.CPU, Platform.CUDA


def planned(
    engine: str = "vllm",
    platform: Platform = CPU,
    found: dict[str, FieldValue] | None = None,
    level: Level = Level.REPEATABLE,
    levels: tuple[Level, ...] = LEVELS,
) -> list[str]:
    base = Conditions(engine, level)
    fingerprint = Fingerprint.build(found or {})
    return [t.name for t in plan(base, fingerprint, (), platform=platform, levels=levels)]


def diff(name: str, left: FieldValue) -> FieldDiff:
    return FieldDiff(name, Role.NUMERICS, left, None, "why", "align", 50)


def align(
    name: str, left: FieldValue, engine: str = "vllm", where: Platform = CPU
) -> Override | None:
    return aligned(diff(name, left), engine, where, LEVELS)


def test_names_are_unique_and_each_row_says_why_and_how() -> None:
    names = [row.name for row in SETTINGS]
    assert len(set(names)) == len(names)
    assert all(row.why.endswith(".") and row.adopt for row in SETTINGS)
    base = Conditions("vllm", Level.SEEDED)
    changed = [row for row in SETTINGS if row.change.applied(base) == base]
    assert not changed


def test_rows_come_by_cost_and_only_where_they_exist() -> None:
    cpu, cuda = planned(), planned(platform=CUDA)
    costs = {row.name: row.cost for row in SETTINGS}
    assert [costs[name] for name in cpu] == sorted(costs[name] for name in cpu)
    assert {"split-kv-off", "one-thread"} <= set(cpu)
    assert {"triton-attention", "flashinfer-sampler-off", "no-tf32"} <= set(cuda)
    assert not {"split-kv-off", "one-thread"} & set(cuda)
    assert not {"triton-attention", "no-tf32"} & set(cpu)
    assert "split-kv-off" not in planned("fake")


def test_what_is_in_force_is_not_tried() -> None:
    found: dict[str, FieldValue] = {
        "engine.prefix_cache": False,
        "engine.compile": "eager",
        "controls.VLLM_CPU_ATTN_SPLIT_KV": "0",
        "torch.threads": 1,
    }
    names = planned(found=found)
    assert "prefix-cache-on" in names
    assert "compiled" in names
    assert not {"prefix-cache-off", "eager", "split-kv-off", "one-thread"} & set(names)
    other = planned(found={"engine.compile": "mode=3 backend=inductor", "torch.threads": 2})
    assert "eager" in other
    assert "compiled" not in other


def test_a_level_is_tried_where_it_can_be_had_and_is_not_the_present_one() -> None:
    assert "level-invariant" not in planned()
    assert "level-invariant" in planned(levels=tuple(Level))
    assert "level-repeatable" not in planned()
    assert "level-repeatable" in planned(level=Level.SEEDED)


def test_fields_that_differ_come_first_each_change_once() -> None:
    base = Conditions("vllm", Level.REPEATABLE, environ={"OMP_NUM_THREADS": "2"})
    diffs = [diff("torch.threads", 4), diff("controls.OMP_NUM_THREADS", "4")]
    trials = plan(base, Fingerprint({}), diffs, platform=CPU, levels=LEVELS)
    assert [t.name for t in trials[:2]] == ["torch.threads as recorded (4)", "alone"]


def test_a_row_that_repeats_an_alignment_is_left_out() -> None:
    base = Conditions("fake", Level.REPEATABLE)
    found = Fingerprint.build({"engine.prefix_cache": True})
    trials = plan(base, found, [diff("engine.prefix_cache", False)], platform=CPU, levels=LEVELS)
    names = [t.name for t in trials]
    assert names[0] == "engine.prefix_cache as recorded (False)"
    assert "prefix-cache-off" not in names


@pytest.mark.parametrize(
    ("name", "value", "change"),
    [
        ("engine.batch", "3 requests together", Override(composition=BatchComposition.RECORDED)),
        ("torch.threads", 8, Override(environ={"OMP_NUM_THREADS": "8"})),
        ("torch.deterministic_algorithms", "warn", Override(torch_deterministic="warn")),
        (
            "controls.VLLM_CPU_ATTN_SPLIT_KV",
            "0",
            Override(environ={"VLLM_CPU_ATTN_SPLIT_KV": "0"}),
        ),
        ("controls.ONEDNN_MAX_CPU_ISA", None, Override(environ={"ONEDNN_MAX_CPU_ISA": None})),
        ("engine.dtype", "float32", Override({"dtype": "float32"})),
        ("engine.tensor_parallel", 1, Override({"tensor_parallel_size": None})),
        ("engine.compile", "eager", Override({"enforce_eager": True})),
        ("level", "seeded", Override(level=Level.SEEDED)),
    ],
)
def test_a_recorded_value_is_put_back(name: str, value: FieldValue, change: Override) -> None:
    assert align(name, value) == change


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("software.torch", "2.0"),
        ("hardware.cpu_isa", "AVX2"),
        ("torch.threads", "8"),
        ("torch.threads", 10**6),
        ("torch.threads", True),
        ("torch.deterministic_algorithms", "maybe"),
        ("controls.LD_PRELOAD", "/tmp/evil.so"),
        ("controls.PATH", "/tmp"),
        ("controls.MKL_CBWR", "a b; rm -rf /"),
        ("controls.MKL_CBWR", "x" * 100),
        ("controls.VLLM_CPU_ATTN_SPLIT_KV", "unknown"),
        ("controls.OMP_NUM_THREADS", "999999999"),
        ("controls.MKL_NUM_THREADS", "0"),
        ("controls.OMP_NUM_THREADS", "4,2"),
        ("engine.dtype", "os.system('x')"),
        ("engine.max_num_seqs", 10**12),
        ("engine.attention_backend", "CPU_ATTN"),
        ("level", "invariant"),
        ("level", 3),
        ("engine.something_new", "x"),
    ],
)
def test_what_no_reader_wrote_or_nothing_here_sets_is_not_put_back(
    name: str, value: FieldValue
) -> None:
    assert align(name, value) is None


def test_threads_are_the_cpus_only() -> None:
    assert align("torch.threads", 8, where=CUDA) is None


def test_an_option_the_default_reaches_is_left_out_again() -> None:
    base = Conditions("vllm", Level.REPEATABLE, {"tensor_parallel_size": 2, "dtype": "float32"})
    assert Override({"tensor_parallel_size": None}).applied(base).options == {"dtype": "float32"}


def test_unknown_settings_are_refused_with_the_nearest() -> None:
    assert settings_named(" alone, float32 ,") == ("alone", "float32")
    assert settings_named("") == ()
    with pytest.raises(UsageError, match=r"did you mean prefix-cache-off\?"):
        settings_named("prefix-cache-of")
    with pytest.raises(UsageError, match="expected alone, "):
        settings_named("zzz")


def test_conditions_are_read_from_the_fingerprint() -> None:
    stamp = Machine().record({"dtype": "float16"}, threads=3)
    found, reasons = conditions_of(stamp, CPU, {"max_num_seqs": "9"})
    assert not reasons
    assert found is not None
    assert found.engine == "fake"
    assert found.options["dtype"] == "float16"
    assert found.options["max_num_seqs"] == "9"
    # What torch computed with, whatever the variable said.
    assert found.environ["OMP_NUM_THREADS"] == "3"
