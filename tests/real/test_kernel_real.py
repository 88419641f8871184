"""The real engine in a real kernel: nothing but texts and stamps is left in a notebook."""

from __future__ import annotations

from pathlib import Path

from jupyter_detllm.core.notebook import KEY
from tests.kernels import LOAD, LiveKernel, Reply, live_kernel

DRAW = (
    "import random, numpy, torch\nprint(random.random(), numpy.random.rand(), torch.rand(1).item())"
)
CELL = "%%detgen x --temperature 0.8 --max-tokens 12\nName a colour.\n---\nName a colour."
LONG = "%%detgen --max-tokens 400 --temperature 0.9\n" + "\n---\n".join(
    f"Write a long story about the number {number}." for number in range(8)
)


def outputs(reply: Reply) -> list[dict[str, object]]:
    shown = [name for name, _ in reply.messages]
    assert not {"stream", "execute_result", "error", "comm_open"} & set(shown), reply.messages
    return reply.of("display_data")


def stamp(reply: Reply) -> dict[str, object]:
    (found,) = [d["metadata"][KEY] for d in outputs(reply) if KEY in d["metadata"]]
    return found


def ok(kernel: LiveKernel, source: str) -> Reply:
    reply = kernel.run(source)
    assert reply.status == "ok", reply.messages
    return reply


def test_streams_outputs_and_an_interrupt(demo_model: Path) -> None:
    with live_kernel() as kernel:
        ok(kernel, LOAD)
        ok(kernel, "%detllm --seed 42")
        expected = [ok(kernel, DRAW).of("stream")[0]["text"] for _ in range(3)]
    with live_kernel() as kernel:
        ok(kernel, LOAD)
        ok(kernel, "%detllm --seed 42")
        drawn = [ok(kernel, DRAW).of("stream")[0]["text"]]
        (started,) = outputs(ok(kernel, "%detllm use demo"))
        assert set(started["data"]) == {"text/plain"}
        drawn.append(ok(kernel, DRAW).of("stream")[0]["text"])
        first = ok(kernel, CELL)
        assert [set(d["data"]) for d in outputs(first)] == 2 * [{"text/plain", "text/html"}]
        drawn.append(ok(kernel, DRAW).of("stream")[0]["text"])
        assert drawn == expected
        broken = kernel.run(LONG, interrupt_on="generating: ")
        assert broken.status == "error"
        assert broken.of("error")[0]["ename"] == "GenerationInterrupted"
        assert not [d for d in broken.of("display_data") if KEY in d["metadata"]]
        assert stamp(ok(kernel, CELL)) == stamp(first)
        assert "engine released: demo" in str(outputs(ok(kernel, "%detllm release")))
