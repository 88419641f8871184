"""What a cell shows: plain text, escaped, the same however long it took."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_detllm.core.generation import Prompt
from jupyter_detllm.core.notebook import KEY, RUN_KEY
from jupyter_detllm.core.stamp import Stamp
from jupyter_detllm.engines.base import Progress, SamplingOptions
from jupyter_detllm.kernel import display
from jupyter_detllm.kernel.display import (
    Slot,
    generations_text,
    progress_text,
    show_stamp,
    show_text,
    stamp_line,
)
from jupyter_detllm.kernel.stamping import StampRecord
from tests.fakes import Run


class Publisher:
    """Keeps what a front end would show: displays by id, updated in place."""

    def __init__(self) -> None:
        self.outputs: list[dict[str, Any]] = []
        self.sent = 0

    def publish(
        self,
        *,
        data: dict[str, Any],
        metadata: dict[str, Any],
        transient: dict[str, str] | None = None,
        update: bool = False,
    ) -> None:
        self.sent += 1
        output = {"data": data, "metadata": metadata, "id": (transient or {}).get("display_id")}
        if update:
            index = [o["id"] for o in self.outputs].index(output["id"])
            self.outputs[index] = output
        else:
            self.outputs.append(output)

    def saved(self) -> list[Any]:
        return [(o["data"], o["metadata"]) for o in self.outputs]


class CapturingDisplayPublisher(Publisher):
    """IPython's publisher of this name, inside `%%capture`, keeps updates apart."""


def kernel_shell(publisher: Publisher | None = None, cell_id: str | None = "a") -> Any:
    request = {"metadata": {} if cell_id is None else {"cellId": cell_id}}
    return SimpleNamespace(
        display_pub=publisher or Publisher(), kernel=object(), get_parent=lambda: request
    )


def steps() -> Any:
    now = iter(range(1000))
    return lambda: float(next(now))


@pytest.mark.parametrize("lines", [0, 1, 50])
def test_what_is_saved_does_not_depend_on_the_updates(lines: int) -> None:
    shell = kernel_shell()
    slot = Slot(shell, clock=steps())
    show_text(shell, "in between")
    for number in range(lines):
        slot.line(f"{number} tokens")
    slot.finish("the text")
    assert shell.display_pub.saved() == [
        ({"text/plain": "the text"}, {}),
        ({"text/plain": "in between"}, {}),
    ]
    assert shell.display_pub.sent == lines + 3


def test_updates_are_few() -> None:
    shell = kernel_shell()
    slot = Slot(shell, clock=lambda: 1.0)
    for number in range(100):
        slot.line(str(number))
    assert shell.display_pub.sent == 2


def test_a_failure_settles_the_line() -> None:
    shell = kernel_shell()
    slot = Slot(shell)

    def interrupted() -> None:
        with slot.settled("nothing"):
            slot.line("half way")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert shell.display_pub.saved() == [({"text/plain": "nothing"}, {})]


@pytest.mark.parametrize("live", [True, False])
def test_without_updates_only_the_text_is_shown(live: bool) -> None:
    shell = kernel_shell(CapturingDisplayPublisher() if live else None)
    slot = Slot(shell, live=live)
    slot.line("half way")
    slot.finish("the text")
    assert shell.display_pub.saved() == [({"text/plain": "the text"}, {})]
    assert shell.display_pub.sent == 1


def test_where_nobody_watches_only_the_text_is_shown() -> None:
    shell = kernel_shell(cell_id=None)
    slot = Slot(shell)
    slot.line("half way")
    slot.finish("the text")
    assert shell.display_pub.saved() == [({"text/plain": "the text"}, {})]
    assert shell.display_pub.sent == 1


def test_a_terminal_has_a_line_on_stderr_that_is_wiped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(display, "_is_terminal", lambda _: True)
    shell = SimpleNamespace(display_pub=Publisher())
    slot = Slot(shell)
    slot.line("3 tokens")
    slot.finish("the text")
    assert capsys.readouterr().err == "\r\x1b[K3 tokens\r\x1b[K"
    assert shell.display_pub.saved() == [({"text/plain": "the text"}, {})]


def test_control_characters_are_shown_and_not_acted_upon() -> None:
    shell = kernel_shell()
    show_text(shell, "a\x1b[31mred\r\nb\tc\x00\x9b 言葉 🎉")
    ((data, _),) = shell.display_pub.saved()
    assert data == {"text/plain": "a\\x1b[31mred\\x0d\nb\tc\\x00\\x9b 言葉 🎉"}


SAMPLED = SamplingOptions(temperature=0.8, max_tokens=8)
ONE, TWO = Prompt.chat("one"), Prompt.chat("two")


@pytest.mark.parametrize(
    ("prompts", "n", "headings"),
    [
        ((ONE,), 1, []),
        ((ONE,), 2, ["[completion 1/2]", "[completion 2/2]"]),
        ((ONE, TWO), 1, ["[prompt 1/2]", "[prompt 2/2]"]),
        (
            (ONE, TWO),
            2,
            [f"[prompt {p}/2, completion {c}/2]" for p in (1, 2) for c in (1, 2)],
        ),
    ],
)
def test_headings_where_there_are_several(
    prompts: tuple[Prompt, ...], n: int, headings: list[str]
) -> None:
    stamp = Run(prompts=prompts, n=n, sampling=SAMPLED).stamp()
    shown = generations_text(stamp.requests, stamp.generations)
    assert [line for line in shown.split("\n") if line.startswith("[")] == headings
    for generation in stamp.generations:
        assert generation.text in shown


def test_the_stamp_line_is_the_same_for_the_same_content() -> None:
    stamp = Run(name="haiku", sampling=SAMPLED).stamp()
    line = stamp_line(stamp)
    assert line == stamp_line(Run(name="haiku", sampling=SAMPLED).stamp())
    assert line.startswith("detllm haiku | repeatable | demo | 8 tokens (1 length) | ")
    assert line.endswith(stamp.generation_digest.short)
    other = Run(name="haiku", sampling=SAMPLED, root_seed=1).stamp()
    assert stamp_line(other) != line


def emitted(stamp: Stamp, **stored: Any) -> StampRecord:
    return StampRecord(stamp, {**stamp.to_json(), **stored}, {"run_id": "r"}, None, 1)


def test_a_stamp_is_metadata_and_its_line_is_escaped() -> None:
    shell = kernel_shell()
    hostile = replace(Run(sampling=SAMPLED).stamp(), self_test="<i>& \x1b")
    hostile = replace(hostile, model=replace(hostile.model, name="<b> & \x1b"))
    show_stamp(shell, emitted(hostile))
    ((data, metadata),) = shell.display_pub.saved()
    assert data["text/plain"] == stamp_line(hostile).replace("\x1b", "\\x1b")
    assert "&lt;b&gt; &amp; \\x1b" in data["text/html"]
    assert "&lt;i&gt;&amp; \\x1b" in data["text/html"]
    assert "<b>" not in data["text/html"]
    assert metadata == {KEY: hostile.to_json(), RUN_KEY: {"run_id": "r"}}


def test_a_texts_markup_stands_beside_its_plain_form() -> None:
    for cell_id in ("a", None):
        shell = kernel_shell(cell_id=cell_id)
        Slot(shell).finish("a < b", "<pre>a &lt; b</pre>")
        ((data, _),) = shell.display_pub.saved()
        assert data == {"text/plain": "a < b", "text/html": "<pre>a &lt; b</pre>"}


def test_the_progress_line() -> None:
    assert progress_text(Progress(3, 12, 345, 1.5)) == (
        "generating: 3/12 prompts, 345 tokens, 230 tokens/s"
    )
    assert progress_text(Progress(0, 1, 0, 0.0)).endswith("0 tokens/s")
