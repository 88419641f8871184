"""Cells run in a real ipykernel, through nbclient or, to interrupt them, jupyter_client."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from jupyter_detllm.core.notebook import KEY, RUN_KEY
from jupyter_detllm.core.stamp import Stamp, read_stamp
from tests.waiting import HANGS

__all__ = [
    "LOAD",
    "USE",
    "LiveKernel",
    "Reply",
    "errors",
    "execute",
    "live_kernel",
    "stamps",
    "text",
    "without_run",
]

LOAD = "%load_ext jupyter_detllm"
USE = "%detllm use fake"

Cell = dict[str, Any]


def execute(*sources: str, allow_errors: bool = True, **options: Any) -> list[Cell]:
    """Run a notebook of these cells in a fresh kernel; return its code cells."""
    import nbformat
    from nbclient import NotebookClient

    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(
        notebook,
        timeout=HANGS,
        startup_timeout=HANGS,
        kernel_name="python3",
        allow_errors=allow_errors,
        record_timing=False,
        **options,
    ).execute()
    return list(notebook.cells)


def stamps(cell: Cell) -> list[Stamp]:
    """Return the stamps in a cell's outputs, read and checked."""
    found = [o["metadata"][KEY] for o in cell["outputs"] if KEY in o.get("metadata", {})]
    return [read_stamp(data) for data in found]


def text(cell: Cell, index: int = 0) -> str:
    """Return the plain text of one output."""
    return str(cell["outputs"][index]["data"]["text/plain"])


def errors(cell: Cell) -> list[str]:
    """Return the error outputs as ``name: value``, the lines of the traceback asserted."""
    out = []
    for output in cell["outputs"]:
        if output["output_type"] == "error":
            assert len(output["traceback"]) == 1, output["traceback"]
            out.append(f"{output['ename']}: {output['evalue']}")
            assert output["traceback"] == out[-1:]
    return out


def without_run(cell: Cell) -> list[Any]:
    """Return a cell's outputs without what is true of one run only."""
    outputs = [dict(output) for output in cell["outputs"]]
    for output in outputs:
        if "metadata" in output:
            output["metadata"] = {k: v for k, v in output["metadata"].items() if k != RUN_KEY}
    return outputs


@dataclass
class Reply:
    """One executed request: its status and what it put out, as messages."""

    status: str
    messages: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the contents of the messages of one type."""
        return [content for name, content in self.messages if name == kind]


class LiveKernel:
    """A running kernel that can be interrupted and asked like a front end does."""

    def __init__(self, manager: Any, client: Any) -> None:
        self.manager = manager
        self.client = client

    def run(
        self,
        source: str,
        *,
        metadata: dict[str, Any] | None = None,
        interrupt_on: str | None = None,
    ) -> Reply:
        """Execute `source`; interrupt when an output holds `interrupt_on`."""
        message = self.client.session.msg(
            "execute_request",
            content={
                "code": source,
                "silent": False,
                "store_history": True,
                "user_expressions": {},
                "allow_stdin": False,
                "stop_on_error": False,
            },
        )
        # A line that updates is there for front ends that show cells.
        watched = {} if interrupt_on is None else {"cellId": "watched"}
        message["metadata"] = metadata if metadata is not None else watched
        self.client.shell_channel.send(message)
        return self._collect(message["header"]["msg_id"], interrupt_on)

    def _collect(self, msg_id: str, interrupt_on: str | None) -> Reply:
        reply = Reply("")
        deadline = time.monotonic() + HANGS
        while time.monotonic() < deadline:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != msg_id:
                continue
            content = message["content"]
            if message["msg_type"] == "status" and content["execution_state"] == "idle":
                break
            reply.messages.append((message["msg_type"], {**content, "parent": msg_id}))
            shown = str(content.get("data", {}).get("text/plain", ""))
            if interrupt_on is not None and interrupt_on in shown:
                interrupt_on = None
                self.manager.interrupt_kernel()
        else:
            raise AssertionError("the cell did not end")
        while not reply.status:
            message = self.client.get_shell_msg(timeout=HANGS)
            if message["parent_header"].get("msg_id") == msg_id:
                reply.status = message["content"]["status"]
        return reply


@contextmanager
def live_kernel(name: str = "python3") -> Iterator[LiveKernel]:
    """Start the kernel of that name and shut it down."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(HANGS, kernel_name=name)
    try:
        yield LiveKernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
