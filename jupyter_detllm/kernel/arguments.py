"""Parsers for the lines of `%detllm` and `%%detgen`, and their help.

Quoting is as in a shell, and every mistake is one line with a hint. The verbs of `%detllm` are
in `kernel.commands`; `use` takes its own options from the line and passes on those of the
engine.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NoReturn

from IPython.core.magic_arguments import MagicArgumentParser

from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.levels import DEFAULT_LEVEL, Level
from jupyter_detllm.core.options import option_name
from jupyter_detllm.core.source import CELL_NAME
from jupyter_detllm.engines.base import named_engines
from jupyter_detllm.errors import UsageError, nearest
from jupyter_detllm.kernel.prompts import NAME_EXPECTED
from jupyter_detllm.kernel.session import put_option

__all__ = [
    "EVERY_CELL",
    "ArgumentParser",
    "Namespace",
    "UseParser",
    "add_setup",
    "asks_for_help",
    "check_model",
    "detgen_help",
    "detgen_parser",
    "number",
    "refuse_variables",
    "setup_parser",
    "split_line",
    "without_comment",
]

Namespace = argparse.Namespace
_OPTION_NAME = re.compile(r"--?[A-Za-z][\w-]*")
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
        f"{token!r:.60} begins with a dash that is not a hyphen",
        fix=f"--{token[found.end() :]}",
    )


_VARIABLE = re.compile(r"\$([^\W\d]\w*)|\{([^\W\d]\w*)\}")


def refuse_variables(tokens: Sequence[str], namespace: Mapping[str, object]) -> None:
    """Refuse ``$name`` and ``{name}``, which IPython puts into the lines of other magics.

    Here a line may hold patterns and messages with such characters, and its text is what is
    stamped. A dollar that names no variable stays as it is, but for a value of its own.

    Raises
    ------
    UsageError
        With the way to use a variable.
    """
    for token in tokens:
        for found in _VARIABLE.finditer(token):
            name = found[1] or found[2]
            alone = found[1] is not None and found[0] == token
            if alone or (name in namespace and not name.startswith("_")):
                raise UsageError(
                    f"{found[0]} on the magic's line is not replaced by the variable",
                    expected="the value itself",
                    fix="det.generate(...) in a Python cell, which takes variables",
                )


def asks_for_help(tokens: Sequence[str]) -> bool:
    """Return whether a line asks for help as on a command line, first or last."""
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

    Abbreviated options are refused, since a later option could change their meaning.

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
        """Raise argparse's error on one line."""
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
        """Return whether argparse would misinterpret a token's value."""
        name = token.split("=", 1)[0]
        if not _OPTION_NAME.fullmatch(name) or name in self._option_string_actions:
            return False
        return name.startswith("--") or name[:2] not in self._option_string_actions

    def refuse(self, token: str) -> NoReturn:
        """Refuse an argument that does not exist."""
        name = token.split("=", 1)[0]
        if not name.startswith("-"):
            raise UsageError(f"{self.prog} has no place for {token!r:.60}", fix=self.help_line)
        raise UsageError(
            f"{self.prog} has no option {name!r:.60}",
            meant=nearest(name, self.option_strings),
            expected="one of its options",
            fix=self.help_line,
        )


_ASSIGNMENT = re.compile(r"[A-Za-z][\w-]*=")
_ENGINE_OPTION = re.compile(r"--[A-Za-z][\w-]*(=.*)?", re.DOTALL)


class UseParser(ArgumentParser):
    """The parser of `%detllm use`: what it does not know is the engine's."""

    def parse(self, tokens: Sequence[str]) -> Namespace:
        """Return our arguments, and the engine's options by name as ``engine_options``.

        Raises
        ------
        UsageError
            Without a model, for a second one, or an option given twice.
        """
        if not tokens or tokens[0].startswith("-") or _ASSIGNMENT.match(tokens[0]):
            raise UsageError(
                "%detllm use needs a model first",
                expected="demo, the name of an engine, a folder or owner/name",
                fix="%detllm use demo",
            )
        ours = [tokens[0]]
        engine: dict[str, FieldValue] = {}
        rest = list(tokens[1:])
        while rest:
            token = rest.pop(0)
            action = self.action(token.split("=", 1)[0])
            if action is not None:
                ours.append(token)
                if action.nargs != 0 and "=" not in token and rest:
                    ours.append(rest.pop(0))
            else:
                _take(token, rest, engine)
        check_model(tokens[0])
        arguments = super().parse(ours)
        arguments.engine_options = engine
        return arguments


def check_model(model: str) -> None:
    """Refuse a misspelt ``demo`` or engine at once; any other name is the engine's to judge.

    Raises
    ------
    UsageError
        With the name that was meant.
    """
    from jupyter_detllm.models import DEMO_NAME

    known = (DEMO_NAME, *named_engines())
    near = nearest(model, known)
    if near and model not in known and not os.path.exists(model):
        raise UsageError(f"there is no model {model!r:.60}", meant=near, fix=f"%detllm use {near}")


def _take(token: str, rest: list[str], engine: dict[str, FieldValue]) -> None:
    """Move one engine option, with its value, from the line to `engine`."""
    value: FieldValue
    if _ASSIGNMENT.match(token) or (_ENGINE_OPTION.fullmatch(token) and "=" in token):
        spelled, _, value = token.partition("=")
    elif _ENGINE_OPTION.fullmatch(token):
        spelled = token
        if rest and not _ENGINE_OPTION.fullmatch(rest[0]) and not _ASSIGNMENT.match(rest[0]):
            value = rest.pop(0)
        else:
            value = not token.startswith("--no-")
            spelled = token.replace("--no-", "--", 1) if token.startswith("--no-") else token
    else:
        raise UsageError(
            f"%detllm use has no place for {token!r:.60}",
            expected="one model, then --option value or option=value",
            fix="%detllm?",
        )
    put_option(engine, option_name(spelled), value)


DETERMINISTIC_MODES = ("off", "warn", "error")
EVERY_CELL = "*"
"""What `--emit` without a name stands for; no cell can be named so."""

_FLAG: dict[str, Any] = {"action": "store_true", "default": None}


def add_setup(parser: ArgumentParser, *, shown: bool = True) -> ArgumentParser:
    """Add what the session is set up with; None means: leave it as it is."""
    modes = ", ".join(DETERMINISTIC_MODES)
    levels = ", ".join(Level)
    rows: list[tuple[str, str, dict[str, Any]]] = [
        ("--seed", "root seed, 0 to 2**63 - 1 (first call: 0)", {"type": int, "metavar": "N"}),
        (
            "--level",
            f"guarantee level: {levels} (first call: {DEFAULT_LEVEL})",
            {"choices": [level.value for level in Level], "metavar": "LEVEL"},
        ),
        (
            "--torch-deterministic",
            f"torch's deterministic algorithms: {modes}",
            {"choices": DETERMINISTIC_MODES, "metavar": "MODE"},
        ),
        ("--launch-blocking", "CUDA kernels one after the other: slow, to find an error", _FLAG),
        ("--dtype", "the engine's dtype, such as float32", {"metavar": "TYPE"}),
        ("--no-tf32", "never round float32 operands to TF32", _FLAG),
        ("--eager", "start the engine without compilation or CUDA graphs", _FLAG),
    ]
    for option, text, more in rows:
        parser.add_argument(option, help=text if shown else argparse.SUPPRESS, **more)
    return parser


@cache
def setup_parser() -> ArgumentParser:
    """Return the parser of `%detllm` without a verb."""
    return add_setup(
        ArgumentParser(
            "%detllm",
            synopsis="[options]",
            description="Seed everything and set the determinism controls; later: show status.",
        )
    )


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}


def _cell_name(text: str) -> str:
    if not CELL_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r:.60} is not a cell name; expected {NAME_EXPECTED}"
        )
    return text


def _stop(text: str) -> str:
    r"""Read a stop string: \n, \t, \r and \\ are what they are in Python."""
    if not text:
        raise argparse.ArgumentTypeError("an empty stop string would stop at once")
    return re.sub(r"\\([ntr\\])", lambda found: _ESCAPES[found.group(1)], text)


@cache
def detgen_parser() -> ArgumentParser:
    """Return the parser of `%%detgen`'s line."""
    parser = ArgumentParser(
        "%%detgen",
        synopsis="[NAME] [options]",
        description=(
            "The body is one chat message, or several prompts split at lines that are exactly\n"
            "---. The cell's output gets the text and a stamp."
        ),
    )
    parser.add_argument(
        "name", nargs="?", default=None, type=_cell_name, metavar="NAME", help="name of the cell"
    )
    _add_prompt_options(parser)
    _add_sampling_options(parser)
    _add_result_options(parser)
    _add_cache(parser)
    _add_expectation(parser)
    return parser


def _add_prompt_options(parser: ArgumentParser) -> None:
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--text", action="store_true", help="complete raw text, no chat template")
    kinds.add_argument(
        "--messages", action="store_true", help="the body is JSON: a list of chat messages"
    )
    add = parser.add_argument
    add("--system", metavar="TEXT", help="system message before each prompt")
    add("--no-split", action="store_true", help="one prompt: lines of --- are part of it")
    add("--fill", action="store_true", help="fill in variables for {name}; {{name}} stays {name}")


def _add_sampling_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--temperature", type=number, metavar="T", help="0 is greedy")
    add("--top-p", type=number, metavar="P", help="sample from the likeliest mass P, 0 < P <= 1")
    add("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens; 0 is off")
    add("--max-tokens", type=int, metavar="N", help="most tokens per completion")
    add("-n", type=int, default=1, metavar="N", help="completions per prompt")
    add(
        "--stop",
        action="append",
        type=_stop,
        metavar="TEXT",
        help="end before TEXT; may be given again; \\n is a line end",
    )
    add(
        "--seed",
        type=int,
        metavar="S",
        help="occurrence i of a prompt, completion j gets S + i*n + j (default: derived seeds)",
    )
    add("--beam-width", type=int, metavar="N", help="beam search with N beams")
    add("--length-penalty", type=number, metavar="A", help="of beam search")


def _add_result_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--policy",
        metavar="POLICY",
        help="what a check accepts: tokens, bitwise, within(ATOL) or prefix(N)",
    )
    add("--out", type=identifier, metavar="VAR", help="put the list of generations into VAR")
    add(
        "--no-store-prompt",
        action="store_true",
        default=None,
        help="stamp digests of the prompts only; they cannot be replayed then",
    )


def _add_cache(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--cache",
        action=argparse.BooleanOptionalAction,
        help="answer equal requests from the cache; this verifies nothing",
    )
    add(
        "--verify-sample",
        type=number,
        metavar="P",
        help="with --cache: share of cached results to generate again and compare, 0 to 1",
    )


def _add_expectation(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--expect",
        metavar="PATTERN",
        help="regular expression that each text must match; @FILE.json or @VAR: a JSON schema",
    )
    add("--tries", type=int, metavar="N", help="tries for a text that does not match (default 1)")
    add(
        "--unmet",
        choices=("error", "warn"),
        metavar="WHAT",
        help="when the last try is not as expected: error (the default) or warn",
    )


_DETGEN_HEAD = """\
Generate from the cell's body and stamp what the text depends on.

Examples
--------
One chat message, greedy::

  %%detgen haiku --temperature 0
  Write a haiku about rain.

Three prompts in one batch, sampled, into a variable::

  %%detgen colours --temperature 0.8 --max-tokens 20 --out answers
  Name a colour.
  ---
  Name another colour.
  ---
  Name a colour nobody knows.

An answer of one digit, tried up to five times::

  %%detgen --temperature 0.8 --expect '^\\d$' --tries 5
  Rate this haiku from 0 to 9. Answer with one digit.

Raw completion with a variable put in::

  %%detgen --text --fill --stop "\\n"
  The capital of {country} is
"""


def detgen_help() -> str:
    """Return what `%%detgen?` shows."""
    return f"{_DETGEN_HEAD}\n{detgen_parser().section()}"
