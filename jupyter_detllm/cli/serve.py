"""``jupyter detllm serve``: a `vllm serve` with the controls of a level, proven before use."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from jupyter_detllm.cli._caching import add_cache, cache_line, inner_place, kept_before
from jupyter_detllm.cli._engines import catch_termination
from jupyter_detllm.cli._options import Parser, add_json
from jupyter_detllm.cli._output import notice, write, write_json
from jupyter_detllm.core.levels import Level
from jupyter_detllm.errors import EngineError, UsageError

if TYPE_CHECKING:
    from jupyter_detllm.serving.plan import Place, ServePlan
    from jupyter_detllm.serving.process import Server

__all__ = ["HELP", "NAME", "configure", "planned", "run"]

NAME = "serve"
HELP = "start `vllm serve` with the controls of a level, and wait until it is ready"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options; what follows ``--`` is vLLM's."""
    if isinstance(parser, Parser):
        parser.tail = "vllm"
    parser.usage = f"{parser.prog} MODEL [options] [-- vLLM's own options]"
    parser.add_argument("model", metavar="MODEL", help="demo, a folder or a Hugging Face id")
    parser.add_argument(
        "--level",
        choices=[level.value for level in Level],
        default=Level.INVARIANT.value,
        metavar="LEVEL",
        help="invariant (default) or seeded; no server can be repeatable",
    )
    parser.add_argument("--host", default="127.0.0.1", help="default: this machine only")
    parser.add_argument("--port", type=int, default=8000, help="default 8000; 0 for a free one")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="root seed (default 0)")
    parser.add_argument(
        "--no-self-test", action="store_true", help="do not prove the level before it is used"
    )
    parser.add_argument(
        "--start-timeout",
        type=float,
        default=900.0,
        metavar="SECONDS",
        help="longest wait until it is ready (default 900)",
    )
    add_cache(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    add_json(parser)


def planned(args: argparse.Namespace, state: Path, outer: Place) -> ServePlan:
    """Return what a command line asks for; nothing is started.

    `outer` is where clients ask; with `--cache` the server itself listens elsewhere.

    Raises
    ------
    UsageError, ControlError, ModelError
        For what cannot be served as asked.
    """
    from jupyter_detllm.core.seeds import MAX_SEED
    from jupyter_detllm.models import resolve_model
    from jupyter_detllm.serving.plan import plan_server

    if not 0 <= args.seed <= MAX_SEED:
        raise UsageError(f"the seed {args.seed} is out of range", expected="0 to 2**63 - 1")
    return plan_server(
        resolve_model(args.model),
        Level(args.level),
        args.vllm,
        inner_place(args, outer),
        seed=args.seed,
        environ=os.environ,
        state=state,
    )


def run(args: argparse.Namespace) -> int:
    """Serve until told to end; 0 then, or what made it end."""
    catch_termination()
    signal.signal(signal.SIGHUP, signal.default_int_handler)
    from jupyter_detllm.engines._vllm_logs import open_log
    from jupyter_detllm.serving.process import free_place, started
    from jupyter_detllm.verify.engine_start import model_identity

    with tempfile.TemporaryDirectory(prefix="detllm-serve-") as folder:
        state = Path(folder)
        outer = free_place(args.host, args.port)
        plan = planned(args, state, outer)
        if plan.notice:
            notice(plan.notice)
        identity = model_identity(args.model)
        path, log = open_log()
        with log, started(plan, identity, log, path, state) as server:
            _say(args, f"starting vllm serve; its log is {path}")
            _warn(args.host)
            server.wait_ready(args.start_timeout)
            test = _shown_test(args, plan)
            try:
                with kept_before(args, plan, outer, notice) as url:
                    _tell(args, server, url, test)
                    code = server.wait()
            except KeyboardInterrupt:
                _say(args, "ending the server")
                return 0
            raise EngineError(server.ended(code), fix=f"read its log, {path}")


def _warn(host: str) -> None:
    from jupyter_detllm.engines._remote_address import API_KEY_VARIABLE

    if host not in {"127.0.0.1", "::1", "localhost"} and not os.environ.get(API_KEY_VARIABLE):
        notice(f"everyone who reaches {host} can use it: {API_KEY_VARIABLE} is not set")


def _say(args: argparse.Namespace, text: str) -> None:
    if not args.quiet:
        notice(text)


def _shown_test(args: argparse.Namespace, plan: ServePlan) -> str:
    from jupyter_detllm.serving.proof import proven

    if plan.method is None:
        return ""
    if args.no_self_test:
        return "not run (--no-self-test): the level is not proven"
    return proven(plan, lambda text: _say(args, text))


def _tell(args: argparse.Namespace, server: Server, url: str, test: str) -> None:
    """Print where it is and what was set."""
    from jupyter_detllm.serving.options import flags

    plan = server.plan
    method = plan.method.name if plan.method else None
    options = flags(plan.options)
    if args.json:
        write_json(
            {
                "url": url,
                "model": plan.served,
                "level": plan.level.value,
                "method": method,
                "self_test": test,
                "variables": dict(plan.set_here),
                "options": list(options),
                "log": str(server.log),
                "cache": bool(args.cache),
            }
        )
    else:
        how = f" ({method})" if method else ""
        lines = [f"serving {plan.served} at {url}, level {plan.level}{how}"]
        lines += [f"  self-test  {test}"] if test else []
        lines.append(f"  variables  {' '.join(f'{n}={v}' for n, v in plan.set_here.items())}")
        lines += [f"  options    {' '.join(options)}"] if options else []
        lines.append(f"  log        {server.log}")
        lines += [f"  cache      {cache_line(plan)}"] if args.cache else []
        lines.append(f"  notebook   %detllm use {url}")
        lines.append("  end it with Ctrl-C")
        write("\n".join(lines))
    sys.stdout.flush()
