"""Clumsy lines in a real kernel: one line each, and nothing private in it."""

from __future__ import annotations

import os

from tests.kernels import LOAD, USE, errors, execute, text


def test_help_is_given_where_it_is_asked_for() -> None:
    cells = execute(
        LOAD,
        "%detllm --help",
        "%detllm use -h",
        "%%detgen --help\nx",
        "%%detgen a -h\nx",
        "%%detgen --help",
        "%%time\n%%detgen -h\n",
    )
    for cell in cells[1:3]:
        assert "%detllm use MODEL" in text(cell)
    for cell in cells[3:]:
        assert "%%detgen [NAME] [options]" in text(cell)
    assert not any(errors(cell) for cell in cells)


def test_a_line_without_a_prompt_is_explained_by_the_magic() -> None:
    cells = execute(LOAD, USE, "%%detgen haiku", "%%detgen haiku\n")
    for cell in cells[2:]:
        assert errors(cell) == [
            "RequestError: the cell has no prompt; expected text below the %%detgen line. "
            "Try: %%detgen?"
        ]


def test_dashes_of_a_word_processor_are_named() -> None:
    cells = execute(LOAD, "%detllm \u2013seed 4", "%%detgen a \u2014temperature 0\nx")
    assert errors(cells[1]) == [
        "UsageError: '\u2013seed' begins with a dash that is not a hyphen. Try: --seed"
    ]
    assert "Try: --temperature" in errors(cells[2])[0]


def test_a_name_that_is_no_path_is_one_line() -> None:
    cells = execute(LOAD, "%detllm use " + "x/" * 3000, "%detllm use " + "y" * 3000)
    for cell in cells[1:]:
        assert len(errors(cell)) == 1
        assert len(errors(cell)[0]) < 400


def test_no_message_holds_the_home_folder() -> None:
    home = os.environ["HOME"]
    cells = execute(
        LOAD,
        f"%detllm use {home}/models/none",
        f"%detllm bisect --notebook {home}/x.ipynb",
        "import jupyter_detllm as det, os\ndet.use(os.path.expanduser('~/other'))",
    )
    for cell in cells[1:]:
        assert errors(cell)
        assert home not in str(cell["outputs"])
        assert "~/" in errors(cell)[0]


def test_a_mistaken_number_of_completions_does_not_hang() -> None:
    cells = execute(LOAD, USE, "%%detgen a -n 99999999999 --temperature 1\nx", "%detllm stamps")
    assert errors(cells[2]) == ["RequestError: n is 99999999999; expected at most 2147483647"]
    assert text(cells[3]) == "stamped cells: none yet"
