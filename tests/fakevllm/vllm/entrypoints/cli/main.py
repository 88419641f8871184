"""Stands for `vllm serve` in tests: reads its command line, answers as `tests.fake_server`.

``FAKE_VLLM`` says what goes wrong: ``dies`` at start, ``other-method`` in force, a
``sensitive`` engine, ``later`` (dies when the first completion is asked for), a ``mismatch``
of a kept answer.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

from jupyter_detllm.serving.middleware import NOTICES_FILE, record
from tests.fake_server import Fault, serving

WRONG = os.environ.get("FAKE_VLLM", "")
STATE = Path(os.environ["DETLLM_SERVER_STATE"])


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def main() -> None:
    if WRONG == "dies":
        print("ValueError: the model is made of cheese")
        raise SystemExit(3)
    method = os.environ.get("DETLLM_INVARIANCE") or "off"
    worker = {
        "method": "other" if WRONG == "other-method" else method,
        "fields": {"engine.dtype": "bfloat16", "software.vllm": "0.32.0"},
        "defaults": {"temperature": 0.6},
        "eos": [[2], None],
        "vocabulary": 4000,
    }
    (STATE / "worker.json").write_text(json.dumps(worker))
    print("words:", json.dumps(sys.argv))
    sys.stdout.flush()
    if WRONG == "mismatch":
        (STATE / NOTICES_FILE).write_text("MISMATCH: one\nMISMATCH: two\n")
    ended = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: ended.set())
    with serving(
        port=int(option("--port")),
        model=option("--served-model-name"),
        sensitive=WRONG == "sensitive",
        record=record(STATE, 7),
    ) as server:
        if WRONG == "later":
            server.faults["/detllm"] = [Fault(status=404)] * 9
            threading.Timer(0.5, os._exit, [4]).start()
        ended.wait()
        print("ended in order")


if __name__ == "__main__":
    main()
