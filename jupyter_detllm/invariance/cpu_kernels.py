"""Batch dependence of vLLM's CPU kernels, and how it is removed.

Matrix products (``cpu_linear``, vllm/model_executor/layers/utils.py of vLLM 0.32): oneDNN and
vLLM's own kernels choose their code by the number of rows, and some treat the last rows
specially. The row counts that give a row the same bits are measured for every shape of the
loaded model; products are then computed only with such counts, by zero padding or in pieces.

Attention (csrc/cpu/cpu_attn_impl.hpp): the scheduler divides a prompt's queries among threads
by the KV length of the whole batch, and the size of a query tile decides the KV tiles over
which softmax and PV are accumulated. A tile that fits one iteration of the kernel is never
divided, so a prefill is passed as one request per tile, cut at absolute positions.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from jupyter_detllm.invariance.kernel_checks import distinct_rows

__all__ = ["TILE_ROWS", "RowGroup", "in_group", "in_tiles", "measure_group", "tile_tokens"]

Linear = Callable[[Any, Any, Any], Any]

# --- matrix products -----------------------------------------------------------------

_SMALL = 64
_NARROW = tuple(range(1, _SMALL + 1))
_WIDE = (
    65, 66, 68, 72, 80, 95, 96, 97, 100, 112, 127, 128, 129, 130, 132, 160, 191, 192, 193, 200,
    224, 255, 256, 257, 260, 288, 320, 384, 448, 500, 511, 512, 513, 576, 640, 700, 768, 896,
    1000, 1022, 1023, 1024,
)  # fmt: skip
_STEPS = (1, 2, 4, 8, 16, 32, 64)
_DISTINCT = 61
"""Rows of a measurement; prime, so that each takes every position in a block of rows."""

_OUTPUTS = 48_000
"""Outputs of the last row that are compared for few rows. After rounding to bfloat16 about one
of 4,500 differs where a row is summed in another order (EPYC, K = 1,536)."""

_CALLS = ((8, 80), (_SMALL, 8), (_WIDE[-1], 3))
"""Up to how many rows: at most so many calls, each with other rows."""

_MOST_WORK = 3e10
"""Operations of the largest product that is measured; larger ones are split."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Row counts for a product that all give a row equal bits.

    Attributes
    ----------
    least, step
        Up to `narrow` rows: at least `least`, in multiples of `step`.
    narrow
        Where `wide_step` begins.
    wide_step
        Above it, multiples of this.
    most
        Maximum rows of one product; more are computed in pieces.
    """

    least: int = 1
    step: int = 1
    narrow: int = _SMALL
    wide_step: int = 1
    most: int = _WIDE[-1]

    def padded(self, count: int) -> int:
        """Return the row count used to compute `count` <= `most` rows."""
        step = self.step if count <= self.narrow else self.wide_step
        return max(self.least, -(-count // step) * step)


def in_group(linear: Linear, group: RowGroup) -> Linear:
    """Return `linear`, computed only with the row counts of `group`.

    `linear` takes rows of shape (..., K), a weight and a bias, and returns (..., N).
    """
    most = group.most

    def some(rows: Any, weight: Any, bias: Any) -> Any:
        count, width = rows.shape
        wanted = group.padded(count)
        if wanted == count:
            return linear(rows, weight, bias)
        padded = rows.new_zeros((wanted, width))
        padded[:count] = rows
        return linear(padded, weight, bias)[:count]

    def held(x: Any, weight: Any, bias: Any) -> Any:
        width = x.shape[-1]
        count = x.numel() // width
        if count == 0 or (count <= most and group.padded(count) == count):
            return linear(x, weight, bias)
        rows = x.reshape(count, width)
        if count <= most:
            done = some(rows, weight, bias)
        else:
            import torch

            done = torch.cat([some(part, weight, bias) for part in rows.split(most)])
        return done.reshape(*x.shape[:-1], -1)

    return held


def measure_group(
    call: Callable[[Any], Any], width: int, columns: int, dtype: Any
) -> RowGroup | None:
    """Find the row counts for which `call` gives a row the same bits.

    Parameters
    ----------
    call
        Rows of shape (count, `width`) to (count, `columns`).
    width, columns
        K and N of the product.
    dtype
        torch's dtype of the rows.

    Returns
    -------
    RowGroup or None
        None if there is no group of useful size. The same machine, library and number of
        threads give the same group, independent of timing.
    """
    bits = _Bits(call, width, columns, dtype)
    narrow = {count: bits.of(count) for count in _NARROW}
    group = _narrow_group(narrow)
    if group is None:
        return None
    wanted = narrow[_last(_NARROW, group)]
    most = max(_SMALL, int(_MOST_WORK // (2 * width * columns)))
    wide = {count: bits.of(count) == wanted for count in _WIDE if count <= most}
    return _widened(group, wide)


def _last(counts: tuple[int, ...], group: RowGroup) -> int:
    return max(n for n in counts if n <= group.narrow and group.padded(n) == n)


@dataclass(frozen=True, slots=True)
class _Bits:
    """The results of a product for different row counts, as digests."""

    call: Callable[[Any], Any]
    width: int
    columns: int
    dtype: Any

    def of(self, count: int) -> bytes | None:
        """Return a digest of every distinct row's result; None if they depend on position."""
        import torch

        rows = distinct_rows(_DISTINCT, self.width, self.dtype)
        found: list[Any] = [None] * _DISTINCT
        for start in self._starts(count):
            index = (torch.arange(count) + start) % _DISTINCT
            out = self.call(rows[index])
            few = min(count, _DISTINCT)
            if not torch.equal(out, out[:few][torch.arange(count) % _DISTINCT]):
                return None
            for place, which in enumerate(index[:few].tolist()):
                if found[which] is None:
                    found[which] = out[place].clone()
                elif not torch.equal(found[which], out[place]):
                    return None
        return _digest(torch.stack(found))

    def _starts(self, count: int) -> Iterator[int]:
        """Return the start of the rows of each call: every row occurs at several positions."""
        most = next(calls for top, calls in _CALLS if count <= top)
        calls = max(-(-_DISTINCT // count), min(most, -(-_OUTPUTS // self.columns)), 3)
        step = count if count < _DISTINCT else 17
        return (number * step % _DISTINCT for number in range(calls))


def _digest(tensor: Any) -> bytes:
    import torch

    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=16).digest()


def _narrow_group(bits: dict[int, bytes | None]) -> RowGroup | None:
    """Return the finest rule under which few rows give equal results.

    A product of fewer rows is preferred over more than eight rows of padding.
    """
    for padding, top in itertools.product((8, 32), (_SMALL, 32, 16)):
        for step in (number for number in _STEPS if number <= padding):
            for least in range(step, min(padding, top // 2) + 1, step):
                rule = [n for n in bits if least <= n <= top and n % step == 0]
                values = {bits[n] for n in rule}
                if rule[-1] == top and len(values) == 1 and None not in values:
                    return RowGroup(least, step, top, step, top)
    return None


def _widened(group: RowGroup, wide: dict[int, bool]) -> RowGroup:
    """Return `group`, extended to as many rows as give equal results."""
    if group.narrow < _SMALL:
        return group
    for most in sorted((n for n in wide if n & (n - 1) == 0), reverse=True):
        for step in _STEPS:
            rule = [n for n in wide if n <= most and n % step == 0]
            if all(wide[n] for n in rule):
                return replace(group, wide_step=step, most=most)
    return group


# --- attention -----------------------------------------------------------------------

TILE_ROWS = {"vec": 8, "vec16": 16, "amx": 32}
"""Rows of one iteration by kernel: ``MaxQHeadNumPerIteration`` in vLLM 0.32's
csrc/cpu/cpu_attn_vec.hpp, cpu_attn_vec16.hpp and cpu_attn_amx.hpp."""


def tile_tokens(isa: str, heads: int, kv_heads: int) -> int:
    """Return how many query tokens fit one iteration of the kernel `isa`.

    The query heads of a KV head share a tile if their number divides its rows; otherwise each
    head has separate tiles.
    """
    rows, group = TILE_ROWS[isa], heads // kv_heads
    return rows // group if rows % group == 0 else rows


def in_tiles(common: Any, tokens: int) -> Any:
    """Return the metadata of a step with one request per query tile.

    Parameters
    ----------
    common
        ``CommonAttentionMetadata`` (vllm/v1/attention/backend.py, vLLM 0.32): request r has
        the query rows ``query_start_loc[r]`` to ``query_start_loc[r + 1]``, the last of
        ``seq_lens[r]`` positions, and the KV blocks ``block_table_tensor[r]``.
    tokens
        Tokens of a tile; tiles are cut at its absolute multiples, so that a prefill has the
        same tiles whole, chunked or after a cached prefix.
    """
    if common.max_query_len <= 1:
        return common
    import numpy as np
    import torch

    count = common.num_reqs
    rows = common.query_start_loc[: count + 1].numpy().astype(np.int64)
    ends = common.seq_lens[:count].numpy().astype(np.int64)
    first = ends - np.diff(rows)
    tiles = np.where(ends > first, -(-ends // tokens) - first // tokens, 0)
    which: Any = np.repeat(np.arange(count), tiles)
    tile = np.arange(len(which)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    begin = (first // tokens)[which] * tokens + tile * tokens
    starts = rows[which] + np.maximum(begin - first[which], 0)
    return replace(
        common,
        num_reqs=len(which),
        query_start_loc=torch.from_numpy(np.append(starts, rows[-1]).astype(np.int32)),
        seq_lens=torch.from_numpy(np.minimum(begin + tokens, ends[which]).astype(np.int32)),
        max_query_len=tokens,
        block_table_tensor=common.block_table_tensor[torch.from_numpy(which)],
    )
