from __future__ import annotations

import struct
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_detllm.core.generation import TokenEvidence
from jupyter_detllm.engines.evidence import (
    byte_alphabet,
    byte_offsets,
    evidence_of,
    has_byte_level_decoder,
    token_bytes,
    token_width,
    whole_offsets,
)
from jupyter_detllm.errors import EngineError


def f32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def as_dicts(rows: list[list[tuple[int, float]]]) -> list[dict[int, SimpleNamespace]]:
    return [{t: SimpleNamespace(logprob=v) for t, v in row} for row in rows]


def as_flat(rows: list[list[tuple[int, float]]]) -> SimpleNamespace:
    starts, ends, ids, values = [], [], [], []
    for row in rows:
        starts.append(len(ids))
        ids += [t for t, _ in row]
        values += [v for _, v in row]
        ends.append(len(ids))
    return SimpleNamespace(start_indices=starts, end_indices=ends, token_ids=ids, logprobs=values)


ROWS = [
    [(5, -0.25), (5, -0.25), (9, -2.0)],  # the chosen is the best
    [(8, -3.0), (4, -0.5), (6, -1.0)],  # the chosen is neither of the two best
    [(6, -0.75), (4, -0.75), (6, -0.75)],  # an exact tie, chosen second
]


@pytest.mark.parametrize("form", [as_dicts, as_flat])
def test_chosen_and_runner_up(form) -> None:
    found = evidence_of((5, 8, 6), form(ROWS))
    assert found.chosen == (-0.25, -3.0, -0.75)
    assert found.runner_up == (-2.0, -0.5, -0.75)
    assert found.runner_up_ids == (9, 4, 4)


def test_a_token_alone_has_no_runner_up() -> None:
    found = evidence_of((5,), as_dicts([[(5, 0.0)]]))
    assert found.runner_up_ids == (-1,)
    assert found.margin(0) is None


@pytest.mark.parametrize("ids", [(7,), (5, 8, 6, 1)])
def test_a_missing_logprob_is_an_error(ids: tuple[int, ...]) -> None:
    with pytest.raises(EngineError):
        evidence_of(ids, as_flat(ROWS))


def test_logprobs_past_a_stop_string_are_left_out() -> None:
    assert evidence_of((5,), as_flat(ROWS)).chosen == (-0.25,)


@given(st.lists(st.floats(width=32, max_value=0.0, allow_nan=False), min_size=1, max_size=40))
def test_float32_values_survive_bit_for_bit(values: list[float]) -> None:
    rows = [[(1, value), (2, f32(value - 1.0))] for value in values]
    found = evidence_of([1] * len(values), as_flat(rows))
    stored = TokenEvidence.from_json(found.to_json(), len(values))
    assert struct.pack(f"{len(values)}f", *stored.chosen) == struct.pack(f"{len(values)}f", *values)


@given(st.text(min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_offsets_of_any_bytes_cut_anywhere(text: str, random) -> None:
    data = text.encode("utf-8", "replace")
    text = data.decode()
    cuts = sorted({0, *(random.randrange(len(data) + 1) for _ in range(8)), len(data)})
    widths = [b - a for a, b in pairwise(cuts)]
    # What an incremental decoder does: nothing appears until all bytes make characters.
    deltas, shown = [], 0
    for end in cuts[1:]:
        try:
            now = data[shown:end].decode()
        except UnicodeDecodeError:
            now = ""
        shown = end if now else shown
        deltas.append(now)
    assert byte_offsets(deltas, widths, text) == tuple(cuts[:-1])
    parts: list[bytes | None] = [data[a:b] for a, b in pairwise(cuts)]
    assert whole_offsets(parts, text) == tuple(cuts[:-1])
    assert whole_offsets([*parts, None], text) is None
    assert whole_offsets([*parts, b"x"], text) is None


def test_whole_offsets_of_special_tokens_and_of_a_text_that_was_cut() -> None:
    assert whole_offsets([b"", b"Hi", b""], "Hi") == (0, 0, 2)
    assert whole_offsets([], "") == ()
    assert whole_offsets([b"one", b" STOP"], "one") is None
    assert whole_offsets([b"a", "é".encode()[:1]], "a") is None


def test_bytes_of_pieces() -> None:
    assert token_bytes("Ġcaf\u00c3\u00a9", byte_level=True, special=False) == " café".encode()
    assert token_bytes("a b", byte_level=True, special=False) is None  # a token added as text
    assert token_bytes("\u2581a", byte_level=False, special=False) == b" a"
    assert token_bytes("<0xE2>", byte_level=False, special=False) == b"\xe2"
    assert token_bytes("<|end|>", byte_level=True, special=True) == b""
    assert token_bytes(None, byte_level=True, special=False) is None
    assert sorted(byte_alphabet().values()) == list(range(256))


def test_special_tokens_take_no_bytes() -> None:
    assert byte_offsets(["", "Hi", ""], [0, 2, 0], "Hi") == (0, 0, 2)


def test_a_stop_string_clamps_offsets() -> None:
    assert byte_offsets(["one", " STOP", " two"], [3, 5, 4], "one") == (0, 3, 3)


def test_an_unfinished_character_at_the_end_is_not_in_the_text() -> None:
    assert byte_offsets(["a", "", ""], [1, 2, 1], "a") == (0, 1, 1)


def test_replacement_characters_keep_offsets_in_order() -> None:
    # Two lone bytes became two replacement characters, three bytes each.
    assert byte_offsets(["", "\ufffd\ufffd", "x"], [1, 1, 1], "\ufffd\ufffdx") == (0, 1, 6)
    assert byte_offsets(["", "ab"], [None, None], "ab") == (0, 0)


@pytest.mark.parametrize(
    ("piece", "byte_level", "special", "width"),
    [
        ("ĠðŁ", True, False, 3),
        ("<0xE4>", False, False, 1),
        ("\u2581Hello", False, False, 6),
        ("日", False, False, 3),
        ("<|im_end|>", True, True, 0),
        (None, True, False, None),
    ],
)
def test_widths(piece: str | None, byte_level: bool, special: bool, width: int | None) -> None:
    assert token_width(piece, byte_level=byte_level, special=special) == width


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (b'{"type":"ByteLevel"}', True),
        (b'{"type":"Sequence","decoders":[{"type":"Fuse"},{"type":"ByteLevel"}]}', True),
        (b'{"type":"Sequence","decoders":[{"type":"ByteFallback"},{"type":"Fuse"}]}', False),
        (b"", False),
        (b"null", False),
    ],
)
def test_byte_level_is_read_from_the_decoder(state: bytes, expected: bool) -> None:
    assert has_byte_level_decoder(state) is expected
