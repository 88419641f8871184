"""The site: notebooks become pages as they are, and a broken page is no page."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tools import docs_site
from tools.notebook_pages import page, write_pages


def code(source: str, *outputs: dict[str, Any]) -> dict[str, Any]:
    return {"cell_type": "code", "source": source, "outputs": list(outputs)}


def text_output(text: str) -> dict[str, Any]:
    data = {"text/plain": text, "text/html": "<b>not shown</b>"}
    return {"output_type": "display_data", "data": data, "metadata": {}}


def test_a_notebook_is_shown_with_the_texts_of_its_outputs() -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "\n", "Words."]},
        code("%load_ext jupyter_detllm"),
        code("%%detgen a\nSay it.", text_output("It.\nAnd more."), text_output("[detllm] stamp")),
        code(""),
    ]
    shown = page({"cells": cells}, "one.ipynb")
    assert shown.startswith("# Title\n\nWords.\n\nThe notebook is `examples/one.ipynb`.\n\n```ipy")
    assert "```ipython\n%%detgen a\nSay it.\n```\n\n```{code-block} text\n" in shown
    assert "\n\nIt.\nAnd more.\n```\n" in shown
    assert "[detllm] stamp" in shown
    assert "<b>" not in shown
    assert shown.count("```ipython") == 2


def test_a_text_with_fences_stays_inside_its_own() -> None:
    shown = page({"cells": [code("x", text_output("```\n# no heading\n````"))]}, "n.ipynb")
    assert "`````{code-block} text\n:class: cell-output\n\n```\n# no heading\n````\n`````" in shown


def test_an_error_is_one_line(tmp_path: Path) -> None:
    error = {"output_type": "error", "ename": "UsageError", "evalue": "no", "traceback": []}
    assert "UsageError: no" in page({"cells": [code("x", error)]}, "n.ipynb")


def test_every_example_has_a_page(tmp_path: Path) -> None:
    examples = docs_site.ROOT / "examples"
    write_pages(examples, tmp_path)
    names = {path.stem for path in examples.glob("*.ipynb")}
    assert {path.stem for path in tmp_path.glob("*.md")} == {*names, "index"}
    index = (tmp_path / "index.md").read_text()
    assert all(f"\n{name}\n" in index for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "warning"),
    [
        ("[gone](gone.md)", "gone.md"),
        ("[gone](index.md#no-such-heading)", "no-such-heading"),
        ("```{eval-rst}\n.. autofunction:: jupyter_detllm.no_such\n```", "no_such"),
    ],
)
def test_a_broken_page_fails_the_build(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], line: str, warning: str
) -> None:
    source = tmp_path / "source"
    (source / "_static").mkdir(parents=True)
    shutil.copyfile(docs_site.SOURCE / "conf.py", source / "conf.py")
    shutil.copyfile(docs_site.SOURCE / "_static" / "site.css", source / "_static" / "site.css")
    (source / "index.md").write_text("# Home\n\nWords.\n")
    assert docs_site.build(source, tmp_path / "html") == 0
    (source / "index.md").write_text(f"# Home\n\n{line}\n")
    assert docs_site.build(source, tmp_path / "html") == 1
    assert warning in capfd.readouterr().err
