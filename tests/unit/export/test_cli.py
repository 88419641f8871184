from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.cli import main
from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.errors import UsageError
from jupyter_detllm.export.departures import Running, departures, read_export, unexpected
from jupyter_detllm.export.formats import FORMATS
from jupyter_detllm.probes.software import package_list
from tests.builders import make_stamp, notebook, stamped_cell
from tests.exporting import CPU, GPU, PACKAGES, SOURCE, book, environment

NAMES = {
    **{"requirements": "requirements.txt", "dockerfile": "Dockerfile"},
    **{"env": "detllm.env", "json": "environment.json"},
}
VARIABLES = {
    **{"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "2", "TORCHDYNAMO_DISABLE": "1"},
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def running(
    packages: Mapping[str, str] | None = None,
    environ: Mapping[str, str] = VARIABLES,
    python: str = "3.11.9",
    fields: Mapping[str, Any] = CPU,
) -> Running:
    listed = dict(p.split("==") for p in PACKAGES) if packages is None else packages
    return Running(listed, {}, environ, python, Fingerprint.build(fields))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "nb.ipynb").write_text(json.dumps(book(packages=PACKAGES)))
    (folder / "plain.ipynb").write_text(json.dumps(book()))
    return folder


@pytest.mark.parametrize("form", FORMATS)
def test_an_export_is_read_back_and_agrees_with_its_own_environment(form: str) -> None:
    expected = read_export(FORMATS[form](environment(packages=PACKAGES)))
    assert expected.form == form
    assert expected.unread == ()
    assert len(expected.pins) == (0 if form == "env" else len(PACKAGES) - 1)
    assert expected.variables == ({} if form == "requirements" else VARIABLES)
    assert departures(expected, running()) == ()
    assert unexpected(expected, running()) == ()


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_tells_where_an_environment_departs(form: str) -> None:
    expected = read_export(FORMATS[form](environment(packages=PACKAGES)))
    other = running(
        {**dict(p.split("==") for p in PACKAGES), "torch": "2.12.0", "anyio": "5.0"},
        {**VARIABLES, "OMP_NUM_THREADS": "4"},
        "3.12.1",
    )
    found = {d.what: d for d in departures(expected, other)}
    has_pins, has_variables = form != "env", form != "requirements"
    assert ("torch" in found) == ("anyio" in found) == ("Python" in found) == has_pins
    assert ("OMP_NUM_THREADS" in found) == has_variables
    if has_pins:
        assert str(found["torch"]) == "torch: 2.13.0+cpu -> 2.12.0"
        assert found["torch"].matters
        assert not found["anyio"].matters
    if has_variables:
        assert found["OMP_NUM_THREADS"].matters


def test_a_lock_file_is_read_back() -> None:
    lock = 'lock-version = "1.0"\nrequires-python = "==3.11.*"\ncreated-by = "x"\n'
    lock += '[[packages]]\nname = "numpy"\nversion = "2.3.5"\n[[packages]]\nname = "local"\n'
    expected = read_export(lock)
    assert expected.form == "pylock"
    assert expected.unread == ("local==None",)
    assert departures(expected, running()) == ()
    assert [d.what for d in departures(expected, running({}, python="3.12.0"))] == [
        "Python",
        "numpy",
    ]


def test_what_is_installed_beside_a_whole_list_is_told() -> None:
    packages = {**dict(p.split("==") for p in PACKAGES), "extra": "1.0"}
    whole = read_export(FORMATS["requirements"](environment(packages=PACKAGES)))
    assert unexpected(whole, running(packages)) == ("extra==1.0",)
    assert unexpected(read_export(FORMATS["requirements"](environment())), running(packages)) == ()


def test_the_build_that_torch_itself_names_counts() -> None:
    expected = read_export(FORMATS["requirements"](environment(GPU)))
    here = Running({"torch": "2.11.0"}, {"torch": "2.11.0+cu130"}, {}, "3.12.3", Fingerprint({}))
    assert "torch" not in {d.what for d in departures(expected, here)}


def test_a_json_export_tells_fields_of_the_machine_as_well() -> None:
    fields = {**CPU, "hardware.cpu_isa": "AVX512"}
    expected = read_export(FORMATS["json"](environment(fields)))
    other = running(fields={**fields, "hardware.cpu_isa": "AVX2", "software.torch": "1.0"})
    found = {d.what: d for d in departures(expected, other)}
    assert set(found) == {"hardware.cpu_isa", "software.torch"}
    assert found["hardware.cpu_isa"].why.startswith("bfloat16 kernels differ")
    changed = running({**other.packages, "torch": "1.0"}, fields=other.fingerprint.values())
    assert {d.what for d in departures(expected, changed)} == {"hardware.cpu_isa", "torch"}


def test_a_requirements_file_of_other_origin_is_read_as_far_as_it_pins() -> None:
    text = (
        "-r base.txt\nNumPy==2.3.5 --hash=sha256:00 \\\n  --hash=sha256:11\n"
        "anyio==4.16.0 ; python_version < '4'\nrequests>=2\nx @ https://x/x.whl\n"
    )
    expected = read_export(text)
    assert [str(pin) for pin in expected.pins] == ["numpy==2.3.5", "anyio==4.16.0"]
    assert expected.unread == ("requests>=2", "x @ https://x/x.whl")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "pins nothing"),
        ("requests>=2\n", "pins nothing"),
        ("{", "not JSON"),
        ('{"cells": []}', "not an export"),
        ('{"schema": "detllm.export/1"}', "cannot be read"),
        ("lock-version = 1\n[", "not TOML"),
    ],
)
def test_a_file_that_is_no_export_is_one_line(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_export(text)


@pytest.mark.parametrize("form", FORMATS)
def test_export_writes_a_file_and_replaces_only_exports(
    form: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = NAMES[form]
    assert main(["export", "nb.ipynb", "--to", form, "--out", name]) == 0
    text = (here / name).read_text()
    assert main(["export", "nb.ipynb", "--to", form]) == 0
    assert capsys.readouterr() == (text, "")
    assert main(["export", "plain.ipynb", "--to", form, "--out", name]) == 0
    (here / name).write_text("mine\n")
    assert main(["export", "nb.ipynb", "--to", form, "--out", name]) == 2
    assert (here / name).read_text() == "mine\n"
    assert "exists and is not an export" in capsys.readouterr().err


def test_what_is_missing_is_said_and_is_no_failure(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "plain.ipynb", "--to", "requirements"]) == 0
    assert "holds no package list" in capsys.readouterr().err


def test_what_cannot_be_exported_is_said_and_is_exit_code_3(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packages = (*PACKAGES, *(f"bad {i}==1" for i in range(20)))
    (here / "bad.ipynb").write_text(json.dumps(book(packages=packages)))
    assert main(["export", "bad.ipynb", "--to", "requirements", "--json"]) == 3
    out, err = capsys.readouterr()
    assert len(json.loads(out)["refused"]) == 20
    assert "left out: 'bad 0==1'" in err
    assert "left out: 12 more (--json names them)" in err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "nothing to export"),
        (["nb.ipynb"], "nothing to export"),
        (["nb.ipynb", "--to", "conda"], "'conda'"),
        (["none.ipynb", "--to", "env"], "none.ipynb"),
        (["nb.ipynb", "--to", "env", "--fingerprint", "abc123"], "begins with 'abc123'"),
        (["nb.ipynb", "--to", "env", "--out", "no/such"], "no folder"),
        (["nb.ipynb", "--to", "env", "--out", "."], "is a folder"),
        (["nb.ipynb", "--to", "pylock", "--out", "lock.toml"], "pylock.toml"),
        (["nb.ipynb", "--check", "x"], "takes a file and nothing else"),
        (["--check", "none.txt"], "none.txt cannot be read"),
        (["--check", "nb.ipynb"], "jupyter detllm compare"),
        (["--check", "binary"], "UTF-8"),
    ],
)
def test_a_mistake_is_one_line(
    argv: list[str], said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "binary").write_bytes(b"\xff\xfe")
    assert main(["export", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


def test_check_of_this_environment(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"software.python": platform.python_version(), "controls.MKL_CBWR": "COMPATIBLE"}
    (here / "now.ipynb").write_text(json.dumps(book(fields, package_list())))
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    for form, name in NAMES.items():
        assert main(["export", "now.ipynb", "--to", form, "--out", name]) == 0
        capsys.readouterr()
        assert main(["export", "--check", name]) == 0
        assert "no difference" in capsys.readouterr().out
    monkeypatch.setenv("MKL_CBWR", "AUTO")
    assert main(["export", "--check", "detllm.env", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert [(d["what"], d["found"]) for d in data["departures"]] == [("MKL_CBWR", "AUTO")]
    assert main(["export", "--check", "detllm.env"]) == 1
    assert "MKL_CBWR: COMPATIBLE -> AUTO" in capsys.readouterr().out


def test_check_says_what_it_could_not_compare(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, _, version = package_list()[0].partition("==")
    (here / "r.txt").write_text(f"{name}=={version}\nrequests>=2\n")
    assert main(["export", "--check", "r.txt"]) == 3
    assert "requests>=2" in capsys.readouterr().err


def test_two_environments_name_themselves(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = "%%detgen other\nWrite."
    cells = [
        stamped_cell(s, make_stamp(s, name=n, fields={"software.torch": v}))
        for s, n, v in ((SOURCE, "haiku", "2.12.0"), (two, "other", "2.13.0"))
    ]
    (here / "two.ipynb").write_text(json.dumps(notebook(*cells)))
    assert main(["export", "two.ipynb", "--to", "requirements"]) == 2
    err = capsys.readouterr().err
    digest = err.split("--fingerprint ")[1].strip()
    assert main(["export", "two.ipynb", "--to", "requirements", "--fingerprint", digest]) == 0
    assert "torch==2.12.0" in capsys.readouterr().out
