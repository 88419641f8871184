"""``serve --cache``: the proxy that keeps answers, before the server."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from jupyter_detllm.errors import UsageError

if TYPE_CHECKING:
    from jupyter_detllm.serving.plan import Place, ServePlan

__all__ = ["add_cache", "cache_line", "inner_place", "kept_before"]


def add_cache(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--cache", action="store_true", help="keep answers, and answer equal requests once")
    add("--cache-path", metavar="FOLDER", help="where; default: the user's cache")
    add(
        "--verify-sample",
        type=float,
        metavar="P",
        help="with --cache: share of kept answers generated again and compared, 0 to 1",
    )


def inner_place(args: argparse.Namespace, outer: Place) -> Place:
    """Return where the server itself listens: behind a proxy, on a port of this machine.

    Raises
    ------
    UsageError
        For options that do not fit.
    """
    from jupyter_detllm.serving.process import free_place

    share = args.verify_sample
    if not args.cache:
        if share is not None or args.cache_path:
            raise UsageError(
                "--verify-sample and --cache-path are about --cache", fix="add --cache"
            )
        return outer
    if share is not None and not 0 <= share <= 1:
        raise UsageError(f"the share to verify is {share:g}", expected="0 to 1")
    return free_place("127.0.0.1", 0)


@contextmanager
def kept_before(
    args: argparse.Namespace, plan: ServePlan, outer: Place, say: Callable[[str], None]
) -> Iterator[str]:
    """Run the proxy if there is to be one; yield the address that clients use."""
    if not args.cache:
        yield plan.place.url
        return
    from jupyter_detllm.cache.store import TextStore
    from jupyter_detllm.serving.proxy import AnswerCache, RunningProxy

    store = TextStore(Path(args.cache_path) if args.cache_path else None)
    cache = AnswerCache(store, sample=args.verify_sample or 0.0)
    host = f"[{outer.host}]" if ":" in outer.host else outer.host
    proxy = RunningProxy(plan.place.url, f"{host}:{outer.port}", cache, say)
    try:
        yield outer.url
    finally:
        proxy.close()
        store.close()


def cache_line(plan: ServePlan) -> str:
    """Return what is to be known about kept answers, for people."""
    from jupyter_detllm.core.levels import Level

    what = "equal requests are answered once (temperature 0, or with a seed; not streamed)"
    if plan.level is Level.INVARIANT:
        return what
    return f"{what}; the first answer stays, whatever shared its batch"
