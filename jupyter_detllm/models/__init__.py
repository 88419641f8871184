"""Models: find them, fetch and convert the demo model, digest their files."""

from __future__ import annotations

from jupyter_detllm.models.cache import CACHE_VARIABLE, cache_root
from jupyter_detllm.models.demo import DEMO_NAME, demo_folder, fetch_demo
from jupyter_detllm.models.digests import FileDigest, ModelDigests, model_digests
from jupyter_detllm.models.identity import identity_of
from jupyter_detllm.models.resolve import ResolvedModel, resolve_model

__all__ = [
    "CACHE_VARIABLE",
    "DEMO_NAME",
    "FileDigest",
    "ModelDigests",
    "ResolvedModel",
    "cache_root",
    "demo_folder",
    "fetch_demo",
    "identity_of",
    "model_digests",
    "resolve_model",
]
