"""Offsets taken from the tokens' bytes against vLLM's own incremental decoding."""

from __future__ import annotations

import random

import pytest

from jupyter_detllm.engines.evidence import byte_offsets, token_width
from jupyter_detllm.engines.vllm.engine import Detokenizer
from jupyter_detllm.models import resolve_model

pytestmark = pytest.mark.real
TEXTS = (
    "Hello there, Jürgen!\n\n  x  y",
    "日本語のテキスト 🙂👍🏽 done.",
    "naïve café — “quoted”",
    "العربية कखग",
)
END = 2


def test_both_ways_give_the_same_offsets() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("demo").path_or_id)
    detokenizer = Detokenizer(tokenizer)
    stream = random.Random(0)
    for case in range(200):
        if case % 2:
            ids = [stream.randrange(len(tokenizer)) for _ in range(stream.randrange(1, 40))]
        else:
            ids = tokenizer(stream.choice(TEXTS) + stream.choice(TEXTS)).input_ids
            ids = ids[stream.randrange(len(ids)) :]  # may begin inside a character
        ids += [END] * stream.randrange(2)
        deltas = detokenizer.deltas([1, 50], ids)
        widths = [detokenizer._read(token, token_width) for token in ids]
        text = "".join(deltas)
        assert detokenizer.offsets([1, 50], ids, text) == byte_offsets(deltas, widths, text)
