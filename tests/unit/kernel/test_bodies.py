"""A cell's body to prompts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_detllm.core.generation import Message, PromptKind
from jupyter_detllm.core.stamp import normalise_source
from jupyter_detllm.errors import RequestError
from jupyter_detllm.kernel.prompts import fill, messages_prompt, prompts_of, split_body


def test_split_at_lines_that_are_exactly_the_separator() -> None:
    body = "\n\n  first\n--- \n ---\n----\n\n---\nsecond\n\n"
    assert split_body(body) == ["  first\n--- \n ---\n----", "second"]


def test_option_lines_of_quarto_and_nbdev_are_no_prompt() -> None:
    assert split_body("#| echo: false\n#|export\nWrite.\n#| not at the top\n") == [
        "Write.\n#| not at the top"
    ]
    assert split_body("\n#| below a blank line\n") == ["#| below a blank line"]
    assert split_body("#| label: x\none\n---\ntwo") == ["one", "two"]


def test_line_ends_become_lf() -> None:
    assert split_body("a\r\nb\r---\r\nc\r\n") == ["a\nb", "c"]


def test_no_split_sends_the_body_whole() -> None:
    assert split_body("\na\n---\nb\n", split=False) == ["a\n---\nb"]


def test_blank_lines_inside_and_spaces_stay() -> None:
    assert split_body("  a  \n\n\n b \n") == ["  a  \n\n\n b "]


@pytest.mark.parametrize("body", ["", "\n", " \n\t\n", "---\n---"])
def test_an_empty_body_is_refused(body: str) -> None:
    with pytest.raises(RequestError, match="has no prompt"):
        split_body(body)


@pytest.mark.parametrize(
    ("body", "which"), [("---\na", "1 of 2"), ("a\n---\n \n---\nb", "2 of 3"), ("a\n---", "2 of 2")]
)
def test_an_empty_prompt_is_named(body: str, which: str) -> None:
    with pytest.raises(RequestError, match=f"prompt {which} is empty"):
        split_body(body)


LINES = st.text(alphabet=st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]))


@given(st.lists(LINES.filter(lambda line: line.strip() and line != "---"), min_size=1))
def test_prompts_survive_splitting(prompts: list[str]) -> None:
    assert split_body("\n---\n".join(prompts) + "\n") == prompts


def test_fill_puts_in_plain_names_only() -> None:
    namespace = {"x": "A", "n": 3, "r": 0.5, "os": object()}
    template = '{x} {n} {r} {{x}} {x.upper} {x!r} {x:>5} {0} {} {"a": {"b": 1}} {os.path}'
    assert fill(template, namespace) == (
        'A 3 0.5 {x} {x.upper} {x!r} {x:>5} {0} {} {"a": {"b": 1}} {os.path}'
    )


def test_fill_does_not_fill_what_it_filled() -> None:
    assert fill("{a}", {"a": "{b}", "b": "no"}) == "{b}"


def test_fill_refuses_what_is_missing_and_hints() -> None:
    with pytest.raises(RequestError, match=r"not defined; did you mean \{country\}\?"):
        fill("{cuntry}", {"country": "x"})


def test_fill_refuses_objects_whose_text_may_change() -> None:
    with pytest.raises(RequestError, match=r"\{x\} is a object; expected a text or a number"):
        fill("{x}", {"x": object()})


def test_kinds_of_prompts() -> None:
    (chat,) = prompts_of(["hi"], "chat", "be brief")
    assert chat.messages == (Message("system", "be brief"), Message("user", "hi"))
    (raw,) = prompts_of(["hi"], "text")
    assert (raw.kind, raw.text) == (PromptKind.TEXT, "hi")


@pytest.mark.parametrize("kind", ["text", "messages"])
def test_a_system_message_needs_a_chat(kind: str) -> None:
    with pytest.raises(RequestError, match=f"--system does not go with --{kind}"):
        prompts_of(["[]"], kind, "x")


def test_messages_with_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = json.dumps([{"role": "system", "content": "s"}, {"role": "user", "content": parts}])
    (prompt,) = prompts_of([body], "messages")
    assert prompt.messages == (Message("system", "s"), Message("user", "a\nb"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"role": "user", "content": "x"}, "not a list"),
        ([], "not a list"),
        ("text", "not a list"),
        ([3], r"not \{role, content\}"),
        ([{"role": "user"}], r"not \{role, content\}"),
        ([{"role": "usr", "content": "x"}], "did you mean user?"),
        ([{"role": 3, "content": "x"}], "3 is not a role"),
        ([{"role": "user", "content": 3}], "content is not text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "a part that is not text"),
        ([{"role": "user", "content": [{"type": "image", "text": "a"}]}], "not text"),
        ([{"role": "user", "content": "x", "tool_calls": []}], "has 'tool_calls'"),
        ([{"role": "user", "content": "\ud800"}], "lone surrogate"),
    ],
)
def test_malformed_messages_are_refused(data: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        messages_prompt(data)


@pytest.mark.parametrize("body", ["{", "[" * 100_000, "nul", '[{"role": "user"'])
def test_a_body_that_is_not_json(body: str) -> None:
    with pytest.raises(RequestError):
        prompts_of([body], "messages")


@given(*[st.text(" \t\v\f\r\n-a\u3000", max_size=12)] * 2)
def test_one_source_digest_is_one_list_of_prompts(one: str, other: str) -> None:
    """What the digest of a source leaves out, no prompt holds."""

    def prompts(body: str) -> list[str]:
        try:
            return split_body(body)
        except RequestError:
            return []

    sources = [f"%%detgen\n{body}" for body in (one, other, f"{one}\n \t\n", one.rstrip("\n"))]
    found = {normalise_source(source): prompts(source.partition("\n")[2]) for source in sources}
    for source in sources:
        assert found[normalise_source(source)] == prompts(source.partition("\n")[2])
