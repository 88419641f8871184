"""What a cell shows as HTML: text as text, legible without style, the same for the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_detllm.core.generation import Generation, Prompt
from jupyter_detllm.core.shown import folded, generations_html, preformatted, stamp_html
from jupyter_detllm.core.stamp import Stamp, printable
from jupyter_detllm.engines.base import SamplingOptions
from tests.fakes import Run
from tests.hostile import HOSTILE

TAGS = {"pre", "details", "summary", "p", "strong", "code", "div"}
SAMPLED = SamplingOptions(temperature=0.8, max_tokens=8)


class Page(HTMLParser):
    """Tags, attributes, text by block; asserts that nothing else than ours is in it."""

    def __init__(self, markup: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.blocks: list[str] = []
        self.outside = ""
        self.feed(markup)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS
        assert {name for name, _ in attrs} <= {"style", "dir"}
        self.open.append(tag)
        if tag == "pre":
            self.blocks.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "pre" in self.open:
            # The parser of a browser drops the line end right after the tag.
            self.blocks[-1] += data
        else:
            self.outside += data

    @property
    def text(self) -> str:
        """The blocks' content as a browser keeps it."""
        return "".join(block.removeprefix("\n") for block in self.blocks)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)

    handle_decl = unknown_decl = handle_pi = handle_comment


@pytest.mark.parametrize("text", [*HOSTILE, "", "\n\nleading", "  indented\n\ttabbed  \n"])
def test_a_text_is_shown_as_it_is(text: str) -> None:
    assert Page(preformatted(text)).text == printable(text)
    assert Page(folded(text)).text == printable(text)


@given(st.text(max_size=300), st.integers(1, 80))
def test_a_fold_shows_every_character_once(text: str, times: int) -> None:
    text *= times
    page = Page(folded(text))
    assert "".join(block.removeprefix("\n") for block in page.blocks) == printable(text)
    assert len(page.blocks) == (2 if "<details>" in folded(text) else 1)


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("short\n" * 39, None),
        ("line\n" * 100, "line\n" * 12),
        ("word " * 2000, "word " * 240),
        ("x" * 5000, "x" * 1200),
        ("a" * 700 + "\n" + "b" * 5000, "a" * 700 + "\n"),
    ],
)
def test_long_texts_fold_at_a_line_or_a_word(text: str, head: str | None) -> None:
    page = Page(folded(text))
    if head is None:
        assert page.blocks == [text]
        return
    assert page.blocks == [head, text[len(head) :]]
    assert f"{len(text) - len(head)} characters" in page.outside


def several(n: int = 2) -> Stamp:
    prompts = (Prompt.chat("First\nquestion"), Prompt.chat("Second <b>"))
    return Run(prompts=prompts, n=n, sampling=SAMPLED).stamp()


def test_several_texts_stand_under_headings() -> None:
    stamp = several()
    markup = generations_html(stamp.requests, stamp.generations)
    page = Page(markup)
    assert page.blocks == [g.text for g in stamp.generations]
    for heading in ("prompt 1/2, completion 1/2", "prompt 2/2, completion 2/2"):
        assert f"<p><strong>{heading}</strong>" in markup
    # Each prompt once, on its first completion, as code: `$` in it is no formula.
    assert markup.count("<code>First\\nquestion</code>") == 1
    assert markup.count("<code>Second &lt;b&gt;</code>") == 1


def test_prompts_that_are_not_stored_are_not_shown() -> None:
    stamp = several()
    assert "question" not in generations_html(stamp.requests, stamp.generations, show_prompt=False)


def test_one_text_has_no_heading() -> None:
    stamp = Run().stamp()
    markup = generations_html(stamp.requests, stamp.generations)
    assert markup == preformatted(stamp.generations[0].text)


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_of_a_model_is_markup(text: str) -> None:
    stamp = several()
    hostile = [replace(g, text=text, offsets=(0,) * len(g.offsets)) for g in stamp.generations]
    page = Page(generations_html(stamp.requests, hostile))
    assert page.text == printable(text) * 4
    changed = replace(
        stamp,
        self_test=text,
        late=(text,),
        model=replace(stamp.model, name=text),
        calls=(replace(stamp.calls[0], generations=tuple(map(ended(text), stamp.generations))),),
    )
    shown = Page(stamp_html(changed, text, "sha256:0"))
    assert len(shown.blocks) == 1
    assert "\x1b" not in shown.outside + shown.blocks[0]


def ended(reason: str) -> Callable[[Generation], Generation]:
    def of(generation: Generation) -> Generation:
        return replace(generation, finish_reason=reason)

    return of


def test_a_stamp_opens_to_level_digests_tokens_and_finish_reasons() -> None:
    stamp = replace(several(), late=("OMP_NUM_THREADS",), self_test="held in 6 of 6")
    markup = stamp_html(stamp, "the line", "sha256:abc")
    page = Page(markup)
    assert page.outside == "the line"
    (block,) = page.blocks
    rows = [line.split(None, 1) for line in block.split("\n")]
    labels = [row[0] for row in rows]
    assert dict(rows[:3]) == {  # type: ignore[arg-type]
        "level": f"repeatable: {stamp.level.promise}",
        "self-test": "held in 6 of 6",
        "late": "OMP_NUM_THREADS",
    }
    assert ["fingerprint", str(stamp.fingerprint_digest)] in rows
    assert ["generations", str(stamp.generation_digest)] in rows
    assert ["stamp", "sha256:abc"] in rows
    assert labels.count("tokens") == 1
    assert block.count("completion 1/2: 8, finished by ") == 2
    assert markup == stamp_html(stamp, "the line", "sha256:abc")


def test_many_generations_are_counted_and_not_listed() -> None:
    stamp = several(n=20)
    (block,) = Page(stamp_html(stamp, "x", "y")).blocks
    assert block.endswith("and 28 more generations")
