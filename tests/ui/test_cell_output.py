"""What `%%detgen` shows, in a browser: trusted, untrusted, exported, without style."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.core.generation import Prompt
from jupyter_detllm.core.notebook import KEY
from jupyter_detllm.core.shown import generations_html, stamp_html
from jupyter_detllm.core.stamp import generations_text, printable
from jupyter_detllm.engines.base import SamplingOptions
from tests.builders import cell, notebook
from tests.fakes import Run
from tests.hostile import MARKUP
from tests.ui.lab import LOAD, USE, Front
from tests.waiting import HANGS

TEXTS = [*MARKUP, "$x^2$ and $$y$$", "a  b\n\n  indented", "line\n" * 100, "word " * 3000]
ACTIVE = ":is(pre, p, summary, code) :is(script, svg, img, iframe, base, meta, a, style)"


def output() -> dict[str, Any]:
    """Return a cell's output of many texts that are to be shown and never obeyed."""
    prompts = tuple(Prompt.chat(f"$p_{i}$ {text[:40]}") for i, text in enumerate(TEXTS))
    stamp = Run(prompts=prompts, sampling=SamplingOptions(max_tokens=2)).stamp()
    made = [
        replace(g, text=text, offsets=(0,) * len(g.offsets))
        for g, text in zip(stamp.generations, TEXTS, strict=True)
    ]
    data = {
        "text/plain": printable(generations_text(stamp.requests, made)),
        "text/html": generations_html(stamp.requests, made),
    }
    line = "detllm <b>x</b> | the stamp line"
    stamped = {"text/plain": line, "text/html": stamp_html(stamp, line, str(stamp.digest))}
    shown = {"output_type": "display_data", "metadata": {}}
    return cell(
        "%%detgen many\nx",
        outputs=[
            {**shown, "data": data},
            {**shown, "data": stamped, "metadata": {KEY: stamp.to_json()}},
        ],
    )


@pytest.mark.parametrize("trusted", [False, True])
def test_texts_are_shown_whole_and_as_text(lab: Front, trusted: bool) -> None:
    lab.server.write("texts.ipynb", output())
    lab.open("texts.ipynb", kernel=False)
    if trusted:
        lab.evaluate(
            "() => [...window.jupyterapp.shell.currentWidget.context.model.cells]"
            ".forEach(c => { c.trusted = true; })"
        )
        lab.settle()
    area = lab.page.locator(".jp-Cell .jp-OutputArea").first
    area.locator("details").first.wait_for(state="attached")
    assert area.locator(ACTIVE).evaluate_all("nodes => nodes.map(n => n.outerHTML)") == []
    assert area.locator("mjx-container").count() == 0
    area.evaluate("a => a.querySelectorAll('details').forEach(e => { e.open = true; })")
    blocks = area.locator("pre").all_text_contents()
    assert "".join("".join(blocks).split()).startswith("".join("".join(TEXTS).split()))
    assert "$x^2$ and $$y$$" in blocks
    assert "a  b\n\n  indented" in blocks
    for line in ("level ", "fingerprint ", "tokens ", "finished by"):
        assert line in blocks[-1]
    # Long lines wrap: nothing is cut off at the side.
    wide = area.evaluate(
        "a => [...a.querySelectorAll('pre')].filter(p => p.scrollWidth > p.clientWidth + 1).length"
    )
    assert wide == 0


def test_a_run_shows_one_text_and_a_stamp_that_opens(lab: Front) -> None:
    lab.server.write("run.ipynb", LOAD, USE, "%%detgen haiku --max-tokens 12\nWrite a haiku.")
    lab.open("run.ipynb").run_all()
    first, second = lab.model()["cells"][2]["outputs"]
    assert list(first["data"]) == list(second["data"]) == ["text/plain", "text/html"]
    area = lab.page.locator(".jp-Cell").nth(2).locator(".jp-OutputArea")
    assert area.locator("pre").first.inner_text() == first["data"]["text/plain"]
    assert not area.get_by_text("fingerprint ").is_visible()
    area.locator("summary").focus()
    lab.page.keyboard.press("Enter")
    area.get_by_text("fingerprint ").wait_for()


@pytest.mark.slow
def test_an_export_reads_on_without_style_or_script(context: Any, tmp_path: Path) -> None:
    path = tmp_path / "export.ipynb"
    path.write_text(json.dumps(notebook(output())))
    command = [sys.executable, "-m", "nbconvert", "--to", "html", "--template", "basic", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=HANGS)
    page = context.new_page()
    try:
        page.goto(path.with_suffix(".html").as_uri())
        page.evaluate(
            """() => {
              document.querySelectorAll('style, script, link').forEach(e => e.remove());
              document.querySelectorAll('[style]').forEach(e => e.removeAttribute('style'));
              document.querySelectorAll('details').forEach(e => { e.open = true; });
            }"""
        )
        shown = page.inner_text("body")
    finally:
        page.close()
    at = 0
    for line in (line.strip() for text in TEXTS for line in text.splitlines()):
        # A very long line is in two parts, the head and the fold.
        for part in (line,) if len(line) < 1000 else (line[:1000], line[-1000:]):
            assert part in shown[at:], (part, shown[at : at + 300])
            at = shown.index(part, at)
    assert "[prompt" not in shown
    assert "prompt 2/" in shown
    assert "the stamp line" in shown[at:]
