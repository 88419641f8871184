from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_detllm.render.visible import clip, clip_left, quoted, token_text, visible, width

DANGEROUS = "\x1b\x07\x08\r\n\t\x00\x7f\x9b\u202e\u2066\u2028\ufeff\u200b"


@given(st.text())
def test_nothing_that_steers_a_terminal_gets_through(text: str) -> None:
    shown = visible(text)
    for char in shown:
        category = unicodedata.category(char)
        assert category not in ("Cc", "Cs", "Co", "Cn", "Zl", "Zp")
        assert category != "Cf" or char == "\u200d"


@given(st.lists(st.sampled_from(DANGEROUS), min_size=1).map("".join))
def test_dangerous_characters_become_ascii(text: str) -> None:
    assert visible(text).isascii()


@pytest.mark.parametrize(
    "text", ["plain", "池塘 蛙", "👨‍👩‍👧 ❤️", "naïve", "한국어", "עברית", "  a"]
)
def test_readable_text_stays(text: str) -> None:
    assert visible(text) == text


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"pond", "pond"),
        (" 池".encode(), " 池"),
        (b"\xe6", "<0xE6>"),
        (b"\xb1\xa0", "<0xB1><0xA0>"),
        (b"a\xf0\x9f", "a<0xF0><0x9F>"),
        ("é\n".encode(), "é\\n"),
        (b"\x1b[31m", "\\x1b[31m"),
        (b"", ""),
    ],
)
def test_tokens_are_readable(data: bytes, shown: str) -> None:
    assert token_text(data) == shown


@given(st.binary(max_size=40))
def test_any_bytes_are_shown(data: bytes) -> None:
    assert visible(token_text(data)) == token_text(data)


@given(st.text(max_size=300), st.integers(8, 60))
def test_clipped_text_fits(text: str, columns: int) -> None:
    for cut in (clip(text, columns), clip_left(text, columns)):
        assert width(cut) <= columns
        assert cut == text or "..." in cut


def test_wide_characters_take_two_columns() -> None:
    assert width("池塘a") == 5
    assert clip("池塘池塘池塘", 8) == "池塘..."
    assert clip_left("池塘池塘池塘", 8) == "...池塘"


def test_quotes_inside_are_escaped() -> None:
    assert quoted('say "hi"') == '"say \\"hi\\""'
