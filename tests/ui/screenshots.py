"""Take the pictures of docs/images: ``python -m tests.ui.screenshots``, then look at them."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.ui.lab import LOAD, USE, Front, Server, chromium, drift

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
CELLS = (
    LOAD,
    USE,
    "%%detgen haiku --max-tokens 12\nWrite a haiku about a notebook that never forgets.",
    "%%detgen colours --max-tokens 12\nName three primary colours.",
    "%%detgen capital --max-tokens 6\nWhat is the capital of France?",
)


def _pictures(front: Front) -> None:
    page = front.page
    page.set_viewport_size({"width": 1360, "height": 720})
    front.server.write("poem.ipynb", *CELLS)
    front.open("poem.ipynb")
    front.command("application:toggle-left-area")
    front.run_all()
    front.run_all()
    indicator = page.locator(".jp-NotebookPanel-toolbar .jp-detllm-status")
    for theme in ("Light", "Dark"):
        front.command("apputils:change-theme", {"theme": f"JupyterLab {theme}"})
        page.wait_for_timeout(500)
        indicator.screenshot(path=str(IMAGES / f"indicator-verified-{theme.lower()}.png"))
    front.edit(1, drift())
    for index in (1, 2, 3):
        front.run(index)
    front.open_panel()
    for theme in ("Light", "Dark"):
        front.command("apputils:change-theme", {"theme": f"JupyterLab {theme}"})
        page.wait_for_timeout(500)
        page.screenshot(path=str(IMAGES / f"panel-{theme.lower()}.png"))


def main() -> int:
    """Write the pictures."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch) / name for name in ("browser", "lab", "notebook")]
        for folder in folders:
            folder.mkdir()
        with chromium(folders[0]) as context:
            with Server(folders[1]) as server:
                front = Front(context, server)
                _pictures(front)
                front.quit()
            with Server(folders[2], "notebook") as server:
                front = Front(context, server)
                front.page.set_viewport_size({"width": 1100, "height": 620})
                server.write("poem.ipynb", *CELLS)
                front.open("poem.ipynb")
                front.run_all()
                front.run_all()
                front.open_panel()
                front.page.wait_for_timeout(500)
                front.page.screenshot(path=str(IMAGES / "notebook7.png"))
                front.quit()
    sys.stdout.write(f"{len(list(IMAGES.glob('*.png')))} pictures in {IMAGES}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
