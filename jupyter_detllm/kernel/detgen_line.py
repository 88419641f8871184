"""What `%%detgen` understands, and the help made of it."""

from __future__ import annotations

import argparse
import re
from functools import cache

from jupyter_detllm.kernel.argline import ArgumentParser, identifier, number
from jupyter_detllm.kernel.asking import CELL_NAME, NAME_EXPECTED

__all__ = ["detgen_help", "detgen_parser"]

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
    add("--fill", action="store_true", help="put variables in for {name}; {{name}} stays {name}")


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
        help="take an equal request's result out of the cache; it verifies nothing",
    )
    add(
        "--verify-sample",
        type=number,
        metavar="P",
        help="with --cache: share of cached results generated again and compared, 0 to 1",
    )


def _add_expectation(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--expect",
        metavar="PATTERN",
        help="regular expression to be found in each text; @FILE.json or @VAR: a JSON schema",
    )
    add("--tries", type=int, metavar="N", help="generate again what is not as expected (default 1)")
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
