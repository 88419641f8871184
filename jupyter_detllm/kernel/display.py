"""All display output of a cell; no other module displays.

Saved output never depends on timing: a line that updates is a display whose last state is the
final text (`Slot`).
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jupyter_detllm.core.notebook import KEY, RUN_KEY
from jupyter_detllm.core.shown import bundle, stamp_bundle, stamp_line, text_bundles
from jupyter_detllm.core.stamp import generations_text, printable
from jupyter_detllm.engines.base import Progress
from jupyter_detllm.kernel.cells import request_part
from jupyter_detllm.kernel.stamping import StampRecord

__all__ = [
    "Display",
    "Slot",
    "displays_of",
    "generations_text",
    "is_watched",
    "progress_text",
    "show_again",
    "show_bundle",
    "show_stamp",
    "show_text",
    "stamp_line",
]

Display = tuple[dict[str, str], dict[str, Any]]
"""Data and metadata of one display."""

_INTERVAL = 0.25  # seconds between two updates of a line


def show_text(shell: Any, text: str, markup: str = "") -> None:
    """Show text as text/plain: no markup in it is ever rendered.

    `markup` is the same as HTML, for front ends that prefer it; everything that comes
    from a model or a user is escaped in it.
    """
    shell.display_pub.publish(data=bundle(text, markup), metadata={})


def show_bundle(
    shell: Any, text: str, markup: str, data: Mapping[str, Any], metadata: Mapping[str, Any]
) -> None:
    """Show text and markup as `show_text` does, together with other formats."""
    shell.display_pub.publish(data={**bundle(text, markup), **data}, metadata=dict(metadata))


def show_stamp(shell: Any, record: StampRecord) -> None:
    """Put a stamp into the output: a line that expands, the rest in the output's metadata."""
    data, metadata = _stamp_display(record)
    shell.display_pub.publish(data=data, metadata=metadata)


def show_again(shell: Any, record: StampRecord) -> None:
    """Put a cell's texts and its stamp into this output, as they stood in its own."""
    for data, metadata in displays_of(record):
        shell.display_pub.publish(data=data, metadata=metadata)


def displays_of(record: StampRecord) -> list[Display]:
    """Return what a `%%detgen` cell displayed for its generations: texts, then the stamp."""
    texts = text_bundles(record.stamp, show_prompt=record.prompts_kept)
    return [*((data, {}) for data in texts), _stamp_display(record)]


def _stamp_display(record: StampRecord) -> Display:
    metadata = {KEY: dict(record.stored), RUN_KEY: dict(record.run)}
    return stamp_bundle(record.stamp, str(record.stored["digest"])), metadata


def is_watched(shell: Any) -> bool:
    """Return whether a front end with cells sent the request; headless runners send no id.

    nbval drops updates of displays, so that only a text shown at once is seen there.
    """
    return bool(request_part(shell, "metadata").get("cellId"))


def progress_text(progress: Progress) -> str:
    """Return one line about a running generate call."""
    rate = progress.tokens / progress.seconds if progress.seconds > 0 else 0.0
    return (
        f"generating: {progress.prompts_done}/{progress.prompts} prompts, "
        f"{progress.tokens} tokens, {rate:.0f} tokens/s"
    )


class Slot:
    """One place in the output: a line that updates, then the text that stays.

    In a notebook both are one display, updated, so that nothing of the line is
    saved. In a terminal the line is on stderr and wiped. Where displays cannot be
    updated (``%%capture``, Output widgets, a pipe), or nobody watches, there is no line.
    """

    def __init__(self, shell: Any, *, live: bool = True, clock: Callable[[], float] | None = None):
        self._shell = shell
        self._clock = clock or time.monotonic
        self._last = -_INTERVAL
        self._display_id = ""
        self._terminal = live and _is_terminal(shell)
        if live and _updates(shell):
            # The place is taken at once: what else the cell shows comes after it in
            # every run, however fast this one is.
            self._display_id = uuid.uuid4().hex
            self._publish("", update=False)

    def _publish(self, text: str, markup: str = "", *, update: bool) -> None:
        transient = {"display_id": self._display_id}
        self._shell.display_pub.publish(
            data=bundle(text, markup), metadata={}, transient=transient, update=update
        )

    def line(self, text: str) -> None:
        """Show `text` in place of the last line; skipped when that is very recent."""
        now = self._clock()
        if now - self._last < _INTERVAL or not (self._display_id or self._terminal):
            return
        self._last = now
        if self._display_id:
            self._publish(text, update=True)
        else:
            _write(f"\r\x1b[K{printable(text)}")

    def finish(self, text: str, markup: str = "") -> None:
        """Show what stays; `markup` as `show_text` takes it."""
        if self._terminal:
            _write("\r\x1b[K")
        if self._display_id:
            self._publish(text, markup, update=True)
        else:
            show_text(self._shell, text, markup)

    @contextmanager
    def settled(self, otherwise: str) -> Iterator[None]:
        """Leave `otherwise` in the place when the block is left by an exception."""
        try:
            yield
        except BaseException:
            if self._display_id or hasattr(self._shell, "kernel"):
                self.finish(otherwise)
            elif self._terminal:
                _write("\r\x1b[K")
            raise


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _is_terminal(shell: Any) -> bool:
    return not hasattr(shell, "kernel") and bool(getattr(sys.stderr, "isatty", bool)())


def _updates(shell: Any) -> bool:
    """Return whether a display of this cell can be updated."""
    if not hasattr(shell, "kernel"):
        return False
    captured = type(shell.display_pub).__name__ == "CapturingDisplayPublisher"
    return is_watched(shell) and not captured and not _inside_output_widget()


def _inside_output_widget() -> bool:
    """Return whether an Output widget takes this cell's output: it drops updates."""
    module = sys.modules.get("ipywidgets.widgets.widget_output")
    if module is None:
        return False
    instances = getattr(sys.modules.get("ipywidgets.widgets.widget"), "_instances", None)
    if instances is None:
        return True  # unknown: better no line than a lost text
    return any(isinstance(w, module.Output) and w.msg_id for w in list(instances.values()))
