"""What must never be stored: secrets, the home folder, the user's name.

Of the environment only the variables of the tables in `controls.environ` are read into a
record. Every text that may hold a path or a log line is redacted, as well as that can be.
"""

from __future__ import annotations

import re

__all__ = [
    "REDACTED",
    "looks_secret",
    "redact_text",
]

REDACTED = "<redacted>"

_SECRET_WORDS = frozenset(
    {"auth", "cookie", "credential", "credentials", "key", "keys", "pat", "pwd", "token"}
)
_SECRET_PARTS = ("apikey", "authtoken", "credential", "passphrase", "passwd", "password", "secret")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def looks_secret(name: str) -> bool:
    """Return whether a variable or option with this name is likely to hold a secret.

    ``HF_TOKEN`` and ``apiKey`` are; ``TOKENIZERS_PARALLELISM`` and ``max_tokens`` are not.
    """
    lowered = name.lower()
    if any(part in lowered for part in _SECRET_PARTS):
        return True
    return any(word.lower() in _SECRET_WORDS for word in _WORDS.findall(name))


# Token shapes that are secret whatever precedes them.
_SHAPES = re.compile(
    r"""-----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----.*?(?:-----END[ ][A-Z ]*PRIVATE[ ]KEY-----|\Z)
    | \b(?:hf|gh[pousr]|glpat|npm|pypi|nvapi|sk|rk|pk)[_-][A-Za-z0-9_-]{16,}
    | \bgithub_pat_[A-Za-z0-9_]{20,}
    | \bxox[a-z]-[A-Za-z0-9-]{10,}
    | \b(?:AKIA|ASIA)[A-Z0-9]{16}\b
    | \bAIza[A-Za-z0-9_-]{30,}
    | \beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}(?:\.[A-Za-z0-9_-]*)?
    """,
    re.VERBOSE | re.DOTALL,
)
_URL_CREDENTIALS = re.compile(r"(?P<scheme>\b[a-zA-Z][a-zA-Z0-9+.-]*://)[^\s/@'\"]+@")
_BEARER = re.compile(r"(?i)\b(?P<kind>bearer|basic)\s+[A-Za-z0-9+/=._~-]{8,}")
# NAME=value, NAME: value, "NAME": "value"; `looks_secret` decides whether NAME is secret.
_ASSIGNED = re.compile(r"""(?P<name>[A-Za-z][A-Za-z0-9_-]{1,63})["']?[ ]?[=:][ ]?""")
_VALUE = re.compile(r""""[^"\n]*"|'[^'\n]*'|[^\s,;"'&]+""")


def _without_assigned(text: str) -> str:
    """Return `text` with the values of secret names masked.

    The value of another name may hold one itself, as the query of an address does.
    """
    kept, at = [], 0
    for found in _ASSIGNED.finditer(text):
        if found.start() >= at and looks_secret(found["name"]):
            value = _VALUE.match(text, found.end())
            if value is not None and _is_secret(found["name"], value[0].strip("\"'")):
                kept += [text[at : found.end()], REDACTED]
                at = value.end()
    return "".join([*kept, text[at:]])


def _is_secret(name: str, value: str) -> bool:
    certain = any(part in name.lower() for part in _SECRET_PARTS)
    # "eos token: 2" and "key: yes" are not secrets; a short password is.
    return bool(value) and (certain or len(value) >= 8)


def _fold_home(text: str, home: str) -> str:
    for form in {home, home.replace("\\", "/"), home.replace("/", "\\")}:
        stem = form.rstrip("/\\")
        # A home of "/" or "C:" would replace the start of every path.
        if len(stem) > 2:
            text = re.sub(re.escape(stem) + r"(?![\w.-])", "~", text)
    return text


def _hide_user(text: str, user: str) -> str:
    if not user:
        return text
    name = re.escape(user)
    text = re.sub(rf"(?<=[/\\]){name}(?![\w.-])", "<user>", text)
    return re.sub(rf"(?<![\w.-]){name}(?=@)", "<user>", text)


def redact_text(text: str, *, home: str = "", user: str = "") -> str:
    """Return `text` without secrets, home folder and user name.

    Parameters
    ----------
    text
        A path, a log line, a message.
    home
        The user's home folder; it becomes ``~`` in every path.
    user
        The user's login name; as a path segment or before ``@`` it becomes ``<user>``.
    """
    text = _SHAPES.sub(REDACTED, text)
    text = _URL_CREDENTIALS.sub(rf"\g<scheme>{REDACTED}@", text)
    text = _BEARER.sub(rf"\g<kind> {REDACTED}", text)
    text = _without_assigned(text)
    return _hide_user(_fold_home(text, home) if home else text, user)
