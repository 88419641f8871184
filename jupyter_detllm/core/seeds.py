"""Derived seeds: each request has its own, whatever ran before it."""

from __future__ import annotations

from collections.abc import Sequence

from jupyter_detllm.core.canonical import Digest, canonical_bytes, sha256_hex

__all__ = ["MAX_SEED", "derive_seed", "next_try_seed", "occurrences", "prompt_digest"]

MAX_SEED = 2**63 - 1


def prompt_digest(token_ids: Sequence[int]) -> Digest:
    """Return the digest of a prompt's token ids."""
    return Digest("sha256", sha256_hex(canonical_bytes([int(t) for t in token_ids])))


def derive_seed(root: int, name: str, prompt: Digest, occurrence: int, completion: int) -> int:
    """Return the seed of one completion, 0 to 2**63 - 1.

    It is the first 63 bits of SHA-256 over the canonical list of root seed (decimal
    string), cell name or "", prompt token digest, how many times the prompt occurred
    earlier in the same cell, and completion index.
    """
    data = canonical_bytes([str(root), name, str(prompt), occurrence, completion])
    return int(sha256_hex(data)[:16], 16) >> 1


def next_try_seed(first: int, prompt: Digest, number: int) -> int:
    """Return the seed of a completion's try `number` (from 2), given that of its first try.

    It depends on nothing else, in particular not on the other completions. No cell can have
    the name used for the derivation.
    """
    return derive_seed(first, " try", prompt, number, 0)


def occurrences(digests: Sequence[Digest]) -> list[int]:
    """Return, per digest, how many equal ones precede it."""
    seen: dict[Digest, int] = {}
    out = []
    for digest in digests:
        out.append(seen.get(digest, 0))
        seen[digest] = out[-1] + 1
    return out
