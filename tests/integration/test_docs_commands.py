"""The commands of README and how-tos, run in the order in which a page has them.

Each file that a page names is the same small notebook of the fake engine. Whether a page's
*output* is right is shown where the real engine runs (``tests/real/test_docs_console.py``).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documented import PAGES, ROOT, typed
from tests.plugin import executed

pytestmark = [pytest.mark.slow]

PROG = "jupyter detllm"
CELL = "%%detgen haiku --temperature 0.8 --max-tokens 12\nWrite a haiku."
# What a test must not do: load a model, ask an index or a server, change its environment.
ELSEWHERE = {"kernel", "model", "probe", "rescore", "serve"}
ASKS_SOMEBODY = {"pylock", "--engine"}
COMMANDS = {
    page: [words for _, words in typed(page.read_text(encoding="utf-8"), PROG)]
    for page in PAGES
    if "```console" not in page.read_text(encoding="utf-8")
}


@pytest.fixture(scope="session")
def book(tmp_path_factory: pytest.TempPathFactory) -> str:
    return executed(tmp_path_factory.mktemp("book"), CELL)


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jupyter_detllm", *words]
    environ = {name: value for name, value in os.environ.items() if name[:7] != "PYTEST_"}
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False
    )


def prepare(words: list[str], folder: Path, book: str) -> list[str]:
    """Write the notebooks and the model folder that a command names; expand its patterns."""
    out = []
    for word in words:
        path = folder / word.replace("**", "deep").replace("*", "one")
        if word.endswith(".ipynb") and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(book, encoding="utf-8")
        if word == "FOLDER":
            (folder / word).mkdir(exist_ok=True)
            (folder / word / "config.json").write_text('{"model_type": "llama"}')
        out.append(str(path.relative_to(folder)) if "*" in word else word)
    return out


def is_run_here(words: list[str]) -> bool:
    return words[0] not in ELSEWHERE and not ASKS_SOMEBODY & set(words)


@pytest.mark.parametrize(
    "page",
    [page for page, found in COMMANDS.items() if any(map(is_run_here, found))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_commands_of_a_page_run(page: Path, tmp_path: Path, book: str) -> None:
    for words in filter(is_run_here, COMMANDS[page]):
        result = run(prepare(words, tmp_path, book), tmp_path)
        shown = f"{PROG} {' '.join(words)}\n{result.stdout}{result.stderr}"
        # 1 and 3 are what a command found; 2 is a mistake in the page.
        assert result.returncode in (0, 1, 3), shown
        assert "Traceback" not in result.stderr, shown


def test_what_is_not_run_here_is_in_some_page() -> None:
    verbs = {words[0] for found in COMMANDS.values() for words in found}
    assert verbs & ELSEWHERE
    assert {"check", "rerun", "replay", "compare", "bisect", "doctor", "export"} <= verbs
