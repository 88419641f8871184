"""The Hopper method: conditions, what is forced on vLLM, and that it fails closed."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from jupyter_detllm.errors import InvarianceError, UsageError
from jupyter_detllm.invariance import _hopper_patch as patching
from jupyter_detllm.invariance import _hopper_products, candidates, first_choice
from jupyter_detllm.invariance._plugin import register
from jupyter_detllm.invariance.base import METHOD_VARIABLE, Host, ModelFacts
from jupyter_detllm.invariance.hopper import CAPTURE_SIZES, FP8_ROWS, HopperOneKernel, VLLMFlag
from jupyter_detllm.probes.software import Platform

H200 = Host(Platform.CUDA, vllm="0.25.1", torch="2.11.0", capability="9.0")


def attention_module() -> Any:
    """Return what stands for vLLM's attention backend: it answers with what it was given."""

    def flash_attn_varlen_func(
        q: Any, max_seqlen_q: int = 0, num_splits: int = 0, **rest: Any
    ) -> tuple[int, int]:
        return max_seqlen_q, num_splits

    def get_scheduler_metadata(
        headdim: int, max_seqlen_q: int = 0, num_splits: int = 0
    ) -> tuple[int, int]:
        return max_seqlen_q, num_splits

    class FlashAttentionMetadataBuilder:
        supports_update_block_table = True

        def __init__(self, headdim: int, heads: int, kv_heads: int) -> None:
            self.headdim, self.num_heads_q, self.num_heads_kv = headdim, heads, kv_heads

        def build(
            self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
        ) -> tuple[Any, bool]:
            return common_attn_metadata, fast_build

    module: Any = types.ModuleType(patching.ATTENTION_MODULE)
    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.get_scheduler_metadata = get_scheduler_metadata
    module.FlashAttentionMetadataBuilder = FlashAttentionMetadataBuilder
    return module


def gate_init(self: Any) -> None:
    self.allow_fast, self.bias = True, True


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put the stand-in where vLLM's module would be, and leave torch's flags alone."""
    found = attention_module()
    monkeypatch.setitem(sys.modules, patching.ATTENTION_MODULE, found)
    layers: Any = types.ModuleType(patching.LAYER_MODULE)
    layers.default_unquantized_gemm = lambda layer, x, weight, bias=None: x
    monkeypatch.setitem(sys.modules, patching.LAYER_MODULE, layers)
    gates: Any = types.ModuleType(patching.GATE_MODULE)
    gates.GateLinear = type("GateLinear", (), {"__init__": gate_init})
    monkeypatch.setitem(sys.modules, patching.GATE_MODULE, gates)
    monkeypatch.setattr(patching, "register_product", lambda: None)
    monkeypatch.setattr(patching.Patch, "_forbid_split_k", lambda self: None)
    return found


@dataclass
class Metadata:
    """The fields of vLLM's attention metadata that are read or replaced."""

    query_start_loc: Any
    query_start_loc_cpu: Any
    seq_lens: Any
    block_table_tensor: Any
    num_reqs: int
    max_query_len: int

    def replace(self, **fields: Any) -> Metadata:
        return replace(self, **fields)


def metadata(lengths: list[int], context: list[int]) -> Metadata:
    """Return the metadata of queries of `lengths` that end at `context`."""
    torch = pytest.importorskip("torch")
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    table = torch.arange(len(lengths) * 2).reshape(-1, 2).int()
    return Metadata(starts, starts, torch.tensor(context).int(), table, len(lengths), max(lengths))


class Array:
    """A query tensor as far as the wrapper looks."""

    def __init__(self, head_size: int, heads: int = 8) -> None:
        self.shape = (5, heads, head_size)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"platform": Platform.CPU}, "GPUs"),
        ({"capability": "8.0"}, "capability 9.0"),
        ({"capability": "9.0, 10.0"}, "capability 9.0"),
        ({"capability": ""}, "unknown"),
        ({"options": {"quantization": "awq"}}, "does not cover awq"),
        ({"options": {"--enable-lora": True}}, "enable_lora"),
        ({"options": {"enforce_eager": True, "quantization": "fp8"}}, "enforce_eager"),
        ({"model": ModelFacts(quantization="gptq", weight_bits=4)}, "does not cover gptq"),
        ({"model": ModelFacts(quantization="mxfp4")}, "does not cover mxfp4"),
        ({"model": ModelFacts(quantization="compressed-tensors", weight_bits=4)}, "compressed"),
        ({"model": ModelFacts(latent=True)}, "MLA"),
        ({"model": ModelFacts(head_size=512)}, "heads of 512"),
    ],
)
def test_it_is_refused_where_it_is_not_proven(change: dict[str, Any], reason: str) -> None:
    assert HopperOneKernel().refusal(H200) == ""
    assert reason in HopperOneKernel().refusal(replace(H200, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"vllm": "0.33.0"},
        {"options": {"enforce_eager": True}},
        {"options": {"quantization": "fp8"}},
        {"model": ModelFacts(experts=32)},
        {"model": ModelFacts(quantization="compressed-tensors", weight_bits=8)},
    ],
)
def test_hooks_decide_and_no_version_does(change: dict[str, Any]) -> None:
    assert HopperOneKernel().refusal(replace(H200, **change)) == ""


def test_the_flag_is_chosen_for_a_model_before_vllm_is_imported() -> None:
    latent = replace(H200, model=ModelFacts(latent=True))
    assert first_choice(latent).environ() == {"VLLM_BATCH_INVARIANT": "1"}


def test_fp8_is_padded_by_graphs_and_nothing_else_is() -> None:
    fp8 = first_choice(replace(H200, model=ModelFacts(quantization="fp8")))
    graphs = fp8.arguments({})["compilation_config"]
    assert graphs == {
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_capture_sizes": list(CAPTURE_SIZES),
    }
    assert (min(CAPTURE_SIZES), max(CAPTURE_SIZES)) == (FP8_ROWS, 512)
    own = fp8.arguments({"compilation_config": '{"mode": 3}'})["compilation_config"]
    assert own["mode"] == 3  # type: ignore[index]
    assert "compilation_config" not in first_choice(H200).arguments({})


def test_it_comes_first_on_hopper_and_the_flag_elsewhere() -> None:
    assert first_choice(H200).name == "hopper-one-kernel"
    assert first_choice(H200).environ() == {}, "vLLM's slow flag is not needed"
    ampere = first_choice(replace(H200, capability="8.0"))
    assert (ampere.name, ampere.environ()) == ("vllm-flag", {"VLLM_BATCH_INVARIANT": "1"})
    assert first_choice(replace(H200, capability="7.5")).name == "sequential"
    last = candidates(H200)[-1]
    assert last.usable, "one sequence at a time is left in any case"


def test_cache_and_scheduling_are_vllms_and_the_code_has_a_key_of_its_own() -> None:
    arguments = HopperOneKernel().arguments({"enable_prefix_caching": False})
    assert arguments == {
        "attention_backend": "FLASH_ATTN",
        "additional_config": {"invariance": "hopper-one-kernel"},
        "enable_prefix_caching": False,
        "async_scheduling": None,
    }


@pytest.mark.parametrize(
    "chosen",
    [
        {"attention_backend": "TRITON_ATTN"},
        {"compilation_config": {"cudagraph_capture_sizes": [1, 64]}},
        {"compilation_config": '{"cudagraph_mode": "FULL"}'},
    ],
)
def test_options_that_contradict_are_refused(chosen: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="invariant"):
        HopperOneKernel(FP8_ROWS).arguments(chosen)


def test_a_sliding_window_takes_the_kernel_with_absolute_tiles(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops: Any = types.ModuleType(patching.WINDOW_MODULE)
    ops.unified_attention = lambda **given: seen.update(given)
    monkeypatch.setitem(sys.modules, patching.WINDOW_MODULE, ops)
    seen: dict[str, Any] = {}
    names = "k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal softcap"
    given: dict[str, Any] = dict.fromkeys(names.split(), 1)
    patching.Patch().apply()
    given |= {"q": Array(64), "k": Array(64)}
    call = functools.partial(module.flash_attn_varlen_func, block_table=3, **given)
    assert call(window_size=[-1, -1], num_splits=7) == (1, 1)
    assert not seen
    assert call(window_size=[511, 0], num_splits=7, s_aux=5) == 1
    assert (seen["window_size"], seen["sinks"], seen["q_descale"]) == ([511, 0], 5, None)
    assert not {"num_splits", "seq_threshold_3D"} & set(seen), "no room for segments"


def test_a_sliding_window_takes_flash_attention_where_its_tiles_can_be_aligned(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = module.flash_attn_varlen_func
    monkeypatch.setattr(patching, "aligned", lambda *given, **named: (given, sorted(named)))
    patching.Patch().apply()
    names = {"q": Array(128, heads=32), "k": Array(128, heads=8), "block_table": 3}
    found = module.flash_attn_varlen_func(window_size=[511, 0], **names)
    assert found == ((hook, 32), ["block_table", "k", "q", "window_size"])


def test_unquantised_layers_and_gates_compute_with_one_operator(module: Any) -> None:
    layers, gates = sys.modules[patching.LAYER_MODULE], sys.modules[patching.GATE_MODULE]
    own = layers.default_unquantized_gemm
    patch = patching.Patch()
    patch.apply()
    assert layers.default_unquantized_gemm is _hopper_products.gemm
    gate = gates.GateLinear()
    assert (gate.allow_fast, gate.bias) == (False, True)
    patch.undo()
    assert layers.default_unquantized_gemm is own
    assert gates.GateLinear().allow_fast


@pytest.mark.parametrize(
    ("rows", "columns", "tile"),
    [
        (1, 896, (16, 64)),
        (16, 8192, (16, 64)),
        (1, 32000, None),
        (24, 4096, (32, 64)),
        (32, 4096, None),
        (48, 2048, (64, 16)),
        (64, 2048, None),
        (191, 896, (64, 16)),
        (192, 896, None),
        (4095, 8, (64, 16)),
        (4096, 8, None),
    ],
)
def test_the_tile_of_a_product(rows: int, columns: int, tile: tuple[int, int] | None) -> None:
    found = _hopper_products.tile_for(rows, columns)
    assert (found and (found.rows, found.columns)) == tile


def test_no_batch_is_split_and_small_heads_take_one_kernel(module: Any) -> None:
    patch = patching.Patch()
    patch.apply()
    attention, schedule = module.flash_attn_varlen_func, module.get_scheduler_metadata
    assert attention(q=Array(128), max_seqlen_q=1, num_splits=0) == (1, 1)
    assert attention(q=Array(32), max_seqlen_q=1, num_splits=32) == (2, 1)
    assert attention(q=Array(32), max_seqlen_q=300, num_splits=0) == (300, 1)
    assert schedule(headdim=128, max_seqlen_q=7, num_splits=0) == (7, 1)
    assert schedule(headdim=56, max_seqlen_q=1, num_splits=0) == (2, 1)
    patch.undo()
    assert module.flash_attn_varlen_func(q=Array(32), max_seqlen_q=1, num_splits=32) == (1, 32)
    assert module.FlashAttentionMetadataBuilder.supports_update_block_table


def test_long_queries_of_heads_of_64_stay_in_the_narrow_tile(module: Any) -> None:
    patching.Patch().apply()
    builder = module.FlashAttentionMetadataBuilder(64, 32, 8)
    given = metadata([1, 39, 1, 32], [10, 39, 7, 100])
    built, fast = builder.build(0, given)
    assert built.query_start_loc.tolist() == [0, 1, 17, 33, 40, 41, 57, 73]
    assert built.query_start_loc_cpu.tolist() == built.query_start_loc.tolist()
    assert built.seq_lens.tolist() == [10, 16, 32, 39, 7, 84, 100], "each ends where it ends"
    assert built.block_table_tensor[:, 0].tolist() == [0, 2, 2, 2, 4, 6, 6]
    assert (built.num_reqs, built.max_query_len, fast) == (7, 16, True)
    assert not builder.supports_update_block_table


@pytest.mark.parametrize(
    ("head_size", "heads", "kv_heads"), [(128, 32, 8), (64, 32, 8), (96, 8, 8)]
)
def test_what_needs_no_change_is_passed_on(
    module: Any, head_size: int, heads: int, kv_heads: int
) -> None:
    patching.Patch().apply()
    builder = module.FlashAttentionMetadataBuilder(head_size, heads, kv_heads)
    longest = 16 if head_size == 64 else 300
    given = metadata([1, longest], [10, longest])
    built, fast = builder.build(0, given)
    assert built is given
    assert fast is False


def test_the_longest_narrow_query_follows_the_heads() -> None:
    assert [patching.narrow_rows(64, group) for group in (1, 3, 4, 7, 64, 71)] == [
        64, 21, 16, 9, 1, 0,
    ]  # fmt: skip
    assert patching.narrow_rows(128, 4) == 0


@pytest.mark.parametrize("missing", ["flash_attn_varlen_func", "get_scheduler_metadata"])
def test_a_missing_hook_is_named_and_nothing_is_changed(module: Any, missing: str) -> None:
    before = dict(vars(module))
    delattr(module, missing)
    with pytest.raises(InvarianceError, match=missing):
        patching.Patch().apply()
    assert {**vars(module), missing: before[missing]} == before


def test_a_builder_of_another_form_is_named(module: Any) -> None:
    module.FlashAttentionMetadataBuilder.build = lambda self, metadata: metadata
    with pytest.raises(InvarianceError, match=r"build takes no common_prefix_len and no"):
        patching.Patch().apply()


def test_a_process_is_patched_once(module: Any) -> None:
    first, second = patching.Patch(), patching.Patch()
    first.apply()
    wrapped = module.flash_attn_varlen_func
    second.apply()
    assert module.flash_attn_varlen_func is wrapped
    second.undo()
    assert module.flash_attn_varlen_func is wrapped, "what another holds is not undone"


def test_workers_are_patched_where_the_variable_says_so(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = module.flash_attn_varlen_func
    monkeypatch.delenv(METHOD_VARIABLE, raising=False)
    register()
    assert module.flash_attn_varlen_func is original
    monkeypatch.setenv(METHOD_VARIABLE, HopperOneKernel.name)
    register()
    assert module.flash_attn_varlen_func is not original
    assert HopperOneKernel.worker_environ == {METHOD_VARIABLE: HopperOneKernel.name}


def engine(**changes: Any) -> Any:
    """Return a live engine as far as `install` looks."""
    config = types.SimpleNamespace(
        compilation_config=types.SimpleNamespace(
            cudagraph_capture_sizes=changes.get("sizes", [64, 128]),
            pass_config=types.SimpleNamespace(fuse_allreduce_rms=changes.get("fused", False)),
        ),
        model_config=types.SimpleNamespace(
            quantization=changes.get("quantization"), is_moe=changes.get("is_moe", False)
        ),
        cache_config=types.SimpleNamespace(cache_dtype=changes.get("cache", "auto")),
        attention_config=types.SimpleNamespace(
            backend=types.SimpleNamespace(name=changes.get("backend", "FLASH_ATTN"))
        ),
    )
    executor = changes.get("executor", types.SimpleNamespace(driver_worker=object()))
    return types.SimpleNamespace(
        llm_engine=types.SimpleNamespace(vllm_config=config, model_executor=executor)
    )


@pytest.fixture
def patched(module: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Patch the stand-in, as a process of the engine's does."""
    monkeypatch.setattr(patching, "split_k_allowed", lambda: "")
    patch = patching.Patch()
    patch.apply()
    yield module
    patch.undo()


class Executor:
    """An executor with a rank for each of `answers`; None answers with the truth."""

    def __init__(self, *answers: str | None) -> None:
        self.answers = self.workers = answers

    def collective_rpc(self, question: Any, timeout: float, args: tuple[Any, ...]) -> list[Any]:
        return [question(object(), *args) if each is None else each for each in self.answers]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization": "awq"}, "quantised"),
        ({"cache": "fp8"}, "8-bit KV cache"),
        ({"backend": "FLASHINFER"}, "other than FLASH_ATTN"),
        ({"executor": Executor(None, "build is vLLM's own")}, "in force .rank 1: build is vLLM"),
        ({"executor": None}, "cannot be queried"),
        ({"executor": Executor(None, None), "fused": True}, "a fused sum over ranks"),
    ],
)
def test_an_engine_that_came_out_otherwise_is_refused(
    changes: dict[str, Any], words: str, patched: Any
) -> None:
    HopperOneKernel().install(engine(executor=Executor(None, None)))
    HopperOneKernel().install(engine())
    with pytest.raises(InvarianceError, match=words):
        HopperOneKernel().install(engine(**changes))
    with pytest.raises(InvarianceError, match="fewer than 72"):
        HopperOneKernel(FP8_ROWS).install(engine(sizes=[64, 72]))


def test_the_flag_is_believed_only_when_vllm_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm: Any = types.ModuleType("vllm")
    vllm.envs = types.SimpleNamespace(VLLM_BATCH_INVARIANT=False)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    with pytest.raises(InvarianceError, match="VLLM_BATCH_INVARIANT"), VLLMFlag().before_start():
        pass
    vllm.envs.VLLM_BATCH_INVARIANT = True
    with VLLMFlag().before_start():
        assert VLLMFlag().arguments({}) == {"attention_backend": "TRITON_ATTN"}
    VLLMFlag().install(engine(executor=Executor(None, None)))
    with pytest.raises(InvarianceError, match="rank 0: it was not"):
        VLLMFlag().install(engine(executor=Executor("it was not", None)))
    vllm.envs.VLLM_BATCH_INVARIANT = False
    with pytest.raises(InvarianceError, match="rank 1: VLLM_BATCH_INVARIANT"):
        VLLMFlag().install(engine(executor=Executor("", None)))


@pytest.mark.parametrize(
    "name", ["flash_attn_varlen_func", "get_scheduler_metadata", "FlashAttentionMetadataBuilder"]
)
def test_a_rank_without_part_of_the_patch_says_which(
    name: str, patched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert patching.lacking() == ""
    monkeypatch.setattr(patched, name, getattr(attention_module(), name))
    assert name in patching.lacking()


def test_a_rank_whose_products_may_split_k_says_so() -> None:
    torch = pytest.importorskip("torch")
    flag = "allow_bf16_reduced_precision_reduction"
    before = getattr(torch.backends.cuda.matmul, flag)
    try:
        setattr(torch.backends.cuda.matmul, flag, True)
        assert flag in patching.split_k_allowed()
    finally:
        setattr(torch.backends.cuda.matmul, flag, before)


def test_sums_over_ranks_are_not_fused_by_the_number_of_tokens() -> None:
    method = HopperOneKernel()
    assert "compilation_config" not in method.arguments({})
    two = method.arguments({"tensor_parallel_size": 2})["compilation_config"]
    assert two["pass_config"] == {  # type: ignore[index]
        "fuse_allreduce_rms": False,
        "enable_sp": False,
        "fuse_gemm_comms": False,
    }
    wish = {"tensor_parallel_size": 2, "compilation_config": {"pass_config": {"enable_sp": True}}}
    with pytest.raises(UsageError, match="enable_sp off"):
        method.arguments(wish)


def test_with_more_than_two_ranks_the_order_of_a_sum_may_follow_the_batch() -> None:
    two, four = ({"tensor_parallel_size": n} for n in (2, 4))
    assert not HopperOneKernel().refusal(replace(H200, options=two))
    assert "2 GPUs at most, here it is 4" in HopperOneKernel().refusal(replace(H200, options=four))
    stages = replace(H200, options={"pipeline_parallel_size": "2"})
    assert "pipeline_parallel_size" in HopperOneKernel().refusal(stages)
