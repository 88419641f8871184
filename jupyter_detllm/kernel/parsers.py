"""What `%detllm` understands: one parser per verb, and the help made of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from jupyter_detllm.core.levels import DEFAULT_LEVEL, Level
from jupyter_detllm.kernel.argline import ArgumentParser, number

__all__ = [
    "DETERMINISTIC_MODES",
    "EVERY_CELL",
    "VERB_PARSERS",
    "detllm_help",
    "setup_parser",
    "verb_parser",
]

DETERMINISTIC_MODES = ("off", "warn", "error")
EVERY_CELL = "*"
"""What `--emit` without a name stands for; no cell can be named so."""

_FLAG: dict[str, Any] = {"action": "store_true", "default": None}


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
            "goes to the engine as vLLM spells it: --max-model-len 4096 or max_model_len=4096.\n"
            "--lora FOLDER loads a LoRA adapter, whose digest is recorded beside the model's."
        ),
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="demo, fake, a folder, a Hugging Face id (owner/name), or a server's address",
    )
    return _add_setup(parser, shown=False)


@cache
def _status() -> ArgumentParser:
    return ArgumentParser(
        "%detllm status", description="Level, seed, engine, every control, and the stamped cells."
    )


@cache
def _show() -> ArgumentParser:
    parser = ArgumentParser(
        "%detllm show",
        synopsis="[--static]",
        description=(
            "A panel: the fingerprint by group, late controls, self-test, stamped cells. Without\n"
            "widgets (--static, a terminal) the same as text and HTML, for notebooks to be kept."
        ),
    )
    parser.add_argument("--static", action="store_true", help="never make a widget")
    return parser


@cache
def _check() -> ArgumentParser:
    parser = ArgumentParser(
        "%detllm check",
        synopsis="[FILE] [options]",
        description="Compare what the saved notebook holds: outputs with their references.",
    )
    add = parser.add_argument
    add("notebook", nargs="?", metavar="FILE", help="the notebook, where the front end is silent")
    add("--policy", metavar="POLICY", help="what counts as equal: tokens, bitwise, ...")
    return parser


@cache
def _stamps() -> ArgumentParser:
    parser = ArgumentParser(
        "%detllm stamps",
        synopsis="[options]",
        description="List the stamped cells of this kernel; JupyterLab puts lost outputs back.",
    )
    add = parser.add_argument
    add(
        "--emit",
        nargs="?",
        const=EVERY_CELL,
        metavar="NAME",
        help="put text and stamp of cell NAME, or of all cells, into this cell's output",
    )
    add("--forget", metavar="NAME", help="free the name of a cell that was deleted")
    return parser


@cache
def _release() -> ArgumentParser:
    return ArgumentParser(
        "%detllm release", description="Shut the engine down; say what was freed and what was not."
    )


@cache
def _probe() -> ArgumentParser:
    text = "Test whether generations of the running engine depend on what shares their batch."
    parser = ArgumentParser("%detllm probe", synopsis="[--short]", description=text)
    parser.add_argument(
        "--short",
        action="store_true",
        help="fewer prompts and compositions, as at an engine's start",
    )
    return parser


@cache
def _doctor() -> ArgumentParser:
    parser = ArgumentParser(
        "%detllm doctor",
        synopsis="[FILE] [options]",
        description=(
            "Look at this kernel, its machine and the notebook: what is wrong, and what mends it.\n"
            "Code is read, never executed."
        ),
    )
    add = parser.add_argument
    add("notebook", nargs="?", metavar="FILE", help="the notebook, where the front end is silent")
    add("--model", metavar="FOLDER", help="also read this model's config.json")
    return parser


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


@cache
def _metrics() -> ArgumentParser:
    parser = ArgumentParser(
        "%detllm metrics",
        synopsis="[options]",
        description=(
            "Tokens/s, latency, KV cache, memory and cache hits of this kernel and its cells.\n"
            "True of this run only. A threshold that is set stays set; 0 takes it away."
        ),
    )
    add = parser.add_argument
    add("--min-tokens-per-second", type=number, metavar="N", help="warn below so many tokens/s")
    add("--max-p99-ms", type=number, metavar="MS", help="warn when p99 per request takes longer")
    add("--max-token-p99-ms", type=number, metavar="MS", help="the same from token to token")
    add("--max-memory", type=number, metavar="SHARE", help="warn above this share, 0.9 is 90 %%")
    add("--json", action="store_true", help="show JSON")
    return parser


VERB_PARSERS: Mapping[str, Callable[[], ArgumentParser]] = {
    "use": _use,
    "status": _status,
    "show": _show,
    "check": _check,
    "stamps": _stamps,
    "release": _release,
    "bisect": _bisect,
    "probe": _probe,
    "metrics": _metrics,
    "doctor": _doctor,
}


def verb_parser(verb: str) -> ArgumentParser:
    """Return the parser of a verb; raise `KeyError` for one that does not exist."""
    return VERB_PARSERS[verb]()


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


def detllm_help() -> str:
    """Return what `%detllm?` shows."""
    head = _DETLLM_HEAD.format(verbs=", ".join(VERB_PARSERS))
    parts = [setup_parser(), *(verb_parser(verb) for verb in VERB_PARSERS)]
    return "\n".join([head, *(parser.section() for parser in parts)])
