"""The CPU methods: when they are for a host, what they wrap, and that they let nothing out."""

from __future__ import annotations

import os
import random
import sys
from dataclasses import asdict, dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from jupyter_detllm.errors import InvarianceError, UsageError
from jupyter_detllm.invariance import METHODS, candidates, cpu, first_choice, method_named
from jupyter_detllm.invariance.base import Host, Method, prepared
from jupyter_detllm.invariance.cpu import FixedOrder, FixedTiles
from jupyter_detllm.invariance.cpu_kernels import (
    RowGroup,
    in_group,
    in_tiles,
    measure_group,
    tile_tokens,
)
from jupyter_detllm.models.cache import write_json
from jupyter_detllm.probes.software import Platform

EPYC = Host(Platform.CPU, vllm="0.32.0", cpu_flags=frozenset({"avx2", "avx512f", "avx512_bf16"}))
XEON = replace(EPYC, cpu_flags=EPYC.cpu_flags | {"amx_bf16", "amx_tile"})
LAPTOP = replace(EPYC, cpu_flags=frozenset({"avx2", "fma"}))
CUDA = Host(Platform.CUDA, vllm="0.25.1", capability="9.0")
CPU_METHODS = (FixedOrder(), FixedTiles())


# --- conditions ----------------------------------------------------------------------


@pytest.mark.parametrize("host", [EPYC, XEON])
@pytest.mark.parametrize("limit", ["", "ALL", "AVX512_CORE_BF16", "AVX512_CORE"])
def test_a_processor_with_wide_vectors_has_the_method_that_measures(host: Host, limit: str) -> None:
    assert first_choice(replace(host, isa_limit=limit)).name == "cpu-fixed-tiles"


def test_a_processor_with_avx2_or_limited_to_it_has_a_product_of_its_own() -> None:
    wide = replace(XEON, cpu_flags=XEON.cpu_flags | {"fma"})
    assert first_choice(LAPTOP).name == "cpu-fixed-order"
    assert first_choice(replace(wide, isa_limit="AVX2")).name == "cpu-fixed-order"
    assert first_choice(replace(LAPTOP, cpu_flags=frozenset({"avx2"}))).name == "cpu-fixed-tiles"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"enforce_eager": False}, "compiled"),
        ({"--enforce-eager": "false"}, "compiled"),
        ({"quantization": "awq"}, "quantization"),
        ({"enable_lora": True}, "enable_lora"),
        ({"speculative_config": "{}"}, "speculative_config"),
        ({"tensor_parallel_size": "2"}, "other processes"),
        ({"pipeline_parallel_size": 2}, "other processes"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
    ],
)
def test_what_a_method_does_not_cover_is_refused_by_name(options: dict[str, Any], why: str) -> None:
    for host in (EPYC, XEON, LAPTOP):
        found = candidates(replace(host, options=options))
        assert [item.method.name for item in found if item.usable] == ["sequential"]
        first = next(item.method for item in candidates(host) if item.usable)
        (reason,) = [item.refusal for item in found if item.method is first]
        assert why in reason


@pytest.mark.parametrize("options", [{"enable_lora": "false"}, {"quantization": None}, {}])
def test_an_option_that_is_off_is_no_reason(options: dict[str, Any]) -> None:
    assert first_choice(replace(EPYC, options=options)).name == "cpu-fixed-tiles"


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "0.3", ""])
def test_another_vllm_has_no_cpu_method(version: str) -> None:
    assert first_choice(replace(EPYC, vllm=version)).name == "sequential"


def test_no_cpu_method_is_for_cuda() -> None:
    assert all("CPU" in method.refusal(CUDA) for method in CPU_METHODS)


def test_names_are_unique_and_found() -> None:
    names = [method.name for method in METHODS]
    assert len(set(names)) == len(names)
    assert [method_named(name).name for name in names] == names
    with pytest.raises(InvarianceError, match="there is no invariance method 'x'"):
        method_named("x")


def test_every_variable_is_a_row_of_the_controls_with_its_value() -> None:
    from jupyter_detllm.controls.environ import control_named

    for method in METHODS:
        for name, value in method.environ().items():
            assert control_named(name).value == value
            assert control_named(name).of_a_method


def test_an_option_that_contradicts_is_refused_in_one_line() -> None:
    for method in CPU_METHODS:
        assert method.arguments({}) == {"enforce_eager": True}
        with pytest.raises(UsageError, match="enforce_eager is off") as caught:
            method.arguments({"enforce_eager": False})
        assert "\n" not in str(caught.value)


def test_every_method_says_what_it_does() -> None:
    for method in METHODS:
        assert method.changes


def test_workers_variables_are_there_while_it_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DETLLM_TEST_OLD", "before")
    monkeypatch.delenv("DETLLM_TEST_NEW", raising=False)

    class WithWorkers(Method):
        worker_environ: ClassVar = {"DETLLM_TEST_OLD": "during", "DETLLM_TEST_NEW": "1"}

    def fail() -> None:
        with prepared(WithWorkers()):
            assert os.environ["DETLLM_TEST_OLD"] == "during"
            assert os.environ["DETLLM_TEST_NEW"] == "1"
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert os.environ["DETLLM_TEST_OLD"] == "before"
    assert "DETLLM_TEST_NEW" not in os.environ


# --- the hook ------------------------------------------------------------------------


class UnquantizedLinearMethod:
    pass


class AWQLinearMethod:
    pass


class Parameter(SimpleNamespace):
    pass


class Layer:
    """A module as the method sees one."""

    weight = None

    def __init__(self, *, linear: Any = None, method: Any = None, ndim: int = 0) -> None:
        if linear is not None:
            self.cpu_linear = linear
            self.input_size_per_partition, self.output_size_per_partition = 64, 32
        if method is not None:
            self.quant_method = method
        self._ndim = ndim

    def parameters(self, recurse: bool) -> list[Parameter]:
        assert recurse is False
        return [Parameter(ndim=self._ndim)] if self._ndim else []


class MoELayer(Layer):
    pass


class CPUAttentionMetadataBuilder:
    """What vLLM calls to prepare a step's attention."""

    isa, num_heads, num_kv_heads, kv_cache_dtype = "vec", 8, 2, "auto"
    is_cross_attention = is_encoder_only_attention = False

    def __init__(self, **changed: Any) -> None:
        self.__dict__.update(changed)

    def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
        return common


class MambaBuilder(CPUAttentionMetadataBuilder):
    pass


def plain(x: Any, weight: Any, bias: Any) -> Any:
    return x


class Model:
    def __init__(self, **modules: Layer) -> None:
        self.layers = modules

    def named_modules(self) -> Any:
        return [("", Layer()), *self.layers.items()]

    def modules(self) -> Any:
        return self.layers.values()

    def parameters(self) -> Any:
        return [SimpleNamespace(dtype="bfloat16", is_floating_point=lambda: True)]


def llm_of(
    model: Model, *builders: Any, eager: bool = True, in_process: bool = True, mla: bool = False
) -> Any:
    config = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=eager, use_mla=mla))
    group = SimpleNamespace(
        layer_names=["model.layers.0.attn"],
        metadata_builders=list(builders or (CPUAttentionMetadataBuilder(),)),
    )
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(attn_groups=[[group]]), vllm_config=config
    )
    engine = SimpleNamespace(
        vllm_config=config,
        engine_core=SimpleNamespace(engine_core=object() if in_process else None),
        model_executor=SimpleNamespace(driver_worker=worker),
    )
    return SimpleNamespace(
        llm_engine=engine, apply_model=lambda change: [change(model)], group=group
    )


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("vllm")
    module.__dict__.update(__version__="0.32.0", envs=SimpleNamespace(VLLM_CPU_ATTN_SPLIT_KV=False))
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(cpu, "_group_of", lambda shape, call: RowGroup(least=2))
    return module


def covered() -> Model:
    return Model(
        qkv=Layer(linear=plain, method=UnquantizedLinearMethod()),
        head=Layer(linear=plain, method=UnquantizedLinearMethod()),
        norm=Layer(ndim=1),
    )


def test_every_layer_and_builder_is_wrapped_once_and_given_back() -> None:
    model = covered()
    llm = llm_of(model)
    builder = llm.group.metadata_builders[0]
    FixedTiles().install(llm)
    wrapped = model.layers["qkv"].cpu_linear
    assert wrapped is not plain
    assert "build" in vars(builder)
    FixedTiles().install(llm)  # again: the layer's own function is wrapped, not the wrapper
    assert model.layers["qkv"]._detllm_cpu_linear is plain
    assert builder.build.args[0] == CPUAttentionMetadataBuilder.build.__get__(builder)
    FixedTiles().uninstall(llm)
    assert all(model.layers[name].cpu_linear is plain for name in ("qkv", "head"))
    assert "_detllm_cpu_linear" not in vars(model.layers["qkv"])
    assert "build" not in vars(builder)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (Layer(linear=plain, method=AWQLinearMethod()), "odd computes with AWQLinearMethod"),
        (Layer(method=AWQLinearMethod()), "odd computes with AWQLinearMethod"),
        (MoELayer(ndim=3), r"odd \(MoELayer\) does not call cpu_linear"),
    ],
)
def test_a_layer_beside_the_hook_refuses_all(layer: Layer, why: str) -> None:
    model = covered()
    model.layers["odd"] = layer
    llm = llm_of(model)
    with pytest.raises(InvarianceError, match=why):
        FixedTiles().install(llm)
    assert model.layers["qkv"].cpu_linear is plain  # nothing was wrapped
    assert "build" not in vars(llm.group.metadata_builders[0])


@pytest.mark.parametrize(
    ("builder", "why"),
    [
        (MambaBuilder(), "computes with MambaBuilder"),
        (CPUAttentionMetadataBuilder(isa="rvv"), "attention kernel 'rvv'"),
        (CPUAttentionMetadataBuilder(is_cross_attention=True), "not a decoder's"),
        (CPUAttentionMetadataBuilder(is_encoder_only_attention=True), "not a decoder's"),
        (CPUAttentionMetadataBuilder(kv_cache_dtype="fp8_e4m3"), "KV cache of fp8_e4m3"),
    ],
)
def test_an_attention_that_is_not_covered_refuses_all(builder: Any, why: str) -> None:
    model, first = covered(), CPUAttentionMetadataBuilder()
    with pytest.raises(InvarianceError, match=rf"layers\.0\.attn .*{why}"):
        FixedTiles().install(llm_of(model, first, builder))
    assert "build" not in vars(first)
    assert model.layers["qkv"].cpu_linear is plain


def test_a_layer_without_a_group_of_row_counts_refuses_all(monkeypatch: Any) -> None:
    monkeypatch.setattr(cpu, "_group_of", lambda shape, call: None)
    with pytest.raises(InvarianceError, match=r"qkv \(linear 64 -> 32\) has no row counts"):
        FixedTiles().install(llm_of(covered()))


def weighted(weight: Any) -> Model:
    model = covered()
    for layer in (model.layers["qkv"], model.layers["head"]):
        layer.weight = weight
    return model


def test_every_layer_gets_our_product_and_its_own_back() -> None:
    import torch

    model = weighted(torch.randn(48, 70).bfloat16())
    qkv, head = model.layers["qkv"], model.layers["head"]
    FixedOrder().install(llm_of(model))
    assert qkv.cpu_linear.args[0] is head.cpu_linear.args[0]  # one table, packed once
    x, bias = torch.randn(5, 3, 70).bfloat16(), torch.randn(48).bfloat16()
    found = qkv.cpu_linear(x, qkv.weight, bias)
    assert (found.shape, found.dtype) == ((5, 3, 48), torch.bfloat16)
    exact = (x.double() @ qkv.weight.double().T + bias.double()).bfloat16()
    assert (found == exact).float().mean() > 0.99  # what float32 rounds otherwise is rare
    FixedOrder().install(llm_of(model))
    assert qkv._detllm_cpu_linear is plain
    FixedOrder().uninstall(llm_of(model))
    assert qkv.cpu_linear is head.cpu_linear is plain


def test_a_weight_that_is_packed_away_refuses_our_product() -> None:
    import torch

    model = weighted(torch.empty(0))
    with pytest.raises(InvarianceError, match=r"cpu-fixed-order .*packed for another kernel"):
        FixedOrder().install(llm_of(model))
    assert model.layers["qkv"].cpu_linear is plain


def test_a_product_that_cannot_be_compiled_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jupyter_detllm.arithmetic.products", None)
    with pytest.raises(InvarianceError, match="has no compiled product"):
        FixedOrder().install(llm_of(covered()))


def test_a_model_without_the_hook_is_refused() -> None:
    with pytest.raises(InvarianceError, match="no layer has cpu_linear"):
        FixedTiles().install(llm_of(Model(norm=Layer(ndim=1))))


def test_an_engine_that_splits_the_range_after_all_is_refused(vllm: Any) -> None:
    vllm.envs.VLLM_CPU_ATTN_SPLIT_KV = True
    with pytest.raises(InvarianceError, match="VLLM_CPU_ATTN_SPLIT_KV was not 0"):
        FixedTiles().install(llm_of(covered()))


def test_an_unproven_vllm_is_refused(vllm: Any) -> None:
    vllm.__version__ = "0.33.0"
    with pytest.raises(InvarianceError, match=r"0\.33\.0"):
        FixedTiles().install(llm_of(covered()))


def test_a_compiled_or_distant_engine_is_refused() -> None:
    with pytest.raises(InvarianceError, match="compiled"):
        FixedTiles().install(llm_of(covered(), eager=False))
    with pytest.raises(InvarianceError, match="another process"):
        FixedTiles().install(llm_of(covered(), in_process=False))


def test_latent_attention_is_refused_by_name_before_and_after_loading() -> None:
    with pytest.raises(InvarianceError, match="MLA"):
        FixedTiles().install(llm_of(covered(), mla=True))
    assert "MLA" in FixedTiles().uncovered(SimpleNamespace(use_mla=True))
    assert not FixedTiles().uncovered(SimpleNamespace(use_mla=False))


def test_attention_that_is_not_causal_is_refused_when_it_happens() -> None:
    llm = llm_of(covered())
    FixedTiles().install(llm)
    build = llm.group.metadata_builders[0].build
    common = SimpleNamespace(causal=True, max_query_len=1)
    assert build(common_prefix_len=0, common_attn_metadata=common) is common
    with pytest.raises(InvarianceError, match="not causal"):
        build(0, SimpleNamespace(causal=False, max_query_len=1))


# --- products ------------------------------------------------------------------------

torch = pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def one_thread() -> Any:
    """Thousands of small products wait for each other's threads on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("group", "rows", "seen"),
    [
        (RowGroup(), 1, [1]),
        (RowGroup(least=2), 1, [2]),
        (RowGroup(least=2), 2, [2]),
        (RowGroup(most=64), 130, [64, 64, 2]),
        (RowGroup(least=2, most=64), 129, [64, 64, 2]),
        (RowGroup(8, 1, 32, 1, 32), 7, [8]),
        (RowGroup(8, 1, 32, 1, 32), 33, [32, 8]),
        (RowGroup(8, 1, 32, 1, 32), 106, [32, 32, 32, 10]),
        (RowGroup(4, 2, 64, 4, 1024), 5, [6]),
        (RowGroup(4, 2, 64, 4, 1024), 66, [68]),
        (RowGroup(4, 2, 64, 4, 1024), 1029, [1024, 6]),
    ],
)
@pytest.mark.parametrize("deep", [False, True])
def test_products_have_the_rows_they_should_and_the_result_is_unchanged(
    group: RowGroup, rows: int, seen: list[int], deep: bool
) -> None:
    weight = torch.arange(12.0).reshape(4, 3)
    counts: list[int] = []

    def linear(x: Any, w: Any, bias: Any) -> Any:
        counts.append(x.numel() // x.shape[-1])
        return torch.nn.functional.linear(x, w, bias)

    x = torch.arange(float(rows * 3)).reshape(rows, 3)
    expected = torch.nn.functional.linear(x, weight, None)
    if deep:
        x, expected = x[None], expected[None]
    found = in_group(linear, group)(x, weight, None)
    assert torch.equal(found, expected)
    assert found.shape == expected.shape
    assert counts == seen


def product(kernel_of: Any) -> Any:
    """Return a product whose bits depend on what `kernel_of(count, row)` says."""

    def each(rows: Any) -> Any:
        offsets = [kernel_of(len(rows), row) for row in range(len(rows))]
        return rows[:, :40] + torch.tensor(offsets, dtype=rows.dtype)[:, None]

    return each


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("kernel_of", "group"),
    [
        (lambda count, row: 0, RowGroup()),
        (lambda count, row: count == 1, RowGroup(least=2)),
        (lambda count, row: count < 5, RowGroup(least=5)),
        (lambda count, row: row >= count - count % 4, RowGroup(4, 4, 64, 4)),
        (lambda count, row: count < 5 or count // 33, RowGroup(5, 1, 32, 1, 32)),
        (lambda count, row: count > 32 and count % 32, RowGroup(wide_step=1, narrow=32, most=32)),
        (lambda count, row: row >= count - count % 16, RowGroup(16, 16, 64, 16)),
        (lambda count, row: count > 300, RowGroup(most=256)),
        (lambda count, row: count > 64 and count % 2, RowGroup(wide_step=2)),
        (lambda count, row: count, None),
        (lambda count, row: row, None),
    ],
)
def test_the_group_is_found_for_kernels_that_follow_the_rows(
    kernel_of: Any, group: RowGroup | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jupyter_detllm.invariance import cpu_kernels

    monkeypatch.setattr(cpu_kernels, "_CALLS", ((8, 4), (64, 3), (1024, 3)))
    assert measure_group(product(kernel_of), 96, 40, torch.float32) == group


def test_a_remembered_group_is_read_back_and_a_damaged_one_is_measured_again(
    tmp_path: Any,
) -> None:
    entry = tmp_path / "a" / "group.json"
    assert cpu._remembered(entry) is None
    write_json(entry, asdict(RowGroup(4, 2, 64, 2, 512)))
    assert cpu._remembered(entry) == RowGroup(4, 2, 64, 2, 512)
    for damaged in ("", "[]", '{"least": 0}', '{"step": 0}', '{"most": 8}', '{"x": 1}'):
        entry.write_text(damaged)
        assert cpu._remembered(entry) is None


# --- tiles ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("isa", "heads", "kv_heads", "tokens"),
    [
        ("vec", 9, 3, 8),
        ("vec", 8, 2, 2),
        ("vec", 8, 8, 8),
        ("vec", 14, 2, 8),
        ("vec", 16, 1, 8),
        ("vec16", 16, 1, 1),
        ("vec16", 9, 3, 16),
        ("amx", 32, 8, 8),
        ("amx", 9, 3, 32),
    ],
)
def test_a_tile_is_one_iteration_of_the_kernel(
    isa: str, heads: int, kv_heads: int, tokens: int
) -> None:
    assert tile_tokens(isa, heads, kv_heads) == tokens


@dataclass
class Common:
    """The fields of vLLM's metadata that are cut."""

    query_start_loc: Any
    seq_lens: Any
    num_reqs: int
    max_query_len: int
    block_table_tensor: Any


def common(*requests: tuple[int, int]) -> Common:
    """Return the metadata of requests, each (computed before, new) tokens."""
    new = [count for _, count in requests]
    return Common(
        torch.tensor([0, *new], dtype=torch.int32).cumsum(0).to(torch.int32),
        torch.tensor([sum(request) for request in requests], dtype=torch.int32),
        len(requests),
        max(new),
        torch.arange(len(requests), dtype=torch.int32)[:, None].repeat(1, 3),
    )


@pytest.mark.parametrize(
    ("requests", "starts", "lengths", "tables"),
    [
        ([(0, 8)], [0, 8], [8], [0]),
        ([(0, 9)], [0, 8, 9], [8, 9], [0, 0]),
        ([(3, 7)], [0, 5, 7], [8, 10], [0, 0]),
        ([(8, 8), (20, 1)], [0, 8, 9], [16, 21], [0, 1]),
        (
            [(20, 1), (0, 17), (7, 2)],
            [0, 1, 9, 17, 18, 19, 20],
            [21, 8, 16, 17, 8, 9],
            [0, 1, 1, 1, 2, 2],
        ),
        ([(0, 3), (5, 0), (0, 2)], [0, 3, 5], [3, 2], [0, 2]),
    ],
)
def test_a_step_is_cut_at_absolute_positions(
    requests: list[tuple[int, int]], starts: list[int], lengths: list[int], tables: list[int]
) -> None:
    found = in_tiles(common(*requests), 8)
    assert found.query_start_loc.tolist() == starts
    assert found.query_start_loc.dtype == found.seq_lens.dtype == torch.int32
    assert found.seq_lens.tolist() == lengths
    assert found.block_table_tensor[:, 0].tolist() == tables
    assert found.num_reqs == len(lengths)
    assert found.max_query_len == 8


def test_a_step_of_single_rows_is_left_as_it_is() -> None:
    step = common((20, 1), (3, 1))
    assert in_tiles(step, 8) is step


def test_every_row_stays_where_it_was_whatever_the_chunks() -> None:
    generator = random.Random(4)
    for _ in range(200):
        requests = [
            (generator.randrange(50), generator.randrange(1, 40))
            for _ in range(generator.randrange(1, 6))
        ]
        tokens = generator.choice([1, 2, 3, 8, 16])
        found = in_tiles(common(*requests), tokens)
        if max(count for _, count in requests) == 1:
            continue
        places = []
        for number in range(found.num_reqs):
            start, end = found.query_start_loc[number : number + 2].tolist()
            last = int(found.seq_lens[number])
            rows = range(last - (end - start), last)
            assert rows[0] // tokens == rows[-1] // tokens
            places += [(int(found.block_table_tensor[number, 0]), row) for row in rows]
        wanted = [
            (number, row)
            for number, (before, count) in enumerate(requests)
            for row in range(before, before + count)
        ]
        assert places == wanted
