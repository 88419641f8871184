"""What the lab extension's own work costs in a large notebook, in a real JupyterLab.

``python benchmarks/frontend.py`` types, saves and runs again in a notebook of 100 stamped
cells of 128 tokens and 50 images of 1 MB; times are the browser's own (`performance.now`).
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.ui.lab import Front, Server, chromium  # noqa: E402
from tests.ui.test_lab_cost import BUDGETS_MS, measure, summary  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "frontend.json"
KINDS = {
    "change": "on a keystroke or an output, at once",
    "refresh": "a quarter of a second later, once: reading, writing and showing",
    "answer": "from a question to the server's answer",
    "save": "before a save goes on",
}


def main() -> None:
    """Measure, write the result file, print it."""
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch) / name for name in ("browser", "lab")]
        for folder in folders:
            folder.mkdir()
        with chromium(folders[0]) as context, Server(folders[1]) as server:
            times = measure(Front(context, server))
            browser = context.browser.version if context.browser else ""
    result = {
        "command": "python benchmarks/frontend.py",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpus": os.cpu_count(),
            "load_average": round(os.getloadavg()[0], 1),
        },
        "versions": {
            "chromium": browser,
            **{name: version(name) for name in ("jupyter-detllm", "jupyterlab", "playwright")},
        },
        "budget_ms": BUDGETS_MS,
        "figures": {kind: {"what": what, **summary(times[kind])} for kind, what in KINDS.items()},
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    sys.stdout.write(RESULT.read_text())


if __name__ == "__main__":
    main()
