"""Speed of the products of `jupyter_detllm.arithmetic` next to torch's, on this processor.

``python benchmarks/products.py [--out FILE]`` needs the `cpu` extra and no model. For layer
shapes of a small and a larger model and several numbers of rows it times torch in bfloat16 and
in float32 and our product with bfloat16 weights, alternating, and keeps the median.
OMP_NUM_THREADS and ONEDNN_MAX_CPU_ISA are the caller's, and recorded.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from startup import ROOT, machine, versions

from jupyter_detllm.probes.hardware import cpu

RESULT = ROOT / "benchmarks" / "results" / "products-cpu.json"
SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152), (2048, 8192))
"""K and N."""
ROWS = (1, 4, 12, 64, 256)
ROUNDS = 7


def main() -> None:
    """Measure, write the result file, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    import torch

    rows = [measured(depth, columns, count) for depth, columns in SHAPES for count in ROWS]
    result = {
        "command": "python benchmarks/products.py",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
        "isa": cpu().isa_text(),
        "threads": torch.get_num_threads(),
        "environment": {
            name: os.environ.get(name, "") for name in ("ONEDNN_MAX_CPU_ISA", "OMP_NUM_THREADS")
        },
        "unit": "GFLOP/s, median",
        "rounds": ROUNDS,
        "products": rows,
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for row in rows:
        sys.stdout.write("  ".join(f"{name} {value}" for name, value in row.items()) + "\n")


def measured(depth: int, columns: int, count: int) -> dict[str, Any]:
    """Return the speeds of one product of `count` rows."""
    import torch

    from jupyter_detllm.arithmetic.products import PackedWeight, product

    stream = torch.Generator().manual_seed(1)
    weight = (0.05 * torch.randn(columns, depth, generator=stream)).bfloat16()
    x = torch.randn(count, depth, generator=stream).bfloat16()
    wide, packed = weight.float(), PackedWeight.of(weight)
    linear = torch.nn.functional.linear
    ways: dict[str, Callable[[], Any]] = {
        "torch_bfloat16": lambda: linear(x, weight),
        "torch_float32": lambda: linear(x.float(), wide),
        "ours": lambda: product(x.float(), packed).bfloat16(),
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            took[name].append(time.perf_counter() - began)
    work = 2 * depth * columns * count / 1e9
    speed = {name: round(work / statistics.median(t[1:]), 1) for name, t in took.items()}
    return {"inputs": depth, "outputs": columns, "rows": count, **speed}


if __name__ == "__main__":
    main()
