"""The story of docs/howto/drift.md, as written, and its two servers, with packages."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.cli import main
from jupyter_detllm.core.fingerprint import PACKAGES_FIELD, FieldValue, Fingerprint
from jupyter_detllm.core.packages import (
    compare_packages,
    frozen_packages,
    keep_package_list,
    list_digest,
)
from jupyter_detllm.verify.compare import compare_paths
from tests.builders import make_stamp, promoted, stamped_cell, with_actual
from tests.documented import ROOT, typed
from tests.unit.render.test_text import validate
from tests.unit.verify.test_compare_files import ALIGNED, SERVER_A, SERVER_B, UPGRADED

PAGE = ROOT / "docs" / "howto" / "drift.md"
SOURCE = "%%detgen haiku\nWrite a haiku."
THREADS: dict[str, FieldValue] = {"controls.OMP_NUM_THREADS": "2", "torch.threads": 2}
PACKAGES = ("numpy==2.3.5", "torch==2.13.0", "vllm==0.32.0")
NEWER = ("numpy==2.4.0", "scipy==1.17", "torch==2.13.0", "vllm==0.32.0")


def recorded(fields: Mapping[str, FieldValue] = THREADS) -> dict[str, Any]:
    listed = {**fields, PACKAGES_FIELD: list_digest(PACKAGES)}
    stamp = make_stamp(SOURCE, ["An old pond."], name="haiku", fields=listed)
    return keep_package_list(promoted(stamped_cell(SOURCE, stamp)), PACKAGES)


def drifted(fields: Mapping[str, FieldValue]) -> dict[str, Any]:
    """Return the notebook as after `rerun --save` where it drifts: two fingerprints."""
    fresh = make_stamp(SOURCE, ["An old frog."], name="haiku", fields=fields)
    return with_actual(recorded(), 1, fresh)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    now: dict[str, FieldValue] = {"controls.OMP_NUM_THREADS": "16", "torch.threads": 16}
    (tmp_path / "old.ipynb").write_text(json.dumps(recorded()))
    for name in ("nb.ipynb", "new.ipynb"):
        (tmp_path / name).write_text(json.dumps(drifted(now)))
    (tmp_path / "old.txt").write_text("\n".join(PACKAGES))
    (tmp_path / "new.txt").write_text("\n".join(NEWER))
    return tmp_path


def commands() -> list[list[str]]:
    """Return the page's commands of its second step, as a reader types them."""
    found = [words for _, words in typed(PAGE.read_text("utf-8"), "jupyter detllm")]
    return [words for words in found if words[0] in ("compare", "fingerprint")]


def test_the_second_step_works_as_written(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    monkeypatch.setitem(sys.modules, "torch", None)  # another test may have imported it
    said: dict[str, str] = {}
    for words in commands():
        if all((folder / word).exists() for word in words if word.endswith((".json", ".ipynb"))):
            assert main(words) in (0, 1, 3), words
        elif words[0] == "fingerprint":
            assert main(words) == 0
        said[" ".join(words)] = capsys.readouterr().out
    assert "1. torch.threads: 2 -> 16" in said["compare old.ipynb new.ipynb"]
    bare = said["compare recorded.json now.json"]
    assert "controls.OMP_NUM_THREADS: 2 -> 16" in bare
    assert "not compared: torch: only A recorded it" in bare
    assert "packages that differ (" in bare
    freeze = said["compare old.ipynb new.ipynb --packages old.txt new.txt"]
    assert "packages that differ (2):" in freeze
    assert "- numpy: 2.3.5 -> 2.4.0" in freeze
    assert "- scipy: (absent) -> 1.17" in freeze


def test_of_two_fingerprints_the_recorded_one_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def threads(*options: str) -> object:
        assert main(["fingerprint", "nb.ipynb", "--out", "f.json", *options]) == 0
        return json.loads((folder / "f.json").read_text())["numerics"]["torch.threads"]

    assert threads() == 2
    assert "the recorded one (that of the outputs: --side actual)" in capsys.readouterr().err
    assert threads("--side", "actual") == 16
    assert threads("--side", "reference", "--cell", "haiku") == 2
    assert main(["fingerprint", "nb.ipynb", "--cell", "gone"]) == 2
    assert "no stamped cell is 'gone'; expected haiku" in capsys.readouterr().err


def save(path: Path, fields: Mapping[str, FieldValue], packages: tuple[str, ...] = ()) -> Path:
    listed = {**fields, PACKAGES_FIELD: list_digest(packages)} if packages else fields
    found = Fingerprint.build({k: v for k, v in listed.items() if v is not None})
    path.write_text(json.dumps({**found.to_json(), "packages": list(packages)}))
    return path


def test_two_servers_bare_say_what_is_left_and_which_packages_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = save(tmp_path / "a.json", SERVER_A, PACKAGES)
    steps = [
        (SERVER_B, " 1. software.vllm: 0.6.3.post1 -> 0.6.2", "left after that: torch.threads"),
        (UPGRADED, " 1. torch.threads: 16 -> 80", "left after that: controls.OMP_NUM_THREADS"),
        (ALIGNED, "no field that can change results differs", "also different, but unlikely"),
    ]
    for server, first, left in steps:
        main(["compare", str(a), str(save(tmp_path / "b.json", server, NEWER))])
        out = capsys.readouterr().out
        assert first in out
        assert left in out
        assert "packages that differ (2):" in out
        assert "numpy: 2.3.5 -> 2.4.0" in out


def test_a_session_and_a_shell_on_cores_that_it_would_keep(tmp_path: Path) -> None:
    """Unset threads are those in use; on two plain cores these are the recorded two."""
    a = tmp_path / "a.ipynb"
    a.write_text(json.dumps(recorded()))
    shell = {"software.torch": "2.13.0+cpu", "software.vllm": "0.32.0"}
    for cores, names in (
        ("2 cores, 2 threads, 2 usable", []),
        ("40 cores, 80 threads, 80 usable", ["controls.OMP_NUM_THREADS"]),
    ):
        b = save(tmp_path / "b.json", {**shell, "hardware.cpu_cores": cores})
        report = compare_paths(a, b)
        validate(report)
        (found,) = report.notebooks[0].environment
        assert [diff.name for diff in found.telling] == names


def test_pip_freeze_is_read_and_nothing_else() -> None:
    text = (
        "# a comment\nNumPy==2.3.5\n\nmine @ file:///home/anna/src/mine-1.0.whl\n"
        "other @ git+https://user:secret@host/x/other.git@abc123\n"
        "-e git+ssh://git@host/them.git@def#egg=them\n"
    )
    found = frozen_packages(text)
    assert found == (
        "NumPy==2.3.5",
        "mine==from mine-1.0.whl",
        "other==from abc123",
        "them==from def",
    )
    assert "anna" not in str(found)
    assert "secret" not in str(found)
    assert compare_packages(["A_b==1"], ["a-B==1"]) == ()
    with pytest.raises(ValueError, match="hello"):
        frozen_packages("hello world")


def test_another_file_is_refused_in_one_line(folder: Path) -> None:
    (folder / "odd.txt").write_text("{}")
    for path, what in (("odd.txt", "is not a package list"), ("gone.txt", "cannot be read")):
        report = compare_paths("old.ipynb", "new.ipynb", packages=("old.txt", path))
        assert report.exit_code == 2
        assert what in report.notebooks[0].problems[0]
