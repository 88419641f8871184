"""Every command and magic that a page tells a reader to type exists, with its options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jupyter_detllm.cli import COMMANDS
from jupyter_detllm.cli._options import PROG, Parser
from jupyter_detllm.errors import DetLLMError
from jupyter_detllm.kernel.arguments import (
    detgen_parser,
    setup_parser,
)
from jupyter_detllm.kernel.commands import VERBS
from tests.documented import PAGES, ROOT, Block, blocks, matches, steps, typed

_LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)#\s]+)(#[^)\s]*)?\)")


def parse_command(words: list[str]) -> None:
    found = {command.name: command for command in COMMANDS}
    if words[0] in ("-h", "--help", "--version"):
        return
    parser = Parser(prog=f"{PROG} {words[0]}")
    found[words[0]].load().configure(parser)
    parser.parse_args(words[1:])


def parse_magic(words: list[str]) -> None:
    if not words or words[0].startswith("-"):
        setup_parser().parse(words)
    else:
        assert words[0] in VERBS
        VERBS[words[0]].parser.parse(words[1:])


READERS = {"jupyter detllm": parse_command, "%detllm": parse_magic, "%%detgen": lambda words: (
    detgen_parser().parse(words), None)[1]}  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_says_to_type_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    wrong = []
    for first, parse in READERS.items():
        for number, words in typed(text, first):
            try:
                parse([word for word in words if word != "…"])
            except (DetLLMError, KeyError, AssertionError) as error:
                wrong.append(f"line {number}: {first} {' '.join(words)}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    targets = [found[1] for found in _LINK.finditer(page.read_text(encoding="utf-8"))]
    local = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_commands_are_found_and_mistakes_in_them_too() -> None:
    page = "```\njupyter detllm check a.ipynb --polcy x  # why\n%detllm use demo\n```\n"
    assert list(typed(page, "jupyter detllm")) == [(2, ["check", "a.ipynb", "--polcy", "x"])]
    with pytest.raises(DetLLMError, match="--policy"):
        parse_command(["check", "a.ipynb", "--polcy", "x"])
    assert list(typed(page, "%detllm")) == [(3, ["use", "demo"])]


def test_steps_of_a_console_block() -> None:
    (block,) = blocks("x\n\n```console\n$ a   # exit code 3\none\n$ b\n```\n")
    assert block == Block("console", "$ a   # exit code 3\none\n$ b\n", 3)
    first, second = steps(block)
    assert (first.output, first.code) == ("one", 3)
    assert (second.command, second.output, second.code) == ("b", None, 0)


def test_output_is_compared_whole() -> None:
    assert matches("a ... c\n", "a b c\n")
    assert matches("a\n...\nd", "a\nb\nc\nd")
    assert matches("...\na\n...\nd\n...", "a\nd")
    assert not matches("a ...", "a b\nc")
    assert not matches("a", "a\nb")
    assert not matches("a ... c", "a b")
