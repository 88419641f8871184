"""Matrix products in one fixed order, compiled for the processor at hand.

``out[m, n] = sum over k of x[m, k] * w[n, k]`` in float32. K is cut into blocks of `BLOCK`. In
a block the products are accumulated by a chain of fused multiply-adds in ascending k, beginning
with 0. The sums of the blocks are added in a binary tree: two neighbours of equal size are
added as soon as both are there, and what is left at the end is added from the last to the
first. None of this depends on the number of rows, threads or lanes: vectors run over the
columns n, never over a sum, so a row has the same bits whatever else is in the batch.

numba compiles the loops; the innermost is written as LLVM IR, so that its sums stay in
registers. They run on the threads of torch's OpenMP. Weights are stored as they are (bfloat16
is exact in float32), packed in blocks of columns.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

__all__ = ["BLOCK", "PackedWeight", "product"]

BLOCK = 128
"""Products in one chain of fused multiply-adds."""

_CHUNK = 96
"""Rows whose partial sums are kept at a time: they stay in the second-level cache."""

_WIDE = "+avx512f" in (numba.config.CPU_FEATURES or get_host_cpu_features()).split(",")
_LANES, _VECTORS = (16, 2) if _WIDE else (8, 2)
_WIDTH = _LANES * _VECTORS
"""Columns of a packed block."""
_BFLOAT16, _FLOAT32 = 2, 4
"""Bytes of a stored weight."""


@intrinsic
def _floats(typingctx: Any, address: Any) -> Any:
    """Return an address as a pointer to float32."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(types.int64), code


def _tile_of(rows: int, groups: int) -> Any:
    """Return ``tile(x, ldx, w, ldw, size, count, out, ldo)``: one block of K for a few rows.

    `x` is the address of `rows` rows of `count` values, `w` of `groups` blocks of columns that
    are `ldw` elements of `size` bytes apart; `out` gets rows of ``groups * _WIDTH`` sums, `ldo`
    apart.
    """

    @intrinsic
    def tile(
        typingctx: Any, x: Any, ldx: Any, w: Any, ldw: Any, size: Any, count: Any, out: Any,
        ldo: Any,
    ) -> Any:  # fmt: skip
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            is_bfloat16 = builder.icmp_signed("==", args[4], ir.IntType(64)(_BFLOAT16))
            with builder.if_else(is_bfloat16) as (then, otherwise):
                with then:
                    _write_tile(builder, args, rows, groups, _BFLOAT16)
                with otherwise:
                    _write_tile(builder, args, rows, groups, _FLOAT32)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), code

    return tile


def _write_tile(b: Any, args: Any, rows: int, groups: int, size: int) -> None:
    """Write the innermost loop, for weights of `size` bytes; its sums stay in registers."""
    x, ldx, w, ldw, _, count, out, ldo = args
    i64, f32 = ir.IntType(64), ir.FloatType()
    vector = ir.VectorType(f32, _LANES)
    fma = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{_LANES}f32"
    )
    columns = [(c, j) for c in range(groups) for j in range(_VECTORS)]
    before, loop, done = b.block, b.append_basic_block("k"), b.append_basic_block("k.end")
    b.branch(loop)
    b.position_at_end(loop)
    k = b.phi(i64)
    sums = {(r, c, j): b.phi(vector) for r in range(rows) for c, j in columns}
    at = b.add(w, b.mul(k, i64(_WIDTH * size)))
    weights = {}
    for c, j in columns:
        start = b.add(at, b.mul(ldw, i64(c * size)))
        weights[c, j] = _weights(b, b.add(start, i64(j * _LANES * size)), size)
    new = {}
    for r in range(rows):
        place = b.add(x, b.mul(b.add(b.mul(ldx, i64(r)), k), i64(4)))
        value = _spread(b, b.load(b.inttoptr(place, f32.as_pointer())))
        for c, j in columns:
            new[r, c, j] = b.call(fma, [value, weights[c, j], sums[r, c, j]])
    following = b.add(k, i64(1))
    zero = vector([0.0] * _LANES)
    for phi, first, then in [(k, i64(0), following), *((sums[i], zero, new[i]) for i in sums)]:
        phi.add_incoming(first, before)
        phi.add_incoming(then, loop)
    b.cbranch(b.icmp_signed("<", following, count), loop, done)
    b.position_at_end(done)
    for (r, c, j), value in new.items():
        offset = b.add(b.mul(ldo, i64(r)), i64((c * _VECTORS + j) * _LANES))
        to = b.inttoptr(b.add(out, b.mul(offset, i64(4))), vector.as_pointer())
        b.store(value, to, align=4)


def _weights(b: Any, address: Any, size: int) -> Any:
    """Load a vector of stored weights as float32."""
    vector = ir.VectorType(ir.FloatType(), _LANES)
    if size == _FLOAT32:
        return b.load(b.inttoptr(address, vector.as_pointer()), align=4)
    narrow, wide = (ir.VectorType(ir.IntType(bits), _LANES) for bits in (16, 32))
    bits = b.load(b.inttoptr(address, narrow.as_pointer()), align=2)
    return b.bitcast(b.shl(b.zext(bits, wide), wide([16] * _LANES)), vector)


def _spread(b: Any, value: Any) -> Any:
    """Return a vector all of whose lanes hold `value`."""
    none = ir.Constant(ir.VectorType(ir.FloatType(), _LANES), ir.Undefined)
    places = ir.VectorType(ir.IntType(32), _LANES)([0] * _LANES)
    return b.shuffle_vector(b.insert_element(none, value, ir.IntType(32)(0)), none, places)


_MOST = 12 if _WIDE else 6
"""Rows of the largest tile: its sums fill three quarters of the registers."""
_tile_most, _tile_4, _tile_2, _tile_1 = (_tile_of(rows, 1) for rows in (_MOST, 4, 2, 1))
_tile_1_by_4 = _tile_of(1, 4)


@numba.njit(cache=True)
def _one_block(
    x: int, depth: int, w: int, apart: int, size: int, count: int, sums: int, rows: int, width: int
) -> None:
    """Compute the sums of one block of K, for `rows` rows and `width` columns.

    A single row has four blocks of columns at a time: its chains wait for each other less.
    """
    if width > _WIDTH:
        _tile_1_by_4(x, depth, w, apart, size, count, sums, width)
        return
    r = 0
    while rows - r >= _MOST:
        _tile_most(x + 4 * r * depth, depth, w, apart, size, count, sums + 4 * r * width, width)
        r += _MOST
    while rows - r >= 4:
        _tile_4(x + 4 * r * depth, depth, w, apart, size, count, sums + 4 * r * width, width)
        r += 4
    if rows - r >= 2:
        _tile_2(x + 4 * r * depth, depth, w, apart, size, count, sums + 4 * r * width, width)
        r += 2
    if rows - r >= 1:
        _tile_1(x + 4 * r * depth, depth, w, apart, size, count, sums + 4 * r * width, width)


@numba.njit(cache=True)
def _columns(
    x: int, rows: int, depth: int, w: int, size: int, width: int, out: int, out_width: int,
    scratch: int,
) -> None:  # fmt: skip
    """Compute all rows of some columns; `scratch` holds the sums, and those of each level."""
    blocks = (depth + BLOCK - 1) // BLOCK
    level_bytes = 4 * min(rows, _CHUNK) * width
    for first in range(0, rows, _CHUNK):
        here = min(_CHUNK, rows - first)
        values = here * width
        sums = carray(_floats(scratch), values)
        for block in range(blocks):
            k = block * BLOCK
            _one_block(
                x + 4 * (first * depth + k), depth, w + size * k * _WIDTH, depth * _WIDTH, size,
                min(BLOCK, depth - k), scratch, here, width,
            )  # fmt: skip
            level, left = 1, block
            while left & 1:
                older = carray(_floats(scratch + level * level_bytes), values)
                for i in range(values):
                    sums[i] = older[i] + sums[i]
                level, left = level + 1, left >> 1
            kept = carray(_floats(scratch + level * level_bytes), values)
            for i in range(values):
                kept[i] = sums[i]
        level, left, some = 1, blocks, False
        while left:
            if left & 1:
                older = carray(_floats(scratch + level * level_bytes), values)
                for i in range(values):
                    sums[i] = older[i] + sums[i] if some else older[i]
                some = True
            level, left = level + 1, left >> 1
        for r in range(here):
            row = carray(_floats(out + 4 * (first + r) * out_width), width)
            for i in range(width):
                row[i] = sums[r * width + i]


_thread_number = types.ExternalFunction("omp_get_thread_num", types.int32())
_thread_count = types.ExternalFunction("omp_get_num_threads", types.int32())


@numba.cfunc(types.void(types.CPointer(types.int64)), cache=True)
def _share(call: Any) -> None:
    """Compute one thread's share of the columns of a product."""
    x, w, out, rows, depth, blocks, size, scratch, room = (
        call[0], call[1], call[2], call[3], call[4], call[5], call[6], call[7], call[8],
    )  # fmt: skip
    thread, threads = np.int64(_thread_number()), np.int64(_thread_count())
    block, end = blocks * thread // threads, blocks * (thread + 1) // threads
    together = 4 if rows == 1 else 1
    while block < end:
        groups = together if end - block >= together else 1
        _columns(
            x, rows, depth, w + size * block * depth * _WIDTH, size, groups * _WIDTH,
            out + 4 * block * _WIDTH, blocks * _WIDTH, scratch + thread * room,
        )  # fmt: skip
        block += groups


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight of shape (N, K) in blocks of columns: (blocks, K, width), zeros at the end.

    Attributes
    ----------
    blocks
        bfloat16 as it is, everything else as float32.
    columns, depth
        N and K.
    """

    blocks: torch.Tensor
    columns: int
    depth: int

    @classmethod
    def of(cls, weight: torch.Tensor) -> PackedWeight:
        """Pack `weight`; it is copied."""
        columns, depth = weight.shape
        stored = weight if weight.dtype is torch.bfloat16 else weight.float()
        count = -(-columns // _WIDTH)
        full = stored.new_zeros((count * _WIDTH, depth))
        full[:columns] = stored
        blocks = full.view(count, _WIDTH, depth).transpose(1, 2).contiguous()
        return cls(blocks, columns, depth)


def product(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Return ``x @ weight.T``: float32 rows of shape (M, K) to (M, N)."""
    x = x.contiguous()
    rows, count = x.shape[0], weight.blocks.shape[0]
    out = torch.empty((rows, count * _WIDTH), dtype=torch.float32)
    threads = torch.get_num_threads()
    levels = 2 + max(1, -(-weight.depth // BLOCK)).bit_length()
    room = 4 * levels * max(min(rows, _CHUNK), 4) * _WIDTH
    scratch = torch.empty(threads * room, dtype=torch.uint8)
    call = (ctypes.c_int64 * 9)(
        x.data_ptr(), weight.blocks.data_ptr(), out.data_ptr(), rows, weight.depth, count,
        weight.blocks.element_size(), scratch.data_ptr(), room,
    )  # fmt: skip
    _parallel(_share.address, call, threads, 0)
    return out[:, : weight.columns]


_parallel = ctypes.CDLL(None).GOMP_parallel
_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
_parallel.restype = None
