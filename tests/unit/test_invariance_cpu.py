"""The CPU methods: when they are for a host, what they wrap, and that they let nothing out."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from jupyter_detllm.errors import InvarianceError, UsageError
from jupyter_detllm.invariance import METHODS, candidates, first_choice, method_named
from jupyter_detllm.invariance.base import Host, Method, prepared
from jupyter_detllm.invariance.cpu import Kernels, Rows32, Tiles16, TwoRows, kernels_of
from jupyter_detllm.probes.platform import Platform

EPYC = Host(Platform.CPU, vllm="0.32.0", cpu_flags=frozenset({"avx2", "avx512f", "avx512_bf16"}))
XEON = replace(EPYC, cpu_flags=EPYC.cpu_flags | {"amx_bf16", "amx_tile"})
LAPTOP = replace(EPYC, cpu_flags=frozenset({"avx2"}))
CUDA = Host(Platform.CUDA, vllm="0.25.1", capability="9.0")
CPU_METHODS = (TwoRows(), Rows32(), Tiles16())


# --- conditions ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "limit", "kernels", "method"),
    [
        (EPYC, "", Kernels.BF16, "cpu-two-rows"),
        (EPYC, "ALL", Kernels.BF16, "cpu-two-rows"),
        (EPYC, "AVX512_CORE", Kernels.OLDER, "cpu-tiles-16"),
        (EPYC, "AVX2", Kernels.OLDER, "cpu-tiles-16"),
        (XEON, "", Kernels.AMX, "cpu-rows-32"),
        (XEON, "AVX512_CORE_AMX", Kernels.AMX, "cpu-rows-32"),
        (XEON, "AVX512_CORE_BF16", Kernels.AMX, "cpu-rows-32"),
        (XEON, "AVX2", Kernels.OLDER, "cpu-tiles-16"),
        (LAPTOP, "", Kernels.OLDER, "cpu-tiles-16"),
    ],
)
def test_the_kernels_decide_which_method_is_first(
    host: Host, limit: str, kernels: Kernels, method: str
) -> None:
    host = replace(host, isa_limit=limit)
    assert kernels_of(host) is kernels
    assert first_choice(host).name == method


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
    ],
)
def test_what_a_method_does_not_cover_is_refused_by_name(options: dict[str, Any], why: str) -> None:
    for host in (EPYC, XEON, LAPTOP):
        found = candidates(replace(host, options=options))
        assert [item.method.name for item in found if item.usable] == ["sequential"]
        reasons = [item.refusal for item in found if item.method in METHODS[:1]]
        assert all(why in reason for reason in reasons)


@pytest.mark.parametrize("options", [{"enable_lora": "false"}, {"quantization": None}, {}])
def test_an_option_that_is_off_is_no_reason(options: dict[str, Any]) -> None:
    assert first_choice(replace(EPYC, options=options)).name == "cpu-two-rows"


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
        assert method.undone
        assert method.costs


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
    """A module as the methods see one."""

    def __init__(self, *, linear: Any = None, method: Any = None, ndim: int = 0) -> None:
        if linear is not None:
            self.cpu_linear = linear
        if method is not None:
            self.quant_method = method
        self._ndim = ndim

    def parameters(self, recurse: bool) -> list[Parameter]:
        assert recurse is False
        return [Parameter(ndim=self._ndim)] if self._ndim else []


class MoELayer(Layer):
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


def llm_of(model: Model, *, eager: bool = True, in_process: bool = True) -> Any:
    config = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=eager))
    core = SimpleNamespace(engine_core=object() if in_process else None)
    engine = SimpleNamespace(vllm_config=config, engine_core=core)
    return SimpleNamespace(llm_engine=engine, apply_model=lambda change: [change(model)])


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("vllm")
    module.__dict__.update(__version__="0.32.0", envs=SimpleNamespace(VLLM_CPU_ATTN_SPLIT_KV=False))
    monkeypatch.setitem(sys.modules, "vllm", module)
    return module


def covered() -> Model:
    return Model(
        qkv=Layer(linear=plain, method=UnquantizedLinearMethod()),
        head=Layer(linear=plain, method=UnquantizedLinearMethod()),
        norm=Layer(ndim=1),
    )


class Embedding(Layer):
    """As `torch.nn.Embedding` is seen; `more` is a weight of a subclass's own."""

    __module__ = "torch.nn.modules.sparse"

    def __init__(self, *, more: bool = False) -> None:
        super().__init__()
        self.weight = Parameter(ndim=2)
        self.more = [Parameter(ndim=2)] if more else []

    def parameters(self, recurse: bool) -> list[Parameter]:
        assert recurse is False
        return [self.weight, *self.more]


class OPTLearnedPositionalEmbedding(Embedding):
    __module__ = "vllm.model_executor.models.opt"


def test_a_table_is_covered_also_where_its_class_is_a_subclass() -> None:
    linear = Layer(linear=plain, method=UnquantizedLinearMethod())
    for table in (Embedding(), OPTLearnedPositionalEmbedding()):
        TwoRows().install(llm_of(Model(layer=linear, positions=table)))
    with pytest.raises(
        InvarianceError, match=r"positions .OPTLearnedPositionalEmbedding. does not"
    ):
        TwoRows().install(
            llm_of(Model(layer=linear, positions=OPTLearnedPositionalEmbedding(more=True)))
        )


@pytest.mark.parametrize("method", CPU_METHODS)
def test_every_linear_layer_is_wrapped_once_and_given_back(method: Any) -> None:
    model = covered()
    llm = llm_of(model)
    method.install(llm)
    wrapped = model.layers["qkv"].cpu_linear
    assert wrapped is not plain
    method.install(llm)  # again: the layer's own function is wrapped, not the wrapper
    assert model.layers["qkv"]._detllm_cpu_linear is plain
    method.uninstall(llm)
    assert all(model.layers[name].cpu_linear is plain for name in ("qkv", "head"))
    assert "_detllm_cpu_linear" not in vars(model.layers["qkv"])


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
    with pytest.raises(InvarianceError, match=why):
        TwoRows().install(llm_of(model))
    assert model.layers["qkv"].cpu_linear is plain  # nothing was wrapped


def test_a_model_without_the_hook_is_refused() -> None:
    with pytest.raises(InvarianceError, match="no layer has cpu_linear"):
        TwoRows().install(llm_of(Model(norm=Layer(ndim=1))))


def test_an_engine_that_splits_the_range_after_all_is_refused(vllm: Any) -> None:
    vllm.envs.VLLM_CPU_ATTN_SPLIT_KV = True
    with pytest.raises(InvarianceError, match="VLLM_CPU_ATTN_SPLIT_KV was not 0"):
        TwoRows().install(llm_of(covered()))


def test_an_unproven_vllm_is_refused(vllm: Any) -> None:
    vllm.__version__ = "0.33.0"
    with pytest.raises(InvarianceError, match=r"0\.33\.0"):
        TwoRows().install(llm_of(covered()))


def test_a_compiled_or_distant_engine_is_refused() -> None:
    with pytest.raises(InvarianceError, match="compiled"):
        TwoRows().install(llm_of(covered(), eager=False))
    with pytest.raises(InvarianceError, match="another process"):
        TwoRows().install(llm_of(covered(), in_process=False))


# --- the arithmetic ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "rows", "seen"),
    [
        (TwoRows(), 1, [2]),
        (TwoRows(), 2, [2]),
        (TwoRows(), 33, [33]),
        (Rows32(), 1, [8]),
        (Rows32(), 7, [8]),
        (Rows32(), 8, [8]),
        (Rows32(), 32, [32]),
        (Rows32(), 33, [32, 8]),
        (Rows32(), 106, [32, 32, 32, 10]),
        (Tiles16(), 1, [16]),
        (Tiles16(), 16, [16]),
        (Tiles16(), 17, [32]),
    ],
)
@pytest.mark.parametrize("deep", [False, True])
def test_products_have_the_rows_they_should_and_the_result_is_unchanged(
    method: Any, rows: int, seen: list[int], deep: bool
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    weight = torch.arange(12.0).reshape(4, 3)
    counts: list[int] = []

    def linear(x: Any, w: Any, bias: Any) -> Any:
        counts.append(x.shape[0])
        assert x.ndim == 2 or x.shape[0] == 1
        return torch.nn.functional.linear(x, w, bias)

    x = torch.arange(float(rows * 3)).reshape(rows, 3)
    expected = torch.nn.functional.linear(x, weight, None)
    if deep and counts_match(method, rows):
        x, expected = x[None], expected[None]
    found = method.wrap(linear)(x, weight, None)
    assert torch.equal(found, expected)
    assert found.shape == expected.shape
    if not deep:
        assert counts == seen


def counts_match(method: Any, rows: int) -> bool:
    """Tell whether the wrapper itself makes the rows of this call."""
    if isinstance(method, Rows32):
        return not 8 <= rows <= 32
    return rows == 1 or (isinstance(method, Tiles16) and rows % 16 != 0)
