"""`%detllm show` in JupyterLab: keyboard, filter, copy, buttons, both themes, hostile texts."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from jupyter_detllm.core.notebook import KEY
from tests.conftest import ORIGINAL_ENVIRONMENT
from tests.hostile import HOSTILE
from tests.ui.lab import LOAD, USE, Front, drift

GEN = "%%detgen haiku --temperature 0 --max-tokens 12\nWrite a haiku."
SHOW = "%detllm show"
PANEL = ".detllm-panel"
_TEXTS = f"() => document.querySelector('{PANEL}').innerText"


def opened(front: Front) -> Any:
    """Show the widget of a notebook whose one generating cell is new."""
    name = f"{uuid.uuid4().hex}.ipynb"
    front.server.write(name, LOAD, USE, GEN, SHOW)
    front.open(name).run_all()
    found = front.page.locator(PANEL)
    found.wait_for()
    return found


@pytest.fixture
def panel(lab: Front) -> Any:
    return opened(lab)


@pytest.fixture(scope="class")
def looked_at(lab_page: Front) -> Iterator[tuple[Front, Any]]:
    """Give one widget to tests that change nothing."""
    yield lab_page, opened(lab_page)
    lab_page.close()
    lab_page.server.stop_kernels()


def rows(panel: Any) -> int:
    return int(panel.locator("tbody tr:visible").count())


def button(panel: Any, name: str) -> Any:
    return panel.get_by_role("button", name=name)


class TestOneWidget:
    def test_it_shows_the_session(self, looked_at: tuple[Front, Any]) -> None:
        lab, panel = looked_at
        text = panel.inner_text()
        for part in (
            ", seed 0: ",
            "engine ready: fake",
            "Fingerprint sha256:",
            "haiku",
            "new: no reference yet",
        ):
            assert part in text
        # The hash seed is late in every kernel and changes no result: it is a field, no alarm.
        assert "PYTHONHASHSEED" not in text
        for group in ("software", "hardware", "engine", "controls", "model"):
            fold = panel.locator("summary", has_text=f"{group} (")
            fold.click()
            table = panel.get_by_role("table", name=group, exact=True)
            assert table.is_visible()
            assert (group == "controls") == ("controls.PYTHONHASHSEED" in table.inner_text())
            fold.click()
            assert panel.get_by_role("table", name=group, exact=True).count() == 0
        assert panel.get_attribute("role") == "region"
        assert panel.get_attribute("aria-label") == "detllm: fingerprint and stamped cells"
        named = panel.locator("button, input").evaluate_all(
            "nodes => nodes.map("
            "n => n.getAttribute('aria-label') || n.labels?.[0]?.textContent || '')"
        )
        assert len(named) >= 6
        assert all(named)
        # What it cost, drawn in the colour of the text, and said in words.
        plot = panel.get_by_role("img")
        assert plot.get_attribute("aria-label").startswith("1 cell run. tokens/s: ")
        assert "tokens/s, per request p50" in text
        box = plot.bounding_box()
        assert box["width"] > 300
        assert box["height"] > 100
        assert plot.locator("circle title").first.text_content().startswith("haiku: ")
        colour = "n => [getComputedStyle(n).fill, getComputedStyle(n.closest('div')).color]"
        assert len(set(plot.locator("circle").first.evaluate(colour))) == 1
        # The cell is the widget's: nothing but `show` made one.
        outputs = [o["data"] for c in lab.model()["cells"] for o in c["outputs"] if "data" in o]
        views = [data for data in outputs if "application/vnd.jupyter.widget-view+json" in data]
        assert len(views) == 1
        assert {"text/plain", "text/html"} <= set(views[0])

    def test_the_filter_narrows_cells_and_fields(self, looked_at: tuple[Front, Any]) -> None:
        lab, panel = looked_at
        every = panel.locator("tbody tr").count()
        search = panel.get_by_label("Filter")
        search.focus()
        lab.page.keyboard.type("numerics dtype")
        # Matching groups are open while one is looked for.
        assert 0 < rows(panel) < 10
        assert f"{rows(panel)} of {every} rows" in panel.inner_text()
        assert "engine.dtype" in panel.inner_text()
        assert panel.locator("details:visible").count() == 1
        lab.page.keyboard.press("Control+a")
        lab.page.keyboard.type("haiku")
        assert rows(panel) == 1
        # The letters went into the field, not to the notebook's commands.
        assert [cell["type"] for cell in lab.model()["cells"]] == ["code"] * 4
        lab.page.keyboard.press("Control+a")
        lab.page.keyboard.press("Delete")
        assert rows(panel) == 1
        assert panel.locator("details:visible").count() >= 5
        assert panel.locator("details[open]").count() == 0

    def test_the_digest_is_copied(self, looked_at: tuple[Front, Any]) -> None:
        lab, panel = looked_at
        digest = panel.locator("code").first.inner_text()
        lab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        button(panel, "Copy the fingerprint's digest").click()
        panel.get_by_text("The digest was copied.").wait_for()
        assert lab.evaluate("() => navigator.clipboard.readText()") == digest
        # Where a page may not use the clipboard, the digest is selected.
        lab.evaluate(
            "() => { navigator.clipboard.writeText = () => Promise.reject(new Error('no')); }"
        )
        button(panel, "Copy the fingerprint's digest").click()
        panel.get_by_text("The digest is selected").wait_for()
        assert lab.evaluate("() => getSelection().toString()") == digest

    def test_every_control_is_reached_and_works_by_keyboard(
        self, looked_at: tuple[Front, Any]
    ) -> None:
        lab, panel = looked_at
        panel.get_by_role("button").first.focus()
        order = [lab.evaluate("() => document.activeElement.getAttribute('aria-label')")]
        for _ in range(5):
            lab.page.keyboard.press("Tab")
            order.append(
                lab.evaluate(
                    "() => document.activeElement.getAttribute('aria-label')"
                    " || document.activeElement.tagName"
                )
            )
        assert order == [
            "Copy the fingerprint's digest",
            "Read the kernel's state again",
            "Make the present generation of haiku its reference",
            "Make stamps of new and changed cells their references",
            "Make every present generation its cell's reference",
            "INPUT",
        ]
        outline = lab.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"
        lab.page.keyboard.press("Tab")
        assert lab.evaluate("() => document.activeElement.tagName") == "SUMMARY"
        lab.page.keyboard.press("Enter")
        assert panel.locator("details[open]").count() == 1
        lab.page.keyboard.press("Enter")
        assert panel.locator("details[open]").count() == 0
        panel.get_by_role("status").evaluate("e => e.replaceChildren()")
        button(panel, "Copy the fingerprint's digest").focus()
        lab.page.keyboard.press("Enter")
        panel.get_by_text("The digest").wait_for()


def test_stamp_and_accept_go_through_the_extension(lab: Front, panel: Any) -> None:
    button(panel, "Make stamps of new and changed").click()
    panel.get_by_text("recorded", exact=True).wait_for()
    first = lab.model()["cells"][2]["metadata"][KEY]["reference"]
    lab.edit(1, f"%detllm release\n{drift()}")
    for index in (1, 2):
        lab.run(index)
    panel.get_by_text("drift at token").wait_for()
    text = panel.inner_text()
    assert "margin" in text
    # This kernel has stamped under both fingerprints, so the field has a name.
    assert "engine.dtype" in text.split("drift at token")[1].splitlines()[0]
    assert lab.model()["cells"][2]["metadata"][KEY]["reference"] == first
    button(panel, "Make the present generation of haiku").focus()
    lab.page.keyboard.press("Enter")
    panel.get_by_text("recorded", exact=True).wait_for()
    entry = lab.model()["cells"][2]["metadata"][KEY]
    assert entry["previous"] == first
    assert entry["reference"]["digest"] != first["digest"]
    lab.run(2)
    panel.get_by_text("match", exact=True).wait_for()
    assert lab.model()["cells"][2]["metadata"][KEY] == entry


def test_where_no_extension_answers_it_says_what_to_type(lab: Front, panel: Any) -> None:
    # As in VS Code or Colab: nobody takes the event.
    lab.evaluate(
        "() => { window._deaf = e => e.stopImmediatePropagation();"
        " window.addEventListener('detllm:command', window._deaf, true); }"
    )
    before = lab.model()["cells"]
    button(panel, "Make stamps of new and changed").click()
    panel.get_by_text("in a terminal: jupyter detllm stamp NOTEBOOK").wait_for()
    button(panel, "Make every present").click()
    panel.get_by_text("jupyter detllm stamp --update all NOTEBOOK").wait_for()
    assert lab.model()["cells"] == before
    lab.evaluate("() => window.removeEventListener('detllm:command', window._deaf, true)")


def test_static_makes_no_widget(lab: Front) -> None:
    lab.server.write("static.ipynb", LOAD, USE, GEN, "%detllm show --static")
    lab.open("static.ipynb").run_all()
    outputs = lab.model()["cells"][3]["outputs"]
    assert [set(o["data"]) for o in outputs] == [{"text/plain", "text/html"}]
    assert lab.page.locator(PANEL).count() == 0
    area = lab.page.locator(".jp-Cell").nth(3).locator(".jp-OutputArea-output")
    area.locator("summary", has_text="engine (").click()
    assert "engine.dtype" in area.inner_text()


_HOSTILE = f"""
from jupyter_detllm.kernel import panel_widget as panel
from jupyter_detllm.kernel.panel import CellRow, Content, FieldRow
from jupyter_detllm.kernel.session import current_session
from jupyter_detllm.render.chart import Chart, Shape
texts = {HOSTILE!r}
made = Content(texts[0], texts[1], texts, texts, texts[2],
    tuple(FieldRow(t, t, t, t, t) for t in texts),
    tuple(CellRow(t, t, t, t, t, t) for t in (*texts, "__proto__", "constructor")),
    tuple(texts), Chart(480, 152, texts[0], (
        Shape("script", (), "alert(1)"), Shape("image", (("href", "x"),), ""),
        *(Shape(tag, (("onload", t), ("onclick", t), ("href", t), ("style", t), ("cx", t)), t)
          for t in texts for tag in ("circle", "text")))))
panel.refresh_panels = lambda session: None
next(iter(panel._open.values())).data = made.to_json()
"""


def test_hostile_texts_are_shown_and_do_nothing(lab: Front, panel: Any) -> None:
    dialogs: list[str] = []
    lab.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    lab.edit(1, _HOSTILE)
    tags = "b => [...new Set([...b.querySelectorAll('*')].map(e => e.tagName))].sort()"
    before = panel.evaluate(tags)
    lab.run(1)
    panel.get_by_text(HOSTILE[0]).first.wait_for()
    assert set(panel.evaluate(tags)) <= {*before, "H3", "UL", "LI"}
    attributes = panel.evaluate(
        "b => [...new Set([...b.querySelectorAll('*')].flatMap(e => e.getAttributeNames()))]"
    )
    assert not [name for name in attributes if name.startswith("on") or "command" in name]
    assert not {"href", "style"} & set(attributes)
    for text in HOSTILE[:5]:
        assert text in panel.text_content()
    panel.get_by_label("Filter").fill("onerror")
    assert 0 < rows(panel) < 10
    button(panel, "Make every present").click()
    lab.settle()
    assert dialogs == []
    assert not [line for line in lab.logs if "PAGE ERROR" in line and "detllm" in line]


def test_it_is_legible_in_both_themes(lab: Front, panel: Any) -> None:
    panel.locator("summary", has_text="engine (").click()
    low = {}
    for theme in ("dark", "light"):
        lab.command("apputils:change-theme", {"theme": f"JupyterLab {theme.title()}"})
        lab.wait(f"() => document.body.dataset.jpThemeLight === '{str(theme == 'light').lower()}'")
        low[theme] = panel.evaluate(_CONTRAST)
        if folder := ORIGINAL_ENVIRONMENT.get("DETLLM_IMAGES"):
            lab.page.set_viewport_size({"width": 1280, "height": 1700})
            panel.screenshot(path=f"{folder}/widget-{theme}.png")
            lab.page.set_viewport_size({"width": 1280, "height": 860})
    assert low == {"dark": [], "light": []}


_CONTRAST = """root => {
  const light = c => {
    const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map(v => {
      const x = v / 255;
      return x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const clear = c => c === 'transparent' || /, 0\\)$/.test(c);
  const ground = e => {
    for (; e; e = e.parentElement) {
      const c = getComputedStyle(e).backgroundColor;
      if (!clear(c)) return c;
    }
    return 'rgb(255, 255, 255)';
  };
  const low = [];
  for (const e of [root, ...root.querySelectorAll('*')]) {
    if (!e.textContent.trim() && e.tagName !== 'INPUT') continue;
    const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) low.push(`${e.tagName}.${e.className}: ${ratio.toFixed(2)}`);
  }
  return [...new Set(low)];
}"""
