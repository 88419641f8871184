"""The model's identity, from digests that `jupyter_detllm.models` computed."""

from __future__ import annotations

from typing import Protocol

from jupyter_detllm.core.canonical import Digest
from jupyter_detllm.core.fingerprint import FieldValue

__all__ = ["FIELD_NAMES", "ModelParts", "collect"]

FIELD_NAMES = (
    "model.weights",
    "model.tokenizer",
    "model.chat_template",
    "model.adapter",
    "model.name",
    "model.revision",
    "model.architecture",
    "model.generation_config",
    "model.quantization",
)


class ModelParts(Protocol):
    """Anything with the digests of a model; None where a part does not exist."""

    @property
    def weights(self) -> Digest | None:
        """Digest of weight and config files."""
        ...

    @property
    def tokenizer(self) -> Digest | None:
        """Digest of the tokenizer files."""
        ...

    @property
    def chat_template(self) -> Digest | None:
        """Digest of the chat template."""
        ...


def collect(
    parts: ModelParts,
    *,
    adapter: Digest | None = None,
    name: str | None = None,
    revision: str | None = None,
    architecture: str | None = None,
    generation_config: str | None = None,
    quantization: str | None = None,
) -> dict[str, FieldValue]:
    """Return the model fields; what is unknown is left out.

    `adapter` is the digest of a LoRA adapter in effect. `name` is stored as given: pass a
    hub id or ``demo``, or a folder's own name without the path that leads to it.
    """
    digests = (parts.weights, parts.tokenizer, parts.chat_template, adapter)
    texts = [None if digest is None else str(digest) for digest in digests]
    values = [*texts, name, revision, architecture, generation_config, quantization]
    return {
        field: value for field, value in zip(FIELD_NAMES, values, strict=True) if value is not None
    }
