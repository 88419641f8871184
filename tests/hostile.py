"""Strings that a report must show, and must never obey."""

from __future__ import annotations

__all__ = ["HOSTILE", "MARKUP"]

MARKUP: tuple[str, ...] = (
    "<script>alert(1)</script>",
    "</pre></details><script src=//evil.example/x.js></script>",
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "' onmouseover='alert(1)",
    "<style>*{display:none}</style>",
    "</style><base href='https://evil.example/'>",
    '<a href="javascript:alert(1)">x</a>',
    "<meta http-equiv=refresh content='0;url=https://evil.example'>",
    "<iframe srcdoc='<script>alert(1)</script>'>",
    "<!-- <![CDATA[ ]]> -->",
    "]]></failure></testcase><testcase name='x'/>",
    "<?xml version='1.0'?><!DOCTYPE x [<!ENTITY e SYSTEM 'file:///etc/passwd'>]>",
    "&lt;script&gt; &amp; &#x3c;b&#x3e;",
)
HOSTILE: tuple[str, ...] = (
    *MARKUP,
    "\x1b[31mred\x1b[0m \x1b]8;;https://evil.example\x07link\x1b]8;;\x07",
    "\x00\x01\x08\x0b\x0c\x0e\x1f\x7f\x85\x9b",
    "abc\u202efdp.exe\u2066\u2069\u200b\u2028\u2029\ufeff",
    "\ufffe\uffff\U0001fffe",
    "池塘 😀 👩‍👩‍👧 é",
    "line one\r\nline two\n\n\ttabbed",
    "x" * 20_000,
)
