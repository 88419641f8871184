from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jupyter_detllm.core.fingerprint import FieldDiff, Fingerprint, Role
from jupyter_detllm.core.generation import Generation, Sampling
from jupyter_detllm.core.stamp import ModelIdentity
from jupyter_detllm.render import render_report
from jupyter_detllm.render.visible import block_text, visible
from jupyter_detllm.verify.report import EnvironmentReport, Mode, NotebookReport, Report
from jupyter_detllm.verify.service import check_notebook
from tests.builders import generation, make_stamp, notebook, promoted, stamped_cell, with_actual
from tests.hostile import HOSTILE, MARKUP
from tests.unit.render.test_text import generations, values, wild

SOURCE = "%%detgen haiku\nWrite a haiku."
_TAGS = """html head meta title style body header main footer section h1 h2 h4 p span strong a
    div table caption thead tbody tr th td details summary dl dt dd pre mark figure figcaption
    svg desc rect line text polyline circle"""
_ATTRIBUTES = """lang charset http-equiv content name class id href scope open viewbox role
    aria-labelledby x y x1 x2 y1 y2 cx cy r width height points text-anchor"""
TAGS = frozenset(re.findall(r"\S+", _TAGS))
ATTRIBUTES = frozenset(re.findall(r"\S+", _ATTRIBUTES))
VOID = frozenset({"meta"})


class Page(HTMLParser):
    """What a page holds: its text, and that it is well-formed and does nothing."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.meta: dict[str, str] = {}
        self.style = ""
        self.found: list[tuple[str, str]] = []
        self.feed(html)
        self.close()
        assert self.open == []
        assert len(self.ids) == len(set(self.ids))
        assert all(link.startswith("#") and link[1:] in self.ids for link in self.links)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS
        given_ = dict(attrs)
        assert set(given_) <= ATTRIBUTES
        assert len(given_) == len(attrs)
        self.ids += [v for k, v in attrs if k == "id" and v]
        self.links += [v for k, v in attrs if k == "href" and v]
        if tag == "meta":
            key = given_.get("http-equiv") or given_.get("name") or "charset"
            self.meta[key] = given_.get("content") or ""
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            self.style += data
        else:
            self.found.append((self.open[-1] if self.open else "", data))

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    def handle_pi(self, data: str) -> None:
        raise AssertionError(f"an instruction: {data}")

    def of(self, tag: str) -> list[str]:
        return [data for kind, data in self.found if kind == tag]

    @property
    def text(self) -> str:
        return "".join(data for _, data in self.found)


def page(report: Report) -> Page:
    html = render_report(report, "html")
    assert html.startswith("<!doctype html>\n")
    assert not re.search(r"(?:src|href)\s*=\s*[\"']?(?!#)", html.split("<body>")[0])
    found = Page(html)
    assert not any(ord(char) < 32 and char not in "\n\t" for char in html), (
        "no control character gets into a page"
    )
    return found


def differing(**more: Any) -> dict[str, Any]:
    before = generation("An old pond is still.", margins={1: 0.0, 3: 0.125})
    after = generation("An old pond was quiet.", margins={3: 0.25})
    fields = {"torch.threads": 4, "software.vllm": "0.31.0"}
    first = make_stamp(SOURCE, [before], name="haiku", **more)
    then = make_stamp(SOURCE, [after], name="haiku", fields=fields, **more)
    return with_actual(promoted(stamped_cell(SOURCE, first)), 1, then)


def report_of(*books: dict[str, Any], mode: Mode = Mode.CHECK) -> Report:
    found = (check_notebook(f"{i}.ipynb", book) for i, book in enumerate(books, start=1))
    return Report(mode, tuple(found))


def test_the_page_needs_nothing_and_allows_nothing() -> None:
    found = page(report_of(differing()))
    digest = base64.b64encode(hashlib.sha256(found.style.encode()).digest()).decode()
    assert found.meta["Content-Security-Policy"] == (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    assert "url(" not in found.style
    assert "@import" not in found.style
    assert not re.search(r"https?:|//", found.style)
    assert "prefers-color-scheme: dark" in found.style
    assert "@media print" in found.style


def test_summary_fields_texts_and_margins_are_there() -> None:
    found = page(report_of(differing(), promoted(stamped_cell(SOURCE))))
    assert found.links == ["#notebook-1", "#notebook-2"]
    assert found.of("td")[:4] == ["1", "1", "1", "1"]  # cells and verdicts of two notebooks
    assert "software.vllm" in found.of("td")
    assert any("Kernels, scheduling" in text for text in found.of("td"))
    assert "install the same vLLM version." in "".join(found.of("td"))
    pre = found.of("pre")
    assert "An old pond" in pre  # what both sides have in common
    assert found.of("mark") == [" is", " was"]
    assert " still." in pre
    assert " quiet." in pre
    (about, _) = found.of("desc")
    assert about == (
        "5 tokens; the smallest margin is 0 nats at token 2 (tie); 2 ties or near-ties are "
        "marked; the texts diverge at token 4"
    )
    assert "token 4: 0.125 nats (near-tie)" in found.of("title")
    assert "first divergence: token 4" in found.of("text")


def test_what_failed_is_open_and_what_passed_is_folded() -> None:
    html = render_report(report_of(differing()), "html")
    assert '<details class="cell" open>' in html
    same = with_actual(promoted(stamped_cell(SOURCE)), 1, make_stamp(SOURCE, name="haiku"))
    html = render_report(report_of(same), "html")
    assert '<details class="cell">' in html
    assert '<span class="chip ok">verified</span>' in html


def test_other_ways_to_differ() -> None:
    def texts(before: Generation, after: Generation) -> Page:
        first = make_stamp(SOURCE, [before], name="haiku")
        then = make_stamp(SOURCE, [after], name="haiku")
        return page(report_of(with_actual(promoted(stamped_cell(SOURCE, first)), 1, then)))

    same = generation("An old pond.")
    assert "finished with length" in texts(same, generation("An old pond.", finish="length")).of(
        "pre"
    )
    ended = texts(generation("An old pond is still."), generation("An old pond"))
    assert "ended (stop)" in ended.text
    start = texts(generation("One pond."), generation("Two ponds."))
    assert "(no text)" in start.text
    bare = texts(generation("One.", with_evidence=False), generation("Two.", with_evidence=False))
    assert bare.of("desc") == []


def test_a_token_without_text_and_a_part_of_a_character() -> None:
    pieces = ["An", b"\xe6", b"\xb1\xa0", b"", " pond"]
    before = generation("An池 pond", pieces=pieces)
    after = generation("An水 pond", pieces=["An", b"\xe6", b"\xb0\xb4", b"", " pond"])
    first = make_stamp(SOURCE, [before], name="haiku")
    book = with_actual(
        promoted(stamped_cell(SOURCE, first)), 1, make_stamp(SOURCE, [after], name="haiku")
    )
    assert page(report_of(book)).of("mark") == ["<0xB1><0xA0>", "<0xB0><0xB4>"]


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.8), Sampling(beam_width=2)])
def test_a_margin_that_is_not_the_whole_story_says_so(sampling: Sampling) -> None:
    caption = "".join(page(report_of(differing(sampling=sampling))).of("figcaption"))
    assert ("before noise" in caption) is (sampling.beam_width == 0)
    assert ("whole texts" in caption) is (sampling.beam_width == 2)


def test_a_long_text_and_many_tokens_are_bounded() -> None:
    long = generation(" ".join(f"w{i}" for i in range(30_000)))
    other = generation(" ".join(f"w{i}" if i < 15_000 else "x" for i in range(30_000)))
    book = with_actual(
        promoted(stamped_cell(SOURCE, make_stamp(SOURCE, [long], name="haiku"))),
        1,
        make_stamp(SOURCE, [other], name="haiku"),
    )
    report = report_of(book)
    found = page(report)
    assert "bytes before" in found.text
    assert "more bytes" in found.text
    assert len(render_report(report, "html")) < 60_000


# Whatever a notebook holds is text in the page.


def hostile_reports(text: str) -> list[Report]:
    made = generation(f"start {text}", pieces=["start ", text], finish=text, margins={1: 0.1})
    other = generation(f"start {text}{text}", pieces=["start ", text + text])
    fields: dict[str, Any] = {"software.vllm": text[:300], "torch.threads": text[:200]}
    model = ModelIdentity(text)
    unnamed = "%%detgen\nx"
    first = make_stamp(unnamed, [made], name="one", prompts=[text], model=model)
    then = make_stamp(
        unnamed, [other], name="one", prompts=[text], fields=fields, late=[text], model=model
    )
    book = with_actual(promoted(stamped_cell(unnamed, first)), 1, then)
    checked = check_notebook(text, book, None, None, (text,))
    assert "drift" in {c.verdict.value for c in checked.cells}
    diff = FieldDiff(text, Role.NUMERICS, text, None, text, text, 50)
    informational = FieldDiff(text, Role.INFORMATIONAL, text, 1, text, text, 5)
    environment = EnvironmentReport(text, text, (diff, informational), (text,), (text,), True)
    compared = NotebookReport(
        text, checked.cells, (text,), text, (environment, environment), (text,)
    )
    failed = check_notebook(text, book, None, {1: text})
    misnamed = check_notebook(text, promoted(stamped_cell(unnamed, replace(first, name=text))))
    return [
        Report(Mode.CHECK, (checked, failed, misnamed)),
        Report(Mode.COMPARE, (compared,)),
    ]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_shown_and_never_obeyed(text: str) -> None:
    for report in hostile_reports(text):
        html = render_report(report, "html")
        found = page(report)
        if text in MARKUP:
            assert text not in html
            assert text in found.text
        assert visible(text)[:30] in found.text
        assert "\x1b" not in html
        assert "\u202e" not in html


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=80)
@given(
    generations(),
    generations(),
    st.dictionaries(st.sampled_from(["torch.threads", "software.vllm", "engine.dtype"]), values),
    wild,
)
def test_any_pair_makes_a_sound_page(
    before: Generation, after: Generation, fields: dict[str, Any], prompt: str
) -> None:
    first = make_stamp(SOURCE, [before], name="haiku", prompts=[prompt])
    then = make_stamp(SOURCE, [after], name="haiku", prompts=[prompt], fields=fields)
    book = with_actual(promoted(stamped_cell(SOURCE, first)), 1, then)
    for mode in (Mode.CHECK, Mode.COMPARE):
        page(report_of(book, mode=mode))


def test_an_empty_report_and_an_empty_notebook_are_pages() -> None:
    page(Report(Mode.CHECK, ()))
    assert "no stamped cell" in page(report_of(notebook())).text


def test_a_comparison_shows_its_fields() -> None:
    left = Fingerprint.build({"software.vllm": "1", "hardware.gpu_memory": "80"})
    from jupyter_detllm.core.fingerprint import diff_fingerprints

    right = Fingerprint.build({"software.vllm": "2", "hardware.gpu_memory": "40"})
    environment = EnvironmentReport("a", "b", diff_fingerprints(left, right), (), (), True)
    book = NotebookReport("a.json", against="b.json", environment=(environment,))
    found = page(Report(Mode.COMPARE, (book,)))
    assert "a.json | b.json" in found.of("h2")
    assert [t for t in found.of("td") if "." in t][:1] == ["software.vllm"]
    assert "also different, but unlikely to matter if outputs are equal" in found.of("caption")
    assert any("align software.vllm" in text for text in found.of("p"))


def test_lines_of_a_text_stay_lines() -> None:
    assert block_text(b"a\r\nb\tc\x1b[0m\xff") == "a\nb\tc\\x1b[0m<0xFF>"
