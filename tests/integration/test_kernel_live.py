"""What needs a live kernel: interrupts, cell ids, the reference a front end sends."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.core.notebook import KEY, RUN_KEY
from jupyter_detllm.core.promotion import reference_json
from tests.kernels import LOAD, USE, LiveKernel, Reply, live_kernel
from tests.waiting import HANGS


@pytest.fixture
def kernel() -> Iterator[LiveKernel]:
    with live_kernel() as running:
        assert running.run(LOAD).status == "ok"
        yield running


def stamp(reply: Reply) -> dict[str, dict[str, Any]]:
    (found,) = [d["metadata"] for d in reply.of("display_data") if KEY in d["metadata"]]
    return found


def test_an_interrupt_is_one_line_and_the_next_cell_works(kernel: LiveKernel) -> None:
    kernel.run("%detllm use fake delay_ms=400")
    source = "%%detgen x --temperature 0 --max-tokens 3\nHello"
    before = stamp(kernel.run(source))
    slow = "%%detgen --temperature 0.9\n" + "\n---\n".join(f"Prompt {i}" for i in range(40))
    reply = kernel.run(slow, interrupt_on="generating: ")
    assert reply.status == "error"
    (error,) = reply.of("error")
    assert error["traceback"] == [
        "GenerationInterrupted: interrupted: nothing of this cell is stamped. "
        "Try: run the cell again"
    ]
    assert not [d for d in reply.of("display_data") if KEY in d["metadata"]]
    assert reply.of("update_display_data")[-1]["data"] == {
        "text/plain": "detllm: no text was generated"
    }
    after = kernel.run(source)
    assert after.status == "ok"
    assert stamp(after)[KEY] == before[KEY]


def test_an_interrupted_start_leaves_no_engine(kernel: LiveKernel) -> None:
    reply = kernel.run("%detllm use fake start_delay_ms=3600000", interrupt_on="starting the fake")
    assert reply.status == "error"
    assert "interrupted while the engine was starting" in reply.of("error")[0]["evalue"]
    assert kernel.run(USE).status == "ok"


def test_a_name_belongs_to_the_cell_whose_id_took_it(kernel: LiveKernel) -> None:
    kernel.run(USE)
    source = "%%detgen haiku --max-tokens 3\nHello"
    assert kernel.run(source, metadata={"cellId": "a"}).status == "ok"
    assert kernel.run(source, metadata={"cellId": "a"}).status == "ok"
    reply = kernel.run(source, metadata={"cellId": "b"})
    assert reply.status == "error"
    assert "'haiku' is already used by another cell" in reply.of("error")[0]["evalue"]
    assert kernel.run("%detllm stamps --forget haiku").status == "ok"
    assert kernel.run(source, metadata={"cellId": "b"}).status == "ok"


def test_the_live_verdict_is_beside_the_stamp_and_nowhere_else(kernel: LiveKernel) -> None:
    kernel.run("%detllm use fake drift_salt=another --drift-field engine.dtype=other")
    source = "%%detgen haiku --temperature 0\nHello"
    other = stamp(kernel.run(source))[KEY]
    kernel.run("%detllm release")
    kernel.run(USE)
    alone = kernel.run(source)
    kept = stamp(alone)[KEY]

    def rerun(reference: object) -> Reply:
        meta = {"schema": "detllm.cell/1", "reference": reference, "recorded_run": "r"}
        return kernel.run(source, metadata={KEY: meta})

    def listed() -> str:
        shown = kernel.run("%detllm status").of("display_data")[0]["data"]["text/plain"]
        return str(shown).splitlines()[-1]

    assert listed().endswith("not compared")

    new = kernel.run(source, metadata={"deletedCells": []})
    assert listed().endswith("new: no reference yet")
    same = rerun(reference_json(kept))
    assert listed().endswith("match")
    drifted = rerun(reference_json(other))
    # This kernel has stamped under the other fingerprint, so it can name the field.
    assert re.search(r'drift at token \d+: ".*" -> ".*", margin \S+ \(', listed())
    assert listed().endswith("; engine.dtype: other -> bfloat16")
    broken = rerun({"schema": "detllm.stamp/1"})
    assert "error: the cell's reference" in listed()
    hostile = rerun("</script>")
    assert stamp(new)[RUN_KEY]["verdict"] == "unstamped"
    assert stamp(same)[RUN_KEY]["verdict"] == "match"
    assert stamp(drifted)[RUN_KEY]["verdict"] == "drift"
    code = "[(c.label, str(c.live.verdict)) for c in __import__('jupyter_detllm').cells()]"
    cells = kernel.run(code).of("execute_result")[0]["data"]["text/plain"]
    assert cells == "[('haiku', 'error')]"
    found = stamp(drifted)[RUN_KEY]["comparison"]
    assert isinstance(found, dict)
    assert (found["verdict"], found["fingerprint"]) == ("drift", "differs")
    assert found["reference"] == other["digest"]
    assert stamp(broken)[RUN_KEY]["verdict"] == "error"
    assert stamp(hostile)[RUN_KEY]["verdict"] == "error"
    assert not {"verdict", "comparison"} & set(stamp(alone)[RUN_KEY])
    for reply in (new, same, drifted, broken, hostile):
        assert stamp(reply)[KEY] == kept
        shown = [d["data"] for d in reply.of("display_data")]
        assert shown == [d["data"] for d in alone.of("display_data")]


HAIKU = "%%detgen haiku --temperature 0 --max-tokens 4\nHello"


def test_stamps_sends_what_a_front_end_can_put_back(kernel: LiveKernel) -> None:
    kernel.run(USE)
    own = kernel.run(HAIKU, metadata={"cellId": "a"})
    kernel.run("%%detgen other --max-tokens 3\nHi")  # no id: it cannot be found again
    (alone,) = kernel.run("%detllm stamps").of("display_data")
    assert alone["transient"] == {}
    (listed,) = kernel.run("%detllm stamps", metadata={"cellId": "b"}).of("display_data")
    assert (listed["data"], listed["metadata"]) == (alone["data"], {})
    assert "haiku" in listed["data"]["text/plain"]
    (cell,) = listed["transient"]["detllm_ledger"]["cells"]
    assert cell["cell_id"] == "a"
    shown = own.of("update_display_data")[-1:] + own.of("display_data")[-1:]
    assert [o["data"] for o in cell["outputs"]] == [o["data"] for o in shown]
    assert cell["outputs"][-1]["metadata"] == stamp(own)


def test_what_the_saved_notebook_took_as_reference_is_recorded(
    kernel: LiveKernel, tmp_path: Path
) -> None:
    path = tmp_path / "nb.ipynb"
    kernel.run(f"import os; os.environ['JPY_SESSION_NAME'] = {str(path)!r}")
    kernel.run(USE)
    first, second = (
        stamp(kernel.run(HAIKU, metadata={"cellId": "a", "deletedCells": []})) for _ in range(2)
    )

    def listed(reference: object, run: object) -> str:
        meta = {"schema": "detllm.cell/1", "reference": reference, "recorded_run": run}
        cell = {"id": "a", "cell_type": "code", "metadata": {KEY: meta}}
        path.write_text(json.dumps({"nbformat": 4, "metadata": {}, "cells": [3, {}, cell]}))
        shown = kernel.run("%detllm status").of("display_data")[0]["data"]["text/plain"]
        return str(shown).splitlines()[-1]

    kept = reference_json(second[KEY])
    assert listed(None, None).endswith("new: no reference yet")
    assert listed(kept, first[RUN_KEY]["run_id"]).endswith("new: no reference yet")
    assert listed({**kept, "digest": "x"}, second[RUN_KEY]["run_id"]).endswith("no reference yet")
    path.write_text("{")
    assert kernel.run("%detllm status").status == "ok"
    assert listed(kept, second[RUN_KEY]["run_id"]).endswith("recorded")
    # It stays so until the cell runs again.
    path.unlink()
    shown = kernel.run("%detllm stamps").of("display_data")[0]["data"]["text/plain"]
    assert shown.endswith("recorded")


WIDGET = "application/vnd.jupyter.widget-view+json"


def test_only_show_makes_a_widget_and_static_makes_none(kernel: LiveKernel) -> None:
    kernel.run(USE)
    source = "%%detgen haiku --temperature 0\nHello"
    quiet = [kernel.run(source), kernel.run("%detllm status"), kernel.run("%detllm show --static")]
    assert not any(reply.of("comm_open") for reply in quiet)
    (static,) = quiet[-1].of("display_data")
    assert set(static["data"]) == {"text/plain", "text/html"}
    modules = "[m for m in ('anywidget', 'ipywidgets') if m in __import__('sys').modules]"
    assert kernel.run(modules).of("execute_result")[0]["data"]["text/plain"] == "[]"

    shown = kernel.run("%detllm show", metadata={"cellId": "panel"})
    (live,) = shown.of("display_data")
    assert set(live["data"]) == {"text/plain", "text/html", WIDGET}
    assert {key: live["data"][key] for key in static["data"]} == static["data"]
    assert shown.of("comm_open")

    # An open panel hears of the next stamp; the cell's own output stays what it is.
    again = kernel.run(source, metadata={"deletedCells": []})
    (update,) = [m for m in again.of("comm_msg") if "data" in m["data"].get("state", {})]
    assert [cell["state"] for cell in update["data"]["state"]["data"]["cells"]] == ["new"]
    assert [d["data"] for d in again.of("display_data")] == [
        d["data"] for d in quiet[0].of("display_data")
    ]


def test_completion_and_help_as_a_front_end_asks(kernel: LiveKernel) -> None:
    def complete(code: str) -> list[str]:
        message = kernel.client.complete(code, len(code), reply=True, timeout=HANGS)
        return list(message["content"]["matches"])

    assert complete("%detllm st") == ["status", "stamps"]
    assert complete("%detllm show --") == ["--static"]
    assert complete("%%detgen --te") == ["--text", "--temperature"]
    assert complete("%det") == ["%%detgen", "%detllm"]
    content = kernel.client.inspect("%detllm", 5, reply=True, timeout=HANGS)["content"]
    assert "%detllm use demo" in content["data"]["text/plain"]
