"""Make the stamped notebooks of this folder again, with the real engine.

``python tests/data/make.py`` executes each with vLLM and the demo model, promotes its
stamps, and executes it once more, so that every cell holds a reference and another run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
NOTEBOOKS: dict[str, Sequence[str]] = {
    "invariant": (
        "%load_ext jupyter_detllm\n%detllm use demo",
        "%%detgen capital --max-tokens 12\nWhat is the capital of France?",
        "%%detgen pair --max-tokens 16\nName a colour.\n---\nÜbersetze: good morning 🌞",
    ),
    "repeatable": (
        "%load_ext jupyter_detllm\n%detllm use demo --level repeatable",
        "%%detgen sampled --max-tokens 12 --temperature 0.8 --top-p 0.9 -n 2\nWrite a haiku.",
        "%%detgen --text --max-tokens 8\nOnce upon a time",
    ),
}


def notebook(sources: Sequence[str]) -> dict[str, object]:
    """Return a notebook that has not been executed."""
    cells = [
        {
            "cell_type": "code",
            "execution_count": None,
            "id": f"cell{number}",
            "metadata": {},
            "outputs": [],
            "source": source.splitlines(keepends=True),
        }
        for number, source in enumerate(sources, start=1)
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def main() -> None:
    """Make them."""
    for name, sources in NOTEBOOKS.items():
        path = FOLDER / f"{name}.ipynb"
        text = json.dumps(notebook(sources), indent=1, ensure_ascii=False) + "\n"
        path.write_text(text, encoding="utf-8")
        for arguments in (["rerun", "--save"], ["stamp"], ["rerun", "--save"], ["check"]):
            command = [sys.executable, "-m", "jupyter_detllm", *arguments, str(path)]
            # The first execution has nothing to be compared with.
            subprocess.run(command, check=arguments != ["rerun", "--save"])


if __name__ == "__main__":
    main()
