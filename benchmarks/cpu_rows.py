"""For which numbers of rows vLLM's CPU products give a row the same bits.

``python benchmarks/cpu_rows.py [--out FILE]`` needs the `cpu` extra and no model. For each
shape and type it makes a linear layer as vLLM prepares it, multiplies the first M rows of the
same inputs for many M, and groups the M among which every common row is bitwise equal. A
method is sound for a kernel when all the numbers of rows it lets through are in one group.
ONEDNN_MAX_CPU_ISA and OMP_NUM_THREADS are the caller's, and recorded.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from startup import ROOT, machine, versions

from jupyter_detllm.probes.hardware import cpu

RESULT = ROOT / "benchmarks" / "results" / "cpu_rows.json"
ROWS = (1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 24, 31, 32, 33, 48, 64, 96, 128, 256, 384, 512)
SHAPES = ((576, 576), (960, 576), (3072, 576), (576, 1536), (2048, 2048), (2048, 8192))
TYPES = ("bfloat16", "float16", "float32")
INPUTS = 6


def main() -> None:
    """Measure, write the result file, print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    result = {
        "command": "python benchmarks/cpu_rows.py",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
        "isa": cpu().isa_text(),
        "environment": {
            name: os.environ.get(name, "") for name in ("ONEDNN_MAX_CPU_ISA", "OMP_NUM_THREADS")
        },
        "equal_rows": [groups(n, k, kind) for kind in TYPES for n, k in SHAPES],
    }
    text = json.dumps(result, indent=2) + "\n"
    args.out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


def groups(outputs: int, inputs: int, kind: str) -> dict[str, Any]:
    """Return the groups of row counts of one layer."""
    import torch

    dtype = getattr(torch, kind)
    stream = torch.Generator().manual_seed(1)
    layer, name = _layer(outputs, inputs, dtype, stream)
    # Magnitudes far apart: another order of the sum then shows in more elements.
    scale = 10 ** (0.5 * torch.randn(INPUTS, max(ROWS), inputs, generator=stream))
    rows = (scale * torch.randn(INPUTS, max(ROWS), inputs, generator=stream)).to(dtype)
    found = {
        m: torch.stack([layer.cpu_linear(x[:m].contiguous(), layer.weight, None) for x in rows])
        for m in ROWS
    }
    out: list[list[int]] = []
    for m in ROWS:
        for group in out:
            if all(torch.equal(found[m][:, : min(m, o)], found[o][:, : min(m, o)]) for o in group):
                group.append(m)
                break
        else:
            out.append([m])
    return {"type": kind, "outputs": outputs, "inputs": inputs, "kernel": name, "groups": out}


def _layer(outputs: int, inputs: int, dtype: Any, stream: Any) -> tuple[Any, str]:
    """Return a layer as vLLM prepares it, and the name of the function it calls."""
    import torch
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    layer = torch.nn.Module()
    weight = (0.05 * torch.randn(outputs, inputs, generator=stream)).to(dtype)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.bias = None
    dispatch_cpu_unquantized_gemm(layer, True)
    return layer, layer.cpu_linear.__code__.co_names[-1]


if __name__ == "__main__":
    main()
