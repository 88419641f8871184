"""Vocabulary, tokenizer, chat template and grammar of the fake engine."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from functools import lru_cache

from jupyter_detllm.core.generation import Message
from jupyter_detllm.errors import RequestError

__all__ = ["EOS", "Tokenizer", "Unit", "sentence_slots"]

Unit = tuple[int, ...]
"""Token ids that are generated together: one word, or the bytes of an emoji."""

_SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
EOS = 256
_FIRST_WORD = EOS + len(_SPECIAL)

# One tuple per place in a sentence. What is no word of the vocabulary (the emoji) is
# spelled in byte tokens, as real tokenizers do with rare characters.
_SENTENCE: tuple[tuple[str, ...], ...] = (
    ("The", "A", "This", "Every", "Our", "山の", "One"),
    (" quiet", " green", " narrow", " café", " distant", " old", " bright"),
    (" river", " 言葉", " garden", " letter", " naïve", " 🌊", " morning"),
    (" follows", " keeps", " finds", " remembers", " と", " carries", " hears"),
    (" the", " a", " its", " every", " another", " our", " no"),
    (" stone", " 山", " lantern", " field", " 🎉", " harbour", " window"),
    (".", "。", "!", ",", ";", "?", "…"),
)
_WORDS = tuple(
    dict.fromkeys(word for place in _SENTENCE for word in place if max(word) < "\U00010000")
)
_WORDS = (*_WORDS, "\n")
_PATTERN = re.compile("|".join(map(re.escape, sorted(_WORDS, key=len, reverse=True))))


class Tokenizer:
    """Reversible tokenizer: 256 byte tokens, 4 special tokens, a few dozen words.

    `shift` rotates the word ids, so that another shift is another tokenizer.
    Special tokens are never produced from text.
    """

    def __init__(self, shift: int = 0, template: str = "") -> None:
        count = len(_WORDS)
        self._ids = {word: _FIRST_WORD + (i + shift) % count for i, word in enumerate(_WORDS)}
        self._bytes = [bytes([i]) for i in range(256)] + [b""] * (len(_SPECIAL) + count)
        for word, token in self._ids.items():
            self._bytes[token] = word.encode()
        self._template = template

    @property
    def size(self) -> int:
        """Number of token ids."""
        return len(self._bytes)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of `text`; `RequestError` for a lone surrogate."""
        ids: list[int] = []
        end = 0
        try:
            for match in _PATTERN.finditer(text):
                ids += text[end : match.start()].encode()
                ids.append(self._ids[match[0]])
                end = match.end()
            ids += text[end:].encode()
        except UnicodeEncodeError:
            raise RequestError(
                "the prompt holds a lone surrogate", expected="Unicode text"
            ) from None
        return tuple(ids)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token stands for; none for a special token."""
        return self._bytes[token]

    def chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the token ids of a conversation, ready for the assistant's answer."""
        roles = {"system": EOS + 1, "user": EOS + 2, "assistant": EOS + 3}
        ids = list(self.encode(self._template))
        for message in messages:
            if message.role not in roles:
                raise RequestError(
                    f"a message has the role {message.role!r:.40}", expected=", ".join(roles)
                )
            ids += (roles[message.role], *self.encode("\n" + message.content), EOS)
        return (*ids, roles["assistant"], *self.encode("\n"))

    def decode(self, ids: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Return text and, per token, the byte offset at which it starts in the UTF-8 text."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text, offsets, written = "", [], 0
        for token in ids:
            pending = len(decoder.getstate()[0])
            offsets.append(written + pending)
            piece = decoder.decode(self._bytes[token])
            text += piece
            written += len(piece.encode())
        text += decoder.decode(b"", final=True)
        return text, tuple(_ascending(offsets, len(text.encode())))


def _ascending(offsets: Sequence[int], end: int) -> list[int]:
    """Keep offsets in order and inside the text where a broken character was replaced."""
    out, last = [], 0
    for offset in offsets:
        last = min(max(last, offset), end)
        out.append(last)
    return out


@lru_cache(maxsize=8)
def sentence_slots(shift: int) -> tuple[tuple[Unit, ...], ...]:
    """Return the units for each place of a sentence; the last is what follows it."""
    tokenizer = Tokenizer(shift)
    places = [tuple(tokenizer.encode(word) for word in place) for place in _SENTENCE]
    after: tuple[Unit, ...] = (tokenizer.encode("\n"), tokenizer.encode(" "), (EOS,))
    return (*places, after)
