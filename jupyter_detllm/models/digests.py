"""Digests of a model's weights, tokenizer and chat template, apart.

Weights
    SHA-256 of the canonical list of ``[name, sha256]`` pairs, sorted by name, of the
    weight files in the folder itself (vLLM reads no subfolder), of ``config.json``,
    ``generation_config.json`` and of Python modules the model brings. Of weight
    files only the kind that vLLM would load counts: safetensors, else ``.bin`` and
    ``.pt``, else GGUF, so that a second copy in another format is no other model.
Tokenizer
    The same over the tokenizer's files. ``tokenizer_config.json`` counts without its
    ``chat_template``, in canonical form.
Chat template
    Of the template's content, wherever it stands: ``chat_template.jinja``, or the
    field of ``tokenizer_config.json``. A list of named templates is digested whole.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from jupyter_detllm.core.canonical import Digest, Json, digest_of, sha256_hex
from jupyter_detllm.errors import CanonicalError, ModelError
from jupyter_detllm.models.digest_cache import cached_digests
from jupyter_detllm.models.hub import snapshot_folder
from jupyter_detllm.models.progress import Progress, no_progress

__all__ = ["FileDigest", "ModelDigests", "model_digests"]

_WEIGHT_KINDS = (("*.safetensors",), ("*.bin", "*.pt"), ("*.gguf",))
# What a trainer leaves beside the weights; vLLM loads none of it.
_NOT_WEIGHTS = (
    "optimizer.*", "rng_state*", "scaler.*", "scheduler.*", "training_args.*",
)  # fmt: skip
_WITH_WEIGHTS = ("config.json", "generation_config.json", "*.index.json", "*.py")
_TOKENIZER = (
    "added_tokens.json", "merges.txt", "*.model", "special_tokens_map.json", "*.tiktoken",
    "tekken.json", "tokenizer.json", "vocab.json", "vocab.txt",
)  # fmt: skip
_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True, slots=True)
class FileDigest:
    """One file that was hashed: its name in the model's folder, bytes and digest."""

    name: str
    size: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class ModelDigests:
    """What a model is made of; None for a part it does not have.

    Attributes
    ----------
    weights, tokenizer, chat_template
        See the module's docstring.
    files
        Every file of weights and tokenizer, sorted by name.
    """

    weights: Digest
    tokenizer: Digest | None
    chat_template: Digest | None
    files: tuple[FileDigest, ...]


def model_digests(
    path: str | Path,
    *,
    revision: str | None = None,
    progress: Progress | None = None,
    cached: bool = True,
) -> ModelDigests:
    """Digest a model that is on this machine.

    Parameters
    ----------
    path
        A folder, or a Hugging Face id whose files are in the local cache.
    revision
        Of a Hugging Face id: branch, tag or commit.
    progress
        Called with ``hashing`` and the fraction of bytes done.
    cached
        Whether digests of unchanged files are taken from the user's cache.

    Raises
    ------
    ModelError
        If there is no such folder, it holds no weights, or a file cannot be read.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        folder = snapshot_folder(str(path), revision)
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    weights = _weight_names(names)
    if not weights:
        raise ModelError(
            f"no weights in {folder}", expected="safetensors, .bin, .pt or .gguf files"
        )
    weights = sorted({*weights, *_matching(names, _WITH_WEIGHTS)})
    tokenizer = _matching(names, (*_TOKENIZER, _CONFIG))
    found = cached_digests(
        {name: folder / name for name in {*weights, *tokenizer}}, progress or no_progress, cached
    )
    config = _tokenizer_config(folder) if _CONFIG in tokenizer else None
    files = tuple(
        FileDigest(name, size, Digest("sha256", value))
        for name, (size, value) in sorted(found.items())
    )
    hashes = {file.name: file.digest.hex for file in files}
    return ModelDigests(
        weights=_listed({name: hashes[name] for name in weights}),
        tokenizer=_tokenizer_digest({name: hashes[name] for name in tokenizer}, config),
        chat_template=_template_digest(folder, config),
        files=files,
    )


def _matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    return [n for n in names if any(fnmatch.fnmatchcase(n, pattern) for pattern in patterns)]


def _weight_names(names: list[str]) -> list[str]:
    candidates = [name for name in names if not _matching([name], _NOT_WEIGHTS)]
    kinds = (_matching(candidates, patterns) for patterns in _WEIGHT_KINDS)
    return next((found for found in kinds if found), [])


def _listed(hashes: Mapping[str, str]) -> Digest:
    return digest_of([[name, value] for name, value in sorted(hashes.items())])


def _tokenizer_config(folder: Path) -> dict[str, Json] | None:
    try:
        value = json.loads((folder / _CONFIG).read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _tokenizer_digest(hashes: Mapping[str, str], config: dict[str, Json] | None) -> Digest | None:
    if not hashes:
        return None
    parts = dict(hashes)
    if config is not None:
        rest = {key: value for key, value in config.items() if key != "chat_template"}
        try:
            parts[_CONFIG] = digest_of(rest).hex
        except CanonicalError:  # then its bytes stand for it, template included
            parts[_CONFIG] = hashes[_CONFIG]
    return _listed(parts)


def _template_digest(folder: Path, config: dict[str, Json] | None) -> Digest | None:
    try:
        content: Json = (folder / _TEMPLATE).read_bytes().decode()
    except FileNotFoundError:
        content = None if config is None else config.get("chat_template")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{folder / _TEMPLATE} cannot be read as UTF-8 text") from error
    if content is None:
        return None
    if isinstance(content, str):
        return Digest("sha256", sha256_hex(content.encode("utf-8", "surrogatepass")))
    return digest_of(content)
