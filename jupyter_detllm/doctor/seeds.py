"""Which random streams a notebook's code seeds, and which it draws from."""

from __future__ import annotations

from jupyter_detllm.doctor.code import Code, Place, ends_in
from jupyter_detllm.doctor.options import uses_detllm

__all__ = ["STREAMS", "draws_in", "seeds_in"]

STREAMS = ("random", "numpy", "torch")

_SEEDS = {
    "random.seed": ("random",),
    "numpy.random.seed": ("numpy",),
    "torch.manual_seed": ("torch",),
    "torch.random.manual_seed": ("torch",),
    "torch.cuda.manual_seed_all": (),
}
_SEED_ALL = ("set_seed", "seed_everything", "enable_full_determinism")
_TORCH_DRAWS = frozenset(
    {
        *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
        *("multinomial", "bernoulli", "normal", "poisson"),
    }
)
_NO_DRAW = frozenset({"seed", "getstate", "setstate", "get_state", "set_state", "RandomState"})


def seeds_in(code: Code) -> dict[str, list[Place]]:
    """Return each stream that is seeded, with where."""
    found: dict[str, list[Place]] = {}
    for call in code.calls:
        streams = _SEEDS.get(call.name, STREAMS if ends_in(call.name, _SEED_ALL) else ())
        for stream in streams:
            found.setdefault(stream, []).append(call.place)
    setup = uses_detllm(code)
    for stream in STREAMS if setup is not None else ():
        found.setdefault(stream, []).append(setup or Place(0, 0))
    return found


def draws_in(code: Code) -> dict[str, list[Place]]:
    """Return each stream that is drawn from without a generator of its own, with where."""
    found: dict[str, list[Place]] = {}
    for call in code.calls:
        head, _, last = call.name.rpartition(".")
        if head == "random" and last not in _NO_DRAW and last != "Random":
            found.setdefault("random", []).append(call.place)
        elif head == "numpy.random" and last not in _NO_DRAW and not _own_generator(last):
            found.setdefault("numpy", []).append(call.place)
        elif head == "torch" and last in _TORCH_DRAWS and not _has_generator(call.node):
            found.setdefault("torch", []).append(call.place)
    return found


def _own_generator(name: str) -> bool:
    return name in ("default_rng", "Generator", "SeedSequence", "PCG64", "MT19937", "Philox")


def _has_generator(node: object) -> bool:
    return any(item.arg == "generator" for item in getattr(node, "keywords", ()))
