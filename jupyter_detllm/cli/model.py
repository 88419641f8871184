"""``jupyter detllm model``: fetch the demo model, list and digest models."""

from __future__ import annotations

import argparse

from jupyter_detllm.cli._options import add_json
from jupyter_detllm.cli._output import StepLine, show
from jupyter_detllm.core.canonical import Json
from jupyter_detllm.models import DEMO_NAME, ModelDigests, demo_folder, fetch_demo, model_digests
from jupyter_detllm.models.demo import is_fetched
from jupyter_detllm.models.resolve import cached_models

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verbs ``fetch``, ``list`` and ``digest``."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    fetch = verbs.add_parser("fetch", help="fetch, verify and convert the demo model once")
    fetch.add_argument("model", choices=[DEMO_NAME], help="the only model that needs this")
    listing = verbs.add_parser("list", help="list the models on this machine")
    digest = verbs.add_parser("digest", help="digest the parts of a model")
    digest.add_argument("model", metavar="PATH", help="a folder, a Hugging Face id, or demo")
    digest.add_argument("--no-cache", action="store_true", help="read every file again")
    for verb in (fetch, listing, digest):
        add_json(verb)


def run(args: argparse.Namespace) -> int:
    """Run one verb and return the exit code."""
    return {"fetch": _fetch, "list": _list, "digest": _digest}[args.verb](args)


def _fetch(args: argparse.Namespace) -> int:
    with StepLine(f"model {args.model}") as line:
        folder = fetch_demo(progress=line)
    show(args, {"model": args.model, "folder": str(folder)}, str(folder))
    return 0


def _list(args: argparse.Namespace) -> int:
    present = {DEMO_NAME: is_fetched(demo_folder()), **dict.fromkeys(cached_models(), True)}
    rows: list[Json] = [{"model": name, "present": here} for name, here in present.items()]
    lines = [
        f"{name:<40} {'here' if here else 'jupyter detllm model fetch demo'}"
        for name, here in present.items()
    ]
    show(args, {"models": rows}, "\n".join(lines))
    return 0


def _digest(args: argparse.Namespace) -> int:
    with StepLine(f"model {args.model}") as line:
        folder = str(fetch_demo(progress=line)) if args.model == DEMO_NAME else args.model
        digests = model_digests(folder, progress=line, cached=not args.no_cache)
    show(args, _digests_json(args.model, digests), "\n".join(_digest_lines(digests)))
    return 0


def _parts(digests: ModelDigests) -> dict[str, str | None]:
    parts = ("weights", "tokenizer", "chat_template", "generation_config")
    values = {part: getattr(digests, part) for part in parts}
    return {part: None if value is None else str(value) for part, value in values.items()}


def _digests_json(name: str, digests: ModelDigests) -> Json:
    files: list[Json] = [
        {"name": f.name, "size": f.size, "digest": str(f.digest)} for f in digests.files
    ]
    return {"model": name, **_parts(digests), "files": files}


def _digest_lines(digests: ModelDigests) -> list[str]:
    lines = [f"{part:<17} {value or 'none'}" for part, value in _parts(digests).items()]
    return [*lines, *(f"  {f.digest}  {f.size:>14,}  {f.name}" for f in digests.files)]
