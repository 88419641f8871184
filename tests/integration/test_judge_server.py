"""The endpoint in a real Jupyter server: who may ask, what is refused, that it stays awake."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.server.judge import MAX_BODY
from tests.builders import notebook, promoted, stamped_cell
from tests.judging import Page, request
from tests.waiting import HANGS, until

ROOT = Path(__file__).resolve().parents[2]
PATH = "/base/jupyter-detllm/judge"
SOURCE = "%%detgen haiku\nWrite a haiku."

# Who presents the second token may read contents, who presents the third may do nothing.
_CONFIG = """
from jupyter_server.auth import Authorizer, IdentityProvider, User

TOKENS = {tokens!r}

class Identity(IdentityProvider):
    def get_user(self, handler):
        found = self.get_token(handler)
        name = TOKENS.get(found or "")
        if name is None:
            return super().get_user(handler)
        handler._token_authenticated = True
        return User(name)

class Rights(Authorizer):
    def is_authorized(self, handler, user, action, resource):
        if user.username == "reader":
            return (action, resource) in (("read", "contents"), ("read", "server"))
        return user.username != "nobody"

c.ServerApp.identity_provider_class = Identity
c.ServerApp.authorizer_class = Rights
c.IdentityProvider.token = {token!r}
"""


class Running:
    """A Jupyter server of its own; every test asks it by HTTP."""

    def __init__(self, port: int, tokens: dict[str, str], root: Path) -> None:
        self.port, self.tokens, self.root = port, tokens, root

    def ask(
        self,
        body: bytes = b"",
        user: str | None = "owner",
        method: str = "POST",
        path: str = PATH,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Return status and JSON; `user` None sends no token."""
        sent = dict(headers or {})
        if user is not None:
            sent["Authorization"] = f"token {self.tokens[user]}"
        status, raw, _ = self.raw(method, path, body, sent)
        return status, json.loads(raw) if raw[:1] in (b"{", b"[") else raw

    def raw(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, bytes, list[tuple[str, str]]]:
        """Return status, content and headers of a response."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=HANGS)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read(), response.getheaders()
        finally:
            connection.close()

    def answer(self, body: bytes) -> Any:
        status, found = self.ask(body)
        assert status == 200, found
        return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("judge")
    root = folder / "root"
    root.mkdir()
    tokens = {name: secrets.token_hex(16) for name in ("owner", "reader", "nobody")}
    users = {token: name for name, token in tokens.items() if name != "owner"}
    config = folder / "jupyter_server_config.py"
    config.write_text(_CONFIG.format(tokens=users, token=tokens["owner"]))
    modules = {"ServerApp": {"jpserver_extensions": {"jupyter_detllm.serverext": True}}}
    (folder / "jupyter_server_config.json").write_text(json.dumps(modules))
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    names = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")
    own = {f"JUPYTER_{name}": str(folder / name.lower()) for name in names}
    own |= {"JUPYTER_CONFIG_DIR": str(folder), "HOME": str(folder), "PYTHONPATH": str(ROOT)}
    kept = {k: v for k, v in os.environ.items() if not k.startswith("JUPYTER")}
    command = [
        *(sys.executable, "-m", "jupyter_server", "--no-browser", "--allow-root"),
        *(f"--port={port}", "--ServerApp.port_retries=0", "--ServerApp.base_url=/base/"),
        f"--ServerApp.root_dir={root}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env={**kept, **own}, stdout=log, stderr=log, cwd=folder)
    running = Running(port, tokens, root)

    def answers() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        try:
            return running.ask(method="GET", path="/base/api/status")[0] == 200
        except OSError:
            return False

    try:
        until(answers, "the server")
        yield running
    finally:
        process.terminate()
        process.wait(60)


def body(**options: Any) -> bytes:
    return request(notebook(stamped_cell(SOURCE)), **options)[0]


def test_it_judges_and_promotes_what_it_is_sent(server: Running) -> None:
    found = server.answer(body(update="new"))
    assert [row["verdict"] for row in found["cells"]] == ["recorded"]
    assert found["patch"]["metadata"]["schema"] == "detllm.notebook/2"
    assert list(server.root.iterdir()) == []


def test_who_is_not_logged_in_learns_nothing(server: Running) -> None:
    status, found = server.ask(body(), user=None)
    assert status == 403
    assert "cells" not in found
    status, found = server.ask(body(), user=None, headers={"Authorization": "token wrong"})
    assert status == 403


def test_it_is_authorised_as_contents_are_for_reading(server: Running) -> None:
    assert server.ask(body(), user="reader")[0] == 200
    status, found = server.ask(body(), user="nobody")
    assert status == 403
    assert "not authorized to read on resource: contents" in found["message"]
    contents = server.ask(user="nobody", method="GET", path="/base/api/contents")
    assert contents[0] == 403


def test_a_login_by_cookie_needs_the_xsrf_token(server: Running) -> None:
    """A page of another origin has the browser's cookies, and not this token."""
    login = f"/base/login?token={server.tokens['owner']}"
    _, _, headers = server.raw("GET", login, b"", {})
    cookies = [value for name, value in headers if name.lower() == "set-cookie"]
    jar = dict(re.match(r"([^=]+)=([^;]*)", cookie).groups() for cookie in cookies)  # type: ignore[union-attr]
    sent = {"Cookie": "; ".join(f"{k}={v}" for k, v in jar.items())}
    assert server.ask(user=None, method="GET", path="/base/api/contents", headers=sent)[0] == 200
    status, found = server.ask(body(), user=None, headers=sent)
    assert status == 403
    assert "_xsrf" in found["message"]
    # What the server compares: its own cookie, and the header that only its pages can set.
    xsrf = {"Cookie": f"{sent['Cookie']}; _xsrf=abcdef", "X-XSRFToken": "abcdef"}
    assert server.ask(body(), user=None, headers=xsrf)[0] == 200
    foreign = {**xsrf, "Origin": "https://evil.example"}
    assert server.ask(body(), user=None, headers=foreign)[0] in (403, 404)


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE"])
def test_nothing_but_questions_are_taken(server: Running, method: str) -> None:
    assert server.ask(method=method)[0] in (404, 405)


@pytest.mark.parametrize("path", ["../outside.ipynb", "/etc/passwd", "%2e%2e/outside.ipynb"])
def test_no_file_can_be_named(server: Running, path: str) -> None:
    outside = server.root.parent / "outside.ipynb"
    outside.write_text(json.dumps(promoted(stamped_cell(SOURCE))))
    status, found = server.ask(body(path=path))
    assert status == 400
    assert "unknown key 'path'" in found["message"]
    assert server.ask(body(), path=f"{PATH}/{path}")[0] in (403, 404)
    # A path where content belongs is a digest that nobody was given.
    named = json.dumps({"protocol": 2, "cells": [path]}).encode()
    assert server.ask(named)[0] == 409


def test_what_is_no_request_is_refused_in_one_line_of_json(server: Running) -> None:
    for sent in (b"", b"{", b"\xff", b"[" * 100_000, b'{"protocol": 7}', b"%s %d {0}"):
        status, found = server.ask(sent)
        assert status == 400
        assert "\n" not in found["message"]
        assert 10 < len(found["message"]) < 300
    assert server.ask(body())[0] == 200


def test_what_is_too_large_is_refused_and_the_server_goes_on(server: Running) -> None:
    status, found = server.ask(b" " * (MAX_BODY + 1))
    assert status == 413
    assert f"{MAX_BODY:,}" in found["message"]
    assert server.ask(body())[0] == 200


def test_cells_that_are_not_kept_are_asked_for(server: Running) -> None:
    status, found = server.ask(json.dumps({"protocol": 2, "cells": ["0" * 64]}).encode())
    assert status == 409
    assert "send them again" in found["message"]


def test_many_pages_at_once_get_their_own_answers(server: Running) -> None:
    books = [
        promoted(*(stamped_cell(f"%%detgen c{i}\nx", run_id=f"p{page}") for i in range(60)))
        for page in range(8)
    ]
    found: dict[int, list[int]] = {}

    def work(number: int) -> None:
        page = Page(server.answer)
        found[number] = [len(page.ask(books[number])["cells"]) for _ in range(2)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(books))]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert server.ask(method="GET", path="/base/api/status")[0] == 200
    assert found == {number: [60, 60] for number in range(len(books))}
