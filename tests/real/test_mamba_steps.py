"""Mamba's recurrence as we compute it on CPU, against the formula written out; no engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jupyter_detllm.engines.vllm.mamba import selective_scan, state_update

DIM, STATES, TOKENS = 6, 4, 7


class Inputs:
    """Random inputs of two sequences side by side, three and four tokens, in blocks 3 and 1."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(3)
        self.x, self.dt, self.z = (torch.randn(TOKENS, DIM).to(dtype) for _ in range(3))
        self.b, self.c = (torch.randn(TOKENS, STATES).to(dtype) for _ in range(2))
        self.a = -torch.rand(DIM, STATES)
        self.d, self.bias = torch.randn(DIM), torch.randn(DIM)
        self.states = torch.randn(5, DIM, STATES)

    def scan(self, goes_on: tuple[bool, bool] = (False, False), **more: Any) -> torch.Tensor:
        given: dict[str, Any] = {
            "query_start_loc": torch.tensor([0, 3, TOKENS]),
            "cache_indices": torch.tensor([3, 1]),
            "has_initial_state": torch.tensor(goes_on),
        } | more
        out: torch.Tensor = selective_scan(
            self.x.t(), self.states, self.dt.t(), self.a, self.b.t(), self.c.t(), self.d,
            self.z.t(), self.bias, delta_softplus=True, **given,
        )  # fmt: skip
        return out.t()

    def written_out(self, tokens: range, state: torch.Tensor) -> tuple[list[Any], torch.Tensor]:
        rows = []
        for t in tokens:
            row = []
            for d in range(DIM):
                dt = torch.log1p(torch.exp(self.dt[t, d].float() + self.bias[d]))
                x, total = self.x[t, d].float(), torch.tensor(0.0)
                for n in range(STATES):
                    state[d, n] = state[d, n] * torch.exp(dt * self.a[d, n])
                    state[d, n] += dt * self.b[t, n].float() * x
                    total += state[d, n] * self.c[t, n].float()
                gate = self.z[t, d].float()
                row.append((total + self.d[d] * x) * gate * torch.sigmoid(gate))
            rows.append(torch.stack(row))
        return rows, state


@pytest.mark.parametrize("goes_on", [(False, False), (True, False), (False, True)])
def test_a_prefill_is_the_formula(goes_on: tuple[bool, bool]) -> None:
    one, two = Inputs(), Inputs()
    untouched = one.states[[0, 2, 4]].clone()
    zero = torch.zeros(DIM, STATES)
    first, third = two.written_out(range(3), two.states[3] if goes_on[0] else zero.clone())
    second, other = two.written_out(range(3, TOKENS), two.states[1] if goes_on[1] else zero.clone())
    torch.testing.assert_close(one.scan(goes_on), torch.stack([*first, *second]))
    torch.testing.assert_close(one.states[3], third)
    torch.testing.assert_close(one.states[1], other)
    assert torch.equal(one.states[[0, 2, 4]], untouched)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_one_by_one_give_what_a_prefill_gives(dtype: torch.dtype) -> None:
    one, two = Inputs(dtype), Inputs(dtype)
    whole = one.scan()
    assert whole.dtype == dtype
    two.states[[3, 1]] = 0.0
    steps = [torch.tensor([0, 3]), torch.tensor([1, 4]), torch.tensor([2, 5]), torch.tensor([6])]
    for rows in steps:
        out = torch.empty(len(rows), DIM, dtype=dtype)
        blocks = torch.tensor([3, 1] if len(rows) == 2 else [1])
        state_update(
            two.states, two.x[rows], two.dt[rows], two.a, two.b[rows], two.c[rows], two.d,
            two.bias, z=two.z[rows], dt_softplus=True, state_batch_indices=blocks, out=out,
        )  # fmt: skip
        torch.testing.assert_close(out, whole[rows])
    torch.testing.assert_close(two.states, one.states)
