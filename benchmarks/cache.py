"""What `serve --cache` does to equal requests, and what it costs.

``python benchmarks/cache.py [--seconds S] [--rate R] [--out FILE]`` starts a server that takes
20 ms for an answer and never gives the same text twice, and sends it requests, of which 16 are
distinct, without and with the cache: how many texts each request got, and the latency. Then
hits only, as many at once as 32 clients send. Wall time of other work on the machine is in every
figure; `load_average` says how much.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "cache.json"
sys.path.insert(0, str(ROOT))

DISTINCT = 16
CLIENTS = 32
ANSWER_SECONDS = 0.02
SERVER = {
    "level": "seeded",
    "model": {"name": "m", "weights": "sha256:" + "0" * 64},
    "controls": {},
}
WORKER = {"method": "off", "fields": {}, "defaults": {}, "vocabulary": 100, "eos": [2]}


class Server:
    """A server in a thread; every answer has another text."""

    def __init__(self, *, cached: bool) -> None:
        import uvicorn
        from starlette.applications import Starlette
        from starlette.routing import Route

        from jupyter_detllm.serving.answers import AnswerCache

        self.answers = itertools.count()
        app = Starlette(routes=[Route("/v1/completions", self._complete, methods=["POST"])])
        if cached:
            app.add_middleware(AnswerCache)
        self._server = uvicorn.Server(
            uvicorn.Config(app, port=0, log_level="warning", timeout_keep_alive=600)
        )
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.05)
        host, port = self._server.servers[0].sockets[0].getsockname()[:2]
        self.url = f"http://{host}:{port}"

    async def _complete(self, _: Any) -> Any:
        from starlette.responses import JSONResponse

        await asyncio.sleep(ANSWER_SECONDS)
        choice = {"index": 0, "text": str(next(self.answers)), "finish_reason": "stop"}
        return JSONResponse({"choices": [choice]})

    def close(self) -> None:
        """Stop listening."""
        self._server.should_exit = True
        self._thread.join()


def body(number: int) -> dict[str, Any]:
    """Return one of the distinct requests."""
    return {"model": "m", "prompt": f"Prompt {number}", "temperature": 0, "max_tokens": 64}


async def at_rate(url: str, rate: float, seconds: float) -> dict[str, Any]:
    """Send requests at a rate; return how many texts each request got, and latencies."""
    from aiohttp import ClientSession

    texts: dict[int, set[str]] = {n: set() for n in range(DISTINCT)}
    times: list[float] = []

    async def one(session: Any, number: int) -> None:
        start = time.perf_counter()
        async with session.post(f"{url}/v1/completions", json=body(number)) as response:
            found = await response.json()
        times.append(time.perf_counter() - start)
        texts[number].add(found["choices"][0]["text"])

    async with ClientSession() as session:
        tasks, start = [], time.perf_counter()
        for index in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, start + index / rate - time.perf_counter()))
            tasks.append(asyncio.create_task(one(session, index % DISTINCT)))
        await asyncio.gather(*tasks)
        took = time.perf_counter() - start
    return {
        "requests": len(times),
        "requests_per_second": round(len(times) / took, 1),
        "distinct_requests": DISTINCT,
        "texts_per_request": max(map(len, texts.values())),
        **_latencies(times),
    }


async def hits(url: str, seconds: float) -> dict[str, Any]:
    """Send requests that are kept, as fast as the clients can."""
    from aiohttp import ClientSession

    times: list[float] = []
    end = time.perf_counter() + seconds

    async def client(session: Any, number: int) -> None:
        while time.perf_counter() < end:
            start = time.perf_counter()
            async with session.post(f"{url}/v1/completions", json=body(number)) as response:
                await response.read()
                if response.headers["x-detllm-cache"] != "hit":
                    raise AssertionError("a request that is kept was not answered by it")
            times.append(time.perf_counter() - start)

    async with ClientSession() as session:
        await asyncio.gather(*(client(session, n % DISTINCT) for n in range(CLIENTS)))
    return {
        "clients": CLIENTS,
        "requests_per_second": round(len(times) / seconds, 1),
        **_latencies(times),
    }


def _latencies(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {
        "p50_ms": round(1000 * statistics.median(ordered), 2),
        "p99_ms": round(1000 * p99, 2),
    }


def measure(rate: float, seconds: float) -> dict[str, Any]:
    """Measure with and without the cache, in one run."""
    from jupyter_detllm.invariance.base import STATE_VARIABLE, WORKER_FILE
    from jupyter_detllm.serving.middleware import SERVER_FILE

    with tempfile.TemporaryDirectory() as folder:
        os.environ[STATE_VARIABLE] = folder
        cache = {"folder": folder, "sample": 0.0}
        (Path(folder) / SERVER_FILE).write_text(json.dumps({**SERVER, "cache": cache}))
        (Path(folder) / WORKER_FILE).write_text(json.dumps(WORKER))
        without, cached = Server(cached=False), Server(cached=True)
        try:
            return {
                "without the cache": asyncio.run(at_rate(without.url, rate, seconds)),
                "with the cache": asyncio.run(at_rate(cached.url, rate, seconds)),
                "hits only": asyncio.run(hits(cached.url, min(seconds, 10.0))),
            }
        finally:
            without.close()
            cached.close()


def main() -> None:
    """Measure, write the result file, print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=60.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    result = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "command": f"python benchmarks/cache.py --rate {args.rate:g} --seconds {args.seconds:g}",
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "python": platform.python_version(),
        "uvicorn": version("uvicorn"),
        "load_average": round(os.getloadavg()[0], 2),
        "results": measure(args.rate, args.seconds),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(args.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
