"""What the magics understand: one parser per verb, and the help made of them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from jupyter_detllm.core.levels import Level
from jupyter_detllm.kernel.argline import ArgumentParser, identifier, number
from jupyter_detllm.kernel.asking import CELL_NAME, NAME_EXPECTED
from jupyter_detllm.kernel.defaults import DEFAULT_LEVEL

__all__ = [
    "DETERMINISTIC_MODES",
    "VERB_PARSERS",
    "detgen_help",
    "detgen_parser",
    "detllm_help",
    "setup_parser",
    "verb_parser",
]

DETERMINISTIC_MODES = ("off", "warn", "error")
_FLAG: dict[str, Any] = {"action": "store_true", "default": None}
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


def _add_setup(parser: ArgumentParser, *, shown: bool = True) -> ArgumentParser:
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
    return _add_setup(
        ArgumentParser(
            "%detllm",
            synopsis="[options]",
            description="Seed everything and set the determinism controls; later: show status.",
        )
    )


@cache
def _use() -> ArgumentParser:
    parser = ArgumentParser(
        "%detllm use",
        synopsis="MODEL [options] [engine options]",
        description=(
            "Start the kernel's one engine. The options of %detllm are understood too; any other\n"
            "goes to the engine as vLLM spells it: --max-model-len 4096 or max_model_len=4096."
        ),
    )
    parser.add_argument(
        "model", metavar="MODEL", help="demo, fake, a folder or a Hugging Face id (owner/name)"
    )
    return _add_setup(parser, shown=False)


@cache
def _status() -> ArgumentParser:
    return ArgumentParser(
        "%detllm status", description="Level, seed, engine, every control, and the stamped cells."
    )


@cache
def _stamps() -> ArgumentParser:
    parser = ArgumentParser(
        "%detllm stamps", synopsis="[options]", description="List the stamped cells of this kernel."
    )
    add = parser.add_argument
    add("--emit", metavar="NAME", help="put the stamp of cell NAME into this cell's output")
    add("--forget", metavar="NAME", help="free the name of a cell that was deleted")
    return parser


@cache
def _release() -> ArgumentParser:
    return ArgumentParser(
        "%detllm release", description="Shut the engine down; say what was freed and what was not."
    )


@cache
def _bisect() -> ArgumentParser:
    parser = ArgumentParser(
        "%detllm bisect",
        synopsis="[NAME] [options]",
        description=(
            "Send a saved cell's recorded requests again, with one setting changed at a time,\n"
            "in processes of their own; name the change that makes its difference vanish."
        ),
    )
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="name or number of the cell that differs")
    add("--notebook", metavar="FILE", help="the saved notebook, where the front end does not tell")
    add("--policy", metavar="POLICY", help="what counts as equal: tokens, bitwise, ...")
    add("--model", metavar="MODEL", help="what to load, where it is not demo")
    add("--only", metavar="LIST", default="", help="try these settings only, comma-separated")
    add("--all", action="store_true", help="go on after the first that makes it vanish")
    return parser


VERB_PARSERS: Mapping[str, Callable[[], ArgumentParser]] = {
    "use": _use,
    "status": _status,
    "stamps": _stamps,
    "release": _release,
    "bisect": _bisect,
}


def verb_parser(verb: str) -> ArgumentParser:
    """Return the parser of a verb; raise `KeyError` for one that does not exist."""
    return VERB_PARSERS[verb]()


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


_DETLLM_HEAD = """\
Same requests, same text: seed the kernel, set its controls, run one engine.

Examples
--------
Seed and set controls first, before anything imports torch or vllm::

  %detllm --seed 42

Start the engine; generate with %%detgen in a cell of its own::

  %detllm use demo --max-model-len 4096

Free the engine to start another::

  %detllm release

Without a verb or options it shows the status. The verbs are: {verbs}.
"""

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

Raw completion with a variable put in::

  %%detgen --text --fill --stop "\\n"
  The capital of {country} is
"""


def detllm_help() -> str:
    """Return what `%detllm?` shows."""
    head = _DETLLM_HEAD.format(verbs=", ".join(VERB_PARSERS))
    parts = [setup_parser(), *(verb_parser(verb) for verb in VERB_PARSERS)]
    return "\n".join([head, *(_section(parser) for parser in parts)])


def detgen_help() -> str:
    """Return what `%%detgen?` shows."""
    return f"{_DETGEN_HEAD}\n{_section(detgen_parser())}"


def _section(parser: ArgumentParser) -> str:
    title = f"{parser.prog} {parser.synopsis}".rstrip()
    return f"{title}\n{'-' * len(title)}\n{parser.format_help()}"
