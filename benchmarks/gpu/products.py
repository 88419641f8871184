"""Matrix products by kernel and number of rows: bits and microseconds, on a Hopper GPU.

``python benchmarks/gpu/products.py --out FILE [--families 1b,8b] [--bits-only]``. For each layer
shape (N, K) rows x (M, K) are multiplied by weights w (N, K) in bfloat16:

* `default`: torch as it is; `nosplit`: cuBLASLt without split-K; `level`: as the level
  `invariant` computes it (`invariance/_hopper_products.py`);
* `tiles`: that module's kernel in Triton, by tile: ``s16x64`` has weights as the left operand,
  16 rows and 64 columns, ``u64x16`` rows as the left operand; 128 along K, or ``k64``.

`other_bits` lists the M at which the rows' bits differ from those of the same rows among 8192
by `default`. Microseconds are of one product in a CUDA graph, over copies of the weights that
do not fit into the cache.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import invariance as base
import torch
from kernels import CACHE_BYTES, graph_us, normal
from torch.nn.functional import linear

from jupyter_detllm.invariance import _hopper_products as ours

SHAPES = {
    "qwen2": [(1152, 896), (896, 896), (9728, 896), (896, 4864)],
    "8b": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
    "1b": [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (32000, 2048)],
    "135m": [(960, 576), (576, 576), (3072, 576), (576, 1536)],
    "gemma2": [(4096, 2304), (2304, 2048), (18432, 2304), (2304, 9216)],
    "phi3": [(9216, 3072), (3072, 3072), (16384, 3072), (3072, 8192)],
    "qwen3": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)],
    "gate": [(32, 2048), (8, 4096)],
}
TILES = (
    *("u64x16", "u64x32", "u64x64", "u16x16", "u16x32", "u16x64", "u32x32", "u64x16k64"),
    *("s16x64", "s32x64", "s64x64", "s16x128", "s16x64k256", "u128x64", "u128x128"),
)
ROWS = (1, 2, 4, 8, 15, 16, 17, 32, 33, 64, 65, 100, 128, 129, 200, 256, 300, 512, 1000, 2048, 4096)
TIMED = (1, 8, 16, 32, 64, 128, 256, 1024, 8192)
TILE_ROWS = 256
"""Above this many rows no tile is timed: the libraries are faster."""
MOST, SHARED_BYTES, STAGES = 8192, 180_000, 6

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def main() -> int:
    """Measure every shape; write the result after each."""
    args = _arguments()
    torch.manual_seed(0)
    ours.register_product()
    summary: dict[str, Any] = {
        "command": f"python benchmarks/gpu/products.py {_given(args)}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        **base.machine(),
        "commit": args.commit,
        "shapes": [],
    }
    for family in args.families.split(","):
        for n, k in SHAPES[family]:
            row = {"family": family, "n": n, "k": k, **measure(n, k, bits_only=args.bits_only)}
            summary["shapes"].append(row)
            args.out.write_text(json.dumps(summary) + "\n", encoding="utf-8")
            print(family, n, k, json.dumps(row["other_bits"]), flush=True)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--families", default=",".join(SHAPES))
    parser.add_argument("--bits-only", action="store_true")
    parser.add_argument("--commit", default=os.environ.get("BENCHMARK_COMMIT", ""))
    return parser.parse_args()


def _given(args: argparse.Namespace) -> str:
    bits: str = " --bits-only" if args.bits_only else ""
    return f"--out {args.out.name} --families {args.families}{bits}"


def tile_named(name: str) -> ours.Tile:
    """Return the tile of a name such as ``s16x64k256``, with as many stages as fit."""
    sizes, _, depth = name[1:].partition("k")
    rows, columns = map(int, sizes.split("x"))
    deep = int(depth or 128)
    stages = min(STAGES, SHARED_BYTES // ((rows + columns) * deep * 2))
    return ours.Tile(rows, columns, deep, swapped=name[0] == "s", stages=stages)


def _ways() -> dict[str, Product]:
    """Return the kernels by name."""
    level = torch.ops.detllm.product
    found: dict[str, Product] = {"default": linear, "nosplit": linear}
    found["level"] = lambda x, w: level(x, w, None)
    for name in TILES:
        tile = tile_named(name)
        found[name] = functools.partial(_tiled, tile)
    return found


def _tiled(tile: ours.Tile, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = ours.in_triton(rows, weights, None, tile)
    return out


@contextlib.contextmanager
def _without_split_k(wanted: bool) -> Iterator[None]:
    matmul: Any = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = (False, False) if wanted else True
    torch.backends.cuda.preferred_blas_library("cublaslt" if wanted else "default")
    yield


def measure(n: int, k: int, *, bits_only: bool) -> dict[str, Any]:
    """Return, by kernel, where bits differ, and microseconds by number of rows."""
    copies = 1 if bits_only else min(24, max(2, CACHE_BYTES // (n * k * 2)))
    weights = [0.05 * normal(n, k) for _ in range(copies)]
    every = normal(MOST, k)
    with _without_split_k(False):
        whole = linear(every, weights[0])
    other: dict[str, list[int]] = {}
    times: dict[str, dict[int, float]] = {}
    for name, product in _ways().items():
        with _without_split_k(name in {"nosplit", "level"}):
            other[name] = [
                m for m in ROWS if not torch.equal(product(every[:m], weights[0]), whole[:m])
            ]
            most = MOST if name in {"default", "nosplit", "level"} else TILE_ROWS
            if not bits_only:
                times[name] = {
                    m: _us(product, every[:m].contiguous(), weights) for m in TIMED if m <= most
                }
    return {"other_bits": {name: rows for name, rows in other.items() if rows}, "us": times}


def _us(product: Product, rows: torch.Tensor, weights: list[torch.Tensor]) -> float:
    return graph_us([functools.partial(product, rows, w) for w in weights], repeats=1)


if __name__ == "__main__":
    sys.exit(main())
