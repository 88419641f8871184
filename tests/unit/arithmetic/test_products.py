"""Products: their definition, and that a row's bits depend on nothing else."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch

from jupyter_detllm.arithmetic.products import BLOCK, PackedWeight, product

DIGESTS = {
    "bfloat16": "09ee2c123af00ac5",
    "float32": "db0389233598b8f1",
}
"""Of `known_product`, the same on every processor."""


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def matrices(rows: int, columns: int, depth: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows + columns + depth)
    x = torch.randn((rows, depth), generator=generator)
    return x, torch.randn((columns, depth), generator=generator).to(dtype)


def rounded(value: Fraction) -> np.float32:
    """Return the nearest float32, of two as near the even one."""
    near = np.float32(float(value))
    around = [np.nextafter(near, np.float32(side)) for side in (-np.inf, np.inf)]
    by_distance = sorted(
        [near, *around],
        key=lambda n: (abs(Fraction(float(n)) - value), int(n.view(np.uint32)) & 1),
    )
    return by_distance[0]


def defined(x: np.ndarray, w: np.ndarray) -> np.float32:
    """Compute one output as the definition says, every operation rounded from its exact value."""
    sums: list[tuple[int, np.float32]] = []
    for start in range(0, len(x), BLOCK):
        chain = np.float32(0)
        for a, b in zip(x[start : start + BLOCK], w[start : start + BLOCK], strict=True):
            chain = rounded(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(chain)))
        sums.append((1, chain))
        while len(sums) > 1 and sums[-1][0] == sums[-2][0]:
            (size, right), (_, left) = sums.pop(), sums.pop()
            sums.append((2 * size, left + right))
    total = sums.pop()[1]
    while sums:
        total = sums.pop()[1] + total
    return total


@pytest.mark.parametrize("depth", [1, 127, 128, 129, 700])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_output_is_what_the_definition_says(depth: int, dtype: torch.dtype) -> None:
    x, w = matrices(2, 3, depth, dtype)
    found = product(x, PackedWeight.of(w)).numpy()
    wanted = [[defined(a, b) for b in w.float().numpy()] for a in x.numpy()]
    assert found.tobytes() == np.array(wanted, np.float32).tobytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("columns", "depth"), [(1, 5), (40, 576), (193, 1536), (64, 8192)])
def test_a_row_has_the_same_bits_in_every_batch(
    columns: int, depth: int, dtype: torch.dtype
) -> None:
    x, w = matrices(250, columns, depth, dtype)
    packed = PackedWeight.of(w)
    whole = product(x, packed)
    assert whole.shape == (250, columns)
    for count in (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 31, 95, 96, 97, 192, 193, 249):
        start = (7 * count) % (251 - count)
        assert torch.equal(product(x[start : start + count], packed), whole[start : start + count])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_the_number_of_threads_changes_nothing(count: int) -> None:
    x, w = matrices(100, 100, 300, torch.bfloat16)
    packed = PackedWeight.of(w)
    wanted, alone = product(x, packed), product(x[9:10], packed)
    torch.set_num_threads(count)
    assert torch.equal(product(x, packed), wanted)
    assert torch.equal(product(x[9:10], packed), alone)


def test_rows_that_are_not_contiguous_and_no_rows() -> None:
    x, w = matrices(9, 20, 33, torch.float32)
    packed = PackedWeight.of(w)
    assert torch.equal(product(x.T.contiguous().T[::2], packed), product(x, packed)[::2])
    assert product(x[:0], packed).shape == (0, 20)


def known_product(dtype: torch.dtype) -> str:
    """Return the digest of a product whose inputs come from integers, not from a generator."""
    depth, columns = 1000, 50
    whole = torch.arange(23 * depth).reshape(23, depth)
    x = ((whole * 7919) % 4093 - 2046).float() / 1021
    w = ((torch.arange(columns * depth).reshape(columns, depth) * 104729) % 509 - 254).float()
    w = w / 512 if dtype is torch.bfloat16 else w / 509
    out = product(x, PackedWeight.of(w.to(dtype)))
    return hashlib.sha256(out.contiguous().numpy().tobytes()).hexdigest()[:16]


def show() -> None:
    """Print the digests."""
    for name in DIGESTS:
        sys.stdout.write(f"{name} {known_product(getattr(torch, name))}\n")


@pytest.mark.parametrize("name", list(DIGESTS))
def test_the_bits_are_those_of_every_machine(name: str) -> None:
    assert known_product(getattr(torch, name)) == DIGESTS[name]


@pytest.mark.parametrize(
    ("processor", "features"),
    [("haswell", "+avx2,+fma"), ("x86-64", "+sse2")],
)
def test_other_instruction_sets_give_the_same_bits(
    processor: str, features: str, tmp_path: object
) -> None:
    chosen = {
        "NUMBA_CPU_NAME": processor,
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    script = "from tests.unit.arithmetic.test_products import show; show()"
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **chosen}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    found = dict(line.split() for line in done.stdout.splitlines())
    assert found == DIGESTS
