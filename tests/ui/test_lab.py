"""The extension in JupyterLab: what is stamped, what is kept, what is shown."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.cli import main
from jupyter_detllm.core.notebook import KEY, RUN_KEY, check_cell, read_notebook
from jupyter_detllm.core.promotion import Update, promote
from tests.builders import make_stamp, notebook, stamped_cell, with_actual
from tests.ui.lab import LOAD, USE, Front, drift
from tests.waiting import HANGS, PATIENCE

Book = dict[str, Any]
ONE = "%%detgen one --max-tokens 10\nWrite one."
TWO = "%%detgen two --max-tokens 10\nWrite two."
CELLS = (LOAD, USE, ONE, TWO)
CURRENT = "window.jupyterapp.shell.currentWidget"
ROOT = Path(__file__).resolve().parents[2]


def keys(book: Book) -> list[bool]:
    return [KEY in cell["metadata"] for cell in book["cells"]]


def reference(book: Book, index: int) -> Any:
    return book["cells"][index]["metadata"][KEY]["reference"]


def verdicts(book: Book) -> list[str]:
    return [check_cell(found).verdict.value for found in read_notebook(book).cells]


def as_bytes(holder: Book) -> bytes:
    """Return its metadata of ours as Jupyter writes JSON, whatever the order of keys."""
    return json.dumps(holder["metadata"].get(KEY), sort_keys=True, indent=1).encode()


def run_id(book: Book, index: int) -> str:
    (found,) = [o["metadata"] for o in book["cells"][index]["outputs"] if KEY in o["metadata"]]
    return str(found[RUN_KEY]["run_id"])


def live(book: Book) -> list[str]:
    """Return the verdicts that the kernel gave when cells ran."""
    found = [o.get("metadata", {}) for c in book["cells"] for o in c.get("outputs", [])]
    return [m[RUN_KEY]["verdict"] for m in found if KEY in m]


def detllm(path: Path, *argv: str) -> tuple[int, str]:
    """Run the command on a file; return its exit code and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        code = main([*argv, str(path)])
    return code, shown.getvalue()


def assert_as_python_stamps(front: Front) -> None:
    """Assert that Python would not change a byte of what was saved."""
    path = front.server.root / front.name()
    before = path.read_bytes()
    code, shown = detllm(path, "stamp")
    assert code == 0, shown
    assert "not changed" in shown
    assert path.read_bytes() == before


def test_run_save_reopen_rerun(lab: Front) -> None:
    lab.server.write("a.ipynb", *CELLS)
    lab.open("a.ipynb")
    assert not lab.model()["dirty"]
    assert set(lab.status()) == {"detllm: not stamped"}
    lab.run_all()
    book = lab.save()
    assert keys(book) == [False, False, True, True]
    assert set(lab.status()) == {"detllm: stamped, 2 cells"}
    assert verdicts(book) == ["recorded", "recorded"]
    assert book["cells"][2]["metadata"][KEY]["recorded_run"] == run_id(book, 2)
    assert_as_python_stamps(lab)
    # The kernel compared at once with what the request carried: nothing yet.
    assert live(book) == ["unstamped", "unstamped"]

    lab.reopen("a.ipynb")
    lab.settle()
    assert not lab.model()["dirty"]
    assert lab.state()["state"] == "stamped"
    lab.run_all()
    assert set(lab.status()) == {"detllm: verified 2 of 2"}
    assert lab.state()["state"] == "verified"
    again = lab.save()
    assert [reference(again, i) for i in (2, 3)] == [reference(book, i) for i in (2, 3)]
    assert again["metadata"][KEY] == book["metadata"][KEY]
    assert verdicts(again) == ["match", "match"]
    assert detllm(lab.server.root / "a.ipynb", "check", "--policy", "bitwise")[0] == 0
    assert live(again) == ["match", "match"]


def test_the_indicator_is_green_only_when_every_cell_was_compared(lab: Front) -> None:
    lab.server.write("green.ipynb", *CELLS, "%%detgen three --max-tokens 4\nWrite three.")
    lab.open("green.ipynb")
    for index in range(4):
        lab.run(index)
    lab.run(2)
    lab.run(3)
    assert set(lab.status()) == {"detllm: verified 2 of 3"}
    assert lab.state()["state"] == "partly"
    lab.run(4)
    assert lab.state()["text"] == "verified 2 of 3"
    lab.run(4)
    assert lab.state() == {
        "state": "verified", "text": "verified 3 of 3", "late": [], "problems": [],
        "verdicts": ["match"] * 3,
    }  # fmt: skip


def test_a_late_control_is_named_and_never_green(lab: Front) -> None:
    late = ("CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED")
    for name, control, text, state in (
        ("late", late[0], "verified 1 of 1; late controls", "partly"),
        ("harmless", late[1], "verified 1 of 1", "verified"),
    ):
        stamp = make_stamp(ONE, name="one", late=(control,))
        book = promote(notebook(stamped_cell(ONE, stamp)), Update.NEW)[0]
        lab.server.write(f"{name}.ipynb", book=with_actual(book, 1, stamp))
        lab.open(f"{name}.ipynb", kernel=False)
        assert set(lab.status()) == {f"detllm: {text}"}
        assert lab.state()["state"] == state
        panel = lab.open_panel().inner_text()
        assert (f"too late to be in force: {control}" in panel) == (state == "partly")


def test_drift_is_shown_kept_and_accepted_by_command(lab: Front) -> None:
    lab.server.write("drift.ipynb", *CELLS)
    lab.open("drift.ipynb")
    lab.run_all()
    before = lab.save()
    lab.edit(1, drift())
    lab.run_all()
    assert set(lab.status()) == {"detllm: drift in 2 cells"}
    assert lab.state()["state"] == "failed"
    kept = lab.save()
    assert [reference(kept, i) for i in (2, 3)] == [reference(before, i) for i in (2, 3)]
    assert detllm(lab.server.root / "drift.ipynb", "check")[0] == 1
    assert live(kept) == ["drift", "drift"]

    lab.select(2)
    lab.command("detllm:accept-cell")
    assert set(lab.status()) == {"detllm: drift in 1 cell"}
    one = lab.save()
    accepted = one["cells"][2]["metadata"][KEY]
    expected, _ = promote(kept, Update.ALL, chosen={3})
    assert accepted == expected["cells"][2]["metadata"][KEY]
    assert accepted["previous"] == reference(before, 2)
    assert reference(one, 3) == reference(before, 3)
    # The new fingerprint is in this cell: the others are still of the old one.
    assert one["metadata"][KEY] == before["metadata"][KEY]
    assert len(one["metadata"][KEY]["fingerprints"]) == 1
    assert list(accepted["fingerprints"]) == [accepted["reference"]["fingerprint_digest"]]

    lab.command("detllm:accept-all")
    expected, _ = promote(one, Update.ALL)
    assert set(lab.status()) == {"detllm: stamped, 2 cells"}
    both = lab.save()
    assert both["cells"][3]["metadata"] == expected["cells"][3]["metadata"]
    assert both["metadata"][KEY] == expected["metadata"][KEY]
    assert_as_python_stamps(lab)


def test_another_source_is_promoted_and_the_previous_kept(lab: Front) -> None:
    lab.server.write("source.ipynb", *CELLS)
    lab.open("source.ipynb")
    lab.run_all()
    before = lab.save()
    lab.edit(2, ONE + " Again.")
    assert lab.state()["verdicts"] == ["stale", "recorded"]
    stale = lab.save()
    assert reference(stale, 2) == reference(before, 2)
    lab.run(2)
    book = lab.save()
    assert book["cells"][2]["metadata"][KEY]["previous"] == reference(before, 2)
    assert lab.state()["verdicts"] == ["recorded", "recorded"]
    assert_as_python_stamps(lab)


def test_panel_lists_cells_with_divergence_and_margin_and_jumps(lab: Front) -> None:
    lab.server.write("panel.ipynb", *CELLS, *["x = 1"] * 30)
    lab.open("panel.ipynb")
    for index in range(4):
        lab.run(index)
    lab.save()
    lab.edit(1, drift())
    for index in (1, 2, 3):
        lab.run(index)
    lab.page.locator("#jp-main-statusbar .jp-detllm-status").click()
    panel = lab.page.locator("#detllm-panel")
    panel.wait_for()
    text = panel.inner_text()
    assert "drift in 2 cells" in text
    assert "engine.dtype: bfloat16 -> float32" in text
    assert re.search(r"generation 1 of 1, token \d+ of 10", text)
    assert re.search(r"nats \((tie|near-tie|confident)\), now ", text)
    assert "token id" in text
    lab.select(30)
    panel.get_by_role("button", name="cell 4 (two)", exact=True).click()
    assert lab.evaluate(f"() => {CURRENT}.content.activeCellIndex") == 3
    panel.get_by_role("button", name="Accept the new generation of cell 3 (one)").click()
    panel.get_by_text("1 reference written").first.wait_for()
    assert "drift in 1 cell" in panel.inner_text()
    assert "1 reference written" in panel.inner_text()
    panel.get_by_role("button", name="Accept all").click()
    panel.get_by_text("stamped, 2 cells").first.wait_for()
    assert "stamped, 2 cells" in panel.inner_text()


def test_deleting_moving_and_undoing_are_mirrored(lab: Front) -> None:
    lab.server.write("undo.ipynb", *CELLS)
    lab.open("undo.ipynb")
    lab.run_all()
    both = lab.save()["metadata"][KEY]["cells"]
    lab.select(3)
    lab.command("notebook:delete-cell")
    lab.settle()
    assert lab.save()["metadata"][KEY]["cells"] == both
    assert lab.state()["verdicts"][-1] == "stripped"
    lab.command("notebook:undo-cell-action")
    lab.settle()
    book = lab.save()
    assert book["metadata"][KEY]["cells"] == both
    assert keys(book) == [False, False, True, True]
    lab.select(3)
    lab.command("notebook:move-cell-up")
    lab.settle()
    assert lab.save()["metadata"][KEY]["cells"] == both
    assert_as_python_stamps(lab)


def test_typing_undo_and_redo_are_not_disturbed(lab: Front) -> None:
    lab.server.write("typing.ipynb", LOAD, USE, ONE, "x = 1")
    lab.open("typing.ipynb")
    script = f"""() => {{
      const c = [...{CURRENT}.context.model.cells].map(m => m.sharedModel);
      return [c[3].getSource(), c[3].canUndo(), c[3].canRedo(), c[2].canUndo()];
    }}"""
    editor = lab.page.locator(".jp-Notebook .jp-Cell").nth(3).locator(".cm-content")
    editor.click()
    lab.page.keyboard.press("End")
    lab.page.keyboard.type("23")
    lab.page.wait_for_timeout(700)
    lab.page.keyboard.press("Control+z")
    before = lab.evaluate(script)
    lab.run_all()
    assert lab.evaluate(script) == before  # the stamp is no step to undo
    editor.click()
    lab.page.keyboard.press("Control+Shift+z")
    lab.wait(f"() => ({script})()[0] === 'x = 123'")
    lab.page.locator(".jp-Notebook .jp-Cell").nth(2).locator(".cm-content").click()
    lab.page.keyboard.press("Control+z")
    lab.settle()
    assert keys(lab.save()) == [False, False, True, False]


def test_restart_and_run_all_matches(lab: Front) -> None:
    lab.server.write("restart.ipynb", *CELLS)
    lab.open("restart.ipynb")
    lab.run_all()
    before = lab.save()
    lab.evaluate(f"() => {CURRENT}.context.sessionContext.session.kernel.restart()")
    lab.page.wait_for_timeout(500)
    lab.idle()
    assert KEY in lab.model()["notebook"]
    lab.run_all()
    assert lab.state()["state"] == "verified"
    after = lab.save()
    assert after["metadata"] == before["metadata"]
    assert [reference(after, i) for i in (2, 3)] == [reference(before, i) for i in (2, 3)]


@pytest.mark.slow
def test_two_views_share_one_stamper(lab: Front) -> None:
    lab.server.write("views.ipynb", *CELLS)
    lab.open("views.ipynb")
    lab.command("docmanager:clone")
    panels = "[...window.jupyterapp.shell.widgets('main')].filter(w => w.context)"
    lab.wait(f"() => {panels}.length === 2")
    lab.run_all()
    assert lab.evaluate(f"() => new Set({panels}.map(w => w.context)).size") == 1
    assert lab.evaluate(f"() => {panels}.length") == 2
    assert set(lab.status()) == {"detllm: stamped, 2 cells"}
    assert keys(lab.save()) == [False, False, True, True]
    assert_as_python_stamps(lab)


def waits(lab: Front) -> str:
    """Return a cell that ends when the test says so, or is given up."""
    return f"""print(1)
import pathlib, time
go = pathlib.Path({str(lab.server.root / "go")!r})
end = time.monotonic() + {PATIENCE}
while not go.exists() and time.monotonic() < end: time.sleep(0.05)
go.unlink()"""


def go_on(lab: Front) -> None:
    """Let that cell end."""
    (lab.server.root / "go").touch()


def test_save_while_running(lab: Front) -> None:
    lab.server.write("busy.ipynb", LOAD, USE, ONE, waits(lab), TWO)
    lab.open("busy.ipynb")
    lab.start()
    lab.wait(f"() => [...{CURRENT}.context.model.cells][2].outputs.length > 1")
    lab.page.wait_for_timeout(200)
    lab.evaluate(f"() => {CURRENT}.context.save()")
    middle = lab.server.read("busy.ipynb")
    assert keys(middle) == [False, False, True, False, False]
    assert len(middle["metadata"][KEY]["cells"]) == 1
    go_on(lab)
    lab.evaluate("() => window._run.then(() => null)")
    lab.idle()
    lab.settle()
    assert keys(lab.save()) == [False, False, True, False, True]
    assert_as_python_stamps(lab)


def test_save_on_the_very_message_that_brings_the_stamp(lab: Front) -> None:
    lab.server.write("now.ipynb", LOAD, USE, ONE)
    lab.open("now.ipynb")
    lab.evaluate(
        f"""() => new Promise(resolve => {{
          const w = {CURRENT}; const cell = [...w.context.model.cells][2]; let saved = false;
          cell.outputs.changed.connect(() => {{
            const there = cell.outputs.toJSON().some(o => o.metadata && o.metadata.detllm);
            if (there && !saved) {{ saved = true; w.context.save().then(resolve); }}
          }});
          window.jupyterapp.commands.execute('notebook:run-all-cells');
        }})"""
    )
    book = lab.server.read("now.ipynb")
    assert keys(book) == [False, False, True]
    assert KEY in book["metadata"]


def test_cleared_outputs_keep_their_references_and_are_not_verified(lab: Front) -> None:
    lab.server.write("clear.ipynb", *CELLS)
    lab.open("clear.ipynb")
    lab.run_all()
    before = lab.save()
    lab.command("notebook:clear-all-cell-outputs")
    lab.settle()
    book = lab.save()
    assert [c["metadata"] for c in book["cells"]] == [c["metadata"] for c in before["cells"]]
    assert book["metadata"] == before["metadata"]
    assert lab.state()["verdicts"] == ["stripped", "stripped"]
    assert lab.state()["state"] == "partly"
    lab.run(0)
    lab.run(1)
    lab.run(2)
    assert lab.state()["text"] == "verified 1 of 2"
    assert lab.state()["state"] == "partly"


def test_a_cell_that_becomes_markdown_is_missed_until_that_is_accepted(lab: Front) -> None:
    lab.server.write("text.ipynb", *CELLS)
    lab.open("text.ipynb")
    lab.run_all()
    before = lab.save()
    lab.select(2)
    lab.command("notebook:change-cell-to-markdown")
    lab.settle()
    book = lab.save()
    assert book["cells"][2]["cell_type"] == "markdown"
    assert keys(book) == [False, False, True, True]
    assert reference(book, 2) == reference(before, 2)
    assert book["metadata"] == before["metadata"]
    assert lab.state()["verdicts"] == ["recorded", "stripped"]
    assert lab.state()["text"] == "stamped 1 of 2"
    path = lab.server.root / "text.ipynb"
    saved = path.read_bytes()
    code, shown = detllm(path, "stamp")
    assert (code, "it is a markdown cell now" in shown) == (3, True)
    assert path.read_bytes() == saved
    lab.command("detllm:accept-all")
    book = lab.save()
    assert keys(book) == [False, False, False, True]
    assert len(book["metadata"][KEY]["cells"]) == 1
    assert lab.state()["verdicts"] == ["recorded"]
    assert_as_python_stamps(lab)


@pytest.mark.slow
def test_a_pasted_copy_has_an_id_and_a_reference_of_its_own(lab: Front) -> None:
    unnamed = "%%detgen --max-tokens 6\nWrite."
    lab.server.write("copy.ipynb", LOAD, USE, unnamed)
    lab.open("copy.ipynb")
    lab.run_all()
    lab.select(2)
    lab.command("notebook:copy-cell")
    lab.command("notebook:paste-cell-below")
    lab.settle()
    book = lab.save()
    assert keys(book) == [False, False, True, True]
    assert book["cells"][2]["id"] != book["cells"][3]["id"]
    assert len(book["metadata"][KEY]["cells"]) == 2
    assert lab.state()["verdicts"] == ["recorded", "recorded"]
    assert_as_python_stamps(lab)


@pytest.mark.slow
def test_a_shared_kernel_stamps_each_notebook(lab: Front) -> None:
    lab.server.write("first.ipynb", *CELLS)
    lab.server.write("second.ipynb", "%%detgen third --max-tokens 5\nThree.")
    lab.open("first.ipynb")
    lab.run_all()
    lab.save()
    lab.evaluate(
        f"""async () => {{
          const kernel = {CURRENT}.context.sessionContext.session.kernel.model;
          await window.jupyterapp.commands.execute(
            'docmanager:open', {{path: 'second.ipynb', kernel: {{id: kernel.id}}}});
        }}"""
    )
    lab.wait(f"() => {CURRENT}.context.path === 'second.ipynb'")
    lab.idle()
    lab.run_all()
    assert keys(lab.save()) == [True]
    assert set(lab.state()["verdicts"]) == {"recorded"}
    first = lab.server.read("first.ipynb")
    assert len(first["metadata"][KEY]["cells"]) == 2


@pytest.mark.slow
def test_capture_and_output_widgets_do_not_swallow_stamps(lab: Front) -> None:
    lab.server.write(
        "capture.ipynb",
        LOAD,
        USE,
        "%%capture hidden\nget_ipython().run_cell_magic('detgen', '--max-tokens 5', 'A')",
        "import ipywidgets\nout = ipywidgets.Output()\nwith out:\n"
        "    get_ipython().run_cell_magic('detgen', '--max-tokens 5', 'B')\nout",
    )
    lab.open("capture.ipynb")
    lab.run_all()
    book = lab.save()
    assert keys(book) == [False, False, True, True]
    assert verdicts(book) == ["recorded", "recorded"]


@pytest.mark.slow
def test_a_dead_kernel_leaves_what_was_stamped(lab: Front) -> None:
    lab.server.write("dead.ipynb", LOAD, USE, ONE, "import os\nos._exit(1)", TWO)
    lab.open("dead.ipynb")
    lab.start()
    lab.page.wait_for_selector(".jp-Dialog")
    lab.page.locator(".jp-Dialog button.jp-mod-accept").first.click()
    lab.settle()
    lab.evaluate(f"() => {CURRENT}.context.save()")
    book = lab.server.read("dead.ipynb")
    assert keys(book) == [False, False, True, False, False]
    assert len(book["metadata"][KEY]["cells"]) == 1
    assert lab.state()["state"] != "verified"


@pytest.mark.slow
def test_closing_the_tab_and_answering_save(lab: Front) -> None:
    lab.server.write("close.ipynb", LOAD, USE, ONE)
    lab.open("close.ipynb")
    lab.run_all()
    lab.evaluate("() => { window.jupyterapp.commands.execute('application:close'); }")
    lab.page.get_by_role("button", name="Save", exact=True).click()
    lab.wait("() => !window.jupyterapp.shell.currentWidget?.context")
    assert keys(lab.server.read("close.ipynb")) == [False, False, True]


def test_a_tab_closed_while_a_cell_runs_gets_back_what_the_kernel_holds(lab: Front) -> None:
    api = "import jupyter_detllm as det\ng = det.generate('x', max_tokens=4)"
    lab.server.write("gone.ipynb", LOAD, USE, waits(lab), ONE, TWO, api, "%detllm stamps")
    lab.open("gone.ipynb", spare=False)  # the kernel is to know the notebook's name
    for index in (0, 1):
        lab.run(index)
    lab.save()
    lab.start()
    lab.wait(f"() => [...{CURRENT}.context.model.cells][2].outputs.length > 0")
    prompts = f"[...{CURRENT}.node.querySelectorAll('.jp-InputPrompt')]"
    lab.wait(f"() => {prompts}.slice(2).every(p => p.textContent.includes('*'))")
    lab.close()
    go_on(lab)
    lab.open("gone.ipynb", spare=False)
    lab.idle()
    assert set(lab.status()) == {"detllm: not stamped"}
    assert lab.state()["verdicts"] == ["unstamped"] * 2
    lab.edit(4, TWO + " Again.")
    lab.run(6)
    # One cell has another source now: what is lost there stays lost.
    assert lab.state()["verdicts"] == ["recorded", "unstamped", "recorded"]
    assert set(lab.status()) == {"detllm: stamped 2 of 3"}
    first, other, generated, listed = lab.model()["cells"][3:]
    assert "generation " not in first["outputs"][0]["data"]["text/plain"]
    assert [KEY in o["metadata"] for o in first["outputs"]] == [False, True]
    assert other["outputs"] == []
    assert [KEY in o["metadata"] for o in generated["outputs"]] == [True]
    assert [set(o) for o in listed["outputs"]] == [{"data", "metadata", "output_type"}]
    assert listed["outputs"][0]["metadata"] == {}
    lab.run(6)
    assert lab.model()["cells"][3] == first  # once is enough
    book = lab.save()
    assert "detllm_ledger" not in json.dumps(book)
    assert keys(book) == [False, False, False, True, False, True, False]
    assert verdicts(book) == ["recorded", "unstamped", "recorded"]
    assert_as_python_stamps(lab)
    lab.run(6)
    # The file says that they are references now; the kernel reads it there.
    listed = lab.model()["cells"][6]["outputs"][0]["data"]["text/plain"].splitlines()
    assert [line.endswith("recorded") for line in listed[1:]] == [True, False, True]
    lab.run(3)
    assert lab.state()["verdicts"][0] == "match"


def executed(path: Path, *sources: str) -> Book:
    """Run a notebook without any front end, and leave it on the disk."""
    import nbformat
    from nbclient import NotebookClient

    node = nbformat.reads(path.read_text(), as_version=4)
    NotebookClient(
        node, kernel_name="python3", record_timing=False, startup_timeout=HANGS
    ).execute()
    path.write_text(nbformat.writes(node) + "\n")
    found: Book = json.loads(path.read_text())
    return found


def test_a_headless_notebook_is_not_dirtied_and_save_writes_what_python_stamps(lab: Front) -> None:
    path = lab.server.write("headless.ipynb", *[stamped_cell(s) for s in (ONE, TWO)])
    twin = path.with_name("twin.ipynb")
    twin.write_bytes(path.read_bytes())
    assert detllm(twin, "stamp")[0] == 0
    lab.open("headless.ipynb")
    lab.settle(600)
    assert not lab.model()["dirty"]
    assert lab.state()["text"] == "not stamped: stamps in 2 cells not in the metadata"
    assert lab.state()["state"] == "partly"
    lab.command("detllm:stamp-all")
    assert lab.state()["text"] == "stamped, 2 cells"
    saved, stamped = lab.save(), json.loads(twin.read_text())
    for a, b in zip(saved["cells"], stamped["cells"], strict=True):
        assert as_bytes(a) == as_bytes(b)
    assert as_bytes(saved) == as_bytes(stamped)


@pytest.mark.slow
def test_save_alone_stamps_what_ran_headless(lab: Front) -> None:
    executed(lab.server.write("saved.ipynb", *CELLS))
    lab.open("saved.ipynb")
    lab.evaluate(f"() => {CURRENT}.context.save()")
    assert keys(lab.server.read("saved.ipynb")) == [False, False, True, True]
    assert_as_python_stamps(lab)


@pytest.mark.slow
def test_two_browsers_without_collaboration(lab: Front, context: Any) -> None:
    lab.server.write("shared.ipynb", *CELLS)
    lab.open("shared.ipynb")
    other = Front(context, lab.server)
    try:
        other.open("shared.ipynb")
        lab.page.bring_to_front()
        lab.run_all()
        first = lab.save()
        other.page.bring_to_front()
        assert not other.model()["dirty"]
        other.evaluate(f"() => {{ {CURRENT}.context.save().catch(() => null); }}")
        other.page.get_by_role("button", name="Revert").click()
        other.shows("stamped, 2 cells")
        assert lab.server.read("shared.ipynb") == first
    finally:
        other.quit()
        lab.page.bring_to_front()


@pytest.mark.slow
def test_seeds_beyond_what_javascript_counts_survive(lab: Front) -> None:
    lab.server.write(
        "big.ipynb",
        LOAD,
        USE,
        f"%%detgen big --max-tokens 5 --temperature 0.7 --seed {2**62 + 1}\nX",
    )
    lab.open("big.ipynb")
    lab.run_all()
    book = lab.save()
    assert str(2**62 + 1) in json.dumps(reference(book, 2))
    assert verdicts(book) == ["recorded"]


def test_damage_is_an_error_and_never_green(lab: Front) -> None:
    lab.server.write("damaged.ipynb", *CELLS)
    lab.open("damaged.ipynb")
    lab.run_all()
    book = lab.save()
    lab.close()
    broken = copy.deepcopy(book)
    reference(broken, 2)["name"] = "other"
    lab.server.write("damaged.ipynb", book=broken)
    lab.open("damaged.ipynb")
    assert set(lab.status()) == {"detllm: error in 1 cell"}
    lab.run_all()
    assert lab.state()["verdicts"] == ["error", "match"]
    assert reference(lab.save(), 2)["name"] == "other"
    lab.select(2)
    lab.command("detllm:accept-cell")
    assert lab.state()["verdicts"][0] == "recorded"


def test_the_widget_s_event_runs_a_command_in_its_own_notebook(lab: Front) -> None:
    lab.server.write("event.ipynb", *CELLS)
    lab.open("event.ipynb")
    lab.run_all()
    lab.save()
    lab.edit(1, drift())
    lab.run_all()
    script = f"""detail => new Promise(resolve => {{
      const cell = {CURRENT}.content.widgets[0].node;
      const host = cell.appendChild(document.createElement('div'));
      const inner = host.attachShadow({{mode: 'open'}}).appendChild(document.createElement('b'));
      const event = new CustomEvent('detllm:command', {{bubbles: true, composed: true,
        cancelable: true, detail: {{...detail, respond: r => resolve(r)}}}});
      const taken = !inner.dispatchEvent(event);
      host.remove();
      if (!taken) resolve('nobody');
    }})"""
    hello = {"version": 1, "command": "detllm:hello", "args": {}}
    assert lab.evaluate(script, hello)["ok"] is True
    accept = {"version": 1, "command": "detllm:accept-cell", "args": {"cellId": "c2"}}
    assert lab.evaluate(script, accept)["cells"] == ["c2"]
    assert lab.state()["verdicts"] == ["recorded", "drift"]
    refused: list[dict[str, Any]] = [
        {**hello, "version": 2},
        {**hello, "command": "docmanager:save"},
        {**accept, "args": {"cellId": "x" * 65}},
        {**accept, "args": {"cellId": 3}},
    ]
    for detail in refused:
        assert lab.evaluate(script, detail) == "nobody", detail
    assert lab.evaluate(script, {**accept, "args": {"cellId": "none"}})["ok"] is False
    outside = """() => document.body.dispatchEvent(new CustomEvent('detllm:command', {bubbles: true,
      cancelable: true, detail: {version: 1, command: 'detllm:accept-all', args: {},
      respond: () => null}}))"""
    assert lab.evaluate(outside) is True  # not taken: it stands in no notebook
    assert lab.state()["verdicts"] == ["recorded", "drift"]


@pytest.mark.slow
def test_completion_offers_verbs_and_options(lab: Front) -> None:
    lab.server.write("tab.ipynb", LOAD, "%detllm ", "%%detgen --max-t")
    lab.open("tab.ipynb")
    lab.run(0)
    found = []
    for index in (1, 2):
        lab.page.locator(".jp-Notebook .jp-Cell").nth(index).locator(".cm-content").click()
        lab.page.keyboard.press("End")
        lab.page.keyboard.press("Tab")
        if index == 1:
            lab.page.wait_for_selector(".jp-Completer-item code")
            items = "[...document.querySelectorAll('.jp-Completer-item code')]"
            found = lab.evaluate(f"() => {items}.map(e => e.textContent)")
            lab.page.keyboard.press("Escape")
        lab.page.wait_for_timeout(500)
    assert {"use", "status", "show", "stamps"} <= set(found)
    assert "abs" not in found


def test_text_stays_readable_in_both_themes(lab: Front) -> None:
    lab.server.write("theme.ipynb", *CELLS)
    lab.open("theme.ipynb")
    lab.run_all()
    panel = lab.open_panel()
    script = """e => { const s = getComputedStyle(e); return [s.color, s.backgroundColor]; }"""
    differences = []
    for theme in ("Dark", "Light"):
        lab.command("apputils:change-theme", {"theme": f"JupyterLab {theme}"})
        lab.wait(f"() => document.body.dataset.jpThemeLight === '{str(theme == 'Light').lower()}'")
        text, ground = (
            sum(map(int, c[c.index("(") + 1 : -1].split(",")[:3])) for c in panel.evaluate(script)
        )
        differences.append(text - ground)
    # Light on dark, then dark on light: far apart both times.
    assert differences[0] > 300
    assert differences[1] < -300


def test_the_panel_by_keyboard_and_as_screen_readers_have_it(lab: Front) -> None:
    lab.server.write("keys.ipynb", *CELLS)
    lab.open("keys.ipynb")
    lab.run_all()
    lab.edit(1, drift())
    for index in (1, 2, 3):
        lab.run(index)
    page = lab.page
    indicators = page.get_by_role("button", name="detllm: drift in 2 cells", exact=True)
    assert indicators.count() == 2
    # One of the two announces what changes.
    live = indicators.evaluate_all("nodes => nodes.map(n => n.getAttribute('aria-live'))")
    assert sorted(live) == ["off", "polite"]
    indicators.first.focus()
    page.keyboard.press("Enter")
    panel = page.get_by_role("region", name="detllm: stamps of the current notebook")
    panel.wait_for()
    assert panel.get_by_role("heading", name="keys.ipynb").count() == 1
    assert panel.get_by_role("listitem").count() == 2
    assert lab.evaluate("() => document.activeElement.id") == "detllm-panel"

    focused = "() => document.activeElement"
    order = []
    for _ in range(6):
        page.keyboard.press("Tab")
        order.append(
            lab.evaluate(f"{focused}.getAttribute('aria-label') || {focused[6:]}.textContent")
        )
        assert lab.evaluate(f"{focused}.matches(':focus-visible')")
        assert lab.evaluate(f"() => getComputedStyle({focused[6:]}).outlineStyle") != "none"
    assert order == [
        "Stamp new",
        "Accept all",
        "cell 3 (one)",
        "Accept the new generation of cell 3 (one) as reference",
        "cell 4 (two)",
        "Accept the new generation of cell 4 (two) as reference",
    ]
    for name in order:
        assert panel.get_by_role("button", name=name, exact=True).count() == 1
    page.keyboard.press("Enter")
    lab.settle()
    assert "1 reference written" in panel.get_by_role("status").inner_text()
    # The button is gone: the focus stays with its cell, and Enter goes there.
    assert lab.evaluate(f"{focused}.textContent") == "cell 4 (two)"
    page.keyboard.press("Enter")
    assert lab.evaluate(f"() => {CURRENT}.content.activeCellIndex") == 3
    assert lab.evaluate(f"() => {CURRENT}.node.contains(document.activeElement)")
