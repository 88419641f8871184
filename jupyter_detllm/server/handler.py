"""``POST jupyter-detllm/judge``: the judge behind the Jupyter server's own login.

It is authenticated and authorised as the contents API is, for reading: what it answers
follows from what it was sent, and no file is touched.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.utils import url_path_join
from tornado.web import HTTPError, authenticated

from jupyter_detllm.errors import UsageError
from jupyter_detllm.server.judge import MAX_BODY, Judge, UnknownCellsError

__all__ = ["PATH", "add_judge"]

PATH = ("jupyter-detllm", "judge")
_THREADS = 2
_WAITING = 16
"""Requests that are judged or wait for it; more are turned away."""


class _Desk:
    """One judge for all pages of a server, off its event loop."""

    def __init__(self) -> None:
        self.judge = Judge()
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="detllm-judge")
        self.waiting = 0

    async def answer(self, body: bytes) -> str:
        if self.waiting >= _WAITING:
            raise HTTPError(503, "too many notebooks are being judged; try again")
        self.waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self.threads, self._answer, body)
        finally:
            self.waiting -= 1

    def _answer(self, body: bytes) -> str:
        return json.dumps(self.judge.answer(body))


class JudgeHandler(APIHandler):
    """Judges and promotes the notebook that a page sends."""

    auth_resource = "contents"

    def initialize(self, desk: _Desk) -> None:
        """Take the judge of this server."""
        self.desk = desk

    @authenticated
    @authorized("read")
    async def post(self) -> None:
        """Answer with JSON: 400 for what is not a request, 409 where cells must be sent again."""
        body = self.request.body
        if len(body) > MAX_BODY:
            raise HTTPError(413, f"the notebook's stamps have more than {MAX_BODY:,} bytes")
        try:
            found = await self.desk.answer(body)
        except UnknownCellsError:
            raise HTTPError(409, "cells are not kept here: send them again") from None
        except UsageError as error:
            raise HTTPError(400, str(error)) from None
        self.finish(found)


def add_judge(web_app: Any) -> None:
    """Add the endpoint to a server's application."""
    path = url_path_join(web_app.settings["base_url"], *PATH)
    web_app.add_handlers(".*$", [(path, JudgeHandler, {"desk": _Desk()})])
