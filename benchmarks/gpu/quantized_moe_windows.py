"""Experts, FP8, int4 and sliding windows: which kernels give other bits in another batch.

``python benchmarks/gpu/quantized_moe_windows.py --out FILE [--parts moe,fp8,int4,windows]`` on a
Hopper GPU with a CUDA vLLM. `other_bits` holds, by number of rows, how many of them differ from
the same rows among 8192 (experts: 4096); microseconds are of one call in a CUDA graph.

* `moe`: vLLM's fused experts in Triton, with its own choice and with nine configurations, all
  compared with its own choice for 4096 tokens;
* `fp8`: CUTLASS's W8A8 products, a scale for each row, one or one for each column of weights;
* `int4`: Marlin and Machete, groups of 128;
* `windows`: FlashAttention 3 without KV splits, vLLM's Triton attention without segments, and
  FlashAttention 3 with tiles of queries that begin at absolute positions. Keys of one prompt;
  `chunk N` lists the first positions of chunks of N that differ from the whole prompt.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import invariance as base
import torch
from kernels import graph_us, normal

Json = dict[str, Any]
ROWS = (
    1,
    2,
    8,
    15,
    16,
    17,
    32,
    33,
    48,
    64,
    65,
    100,
    128,
    129,
    200,
    256,
    257,
    512,
    1000,
    2048,
    4000,
)
TIMED = (1, 16, 64, 128, 8192)
MOST = 8192
SHAPES = (
    *((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (1152, 896), (896, 4864)),
    *((2048, 8192), (3072, 2048)),
)
MOE = ((32, 4, 2048, 1024), (8, 2, 2048, 3584), (128, 8, 2048, 768))
"""Experts, experts of a token, hidden size, size of an expert."""
MOE_MOST, MOE_TIMED = 4096, (1, 8, 64, 128, 4096)
CONFIGS = (
    *((16, 64, 128, 4), (16, 128, 64, 4), (32, 64, 128, 4), (64, 64, 128, 4), (64, 32, 128, 4)),
    *((64, 128, 64, 4), (64, 128, 64, 8), (128, 128, 64, 8), (128, 64, 64, 8)),
)
"""Rows, columns, depth and warps of the experts' kernel."""
ATTENTION = ((256, 8, 4), (256, 4, 1), (128, 32, 8), (128, 16, 8), (96, 32, 8), (96, 32, 32))
"""Head size, heads, KV heads."""
WINDOWS, CAPS = (512, 4096), (0.0,)
LENGTH, PAGE = 900, 16
LOADS = ((1, 300, 1), (1, 1900, 1), (32, 1900, 1), (128, 1900, 1), (8, 1900, 1900))
"""Requests, tokens of each, queries of each."""


def main() -> int:
    """Run the parts; write the result after each."""
    args = _arguments()
    torch.manual_seed(0)
    parts: dict[str, Callable[[bool], list[Json]]] = {
        "moe": moe,
        "fp8": fp8,
        "int4": int4,
        "windows": windows,
    }
    summary: Json = {
        "command": "python benchmarks/gpu/quantized_moe_windows.py "
        f"--out {args.out.name} --parts {args.parts}" + " --bits-only" * args.bits_only,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        **base.machine(),
        "commit": args.commit,
    }
    for name in args.parts.split(","):
        with torch.inference_mode():
            try:
                summary[name] = parts[name](not args.bits_only)
            except Exception as error:  # a part that fails must not cost the others
                summary[name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
        args.out.write_text(json.dumps(summary) + "\n", encoding="utf-8")
        print(name, "done", flush=True)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="moe,fp8,int4,windows")
    parser.add_argument("--bits-only", action="store_true")
    parser.add_argument("--commit", default=os.environ.get("BENCHMARK_COMMIT", ""))
    return parser.parse_args()


def _differing(left: torch.Tensor, right: torch.Tensor) -> int:
    return int((left != right).flatten(1).any(dim=1).sum())


def _compared(call: Callable[[int], torch.Tensor], most: int = MOST) -> dict[int, int]:
    """Return, for each number of rows at which some differ, how many do."""
    whole = call(most)
    found = {m: _differing(call(m), whole[:m]) for m in ROWS if m < most}
    return {m: count for m, count in found.items() if count}


def _times(call: Callable[[int], object], sizes: tuple[int, ...], timed: bool) -> dict[int, float]:
    return {m: graph_us([lambda m=m: call(m)], 8) for m in sizes} if timed else {}  # type: ignore[misc]


def moe(timed: bool) -> list[Json]:
    """Compare fused experts by configuration and number of tokens."""
    from vllm.model_executor.layers.fused_moe import override_config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    found = []
    for experts, top, hidden, size in MOE:
        w1, w2 = 0.05 * normal(experts, 2 * size, hidden), 0.05 * normal(experts, hidden, size)
        x = normal(MOE_MOST, hidden)
        weights, ids = torch.softmax(normal(MOE_MOST, experts).float(), -1).topk(top)
        ids = ids.to(torch.int32)

        def call(m: int, given: tuple[Any, ...] = (x, w1, w2, weights, ids)) -> torch.Tensor:
            x, w1, w2, weights, ids = given
            return fused_experts(x[:m], w1, w2, weights[:m], ids[:m])

        whole = call(MOE_MOST)
        other, times = {"default": _compared(call, MOE_MOST)}, {}
        times["default"] = _times(call, MOE_TIMED, timed)
        for rows, columns, depth, warps in CONFIGS:
            name = f"m{rows}n{columns}k{depth}w{warps}"
            sizes = {"BLOCK_SIZE_M": rows, "BLOCK_SIZE_N": columns, "BLOCK_SIZE_K": depth}
            config = {**sizes, "GROUP_SIZE_M": 1, "num_warps": warps, "num_stages": 3}
            with override_config(config):
                counts = {m: _differing(call(m), whole[:m]) for m in (*ROWS, MOE_MOST)}
                other[name] = {m: count for m, count in counts.items() if count}
                times[name] = _times(call, MOE_TIMED[:1] + MOE_TIMED[-1:], timed)
        about = {"experts": experts, "top": top, "hidden": hidden, "size": size}
        found.append({**about, "other_bits": {n: v for n, v in other.items() if v}, "us": times})
    return found


def fp8(timed: bool) -> list[Json]:
    """Compare CUTLASS's W8A8 products."""
    from vllm import _custom_ops as ops

    kind, found = torch.float8_e4m3fn, []
    for n, k in SHAPES:
        a = normal(MOST, k).to(kind)
        by_row = torch.rand(MOST, 1, device="cuda") * 0.02 + 0.001
        b = normal(n, k).to(kind).t()
        for columns in (1, n):
            by_column = torch.rand(1, columns, device="cuda") * 0.01 + 0.001

            def call(
                m: int, given: tuple[torch.Tensor, ...] = (a, b, by_row, by_column)
            ) -> torch.Tensor:
                a, b, by_row, by_column = given
                return ops.cutlass_scaled_mm(a[:m], b, by_row[:m], by_column, torch.bfloat16)

            scale = "column" if columns > 1 else "tensor"
            row = {"n": n, "k": k, "scale_of_weights": scale, "other_bits": _compared(call)}
            found.append({**row, "us": _times(call, TIMED, timed)})
    return found


def int4(timed: bool) -> list[Json]:
    """Compare the products of packed weights."""
    found = []
    for n, k in SHAPES:
        if n % 256 or k % 128:
            continue
        x = normal(MOST, k)
        packed = torch.randint(-(2**31), 2**31 - 1, (k // 8, n), device="cuda", dtype=torch.int32)
        scales = (torch.rand(k // 128, n, device="cuda") * 0.01).to(torch.bfloat16)
        for kind, make in (("marlin", _marlin), ("machete", _machete)):
            call = make(x, packed, scales)
            row = {"kind": kind, "n": n, "k": k, "other_bits": _compared(call)}
            found.append({**row, "us": _times(call, TIMED, timed)})
    return found


def _marlin(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> Any:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils import marlin_utils as marlin
    from vllm.scalar_type import scalar_types

    k, n = x.shape[1], packed.shape[1]
    weights = ops.gptq_marlin_repack(packed, k, n, 4)
    ordered = marlin.marlin_permute_scales(scales, k, n, 128)
    workspace = marlin.marlin_make_workspace_new(x.device)
    kind = scalar_types.uint4b8

    def call(m: int) -> torch.Tensor:
        atomic = marlin.should_use_atomic_add_reduce(m, n, k, x.device, x.dtype)
        given = (weights, None, ordered, None, None, None, workspace, kind)
        return ops.marlin_gemm(
            x[:m], None, *given, m, n, k, use_atomic_add=atomic, use_fp32_reduce=True
        )

    return call


def _machete(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> Any:
    from vllm import _custom_ops as ops
    from vllm.scalar_type import scalar_types

    kind = scalar_types.uint4b8
    weights = ops.machete_prepack_B(packed.t().contiguous().t(), x.dtype, kind, x.dtype)

    def call(m: int) -> torch.Tensor:
        return ops.machete_mm(
            x[:m], weights, kind, b_group_scales=scales.contiguous(), b_group_size=128
        )

    return call


def windows(timed: bool) -> list[Json]:
    """Compare attention in a sliding window: positions alone, in chunks and in a batch."""
    found: list[Json] = []
    for size, heads, kv_heads in ATTENTION:
        for window in WINDOWS:
            for cap in CAPS:
                about: Json = {"head_size": size, "heads": heads, "kv_heads": kv_heads}
                about |= {"window": window, "soft_cap": cap}
                ways = _attentions(size, heads, kv_heads, window, cap)
                other = {name: _positions(way, size, heads, kv_heads) for name, way in ways.items()}
                us = _loads(ways, size, heads, kv_heads) if timed and not cap else {}
                found.append({**about, "other_bits": other, "us": us})
                print(json.dumps(found[-1]), flush=True)
    return found


def _attentions(size: int, heads: int, kv_heads: int, window: int, cap: float) -> Json:
    """Return the kernels: (queries, starts, lengths, longest, cache, table) to outputs."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    from jupyter_detllm.invariance import _hopper_patch, _hopper_windows

    def given(
        q: torch.Tensor, starts: list[int], lengths: list[int], cache: Any, table: torch.Tensor
    ) -> Json:
        counts = [b - a for a, b in itertools.pairwise(starts)]
        return {
            "q": q,
            "k": cache[0],
            "v": cache[1],
            "out": torch.empty_like(q),
            "cu_seqlens_q": torch.tensor(starts, device="cuda", dtype=torch.int32),
            "max_seqlen_q": max(counts),
            "seqused_k": torch.tensor(lengths, device="cuda", dtype=torch.int32),
            "max_seqlen_k": max(lengths),
            "softmax_scale": size**-0.5,
            "causal": True,
            "window_size": [window - 1, 0],
            "block_table": table,
            "softcap": cap,
            "fa_version": 3,
            "num_splits": 1,
        }

    def fa3(**options: Any) -> torch.Tensor:
        flash_attn_varlen_func(**options)
        out: torch.Tensor = options["out"]
        return out

    ways: Json = {"fa3": fa3, "triton": _hopper_patch.windowed}
    if queries := _hopper_windows.tile_queries(size, heads // kv_heads):

        def aligned(**options: Any) -> Any:
            return _hopper_windows.aligned(flash_attn_varlen_func, queries, **options)

        ways["fa3, aligned"] = aligned
    return {name: (way, given) for name, way in ways.items()}


def _positions(way: Any, size: int, heads: int, kv_heads: int) -> Json:
    """Return which positions of a prompt differ from those of the whole prompt."""
    call, given = way
    torch.manual_seed(1)
    pages = -(-LENGTH // PAGE)
    cache = [normal(pages + 1, PAGE, kv_heads, size) for _ in range(2)]
    table = torch.arange(1, pages + 1, device="cuda", dtype=torch.int32)[None]
    q = normal(LENGTH, heads, size)

    def compute(pieces: list[tuple[int, int]]) -> torch.Tensor:
        starts = [0]
        for begin, end in pieces:
            starts.append(starts[-1] + end - begin)
        rows = torch.cat([q[begin:end] for begin, end in pieces])
        tables = table.expand(len(pieces), -1).contiguous()
        out: torch.Tensor = call(**given(rows, starts, [end for _, end in pieces], cache, tables))
        return out

    whole = compute([(0, LENGTH)])
    other: Json = {}
    for step in (61, 200):
        begins = range(0, LENGTH, step)
        other[f"chunk {step}"] = [
            begin
            for begin in begins
            if not torch.equal(
                compute([(begin, min(begin + step, LENGTH))]), whole[begin : begin + step]
            )
        ]
    some = torch.linspace(0, LENGTH - 1, 64).long().tolist()
    alone = torch.cat([compute([(at, at + 1)]) for at in some])
    other["decoded alone"] = _differing(alone, whole[some])
    other["decoded in a batch"] = _differing(compute([(at, at + 1) for at in some]), whole[some])
    beside = compute([(3, 450), (0, LENGTH), (888, 889)])
    other["beside others"] = _differing(beside, torch.cat([whole[3:450], whole, whole[888:889]]))
    return {name: value for name, value in other.items() if value}


def _loads(ways: Json, size: int, heads: int, kv_heads: int) -> Json:
    """Return microseconds of one call by kernel and load, and the largest difference."""
    out: Json = {}
    for requests, length, queries in LOADS:
        pages = -(-length // PAGE)
        cache = [normal(requests * pages, PAGE, kv_heads, size) for _ in range(2)]
        table = torch.arange(requests * pages, device="cuda", dtype=torch.int32)
        q = normal(requests * queries, heads, size)
        starts = [i * queries for i in range(requests + 1)]
        row: Json = {}
        results: dict[str, torch.Tensor] = {}
        for name, (call, given) in ways.items():
            options = given(q, starts, [length] * requests, cache, table.view(requests, -1))
            results[name] = call(**options).float().clone()
            row[name] = graph_us([lambda c=call, o=options: c(**o)], 8)  # type: ignore[misc]
        row["largest_difference"] = {
            name: float((result - results["fa3"]).abs().max()) for name, result in results.items()
        }
        out[f"{requests} x {length}, {queries} queries"] = row
    return out


if __name__ == "__main__":
    sys.exit(main())
