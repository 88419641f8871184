"""Options of the fake engine: what drifts, when it fails, how slow it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from jupyter_detllm.core.canonical import Digest
from jupyter_detllm.core.fields import FIELDS, Role, spec_of
from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.errors import UsageError
from jupyter_detllm.models.adapter import read_adapter

__all__ = ["BREAKS", "ENGINE_DEFAULTS", "KERNELS", "FakeOptions"]

ENGINE_DEFAULTS: Mapping[str, tuple[str, FieldValue]] = {
    "dtype": ("engine.dtype", "bfloat16"),
    "quantization": ("engine.quantization", None),
    "kv_cache_dtype": ("engine.kv_cache_dtype", "auto"),
    "attention_backend": ("engine.attention_backend", "FAKE_ATTN"),
    "tensor_parallel_size": ("engine.tensor_parallel", 1),
    "max_num_seqs": ("engine.max_num_seqs", 256),
    "max_num_batched_tokens": ("engine.max_num_batched_tokens", 4096),
    "max_model_len": ("engine.max_model_len", 4096),
    "block_size": ("engine.block_size", 16),
    "enable_prefix_caching": ("engine.prefix_cache", False),
    "enable_chunked_prefill": ("engine.chunked_prefill", True),
    "enforce_eager": ("engine.compile", True),
}
"""Option as vLLM spells it: its fingerprint field and default. Any other value drifts."""


BREAKS = ("batch", "order", "bit", "completions", "repeat")
"""In which way the level `invariant` may be broken; see `FakeEngine`."""

KERNELS = ("attention", "linear")
"""The kernels that the fake engine pretends to have."""


@dataclass(frozen=True, slots=True)
class FakeOptions:
    """Options read from `EngineSpec.options`; see `FakeEngine` for their meaning."""

    weights: str = ""
    tokenizer: str = ""
    chat_template: str = ""
    lora: str = ""
    drift_field: str = ""
    drift_salt: str = ""
    drift_position: int = -1
    drift_evidence: bool = False
    batch_sensitive: bool = False
    broken_invariance: str = ""
    kernel_check: bool = True
    broken_kernel: str = ""
    kernel_tokens: int = 0
    kernel_sequences: int = 0
    evidence: bool = True
    delay_ms: int = 0
    start_delay_ms: int = 0
    fail_at: int = -1
    fail_start: bool = False
    engine: tuple[tuple[str, FieldValue], ...] = ()

    @classmethod
    def read(cls, options: Mapping[str, FieldValue]) -> FakeOptions:
        """Return typed options; text as from a command line is understood.

        Raises
        ------
        UsageError
            For an option that does not exist, naming the nearest, or of a wrong type.
        """
        own = {f.name: f.default for f in fields(cls) if f.name != "engine"}
        values: dict[str, FieldValue] = {}
        engine: dict[str, FieldValue] = {}
        for spelled, value in options.items():
            name = spelled.removeprefix("--").replace("-", "_")
            if name in own:
                values[name] = _typed(name, value, own[name])
            elif name in ENGINE_DEFAULTS:
                engine[name] = _typed(name, value, ENGINE_DEFAULTS[name][1])
            else:
                raise _unknown(spelled, [*own, *ENGINE_DEFAULTS])
        read = cls(**values, engine=tuple(sorted(engine.items())))  # type: ignore[arg-type]
        if read.broken_invariance not in {"", *BREAKS}:
            raise UsageError(
                f"broken_invariance is {read.broken_invariance!r:.40}", expected=", ".join(BREAKS)
            )
        if read.broken_kernel not in {"", *KERNELS}:
            raise UsageError(
                f"broken_kernel is {read.broken_kernel!r:.40}", expected=", ".join(KERNELS)
            )
        read.drifted_field()
        return read

    def setting(self, name: str) -> FieldValue:
        """Return the value in force of an option that has a fingerprint field."""
        return dict(self.engine).get(name, ENGINE_DEFAULTS[name][1])

    def drifted_field(self) -> tuple[str, str] | None:
        """Return name and value of the simulated fingerprint field."""
        if not self.drift_field:
            return None
        name, _, value = self.drift_field.partition("=")
        spec = spec_of(name)
        if spec is None:
            raise _unknown(name, [row.name for row in FIELDS], "fingerprint field")
        if spec.role is Role.IDENTITY:
            raise UsageError(
                f"{name} is the model's identity, not a field that drifts",
                fix=f"{name.split('.')[1]}=OTHER",
            )
        return name, value or "drifted"

    @property
    def adapter(self) -> Digest | None:
        """Digest of the adapter in the folder `lora`; None without one."""
        return read_adapter(self.lora).digest if self.lora else None

    def causes(self) -> list[str]:
        """Return what makes this engine differ from one without options, one text each."""
        out = [
            f"{name}={value}"
            for name, value in self.engine
            if name != "max_model_len" and value != ENGINE_DEFAULTS[name][1]
        ]
        drifted = self.drifted_field()
        if drifted is not None:
            spec = spec_of(drifted[0])
            if spec is not None and spec.role is Role.NUMERICS:
                out.append("=".join(drifted))
        if self.adapter is not None:
            out.append(f"adapter={self.adapter}")
        if self.drift_salt:
            out.append(f"drift_salt={self.drift_salt}")
        if not out and (self.drift_position >= 0 or self.drift_evidence):
            out.append("drift")
        return out


def _typed(name: str, value: FieldValue, default: object) -> FieldValue:
    if default is None:
        return None if value in (None, "none", "None") else str(value)
    if isinstance(default, bool):
        known = {"true": True, "false": False, "1": True, "0": False}
        found = known.get(str(value).lower())
        if found is not None:
            return found
        raise UsageError(f"{name} is {value!r:.40}", expected="true or false")
    if isinstance(default, int):
        try:
            number = int(str(value))
        except ValueError:
            raise UsageError(f"{name} is {value!r:.40}", expected="an integer") from None
        if number < min(default, 0):
            raise UsageError(f"{name} is {number}", expected="not less than 0")
        return number
    return str(value)


def _unknown(name: str, known: list[str], what: str = "option of the fake engine") -> UsageError:
    from difflib import get_close_matches

    nearest = get_close_matches(name.replace("-", "_"), known, 1, 0.4)
    return UsageError(f"{name[:60]!r} is no {what}", fix=nearest[0] if nearest else None)
