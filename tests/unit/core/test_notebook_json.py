"""Large values of other tools are not parsed, and are written back unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jupyter_detllm.core import notebook as outlines
from jupyter_detllm.core.notebook import Kept, outline
from jupyter_detllm.core.promotion import Update, promote, strip
from jupyter_detllm.errors import NotebookError
from jupyter_detllm.verify.service import check_paths
from jupyter_detllm.verify.sources import JsonStyle, read_file
from jupyter_detllm.verify.update import write_notebook
from tests.builders import cell, make_stamp, notebook, promoted, stamped_cell, with_actual

SOURCE = "%%detgen haiku\nWrite a haiku."
BIG = "A" * 5000


def output(data: Any, **metadata: Any) -> dict[str, Any]:
    return {"output_type": "display_data", "data": data, "metadata": metadata}


def resolved(value: Any) -> Any:
    """Return the value with every part that was left in the file read after all."""
    if isinstance(value, Kept):
        return json.loads(bytes(value.raw))
    if isinstance(value, dict):
        return {key: resolved(item) for key, item in value.items()}
    return [resolved(item) for item in value] if isinstance(value, list) else value


def kept_in(value: Any) -> int:
    if isinstance(value, (dict, list)):
        return sum(map(kept_in, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Kept)


# Where a value ends

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=40) | st.dictionaries(st.text(), inner, max_size=40),
    max_leaves=60,
)
styles = st.sampled_from(
    [
        {},
        {"indent": 1},
        {"indent": "\t"},
        {"separators": (",", ":")},
        {"ensure_ascii": False},
        {"separators": (" , ", "\r\n:\t")},
    ]
)


def accepted(text: str) -> bool:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=refuse, parse_int=str)
    except ValueError:
        return False
    return True


def kept(raw: bytes) -> bool:
    """Whether an array is left as it is, whatever its size, after a look at its syntax."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outlines, "SMALL", 0)
        try:
            found = outline(raw)
        except ValueError:
            return False
    assert bytes(found.raw) == raw
    return True


@settings(max_examples=60)
@given(values, styles)
def test_every_value_is_kept(value: Any, style: dict[str, Any]) -> None:
    assert kept(json.dumps([value], **style).encode("utf-8", "backslashreplace"))


@settings(max_examples=250)
@given(values, styles, st.data())
def test_what_json_refuses_is_refused(
    value: Any, style: dict[str, Any], data: st.DataObject
) -> None:
    text = json.dumps(value, **{**style, "ensure_ascii": True})
    at = data.draw(st.integers(0, len(text)))
    cut = data.draw(st.integers(0, 2))
    new = data.draw(
        st.sampled_from(["", *'[]{},:"\\0123456789.eE+-truefalsnN \t\n\x00\x1f\x7f', "NaN"])
    )
    text = f"[{text[:at]}{new}{text[at + cut :]}]"
    assert kept(text.encode()) is accepted(text)


@settings(max_examples=500)
@given(st.text('[]{},:"\\01.e-tn u', max_size=14))
@example("1,")
@example('{"a":1,}')
@example('{"a":[],"b":{},}')
@example("[[[1,2],[3]],[]],")
@example('"\\u12g4"')
@example('"\\ud800"')
@example('"\\ud800\\ud800\\udc00","\\\\ud800"')
@example("-")
@example("01")
@example("1.")
def test_short_texts_are_judged_alike(text: str) -> None:
    assert kept(f"[{text}]".encode()) is accepted(f"[{text}]")


@pytest.mark.parametrize("text", ["[" * 5_000_000, '{"a":' * 1_000_000, "[ " * 1_000_000])
def test_nesting_has_a_bound(text: str) -> None:
    with pytest.raises(RecursionError):
        outline(text.encode())
    assert kept(b"[" * 500 + b"]" * 500)


@pytest.mark.parametrize(
    "raw",
    [
        b"[" + b" " * 2_000_000 + b"[" + b" " * 2_000_000 + b"]]",
        (b"[" + b" " * 10_000) * 400 + b"0" + (b" " * 1000 + b"]") * 400,
        b"[" + b"1" * 2_000_000 + b"." + b"1" * 2_000_000 + b"]",
        b'["' + b"\\n" * 2_000_000 + b'"]',
        b'["' + b'\\"' * 17 + b"A" * 2_000_000 + b'"]',
        b"[" + b"[[[[]]]]," * 50_000 + b"0]",
    ],
    ids=["spaces", "spaces between brackets", "digits", "escapes", "escapes first", "deep items"],
)
def test_no_text_takes_quadratic_time(raw: bytes) -> None:
    assert kept(raw)  # in a second; quadratic would be hours


# What is read, and what is kept

KEPT: dict[str, Any] = {
    "image": output({"image/png": BIG, "text/plain": "a plot"}),
    "lines": output({"text/html": [f"<p>été {i} 📈</p>\n" for i in range(500)]}),
    "object": output({"application/json": {"x": [[0.5, -1e300, "\ud800"]] * 500}}),
    "stream": {"output_type": "stream", "name": "stdout", "text": [f"{i}\n" for i in range(1000)]},
    "error": {"output_type": "error", "ename": "E", "evalue": BIG, "traceback": [BIG]},
    "metadata": output({"text/plain": "x"}, widget={"state": [1] * 2000}),
}
LAYOUTS = [
    {"indent": 1},
    {"indent": 1, "ensure_ascii": False},
    {"indent": 4},
    {"indent": None},
    {"indent": None, "separators": (",", ":")},
]


def book_with(*outputs: Any) -> dict[str, Any]:
    book = promoted(stamped_cell(SOURCE), cell("plot()", outputs=list(outputs)))
    markdown = {
        "cell_type": "markdown",
        "id": "m",
        "metadata": {"slides": BIG},
        "source": f"![]({BIG})",
        "attachments": {"a.png": {"image/png": BIG}},
    }
    cells = [*book["cells"], markdown]
    metadata = {**book["metadata"], "widgets": {"state": {str(i): i for i in range(1000)}}}
    return {**book, "cells": cells, "metadata": metadata}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_a_notebook_is_read_alike_and_written_byte_for_byte(
    layout: dict[str, Any], newline: str, bom: bytes
) -> None:
    book = book_with(*KEPT.values())
    text = json.dumps(book, **layout).replace("\n", newline) + newline
    raw = bom + text.encode("utf-8", "backslashreplace")
    found = outline(raw[len(bom) :])
    assert kept_in(found) == 11
    assert resolved(found) == book
    assert b"".join(JsonStyle.of(raw).parts(found)) == raw


@settings(max_examples=30)
@given(
    st.dictionaries(st.text(), values, max_size=5),
    st.sampled_from(LAYOUTS),
    st.integers(90, 400),
)
def test_any_size_may_be_the_limit(
    data: dict[str, Any], layout: dict[str, Any], small: int
) -> None:
    book = book_with(output(data, **{"detllm_run": data}))
    raw = json.dumps(book, **layout).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outlines, "SMALL", small)
        found = outline(raw)
    assert resolved(found) == json.loads(raw)
    assert promote(found, Update.ALL)[0] is found
    assert b"".join(JsonStyle.of(raw).parts(found)) == raw
    stripped = JsonStyle.of(raw).parts(strip(found)[0])
    assert json.loads(b"".join(stripped)) == strip(json.loads(raw))[0]


def save(path: Path, book: Any, **layout: Any) -> bytes:
    raw = json.dumps(book, **{"indent": 1, **layout}).encode()
    path.write_bytes(raw)
    return raw


def test_a_foreign_spelling_survives_stamp_and_strip(tmp_path: Path) -> None:
    odd = r'{"a": 1.0e+05, "b":"\/\u0041\u00e9", "a" :[1 ,2], "big": ' + "9" * 5000 + "}"
    path = tmp_path / "nb.ipynb"
    book = notebook(stamped_cell(SOURCE), cell("plot()", outputs=[output({"x": "HERE"})]))
    bare = strip(book)[0]
    raw = save(path, book).replace(b'"HERE"', odd.encode())
    path.write_bytes(raw)
    file = read_file(path)
    result = write_notebook(file, promote(file.data, Update.NEW)[0])
    assert result.written
    assert result.warnings == ()
    assert odd.encode() in path.read_bytes()
    assert check_paths([path]).exit_code == 3  # recorded
    file = read_file(path)
    write_notebook(file, strip(file.data)[0])
    expected = json.dumps(bare, indent=1).encode().replace(b'"HERE"', odd.encode())
    assert path.read_bytes() == expected


def test_text_that_looks_like_a_mark_is_text() -> None:
    raw = json.dumps(notebook(cell(f'"{"0" * 32}:0"', outputs=[KEPT["image"]])), indent=1).encode()
    assert b"".join(JsonStyle.of(raw).parts(outline(raw))) == raw


def test_what_is_ours_is_read_whatever_its_size(tmp_path: Path) -> None:
    text = "An old pond. " * 3000
    source = SOURCE + "\n" + "# more\n" * 2000
    book = promoted(stamped_cell(source, make_stamp(source, [text], name="haiku")))
    book = with_actual(book, 1, make_stamp(source, [text], name="haiku"))
    outputs = book["cells"][0]["outputs"]
    outputs.insert(0, output({}))
    for shown, verdict in ((text, "match"), (text.replace("old", "new", 1), "error")):
        outputs[0]["data"]["text/plain"] = shown
        save(tmp_path / "nb.ipynb", book)
        (found,) = check_paths([tmp_path / "nb.ipynb"]).notebooks[0].cells
        assert found.verdict == verdict


def test_a_stamp_beyond_the_limit_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlines, "MAX_OURS", 4000)
    raw = save(
        tmp_path / "nb.ipynb", promoted(stamped_cell(SOURCE, make_stamp(SOURCE, ["x " * 5000])))
    )
    (found,) = check_paths([tmp_path / "nb.ipynb"]).notebooks[0].cells
    assert found.verdict == "error"
    assert "the cell's reference is larger than" in found.outcome.reasons[0]
    assert (tmp_path / "nb.ipynb").read_bytes() == raw


BROKEN = {
    "NaN": ("[NaN]", "it holds NaN, which is not JSON"),
    "infinity": ("[-Infinity]", "it holds -Infinity, which is not JSON"),
    "comma": ("[1,]", "is not JSON: line 1, column"),
    "no comma": ("[1 2]", "expecting ',' delimiter"),
    "escape": (r'"\x"', "invalid \\escape"),
    "control": ('"\t"', "invalid control character"),
    "bomb": ("[" * 1_000_000, "is nested too deeply"),
    "objects": ('{"a":' * 1_000_000, "is nested too deeply"),
    "cut": ('["', "ends too early"),
    "key": ("{1: 2}", "expecting property name enclosed in double quotes"),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("size", [0, 10_000])
def test_a_mistake_is_found_in_a_large_value_too(case: str, size: int, tmp_path: Path) -> None:
    wrong, expected = BROKEN[case]
    raw = json.dumps(notebook(cell("plot()", outputs=[output({"x": ["A" * size, "HERE"]})])))
    path = tmp_path / "nb.ipynb"
    path.write_text(
        raw.partition('"HERE"')[0] + wrong if case == "cut" else raw.replace('"HERE"', wrong)
    )
    with pytest.raises(NotebookError) as caught:
        read_file(path)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("where", ["notebook", "cell", "output", "data", "metadata"])
def test_a_key_twice_is_refused_where_we_read(where: str, tmp_path: Path) -> None:
    book = json.dumps(book_with(KEPT["image"]))
    keys = {
        "notebook": ('"nbformat": 4,', '"nbformat": 4, "nbformat": 4,'),
        "cell": ('"execution_count": 1,', '"execution_count": 1, "execution_count": 1,'),
        "output": (
            '"output_type": "display_data"',
            '"output_type": "x", "output_type": "display_data"',
        ),
        "data": (f'"image/png": "{BIG}"', f'"image/png": "{BIG}", "image/png": ""'),
        "metadata": ('"recorded_run":', '"recorded_run": "", "recorded_run":'),
    }
    old, new = keys[where]
    assert old in book
    path = tmp_path / "nb.ipynb"
    path.write_text(book.replace(old, new))
    with pytest.raises(NotebookError, match="twice"):
        read_file(path)
