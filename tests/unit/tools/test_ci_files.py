from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from jupyter_detllm.cli._options import Parser
from jupyter_detllm.cli.check import configure
from jupyter_detllm.verify.report import parse_accept
from tests.builders import make_stamp, notebook, promoted, stamped_cell, with_actual
from tools.action_check import command, files_of, summary_of

ROOT = Path(__file__).resolve().parents[3]
SOURCE = "%%detgen haiku\nWrite a haiku."
RECORDED = promoted(stamped_cell(SOURCE))
MATCH = with_actual(RECORDED, 1, make_stamp(SOURCE, name="haiku"))
DIVERGED = with_actual(RECORDED, 1, make_stamp(SOURCE, ["An <b>old</b> frog."], name="haiku"))


def load(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    books = {
        "match.ipynb": MATCH,
        "deep/er/diverged one.ipynb": DIVERGED,
        "deep/recorded.ipynb": RECORDED,
        ".hidden/other.ipynb": DIVERGED,
        "plain.ipynb": notebook(),
    }
    for name, book in books.items():
        (folder / name).write_text(json.dumps(book))
    monkeypatch.chdir(folder)
    return folder


def step_named(name: str) -> dict[str, Any]:
    (step,) = [s for s in load("action.yml")["runs"]["steps"] if s["name"] == name]
    return dict(step)


def run_check(folder: Path, **inputs: str) -> tuple[subprocess.CompletedProcess[str], str, str]:
    """Run the action's step as a runner does: inputs as variables, files for its results."""
    action, step = load("action.yml"), step_named("Check")
    values = {name: spec.get("default", "") for name, spec in action["inputs"].items()} | inputs
    environ = {**os.environ, "GITHUB_OUTPUT": str(folder / "out")}
    environ["GITHUB_STEP_SUMMARY"] = str(folder / "summary")
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    for name, value in step["env"].items():
        expression = re.fullmatch(r"\$\{\{ (?:inputs\.([\w-]+)|github\.action_path) \}\}", value)
        if expression is None:
            environ[name] = value
        else:
            environ[name] = values[expression[1]] if expression[1] else str(ROOT)
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
    )
    summary = folder / "summary"
    return done, (folder / "out").read_text(), summary.read_text() if summary.exists() else ""


def test_the_action_checks_what_it_is_told_and_passes_on_the_exit_code(here: Path) -> None:
    done, out, summary = run_check(here, notebooks="match.ipynb", junit="r.xml", html="r.html")
    assert (done.returncode, out) == (0, "exit-code=0\n"), done.stderr
    assert "verified: every cell was compared and accepted" in done.stdout
    assert summary.startswith("### jupyter detllm check\n\n<pre>\nmatch.ipynb\n")
    assert (here / "r.xml").exists()
    assert (here / "r.html").exists()


def test_the_action_looks_everywhere_by_default(here: Path) -> None:
    done, out, summary = run_check(here, accept="recorded,unstamped")
    assert (done.returncode, out) == (1, "exit-code=1\n")
    assert "diverged one.ipynb" in done.stdout
    assert ".hidden" not in done.stdout
    # A text of a model is text in the job's summary, too.
    assert "&lt;b&gt;old&lt;/b&gt;" in summary
    assert "<b>" not in summary


def test_the_action_passes_a_policy(here: Path) -> None:
    pattern = "deep/**/*one.ipynb"
    done, *_ = run_check(here, notebooks=pattern, policy="prefix(1)", accept="relaxed")
    assert done.returncode == 0, done.stdout
    assert run_check(here, notebooks=pattern, policy="exact")[0].returncode == 2


def test_a_pattern_that_fits_nothing_fails(here: Path) -> None:
    done, out, _ = run_check(here, notebooks="nothing/*.ipynb")
    assert (done.returncode, out) == (2, "exit-code=2\n")
    assert done.stdout == "::error::no notebook fits nothing/*.ipynb\n"


def test_an_input_is_never_a_command(here: Path) -> None:
    for hostile in ("$(touch owned)", "`touch owned`", "; touch owned", "--html=match.ipynb"):
        for name in ("notebooks", "policy", "accept"):
            assert run_check(here, **{"notebooks": "match.ipynb", name: hostile})[0].returncode == 2
    assert not (here / "owned").exists()
    assert json.loads((here / "match.ipynb").read_text()) == MATCH


def test_no_input_is_pasted_into_a_script() -> None:
    for step in load("action.yml")["runs"]["steps"]:
        assert "${{" not in step.get("run", "")


def test_every_input_is_used_and_described() -> None:
    action = load("action.yml")
    text = (ROOT / "action.yml").read_text()
    page = (ROOT / "docs" / "howto" / "ci.md").read_text()
    for name, spec in action["inputs"].items():
        assert spec["description"].endswith(".")
        assert f"inputs.{name} " in text
        assert f"`{name}`" in page
    assert action["outputs"]["exit-code"]["value"] == "${{ steps.check.outputs.exit-code }}"
    assert step_named("Check")["id"] == "check"


def test_patterns_and_files(here: Path) -> None:
    assert files_of("match.ipynb") == ["match.ipynb"]
    one = str(Path("deep/er/diverged one.ipynb"))
    assert files_of(f"{one}\nmatch.ipynb plain.ipynb\n\n*.ipynb") == [
        one,
        "match.ipynb",
        "plain.ipynb",
    ]
    with pytest.raises(ValueError, match="no notebooks are named"):
        files_of(" \n")
    assert command({"DETLLM_POLICY": "tokens", "DETLLM_HTML": ""}, ["-x.ipynb"])[3:] == [
        *("check", "--policy=tokens", "--", "-x.ipynb"),
    ]
    assert "a &lt;/pre&gt; &amp; b" in summary_of("a </pre> & b")


def test_the_hook_runs_the_check() -> None:
    (hook,) = load(".pre-commit-hooks.yaml")
    assert (hook["id"], hook["language"]) == ("detllm-check", "python")
    script, verb = hook["entry"].split()
    scripts = (ROOT / "pyproject.toml").read_text()
    assert f'{script} = "jupyter_detllm.cli:main"' in scripts
    assert verb == "check"
    parser = Parser()
    configure(parser)
    args = parser.parse_args([*hook["args"], "a.ipynb", "b.ipynb"])
    assert args.notebooks == ["a.ipynb", "b.ipynb"]
    assert {standing.value for standing in parse_accept(args.accept)} == {"recorded", "unstamped"}


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("match.ipynb", 0),
        ("plain.ipynb", 0),
        ("deep/recorded.ipynb", 0),
        ("deep/er/diverged one.ipynb", 1),
    ],
)
def test_what_the_hook_lets_pass(name: str, code: int, here: Path) -> None:
    (hook,) = load(".pre-commit-hooks.yaml")
    script, *verb = hook["entry"].split()
    line = [str(Path(sys.executable).parent / script), *verb, *hook["args"], name]
    assert subprocess.run(line, capture_output=True).returncode == code


def test_the_workflows_of_the_page_are_workflows() -> None:
    page = (ROOT / "docs" / "howto" / "ci.md").read_text()
    blocks = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    workflows = [block for block in blocks if "jobs" in block]
    assert len(workflows) == 2
    known = set(load("action.yml")["inputs"])
    for workflow in workflows:
        assert workflow["permissions"] == {"contents": "read"}
        for job in workflow["jobs"].values():
            assert all(("uses" in step) != ("run" in step) for step in job["steps"])
            for step in job["steps"]:
                if "jupyter-detllm@" in step.get("uses", ""):
                    assert set(step["with"]) <= known
    (hooks,) = [block for block in blocks if "repos" in block]
    assert hooks["repos"][0]["hooks"] == [{"id": load(".pre-commit-hooks.yaml")[0]["id"]}]
