"""Pages made of notebooks as they are: cells, and the texts of their outputs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["page", "write_pages"]

_FIRST = ("quickstart", "teaching", "evaluation", "debugging", "papermill")
"""The order in which they are read; others follow by name."""

_INDEX = """\
# Examples

Notebooks of this repository, with the outputs they were saved with. Continuous integration runs
them again with the demo model.

```{{toctree}}
:maxdepth: 1

{pages}
```
"""


def write_pages(notebooks: Path, folder: Path) -> None:
    """Write a page for each notebook in a folder, and one that lists them."""
    folder.mkdir(parents=True, exist_ok=True)
    found = sorted(notebooks.glob("*.ipynb"), key=_order)
    for path in found:
        text = page(json.loads(path.read_text(encoding="utf-8")), path.name)
        (folder / f"{path.stem}.md").write_text(text, encoding="utf-8")
    index = _INDEX.format(pages="\n".join(path.stem for path in found))
    (folder / "index.md").write_text(index, encoding="utf-8")


def _order(path: Path) -> tuple[int, str]:
    return (_FIRST.index(path.stem) if path.stem in _FIRST else len(_FIRST), path.stem)


def page(book: Mapping[str, Any], name: str) -> str:
    """Return a notebook as Markdown; outputs are text, never markup."""
    parts = []
    for number, cell in enumerate(book["cells"]):
        source = _text(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif cell["cell_type"] == "code" and source.strip():
            parts.append(_fence(source, "ipython"))
            parts += [_output(text) for text in _texts(cell.get("outputs", []))]
        if number == 0:
            parts.append(f"The notebook is `examples/{name}`.")
    return "\n\n".join(parts) + "\n"


def _texts(outputs: list[Mapping[str, Any]]) -> Iterator[str]:
    for output in outputs:
        if output["output_type"] == "error":
            yield f"{output['ename']}: {output['evalue']}"
        found = output.get("text") or output.get("data", {}).get("text/plain")
        if found and _text(found).strip():
            yield _text(found).rstrip()


def _output(text: str) -> str:
    return _fence(f":class: cell-output\n\n{text}", "{code-block} text")


def _fence(text: str, language: str) -> str:
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    ticks = "`" * max(3, longest + 1)
    return f"{ticks}{language}\n{text}\n{ticks}"


def _text(value: str | list[str]) -> str:
    return value if isinstance(value, str) else "".join(value)
