from __future__ import annotations

import json
from pathlib import Path

import pytest

from jupyter_detllm.cache.store import TextStore, current_file, results_folder
from jupyter_detllm.cli import main
from jupyter_detllm.core.canonical import digest_of
from jupyter_detllm.models.cache import CACHE_VARIABLE


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    return results_folder()


def fill(folder: Path, count: int = 3) -> None:
    store = TextStore(folder)
    for i in range(count):
        store.put(digest_of(i), "x" * 100)
    store.count(hits=4, generated=3)
    store.close()


def info(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, object]:
    assert main(["cache", "info", "--json", *more]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_looking_creates_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert info(capsys)["results"] == 0
    assert main(["cache", "clear"]) == 0
    assert not folder.exists()


def test_what_it_holds_and_forgetting_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(folder)
    found = info(capsys)
    assert (found["results"], found["result_bytes"]) == (3, 300)
    assert found["counters"] == {"hits": 4, "generated": 3}
    assert main(["cache", "info"]) == 0
    assert "results     3, 300 bytes\n" in capsys.readouterr().out
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == "deleted: 3 results, 300 bytes\n"
    after = info(capsys)
    assert (after["results"], after["counters"], after["problem"]) == (0, {}, "")


def test_another_folder(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path / "other")
    assert info(capsys)["results"] == 0
    assert info(capsys, "--path", str(tmp_path / "other"))["results"] == 3
    assert main(["cache", "clear", "--path", str(tmp_path / "other")]) == 0
    capsys.readouterr()
    assert info(capsys, "--path", str(tmp_path / "other"))["results"] == 0


def test_a_broken_file_is_told_and_removed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(folder)
    broken = current_file(folder)
    broken.write_bytes(b"broken" * 1000)
    assert main(["cache", "info"]) == 0
    assert f"set aside   {broken.name} (broken)" in capsys.readouterr().out
    assert main(["cache", "clear"]) == 0
    capsys.readouterr()
    assert info(capsys)["set_aside"] == []
    assert not broken.exists()


def test_a_folder_that_is_none_is_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["cache", "info", "--path", str(tmp_path / "file")]) == 0
    assert main(["cache", "forget"]) == 2
    assert "Traceback" not in capsys.readouterr().err
