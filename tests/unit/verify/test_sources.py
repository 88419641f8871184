from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_detllm.errors import NotebookError
from jupyter_detllm.verify.service import check_paths
from jupyter_detllm.verify.sources import JsonStyle, read_file
from tests.builders import promoted, stamped_cell

BOOK = promoted(stamped_cell())
TEXT = json.dumps(BOOK, indent=1) + "\n"


def _deep() -> bytes:
    return b'{"nbformat": 4, "cells": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "blank": (b" \n\n", "is empty"),
    "text": (b"not json at all", "is not JSON: line 1, column 1"),
    "truncated": (TEXT[: len(TEXT) // 2].encode(), "ends too early: line"),
    "cut-in-string": (b'{"cells": ["abc', "ends too early: line 1, column"),
    "binary": (b"\x89PNG\r\n\x1a\n\x00\x00", "not UTF-8 text: byte 0x89 at offset 0"),
    "utf-16": (TEXT.encode("utf-16"), "not UTF-8 text"),
    "latin-1": (b'{"a": "\xe9"}', "not UTF-8 text: byte 0xe9 at offset 7"),
    "deep": (_deep(), "nested too deeply"),
    "huge-integer": (b'{"nbformat": ' + b"9" * 5000 + b"}", "huge integer"),
    "nan": (b'{"nbformat": 4, "x": NaN}', "NaN, which is not JSON"),
    "infinity": (b'{"nbformat": 4, "x": -Infinity}', "-Infinity, which is not JSON"),
    "twice": (b'{"nbformat": 4, "nbformat": 4}', "the key 'nbformat' twice"),
    "list": (b"[1, 2]", "is JSON, but not a notebook"),
    "number": (b"4", "is JSON, but not a notebook"),
    "object": (b'{"a": 1}', "is JSON, but not a notebook"),
    "nbformat-3": (b'{"nbformat": 3, "worksheets": []}', "nbformat 3"),
    "nbformat-5": (b'{"nbformat": 5, "cells": []}', "nbformat 5"),
    "nbformat-text": (b'{"nbformat": "4", "cells": []}', "nbformat"),
    "cells-object": (b'{"nbformat": 4, "cells": {}}', "not a notebook"),
    "cell-number": (b'{"nbformat": 4, "cells": [1]}', "cell 1 is not an object"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_content_is_one_line_and_the_file_stays(case: str, tmp_path: Path) -> None:
    raw, expected = BAD[case]
    path = tmp_path / "bad.ipynb"
    path.write_bytes(raw)
    report = check_paths([path])
    (problem,) = report.notebooks[0].problems
    assert expected in problem
    assert "\n" not in problem
    assert report.exit_code == 2
    assert path.read_bytes() == raw


def test_the_place_of_a_syntax_error_is_told(tmp_path: Path) -> None:
    path = tmp_path / "bad.ipynb"
    path.write_text('{\n "cells": [\n  nope\n ]\n}')
    with pytest.raises(NotebookError, match="line 3, column 3"):
        read_file(path)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _dangling(path: Path) -> None:
    path.symlink_to(path.with_name("gone.ipynb"))


def _loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Path.mkdir, "is a folder"),
        (_fifo, "not a regular file"),
        (_dangling, "a link to a file that does not exist"),
        (_loop, "cannot be read: too many levels of symbolic links"),
        (lambda path: None, "there is no file"),
    ],
)
def test_what_is_no_file_is_one_line(
    make: Callable[[Path], Any], expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "nb.ipynb"
    make(path)
    with pytest.raises(NotebookError, match=expected):
        read_file(path)


def test_a_folder_is_answered_with_a_glob(tmp_path: Path) -> None:
    with pytest.raises(NotebookError, match=r"Try: jupyter detllm check .*\*\.ipynb"):
        read_file(tmp_path)


def test_a_path_with_a_null_byte_is_one_line() -> None:
    with pytest.raises(NotebookError, match="is not a path"):
        read_file("a\0b.ipynb")


def test_a_misspelt_name_is_answered_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "analysis.ipynb").write_text(TEXT)
    with pytest.raises(NotebookError, match=r"did you mean .*analysis\.ipynb\?$"):
        read_file(tmp_path / "anlysis.ipynb")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_an_unreadable_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "nb.ipynb"
    path.write_text(TEXT)
    path.chmod(0)
    with pytest.raises(NotebookError, match="cannot be read: permission denied"):
        read_file(path)


def test_a_link_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    path = tmp_path / "nb.ipynb"
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    link = tmp_path / "link.ipynb"
    link.symlink_to(path)
    file = read_file(link)
    assert file.data == BOOK
    assert file.style.dumps(file.data) == path.read_bytes()


STYLES = [
    {"indent": 1},
    {"indent": 2},
    {"indent": "\t"},
    {"indent": 4, "ensure_ascii": False},
    {"indent": 1, "ensure_ascii": True},
    {"indent": None},
    {"indent": None, "separators": (",", ":")},
]


@pytest.mark.parametrize("style", STYLES, ids=str)
@pytest.mark.parametrize("trailing", ["", "\n", "\n\n"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_every_usual_layout_is_written_back_byte_for_byte(
    style: dict[str, Any], trailing: str, newline: str
) -> None:
    book = promoted(stamped_cell("%%detgen\nWrite 俳句 — \x1b[31m 😀."))
    text = (json.dumps(book, **style) + trailing).replace("\n", newline)
    raw = text.encode()
    assert JsonStyle.of(raw).dumps(json.loads(raw)) == raw


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@settings(max_examples=60)
@given(st.dictionaries(st.text(), json_values), st.sampled_from(STYLES), st.booleans())
def test_what_is_written_reads_back_equal(
    value: dict[str, Any], style: dict[str, Any], crlf: bool
) -> None:
    raw = json.dumps(value, **style).replace("\n", "\r\n" if crlf else "\n").encode()
    assert json.loads(JsonStyle.of(raw).dumps(value)) == value


def test_a_lone_surrogate_is_written_as_it_was_read() -> None:
    raw = b'{\n "a": "\\ud800",\n "b": "\xe4\xbd\xa0"\n}\n'
    style = JsonStyle.of(raw)
    assert json.loads(style.dumps(json.loads(raw))) == json.loads(raw)
