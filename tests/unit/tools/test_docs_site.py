"""The site: notebooks become pages as they are, and a broken page is no page."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from nbformat import from_dict, write
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tools import docs_site


def page(folder: Path, *outputs: dict[str, Any]) -> str:
    """Build a site of one notebook with these outputs; return its page."""
    source = folder / "source"
    shutil.copytree(docs_site.SOURCE / "_static", source / "_static")
    shutil.copyfile(docs_site.SOURCE / "conf.py", source / "conf.py")
    cells = [
        new_markdown_cell("# Title\n\nWords."),
        new_code_cell("%%detgen a\nSay it?", outputs=[from_dict(item) for item in outputs]),
    ]
    (source / "examples").mkdir()
    write(new_notebook(cells=cells, metadata=METADATA), source / "examples" / "one.ipynb")
    (source / "index.md").write_text("# Home\n\n```{toctree}\nexamples/one\n```\n")
    assert docs_site.build(source, folder / "html") == 0
    return (folder / "html" / "examples" / "one.html").read_text()


METADATA = {
    "kernelspec": {"name": "python3", "display_name": "", "language": "python"},
    "language_info": {"name": "python"},
}


@pytest.mark.slow
def test_a_notebook_is_shown_with_the_texts_of_its_outputs(tmp_path: Path) -> None:
    data = {"text/plain": "It.\n```\n# <i>no heading</i>", "text/html": "<b>not shown</b>"}
    error = {
        "output_type": "error",
        "ename": "UsageError",
        "evalue": "no <b>",
        "traceback": ["no <b>"],
    }
    shown = page(tmp_path, {"output_type": "display_data", "data": data, "metadata": {}}, error)
    text = re.sub(r"<[^>]+>", "", shown)
    assert "%%detgen a\nSay it?" in text
    assert "It.\n```\n# &lt;i&gt;no heading&lt;/i&gt;" in text
    assert "no &lt;b&gt;" in text
    assert "not shown" not in shown
    assert "highlight-ipython" in shown


def test_every_example_has_a_page(tmp_path: Path) -> None:
    docs_site.stage(tmp_path / "source")
    names = {path.stem for path in (docs_site.ROOT / "examples").glob("*.ipynb")}
    listed = (tmp_path / "source" / "examples" / "index.md").read_text().splitlines()
    assert names <= set(listed)
    assert {path.stem for path in (tmp_path / "source" / "examples").glob("*.ipynb")} == names


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
