from __future__ import annotations

import functools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from jupyter_detllm.controls.environ import Modifier, ProcessEvent, control_named
from jupyter_detllm.controls.guard import (
    apply,
    child_environment,
    kernel_environment,
    observed_events,
)
from jupyter_detllm.controls.ledger import (
    MARKER,
    UNKNOWN,
    ControlEntry,
    ControlReport,
    ControlState,
)
from jupyter_detllm.controls.seeding import SEED_VARIABLE
from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.levels import Level
from jupyter_detllm.probes.software import Platform

CPU, CUDA = Platform.CPU, Platform.CUDA


def fake_torch(*, threads: int = 2, cuda: bool = False) -> dict[str, object]:
    torch_cuda = SimpleNamespace(is_initialized=lambda: cuda)
    torch = SimpleNamespace(get_num_threads=lambda: threads, cuda=torch_cuda)
    return {"torch": torch, "torch.cuda": torch_cuda}


def fake_vllm(*, frozen: bool, **values: object) -> dict[str, object]:
    envs = ModuleType("vllm.envs")
    reader = values.__getitem__
    vars(envs)["__getattr__"] = functools.cache(reader) if frozen else (lambda name: reader(name))
    return {**fake_torch(), "vllm": SimpleNamespace(), "vllm.envs": envs}


def run(
    environ: dict[str, str],
    *,
    modules: dict[str, object] | None = None,
    initial: dict[str, str] | None = None,
    level: Level = Level.REPEATABLE,
    platform: Platform = CPU,
    modifiers: tuple[Modifier, ...] = (),
    engine_started: bool = False,
    engine: str = "vllm",
) -> ControlReport:
    return apply(
        level,
        modifiers,
        platform=platform,
        environ=environ,
        modules=modules or {},
        initial={} if initial is None else initial,
        engine_started=engine_started,
        engine=engine,
    )


def entry_of(report: ControlReport, name: str) -> ControlEntry:
    entry = report.entry(name)
    assert entry is not None
    return entry


def state_of(report: ControlReport, name: str) -> ControlState:
    return entry_of(report, name).state


# -- what has happened ---------------------------------------------------------


def test_events_of_a_bare_interpreter() -> None:
    assert observed_events({}) == {ProcessEvent.INTERPRETER_START}


def test_torch_without_and_with_cuda_started() -> None:
    assert observed_events(fake_torch()) == {
        ProcessEvent.INTERPRETER_START,
        ProcessEvent.TORCH_IMPORT,
    }
    assert ProcessEvent.CUDA_START in observed_events(fake_torch(cuda=True))


def test_a_blocked_import_is_no_import() -> None:
    assert observed_events({"torch": None, "vllm": None}) == {ProcessEvent.INTERPRETER_START}


def test_half_imported_torch_is_not_asked_for_cuda() -> None:
    assert ProcessEvent.CUDA_START not in observed_events({"torch": SimpleNamespace()})


def test_an_engine_of_ours_or_of_the_users() -> None:
    assert ProcessEvent.ENGINE_START in observed_events({}, engine_started=True)
    assert ProcessEvent.ENGINE_START not in observed_events(fake_vllm(frozen=False))
    # vLLM freezes its variables when an engine has started, whoever started it.
    assert ProcessEvent.ENGINE_START in observed_events(fake_vllm(frozen=True))


# -- in time -------------------------------------------------------------------


def test_first_call_sets_and_the_second_finds_it_already_there() -> None:
    environ: dict[str, str] = {}
    first = run(environ)
    assert state_of(first, "VLLM_ENABLE_V1_MULTIPROCESSING") is ControlState.SET
    assert environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    after_first = dict(environ)
    second = run(environ)
    assert environ == after_first
    for entry in first.entries:
        expected = ControlState.ALREADY if entry.state is ControlState.SET else entry.state
        assert state_of(second, entry.name) is expected
    assert second.user_set == ()
    assert second.fields() == first.fields()


def test_the_users_own_value_wins_and_is_recorded_as_his() -> None:
    environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    report = run(environ)
    assert environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    entry = entry_of(report, "VLLM_ENABLE_V1_MULTIPROCESSING")
    assert (entry.state, entry.requested, entry.effective) == (ControlState.USER, "0", "1")
    assert report.fields()["controls.VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    assert report.fields()["controls.user_set"] == "VLLM_ENABLE_V1_MULTIPROCESSING"


def test_a_user_who_changes_our_value_afterwards_owns_it() -> None:
    environ: dict[str, str] = {}
    run(environ)
    environ["TORCHDYNAMO_DISABLE"] = "0"
    assert state_of(run(environ), "TORCHDYNAMO_DISABLE") is ControlState.USER


def test_a_child_process_knows_its_parents_settings() -> None:
    environ: dict[str, str] = {}
    run(environ)
    child = dict(environ)
    report = run(child, initial=dict(environ))
    assert state_of(report, "TORCHDYNAMO_DISABLE") is ControlState.ALREADY
    assert report.user_set == ()


def test_a_weaker_level_takes_back_what_it_does_not_ask_for() -> None:
    environ: dict[str, str] = {}
    run(environ, platform=Platform.CUDA)
    assert environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    report = run(environ, platform=Platform.CUDA, level=Level.SEEDED)
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in environ
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in environ[MARKER]
    assert "controls.VLLM_USE_FLASHINFER_SAMPLER" not in report.fields()


def test_taking_back_leaves_the_users_values() -> None:
    environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    report = run(environ, level=Level.SEEDED)
    assert environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert state_of(report, "VLLM_ENABLE_V1_MULTIPROCESSING") is ControlState.USER


def test_another_engine_is_spared_vllms_variables() -> None:
    environ: dict[str, str] = {}
    run(environ, engine="fake")
    assert not [name for name in environ if name.startswith("VLLM_")]
    assert "OMP_NUM_THREADS" in environ


# -- threads: pinned, not chosen ----------------------------------------------


def test_threads_are_pinned_to_what_torch_already_computes_with() -> None:
    environ: dict[str, str] = {}
    entry = entry_of(run(environ, modules=fake_torch(threads=7)), "OMP_NUM_THREADS")
    assert (entry.state, entry.effective) == (ControlState.ALREADY, "7")
    assert "OMP_NUM_THREADS" not in environ  # nobody would read it any more


def test_threads_follow_mkls_own_variable() -> None:
    environ = {"MKL_NUM_THREADS": "3"}
    report = run(environ)
    assert environ["OMP_NUM_THREADS"] == "3"
    assert state_of(report, "MKL_NUM_THREADS") is ControlState.USER


def test_threads_set_after_torch_are_late_and_the_real_count_is_recorded() -> None:
    report = run({"OMP_NUM_THREADS": "9"}, modules=fake_torch(threads=2))
    entry = entry_of(report, "OMP_NUM_THREADS")
    assert (entry.state, entry.effective, entry.by_user) == (ControlState.LATE, "2", True)


# -- too late ------------------------------------------------------------------


def test_a_late_control_is_named_with_the_way_out_and_not_written() -> None:
    environ: dict[str, str] = {}
    report = run(environ, modules=fake_vllm(frozen=False))
    entry = entry_of(report, "TORCHDYNAMO_DISABLE")
    assert entry.state is ControlState.LATE
    assert entry.effective is None
    assert "vllm is imported" in entry.reason
    assert "restart the kernel" in entry.reason
    assert "TORCHDYNAMO_DISABLE" not in environ
    assert "TORCHDYNAMO_DISABLE" in report.late
    # What precedes the engine only is still in time.
    assert state_of(report, "VLLM_ENABLE_V1_MULTIPROCESSING") is ControlState.SET


def test_cuda_controls_after_cuda_has_started() -> None:
    environ: dict[str, str] = {}
    modules = fake_torch(cuda=True)
    report = run(environ, modules=modules, platform=CUDA)
    assert "CUBLAS_WORKSPACE_CONFIG" in report.late
    assert "CUBLAS_WORKSPACE_CONFIG" not in environ
    assert report.fields()["controls.CUBLAS_WORKSPACE_CONFIG"] is None


def test_cuda_controls_before_cuda_starts_though_torch_is_there() -> None:
    environ: dict[str, str] = {}
    report = run(environ, modules=fake_torch(), platform=CUDA)
    assert environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "CUBLAS_WORKSPACE_CONFIG" not in report.late


def test_what_the_user_set_before_python_started_was_in_time() -> None:
    value = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    report = run(dict(value), modules=fake_torch(cuda=True), initial=value, platform=CUDA)
    entry = entry_of(report, "CUBLAS_WORKSPACE_CONFIG")
    assert (entry.state, entry.effective) == (ControlState.USER, ":16:8")


def test_what_may_have_been_set_too_late_is_unknown_and_not_claimed() -> None:
    environ = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    report = run(environ, modules=fake_torch(cuda=True), platform=CUDA)
    entry = entry_of(report, "CUBLAS_WORKSPACE_CONFIG")
    assert (entry.state, entry.effective, entry.by_user) == (ControlState.LATE, UNKNOWN, True)


def test_what_we_set_in_time_stays_in_force_after_the_event() -> None:
    environ: dict[str, str] = {}
    run(environ, platform=CUDA)
    report = run(environ, modules=fake_torch(cuda=True), platform=CUDA)
    assert state_of(report, "CUBLAS_WORKSPACE_CONFIG") is ControlState.ALREADY


def test_a_running_engine_tells_what_it_froze() -> None:
    modules = fake_vllm(frozen=True, VLLM_ENABLE_V1_MULTIPROCESSING=True)
    report = run({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, modules=modules)
    entry = entry_of(report, "VLLM_ENABLE_V1_MULTIPROCESSING")
    assert (entry.state, entry.effective) == (ControlState.LATE, "1")
    in_force = fake_vllm(frozen=True, VLLM_ENABLE_V1_MULTIPROCESSING=False)
    ours: dict[str, str] = {}
    run(ours)
    report = run(ours, modules=in_force, engine_started=True)
    assert state_of(report, "VLLM_ENABLE_V1_MULTIPROCESSING") is ControlState.ALREADY


def test_a_modifier_that_is_dropped_after_its_event_is_still_in_force() -> None:
    environ: dict[str, str] = {}
    run(environ, platform=CUDA, modifiers=(Modifier.LAUNCH_BLOCKING,))
    assert environ["CUDA_LAUNCH_BLOCKING"] == "1"
    report = run(environ, modules=fake_torch(cuda=True), platform=CUDA)
    entry = entry_of(report, "CUDA_LAUNCH_BLOCKING")
    assert (entry.state, entry.requested, entry.effective) == (ControlState.LATE, None, "1")


def test_the_hash_seed_of_this_interpreter_cannot_be_set_any_more() -> None:
    environ: dict[str, str] = {}
    report = run(environ)
    assert "PYTHONHASHSEED" not in environ
    entry = entry_of(report, "PYTHONHASHSEED")
    if sys.flags.hash_randomization:
        assert entry.state is ControlState.LATE
        assert "`jupyter detllm kernel install`" in entry.reason
    else:
        assert entry.effective == "0"


# -- what is never set ---------------------------------------------------------


def test_variables_without_effect_are_named_only_when_the_user_set_them() -> None:
    environ = {"QUANTIZATION_DETERMINISTIC": "1", "VLLM_ATTENTION_BACKEND": "FLASH_ATTENTION"}
    report = run(environ)
    named = {row.name for row in report.no_effect}
    assert named == {"QUANTIZATION_DETERMINISTIC", "VLLM_ATTENTION_BACKEND"}
    assert "FLASH_ATTN" in next(r.instead for r in report.no_effect if r.instead)
    assert not [name for name in report.fields() if "QUANTIZATION" in name or "BACKEND" in name]
    assert run({}).no_effect == ()


def test_the_users_invariant_flag_on_cpu_is_warned_about() -> None:
    report = run({"VLLM_BATCH_INVARIANT": "1"})
    entry = entry_of(report, "VLLM_BATCH_INVARIANT")
    assert entry.state is ControlState.NOT_APPLICABLE
    assert entry.by_user
    assert "unset it" in entry.reason


def test_variables_that_change_kernels_are_recorded_as_the_users() -> None:
    report = run({"ONEDNN_MAX_CPU_ISA": "AVX2"})
    assert report.fields()["controls.ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert "ONEDNN_MAX_CPU_ISA" in report.user_set


def test_a_secret_in_a_recorded_variable_is_not_recorded() -> None:
    report = run({"NCCL_ALGO": "password=hunter2", "ONEDNN_MAX_CPU_ISA": "hf_" + "a" * 30})
    assert "hunter2" not in str(report)
    assert "aaaa" not in str(report.fields())


# -- levels, fields, kernelspecs ----------------------------------------------


def test_fields_have_rows_in_the_fingerprint() -> None:
    report = run({"NCCL_ALGO": "ring"}, modules=fake_vllm(frozen=False))
    fingerprint = Fingerprint.build(report.fields())
    assert fingerprint.numerics["controls.NCCL_ALGO"] == "ring"
    assert "TORCHDYNAMO_DISABLE" in str(fingerprint.informational["controls.late"])


def test_a_kernelspec_sets_what_an_interpreter_cannot() -> None:
    environ = kernel_environment(Level.REPEATABLE, platform=CPU)
    assert environ["PYTHONHASHSEED"] == control_named("PYTHONHASHSEED").value
    assert set(environ[MARKER].split()) == {
        f"{name}={value}" for name, value in environ.items() if name != MARKER
    }
    report = run(dict(environ), initial=environ)
    assert report.user_set == ()


# -- several ranks -------------------------------------------------------------


def of_ranks(environ: dict[str, str], ranks: int, **process: Any) -> ControlReport:
    return apply(
        Level.SEEDED,
        platform=process.pop("platform", Platform.CUDA),
        environ=environ,
        modules=process.pop("modules", {}),
        initial={},
        ranks=ranks,
        **process,
    )


@pytest.mark.parametrize("name", ["NCCL_NVLS_ENABLE", "VLLM_ALLREDUCE_USE_SYMM_MEM"])
def test_what_only_several_gpus_read_is_set_for_them_only(name: str) -> None:
    environ: dict[str, str] = {}
    one = entry_of(of_ranks(environ, 1), name)
    assert (one.state, environ.get(name)) == (ControlState.NOT_APPLICABLE, None)
    assert state_of(of_ranks(environ, 2), name) is ControlState.SET
    assert environ[name] == "0"
    of_ranks(environ, 1)
    assert name not in environ, "taken back for an engine of one GPU"
    on_cpu = of_ranks(environ, 2, platform=Platform.CPU)
    assert state_of(on_cpu, name) is ControlState.NOT_APPLICABLE
    mine = {name: "1"}
    assert "several GPUs" in entry_of(of_ranks(mine, 1), name).reason
    assert state_of(of_ranks(mine, 2), name) is ControlState.USER
    assert mine[name] == "1"


def test_ranks_of_a_second_engine_read_what_the_first_never_did() -> None:
    environ: dict[str, str] = {}
    report = of_ranks(
        environ,
        2,
        modules=fake_vllm(
            frozen=True, VLLM_ENABLE_V1_MULTIPROCESSING=False, VLLM_ALLREDUCE_USE_SYMM_MEM=True
        ),
    )
    assert ProcessEvent.ENGINE_START in report.events, "an engine that has been shut down"
    assert environ["NCCL_NVLS_ENABLE"] == "0"
    running = of_ranks({}, 2, engine_started=True)
    assert state_of(running, "NCCL_NVLS_ENABLE") is ControlState.LATE


def test_a_child_gets_the_users_variables_without_ours() -> None:
    environ = {
        "PATH": "/bin",
        "MKL_CBWR": "COMPATIBLE",
        "OMP_NUM_THREADS": "2",
        MARKER: "OMP_NUM_THREADS=2 VLLM_ENABLE_V1_MULTIPROCESSING=0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        SEED_VARIABLE: "7",
        "LD_PRELOAD": "/x/libtcmalloc.so",
    }
    changes, controls = {"MKL_CBWR": None, "A": "1"}, {"PYTHONHASHSEED": "0", "PATH": "/other"}
    found = child_environment(changes, controls=controls, environ=environ, initial={"PATH": "/bin"})
    assert found == {"PATH": "/bin", "A": "1", "PYTHONHASHSEED": "0"}
    preloaded = {"LD_PRELOAD": "/x/libtcmalloc.so"}
    kept = child_environment(changes, controls={}, environ=environ, initial=preloaded)
    assert kept["LD_PRELOAD"] == "/x/libtcmalloc.so"


def test_a_child_without_controls_of_its_own_gets_this_process_as_it_is() -> None:
    environ = {"A": "1", "B": "2", MARKER: "A=1"}
    assert child_environment({"B": None}, environ=environ) == {"A": "1", MARKER: "A=1"}
