"""Sliding windows on Hopper: where tiles of queries begin, by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jupyter_detllm.invariance import _hopper_windows as windows


@pytest.mark.parametrize(
    ("size", "group", "queries"),
    [
        (128, 4, 32),
        (256, 2, 64),
        (256, 4, 32),
        (96, 4, 48),
        (128, 7, 0),  # a tile would begin inside a query
        (96, 1, 0),  # too long
        (64, 4, 0),  # heads of 64 have two tiles
    ],
)
def test_the_queries_of_a_tile(size: int, group: int, queries: int) -> None:
    assert windows.tile_queries(size, group) == queries


SCRIPT = """
import torch
from jupyter_detllm.invariance._hopper_windows import aligned

CASES = (
    ([1, 1, 1], [33, 64, 1]),  # decode
    ([7, 100, 1, 0, 3], [7, 131, 900, 0, 64]),  # a chunk, a prefill, decode, a padded request
    ([1, 1, 0, 0], [10, 20, 0, 0]),  # padded as in a CUDA graph
    ([40], [40]),
)
HEADS, SIZE, UNUSED = 3, 40, 2  # rows of a graph that belong to no request

for queries in (32, 5):
    for counts, lengths in CASES:
        seen = {}

        def hook(**given):
            seen.update(given)
            given["out"].copy_(2 * given["q"])

        rows = torch.randn(sum(counts) + UNUSED, HEADS * SIZE + 8)[:, :-8]
        q = rows.view(len(rows), HEADS, SIZE)
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        out = torch.zeros(q.shape)
        aligned(
            hook, queries, q=q, out=out, cu_seqlens_q=starts, max_seqlen_q=max(counts),
            seqused_k=torch.tensor(lengths).int(), max_seqlen_k=max(lengths),
            window_size=[99, 0], num_splits=3, scheduler_metadata="for the queries as they came",
        )
        assert torch.equal(out[: sum(counts)], 2 * q[: sum(counts)])
        bounds = seen["cu_seqlens_q"].tolist()
        for number, (count, length) in enumerate(zip(counts, lengths)):
            begin, end = bounds[number : number + 2]
            assert end - begin == (count + (length - count) % queries if count else 0)
            assert not count or (length - (end - begin)) % queries == 0
            asked = q[starts[number] : starts[number + 1]]
            assert torch.equal(seen["q"][end - count : end], asked)
            assert end - begin <= seen["max_seqlen_q"]
        assert seen["max_seqlen_k"] > 100, "a window as long as the sequence is none"
        assert (seen["num_splits"], seen["scheduler_metadata"]) == (1, None)
print("equal")
"""


def test_every_request_begins_at_a_tile() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "TRITON_INTERPRET": "1"},  # read when Triton is imported
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.stdout == "equal\n", done.stderr[-2000:]
