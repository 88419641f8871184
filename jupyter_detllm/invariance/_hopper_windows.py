"""Sliding windows in FlashAttention 3: tiles of queries that begin at absolute positions.

FlashAttention 3 reads keys from the window of the first query of a tile on, so the sum of a
position depends on where its tile begins. Here every tile begins at a multiple of the queries
that it holds: a request whose first query is not at one gets unused queries before it. In
decode a tile holds one query anyway, so these cost nothing but two small copies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["aligned", "tile_queries"]

MOST_QUERIES = 64
"""Longest tile that is worth it: decode gives each request room for so many queries."""
_WIDE, _NARROW = 192, 128
_WIDE_SIZE = 96
_REQUESTS = 128
"""Fewer requests take the kernel that is compiled for so many."""


def tile_queries(head_size: int, group: int) -> int:
    """Return the queries of one tile, by the heads per KV head; 0 where it is not used.

    A tile has 192 rows for heads of up to 96 and else 128 (`tile_size.h` of FlashAttention 3),
    a row for each query and head of the group. Heads of 64 and less have other tiles as well.
    """
    rows = _WIDE if head_size <= _WIDE_SIZE else _NARROW
    queries, left = divmod(rows, group)
    return queries if head_size > 64 and not left and queries <= MOST_QUERIES else 0


def aligned(hook: Callable[..., Any], queries: int, **given: Any) -> Any:
    """Compute attention in a sliding window by `hook`, `flash_attn_varlen_func` of vLLM.

    Parameters
    ----------
    hook
        `vllm_flash_attn/flash_attn_interface.py` (vLLM 0.25.1, 0.33.0), with `q` and `out`
        of shape (tokens, heads, head size) and a block table.
    queries
        Of one tile (`tile_queries`).
    **given
        The arguments of `hook`.
    """
    import torch

    q, out, starts, used = (given[name] for name in ("q", "out", "cu_seqlens_q", "seqused_k"))
    count, requests = q.shape[0], used.shape[0]
    room = count + requests * (queries - 1)
    spread_q = q.new_empty((room, *q.shape[1:]))
    spread_out = torch.empty_like(spread_q)
    places, bounds = starts.new_empty(count), torch.empty_like(starts)
    row = {"width": q.shape[1] * q.shape[2], "padded": _power(q.shape[1] * q.shape[2])}
    most = max(_REQUESTS, _power(requests + 1))
    if count:
        _spread()[(count,)](
            *(q, spread_q, places, bounds, starts, used, requests, q.stride(0)),
            queries=queries,
            most=most,
            **row,
        )
    changed = {
        "q": spread_q,
        "out": spread_out,
        "cu_seqlens_q": bounds,
        "max_seqlen_q": given["max_seqlen_q"] + queries - 1,
        # A window no shorter than the longest sequence would be none, with another tile.
        "max_seqlen_k": max(given["max_seqlen_k"], given["window_size"][0] + 2),
        "scheduler_metadata": None,
        "num_splits": 1,
    }
    hook(**{**given, **changed})
    if count:
        _collect()[(count,)](spread_out, out, places, out.stride(0), **row)
    return out


def _power(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


@functools.cache
def _spread() -> Any:
    import triton  # type: ignore[import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-untyped, unused-ignore]

    def spread(  # type: ignore[no-untyped-def]
        q_ptr, spread_ptr, places_ptr, bounds_ptr, starts_ptr, used_ptr, requests, q_stride,
        queries: tl.constexpr, width: tl.constexpr, padded: tl.constexpr, most: tl.constexpr,
    ):  # fmt: skip
        token = tl.program_id(0)
        number = tl.arange(0, most)
        inside = number < requests
        begin = tl.load(starts_ptr + number, mask=inside, other=0)
        end = tl.load(starts_ptr + number + 1, mask=inside, other=0)
        used = tl.load(used_ptr + number, mask=inside, other=0)
        before = tl.maximum(used - (end - begin), 0) % queries
        before = tl.where(inside & (end > begin), before, 0)
        # Unused queries of this token's request and of those before it.
        place = token + tl.sum(tl.where(inside & (begin <= token), before, 0), axis=0)
        tl.store(places_ptr + token, place)
        if token == 0:
            bounds = end + tl.cumsum(before, axis=0)
            tl.store(bounds_ptr + number + 1, bounds, mask=inside)
            tl.store(bounds_ptr, 0)
        column = tl.arange(0, padded)
        row = tl.load(q_ptr + token.to(tl.int64) * q_stride + column, mask=column < width)
        tl.store(spread_ptr + place.to(tl.int64) * width + column, row, mask=column < width)

    return triton.jit(spread, do_not_specialize=["requests"])


@functools.cache
def _collect() -> Any:
    import triton  # type: ignore[import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-untyped, unused-ignore]

    def collect(  # type: ignore[no-untyped-def]
        spread_ptr, out_ptr, places_ptr, out_stride, width: tl.constexpr, padded: tl.constexpr
    ):
        token = tl.program_id(0)
        place = tl.load(places_ptr + token)
        column = tl.arange(0, padded)
        row = tl.load(spread_ptr + place.to(tl.int64) * width + column, mask=column < width)
        tl.store(out_ptr + token.to(tl.int64) * out_stride + column, row, mask=column < width)

    return triton.jit(collect)
