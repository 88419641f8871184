"""Name and digests of a model on this machine, as stamps hold them."""

from __future__ import annotations

from jupyter_detllm.core.canonical import Digest
from jupyter_detllm.core.stamp import ModelIdentity
from jupyter_detllm.models.digests import model_digests
from jupyter_detllm.models.resolve import ResolvedModel

__all__ = ["identity_of"]


def identity_of(model: ResolvedModel, adapter: Digest | None = None) -> ModelIdentity:
    """Return the identity of a model with an adapter; digests of unchanged files are cached.

    Raises
    ------
    ModelError
        If its files cannot be read.
    """
    found = model_digests(model.path_or_id, revision=model.revision)
    return ModelIdentity(
        model.display,
        found.weights,
        found.tokenizer,
        found.chat_template,
        adapter,
        found.generation_config,
        found.joint,
    )
