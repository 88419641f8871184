"""Separate digests of a model's weights, tokenizer, chat template and generation config.

Weights
    SHA-256 of the canonical list of ``[name, sha256]`` pairs, sorted by name, of the
    weight files in the folder itself (vLLM reads no subfolder), of ``config.json`` and of
    the model's Python modules. Of the weight files, only the kind that vLLM would load
    counts: safetensors, else ``.bin`` and ``.pt``, else GGUF, so that a second copy in
    another format does not make a different model.
Tokenizer
    The same over the tokenizer's files. ``tokenizer_config.json`` counts without its
    ``chat_template``, in canonical form.
Chat template
    Of the template's content, wherever it is stored: ``chat_template.jinja``, or the
    field of ``tokenizer_config.json``. A list of named templates is digested whole.
Generation config
    SHA-256 of ``generation_config.json``: another one is the same model with other defaults.
Joint
    What stamps of the first form call the digest of the weights: the same list with
    ``generation_config.json`` among the files. Old stamps stay comparable by it.

Digests of files are cached as long as size, times and inode stay the same. The key includes
ctime, which users cannot set, so that a changed byte is noticed even if mtime was restored. A
file changed less than `_SETTLED_NS` ago is not cached, because a second change within one tick
of the file system's clock would go unnoticed.
"""

from __future__ import annotations

import fnmatch
import hashlib
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from jupyter_detllm.core.canonical import Digest, Json, digest_of, sha256_hex
from jupyter_detllm.errors import CanonicalError, ModelError
from jupyter_detllm.models.cache import (
    Progress,
    cache_root,
    no_progress,
    read_json,
    sha256_files,
    write_json,
)
from jupyter_detllm.models.resolve import snapshot_folder

__all__ = ["FileDigest", "ModelDigests", "cached_digests", "model_digests"]

_SETTLED_NS = 100_000_000


def cached_digests(
    files: Mapping[str, Path], progress: Progress, use_cache: bool = True
) -> dict[str, tuple[int, str]]:
    """Return size and SHA-256 of each file, by the given names.

    Raises
    ------
    ModelError
        If a file cannot be read, or changes while it is hashed.
    """
    try:
        real = {name: path.resolve(strict=True) for name, path in files.items()}
        before = {name: _file_key(path) for name, path in real.items()}
        known = {name: _load_cache(before[name]) if use_cache else None for name in real}
        missing = [name for name, value in known.items() if value is None]
        fresh = _hash_files([real[name] for name in missing], progress)
        after = {name: _file_key(real[name]) for name in missing}
    except OSError as error:
        raise ModelError(f"a model file cannot be read: {error}") from error
    result = {name: (before[name].size, value) for name, value in known.items() if value}
    for name in missing:
        if before[name] != after[name]:
            raise ModelError(f"{real[name]} changed while it was hashed", fix="the same again")
        value = fresh[real[name]]
        result[name] = (before[name].size, value)
        _store_cache(before[name], value)
    return result


@dataclass(frozen=True, slots=True)
class _FileKey:
    """What must be unchanged for a cached digest to be valid; times in nanoseconds."""

    path: str
    size: int
    mtime: int
    ctime: int
    inode: int

    @property
    def entry(self) -> Path:
        """The file that caches this path's digest."""
        path = self.path.encode("utf-8", "surrogateescape")
        return cache_root() / "digests" / f"{hashlib.sha256(path).hexdigest()[:32]}.json"


def _file_key(path: Path) -> _FileKey:
    status = path.stat()
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return _FileKey(str(path), status.st_size, *times, status.st_ino)


def _hash_files(paths: list[Path], progress: Progress) -> dict[Path, str]:
    unique = list(dict.fromkeys(paths))
    total = sum(path.stat().st_size for path in unique)
    done, lock = 0, threading.Lock()

    def advance(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            progress("hashing", min(done / total, 1.0))

    return sha256_files(unique, advance if total else None)


def _load_cache(key: _FileKey) -> str | None:
    value = read_json(key.entry)
    if not isinstance(value, dict) or value.get("key") != asdict(key):
        return None
    digest = value.get("sha256")
    return digest if isinstance(digest, str) and len(digest) == 64 else None


def _store_cache(key: _FileKey, digest: str) -> None:
    if time.time_ns() - max(key.mtime, key.ctime) < _SETTLED_NS:
        return
    with suppress(OSError):  # a cache that cannot be written only costs time
        write_json(key.entry, {"key": asdict(key), "sha256": digest})


_WEIGHT_KINDS = (("*.safetensors",), ("*.bin", "*.pt"), ("*.gguf",))
# Files that trainers leave next to the weights; vLLM does not load them.
_NOT_WEIGHTS = (
    "optimizer.*", "rng_state*", "scaler.*", "scheduler.*", "training_args.*",
)  # fmt: skip
_WITH_WEIGHTS = ("config.json", "*.index.json", "*.py")
_GENERATION_CONFIG = "generation_config.json"
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
    """The parts of a model; None for a part it does not have.

    Attributes
    ----------
    weights, tokenizer, chat_template, generation_config
        See the module's docstring.
    joint
        The same; None where it equals `weights`.
    files
        Every file that was hashed, sorted by name.
    """

    weights: Digest
    tokenizer: Digest | None
    chat_template: Digest | None
    files: tuple[FileDigest, ...]
    generation_config: Digest | None = None
    joint: Digest | None = None


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
        Whether to take digests of unchanged files from the user's cache.

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
    defaults = _matching(names, (_GENERATION_CONFIG,))
    found = cached_digests(
        {name: folder / name for name in {*weights, *tokenizer, *defaults}},
        progress or no_progress,
        cached,
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
        generation_config=Digest("sha256", hashes[_GENERATION_CONFIG]) if defaults else None,
        joint=_listed({n: hashes[n] for n in (*weights, *defaults)}) if defaults else None,
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
    value = read_json(folder / _CONFIG)
    return value if isinstance(value, dict) else None


def _tokenizer_digest(hashes: Mapping[str, str], config: dict[str, Json] | None) -> Digest | None:
    if not hashes:
        return None
    parts = dict(hashes)
    if config is not None:
        rest = {key: value for key, value in config.items() if key != "chat_template"}
        try:
            parts[_CONFIG] = digest_of(rest).hex
        except CanonicalError:  # then its bytes are used, including the template
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
