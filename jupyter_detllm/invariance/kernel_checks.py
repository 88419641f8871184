"""The self-test's kernel-level part: products and attention of a live engine, alone and batched.

It is device-agnostic: it calls what the engine calls, whatever a method has changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from jupyter_detllm.core.levels import Reach
from jupyter_detllm.errors import InvarianceError
from jupyter_detllm.invariance.base import KernelCheck, KernelRow
from jupyter_detllm.probes.ranks import worker_of

__all__ = [
    "Attend",
    "Rows",
    "attention_builders",
    "check_attention",
    "check_attentions",
    "check_linear",
    "checked",
    "distinct_rows",
    "in_shares",
]

Checked = tuple[KernelRow, int]
"""A kernel's result, and the longest sequence or the most rows for which it was tried."""

Item = TypeVar("Item")

_DISTINCT = 61

_COUNTS = (2, 3, 4, 5, 7, 8, 9, 13, 17, 30, 33, 63, 65, 100, 127, 201, 257, 511, 640, 1025, 1537)
_FEW = 65
"""Up to this number of rows the time does not matter."""

_LENGTHS = (1, 9, 70, 333, 700, 1150, 1600, 2500, 4096, 8192, 16384, 32768)
_SHORT = 1000
"""Up to this many tokens the time does not matter, and says little about longer ones."""
_CHUNK = 61
"""Tokens per chunk: not a multiple of a tile, so that chunks begin inside tiles."""


def checked(
    method: str, attention: Sequence[Checked], linear: Sequence[Checked], sequences: int
) -> KernelCheck:
    """Return the result for all kernels of a model; its steps have at most `sequences`.

    Raises
    ------
    InvarianceError
        If nothing was compared for one of them.
    """
    found = [*attention, *linear]
    if not attention or not linear or not all(row.compared for row, _ in found):
        raise InvarianceError(f"{method}: of some kernels nothing was compared")
    most = min(sequences, *(reached for _, reached in linear))
    reach = Reach(min(reached for _, reached in attention), most)
    return KernelCheck(tuple(row for row, _ in found), reach)


def in_shares(items: Collection[Item], until: float) -> Iterator[tuple[Item, float]]:
    """Yield each item with the time at which its equal share of what is left ends."""
    for number, item in enumerate(items):
        now = time.monotonic()
        yield item, now + (until - now) / (len(items) - number)


def distinct_rows(count: int, width: int, dtype: Any, device: Any = "cpu", *, seed: int = 2) -> Any:
    """Return `count` random rows, the same on every machine."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randn((count, width), generator=generator).to(device, dtype)


def check_linear(
    call: Callable[[Any], Any],
    name: str,
    width: int,
    dtype: Any,
    *,
    most: int,
    until: float,
    device: Any = "cpu",
) -> Checked:
    """Compare rows computed one by one with the same rows among others.

    Parameters
    ----------
    call
        The product as the engine computes it: rows (count, `width`) to (count, N).
    name
        For the result.
    dtype, device
        torch's, of the rows.
    most
        Maximum number of rows to try.
    until
        When to stop, on `time.monotonic`'s clock.

    Returns
    -------
    KernelRow and int
        The result, and the largest number of rows that was tried.
    """
    import torch

    rows = distinct_rows(_DISTINCT, width, dtype, device, seed=11)
    alone = torch.cat([call(rows[i : i + 1]) for i in range(_DISTINCT)])
    compared = equal = reached = 0
    first = ""
    for count in (*(n for n in _COUNTS if n < most), most):
        if count > _FEW and time.monotonic() > until:
            break
        index = ((torch.arange(count) + 7 * count) % _DISTINCT).to(device)
        same = (call(rows[index]) == alone[index]).all(dim=-1)
        compared, equal, reached = compared + count, equal + int(same.sum()), count
        if not first and not same.all():
            first = f"row {int((~same).nonzero()[0])} of {count}: different bits than alone"
    return KernelRow(name, compared, equal, first), reached


@dataclass(frozen=True, slots=True)
class Rows:
    """Query rows of a step: positions `start` to `end` of sequence `sequence`."""

    sequence: int
    start: int
    end: int


Attend = Callable[[Sequence[Rows]], list[Any]]
"""One step of attention: the output of each request, of shape (rows, heads, head size)."""

SequencesOf = Callable[[Sequence[int]], Attend]
"""Attention over sequences of these lengths, with random keys, values and queries."""


def check_attention(
    sequences_of: SequencesOf, name: str, *, tokens: int, sequences: int, until: float
) -> Checked:
    """Compare a prefill alone with the same positions batched, chunked, cached and decoded.

    Parameters
    ----------
    sequences_of
        Creates sequences and returns attention over them, as the engine computes it.
    name
        For the result.
    tokens
        Longest sequence to try.
    sequences
        Maximum requests in one step.
    until
        When to stop, on `time.monotonic`'s clock; a length that would end later is skipped.

    Returns
    -------
    KernelRow and int
        The result, and the longest sequence for which everything was tried.
    """
    compared = equal = reached = 0
    first, before, took = "", 0, 0.0
    for length in (*(n for n in _LENGTHS if n < tokens), tokens):
        began = time.monotonic()
        if before > _SHORT and began + took * (length / before) ** 2 > until:
            break
        for what, same in _compared(sequences_of, length, sequences):
            compared, equal = compared + len(same), equal + int(same.sum())
            if not first and not same.all():
                row = int((~same).nonzero()[0])
                first = f"{length} tokens, {what}: row {row} has different bits"
        before, took, reached = length, time.monotonic() - began, length
    return KernelRow(name, compared, equal, first), reached


def _compared(sequences_of: SequencesOf, length: int, sequences: int) -> Iterator[tuple[str, Any]]:
    """Yield, for each way of computing a prompt of `length`, which rows are equal."""
    import torch

    neighbours = (length // 3 + 5, 40, length // 2 + 77)
    attend = sequences_of((length, *neighbours))

    def same(rows: Sequence[Rows], which: int = 0) -> Any:
        found, wanted = attend(rows)[which], whole[rows[which].start : rows[which].end]
        return (found == wanted).flatten(1).all(dim=-1)

    whole = attend([Rows(0, 0, length)])[0]
    others = [Rows(1, 0, neighbours[0]), Rows(0, 0, length), Rows(3, 3, neighbours[2])]
    if sequences >= len(others):
        yield "batched", same([*others, Rows(2, 39, 40)][:sequences], 1)
    for cut in sorted({length // 2 + 3, length - 1} - {length}):
        if 0 < cut < length:
            yield f"after a cached prefix of {cut}", same([Rows(0, cut, length)])
    for start in range(max(0, length - 5 * _CHUNK), length, _CHUNK):
        chunk = Rows(0, start, min(start + _CHUNK, length))
        yield "chunked", same([Rows(2, 39, 40), chunk][-sequences:], min(sequences, 2) - 1)
    places = torch.linspace(0, length - 1, max(1, sequences)).long().tolist()
    decoded = attend([Rows(0, place, place + 1) for place in places])
    yield "decoded", (torch.cat(decoded) == whole[places]).flatten(1).all(dim=-1)


# --- attention of a live engine ------------------------------------------------------


def attention_builders(worker: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every group of attention layers with its metadata builder."""
    for groups in worker_of(worker).model_runner.attn_groups:
        for group in groups:
            for builder in group.metadata_builders:
                yield group, builder


def check_attentions(worker: Any, *, tokens: int, sequences: int, until: float) -> list[Checked]:
    """Check each distinct attention of the model with the builders as they are."""
    layers = worker_of(worker).vllm_config.compilation_config.static_forward_context
    kinds: dict[str, tuple[Any, Any]] = {}
    for group, builder in attention_builders(worker):
        for name in group.layer_names:
            kinds.setdefault(_kind(layers[name].impl), (builder, layers[name]))
    found = []
    for (kind, (builder, layer)), share in in_shares(kinds.items(), until):
        make = partial(_sequences, builder, layer)
        found.append(check_attention(make, kind, tokens=tokens, sequences=sequences, until=share))
    return found


def _kind(impl: Any) -> str:
    window = "full" if impl.sliding_window in (None, -1, (-1, -1)) else "sliding window"
    return ", ".join(
        [
            f"attention {impl.num_heads}/{impl.num_kv_heads} heads of {impl.head_size}",
            window if window == "full" else f"{window} {impl.sliding_window}",
            *(["soft cap"] if impl.logits_soft_cap else []),
            *(["ALiBi"] if impl.alibi_slopes is not None else []),
            *(["sinks"] if impl.sinks is not None else []),
        ]
    )


def _sequences(builder: Any, layer: Any, lengths: Sequence[int]) -> Attend:
    """Return attention over random keys, values and queries in a separate cache.

    `builder` builds the engine's metadata for `layer`; `lengths` are in tokens.
    """
    import torch

    impl, block, device = layer.impl, builder.block_size, _cache_of(layer).device
    generator = torch.Generator().manual_seed(sum(lengths))

    def random(count: int, heads: int) -> Any:
        values = torch.randn((count, heads, impl.head_size), generator=generator)
        return values.to(device, dtype)

    blocks = [-(-length // block) for length in lengths]
    cache, dtype = _empty_cache(_cache_of(layer), sum(blocks) + 1), _dtype_of(layer)
    queries, tables, taken = [], torch.zeros((len(lengths), max(blocks)), dtype=torch.int32), 1
    for number, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        tables[number, :count] = torch.arange(taken, taken + count)
        slots = torch.arange(taken * block, taken * block + length, device=device)
        keys, values = random(length, impl.num_kv_heads), random(length, impl.num_kv_heads)
        impl.do_kv_cache_update(layer, keys, values, cache, slots)
        queries.append(2 * random(length, impl.num_heads))
        taken += count
    return partial(_attend, builder, layer, cache, queries, tables.to(device))


def _cache_of(layer: Any) -> Any:
    cache = layer.kv_cache
    return cache[0] if isinstance(cache, (list, tuple)) else cache


def _dtype_of(layer: Any) -> Any:
    """Return the dtype of queries, keys and values: the cache's, unless it is packed."""
    cache = _cache_of(layer).dtype
    return cache if cache.is_floating_point else getattr(layer, "dtype", cache)


def _empty_cache(cache: Any, blocks: int) -> Any:
    """Return zeroed KV blocks in the memory layout of the engine's `cache`.

    The block is the first dimension, as in every attention backend of vLLM 0.25 to 0.33.
    """
    import torch

    order = sorted(range(cache.ndim), key=lambda axis: -cache.stride(axis))
    shape = [blocks, *cache.shape[1:]]
    zeros = torch.zeros([shape[axis] for axis in order], dtype=cache.dtype, device=cache.device)
    return zeros.permute([order.index(axis) for axis in range(cache.ndim)])


def _attend(
    builder: Any, layer: Any, cache: Any, queries: list[Any], tables: Any, rows: Sequence[Rows]
) -> list[Any]:
    """Compute one step over `rows` as the engine would; return each request's output."""
    import torch
    from vllm.v1.attention.backend import CommonAttentionMetadata

    counts = [item.end - item.start for item in rows]
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    lengths = torch.tensor([item.end for item in rows], dtype=torch.int32)
    query = torch.cat([queries[item.sequence][item.start : item.end] for item in rows])
    common = CommonAttentionMetadata(
        query_start_loc=starts.to(query.device),
        query_start_loc_cpu=starts,
        seq_lens=lengths.to(query.device),
        num_reqs=len(rows),
        num_actual_tokens=len(query),
        max_query_len=max(counts),
        max_seq_len=max(item.end for item in rows),
        block_table_tensor=tables[[item.sequence for item in rows]].contiguous(),
        slot_mapping=torch.zeros(len(query), dtype=torch.int64, device=query.device),
    )
    metadata = builder.build(0, common)
    out = torch.empty_like(query)
    layer.impl.forward(layer, query, query, query, cache, metadata, out)
    return list(out.split(counts))
