"""How a model is quantised, read from its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Scheme", "scheme_of"]


@dataclass(frozen=True, slots=True)
class Scheme:
    """A quantisation; None, or "unknown" as `activations`, is what the config leaves open.

    Attributes
    ----------
    method
        As the config names it: ``awq``, ``gptq``, ``fp8``, ``compressed-tensors`` ...
    bits
        Bits of a weight.
    symmetric
        Whether zero is in the middle of a weight's range.
    activations
        ``none`` where they are not quantised, ``static``, ``dynamic`` or ``unknown``.
    """

    method: str
    bits: int | None
    symmetric: bool | None
    activations: str

    def __str__(self) -> str:
        shape = {True: "symmetric", False: "asymmetric", None: "symmetry unknown"}[self.symmetric]
        bits = "" if self.bits is None else f"{self.bits} bits, "
        acts = "not quantised" if self.activations == "none" else self.activations
        return f"{self.method}, {bits}{shape}, activations {acts}"


def scheme_of(config: Mapping[str, object]) -> Scheme | None:
    """Return the scheme that a ``config.json`` describes, None for a model without one."""
    found = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(found, Mapping):
        return None
    method = str(found.get("quant_method") or "unknown")[:40]
    groups = found.get("config_groups")
    if isinstance(groups, Mapping) and groups:
        return _of_groups(method, groups)
    return Scheme(method, _bits(found, method), _symmetric(found), _activations(found, method))


def _of_groups(method: str, groups: Mapping[str, object]) -> Scheme:
    """Read the groups of compressed-tensors; of several the loosest statement holds."""
    weights = [_part(group, "weights") for group in groups.values()]
    inputs = [_part(group, "input_activations") for group in groups.values()]
    bits = {part.get("num_bits") for part in weights}
    symmetric = {part.get("symmetric") for part in weights}
    one = next(iter(bits)) if len(bits) == 1 else None
    even = next(iter(symmetric)) if len(symmetric) == 1 else None
    kinds = {"none" if not part else _dynamic(part.get("dynamic")) for part in inputs}
    order = ("dynamic", "unknown", "static", "none")
    return Scheme(
        method,
        one if isinstance(one, int) else None,
        even if isinstance(even, bool) else None,
        next(kind for kind in order if kind in kinds),
    )


def _part(group: object, name: str) -> Mapping[str, object]:
    part = group.get(name) if isinstance(group, Mapping) else None
    return part if isinstance(part, Mapping) else {}


def _dynamic(value: object) -> str:
    if value in (True, "local"):
        return "dynamic"
    return "static" if value is False else "unknown"


def _bits(found: Mapping[str, object], method: str) -> int | None:
    for name in ("bits", "w_bit", "num_bits"):
        value = found.get(name)
        if isinstance(value, int):
            return value
    if found.get("load_in_4bit") is True:
        return 4
    return 8 if method == "fp8" or found.get("load_in_8bit") is True else None


def _symmetric(found: Mapping[str, object]) -> bool | None:
    if isinstance(found.get("sym"), bool):
        return bool(found["sym"])
    if isinstance(found.get("zero_point"), bool):  # AWQ: with a zero point it is asymmetric
        return not found["zero_point"]
    return None


def _activations(found: Mapping[str, object], method: str) -> str:
    scheme = found.get("activation_scheme")
    if scheme in ("static", "dynamic"):
        return str(scheme)
    if method in ("awq", "gptq", "gguf", "aqlm", "hqq") or found.get("load_in_4bit") is True:
        return "none"  # weight-only methods
    return "unknown"
