"""A LoRA adapter on this machine: its files, its rank and its digest.

The digest is computed like that of a model's weights: SHA-256 of the canonical list of
``[name, sha256]`` pairs of ``adapter_config.json`` and ``adapter_model.safetensors``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jupyter_detllm.core.canonical import Digest, digest_of
from jupyter_detllm.errors import ModelError
from jupyter_detllm.models.cache import no_progress, read_json
from jupyter_detllm.models.digests import cached_digests

__all__ = ["ADAPTER_OPTION", "Adapter", "is_adapter", "read_adapter"]

ADAPTER_OPTION = "lora"
"""The engine option for an adapter's folder; vLLM has no option of that name."""

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_EXPECTED = f"a folder with {_CONFIG} and {_WEIGHTS}, as peft saves it"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter.

    Attributes
    ----------
    folder
        Absolute path; never stored.
    rank
        Rank of its matrices, from its config.
    digest
        Digest of config and weights.
    """

    folder: Path
    rank: int
    digest: Digest


def is_adapter(folder: str | Path) -> bool:
    """Return whether a folder holds an adapter."""
    return (Path(folder).expanduser() / _CONFIG).is_file()


def read_adapter(folder: str | Path) -> Adapter:
    """Read config and digest of the adapter in `folder`.

    Raises
    ------
    ModelError
        For a folder that is not an adapter, pickled weights (which are code), or a config
        without a rank.
    """
    path = Path(folder).expanduser()
    for name in (_CONFIG, _WEIGHTS):
        if not (path / name).is_file():
            raise ModelError(f"the adapter {str(folder)!r:.80} has no {name}", expected=_EXPECTED)
    path = path.resolve()
    found = cached_digests({name: path / name for name in (_CONFIG, _WEIGHTS)}, no_progress)
    digest = digest_of([[name, found[name][1]] for name in sorted(found)])
    return Adapter(path, _rank(path / _CONFIG), digest)


def _rank(path: Path) -> int:
    config = read_json(path)
    rank = config.get("r") if isinstance(config, Mapping) else None
    if type(rank) is not int or rank < 1:
        raise ModelError(f"the adapter's {_CONFIG} gives no rank", expected='"r": 16, for one')
    return rank
