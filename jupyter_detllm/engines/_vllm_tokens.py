"""Where each token lies in the text, found by vLLM's own incremental decoding."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from jupyter_detllm.engines._vllm_evidence import (
    byte_offsets,
    has_byte_level_decoder,
    token_bytes,
    token_width,
    whole_offsets,
)

__all__ = ["Detokenizer"]


class Detokenizer:
    """Decode tokens one by one, as vLLM does while it generates."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        state = decoder.__getstate__() if decoder is not None else b""
        self._byte_level = has_byte_level_decoder(state)
        self._widths: dict[int, int | None] = {}
        self._parts: dict[int, bytes | None] = {}

    def deltas(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[str]:
        """Return the text that each token brings after this prompt."""
        from vllm import SamplingParams
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        request = SimpleNamespace(
            request_id="offsets",
            prompt_token_ids=list(prompt_ids),
            prompt_embeds=None,
            sampling_params=SamplingParams(),
        )
        decoder = IncrementalDetokenizer.from_new_request(self._tokenizer, request)
        out, length = [], 0
        for token in token_ids:
            decoder.update([token], False)
            text = decoder.output_text
            out.append(text[length:])
            length = len(text)
        return out

    def offsets(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], text: str
    ) -> tuple[int, ...]:
        """Return the byte of `text` at which each token starts."""
        whole = whole_offsets([self._bytes(token) for token in token_ids], text)
        if whole is not None:
            return whole
        widths = [self._width(token) for token in token_ids]
        return byte_offsets(self.deltas(prompt_ids, token_ids), widths, text)

    def _width(self, token: int) -> int | None:
        if token not in self._widths:
            self._widths[token] = token_width(
                self._piece(token), byte_level=self._byte_level, special=token in self._special
            )
        return self._widths[token]

    def _bytes(self, token: int) -> bytes | None:
        if token not in self._parts:
            self._parts[token] = token_bytes(
                self._piece(token), byte_level=self._byte_level, special=token in self._special
            )
        return self._parts[token]

    def _piece(self, token: int) -> str | None:
        piece = self._tokenizer.convert_ids_to_tokens(token)
        return piece if isinstance(piece, str) else None
