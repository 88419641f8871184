"""Lock files, from what pip answers; pip itself is played by a function."""

from __future__ import annotations

import json
import platform
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from packaging.pylock import Pylock

from jupyter_detllm.errors import DetLLMError, UsageError
from jupyter_detllm.export.environment import Pin
from jupyter_detllm.export.locking import (
    LockedFile,
    Resolution,
    lock,
    resolve,
)
from tests.exporting import PACKAGES, environment

SHA = "ab" * 32
HOST = "https://files.example"
INDEX = "https://download.pytorch.org/whl/cpu"


class Pip:
    """An index with some wheels; what is not in it ends pip as a missing package does."""

    def __init__(self, urls: Mapping[str, str], hashes: object = None, noise: str = "") -> None:
        self.urls = urls
        self.hashes = {"sha256": SHA} if hashes is None else hashes
        self.noise = noise
        self.further: Mapping[str, str] = {}
        self.calls: list[list[str]] = []

    def __call__(self, arguments: Sequence[str]) -> tuple[int, str, str]:
        self.calls.append(list(arguments))
        urls = {**self.urls, **(self.further if INDEX in arguments else {})}
        lines = Path(arguments[arguments.index("-r") + 1]).read_text().splitlines()
        for line in lines:
            if line.partition("==")[0] not in urls:
                return 1, "", f"{self.noise}\nERROR: No matching distribution found for {line}\n"
        items = [self.item(line.partition("==")[0], urls) for line in lines]
        return 0, json.dumps({"install": items}), ""

    def item(self, name: str, urls: Mapping[str, str]) -> dict[str, Any]:
        info = {"url": urls[name], "archive_info": {"hashes": self.hashes}}
        return {"metadata": {"name": name.replace("-", "_").upper()}, "download_info": info}


def url(name: str, version: str = "1.0", host: str = HOST) -> str:
    return f"{host}/{name.replace('-', '_')}-{version}-py3-none-any.whl"


REPORT = json.dumps({"install": [Pip({}).item("c", {"c": url("c")})]})


def answer(pip: Pip, *names: str, **options: Any) -> Resolution:
    return resolve([Pin(name, "1.0") for name in names], run=pip, **options)


def test_every_pin_has_its_file() -> None:
    pip = Pip({"a-b": url("a-b"), "c": url("c")})
    found = answer(pip, "a-b", "c")
    assert found.files == {"a-b": LockedFile(url("a-b"), SHA), "c": LockedFile(url("c"), SHA)}
    assert found.omitted == {}
    assert len(pip.calls) == 1
    options = set(pip.calls[0])
    assert {"--dry-run", "--no-deps", "--only-binary", ":all:"} <= options
    assert "--python-version" not in options


def test_what_the_index_lacks_is_omitted_by_name_and_the_others_are_not() -> None:
    found = answer(Pip({"b": url("b")}), "a", "b", "c")
    assert list(found.files) == ["b"]
    assert set(found.omitted) == {"a", "c"}
    assert not found.unreachable


def test_what_constraints_forbid_is_omitted() -> None:
    said = "ERROR: Cannot install A_b==1.0 because these package versions have conflicting needs."
    answers = [(1, "", f"{said}\nERROR: ResolutionImpossible: for help visit"), (0, REPORT, "")]
    found = resolve([Pin("a-b", "1.0"), Pin("c", "1.0")], run=lambda _: answers.pop(0))
    assert found.files == {"c": LockedFile(url("c"), SHA)}
    assert found.omitted == {"a-b": "the constraints of pip's configuration forbid it"}


@pytest.mark.parametrize("hashes", [{}, {"md5": "0"}, {"sha256": "XY"}, {"sha256": None}])
def test_a_file_without_a_hash_is_omitted(hashes: object) -> None:
    found = answer(Pip({"a": url("a")}, hashes), "a")
    assert found.files == {}
    assert "SHA-256" in found.omitted["a"]


def test_an_index_that_does_not_answer_is_not_asked_for_everything() -> None:
    noise = "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError'"
    pip = Pip({}, noise=noise)
    found = answer(pip, *(f"p{i}" for i in range(100)))
    assert found.unreachable
    assert len(pip.calls) == 3
    assert len(found.omitted) == 100
    assert set(found.omitted.values()) == {"the index did not answer"}


def test_a_build_of_pytorch_is_looked_for_in_the_further_index_too() -> None:
    pip = Pip({"a": url("a")})
    pip.further = {"torch": url("torch", "1.0%2Bcpu")}
    pins = [Pin("a", "1.0"), Pin("torch", "1.0+cpu"), Pin("gone", "1.0")]
    found = resolve(pins, index=INDEX, run=pip)
    assert found.files["torch"].name == "torch-1.0+cpu-py3-none-any.whl"
    assert set(found.omitted) == {"gone"}
    assert sum(INDEX in call for call in pip.calls) == 1


def test_wheels_for_another_python_are_asked_for_as_such() -> None:
    pip = Pip({"a": url("a")})
    answer(pip, "a", python="3.99.1")
    call = pip.calls[0]
    assert call[call.index("--python-version") + 1] == "3.99"
    assert "--target" in call


def test_credentials_of_an_address_are_not_kept() -> None:
    secret = url("a", host="https://user:hunter2@files.example") + "?token=hunter3#sha256=4"
    assert answer(Pip({"a": secret}), "a").files["a"].url == url("a")


@pytest.mark.parametrize(
    "bad",
    [
        *("", "ftp://x/a-1.0-py3-none-any.whl", "https://x/a-1.0.tar.gz", "https://x/a.whl"),
        *('https://x/"a-1.0-py3-none-any.whl', "https://x/a\n-1.0-py3-none-any.whl"),
        *("https://x/a\\-1.0-py3-none-any.whl", "https://x/a-1.0-py3-none-any.whl\u202e"),
    ],
)
def test_an_address_that_is_no_wheels_is_omitted(bad: str) -> None:
    assert list(answer(Pip({"a": bad}), "a").omitted) == ["a"]
    with pytest.raises(ValueError, match="wheel"):
        LockedFile(bad, SHA)


@pytest.mark.parametrize(
    ("done", "said"),
    [
        ((1, "", "/usr/bin/python: No module named pip\n"), "no pip.*ensurepip"),
        ((2, "", "ERROR: something else\nmore\n"), "pip failed: ERROR: something else"),
        ((1, "", ""), "no output"),
        ((0, "not JSON", ""), "report cannot be read"),
        ((0, '{"install": [1]}', ""), "report cannot be read"),
        ((1, "", "ERROR: No matching distribution found for other==1"), "pip failed"),
    ],
)
def test_a_pip_that_fails_is_one_line(done: tuple[int, str, str], said: str) -> None:
    with pytest.raises(DetLLMError, match=said) as caught:
        resolve([Pin("a", "1.0")], run=lambda _: done)
    assert "\n" not in str(caught.value)


def everything() -> Pip:
    pins = (Pin.parse(text) for text in PACKAGES)
    return Pip({p.name: url(p.name, p.version.replace("+", "%2B")) for p in pins if p})


def test_the_lock_file_is_valid_and_in_order() -> None:
    done = lock(environment(packages=PACKAGES), run=everything())
    found = Pylock.from_dict(tomllib.loads(done.text))
    assert [p.name for p in found.packages] == sorted(p.partition("==")[0] for p in PACKAGES)
    torch = next(p for p in found.packages if p.name == "torch")
    assert str(torch.version) == "2.13.0+cpu"
    assert torch.wheels is not None
    assert torch.wheels[0].hashes == {"sha256": SHA}
    assert str(found.requires_python) == "==3.11.*"
    assert done.omitted == done.remarks == ()


def test_what_is_left_out_of_a_lock_file_is_named() -> None:
    pip = everything()
    pip.urls = {k: v for k, v in pip.urls.items() if k not in ("anyio", "jupyter-detllm")}
    pip.urls = {**pip.urls, "numpy": url("numpy", "2.3.5", "file:///wheels")}
    done = lock(environment(packages=PACKAGES), run=pip)
    assert done.omitted == ("anyio==4.16.0: the index has no wheel of this version",)
    assert any("1 of 6 wheels are on this machine" in line for line in done.remarks)
    assert any(line.startswith("jupyter-detllm==0.1.0") for line in done.remarks)


def test_wheels_for_another_machine_than_the_recorded_one_are_told() -> None:
    for machine, told in ((platform.machine(), False), ("riscv64", True)):
        fields = {"software.numpy": "2.3.5", "hardware.machine": machine}
        done = lock(environment(fields), run=everything())
        assert any("for this machine" in line for line in done.remarks) is told


def test_a_lock_file_that_would_install_nothing_is_not_made() -> None:
    with pytest.raises(DetLLMError, match=r"did not answer.*--to requirements"):
        lock(environment(), run=Pip({}, noise="Could not fetch URL"))
    with pytest.raises(DetLLMError, match="no pin has a hash"):
        lock(environment(), run=Pip({}))
    with pytest.raises(UsageError, match="no package to lock"):
        lock(environment({"engine.name": "fake"}), run=Pip({}))
