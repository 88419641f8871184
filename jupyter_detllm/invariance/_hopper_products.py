"""Matrix products without split-K at the speed of those with it: ``torch.ops.detllm.product``.

On an H200 every kernel that sums over K in order gives the same bits, whatever its tile: those
of cuBLASLt without split-K, those that cuBLAS takes for many rows, and the one of this module
(measured for 26 layer shapes, 1 to 8192 rows; see docs/explanation/invariance.md). So the
fastest may be taken by the number of rows. cuBLASLt without split-K is slow for few rows of a
narrow layer with a long K (up to 15 times), and gives other bits to a single row in some.

Imported by every vLLM process that computes with the method, before it builds its model.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

__all__ = ["OPERATOR", "Tile", "gemm", "in_triton", "register_product", "tile_for"]

OPERATOR = "detllm::product"
_SCHEMA = "product(Tensor rows, Tensor weight, Tensor? bias) -> Tensor"


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile of the product in Triton, and how it is computed.

    Attributes
    ----------
    rows, columns, depth
        Of the input, of the output, and along K.
    swapped
        Whether weights are the left operand: the tensor core's 64 rows are then columns of
        the output, and few rows of the input waste nothing.
    stages
        Tiles in flight.
    """

    rows: int
    columns: int
    depth: int
    swapped: bool
    stages: int


_FEW = Tile(16, 64, 128, swapped=True, stages=6)
_SOME = Tile(32, 64, 128, swapped=True, stages=5)
_NARROW = Tile(64, 16, 128, swapped=False, stages=5)
_GATE_COLUMNS = 256
"""A layer as narrow as the gate of a mixture of experts gets Triton's kernel up to 4,095 rows."""


def tile_for(rows: int, columns: int) -> Tile | None:
    """Return the tile for a product; None where the library is as fast or faster.

    By the measurements in ``benchmarks/results/products-h200.json``.
    """
    if columns <= _GATE_COLUMNS:
        return _NARROW if rows < 4096 else None
    if rows <= 16:
        return _FEW if columns <= 8192 else None
    if rows < 32 and columns > 2560:
        return _SOME if columns <= 8192 else None
    if rows <= 32 and 1536 < columns <= 2560:
        return _FEW
    narrow = (rows < 192 and columns <= 1536) or (rows < 64 and columns <= 2560)
    return _NARROW if narrow else None


@functools.cache
def _kernel() -> Any:
    import triton  # type: ignore[import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-untyped, unused-ignore]

    def product_kernel(  # type: ignore[no-untyped-def]
        x_ptr, w_ptr, b_ptr, o_ptr, count, columns, depth, x_stride, w_stride,
        tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr,
        swapped: tl.constexpr, has_bias: tl.constexpr,
    ):  # fmt: skip
        n = tl.program_id(0) * tile_n + tl.arange(0, tile_n)
        m = tl.program_id(1) * tile_m + tl.arange(0, tile_m)
        k = tl.arange(0, tile_k)
        w_rows = w_ptr + n.to(tl.int64) * w_stride
        x_rows = x_ptr + m.to(tl.int64) * x_stride
        acc = tl.zeros((tile_n, tile_m) if swapped else (tile_m, tile_n), tl.float32)
        for start in range(0, depth, tile_k):
            inside = start + k < depth
            if swapped:
                w = tl.load(
                    w_rows[:, None] + (start + k)[None, :],
                    mask=(n < columns)[:, None] & inside[None, :],
                    other=0.0,
                )
                x = tl.load(
                    x_rows[None, :] + (start + k)[:, None],
                    mask=(m < count)[None, :] & inside[:, None],
                    other=0.0,
                )
                acc = tl.dot(w, x, acc)
            else:
                x = tl.load(
                    x_rows[:, None] + (start + k)[None, :],
                    mask=(m < count)[:, None] & inside[None, :],
                    other=0.0,
                )
                w = tl.load(
                    w_rows[None, :] + (start + k)[:, None],
                    mask=(n < columns)[None, :] & inside[:, None],
                    other=0.0,
                )
                acc = tl.dot(x, w, acc)
        if swapped:
            acc = tl.trans(acc)
        if has_bias:
            acc += tl.load(b_ptr + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
        tl.store(
            o_ptr + m.to(tl.int64)[:, None] * columns + n[None, :],
            acc.to(o_ptr.dtype.element_ty),
            mask=(m < count)[:, None] & (n < columns)[None, :],
        )

    return triton.jit(product_kernel, do_not_specialize=["count"])


def in_triton(rows: Any, weight: Any, bias: Any, tile: Tile) -> Any:
    """Return the product of `rows` (M, K) and `weight` (N, K): (M, N), summed over K in order."""
    count, depth = rows.shape
    columns = weight.shape[0]
    out = rows.new_empty((count, columns))
    grid = (-(-columns // tile.columns), -(-count // tile.rows))
    _kernel()[grid](
        rows,
        weight,
        rows if bias is None else bias,
        out,
        count,
        columns,
        depth,
        rows.stride(0),
        weight.stride(0),
        tile_m=tile.rows,
        tile_n=tile.columns,
        tile_k=tile.depth,
        swapped=tile.swapped,
        has_bias=bias is not None,
        num_stages=tile.stages,
        num_warps=4,
    )
    return out


def _product(rows: Any, weight: Any, bias: Any) -> Any:
    """Compute ``torch.nn.functional.linear`` with the same bits for every number of rows."""
    import torch

    linear = torch.nn.functional.linear
    flat = rows.reshape(-1, rows.shape[-1])
    count, columns = flat.shape[0], weight.shape[0]
    tile = tile_for(count, columns) if rows.dtype in {torch.bfloat16, torch.float16} else None
    if tile is not None and count and flat.stride(1) == 1 == weight.stride(1):
        return in_triton(flat, weight, bias, tile).view(*rows.shape[:-1], columns)
    return linear(rows, weight, bias)


def _shape(rows: Any, weight: Any, bias: Any) -> Any:
    """Return an empty tensor of the product's shape, for torch.compile."""
    return rows.new_empty((*rows.shape[:-1], weight.shape[0]))


@functools.cache
def register_product() -> Any:
    """Register the operator in this process, once; return the library that holds it."""
    import torch

    namespace = OPERATOR.partition("::")[0]
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(_SCHEMA, tags=(torch.Tag.needs_fixed_stride_order,))
    library.impl("product", _product, dispatch_key="CUDA")
    torch.library.register_fake(OPERATOR, _shape, lib=library)
    return library


def gemm(layer: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    """Compute an unquantised layer, as vLLM's `default_unquantized_gemm` does.

    `model_executor/layers/utils.py` of vLLM 0.25.1 and 0.33.0: `x` (..., K), `weight` (N, K),
    `bias` (N,) or None; returns (..., N).
    """
    import torch

    return torch.ops.detllm.product(x, weight, bias)
