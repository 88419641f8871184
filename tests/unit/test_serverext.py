from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from traitlets.config import Config

import jupyter_detllm.serverext as serverext
from jupyter_detllm.core.promotion import Update, promote
from jupyter_detllm.errors import DetLLMError
from tests.builders import cell, make_stamp, notebook, promoted, stamped_cell, with_actual

SOURCE = "%%detgen haiku\nWrite a haiku."


class Contents:
    def __init__(self) -> None:
        self.hooks: list[Any] = []

    def register_pre_save_hook(self, hook: Any) -> None:
        self.hooks.append(hook)


class Loop:
    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []

    def add_callback(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def warning(self, line: str) -> None:
        self.lines.append(line)


class WebApp:
    def __init__(self) -> None:
        self.settings = {"base_url": "/base/"}
        self.paths: list[str] = []

    def add_handlers(self, host: str, rules: list[tuple[str, Any, dict[str, Any]]]) -> None:
        self.paths += [path for path, *_ in rules]


def loaded(**settings: str) -> tuple[list[Any], Log]:
    """Load the extension into a server with these settings; return its hooks and log."""
    from traitlets.config import Configurable

    server: Any = Configurable(config=Config({"DetLLMServer": settings}))
    server.contents_manager, server.log, server.io_loop = Contents(), Log(), Loop()
    server.web_app = WebApp()
    serverext._load_jupyter_server_extension(server)
    assert server.web_app.paths == ["/base/jupyter-detllm/judge"]
    # As Jupytext does: another manager before the loop runs.
    first, server.contents_manager = server.contents_manager, Contents()
    for callback in server.io_loop.callbacks:
        callback()
    assert first.hooks == []
    return server.contents_manager.hooks, server.log


def test_it_is_off_by_default_and_by_name() -> None:
    assert loaded()[0] == []
    assert loaded(stamp_on_save="off")[0] == []
    with pytest.raises(Exception, match="stamp_on_save"):
        loaded(stamp_on_save="sometimes")


@pytest.mark.parametrize("update", Update)
def test_a_save_is_promoted_as_the_command_promotes(update: Update) -> None:
    (hook,), log = loaded(stamp_on_save=update.value)
    first = promoted(stamped_cell(SOURCE))
    fresh = make_stamp(SOURCE, ["another"], name="haiku")
    for book in (notebook(cell("1"), stamped_cell(SOURCE)), first, with_actual(first, 1, fresh)):
        model = {"type": "notebook", "content": book}
        hook(model=model, path="a.ipynb", contents_manager=None)
        assert model["content"] == promote(book, update)[0]
    assert log.lines == []


def test_what_is_no_notebook_is_left_alone() -> None:
    (hook,), log = loaded(stamp_on_save="new")
    for model in ({"type": "file", "content": "x"}, {"type": "notebook", "content": None}):
        before = json.dumps(model)
        hook(model=model, path="x", contents_manager=None)
        assert json.dumps(model) == before
    hook(model=None, path="x")
    assert log.lines == []


def test_what_cannot_be_promoted_is_saved_as_it_is_with_one_line_in_the_log() -> None:
    (hook,), log = loaded(stamp_on_save="new")
    book = promoted(stamped_cell(SOURCE))
    book["metadata"]["detllm"]["schema"] = "detllm.notebook/9"
    model = {"type": "notebook", "content": book}
    hook(model=model, path="a.ipynb")
    assert model["content"] is book
    (line,) = log.lines
    assert line.startswith("a.ipynb: stamps were not promoted: ")
    assert "\n" not in line


def test_only_mistakes_of_notebooks_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(serverext, "promote", broken)
    (hook,), _ = loaded(stamp_on_save="new")
    with pytest.raises(ZeroDivisionError):
        hook(model={"type": "notebook", "content": {"a": 1}}, path="x")
    assert not issubclass(ZeroDivisionError, DetLLMError)


def test_the_installed_configuration_names_the_module() -> None:
    path = Path(serverext.__file__).with_suffix(".json")
    (name,) = json.loads(path.read_text())["ServerApp"]["jpserver_extensions"]
    assert serverext._jupyter_server_extension_points() == [{"module": name}]


def test_a_server_does_not_pay_for_what_it_does_not_use() -> None:
    script = (
        "import sys, jupyter_detllm.serverext;"
        "print([m for m in ('torch', 'vllm', 'numpy', 'nbformat', 'IPython') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
