"""Every kind of finding: what it finds, what it leaves alone, and when it does not know."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.controls.environ import NO_EFFECT
from jupyter_detllm.controls.guard import apply
from jupyter_detllm.core.levels import Level
from jupyter_detllm.doctor import kinds
from jupyter_detllm.doctor.code import read_code
from jupyter_detllm.doctor.kinds.environment import ALWAYS, SOMETIMES
from jupyter_detllm.doctor.scene import Finding, Live, ModelConfig, Scene, Severity
from jupyter_detllm.doctor.table import KINDS
from jupyter_detllm.probes.nvidia import GpuHealth
from jupyter_detllm.probes.software import Platform

WRONG, RISK, UNKNOWN, NOTE = Severity.WRONG, Severity.RISK, Severity.UNKNOWN, Severity.NOTE
BARE = Scene(environ={}, platform=Platform.CPU)
CUDA = Scene(environ={}, platform=Platform.CUDA)
GPU = GpuHealth("GPU 0 (H200)", (), True, 0, False, (), 16, 16, 0, True)
PY = "/env/bin/python"


def cells(*sources: str, base: Scene = BARE, kernel: str = "") -> Scene:
    code = read_code(list(enumerate(sources, start=1)), label="nb.ipynb", kernel=kernel)
    return replace(base, code=code)


def live(
    fields: Mapping[str, Any] | None = None,
    *,
    base: Scene = BARE,
    training: Mapping[str, int] | None = None,
    hash_seed: str = "0",
    report: Any = None,
    level: Level | None = None,
) -> Scene:
    mode = {} if training is None else training
    return replace(base, live=Live(report, level, fields or {}, mode, hash_seed))


def gpu(**changes: Any) -> Scene:
    return replace(CUDA, gpus=(replace(GPU, **changes),))


def report(environ: dict[str, str], *modules: str) -> Any:
    return apply(
        Level.SEEDED,
        environ=environ,
        modules={name: object() for name in modules},
        initial=dict(environ),
        platform=Platform.CPU,
    )


def config(**quantization: Any) -> Scene:
    return replace(BARE, models=(ModelConfig("m", {"quantization_config": quantization}),))


#: Kind: scenes with the severities found there, in order.
FOUND: dict[str, list[tuple[Scene, list[Severity]]]] = {
    "late_controls": [
        (cells("import torch", "%detllm --seed 1"), [WRONG]),
        (cells("import vllm\nimport os\nos.environ['VLLM_BATCH_INVARIANT'] = '1'"), [WRONG]),
        (cells("%env PYTHONHASHSEED=0"), [WRONG]),
        (cells("import os", "os.environ.setdefault('PYTHONHASHSEED', '0')"), [WRONG]),
        (cells("!export OMP_NUM_THREADS=16"), [WRONG]),
        (cells("!cd x && export PYTHONHASHSEED=0; export MY_OWN='1'"), [RISK, WRONG]),
        (cells("%%bash\nls\nexport OMP_NUM_THREADS=16\n"), [WRONG]),
        (live(), [UNKNOWN]),
        (live(report=report({}, "torch")), [WRONG]),
    ],
    "seed_after_load": [
        (cells("from vllm import LLM\nm = LLM('x')\nimport torch\ntorch.manual_seed(0)"), [WRONG]),
        (
            cells(
                "import random, transformers",
                "m = transformers.AutoModel.from_pretrained('x')",
                "random.seed(1)",
            ),
            [WRONG],
        ),
    ],
    "partial_seeding": [
        (cells("import torch, numpy as np\ntorch.manual_seed(0)\nnp.random.rand(3)"), [WRONG]),
        (cells("import random\nrandom.random()\nrandom.seed(0)"), [WRONG]),
        (cells("from numpy.random import default_rng\ndefault_rng()"), [WRONG]),
        (cells("from torch import randn\nrandn(3)"), [WRONG]),
    ],
    "worker_seeding": [
        (cells("from torch.utils.data import DataLoader\nDataLoader(d, num_workers=2)"), [RISK]),
        (cells("from torch.utils.data import DataLoader\nDataLoader(d, num_workers=n)"), [UNKNOWN]),
        (cells("import multiprocessing\nmultiprocessing.Pool(4)"), [RISK]),
        (cells("from multiprocessing import Process\nProcess(target=f)"), [RISK]),
    ],
    "temperature_zero": [
        (cells("from vllm import SamplingParams\nSamplingParams(temperature=0.0)"), [RISK]),
        (cells("%detllm --level repeatable", "%%detgen --temperature 0\nHi"), [NOTE]),
        (cells("%detllm", "%%detgen a --temperature=0\nHi"), [NOTE]),
        (cells("client.chat.completions.create(model='m', temperature=0)"), [RISK]),
    ],
    "unseeded_sampling": [
        (cells("from vllm import SamplingParams as S\nS(temperature=0.7)"), [WRONG]),
        (cells("from vllm import SamplingParams\nSamplingParams(max_tokens=5)"), [WRONG]),
        (cells("from vllm import SamplingParams\nSamplingParams(**options)"), [UNKNOWN]),
        (cells("client.completions.create(prompt='x', temperature=1)"), [WRONG]),
        (cells("model.generate(ids, do_sample=True)"), [WRONG]),
    ],
    "prefix_cache": [
        (
            cells(
                "from vllm import LLM, SamplingParams", "LLM('m')", "SamplingParams(temperature=0)"
            ),
            [RISK],
        ),
        (cells("%detllm use demo --enable-prefix-caching"), [RISK]),
        (cells("!vllm serve m --enable-prefix-caching"), [RISK]),
        (cells("from vllm import LLM\nLLM('m', enable_prefix_caching=flag)"), [UNKNOWN]),
        (live({"engine.prefix_cache": True}), [RISK]),
    ],
    "tensor_parallel": [
        (cells("from vllm import LLM\nLLM('m', tensor_parallel_size=2)"), [RISK]),
        (cells("%%bash\nvllm serve m \\\n  --tensor-parallel-size 4"), [RISK]),
        (cells("from vllm import LLM\nLLM('m', tensor_parallel_size=n)"), [UNKNOWN]),
        (live({"engine.tensor_parallel": 8}), [RISK]),
    ],
    "quantised_model": [
        (config(quant_method="awq", bits=4, zero_point=True), [RISK]),
        (config(quant_method="fp8", activation_scheme="dynamic"), [RISK]),
        (config(quant_method="fp8", activation_scheme="static"), [NOTE]),
        (replace(BARE, models=(ModelConfig("m", None),)), [UNKNOWN]),
        (cells("%detllm use m --quantization gptq"), [RISK]),
        (live({"engine.quantization": "awq_marlin"}), [RISK]),
    ],
    "lora": [
        (cells("from vllm import LLM\nLLM('m', enable_lora=True)"), [RISK]),
        (cells("!vllm serve m --enable-lora"), [RISK]),
        (live({"engine.lora": "on, rank 16 at most"}), [RISK]),
    ],
    "speculative": [
        (cells("from vllm import LLM\nLLM('m', speculative_config={'method': 'ngram'})"), [RISK]),
        (cells('!vllm serve m --speculative-config \'{"method": "ngram"}\''), [RISK]),
        (live({"engine.speculative": "ngram, 4 tokens"}), [RISK]),
    ],
    "deterministic_algorithms": [
        (
            cells(
                "import torch\ntorch.use_deterministic_algorithms(True)\nx.put_(i, y)", base=CUDA
            ),
            [WRONG],
        ),
        (
            cells(
                "import torch\ntorch.use_deterministic_algorithms(True, warn_only=True)",
                "torch.histc(x)",
                base=CUDA,
            ),
            [RISK],
        ),
        (cells("import torch\ntorch.use_deterministic_algorithms(True)\ntorch.histc(x)"), [NOTE]),
        (cells("import torch\ntorch.use_deterministic_algorithms(flag)"), [UNKNOWN]),
        (live({"torch.deterministic_algorithms": "error"}, base=CUDA), [RISK]),
    ],
    "training_mode": [
        (cells("model.train()", "model.generate(x)"), [WRONG]),
        (cells("model.train()"), [RISK]),
        (live(training={"net": 3}), [WRONG]),
        (replace(BARE, live=Live(None, None, {}, None, "0")), [UNKNOWN]),
    ],
    "unknown_options": [
        (cells("!vllm serve m --sampling-temperature 0 --enable-beam-search"), [WRONG, WRONG]),
        (cells("!python -m vllm.entrypoints.openai.api_server --disable-log-requests"), [WRONG]),
        (cells("from vllm import LLM\nLLM('m', deterministic=True)"), [WRONG]),
        (cells("llm.model_executor.sampler.deterministic = True"), [WRONG]),
        (cells("from vllm import SamplingParams\nSamplingParams(use_beam_search=True)"), [WRONG]),
        (cells("import os\nos.environ['QUANTIZATION_DETERMINISTIC'] = '1'"), [WRONG]),
        (cells("%env VLLM_ATTENTION_BACKEND=FLASH_ATTENTION"), [WRONG]),
        (cells("!VLLM_ATTENTION_BACKEND=FLASH_ATTN vllm serve m"), [WRONG]),
        (cells("%detllm use m --attention-backend FLASH_ATTENTION"), [WRONG]),
        (replace(BARE, environ={"VLLM_ATTENTION_BACKEND": "FLASH_ATTN"}), [WRONG]),
    ],
    "tf32": [
        (cells("import torch\ntorch.backends.cuda.matmul.allow_tf32 = True", base=CUDA), [RISK]),
        (cells("import torch\ntorch.set_float32_matmul_precision('high')"), [NOTE]),
        (cells("import torch\ntorch.set_float32_matmul_precision(p)", base=CUDA), [UNKNOWN]),
        (replace(CUDA, environ={"NVIDIA_TF32_OVERRIDE": "1"}), [RISK]),
        (live({"torch.float32_matmul_precision": "medium"}, base=CUDA), [RISK]),
    ],
    "two_environments": [
        (live(base=replace(BARE, executable=PY, server="/server/bin/python")), [NOTE]),
        (live(base=replace(BARE, executable=PY)), [UNKNOWN]),
        (cells("1", kernel="k", base=replace(BARE, kernels={})), [RISK]),
        (cells("1", kernel="k", base=replace(BARE, kernels=None)), [UNKNOWN]),
        (
            cells("1", kernel="k", base=replace(BARE, executable=PY, kernels={"k": "/b/python"})),
            [RISK],
        ),
    ],
    "unread_code": [(cells("def :", "1"), [UNKNOWN])],
    "hash_seed": [
        (BARE, [NOTE]),
        (live(hash_seed="random"), [NOTE]),
        (live(hash_seed="unknown"), [UNKNOWN]),
    ],
    "omp_threads": [(BARE, [NOTE]), (live(), [RISK])],
    "bytecode": [(replace(BARE, environ={"PYTHONDONTWRITEBYTECODE": "1"}), [NOTE])],
    "dockerfile_seed": [
        (
            replace(
                BARE,
                dockerfiles={
                    Path(
                        "Dockerfile"
                    ): "FROM x\nRUN pip install y && \\\n export PYTHONHASHSEED=0\n"
                    "run python -c 'import torch; torch.manual_seed(0)'\n"
                },
            ),
            [WRONG, WRONG],
        )
    ],
    "torchvision": [
        (replace(BARE, packages={"torchvision": "0.1"}), [WRONG]),
        (
            replace(
                BARE,
                packages={"torchvision": "0.1", "torch": "2.13.0+cpu"},
                requires={"torchvision": ("numpy", "torch==2.12.0")},
            ),
            [WRONG],
        ),
        (
            replace(
                BARE,
                packages={"torchvision": "0.1", "torch": "2.13.0"},
                builds={"torch": "cpu", "torchvision": "cuda"},
            ),
            [WRONG],
        ),
        (
            replace(
                BARE, packages={"torchvision": "0.1", "torch": "2.13.0"}, builds={"torch": "cpu"}
            ),
            [UNKNOWN],
        ),
    ],
    "gpu_throttled": [(gpu(throttled=("power cap",)), [NOTE]), (gpu(throttled=None), [UNKNOWN])],
    "gpu_ecc": [(gpu(ecc=False), [RISK]), (gpu(ecc_errors=2), [WRONG]), (gpu(ecc=None), [UNKNOWN])],
    "gpu_mig": [(gpu(mig=True), [RISK])],
    "gpu_processes": [(gpu(others=(7, 8)), [RISK]), (gpu(others=None), [UNKNOWN])],
    "gpu_speed": [
        (gpu(fixed_clocks=False), [NOTE]),
        (gpu(pcie=8), [NOTE]),
        (gpu(pcie=8, fixed_clocks=False), [NOTE]),
    ],
    "gpu_mps": [
        (gpu(mps=2), [RISK]),
        (gpu(mps=None), [UNKNOWN]),
        (
            replace(gpu(), environ={"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}),
            [RISK],
        ),
    ],
}

_TIDY = cells(
    "%load_ext jupyter_detllm\n%detllm --seed 42 --level invariant",
    "%detllm use demo --max-model-len 2048",
    "import numpy as np, random, torch\nnp.random.rand(2); random.random(); torch.rand(2)",
    "%%detgen a --temperature 0\nHello: %nothing here is Python",
    "model.eval()\nmodel.generate(x)\nnp.random.default_rng(3)\nnp.histc(x)",
    "from torch.utils.data import DataLoader\nDataLoader(d)",
    "DataLoader(d, num_workers=2, generator=g)",
    "torch.set_float32_matmul_precision('highest')\n%time x = 1\n!ls {folder}\nfiles = !ls\nmodel?",
    "%%time\nfor i in range(2):\n    %timeit -n1 i\n    !echo $i",
)
_DONE = report({"OMP_NUM_THREADS": "2"})
_VISION = {"packages": {"torchvision": "0.1", "torch": "2.1"}}
#: Kind: scenes in which there is something to look at, and nothing wrong.
FINE: dict[str, list[Scene]] = {
    **{
        row.name: [_TIDY]
        for row in KINDS
        if row.needs.text and not row.name.startswith("gpu_") and row.name != "dockerfile_seed"
    },
    "temperature_zero": [
        _TIDY,
        live(
            {"engine.dtype": "bfloat16"},
            base=cells("%%detgen --temperature 0\nx"),
            level=Level.INVARIANT,
        ),
    ],
    "unseeded_sampling": [
        _TIDY,
        cells("from vllm import SamplingParams\nSamplingParams(temperature=1, seed=3)"),
        cells("import torch\ntorch.manual_seed(0)\nmodel.generate(x, do_sample=True)"),
    ],
    "seed_after_load": [
        _TIDY,
        cells("import torch, transformers\ntorch.manual_seed(0)\ntransformers.pipeline('x')"),
        cells("AutoTokenizer.from_pretrained('x')\nimport torch\ntorch.manual_seed(0)"),
    ],
    "prefix_cache": [_TIDY, cells("from vllm import LLM\nLLM('m', enable_prefix_caching=False)")],
    "quantised_model": [_TIDY, replace(BARE, models=(ModelConfig("m", {"hidden_size": 1}),))],
    "unknown_options": [BARE, _TIDY],
    "tf32": [BARE, CUDA, _TIDY],
    "two_environments": [
        live(base=replace(BARE, executable=PY, server="/env/bin/python3.11")),
        cells("1", kernel="python3", base=replace(BARE, kernels={"python3": "python"})),
    ],
    "hash_seed": [live(), replace(BARE, environ={"PYTHONHASHSEED": "0"})],
    "omp_threads": [replace(BARE, environ={"OMP_NUM_THREADS": "2"})],
    "bytecode": [BARE, replace(BARE, environ={"PYTHONDONTWRITEBYTECODE": ""})],
    "dockerfile_seed": [
        replace(BARE, dockerfiles={Path("Dockerfile"): "ENV PYTHONHASHSEED=0\nRUN make random\n"})
    ],
    "torchvision": [
        BARE,
        replace(BARE, **_VISION, builds={"torch": "cpu", "torchvision": "cpu"}),
    ],
    **{row.name: [gpu()] for row in KINDS if row.name.startswith("gpu_")},
    "gpu_speed": [gpu(), gpu(pcie=None), gpu(pcie_most=None), gpu(fixed_clocks=None)],
}
ROWS = {row.name: row for row in KINDS}


def found_in(name: str, scene: Scene) -> list[Finding]:
    found = ROWS[name].look(scene)
    assert found is not None, "there was something to look at"
    return list(found)


def test_every_kind_is_a_function_a_row_and_has_examples_of_both_sides() -> None:
    folder = Path(str(kinds.__file__)).parent
    text = "\n".join(path.read_text("utf-8") for path in folder.glob("*.py"))
    functions = set(re.findall(r"^def find_(\w+)\(", text, re.MULTILINE))
    assert functions == set(ROWS) == set(FOUND) == set(FINE)
    assert len(ROWS) == len(KINDS)


@pytest.mark.parametrize(
    ("name", "number"), [(name, i) for name, rows in FOUND.items() for i in range(len(rows))]
)
def test_it_finds(name: str, number: int) -> None:
    scene, severities = FOUND[name][number]
    found = found_in(name, scene)
    assert [item.severity for item in found] == severities
    for item in found:
        assert item.evidence
        assert item.fix
        assert "\n" not in f"{item.evidence}{item.fix}{item.where}"


@pytest.mark.parametrize(
    ("name", "number"), [(name, i) for name, rows in FINE.items() for i in range(len(rows))]
)
def test_it_leaves_alone(name: str, number: int) -> None:
    assert found_in(name, FINE[name][number]) == []


@pytest.mark.parametrize("row", [row for row in KINDS if row.needs.text], ids=lambda row: row.name)
def test_without_what_it_needs_it_does_not_say_that_all_is_well(row: Any) -> None:
    scene = CUDA if row.name == "omp_threads" else BARE
    assert row.look(scene) is None


@pytest.mark.parametrize("name", [row.name for row in KINDS if row.name.startswith("gpu_")])
def test_a_driver_that_does_not_answer_is_unknown(name: str) -> None:
    (item,) = found_in(name, replace(CUDA, gpus=None))
    assert (item.severity, item.fix) == (UNKNOWN, "nvidia-smi")


def test_the_operators_are_those_that_torch_names() -> None:
    torch = pytest.importorskip("torch")
    text = torch.use_deterministic_algorithms.__doc__
    text = text[text.index("will throw a\n    :class:`RuntimeError` when ``mode=True``") :]
    named = set(re.findall(r":(?:func|class|meth):`[\w.]*?(\w+)`", text))
    assert sorted((ALWAYS | SOMETIMES) - named) == []


def test_an_operator_that_has_none_only_at_times_is_a_risk() -> None:
    on = "import torch\ntorch.use_deterministic_algorithms(True)"
    (item,) = found_in("deterministic_algorithms", cells(on, "torch.cumsum(x, 0)", base=CUDA))
    assert (item.severity, item.where) == (RISK, "cell 2, line 1")
    assert found_in("deterministic_algorithms", cells("torch.histc(x)", on, base=CUDA)) == []


def test_late_controls_are_named_with_what_is_in_force() -> None:
    # The hash seed changes no result: it is a kind of its own, and no late control.
    (threads,) = found_in("late_controls", FOUND["late_controls"][-1][0])
    assert threads.evidence.startswith("OMP_NUM_THREADS came too late")
    assert threads.fix == "jupyter detllm kernel install"
    assert found_in("late_controls", live(report=_DONE, hash_seed="0")) == []


def test_places_are_cells_and_lines_of_the_notebook() -> None:
    scene = cells("1", "%%time\n\nimport os\n!ls\nos.environ['VLLM_SEED'] = '1'")
    (item,) = found_in("unknown_options", scene)
    assert item.where == "cell 2, line 5"
    assert item.fix == "%detllm --seed N"


@pytest.mark.parametrize("row", NO_EFFECT, ids=lambda row: row.name)
def test_every_variable_without_effect_is_found_in_code(row: Any) -> None:
    scene = cells(f"import os\nos.environ[{row.name!r}] = 'x'")
    assert len(found_in("unknown_options", scene)) == (row.name != "TOKENIZERS_PARALLELISM")
