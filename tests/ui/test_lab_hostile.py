"""Notebooks that want harm: nothing of them is executed, obeyed or rendered as markup."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.notebook import CELL_SCHEMA, KEY, NOTEBOOK_SCHEMA
from jupyter_detllm.core.promotion import Update, promote
from jupyter_detllm.core.shown import generations_html
from jupyter_detllm.core.stamp import Stamp, generations_text
from tests.builders import MODEL, cell, generation, make_stamp, notebook, stamped_cell
from tests.hostile import HOSTILE
from tests.ui.lab import Front

Book = dict[str, Any]
CURRENT = "window.jupyterapp.shell.currentWidget"
RUN = "window.__harm = 1"
PAYLOADS = (
    f"<script>{RUN}</script>",
    f'<img src="x" onerror="{RUN}">',
    f"<svg onload='{RUN}'><script>{RUN}</script></svg>",
    '<iframe srcdoc="<script>parent.__harm = 1</script>"></iframe>',
    f'<a href="javascript:{RUN}" id="harm-link">x</a>',
    f'<math><mtext><style><img src=x onerror="{RUN}"></style></mtext></math>',
    f"<details open ontoggle='{RUN}'>x</details>",
    f"<style onload='{RUN}'>body {{ display: none }}</style>",
    '<button id="harm-command" data-commandlinker-command="notebook:delete-cell" '
    'data-commandlinker-args="{}">x</button>',
    f"<div onclick='{RUN}' onmouseover='{RUN}' style='position:fixed;inset:0'>x</div>",
    f"${{alert(1)}}{{{{constructor.constructor('{RUN}')()}}}}",
)


@pytest.fixture
def watched(lab: Front) -> Iterator[Front]:
    """Give a page that notes what is executed, and what prototypes gain."""
    lab.start_app()
    lab.evaluate(
        """() => {
          window.__harm = 0; window.__commands = []; window.__dialogs = 0;
          window.alert = () => { window.__harm = 1; };
          window.__before = Object.getOwnPropertyNames(Object.prototype).length;
          window.__note = (_, args) => window.__commands.push(args.id);
          window.jupyterapp.commands.commandExecuted.connect(window.__note);
        }"""
    )
    yield lab
    lab.evaluate("() => window.jupyterapp.commands.commandExecuted.disconnect(window.__note)")


def assert_unharmed(front: Front) -> None:
    """Assert that nothing ran, nothing was polluted, and the page can be used."""
    front.page.wait_for_timeout(150)
    assert front.evaluate("() => window.__harm") == 0
    assert front.evaluate("() => ({}).polluted") is None
    assert front.evaluate(
        "() => Object.getOwnPropertyNames(Object.prototype).length === window.__before"
    )
    harmful = {"notebook:delete-cell", "notebook:run-all-cells", "detllm:accept-all"}
    assert not harmful & set(front.evaluate("() => window.__commands"))
    count = len(front.model()["cells"])
    front.evaluate("() => { window.__commands = []; }")
    front.command("notebook:insert-cell-below")
    assert len(front.model()["cells"]) == count + 1
    assert not [line for line in front.logs if line.startswith("PAGE ERROR")]


def hostile_stamp(text: str, source: str, *, name: str = "", prompt: str = "") -> Stamp:
    """Return a stamp with `text` wherever text is allowed; in order unless its name is not."""
    numerics = {**make_stamp(source).fingerprint.numerics, text[:90]: text[:300]}  # type: ignore[union-attr]
    fingerprint = Fingerprint(numerics)
    return replace(
        make_stamp(source, [text], prompts=[prompt or text]),
        name=name,
        model=replace(MODEL, name=text),
        fingerprint=fingerprint,
        fingerprint_digest=fingerprint.digest,
        late=(text, "__proto__"),
        self_test=text,
    )


def shown_cell(source: str, stamp: Stamp, run_id: str = "run-1") -> Book:
    """Return an executed cell with the texts that the kernel shows for its stamp."""
    out = stamped_cell(source, stamp, run_id=run_id)
    call = stamp.calls[0]
    data = {
        "text/plain": generations_text(call.requests, call.generations),
        "text/html": generations_html(call.requests, call.generations),
    }
    out["outputs"].insert(0, {"output_type": "display_data", "data": data, "metadata": {}})
    return out


def asked_anew(texts: tuple[str, ...], *, same: bool = False) -> Book:
    """Return a notebook whose cells sent other prompts when run again, hostile on both sides."""
    sources = [f"x{i} = generate()" for i in range(len(texts))]
    cells = [shown_cell(s, hostile_stamp(t, s)) for s, t in zip(sources, texts, strict=True)]
    book = promote(notebook(*cells), Update.NEW)[0]
    for made, source, text in zip(book["cells"], sources, texts, strict=True):
        fresh = hostile_stamp(f"{text} {text}", source, prompt=text if same else "")
        made["outputs"] = shown_cell(source, fresh, run_id="run-2")["outputs"]
    return book


def drifted(texts: tuple[str, ...]) -> Book:
    """Return a notebook whose cells gave other texts elsewhere, hostile on both sides."""
    return asked_anew(texts, same=True)


def named(texts: tuple[str, ...]) -> Book:
    """Return a notebook of hostile names: of stamps, of references, and of deleted cells."""
    cells = []
    for i, text in enumerate(texts):
        source = f"x{i} = generate()"
        made = shown_cell(source, hostile_stamp(text, source, name=text))
        reference = copy.deepcopy(made["outputs"][-1]["metadata"][KEY])
        made["metadata"][KEY] = {"schema": CELL_SCHEMA, "entry": text, "reference": reference}
        cells.append(made)
    book = notebook(*cells)
    listed = {entry: text for text in texts for entry in (text, f"{text} deleted")}
    book["metadata"][KEY] = {"schema": NOTEBOOK_SCHEMA, "fingerprints": {}, "cells": listed}
    return book


def visit(front: Front, name: str, *, trusted: bool) -> None:
    front.open(name, kernel=False)
    if trusted:
        front.evaluate(
            f"() => {{ for (const c of {CURRENT}.context.model.cells) c.trusted = true; }}"
        )
    front.settle()
    panel = front.open_panel()
    panel.get_by_role("button", name="Stamp new").hover()


@pytest.mark.parametrize(
    ("book", "verdicts"),
    [(drifted, {"drift", "diverged"}), (asked_anew, {"stale"}), (named, {"error", "stripped"})],
)
@pytest.mark.parametrize("trusted", [False, True])
def test_hostile_texts_in_whole_stamps_are_text(
    watched: Front, trusted: bool, book: Callable[[tuple[str, ...]], Book], verdicts: set[str]
) -> None:
    texts = (*PAYLOADS, *(text for text in HOSTILE if "\ufffe" not in text))
    watched.server.write("texts.ipynb", book=book(texts))
    visit(watched, "texts.ipynb", trusted=trusted)
    assert set(watched.state()["verdicts"]) == verdicts
    panel = watched.page.locator("#detllm-panel")
    assert panel.locator("script, img, svg, iframe, style, a, math, [onclick]").count() == 0
    assert "onerror" in panel.inner_text()
    outputs = ".jp-OutputArea-output"
    assert watched.page.locator(f"{outputs} [data-commandlinker-command]").count() == 0
    assert watched.page.locator(f"{outputs} :is(script, img, iframe)").count() == 0
    titles = watched.evaluate(
        "() => [...document.querySelectorAll('.jp-detllm-status')].map(e => e.title.length)"
    )
    assert max(titles) < 2000
    # Accepting what is hostile writes it as data, and nothing more.
    watched.evaluate("() => { window.__commands = []; }")
    panel.get_by_role("button", name="Accept all").click()
    assert_unharmed(watched)


def odd_values() -> list[Any]:
    deep: Any = 0
    for _ in range(40):  # deeper ones Jupyter itself does not load
        deep = {"a": [deep]}
    return [
        *(None, True, 0, -1.5, "x", "", [], {}, [None, [[]]], deep),
        *({"schema": "detllm.stamp/1"}, {"schema": "detllm.cell/1", "reference": "x"}),
        {"schema": "detllm.notebook/1", "fingerprints": {"__proto__": {"polluted": 1}}},
        # With `constructor` at the top Jupyter itself does not load the notebook.
        {
            "__proto__": {"polluted": 1},
            "reference": {"constructor": {"prototype": {"polluted": 1}}},
        },
        {"schema": "detllm.stamp/9", "calls": "x"},
        {"schema": PAYLOADS[1], "reference": {"digest": PAYLOADS[1]}},
        {"schema": "detllm.stamp/1", "digest": "sha256:" + "0" * 64, "calls": [0] * 20_000},
        {"x" * 3000: "y" * 300_000},
    ]


def test_odd_metadata_everywhere(watched: Front) -> None:
    good = promote(notebook(stamped_cell("%%detgen good\nx")), Update.NEW)[0]["cells"][0]
    for name, values in {"first": odd_values()[:9], "second": odd_values()[9:]}.items():
        cells: list[Book] = []
        for value in values:
            output = {"output_type": "display_data", "data": {"text/plain": "x"}}
            output["metadata"] = {KEY: value, "detllm_run": value}
            odd = cell("%%detgen\nx", f"odd{len(cells)}", [output])
            odd["metadata"] = {
                KEY: json.loads(json.dumps(value)),
                "tags": ["a", 3, "detllm-policy-<b>"],
            }
            cells.append(odd)
        book = notebook(*cells, copy.deepcopy(good))
        book["metadata"][KEY] = values[-1] if isinstance(values[-1], dict) else {}
        watched.server.write(f"{name}.ipynb", book=book)
        visit(watched, f"{name}.ipynb", trusted=False)
        state = watched.state()
        assert state["state"] == "failed"
        assert "error" in state["verdicts"]
        before = {c["id"]: c for c in watched.server.read(f"{name}.ipynb")["cells"]}
        watched.evaluate("() => { window.__commands = []; }")
        watched.command("detllm:stamp-all")
        assert_unharmed(watched)
        watched.evaluate(f"() => {CURRENT}.context.save()")
        after = watched.server.read(f"{name}.ipynb")["cells"]
        for new in (c for c in after if c["id"] in before):
            # What could not be read was not touched; __proto__ Jupyter itself does not keep.
            if "__proto__" not in json.dumps(before[new["id"]]["metadata"]):
                assert before[new["id"]]["metadata"].get(KEY) == new["metadata"].get(KEY)


def test_markup_in_outputs_of_an_untrusted_notebook_does_nothing(watched: Front) -> None:
    cells = []
    for payload in PAYLOADS:
        output = {"output_type": "display_data", "metadata": {}}
        output["data"] = {"text/html": payload, "text/plain": "x"}
        cells.append(cell("1", outputs=[output]))
        markdown = cell("1", outputs=[{**output, "data": {"text/markdown": payload}}])
        cells.append(markdown)
    watched.server.write("markup.ipynb", book=notebook(*cells))
    watched.open("markup.ipynb", kernel=False)
    for name in ("#harm-link", "#harm-command"):
        for found in watched.page.locator(name).all():
            found.dispatch_event("click")
    assert_unharmed(watched)


@pytest.mark.slow
def test_a_huge_stamp_leaves_the_page_usable(watched: Front) -> None:
    text = "wörd " * 1_000_000
    answer = generation(text, pieces=[text])
    stamp = make_stamp("%%detgen big\nx", [answer], name="big")
    book = promote(notebook(stamped_cell("%%detgen big\nx", stamp)), Update.NEW)[0]
    assert len(json.dumps(book)) > 5_000_000
    watched.server.write("huge.ipynb", book=book)
    watched.open("huge.ipynb", kernel=False)
    assert watched.state()["verdicts"] == ["recorded"]
    watched.open_panel()
    assert_unharmed(watched)
