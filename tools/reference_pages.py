"""Reference pages made of parsers and configurables: commands, magics, configuration.

One set of functions writes options of the command line, of magics and of pytest. sphinx-argparse
would replace the first alone (it calls functions without arguments), and its pages could be read
on the built site only.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from jupyter_detllm import pytest_plugin
from jupyter_detllm.cli import COMMANDS
from jupyter_detllm.cli import main as cli_main
from jupyter_detllm.cli._options import PROG, Parser
from jupyter_detllm.kernel.arguments import (
    ArgumentParser,
    detgen_parser,
    setup_parser,
)
from jupyter_detllm.kernel.commands import VERBS
from jupyter_detllm.kernel.config import DetLLM
from jupyter_detllm.serverext import DetLLMServer
from tools.markdown import NOTE, table
from tools.requirements import ROOT

__all__ = ["commands", "configuration", "magics"]

_HEAD = ("argument", "meaning", "default")
_LAB_SETTINGS = ROOT / "labextension" / "schema" / "plugin.json"


def commands() -> str:
    """Return the page of the command line: every command with every option."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        cli_main(["--help"])
    parts = [
        "# Commands\n",
        NOTE,
        f"`{PROG} COMMAND --help` shows the same. `python -m jupyter_detllm COMMAND` is the same "
        "command, run by the Python that is named.\n",
        f"```text\n{shown.getvalue().strip()}\n```\n",
    ]
    for command in COMMANDS:
        parser = Parser(prog=f"{PROG} {command.name}", description=f"{command.help}.")
        command.load().configure(parser)
        parts += _command(parser, 2)
    return "\n".join(parts)


def _command(parser: argparse.ArgumentParser, depth: int) -> Iterator[str]:
    yield f"{'#' * depth} {parser.prog}\n"
    if parser.description:
        yield f"{_sentence(parser.description)}\n"
    yield f"```text\n{_usage(parser)}\n```\n"
    yield from _options(parser)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            texts = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, verb in action.choices.items():
                verb.description = verb.description or f"{texts.get(name, '')}."
                yield from _command(verb, depth + 1)


def _usage(parser: argparse.ArgumentParser) -> str:
    shown = [action for action in parser._actions if _is_shown(action)]
    positional = [_spelled(action) for action in shown if not action.option_strings]
    verbs = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    options = ["[options]"] if len(shown) > len(positional) else []
    words = [parser.prog, *options, *positional, *(str(verb.metavar) for verb in verbs)]
    return " ".join(words).replace("`", "")


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    rows = [_row(action) for action in parser._actions if _is_shown(action)]
    if any(row[2] for row in rows):
        yield table(_HEAD, rows)
    elif rows:
        yield table(_HEAD[:2], [row[:2] for row in rows])


def _is_shown(action: argparse.Action) -> bool:
    if isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
        return False
    return action.help != argparse.SUPPRESS


def _row(action: argparse.Action) -> tuple[str, str, str]:
    text = argparse.HelpFormatter("")._expand_help(action) if action.help else ""
    return _spelled(action), text, "" if "default" in text else _default(action)


def _spelled(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else _value(action)
    if action.option_strings:
        shown = f"[{value}]" if action.nargs == "?" else value
        return f"`{' '.join([', '.join(action.option_strings), shown]).rstrip()}`"
    several = "..." if action.nargs in ("+", "*") else ""
    return f"`[{value}]{several}`" if action.nargs in ("?", "*") else f"`{value}{several}`"


def _value(action: argparse.Action) -> str:
    if action.metavar:
        return str(action.metavar)
    return "|".join(map(str, action.choices)) if action.choices else action.dest.upper()


def _default(action: argparse.Action) -> str:
    value: object = action.default
    unset = value is None or value is False or value in ("", argparse.SUPPRESS)
    return "" if unset or value == [] or action.nargs == 0 else f"`{value}`"


def _sentence(text: str) -> str:
    joined = " ".join(text.split())
    return joined[:1].upper() + joined[1:]


def magics() -> str:
    """Return the page of the magics: every verb with every option."""
    parts = [
        "# Magics\n",
        NOTE,
        "`%load_ext jupyter_detllm` brings a line magic and a cell magic. `%detllm?` and "
        "`%%detgen?` show the same with examples; Tab completes verbs, options and models.\n",
    ]
    parsers = [setup_parser(), *(verb.parser for verb in VERBS.values()), detgen_parser()]
    for parser in parsers:
        parts += _magic(parser)
    return "\n".join(parts)


def _magic(parser: ArgumentParser) -> Iterator[str]:
    yield f"## {parser.prog}\n"
    yield f"```text\n{parser.prog} {parser.synopsis}".rstrip() + "\n```\n"
    yield f"{_sentence(str(parser.description))}\n"
    yield from _options(parser)


class _Group:
    """What a plugin adds its options to; they end up in an argparse parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser

    def getgroup(self, _name: str, _text: str = "") -> _Group:
        return self

    def addoption(self, *names: str, **options: Any) -> None:
        self.parser.add_argument(*names, **options)


def configuration() -> str:
    """Return the page of everything that has a default to be set."""
    plugin = argparse.ArgumentParser("pytest", add_help=False)
    add: Callable[[pytest.Parser], None] = pytest_plugin.pytest_addoption
    add(_Group(plugin))  # type: ignore[arg-type]
    head = ("setting", "type", "default", "meaning")
    settings = json.loads(_LAB_SETTINGS.read_text(encoding="utf-8"))["properties"]
    lab = [
        (f"`{name}`", " \\| ".join(f"`{v}`" for v in row["enum"]), f"`{row['default']}`",
         row["description"])
        for name, row in settings.items()
    ]  # fmt: skip
    parts = [
        "# Configuration\n",
        NOTE,
        "Options on a line win over all of these.\n",
        "## Kernel\n",
        "`%config DetLLM.temperature = 0` in a notebook, or `c.DetLLM.temperature = 0` in "
        "`ipython_config.py`.\n",
        table(head, _traits(DetLLM)),
        "## Jupyter server\n",
        'In `jupyter_server_config.py`: `c.DetLLMServer.stamp_on_save = "new"`.\n',
        table(head, _traits(DetLLMServer)),
        "## JupyterLab and Notebook 7\n",
        "Settings > detllm.\n",
        table(head, lab),
        "## pytest\n",
        "[Verifying notebooks with pytest](../howto/pytest.md) says what they do together.\n",
        *_options(plugin),
    ]
    return "\n".join(parts)


def _traits(configurable: type) -> Sequence[tuple[str, str, str, str]]:
    traits = configurable.class_traits(config=True)  # type: ignore[attr-defined]
    own = [(name, trait) for name, trait in sorted(traits.items()) if name in vars(configurable)]
    return [
        (f"`{configurable.__name__}.{name}`", trait.info(), f"`{trait.default_value!r}`",
         " ".join(trait.help.split()))
        for name, trait in own
    ]  # fmt: skip
