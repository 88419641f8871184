"""The Python API: ``import jupyter_detllm as det``.

In a notebook it shares engine, seeds and stamps with the magics: a cell that calls
`generate` is stamped like one that begins with `%%detgen`. In a script nothing is
displayed, each call is what a cell is in a notebook, and `last_stamp` returns what a
cell would have kept.

What is done with notebook files is in `jupyter_detllm.notebooks`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jupyter_detllm.controls.seeding import generator, worker_init_fn
from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.generation import Generation
from jupyter_detllm.core.stamp import Stamp
from jupyter_detllm.engines.base import SamplingOptions, ShutdownReport
from jupyter_detllm.kernel.cells import CellEnd, current_shell
from jupyter_detllm.kernel.expecting import Expect
from jupyter_detllm.kernel.prompts import (
    CacheUse,
    GenerateCall,
    PromptLike,
    prompt_from,
    several_prompts,
    stop_texts,
)
from jupyter_detllm.kernel.session import Session, SessionSettings, current_session, merged
from jupyter_detllm.kernel.stamping import StampRecord, note_recorded
from jupyter_detllm.metering.measures import Metrics

if TYPE_CHECKING:
    from jupyter_detllm.engines.selftest import SelfTest

__all__ = [
    "PromptLike",
    "cells",
    "fingerprint",
    "generate",
    "generator",
    "last_stamp",
    "metrics",
    "probe",
    "release",
    "use",
    "worker_init_fn",
]


def use(
    model: str,
    *,
    seed: int | None = None,
    level: str | None = None,
    torch_deterministic: str | None = None,
    launch_blocking: bool | None = None,
    no_tf32: bool | None = None,
    dtype: str | None = None,
    eager: bool | None = None,
    **options: object,
) -> None:
    """Seed everything, set the controls and start the engine, as `%detllm use` does.

    Parameters
    ----------
    model
        ``demo``, ``fake``, a folder, a Hugging Face id, or a server's address (``http://...``).
    seed, level
        Root seed (default 0) and guarantee level (default `invariant` if its self-test passes,
        otherwise `repeatable`, with a warning).
    torch_deterministic, launch_blocking, no_tf32, dtype, eager
        The same as the options of `%detllm`.
    **options
        Engine options, as `vllm.LLM` takes them, and ``lora``: the folder of the LoRA
        adapter to use for every generation.

    Raises
    ------
    DetLLMError
        If the running engine has other settings, or the engine cannot be started.
    """
    session = _session()
    settings = (session.settings or SessionSettings.initial()).changed(
        {
            "seed": seed,
            "level": level,
            "torch_deterministic": torch_deterministic,
            "launch_blocking": launch_blocking,
            "no_tf32": no_tf32,
            "dtype": dtype,
            "eager": eager,
        }
    )
    if session.use(model, merged(options), settings) and session.notice:
        warnings.warn(session.notice, stacklevel=2)


def release() -> ShutdownReport | None:
    """Shut down the engine.

    Returns
    -------
    ShutdownReport or None
        What was ``freed`` and what was ``kept``; None if no engine was running.
    """
    return current_session().release()


def generate(
    prompts: PromptLike | Sequence[PromptLike],
    *,
    name: str = "",
    text: bool = False,
    system: str | None = None,
    n: int = 1,
    seed: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    max_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    beam_width: int | None = None,
    length_penalty: float | None = None,
    store_prompt: bool = True,
    expect: object = None,
    tries: int = 1,
    unmet: str = "error",
    cache: bool = False,
    verify_sample: float = 0.0,
) -> list[Generation]:
    """Generate in one call, ordered by prompt and completion; the running cell is stamped.

    Parameters
    ----------
    prompts
        One or several: text is a chat message (raw text with `text`), a list of
        ``{"role": ..., "content": ...}`` a chat, a list of integers token ids.
    name, system, n, store_prompt
        Name of the cell (part of derived seeds); system message for prompts given as text;
        completions per prompt; whether the stamp stores prompts or only their digests.
    seed
        Occurrence i of a prompt, completion j gets ``seed + i * n + j``; derived by default.
    temperature, top_p, top_k, max_tokens, stop, beam_width, length_penalty
        As the options of `%%detgen`; None leaves the model's default.
    expect, tries, unmet
        A regular expression or a JSON schema that each text must match; maximum tries;
        ``error`` raises `ExpectationError` after the last try, ``warn`` warns.
    cache, verify_sample
        Use the result cache (a hit verifies nothing); share of hits, 0 to 1, to generate again.

    Raises
    ------
    DetLLMError
        If there is no engine, or a request cannot be run.
    """
    options = SamplingOptions(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=max_tokens,
        stop=stop_texts(stop),
        beam_width=beam_width,
        length_penalty=length_penalty,
    )
    asked = tuple(prompt_from(item, text, system) for item in several_prompts(prompts))
    use = CacheUse(verify_sample) if cache else None
    call = GenerateCall(asked, options, name, n, seed, store_prompt, use)
    return run_call(_session(), call, None if expect is None else Expect.of(expect, tries, unmet))


def last_stamp() -> Stamp | None:
    """Return the stamp of the last finished cell; in a script, of the last call.

    Returns
    -------
    Stamp or None
        None before anything was generated.
    """
    return current_session().recorder.last


def cells() -> tuple[StampRecord, ...]:
    """Return the stamped cells of this kernel, in the order of their first stamps.

    Each has a `label`, its `stamp`, and `live`: verdict, reasons and first divergence against
    the reference that JupyterLab or Notebook 7 sent with the cell, or None. A generation that
    is the cell's reference in the saved notebook is `recorded`.
    """
    ledger = current_session().ledger
    note_recorded(ledger)
    return ledger.entries()


def metrics() -> Metrics:
    """Return this kernel's metrics: rates, latencies, memory, cache hits.

    They differ from run to run and are never part of a stamp. `Metrics.to_json` gives plain
    values, `Metrics.crossed` the thresholds set in `%config DetLLM` that are crossed.
    """
    return current_session().metrics.figures()


def fingerprint() -> Fingerprint:
    """Return the fingerprint of this process, with the engine's part if one runs.

    Returns
    -------
    Fingerprint
        Fields by role: ``numerics``, ``identity`` and ``informational``; ``digest`` is
        that of the numerics fields.
    """
    return current_session().fingerprint()


def _session() -> Session:
    shell = current_shell()
    if shell is not None:
        from jupyter_detllm.kernel.extension import follow_cells

        follow_cells(shell)
    return current_session()


_CALLER = 5
"""Stack level of the user's line for warnings."""


def run_call(
    session: Session, call: GenerateCall, expect: Expect | None = None
) -> list[Generation]:
    """Generate; in a script each call counts as a cell.

    Raises
    ------
    DetLLMError
        For what cannot be run, failed, or is not as expected.
    """
    if current_shell() is not None:
        return _run(session, call, expect)
    success = False
    try:
        found = _run(session, call, expect)
        success = True
    finally:
        record = session.recorder.close(CellEnd(None, "", None, success))
    if record is not None:
        session.keep(record)
    return found


def _run(session: Session, call: GenerateCall, expect: Expect | None) -> list[Generation]:
    shown = session.generate(call, session.prepare(call), expect)
    shown.settle(lambda problem: warnings.warn(problem, stacklevel=_CALLER + 1))
    return list(shown.generations)


def probe(*, short: bool = False) -> SelfTest:
    """Test whether generations of the running engine depend on what shares their batch.

    Parameters
    ----------
    short
        Fewer prompts and batch compositions, as at an engine's start.

    Returns
    -------
    SelfTest
        ``held``, and a row per batch composition with the number of completions that had
        equal tokens, and of those that were bitwise equal. It is not stamped.

    Raises
    ------
    UsageError
        If no engine is running.
    """
    from jupyter_detllm.kernel.session import run_probe

    return run_probe(current_session(), short=short)
