"""The doctor as a whole: code read tolerantly, scenes, report, exit codes, command."""

from __future__ import annotations

import json
import os
import sys
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_detllm.cli import main
from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.doctor.code import OPAQUE, read_code
from jupyter_detllm.doctor.options import given_options, models_named
from jupyter_detllm.doctor.scene import Finding, KindOutcome, Severity, scenes_of, world
from jupyter_detllm.doctor.table import KINDS, DoctorReport, KindResult, examine
from jupyter_detllm.errors import ModelError
from jupyter_detllm.kernel.commands import models_in_training
from jupyter_detllm.probes import nvidia, software
from jupyter_detllm.probes.engine import model_fields, scheme_of
from jupyter_detllm.probes.software import Platform
from jupyter_detllm.render.doctor import doctor_json, doctor_text

SCHEMA = json.loads(
    (files("jupyter_detllm") / "schemas" / "doctor-1.schema.json").read_text(encoding="utf-8")
)
BAD = "from vllm import SamplingParams\nSamplingParams(temperature=0.7)"


def write(path: Path, *sources: str, kernel: str | None = None) -> Path:
    book: dict[str, Any] = {
        "cells": [
            {"cell_type": "code", "source": text, "metadata": {}, "outputs": []} for text in sources
        ],
        "metadata": {"kernelspec": {"name": kernel}} if kernel else {},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    path.write_text(json.dumps(book), encoding="utf-8")
    return path


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return an empty working directory in an environment with nothing to note."""
    monkeypatch.chdir(tmp_path)
    for name in ("VLLM_ATTENTION_BACKEND", "NVIDIA_TF32_OVERRIDE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


# -- reading code --------------------------------------------------------------


def test_names_are_resolved_through_imports_of_earlier_cells() -> None:
    code = read_code(
        [(1, "import numpy as np, torch.nn as nn"), (4, "np.random.seed(1)")], label=""
    )
    (call,) = code.calls
    assert (call.name, str(call.place), call.argument(0)) == (
        "numpy.random.seed",
        "cell 4, line 1",
        1,
    )
    assert set(code.imports) == {"numpy", "torch.nn"}


def test_magics_are_taken_out_and_the_rest_is_read() -> None:
    loop = "if x:\n    %run y.py \\\n      --now\n    f(1)\n"
    source = f"%%time\n\n{loop}out = !ls\npip install z\ng?\nh(2)"
    code = read_code([(2, source)], label="")
    assert code.unparsed == ()
    assert [(call.name, call.place.line) for call in code.calls] == [("f", 6), ("h", 10)]
    assert [(line.text, line.place.line) for line in code.lines] == [
        ("%%time", 1),
        ("%run y.py --now", 4),
        ("!ls", 7),
        ("%pip install z", 8),
    ]


def test_an_operator_at_the_beginning_of_a_line_is_no_magic() -> None:
    code = read_code([(1, "x = (a\n% b)\ny = '''\n%detllm --seed 1\n!ls'''")], label="")
    assert (code.lines, code.unparsed) == ((), ())


def test_cells_of_other_languages_are_not_python() -> None:
    code = read_code([(1, "%%bash\nvllm serve m --enable-lora"), (2, "%%html\n<b>")], label="")
    assert code.unparsed == ()
    assert [str(item) for item in given_options(code, "enable_lora")] == ["enable_lora=True"]


def test_nothing_is_executed(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    source = f"open({str(mark)!r}, 'w')\n!touch {mark}\n%run {mark}"
    examine(scenes_of(world({}), [write(tmp_path / "nb.ipynb", source)]))
    assert not mark.exists()


@given(st.text(alphabet=st.sampled_from("%!?\n\\ax =()[]'\"#\t .:,0é\0"), max_size=60))
def test_any_text_is_read_or_named_as_unread(source: str) -> None:
    code = read_code([(7, source)], label="")
    assert code.unparsed in ((), (7,))


def test_an_endless_name_is_unread() -> None:
    assert read_code([(3, "a" + ".a" * 5000 + "()")], label="").unparsed == (3,)


def test_models_are_named_as_far_as_they_are_written() -> None:
    code = read_code(
        [
            (
                1,
                "from vllm import LLM\nLLM('a/b')\nLLM(model=m)\n"
                "%detllm use demo\n!vllm serve c/d -x",
            )
        ],
        label="",
    )
    assert models_named(code) == ["a/b", "a model chosen when the code runs", "demo", "c/d"]


@pytest.mark.parametrize(
    ("line", "models"),
    [
        ("!python -m vllm.entrypoints.openai.api_server --model a/b --port 1", ["a/b"]),
        ("!python3 -m vllm.entrypoints.openai.api_server --model=a/b", ["a/b"]),
        ("!python -m vllm.entrypoints.openai.api_server --port 1", []),
        ("!vllm serve --model a/b", ["a/b"]),
        ("!vllm serve c/d --model a/b", ["c/d"]),
        ("!vllm serve --model $MODEL", ["a model chosen when it runs"]),
    ],
)
def test_the_model_of_a_server_is_not_its_interpreter(line: str, models: list[str]) -> None:
    assert models_named(read_code([(1, line)], label="")) == models


def test_the_line_for_a_loader_runs() -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader

    import jupyter_detllm as det
    from jupyter_detllm.doctor.kinds.code import _LOADER_FIX

    names = {"det": det, "torch": torch, "DataLoader": DataLoader}
    made = eval(_LOADER_FIX.replace("...", "[1, 2]"), names)  # noqa: S307 - our own line
    assert len(list(made)) == 2


def test_a_value_filled_in_later_is_opaque() -> None:
    code = read_code(
        [(1, "!vllm serve m --tensor-parallel-size $N --lora-modules {name}")], label=""
    )
    found = given_options(code, "tensor_parallel_size", "lora_modules")
    assert [item.value for item in found] == [OPAQUE, OPAQUE]


# -- quantisation --------------------------------------------------------------

GROUP = {"weights": {"num_bits": 8, "symmetric": True}, "input_activations": {"dynamic": True}}


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (
            {"quant_method": "gptq", "bits": 4, "sym": False},
            "gptq, 4 bits, asymmetric, activations not quantised",
        ),
        (
            {"quant_method": "awq", "w_bit": 4, "zero_point": False},
            "awq, 4 bits, symmetric, activations not quantised",
        ),
        (
            {"quant_method": "fp8", "activation_scheme": "static"},
            "fp8, 8 bits, symmetry unknown, activations static",
        ),
        ({"quant_method": "new"}, "new, symmetry unknown, activations unknown"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}},
            "compressed-tensors, 8 bits, symmetric, activations dynamic",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": GROUP, "b": None}},
            "compressed-tensors, symmetry unknown, activations dynamic",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_scheme_is_read_from_the_config(found: dict[str, Any], text: str) -> None:
    assert str(scheme_of({"quantization_config": found})) == text


def test_a_model_without_one_has_no_scheme() -> None:
    assert scheme_of({}) is None
    assert scheme_of({"quantization_config": "gptq"}) is None


# -- scenes and report ---------------------------------------------------------


def test_each_notebook_is_looked_at_and_the_machine_once(quiet: Path) -> None:
    first, second = write(quiet / "a.ipynb", BAD), write(quiet / "b.ipynb", "1")
    report = examine(scenes_of(world(os.environ), [first, second]))
    counts = {row.name: sum(r.kind is row for r in report.results) for row in KINDS}
    assert set(counts.values()) == {1, 2}
    assert counts["hash_seed"] == 1
    ((result, item),) = report.findings()
    assert (result.kind.name, result.subject, item.severity) == (
        "unseeded_sampling",
        str(first),
        Severity.WRONG,
    )


@pytest.mark.parametrize(
    ("severities", "code"),
    [
        ([], 0),
        ([Severity.NOTE], 0),
        ([Severity.NOTE, Severity.UNKNOWN], 3),
        ([Severity.RISK, Severity.UNKNOWN], 1),
        ([Severity.WRONG], 1),
    ],
)
def test_exit_codes(severities: list[Severity], code: int) -> None:
    found = tuple(Finding(severity, "e", "m") for severity in severities)
    result = KindResult(KINDS[0], "", KindOutcome.FOUND if found else KindOutcome.OK, found)
    report = DoctorReport((result,))
    assert report.exit_code == code
    assert f"(exit code {code})" in doctor_text(report)
    jsonschema.validate(json.loads(doctor_json(report)), SCHEMA)


def test_a_cell_that_cannot_be_parsed_makes_silence_unknown(quiet: Path) -> None:
    report = examine(scenes_of(world(os.environ), [write(quiet / "a.ipynb", "def :")]))
    outcomes = {result.kind.name: result.outcome for result in report.results}
    assert outcomes["unseeded_sampling"] is outcomes["unread_code"] is KindOutcome.UNKNOWN
    assert report.exit_code == 3
    assert "unknown, for the cells that cannot be parsed: late_controls, " in doctor_text(report)


def test_a_folder_named_in_the_notebook_is_looked_into(quiet: Path) -> None:
    (quiet / "m").mkdir()
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "sym": True}}
    (quiet / "m" / "config.json").write_text(json.dumps(config))
    path = write(quiet / "a.ipynb", "%detllm use m")
    ((_, item),) = examine(scenes_of(world(os.environ), [path])).findings()
    assert item.evidence == "m is quantised (gptq, 4 bits, symmetric, activations not quantised)"
    unknown = write(quiet / "b.ipynb", "%detllm use owner/name")
    ((_, item),) = examine(scenes_of(world(os.environ), [unknown])).findings()
    assert item.severity is Severity.UNKNOWN
    assert item.evidence.startswith("whether owner/name is quantised is not known")


def test_a_container_file_beside_the_notebook_is_read(quiet: Path) -> None:
    (quiet / "sub").mkdir()
    (quiet / "sub" / "Dockerfile.gpu").write_text("FROM x\nRUN export OMP_NUM_THREADS=1\n")
    path = write(quiet / "sub" / "a.ipynb", "1")
    ((_, item),) = examine(scenes_of(world(os.environ), [path])).findings()
    assert (item.where, item.fix) == ("Dockerfile.gpu, line 2", "ENV OMP_NUM_THREADS=1")


def test_the_command(quiet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    jsonschema.validate(shown, SCHEMA)
    assert (shown["exit_code"], shown["findings"]) == (0, [])
    assert len(shown["kinds"]) == len(KINDS)
    assert main(["doctor", str(write(quiet / "a.ipynb", BAD))]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"wrong    unseeded_sampling  {quiet}/a.ipynb: cell 1, line 2\n")
    assert "\n  fix: seed=0, with a different seed for each request" in out
    assert out.endswith("wrong 1: something is wrong or at risk (exit code 1)\n")


@pytest.mark.parametrize(
    "argv", [["missing.ipynb"], ["--model", "missing"], ["bad.ipynb"]], ids=" ".join
)
def test_what_cannot_be_read_is_one_line(
    argv: list[str], quiet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (quiet / "bad.ipynb").write_text('{"cells": 3, "nbformat": 4}')
    assert main(["doctor", *argv]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_notebook_cannot_steer_the_terminal(
    quiet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(quiet / "a.ipynb", "1", kernel="\x1b[2Jevil")
    assert main(["doctor", str(path)]) == 1
    assert "\x1b" not in capsys.readouterr().out


def test_the_model_must_be_a_folder() -> None:
    with pytest.raises(ModelError, match="is not a folder"):
        scenes_of(world({}), model="nowhere")


# -- probes --------------------------------------------------------------------


class Library:
    """A driver's library with one GPU; functions it lacks do not exist."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM = 1
    nvmlClocksThrottleReasonSwPowerCap = 4  # noqa: N815 - as the library spells it

    @staticmethod
    def nvmlDeviceGetCurrentClocksThrottleReasons(handle: object) -> int:  # noqa: N802
        return 4 | 1

    @staticmethod
    def nvmlDeviceGetEccMode(handle: object) -> list[int]:  # noqa: N802
        return [1, 1]

    @staticmethod
    def nvmlDeviceGetMigMode(handle: object) -> list[int]:  # noqa: N802
        raise Library.NVMLError

    @staticmethod
    def nvmlDeviceGetComputeRunningProcesses(handle: object) -> list[Any]:  # noqa: N802
        return [type("P", (), {"pid": os.getpid()}), type("P", (), {"pid": 1})]


def test_the_state_of_a_gpu_is_read_and_the_rest_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = type("Gpu", (), {"name": "H200", "handle": None})
    monkeypatch.setattr(nvidia, "nvml", lambda: Library)
    monkeypatch.setattr(nvidia, "visible_gpus", lambda: (gpu,))
    (health,) = nvidia.gpu_health()
    assert (health.label, health.throttled, health.ecc) == ("GPU 0 (H200)", ("power cap",), True)
    assert (health.mig, health.others, health.mps) == (None, (1,), None)
    assert (health.pcie, health.ecc_errors, health.fixed_clocks) == (None, None, None)


def test_the_library_has_every_function_that_is_asked() -> None:
    import re

    import pynvml

    text = Path(str(nvidia.__file__)).read_text(encoding="utf-8")
    names = set(re.findall(r'"(nvml\w+|NVML_\w+)"', text))
    assert len(names) > 12
    assert sorted(name for name in names if not hasattr(pynvml, name)) == []


@pytest.mark.parametrize(
    ("version", "library", "kind"),
    [
        ("0.1+cpu", b"", "cpu"),
        ("0.1+cu130", b"", "cuda"),
        ("0.1", b"x libtorch_cuda.so", "cuda"),
        ("0.1", b"x libtorch.so", "cpu"),
        ("0.1", None, None),
    ],
)
def test_what_torchvision_was_built_for(
    version: str,
    library: bytes | None,
    kind: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "torchvision").mkdir()
    info = tmp_path / f"torchvision-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: torchvision\nRequires-Dist: torch (==2.9.0)\n")
    if library is not None:
        (tmp_path / "torchvision" / "_C.so").write_bytes(library)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    software._known.clear()
    assert software.build_kinds().get("torchvision") == kind
    assert software.requirements_of("torchvision") == ("torch (==2.9.0)",)
    software._known.clear()


def test_the_world_is_this_process() -> None:
    scene = world({"A": "b"})
    assert (dict(scene.environ), scene.executable) == ({"A": "b"}, sys.executable)
    assert scene.packages["jupyter-detllm"]
    assert scene.kernels is not None
    assert "python3" in scene.kernels
    assert scene.platform in Platform


def test_models_in_training_are_found_by_type_alone() -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(0.1), torch.nn.Dropout(0.0))

    class Hostile:
        def __getattribute__(self, name: str) -> object:
            raise RuntimeError(name)

    namespace = {"net": net, "plain": torch.nn.Linear(1, 1), "x": Hostile(), "_hidden": net}
    assert models_in_training(namespace) == {"net": 1}
    net.eval()
    assert models_in_training(namespace) == {}


class Loaded:
    """As transformers hands a quantisation over: an object with `to_dict`."""

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": "awq", "bits": 4, "zero_point": True}


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, None),
        (Loaded().to_dict(), "awq, 4 bits, asymmetric, activations not quantised"),
        (Loaded(), "awq, 4 bits, asymmetric, activations not quantised"),
    ],
    ids=["none", "dict", "object"],
)
def test_the_scheme_of_a_running_model_is_in_the_fingerprint(found: Any, text: str | None) -> None:
    class Config:
        architecture = "X"
        hf_config = SimpleNamespace(quantization_config=found)

        @staticmethod
        def get_diff_sampling_param() -> dict[str, Any]:
            return {}

    engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=Config))
    fields = model_fields(SimpleNamespace(llm_engine=engine), name="m")
    assert fields["model.quantization"] == text
    kept = Fingerprint.build({name: v for name, v in fields.items() if v is not None})
    assert kept.for_stamp().values().get("model.quantization") == text
