"""Which kernels of a GPU give other bits to the same rows in another batch.

``python benchmarks/gpu/kernels.py PART`` on a Hopper GPU with a CUDA vLLM; one JSON line a case:

* `rows`: ``linear`` of the first M rows of 8192 against the same rows of all, for the layer
  shapes of Llama 1B and 8B, SmolLM2 135M, and the 1B in two halves; with torch's defaults and
  without split-K on cuBLASLt, and as the level `invariant` computes it; microseconds in a CUDA
  graph over weights too large for the cache;
* `tiles`: FlashAttention 3 without KV splits for queries of one token, told that the longest
  query of the batch has so many tokens, against told 4000;
* `decode`: microseconds of one attention call that decodes, by tile and KV splits.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

SHAPES = {
    "1b": [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (32000, 2048)],
    "135m": [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)],
    "8b": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
    "1b in halves": [(1536, 2048), (2048, 1024), (2048, 4096)],
}
ROWS = [1, 2, 4, 8, 15, 16, 17, 32, 33, 48, 64, 65, 96, 100, 128, 129, 192, 200, 256, 300]
ROWS += [384, 500, 512, 640, 777, 1024, 1500, 2048, 3000, 4096]
TIMED = (1, 8, 16, 32, 64, 128, 8192)
HEAD_SIZES = (32, 40, 48, 56, 64, 72, 80, 88, 96, 112, 120, 128, 160, 192, 224, 256)
HEADS = ((32, 8), (8, 8), (28, 4), (16, 1))
LONGEST = (1, 2, 4, 8, 16, 17, 32, 33, 64, 65, 100, 129, 300, 2000)
CACHE_BYTES = 200_000_000


def main() -> int:
    """Print one JSON line for each case of the part."""
    parts: dict[str, Callable[[], None]] = {"rows": rows, "tiles": tiles, "decode": decode}
    if len(sys.argv) != 2 or sys.argv[1] not in parts:
        print(f"usage: kernels.py {'|'.join(parts)}", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    parts[sys.argv[1]]()
    return 0


def rows() -> None:
    """Compare matrix products by number of rows, and time them."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from jupyter_detllm.invariance._hopper_products import register_product

    register_product()
    for split_k in (True, False):
        matmul: Any = torch.backends.cuda.matmul
        matmul.allow_bf16_reduced_precision_reduction = True if split_k else (False, False)
        torch.backends.cuda.preferred_blas_library("default" if split_k else "cublaslt")
        for family, shapes in SHAPES.items():
            for n, k in shapes:
                _print(split_k=split_k, family=family, n=n, k=k, **_rows(n, k))


def _rows(n: int, k: int) -> dict[str, Any]:
    copies = min(24, max(2, CACHE_BYTES // (n * k * 2)))
    weights = [0.05 * normal(n, k) for _ in range(copies)]
    every = normal(8192, k)
    whole = linear(every, weights[0])
    times, ours = {}, {}
    product = torch.ops.detllm.product
    for m in TIMED:
        some = every[:m].contiguous()
        times[m] = graph_us([lambda w=w, x=some: linear(x, w) for w in weights])
        ours[m] = graph_us([lambda w=w, x=some: product(x, w, None) for w in weights])
    different = [m for m in ROWS if not torch.equal(linear(every[:m], weights[0]), whole[:m])]
    other = [m for m in ROWS if not torch.equal(product(every[:m], weights[0], None), whole[:m])]
    found = {"other_bits_at": different, "us": times}
    return {**found, "product_other_bits_at": other, "product_us": ours}


def tiles() -> None:
    """Compare FlashAttention's results by the longest query it is told of."""
    for size in HEAD_SIZES:
        for heads, kv_heads in HEADS:
            call = _attention(size, heads, kv_heads, queries=64, context=None)
            expected = call(4000, 1)
            different = [m for m in LONGEST if not torch.equal(call(m, 1), expected)]
            _print(head_size=size, heads=heads, kv_heads=kv_heads, other_bits_at=different)


def decode() -> None:
    """Time one attention call, narrow or wide tile, one KV split or the heuristic."""
    for size in (64, 128):
        for context in (300, 1900):
            for queries in (1, 8, 32, 64, 128):
                call = _attention(size, 32, 8, queries, context)
                us = {
                    f"longest {longest}, {'one split' if splits else 'heuristic'}": graph_us(
                        [lambda m=longest, s=splits, c=call: c(m, s)], 16
                    )
                    for longest in (1, 65)
                    for splits in (1, 0)
                }
                _print(head_size=size, context=context, queries=queries, us=us)


def _attention(
    size: int, heads: int, kv_heads: int, queries: int, context: int | None
) -> Callable[[int, int], torch.Tensor]:
    """Return a call of decoding queries: (longest query told, KV splits) -> output."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    pages = 4096
    keys, values = normal(pages, 16, kv_heads, size), normal(pages, 16, kv_heads, size)
    query = normal(queries, heads, size)
    table = torch.randint(0, pages, (queries, 128), device="cuda", dtype=torch.int32)
    used = torch.randint(1, 2000, (queries,), device="cuda", dtype=torch.int32)
    if context is not None:
        used.fill_(context)
    starts = torch.arange(queries + 1, device="cuda", dtype=torch.int32)

    def call(longest: int, splits: int) -> torch.Tensor:
        out = torch.empty_like(query)
        flash_attn_varlen_func(
            q=query,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=starts,
            max_seqlen_q=longest,
            seqused_k=used,
            max_seqlen_k=2000,
            softmax_scale=size**-0.5,
            causal=True,
            block_table=table,
            fa_version=3,
            num_splits=splits,
        )
        return out

    return call


def normal(*shape: int) -> torch.Tensor:
    """Return random numbers of standard normal distribution, in bfloat16."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def graph_us(calls: list[Callable[[], object]], repeats: int = 4) -> float:
    """Return microseconds of one call, captured so that launching costs nothing."""
    with torch.cuda.stream(torch.cuda.Stream()):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return round(1000 * start.elapsed_time(end) / (10 * repeats * len(calls)), 2)


def _print(**case: object) -> None:
    print(json.dumps(case), flush=True)


if __name__ == "__main__":
    sys.exit(main())
