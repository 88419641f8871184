"""Requests arriving at a server at a given rate, each compared with the same one alone.

``--serve MODEL`` starts `jupyter detllm serve` itself, once per level: `seeded` (what
`vllm serve` does by default, prefix cache included) and `invariant`. ``--url`` measures a
server that runs, whatever it is. First every prompt is sent alone, to a server that does
nothing else; then they arrive at random times (a Poisson process of the rate asked for)
for as long as asked, half of them greedy, half of them sampled with their own seeds.

With ``--rounds N`` all levels' servers are started first, all at once, and take turns: in each of
N rounds every level gets the load once, the order reversed from round to round.

``--cached`` then measures each level again behind `serve --cache`, whose store is empty when the
load begins; the requests sent alone pass it by (``Cache-Control: no-cache``).

A completion differs if its tokens do, or its logprobs in any bit. ``answers_per_prompt`` counts
the different ones, logprobs included, that one prompt got under load. Run from anywhere::

    python benchmarks/serving.py --serve demo --rate 60 --seconds 60 --tokens 4
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from startup import machine, versions  # noqa: E402 - beside this file

RESULT = HERE / "results" / "serving.json"
LEVELS = ("seeded", "invariant")
WORDS = (
    "the town library keeps a record of every visitor and each evening its librarian writes "
    "one line about the day which nobody reads until winter comes"
)
Answer: TypeAlias = tuple[list[int], str, list[float]]
Body: TypeAlias = dict[str, Any]
PAST_THE_CACHE = {"Cache-Control": "no-cache"}


def main() -> None:
    """Measure, write the result file, print it."""
    args = _arguments()
    figures: dict[str, Any] = {}
    if args.url:
        figures["server"] = asyncio.run(measure(args.url, args))
    if args.rounds:
        figures = by_turns(args)
    for level in [] if args.url or args.rounds else args.levels.split(","):
        for cached in (False, True) if args.cached else (False,):
            name = f"{level}, cached" if cached else level
            with served(args.serve, level, args.vllm.split(), cached=cached) as started:
                found = asyncio.run(measure(started["url"], args))
                figures[name] = {"method": started["method"], **found}
            sys.stderr.write(f"{name}: {json.dumps(figures[name])}\n")
    asked = vars(args)
    kept = ("rate", "seconds", "tokens", "prompts", "words", "rounds")
    result = {
        "command": " ".join(["python", "benchmarks/serving.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": {**machine(), **_gpu()},
        "versions": versions(),
        "asked": {name: asked[name] for name in kept},
        "figures": figures,
    }
    text = json.dumps(result, indent=2) + "\n"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--serve", metavar="MODEL", help="start a server of this model per level")
    where.add_argument("--url", help="measure this server")
    parser.add_argument("--model", default="", help="name of the served model; the first one")
    parser.add_argument("--levels", default=",".join(LEVELS), help="with --serve")
    parser.add_argument("--rounds", type=int, default=0, help="with --serve: levels by turns")
    parser.add_argument("--cached", action="store_true", help="with --serve: and with its cache")
    parser.add_argument("--vllm", default="", help="with --serve: options of vllm serve, quoted")
    parser.add_argument("--rate", type=float, default=60.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long they arrive")
    parser.add_argument("--tokens", type=int, default=8, help="new tokens per request")
    parser.add_argument("--prompts", type=int, default=48, help="how many different ones")
    parser.add_argument("--words", type=int, default=40, help="length of the longest prompt")
    parser.add_argument("--out", type=Path, default=RESULT)
    return parser.parse_args()


def _gpu() -> dict[str, str]:
    """Return GPU and driver as nvidia-smi names them; nothing where there is none."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return {"gpu": said.strip()}
    return {}


@contextlib.contextmanager
def served(
    model: str, level: str, words: list[str], *, cached: bool = False
) -> Iterator[dict[str, Any]]:
    """Run a server at a level; yield its record."""
    command = [sys.executable, "-m", "jupyter_detllm", "serve", model, "--level", level]
    command += ["--port", "0", "--json", "--no-self-test"]
    kept = tempfile.TemporaryDirectory(prefix="serving-cache-")
    command += ["--cache", "--cache-path", kept.name] if cached else []
    process = subprocess.Popen([*command, "--", *words], stdout=subprocess.PIPE, text=True)
    try:
        text = ""
        for line in process.stdout or ():
            text += line
            if line.rstrip() == "}":
                break
        yield json.loads(text)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        kept.cleanup()


def by_turns(args: argparse.Namespace) -> dict[str, Any]:
    """Start a server for each level, give each the load in every round, compare their p99."""
    levels = args.levels.split(",")
    figures: dict[str, Any] = {}
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        servers = {level: served(args.serve, level, args.vllm.split()) for level in levels}
        jobs = {level: pool.submit(server.__enter__) for level, server in servers.items()}
        for level, server in servers.items():
            stack.push(server)
            figures[level] = {"method": jobs[level].result()["method"], "rounds": []}
        for number in range(args.rounds):
            for level in levels[:: -1 if number % 2 else 1]:
                found = asyncio.run(measure(jobs[level].result()["url"], args))
                figures[level]["rounds"].append(found)
                sys.stderr.write(f"{level}: {json.dumps(found)}\n")
    first = figures[levels[0]]["rounds"]
    for level in levels[1:]:
        for name in ("seconds_p50", "seconds_p99"):
            pairs = zip(figures[level]["rounds"], first, strict=True)
            ratios = [round(a[name] / b[name], 2) for a, b in pairs]
            figures[level][f"{name} over {levels[0]}"] = ratios
    return figures


def bodies(model: str, args: argparse.Namespace) -> list[Body]:
    """Return the requests: short and long prompts, greedy and sampled in turn."""
    stream = random.Random(1)
    out = []
    for number in range(args.prompts):
        length = 4 + (number * (args.words - 4)) // max(args.prompts - 1, 1)
        text = " ".join(stream.choice(WORDS.split()) for _ in range(length))
        sampled = {"temperature": 0.8, "seed": 1000 + number}
        out.append(
            {
                "model": model,
                "prompt": f"{number}: {text}",
                "max_tokens": args.tokens,
                "ignore_eos": True,
                "logprobs": 2,
                "return_token_ids": True,
                **(sampled if number % 2 else {"temperature": 0.0}),
            }
        )
    return out


async def measure(url: str, args: argparse.Namespace) -> dict[str, Any]:
    """Send every prompt alone, then all of them at the rate asked for."""
    import httpx

    # Idle connections are let go before the server, after 5 s, closes them under a request.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=2.0)
    async with httpx.AsyncClient(
        base_url=url, limits=limits, timeout=900.0, trust_env=False
    ) as client:
        models = (await client.get("/v1/models")).json()["data"]
        version = (await client.get("/version")).json()["version"]
        requests = bodies(args.model or models[0]["id"], args)
        alone, again = [
            [(await _ask(client, body, PAST_THE_CACHE))[0] for body in requests] for _ in range(2)
        ]
        load = await _Load(client, requests, args.rate, args.seconds).run()
    found = _figures(alone, load)
    return {
        "vllm": version,
        "alone_twice_differ": sum(a != b for a, b in zip(alone, again, strict=True)),
        **found,
    }


async def _ask(
    client: Any, body: Body, headers: dict[str, str] | None = None
) -> tuple[Answer, str]:
    """Return the completion, and what a cache says of it ("" where there is none)."""
    answer = await client.post("/v1/completions", json=body, headers=headers)
    answer.raise_for_status()
    choice = answer.json()["choices"][0]
    logprobs = choice["logprobs"]["token_logprobs"]
    found = choice["token_ids"], choice["finish_reason"], logprobs
    return found, answer.headers.get("x-detllm-cache", "")


class _Load:
    """Requests that arrive whether or not earlier ones are answered."""

    def __init__(self, client: Any, requests: list[Body], rate: float, seconds: float) -> None:
        self.client, self.requests = client, requests
        self.done: list[tuple[int, Answer, float]] = []
        self.failed: Counter[str] = Counter()
        self.kept: Counter[str] = Counter()
        self.in_flight: list[int] = []
        self.wall = 0.0
        self._flying = 0
        stream = random.Random(int(rate))
        self._due, clock = [], 0.0
        while (clock := clock + stream.expovariate(rate)) < seconds:
            self._due.append((clock, stream.randrange(len(requests))))

    async def run(self) -> _Load:
        start = time.perf_counter()
        tasks = []
        for due, index in self._due:
            await asyncio.sleep(max(0.0, due - (time.perf_counter() - start)))
            self.in_flight.append(self._flying)
            tasks.append(asyncio.create_task(self._one(index)))
        self.sent_in = time.perf_counter() - start
        await asyncio.gather(*tasks)
        self.wall = time.perf_counter() - start
        return self

    async def _one(self, index: int) -> None:
        import httpx

        self._flying += 1
        start = time.perf_counter()
        try:
            answer, how = await _ask(self.client, self.requests[index])
            self.kept.update([how] if how else [])
            self.done.append((index, answer, time.perf_counter() - start))
        except httpx.HTTPError as error:
            self.failed.update([type(error).__name__])
        finally:
            self._flying -= 1


def _figures(alone: list[Answer], load: _Load) -> dict[str, Any]:
    pairs = [(alone[index], answer) for index, answer, _ in load.done]
    times = sorted(seconds for _, _, seconds in load.done)
    tokens = sum(left[:2] != right[:2] for left, right in pairs)
    differ = sum(left != right for left, right in pairs)
    prompts = {i for i, answer, _ in load.done if answer[:2] != alone[i][:2]}
    answers: dict[int, set[str]] = {}
    for index, answer, _ in load.done:
        answers.setdefault(index, set()).add(json.dumps(answer))
    counts = [len(found) for found in answers.values()]
    return {
        "requests": len(pairs),
        "failed": dict(load.failed),
        "sent_per_second": round((len(pairs) + load.failed.total()) / load.sent_in, 1),
        "answered_per_second": round(len(pairs) / load.wall, 1),
        "in_flight_mean": round(statistics.mean(load.in_flight), 1),
        "in_flight_most": max(load.in_flight),
        "in_flight_at_tenths": load.in_flight[:: max(1, len(load.in_flight) // 10)][:10],
        "seconds_p50": round(times[len(times) // 2], 3),
        "seconds_p99": round(times[int(len(times) * 0.99)], 3),
        "tokens_differ": tokens,
        "prompts_with_other_tokens": len(prompts),
        "tokens_or_logprobs_differ": differ,
        "percent_tokens_differ": round(100 * tokens / len(pairs), 2),
        "answers_per_prompt": {"mean": round(statistics.mean(counts), 1), "most": max(counts)},
        **({"cache": dict(load.kept)} if load.kept else {}),
    }


if __name__ == "__main__":
    main()
