"""Loading, unloading, completing and scripting, each in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.waiting import HANGS

HEAVY = (
    "torch",
    "vllm",
    "transformers",
    "numpy",
    "pandas",
    "ipywidgets",
    "anywidget",
    "nbformat",
    "nbclient",
    "rich",
    "pydantic",
)

SHELL = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
ip = InteractiveShell.instance()
"""


def run(code: str, *flags: str) -> Any:
    """Run `code` in a fresh interpreter; return the JSON of its last line."""
    done = subprocess.run(
        [sys.executable, *flags, "-c", code],
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_load_ext_imports_nothing_heavy() -> None:
    code = f"""{SHELL}
before = set(sys.modules)
ip.run_line_magic("load_ext", "jupyter_detllm")
loaded = set(sys.modules) - before
import jupyter_detllm
jupyter_detllm.__version__, dir(jupyter_detllm)
print(json.dumps(sorted(name.split(".")[0] for name in loaded)))
"""
    loaded = run(code)
    assert "jupyter_detllm" in loaded
    assert not set(loaded) & set(HEAVY)


def test_the_first_detllm_and_the_fake_engine_import_nothing_heavy() -> None:
    code = f"""{SHELL}
before = set(sys.modules)
ip.run_line_magic("load_ext", "jupyter_detllm")
ip.run_line_magic("detllm", "--seed 3")
ip.run_line_magic("detllm", "use fake")
ip.run_cell("%%detgen --max-tokens 3\\nHello")
print(json.dumps(sorted({{n.split(".")[0] for n in set(sys.modules) - before}})))
"""
    assert not set(run(code)) & set(HEAVY)


def test_load_twice_reload_and_unload_are_clean() -> None:
    code = f"""{SHELL}
def state():
    callbacks = ip.events.callbacks
    return [
        len(ip.Completer.custom_matchers),
        len(callbacks["pre_run_cell"]),
        len(callbacks["post_run_cell"]),
        len(ip.configurables),
        [name in ip.magics_manager.magics[kind]
         for kind, name in (("line", "detllm"), ("cell", "detgen"))],
    ]
ip.run_line_magic("unload_ext", "nothing")  # IPython registers these magics when used
before = state()
import jupyter_detllm
ip.run_line_magic("load_ext", "jupyter_detllm")
once = state()
jupyter_detllm.load_ipython_extension(ip)
twice = state()
ip.run_line_magic("reload_ext", "jupyter_detllm")
again = state()
ip.run_cell("%detllm use fake")
ip.run_line_magic("unload_ext", "jupyter_detllm")
unloaded = state()
jupyter_detllm.unload_ipython_extension(ip)
ip.run_line_magic("load_ext", "jupyter_detllm")
kept = ip.run_cell("%%detgen --max-tokens 2\\nHello").success
print(json.dumps([before, once, twice, again, unloaded, state(), kept]))
"""
    before, once, twice, again, unloaded, final, kept = run(code)
    assert before[-1] == [False, False]
    assert once[-1] == [True, True]
    assert [b - a for a, b in zip(before[:-1], once[:-1], strict=True)] == [1, 1, 1, 2]
    assert once == twice == again == final
    assert unloaded == before
    assert kept is True


COMPLETIONS = {
    "%detllm ": {"use", "status", "show", "check", "stamps", "release", "--seed", "--level"},
    "%detllm st": {"status", "stamps"},
    "%detllm sh": {"show"},
    "%detllm show --": {"--static"},
    "%detllm check ": {"here.ipynb"},
    "%detllm check here.ipynb --policy t": {"tokens"},
    "%detllm bisect ": {"haiku"},
    "%detllm bisect haiku --notebook ": {"here.ipynb"},
    "%detllm bisect haiku --model f": {"fake"},
    "%detllm use o": {"owner/name"},
    "%detllm use demo --dtype b": {"bfloat16"},
    "%detllm use demo --max-model": {"--max-model-len"},
    "%detllm use fake --enable-p": {"--enable-prefix-caching"},
    "detllm rel": {"release"},
    "x = %detllm us": {"use"},
    "%detllm use ": {"demo", "fake", "./model", "owner/name"},
    "%detllm use demo --le": {"--level"},
    "%detllm --level ": {"seeded", "repeatable", "invariant"},
    "%detllm --torch-deterministic w": {"warn"},
    "%detllm stamps --emit ": {"haiku"},
    "%%detgen h": {"haiku"},
    "%%detgen --po": {"--policy"},
    "%%detgen x --policy b": {"bitwise"},
    "\n%%detgen --te": {"--temperature", "--text"},
}


def test_completion(tmp_path: Any) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "other").mkdir()
    (tmp_path / "here.ipynb").write_text("{}")
    cached = tmp_path / "hub" / "models--owner--name"
    for name, content in (
        ("refs/main", "a" * 40),
        (f"snapshots/{'a' * 40}/config.json", "{}"),
        (f"snapshots/{'a' * 40}/model.safetensors", ""),
    ):
        (cached / name).parent.mkdir(parents=True, exist_ok=True)
        (cached / name).write_text(content)
    typed_texts = [*COMPLETIONS, "detllm = 3; detl", "x\n%%detgen --te"]
    code = f"""{SHELL}
import os
os.chdir({str(tmp_path)!r})
os.environ["HF_HUB_CACHE"] = {str(tmp_path / "hub")!r}
ip.run_line_magic("load_ext", "jupyter_detllm")
ip.run_cell("%detllm use fake")
ip.run_cell("%%detgen haiku --max-tokens 2\\nHello")
from IPython.core.completer import provisionalcompleter
def complete(text):
    with provisionalcompleter():
        found = list(ip.Completer.completions(text, len(text)))
    return [text[:c.start] + c.text for c in found]
print(json.dumps({{t: complete(t) for t in {typed_texts!r}}}))
"""
    got = run(code)
    for typed, words in COMPLETIONS.items():
        start = typed[: len(typed) - len(typed.split(" ")[-1])]
        shown = {whole.removeprefix(start) for whole in got[typed]}
        assert shown >= words, typed
        if typed != "%detllm ":
            assert shown == words, typed
    assert "detllm = 3; detllm" not in got["x\n%%detgen --te"]
    assert not any("--temperature" in word for word in got["x\n%%detgen --te"])


def test_a_script_needs_no_ipython() -> None:
    code = """
import json, sys
import jupyter_detllm as det
assert det.last_stamp() is None
det.use("fake", seed=5, dtype="float32", drift_salt="x")
one = det.generate(["a", [{"role": "user", "content": "b"}], [5, 6]], max_tokens=4, name="n")
stamp = det.last_stamp()
for bad in ({"n": 2, "temperature": 0}, {"max_tokens": 0}):
    try:
        det.generate("x", name="failed", **bad)
    except det.DetLLMError:
        assert det.last_stamp() is stamp
two = det.generate("raw", text=True, temperature=0.8, n=2, max_tokens=4, name="other")
report = det.release()
print(json.dumps([
    [g.text for g in one] == [g.text for g in stamp.generations],
    [r.kind for r in stamp.requests],
    stamp.name,
    stamp.root_seed,
    len(two),
    det.last_stamp() is not stamp,
    list(report.freed) != [],
    "IPython" in sys.modules,
    "engine.dtype" in det.fingerprint().numerics,
    stamp.fingerprint.numerics["engine.dtype"],
]))
"""
    assert run(code) == [
        True,
        ["chat", "chat", "tokens"],
        "n",
        5,
        2,
        True,
        True,
        False,
        False,
        "float32",
    ]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("[]", "there is no prompt"),
        ("['a', '']", "a prompt is empty"),
        ("[3.5]", "a prompt is a float"),
        ("b'x'", "prompts must be a string or a list of prompts, not bytes"),
        (
            "{'role': 'user', 'content': 'x'}",
            "prompts must be a string or a list of prompts, not dict",
        ),
        ("None", "prompts must be a string or a list of prompts, not NoneType"),
        ("3", "prompts must be a string or a list of prompts, not int"),
        ("'x', stop=5", "stop is a int"),
        ("'x', stop=[1]", "a stop string is 1"),
        ("'x', system=5", "a prompt holds 5"),
        ("'x', max_tokens='5'", "max_tokens is '5'; expected an integer"),
        ("'x', name=5", "5 is not a cell name"),
        ("[['a']]", "a message is not"),
        ("['a'], text=True, system='s'", "raw text"),
        ("['a'], n=2, temperature=0", "greedy"),
    ],
)
def test_prompts_that_do_not_fit_are_one_line(prompts: str, message: str) -> None:
    code = f"""
import json
import jupyter_detllm as det
from jupyter_detllm.errors import RequestError
det.use("fake")
try:
    det.generate({prompts})
    print("null")
except RequestError as error:
    print(json.dumps(str(error)))
"""
    assert message in run(code)


def test_public_names_are_all_there_and_others_are_not() -> None:
    code = """
import json
import jupyter_detllm as det
missing = [name for name in det.__all__ if not hasattr(det, name)]
print(json.dumps([missing, sorted(set(det.__all__) - set(dir(det))), hasattr(det, "nothing")]))
"""
    assert run(code) == [[], [], False]


def test_check_reads_a_notebook_without_an_engine(tmp_path: Any) -> None:
    notebook = tmp_path / "n.ipynb"
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "outputs": [], "execution_count": None}
    content = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}}
    notebook.write_text(
        json.dumps({**content, "cells": [{**cell, "source": "%%detgen haiku\nHello"}]})
    )
    code = f"""
import json, sys
import jupyter_detllm as det
report = det.check({str(notebook)!r}, policy="bitwise")
cells = report.notebooks[0].cells
try:
    det.check({str(notebook)!r}, policy="best")
except det.DetLLMError as error:
    print(json.dumps([str(cells[0].outcome.verdict), str(error), "torch" in sys.modules]))
"""
    verdict, error, torch = run(code)
    assert verdict == "unstamped"
    assert error.startswith("'best' is not a policy")
    assert torch is False
