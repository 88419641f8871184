from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_detllm.core.redact import (
    REDACTED,
    looks_secret,
    redact_text,
)

ALNUM = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
bodies = st.text(ALNUM, min_size=24, max_size=60)
contexts = st.sampled_from(
    ["{}", "key is {}.", "'{}'", "loading with token {} now", "--hf-token={}", "x={}&y=2", "({})"]
)


@given(st.sampled_from(["hf_", "sk-", "ghp_", "gho_", "glpat-", "nvapi-"]), bodies, contexts)
def test_token_shapes_never_survive(prefix: str, body: str, context: str) -> None:
    secret = prefix + body
    shown = redact_text(context.format(secret))
    assert body not in shown
    assert REDACTED in shown


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("aws AKIAIOSFODNN7EXAMPLE here", "AKIAIOSFODNN7EXAMPLE"),
        ("password=x1", "x1"),
        ("DB_PASSWORD: 'two words'", "two words"),
        ('{"api_key": "abcd-1234-efgh"}', "abcd-1234-efgh"),
        ("HF_TOKEN=notashape12", "notashape12"),
        ("client_secret=ab", "=ab"),
        ("https://me:pa55@host.example/x", "pa55"),
        ("https://tokenonly@host.example/x", "tokenonly"),
        ("Authorization: Bearer abcdefghijkl", "abcdefghijkl"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abc", "eyJzdWIi"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----", "MIIE"),
        ("-----BEGIN PRIVATE KEY-----\nMIIEcut", "MIIEcut"),
        ("GET http://h/v1?token=abcdefghijk", "abcdefghijk"),
        ("url: https://h/?a=b&api-key=abcdefghijk&c=d", "abcdefghijk"),
        ("error: request=http://h/?x=1&access_token='abc defghijk'", "defghijk"),
        ("a=b=key=abcdefghijk", "abcdefghijk"),
        ("github_pat_11ABCDEFG0abcdefghij_klmnop", "klmnop"),
    ],
)
def test_planted_secrets_are_masked(text: str, secret: str) -> None:
    shown = redact_text(text)
    assert secret not in shown
    assert REDACTED in shown


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens=128 tokens: 12",
        "eos token: 2",
        "tokenizer=HuggingFaceTB/SmolLM2-135M-Instruct",
        "https://huggingface.co/org/model@main",
        "torch 2.13.0+cpu, AVX512",
        "sk-learn and hf_hub are fine",
        "the key: yes",
    ],
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert redact_text(text, home="/home/ada", user="ada") == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/ada/model", "~/model"),
        ("/home/ada", "~"),
        ("/home/adam/model", "/home/adam/model"),
        ("file:///home/ada/x", "file://~/x"),
        ("/data/ada/x and /scratch/ada", "/data/<user>/x and /scratch/<user>"),
        ("/data/ada-2/x", "/data/ada-2/x"),
        ("ssh ada@host", "ssh <user>@host"),
        ("radar and ada stay", "radar and ada stay"),
    ],
)
def test_home_and_user(text: str, expected: str) -> None:
    assert redact_text(text, home="/home/ada", user="ada") == expected


def test_windows_home_in_both_spellings() -> None:
    home = "C:\\Users\\Ada"
    assert redact_text(r"C:\Users\Ada\m C:/Users/Ada/m", home=home) == r"~\m ~/m"


def test_a_root_home_folds_nothing() -> None:
    assert redact_text("/usr/lib", home="/") == "/usr/lib"


printable = st.text(st.characters(codec="utf-8"), max_size=200)


@given(printable)
def test_redaction_is_idempotent(text: str) -> None:
    once = redact_text(text, home="/home/ada", user="ada")
    assert redact_text(once, home="/home/ada", user="ada") == once


@given(st.text("/.ab\\ da-@:=\n", max_size=80))
def test_home_never_survives_as_a_path(text: str) -> None:
    shown = redact_text(text + " /home/ada/" + text, home="/home/ada", user="ada")
    assert not re.search(r"/home/ada(?![\w.-])", shown)


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "apiKey",
        "AWS_ACCESS_KEY_ID",
        "PGPASSWORD",
        "MY_SECRET",
        "GIT_AUTH",
        "VLLM_API_KEY",
    ],
)
def test_secret_names(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "max_tokens", "OMP_NUM_THREADS", "KEYBOARD"]
)
def test_names_that_only_resemble_secrets(name: str) -> None:
    assert not looks_secret(name)
