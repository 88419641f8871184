"""What every test shares: a home of its own, and no way out to the hub."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is no reason to fail: how long an example takes is for benchmarks.
settings.register_profile("detllm", deadline=None)
settings.load_profile("detllm")

# A shell starts background jobs with SIGINT ignored, and children inherit that: the tests
# of interrupts, here and in child processes, need Python's own handler.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# As they were before any test: the real tests need the user's caches and pip configuration.
ORIGINAL_ENVIRONMENT: Mapping[str, str] = dict(os.environ)

_FOLDERS = {
    "HOME": "home",
    "XDG_CACHE_HOME": "cache",
    "XDG_CONFIG_HOME": "config",
    "XDG_DATA_HOME": "data",
    "XDG_RUNTIME_DIR": "run",
    "XDG_STATE_HOME": "state",
    "HF_HOME": "cache/huggingface",
    "IPYTHONDIR": "ipython",
    "JUPYTER_CONFIG_DIR": "jupyter/config",
    "JUPYTER_DATA_DIR": "jupyter/data",
    "JUPYTER_RUNTIME_DIR": "jupyter/run",
    "JUPYTER_DETLLM_CACHE": "cache/jupyter-detllm",
}
# What the shell of whoever runs the tests must not decide.
_UNSET = (
    "HF_ENDPOINT",
    "HF_HUB_CACHE",
    "HF_TOKEN",
    "HUGGINGFACE_HUB_CACHE",
    "JUPYTER_PATH",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONHASHSEED",
    "TRANSFORMERS_OFFLINE",
)


@pytest.fixture(autouse=True)
def isolated_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test and its children a home, caches and Jupyter folders of their own."""
    root = tmp_path / "isolated"
    for variable, name in _FOLDERS.items():
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        monkeypatch.setenv(variable, str(folder))
    for variable in _UNSET:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return root
