"""Per-token evidence: logprobs of the chosen token and of its runner-up."""

from __future__ import annotations

import base64
import binascii
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from jupyter_detllm.core.canonical import Json
from jupyter_detllm.errors import StampError

__all__ = ["EVIDENCE_K", "MAX_EVIDENCE_TOKENS", "NEAR_TIE", "MarginClass", "TokenEvidence"]

EVIDENCE_K = 2
"""Logprobs requested per token; constant, since the values depend on it."""

MAX_K = 1024

MAX_EVIDENCE_TOKENS = 4096
"""Above this number of tokens only the smallest margins are kept."""

NEAR_TIE = 0.5
"""Largest margin (nats) at which a bfloat16 token was seen to flip with batch or kernel."""


class MarginClass(StrEnum):
    """How close the chosen token was to its runner-up."""

    TIE = "tie"
    NEAR_TIE = "near-tie"
    CONFIDENT = "confident"

    @classmethod
    def of(cls, margin: float) -> MarginClass:
        """Classify a margin in nats."""
        if margin == 0.0:
            return cls.TIE
        return cls.NEAR_TIE if abs(margin) <= NEAR_TIE else cls.CONFIDENT


@dataclass(frozen=True, slots=True)
class TokenEvidence:
    """Logprobs (natural logarithm) of chosen and runner-up token.

    The runner-up is the most likely token other than the chosen one; its id is -1 if the
    engine reported none.

    Attributes
    ----------
    tokens
        Number of generated tokens.
    positions
        The positions kept, ascending; `None` when all are.
    chosen, runner_up
        float32 values, one per kept position.
    runner_up_ids
        Token ids, one per kept position.
    k
        Logprobs requested from the engine.
    """

    tokens: int
    chosen: tuple[float, ...]
    runner_up: tuple[float, ...]
    runner_up_ids: tuple[int, ...]
    positions: tuple[int, ...] | None = None
    k: int = EVIDENCE_K

    def __post_init__(self) -> None:
        """Check that the arrays have matching lengths."""
        kept = self.tokens if self.positions is None else len(self.positions)
        lengths = {len(self.chosen), len(self.runner_up), len(self.runner_up_ids), kept}
        if len(lengths) != 1:
            raise StampError("evidence arrays differ in length")

    def index_of(self, position: int) -> int | None:
        """Return the index at which `position` is kept, or None."""
        if self.positions is None:
            return position if 0 <= position < self.tokens else None
        try:
            return self.positions.index(position)
        except ValueError:
            return None

    def rows(self) -> Iterator[tuple[int, float, float, int]]:
        """Yield position, chosen, runner-up and the runner-up's id of what is kept."""
        positions = range(self.tokens) if self.positions is None else self.positions
        return zip(positions, self.chosen, self.runner_up, self.runner_up_ids, strict=True)

    def margin(self, position: int) -> float | None:
        """Return chosen minus runner-up at `position` in nats, or None if not kept."""
        index = self.index_of(position)
        if index is None or self.runner_up_ids[index] < 0:
            return None
        margin = self.chosen[index] - self.runner_up[index]
        return None if math.isnan(margin) else margin

    def smallest(self, limit: int = MAX_EVIDENCE_TOKENS) -> TokenEvidence:
        """Return this evidence, limited to the `limit` smallest margins."""
        if self.positions is not None or self.tokens <= limit:
            return self
        gaps = [abs(c - r) for c, r in zip(self.chosen, self.runner_up, strict=True)]
        order = sorted(range(self.tokens), key=lambda i: (math.isnan(gaps[i]), gaps[i], i))
        keep = sorted(order[:limit])
        return TokenEvidence(
            self.tokens,
            tuple(self.chosen[i] for i in keep),
            tuple(self.runner_up[i] for i in keep),
            tuple(self.runner_up_ids[i] for i in keep),
            tuple(keep),
            self.k,
        )

    def to_json(self) -> dict[str, Json]:
        """Return the stored form: base64 of little-endian float32 and int32."""
        out: dict[str, Json] = {
            "k": self.k,
            "tokens": self.tokens,
            "chosen": _pack("f", self.chosen),
            "runner_up": _pack("f", self.runner_up),
            "runner_up_ids": _pack("i", self.runner_up_ids),
        }
        if self.positions is not None:
            out["positions"] = _pack("i", self.positions)
        return out

    @classmethod
    def from_json(cls, data: object, tokens: int) -> TokenEvidence:
        """Read the stored form of evidence about `tokens` generated tokens.

        Raises
        ------
        StampError
            If a length does not match; raised before anything is allocated.
        """
        if not isinstance(data, Mapping):
            raise StampError("evidence is not an object")
        k = data.get("k")
        if data.get("tokens") != tokens or type(k) is not int or not 1 <= k <= MAX_K:
            raise StampError("evidence does not fit the number of generated tokens")
        positions: tuple[int, ...] | None = None
        kept = tokens
        if "positions" in data:
            positions = tuple(int(p) for p in _unpack("i", data["positions"], None, tokens))
            kept = len(positions)
            if list(positions) != sorted({p for p in positions if 0 <= p < tokens}):
                raise StampError("evidence positions are not ascending positions of tokens")
        return cls(
            tokens,
            tuple(_unpack("f", data.get("chosen"), kept, kept)),
            tuple(_unpack("f", data.get("runner_up"), kept, kept)),
            tuple(int(i) for i in _unpack("i", data.get("runner_up_ids"), kept, kept)),
            positions,
            k,
        )


def _pack(code: str, values: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}{code}", *values)).decode("ascii")


def _unpack(code: str, text: object, count: int | None, most: int) -> tuple[float, ...]:
    """Decode base64 of `count` (or at most `most`) 4-byte values."""
    if not isinstance(text, str) or len(text) > 4 * ((4 * most + 2) // 3 + 1):
        raise StampError("an evidence array is missing or too long")
    try:
        raw = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise StampError("an evidence array is not base64") from None
    if len(raw) % 4 or (count is not None and len(raw) != 4 * count):
        raise StampError("an evidence array does not fit the number of generated tokens")
    form = f"<{len(raw) // 4}{code}"
    values = struct.unpack(form, raw)
    if struct.pack(form, *values) != raw:
        # Only a signalling NaN changes when it passes through a Python float.
        raise StampError("an evidence array holds a signalling NaN")
    return values
