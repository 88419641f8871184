"""``jupyter detllm serve``: a `vllm serve` with the controls of a level, proven before use."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from jupyter_detllm.cli._options import Parser, add_json, add_level, add_quiet, add_seconds
from jupyter_detllm.cli._output import catch_termination, notice, show, teller
from jupyter_detllm.core.canonical import Json
from jupyter_detllm.core.levels import Level
from jupyter_detllm.errors import EngineError, UsageError

if TYPE_CHECKING:
    from jupyter_detllm.serving.plan import CacheSettings, ListenAddress, ServePlan
    from jupyter_detllm.serving.process import Server

__all__ = ["cache_line", "cache_settings", "configure", "planned", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options; what follows ``--`` is vLLM's."""
    if isinstance(parser, Parser):
        parser.tail = "vllm"
    parser.usage = f"{parser.prog} MODEL [options] [-- vLLM's own options]"
    parser.add_argument("model", metavar="MODEL", help="demo, a folder or a Hugging Face id")
    add_level(parser, Level.INVARIANT, "invariant (default) or seeded; no server can be repeatable")
    parser.add_argument("--host", default="127.0.0.1", help="default: this machine only")
    parser.add_argument("--port", type=int, default=8000, help="default 8000; 0 for a free one")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="root seed (default 0)")
    parser.add_argument("--no-self-test", action="store_true", help="skip the proof of the level")
    add_seconds(parser, "--start-timeout", 900.0, "longest wait until it is ready")
    add_cache(parser)
    add_quiet(parser)
    add_json(parser)


def planned(args: argparse.Namespace, state: Path, place: ListenAddress) -> ServePlan:
    """Return what a command line asks for; nothing is started.

    Raises
    ------
    UsageError, ControlError, ModelError
        If it cannot be served as requested.
    """
    from jupyter_detllm.core.generation import MAX_SEED
    from jupyter_detllm.models import resolve_model
    from jupyter_detllm.serving.plan import plan_server

    if not 0 <= args.seed <= MAX_SEED:
        raise UsageError(f"the seed {args.seed} is out of range", expected="0 to 2**63 - 1")
    return plan_server(
        resolve_model(args.model),
        Level(args.level),
        args.vllm,
        place,
        seed=args.seed,
        environ=os.environ,
        state=state,
        cache=cache_settings(args),
    )


def run(args: argparse.Namespace) -> int:
    """Serve until stopped; return 0, or the error that ended it."""
    say = teller(args)
    catch_termination()
    signal.signal(signal.SIGHUP, signal.default_int_handler)
    from jupyter_detllm.engines.start import model_identity
    from jupyter_detllm.engines.vllm.output import open_log
    from jupyter_detllm.serving.process import free_place, started

    with tempfile.TemporaryDirectory(prefix="detllm-serve-") as folder:
        state = Path(folder)
        plan = planned(args, state, free_place(args.host, args.port))
        if plan.notice:
            notice(plan.notice)
        identity = model_identity(args.model)
        path, log = open_log()
        with log, started(plan, identity, log, path, state) as server:
            say(f"starting vllm serve; its log is {path}")
            _warn(args.host)
            server.wait_ready(args.start_timeout)
            test = _shown_test(args, plan, say)
            try:
                _tell(args, server, test)
                code = server.wait(notice)
            except KeyboardInterrupt:
                say("stopping the server")
                return 0
            raise EngineError(server.ended(code), fix=f"read its log, {path}")


def _warn(host: str) -> None:
    from jupyter_detllm.engines.remote.client import API_KEY_VARIABLE

    if host not in {"127.0.0.1", "::1", "localhost"} and not os.environ.get(API_KEY_VARIABLE):
        notice(f"everyone who reaches {host} can use it: {API_KEY_VARIABLE} is not set")


def _shown_test(
    args: argparse.Namespace, plan: ServePlan, say: Callable[[str], None]
) -> str | None:
    from jupyter_detllm.serving.process import proven

    if plan.method is None:
        return None
    if args.no_self_test:
        return "not run (--no-self-test): the level is not proven"
    return proven(plan, say)


def _tell(args: argparse.Namespace, server: Server, test: str | None) -> None:
    """Print the address and the settings."""
    from jupyter_detllm.serving.plan import flags

    plan = server.plan
    url = plan.place.url
    method = plan.method.name if plan.method else None
    options = flags(plan.options)
    value: dict[str, Json] = {
        "url": url,
        "model": plan.served,
        "level": plan.level.value,
        "method": method,
        "self_test": test or "",
        "variables": dict(plan.set_here),
        "options": [*options],
        "log": str(server.log),
        "cache": plan.cache is not None,
    }
    how = f" ({method})" if method else ""
    lines = [f"serving {plan.served} at {url}, level {plan.level}{how}"]
    lines += [f"  self-test  {test}"] if test else []
    lines.append(f"  variables  {' '.join(f'{n}={v}' for n, v in plan.set_here.items())}")
    lines += [f"  options    {' '.join(options)}"] if options else []
    lines.append(f"  log        {server.log}")
    lines += [f"  cache      {cache_line(plan.level)}"] if plan.cache else []
    lines.append(f"  notebook   %detllm use {url}")
    lines.append("  stop it with Ctrl-C")
    show(args, value, "\n".join(lines))
    sys.stdout.flush()


def add_cache(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--cache", action="store_true", help="cache answers: generate equal requests only once")
    add("--cache-path", metavar="FOLDER", help="where; default: the user's cache")
    add(
        "--verify-sample",
        type=float,
        metavar="P",
        help="with --cache: share of cached answers to generate again and compare, 0 to 1",
    )


def cache_settings(args: argparse.Namespace) -> CacheSettings | None:
    """Return where answers are kept; None without `--cache`.

    Raises
    ------
    UsageError
        For options that do not fit.
    """
    from jupyter_detllm.cache.store import results_folder
    from jupyter_detllm.serving.plan import CacheSettings

    share = args.verify_sample
    if not args.cache:
        if share is not None or args.cache_path:
            raise UsageError(
                "--verify-sample and --cache-path are about --cache", fix="add --cache"
            )
        return None
    if share is not None and not 0 <= share <= 1:
        raise UsageError(f"the share to verify is {share:g}", expected="0 to 1")
    folder = Path(args.cache_path) if args.cache_path else results_folder()
    return CacheSettings(folder, share or 0.0)


def cache_line(level: Level) -> str:
    """Return a line about cached answers."""
    what = "equal requests are answered once (temperature 0, or with a seed; not streamed)"
    if level is Level.INVARIANT:
        return what
    return f"{what}; the first answer stays, whatever shared its batch"
