"""Kernelspecs of this package: their content, and that no other kernel is ever touched."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from jupyter_detllm.cli import main
from jupyter_detllm.controls.environ import ENV_CONTROLS, ProcessEvent
from jupyter_detllm.controls.guard import apply
from jupyter_detllm.controls.ledger import KERNEL_VARIABLE, KernelMark, kernel_mark
from jupyter_detllm.core.generation import MAX_SEED
from jupyter_detllm.core.levels import LEVEL_VARIABLE, Level
from jupyter_detllm.errors import UsageError
from jupyter_detllm.export.kernelspec import (
    KernelLocation,
    find_kernels,
    install_kernel,
    kernelspec,
    remove_kernel,
)
from jupyter_detllm.kernel.config import DetLLM
from jupyter_detllm.kernel.session import SessionSettings
from jupyter_detllm.kernel.status import status_text
from jupyter_detllm.probes.software import Platform


def environ_of(spec: dict) -> dict[str, str]:
    return dict(spec["env"])


@pytest.mark.parametrize("platform", Platform)
@pytest.mark.parametrize("level", Level)
def test_every_control_of_the_level_and_platform_is_set(level: Level, platform: Platform) -> None:
    environ = environ_of(kernelspec("k", level=level, platform=platform))
    for control in ENV_CONTROLS:
        wanted = control.applies(platform, "vllm") and control.wanted(level, frozenset())
        if not control.of_a_method:  # those the method of this host decides about
            assert (control.name in environ) == wanted, control.name
        if control.name in environ and control.value is not None:
            assert environ[control.name] == control.value


@pytest.mark.parametrize("level", Level)
def test_nothing_is_late_in_a_process_that_starts_with_it(level: Level) -> None:
    environ = environ_of(kernelspec("k", level=level, platform=Platform.CPU))
    report = apply(level, environ=dict(environ), modules={}, initial=environ, platform=Platform.CPU)
    assert (report.late, report.user_set) == ((), ())
    assert environ["PYTHONHASHSEED"] == "0"
    assert any(c.precedes is ProcessEvent.INTERPRETER_START for c in ENV_CONTROLS)


def test_install_list_and_remove(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["kernel", "install", "--user", "--name", "quiet", "--level", "repeatable"]
    assert main([*line, "--seed", "7", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    spec = json.loads(Path(shown["folder"], "kernel.json").read_text(encoding="utf-8"))
    assert spec["argv"][:3] == [sys.executable, "-m", "ipykernel_launcher"]
    assert spec["env"][KERNEL_VARIABLE] == "quiet level=repeatable seed=7"
    assert (shown["level"], shown["seed"], shown["env"]) == ("repeatable", "7", spec["env"])
    assert main(["kernel", "list"]) == 0
    assert capsys.readouterr().out.startswith("quiet                repeatable, seed 7  ")
    assert main(["kernel", "remove", "quiet"]) == 0
    assert capsys.readouterr().out == f"removed {shown['folder']}\n"
    assert main(["kernel", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"kernels": []}
    assert list(Path(shown["folder"]).parent.iterdir()) == []


def test_jupyter_reads_it() -> None:
    from jupyter_client.kernelspec import KernelSpecManager

    found = install_kernel(kernelspec("quiet"), "quiet", KernelLocation.USER)
    spec = KernelSpecManager().get_kernel_spec("quiet")
    assert spec.env == dict(found.environ)
    assert (spec.language, spec.display_name) == ("python", "Python (detllm) quiet")


def test_a_second_installation_replaces_the_first(tmp_path: Path) -> None:
    install_kernel(kernelspec("k", seed=1), "k", tmp_path)
    found = install_kernel(kernelspec("k", seed=2), "k", tmp_path)
    assert (found.seed, found.level) == (2, None)
    assert [entry.name for entry in found.folder.parent.iterdir()] == ["k"]
    assert [kernel.seed for kernel in find_kernels([found.folder.parent])] == [2]


def test_a_kernel_of_others_is_neither_replaced_listed_nor_removed(tmp_path: Path) -> None:
    folder = tmp_path / "share" / "jupyter" / "kernels"
    (folder / "detllm").mkdir(parents=True)
    (folder / "detllm" / "kernel.json").write_text('{"argv": ["x"], "env": {}}')
    with pytest.raises(UsageError, match="is a kernel that was not installed by jupyter-detllm"):
        install_kernel(kernelspec("detllm"), "detllm", tmp_path)
    assert find_kernels([folder]) == ()
    with pytest.raises(
        UsageError, match=r"no kernel named 'detllm' was installed by .* \(none are installed\)"
    ):
        remove_kernel("detllm", [folder])
    assert (folder / "detllm" / "kernel.json").read_text() == '{"argv": ["x"], "env": {}}'


@pytest.mark.parametrize("name", ["", "..", "../x", "A B", "a/b", "Ünder", ".hidden", "x" * 101])
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is not a valid kernel name"):
        kernelspec(name)


@pytest.mark.parametrize("seed", [-1, MAX_SEED + 1])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(UsageError, match="out of range"):
        kernelspec("k", seed=seed)


def test_a_prefix_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["kernel", "install", "--prefix", str(tmp_path / "file")]) == 2
    error = capsys.readouterr().err
    assert "cannot be written: not a directory" in error
    assert error.count("\n") == 1


def test_without_ipykernel_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="-m pip install ipykernel"):
        install_kernel(kernelspec("k", platform=Platform.CPU), "k", tmp_path)


@pytest.mark.parametrize(
    "mark",
    [KernelMark("k"), KernelMark("k", Level.SEEDED), KernelMark("k-1.x", Level.INVARIANT, 5)],
    ids=KernelMark.text,
)
def test_a_mark_is_read_back(mark: KernelMark) -> None:
    assert kernel_mark({KERNEL_VARIABLE: mark.text()}) == mark


@pytest.mark.parametrize("text", ["", "a b", "k level=best", f"k seed={2**63}", "k seed=-1"])
def test_a_broken_mark_is_none(text: str) -> None:
    assert kernel_mark({KERNEL_VARIABLE: text}) is None
    assert kernel_mark({}) is None


def test_a_session_begins_with_what_the_kernelspec_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNEL_VARIABLE, "k level=seeded seed=9")
    for settings in (SessionSettings.initial(), DetLLM().settings()):
        assert (settings.seed, settings.level, settings.level_asked) == (9, Level.SEEDED, True)
    monkeypatch.setenv(LEVEL_VARIABLE, "repeatable")  # a rerun's level comes first
    assert (SessionSettings.initial().seed, SessionSettings.initial().level) == (
        9,
        Level.REPEATABLE,
    )
    assert DetLLM(seed=3).settings().seed == 3
    monkeypatch.setenv(KERNEL_VARIABLE, "k")
    monkeypatch.delenv(LEVEL_VARIABLE)
    assert SessionSettings.initial() == SessionSettings()
    assert not SessionSettings.initial().level_asked


def test_status_does_not_name_a_kernelspec_where_there_is_none() -> None:
    from jupyter_detllm.kernel.session import Session

    assert "kernelspec" not in status_text(Session())
