"""An engine and a report format for jupyter-detllm, in a package of their own.

The engine answers with the characters of the prompt: in their order when greedy, else shuffled
by the seed. It takes no engine option.
"""

from __future__ import annotations

import csv
import io
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import accumulate

from jupyter_detllm.core.canonical import digest_of
from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.generation import (
    Generation,
    GenerationRequest,
    Prompt,
    ResolvedPrompt,
    Sampling,
)
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.stamp import ModelIdentity
from jupyter_detllm.engines.base import (
    Capabilities,
    EngineSpec,
    GenerationResult,
    Progress,
    ProgressCallback,
    RunStats,
    SamplingOptions,
    ShutdownReport,
)
from jupyter_detllm.errors import EngineError, RequestError, UsageError
from jupyter_detllm.verify.report import Report


class EchoEngine:
    """Answers with the prompt; a token is a character."""

    name = "echo"
    capabilities = Capabilities(evidence=False, levels=(Level.SEEDED, Level.REPEATABLE))

    def __init__(self, spec: EngineSpec, *, progress: Callable[[str], None] | None = None) -> None:
        if spec.options:
            raise UsageError(f"the echo engine has no option {next(iter(spec.options))!r:.40}")
        self.spec = spec
        self._running = True

    def resolve(self, prompt: Prompt, options: SamplingOptions) -> ResolvedPrompt:
        text = prompt.text or "\n".join(message.content for message in prompt.messages)
        ids = prompt.token_ids or tuple(map(ord, text))
        given = {name: value for name, value in asdict(options).items() if value is not None}
        if not ids or given.get("beam_width"):
            raise RequestError("the prompt is empty" if not ids else "there is no beam search")
        for token in ids:
            if not 0 <= token < 0xD800 and not 0xE000 <= token < 0x110000:
                raise RequestError(f"there is no token {token}", expected="a character's code")
        return ResolvedPrompt(prompt, ids, Sampling(**given).normalised())

    def generate(
        self, requests: Sequence[GenerationRequest], *, progress: ProgressCallback | None = None
    ) -> GenerationResult:
        if not self._running:
            raise EngineError("the echo engine was shut down", fix="%detllm use echo")
        start, done, tokens = time.perf_counter(), [], 0
        for number, request in enumerate(requests):
            for completion, seed in enumerate(request.seeds):
                done.append(_answer(request, number, completion, seed))
                tokens += len(done[-1].token_ids)
            if progress is not None:
                seconds = time.perf_counter() - start
                progress(Progress(number + 1, len(requests), tokens, seconds))
        return GenerationResult(tuple(done), RunStats(time.perf_counter() - start, tokens))

    def fields(self) -> dict[str, FieldValue]:
        return {"engine.name": self.name}

    def model(self) -> ModelIdentity:
        return ModelIdentity(self.spec.model, weights=digest_of("echo, version 1"))

    def shutdown(self) -> ShutdownReport:
        freed = ("the echo engine",) if self._running else ()
        self._running = False
        return ShutdownReport(freed)


def _answer(request: GenerationRequest, number: int, completion: int, seed: int) -> Generation:
    ids = list(request.token_ids)
    if not request.sampling.greedy:
        random.Random(seed).shuffle(ids)
    ids = ids[: request.sampling.max_tokens]
    lengths = (len(chr(token).encode()) for token in ids[:-1])
    return Generation(
        number,
        completion,
        tuple(ids),
        "length" if len(ids) == request.sampling.max_tokens else "stop",
        "".join(map(chr, ids)),
        tuple(accumulate(lengths, initial=0)),
    )


def render_csv(report: Report) -> str:
    """Return a line for each cell: file, cell, verdict."""
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(("file", "cell", "verdict"))
    for notebook in report.notebooks:
        rows.writerows((notebook.path, cell.view.label, cell.verdict) for cell in notebook.cells)
    return out.getvalue()
