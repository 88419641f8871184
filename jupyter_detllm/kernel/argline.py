"""A magic's line to arguments: quotes as in a shell, every mistake one line with a hint."""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Sequence
from typing import NoReturn

from IPython.core.magic_arguments import MagicArgumentParser

from jupyter_detllm.errors import UsageError, nearest

__all__ = [
    "ArgumentParser",
    "Namespace",
    "asks_for_help",
    "identifier",
    "number",
    "split_line",
    "without_comment",
]

Namespace = argparse.Namespace
_OPTION = re.compile(r"--?[A-Za-z][\w-]*")
_COMMENT = re.compile(r"(?:^|\s)#(?=\s|$)")
_DASHES = re.compile(r"[\u2010-\u2015\u2212]+(?=[A-Za-z])")
_ARGUMENT = re.compile(r"argument (\S+?)(?:/\S+)?: (.+)")


def split_line(line: str) -> list[str]:
    """Split a magic's line; single and double quotes group, a backslash escapes.

    Raises
    ------
    UsageError
        For a quotation that does not end.
    """
    try:
        return [_plain_dash(token) for token in shlex.split(line, comments=False, posix=True)]
    except ValueError:
        raise UsageError(
            "a quotation on the magic's line does not end",
            expected="a closing quote, or \\' for an apostrophe",
        ) from None


def without_comment(line: str) -> str:
    """Return a line up to a ``#`` that stands alone outside of quotes, as after a statement."""
    for found in _COMMENT.finditer(line):
        before = line[: found.start()]
        try:
            shlex.split(before)
        except ValueError:  # inside a quotation
            continue
        return before
    return line


def _plain_dash(token: str) -> str:
    """Refuse an option whose dashes a word processor has replaced."""
    found = _DASHES.match(token)
    if found is None:
        return token
    raise UsageError(
        f"{token!r:.60} begins with another dash than a keyboard's",
        fix=f"--{token[found.end() :]}",
    )


def asks_for_help(tokens: Sequence[str]) -> bool:
    """Tell whether a line asks for help as on a command line, first or last."""
    return bool(tokens) and bool({tokens[0], tokens[-1]} & {"-h", "--help"})


def number(text: str) -> float:
    """Read a finite number (an `argparse` type)."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def identifier(text: str) -> str:
    """Read a Python variable name (an `argparse` type)."""
    if not text.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not a variable name")
    return text


class ArgumentParser(MagicArgumentParser):
    """A magic's parser whose mistakes are `UsageError` with the nearest option.

    Abbreviated options are refused: a later option could change what they mean.

    Attributes
    ----------
    synopsis
        What follows the magic's name, for the help.
    """

    def __init__(self, prog: str, *, synopsis: str = "", description: str) -> None:
        super().__init__(
            prog=prog,
            usage=argparse.SUPPRESS,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.synopsis = synopsis
        self.allow_abbrev = False
        self.color = False  # Python 3.14 would colour what a notebook shows

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found wrong, on one line."""
        found = _ARGUMENT.match(message)
        if found:
            message = f"{found.group(1)}: {found.group(2)}"
        message = message.replace("invalid number value", "invalid float value")
        raise UsageError(message, fix=self.help_line)

    @property
    def help_line(self) -> str:
        """What shows this parser's help."""
        return f"{self.prog.split()[0]}?"

    def section(self) -> str:
        """Return this parser's part of a help text, under a heading."""
        title = f"{self.prog} {self.synopsis}".rstrip()
        return f"{title}\n{'-' * len(title)}\n{self.format_help()}"

    @property
    def option_strings(self) -> list[str]:
        """Every option, long spellings only where an option has one."""
        out: list[str] = []
        for action in self._actions:
            names = [name for name in action.option_strings if name.startswith("--")]
            out.extend(names or action.option_strings)
        return out

    def action(self, option: str) -> argparse.Action | None:
        """Return the action of an option string, None for an unknown one."""
        found: argparse.Action | None = self._option_string_actions.get(option)
        return found

    def parse(self, tokens: Sequence[str]) -> Namespace:
        """Parse all of `tokens`.

        Raises
        ------
        UsageError
            For anything this parser does not know, with the nearest it does.
        """
        for token in tokens:
            if self._is_unknown_option(token):
                self.refuse(token)
        arguments: Namespace
        arguments, unknown = self.parse_known_args(list(tokens))
        if unknown:
            self.refuse(unknown[0])
        return arguments

    def _is_unknown_option(self, token: str) -> bool:
        """Tell whether argparse would take a token's value for something else."""
        name = token.split("=", 1)[0]
        if not _OPTION.fullmatch(name) or name in self._option_string_actions:
            return False
        return name.startswith("--") or name[:2] not in self._option_string_actions

    def refuse(self, token: str) -> NoReturn:
        """Refuse an argument that does not exist."""
        name = token.split("=", 1)[0]
        if not name.startswith("-"):
            raise UsageError(f"{self.prog} has no place for {token!r:.60}", fix=self.help_line)
        near = nearest(name, self.option_strings)
        raise UsageError(
            f"{self.prog} has no option {name!r:.60}",
            expected=f"perhaps {near}" if near else "one of its options",
            fix=self.help_line,
        )
