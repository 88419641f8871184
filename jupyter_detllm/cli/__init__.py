"""``jupyter detllm``: one module per subcommand, imported when it is used."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from jupyter_detllm.cli._options import PROG, Parser
from jupyter_detllm.errors import DetLLMError, UsageError, nearest

__all__ = ["COMMANDS", "Command", "main"]

_INTERRUPTED = 130
_BROKEN_PIPE = 141


class _Module(Protocol):
    def configure(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, args: argparse.Namespace) -> int: ...


@dataclass(frozen=True, slots=True)
class Command:
    """A row of the table: a name, which is its module's, and its one-line help."""

    name: str
    help: str

    def load(self) -> _Module:
        """Import the module that does it."""
        module: _Module = import_module(f"jupyter_detllm.cli.{self.name}")
        return module


COMMANDS: tuple[Command, ...] = (
    Command("check", "compare outputs with their references; nothing is executed"),
    Command("rerun", "execute a copy in a fresh kernel, then check it"),
    Command("replay", "send recorded requests to an engine again; no notebook code is run"),
    Command("rescore", "score recorded tokens with an engine on this machine (advisory)"),
    Command("compare", "compare two notebooks, two fingerprints, or one of each"),
    Command("bisect", "name the setting that makes one cell differ from its reference"),
    Command("probe", "test whether a model's generations depend on what shares their batch"),
    Command("stamp", "make the stamps of outputs the references of their cells"),
    Command("strip", "remove stamps and references"),
    Command("show", "list the stamped cells of a notebook"),
    Command("fingerprint", "print the environment's fingerprint, or a notebook's"),
    Command(
        "doctor", "look at machine, environment and notebooks: what is wrong, and what fixes it"
    ),
    Command("kernel", "install, list or remove a kernel whose controls are set before Python"),
    Command("export", "turn a stamped environment into requirements, a lock file, a Dockerfile"),
    Command("cache", "show what the result cache holds, or clear it"),
    Command("serve", "start `vllm serve` with the controls of a level, and wait until it is ready"),
    Command("model", "fetch the demo model, list the models on this machine, digest one"),
)
_EPILOG = """exit codes:
  0  every cell was compared and accepted
  1  drift, divergence, or a policy that was not met
  2  usage, an unreadable file, a failed execution, a broken stamp
  3  nothing failed, but something was not verified: stale, recorded, stripped,
     unstamped, not comparable, skipped, relaxed (--accept lets these pass)"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; a user's mistake is one line."""
    _prepare_streams()
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        _flush()
    except DetLLMError as error:
        return _one_line(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _one_line("interrupted", _INTERRUPTED)
    except BrokenPipeError:
        # The reader has closed the pipe.
        _forget_stdout()
        return _BROKEN_PIPE
    return code


def _prepare_streams() -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        stream = getattr(sys, name)
        # A terminal that cannot show a character must not break a report.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _flush() -> None:
    """Flush the output; a result that cannot be delivered is not a success."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _forget_stdout()
        raise UsageError(f"the result cannot be written: {error.strerror}") from None


def _forget_stdout() -> None:
    """Keep the interpreter's last flush from complaining."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _one_line(text: str, code: int) -> int:
    from jupyter_detllm.cli._output import notice

    notice(f"{PROG}: {text}")
    return code


def _dispatch(argv: list[str]) -> int:
    first = argv[0] if argv else "--help"
    if first in ("-h", "--help", "help") and len(argv) < 2:
        sys.stdout.write(_help())
        return 0 if argv else 2
    if first in ("-V", "--version"):
        from jupyter_detllm import __version__

        sys.stdout.write(f"jupyter-detllm {__version__}\n")
        return 0
    if first == "help":
        argv = [argv[1], "--help"]
    command = _find(argv[0])
    module = command.load()
    parser = Parser(prog=f"{PROG} {command.name}", description=f"{command.help}.")
    module.configure(parser)
    try:
        args = parser.parse_args(argv[1:])
    except SystemExit as done:  # only --help ends this way
        return int(done.code or 0)
    return module.run(args)


def _find(name: str) -> Command:
    for command in COMMANDS:
        if command.name == name:
            return command
    names = [command.name for command in COMMANDS]
    raise UsageError(
        f"there is no {'option' if name.startswith('-') else 'command'} {name[:40]!r}",
        meant=nearest(name, names),
        expected=", ".join(names),
        fix=f"{PROG} --help",
    )


def _help() -> str:
    width = max(len(command.name) for command in COMMANDS)
    rows = [f"  {command.name:<{width}}  {command.help}" for command in COMMANDS]
    return "\n".join(
        [
            f"usage: {PROG} COMMAND [options]",
            "",
            "Deterministic LLM generations in Jupyter: stamped, and checked again.",
            "",
            "commands:",
            *rows,
            "",
            f"`{PROG} COMMAND --help` says more; --version prints the version.",
            "",
            _EPILOG,
            "",
        ]
    )
