"""Mamba on CPU: the two operations that vLLM's CPU build lacks, in torch.

vLLM 0.32 has CPU kernels for Mamba2 but not for Mamba: the prefill calls a kernel that is not
built (``selective_scan_fwd``), and the decode step one that only takes Mamba2's shapes. Both
compute the same recurrence, for channel d, state n and token t::

    state[d, n] = state[d, n] * exp(dt[t, d] * A[d, n]) + dt[t, d] * B[t, n] * x[t, d]
    y[t, d] = sum over n of state[d, n] * C[t, n], + D[d] * x[t, d]

computed here in float32, step by step.
"""

from __future__ import annotations

from typing import Any

__all__ = ["complete_mamba", "selective_scan", "state_update"]

_MIXER = "MambaMixer"


def complete_mamba(model: Any) -> None:
    """Make the Mamba layers of a module that vLLM has loaded run on CPU, if they do not already."""
    mixers = [module for module in model.modules() if type(module).__name__ == _MIXER]
    if not mixers:
        return
    import torch
    from vllm.model_executor.layers.mamba import mamba_mixer

    if hasattr(torch.ops._C, "selective_scan_fwd"):
        return
    mamba_mixer.selective_scan_fn = selective_scan
    mamba_mixer.selective_state_update = state_update
    for mixer in mixers:
        # With AVX512_BF16 the weights are packed for a kernel that this mixer does not call.
        plain = getattr(mixer.conv1d, "_cpu_unpacked_conv_weight", None)
        if plain is not None:
            mixer.conv1d.weight.data = plain.unsqueeze(1)


def _times(dt: Any, bias: Any, softplus: bool) -> Any:
    import torch

    dt = dt.float() if bias is None else dt.float() + bias.float()
    return torch.nn.functional.softplus(dt) if softplus else dt


def _step(state: Any, x: Any, dt: Any, a: Any, b: Any, c: Any) -> tuple[Any, Any]:
    """Return the next state and the output; the rows of a batch are independent.

    Shapes: state (rows, dim, states); x, dt (rows, dim); a (dim, states); b, c (rows, states).
    """
    state = state * (dt.unsqueeze(-1) * a).exp() + (dt * x).unsqueeze(-1) * b.unsqueeze(-2)
    return state, (state * c.unsqueeze(-2)).sum(-1)


def _finished(y: Any, x: Any, skip: Any, gate: Any) -> Any:
    import torch

    y = y if skip is None else y + skip.float() * x
    return y if gate is None else y * torch.nn.functional.silu(gate.float())


def selective_scan(
    u: Any,
    ssm_states: Any,
    delta: Any,
    A: Any,  # noqa: N803 - vLLM's names, by which it calls
    B: Any,  # noqa: N803
    C: Any,  # noqa: N803
    D: Any = None,  # noqa: N803
    z: Any = None,
    delta_bias: Any = None,
    delta_softplus: bool = False,
    *,
    query_start_loc: Any,
    cache_indices: Any,
    has_initial_state: Any = None,
    **_: Any,
) -> Any:
    """Compute prefills, as vLLM's `selective_scan_fn` does.

    Parameters
    ----------
    u, delta, z
        Inputs, time steps and gates of all sequences, concatenated, (dim, tokens).
    ssm_states
        One state per cache block, (blocks, dim, states); those of `cache_indices` are written.
    A, B, C, D, delta_bias
        (dim, states), twice (states, tokens), and twice (dim,).
    delta_softplus
        Whether the time steps are its argument.
    query_start_loc, cache_indices, has_initial_state
        Start of each sequence, and end of the last; the block of each; whether the block holds
        the state to continue from.

    Returns
    -------
    torch.Tensor
        (dim, tokens), in the type of `u`.
    """
    import torch

    x, dt = u.float().t(), _times(delta.t(), delta_bias, delta_softplus)
    b, c = (part.reshape(-1, part.shape[-1]).float().t() for part in (B, C))
    out, bounds = torch.empty_like(x), query_start_loc.tolist()
    for number, block in enumerate(cache_indices.reshape(-1).tolist()):
        goes_on = has_initial_state is not None and bool(has_initial_state[number])
        state = ssm_states[block].float() if goes_on else torch.zeros_like(A, dtype=torch.float)
        for t in range(bounds[number], bounds[number + 1]):
            state, out[t] = _step(state, x[t], dt[t], A, b[t], c[t])
        ssm_states[block] = state.to(ssm_states.dtype)
    return _finished(out, x, D, None if z is None else z.t()).t().to(u.dtype)


def state_update(
    state: Any,
    x: Any,
    dt: Any,
    A: Any,  # noqa: N803
    B: Any,  # noqa: N803
    C: Any,  # noqa: N803
    D: Any = None,  # noqa: N803
    dt_bias: Any = None,
    z: Any = None,
    dt_softplus: bool = False,
    *,
    state_batch_indices: Any,
    out: Any,
    **_: Any,
) -> None:
    """Compute one token of each sequence into `out`, as vLLM's `selective_state_update` does.

    Parameters
    ----------
    state
        One state per cache block, (blocks, dim, states); those of `state_batch_indices` are
        replaced.
    x, dt, z, out
        Inputs, time steps, gates and results, (sequences, dim).
    A, B, C, D, dt_bias
        (dim, states), twice (sequences, states), and twice (dim,).
    dt_softplus
        Whether the time steps are its argument.
    state_batch_indices
        The block of each sequence.
    """
    blocks, rows = state_batch_indices.reshape(-1).long(), x.float()
    times = _times(dt, dt_bias, dt_softplus)
    after, y = _step(state[blocks].float(), rows, times, A, B.float(), C.float())
    state[blocks] = after.to(state.dtype)
    out.copy_(_finished(y, rows, D, z))
