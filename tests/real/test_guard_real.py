"""The guard beside a real vLLM: imported first, and asked what it froze."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.waiting import HANGS

pytestmark = [pytest.mark.real, pytest.mark.slow]

CODE = """
import json, os
import vllm
from jupyter_detllm.controls.environ import ProcessEvent
from jupyter_detllm.controls.guard import apply, observed_events
from jupyter_detllm.core.levels import Level
out = {"events": sorted(event.name for event in observed_events())}
report = apply(Level.REPEATABLE)
out["first"] = {e.name: [e.state.value, e.effective] for e in report.entries}
import vllm.envs
out["read"] = vllm.envs.VLLM_ENABLE_V1_MULTIPROCESSING
# What an engine does when it has started.
vllm.envs.enable_envs_cache()
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
out["engine"] = ProcessEvent.ENGINE_START in observed_events()
report = apply(Level.REPEATABLE)
out["frozen"] = report.entry("VLLM_ENABLE_V1_MULTIPROCESSING").effective
vllm.envs.disable_envs_cache()
out["shut_down"] = ProcessEvent.ENGINE_START in observed_events()
print("\\n" + json.dumps(out))
"""


def test_vllm_imported_first() -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "TORCHDYNAMO"))}
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**environ, "VLLM_CONFIGURE_LOGGING": "0"},
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout.splitlines()[-1])
    assert out["events"] == ["INTERPRETER_START", "TORCH_IMPORT", "VLLM_IMPORT"]
    assert out["first"]["TORCHDYNAMO_DISABLE"] == ["late", None]
    # vLLM reads this one when an engine starts, so importing it was not too late.
    assert out["first"]["VLLM_ENABLE_V1_MULTIPROCESSING"] == ["set", "0"]
    assert out["read"] is False
    assert (out["engine"], out["frozen"], out["shut_down"]) == (True, "0", False)
