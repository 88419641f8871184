"""Notebooks executed in a fresh kernel, then checked: the file stays as it was.

A copy is executed; the first failure ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from jupyter_detllm.cache import SWITCH_VARIABLE
from jupyter_detllm.controls.guard import child_environment
from jupyter_detllm.core.levels import LEVEL_VARIABLE
from jupyter_detllm.core.notebook import (
    RUN_KEY,
    JsonObject,
    output_stamp,
    own_metadata,
    read_notebook,
)
from jupyter_detllm.core.promotion import store_once
from jupyter_detllm.core.verdict import Policy
from jupyter_detllm.errors import DetLLMError, NotebookError
from jupyter_detllm.verify.kernels import (
    check_language,
    ended_how,
    kernel_manager,
    last_lines,
    log_size,
    plain,
    quiet_logger,
)
from jupyter_detllm.verify.report import Mode, NotebookReport, Report, Standing, unreadable
from jupyter_detllm.verify.scratch import scratch_folder
from jupyter_detllm.verify.service import check_notebook
from jupyter_detllm.verify.sources import NotebookFile, read_file
from jupyter_detllm.verify.update import check_writable, write_notebook

__all__ = ["Execution", "ExecutionOptions", "Say", "rerun_paths", "without_noise"]


def rerun_paths(
    paths: Iterable[str | Path],
    policy: Policy | None = None,
    accept: frozenset[Standing] = frozenset(),
    options: ExecutionOptions | None = None,
    *,
    save: bool = False,
    say: Say = lambda line: None,
) -> Report:
    """Execute a copy of each notebook in its folder, and check it against its references.

    Parameters
    ----------
    paths
        Notebook files.
    policy, accept
        As `check_paths` takes them.
    options
        How to execute.
    save
        Whether the outputs of a run without failure are written to the file.
    say
        Called with a line whenever there is progress, and for warnings.

    Raises
    ------
    KeyboardInterrupt
        When the user interrupts.
    """
    chosen = options or ExecutionOptions()
    notebooks = tuple(_rerun(Path(path), policy, chosen, save, say) for path in paths)
    return Report(Mode.RERUN, notebooks, accept)


def _rerun(
    path: Path, policy: Policy | None, options: ExecutionOptions, save: bool, say: Say
) -> NotebookReport:
    def progress(line: str) -> None:
        say(f"{path}: {line}")

    try:
        file = read_file(path, whole=True)
        read_notebook(file.data)  # refuses what is no notebook before a kernel is started
        if save:
            check_writable(path.resolve())
        run = execute(file.data, path.resolve().parent, options, progress)
    except NotebookError as error:
        return unreadable(path, error)
    except DetLLMError as error:
        return NotebookReport(str(path), problems=(str(error),))
    problems = (*_problems(file, run), *(_save(file, run, progress) if save else ()))
    return check_notebook(str(path), run.notebook, policy, run.failures, problems)


def _problems(file: NotebookFile, run: Execution) -> tuple[str, ...]:
    """Return what no stamped cell reports: a failure elsewhere, or no kernel."""
    if not run.reason:
        return ()
    if run.failed is None:
        return (run.reason,)
    numbers = {cell.number for cell in read_notebook(file.data).cells}
    return () if run.failed in numbers else (f"cell {run.failed}: {run.reason}",)


def _save(file: NotebookFile, run: Execution, say: Say) -> tuple[str, ...]:
    if run.reason:
        say("not saved: the run did not finish")
        return ()
    try:
        result = write_notebook(file, without_noise(file.data, store_once(run.notebook)))
    except NotebookError as error:
        return (f"not saved: {error}",)
    for warning in result.warnings:
        say(f"warning: {warning}")
    return ()


def without_noise(before: JsonObject, after: JsonObject) -> JsonObject:
    """Return a notebook that was executed, changed only where something else came of it.

    What is true of one run only (run id, duration, execution counts) is written where an output
    changed, or where the old one is of the run that was promoted: that it was made again is news.

    Parameters
    ----------
    before, after
        The notebook, and the same with the outputs of a run.
    """
    pairs = list(zip(before["cells"], after["cells"], strict=True))
    equal = [old is new or _content(old) == _content(new) for old, new in pairs]
    cells = [
        _kept(old, new, counted=not all(equal)) if same else new
        for same, (old, new) in zip(equal, pairs, strict=True)
    ]
    return {**after, "cells": cells}


def _kept(old: JsonObject, new: JsonObject, *, counted: bool) -> JsonObject:
    """Return a cell whose outputs say what they did."""
    if old is new:
        return old
    out = {**old, "execution_count": new["execution_count"]} if counted else dict(old)
    _, run = output_stamp(old)
    if run is not None and run == own_metadata(old).get("recorded_run"):
        # Else it would stay `recorded`, though it was verified.
        pairs = zip(old["outputs"], new["outputs"], strict=True)
        out["outputs"] = [_with_run(a, b) for a, b in pairs]
    return out if out != old else old


def _with_run(old: JsonObject, new: JsonObject) -> JsonObject:
    run = new.get("metadata", {}).get(RUN_KEY)
    return old if run is None else {**old, "metadata": {**old["metadata"], RUN_KEY: run}}


def _content(cell: JsonObject) -> object:
    """Return the outputs of a cell, without what is true of one run, however texts are split."""
    outputs = cell.get("outputs")
    return [_output_content(output) for output in (outputs if isinstance(outputs, list) else [])]


def _output_content(output: Any) -> Any:
    if not isinstance(output, dict):
        return output
    out = {key: _joined(value) for key, value in output.items() if key != "execution_count"}
    for key in ("data", "metadata"):
        if isinstance(output.get(key), dict):
            out[key] = {k: _joined(v) for k, v in output[key].items() if k != RUN_KEY}
    return out


def _joined(value: Any) -> Any:
    texts = isinstance(value, list) and all(isinstance(line, str) for line in value)
    return "".join(value) if texts else value


Say: TypeAlias = Callable[[str], None]
"""Takes one line about how far a run has come."""

_MOST_CHARACTERS = 400


@dataclass(frozen=True, slots=True)
class ExecutionOptions:
    """How a notebook is executed.

    Attributes
    ----------
    kernel
        Name of a kernelspec; None for this environment's Python.
    cell_timeout, startup_timeout
        Seconds a cell, and the start of the kernel, may take.
    """

    kernel: str | None = None
    cell_timeout: float = 600.0
    startup_timeout: float = 600.0


@dataclass(frozen=True, slots=True)
class Execution:
    """What came of an execution.

    Attributes
    ----------
    notebook
        The notebook with the outputs of this run, and of no other.
    failed
        Number of the cell that ended the run, None when all cells ran or none did.
    reason
        What went wrong, one line; "" when all went well.
    not_run
        Numbers of the code cells that never ran.
    """

    notebook: JsonObject
    failed: int | None = None
    reason: str = ""
    not_run: tuple[int, ...] = ()

    @property
    def failures(self) -> Mapping[int, str]:
        """Cell number to what went wrong with it."""
        cause = f"cell {self.failed} failed" if self.failed else "the kernel did not start"
        out = dict.fromkeys(self.not_run, f"not run: {cause}")
        return {**out, self.failed: self.reason} if self.failed else out


@dataclass(slots=True)
class _Run:
    """One execution under way."""

    node: Any
    client: Any
    manager: Any
    log: Path
    options: ExecutionOptions
    say: Say
    environ: Mapping[str, str]
    process: Any = None
    log_start: int = 0
    done: set[int] = field(default_factory=set)
    failed: int | None = None
    reason: str = ""


def execute(notebook: JsonObject, folder: Path, options: ExecutionOptions, say: Say) -> Execution:
    """Execute a copy of `notebook` with `folder` as working directory.

    Raises
    ------
    ExecutionError
        If no kernel is available.
    KeyboardInterrupt
        When the user interrupts; the kernel is gone then.
    """
    check_language(notebook, options.kernel)
    with scratch_folder("rerun") as temporary:
        manager = kernel_manager(options.kernel, temporary)
        run = _prepare(notebook, manager, temporary / "kernel.log", options, say)
        try:
            asyncio.run(_execute(run, folder))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
    return _result(notebook, run)


def _prepare(
    notebook: JsonObject, manager: Any, log: Path, options: ExecutionOptions, say: Say
) -> _Run:
    import nbformat
    from nbclient import NotebookClient
    from nbformat.v4.rwbase import rejoin_lines

    # A copy that shares nothing with the dict: what runs cannot change what was read.
    node = rejoin_lines(nbformat.from_dict(json.loads(json.dumps(notebook))))
    for cell in node.cells:
        cell.setdefault("metadata", nbformat.from_dict({}))
        cell.setdefault("source", "")
        if cell.get("cell_type") == "code":
            cell["outputs"], cell["execution_count"] = [], None
    client = NotebookClient(
        node,
        km=manager,
        timeout=max(1, round(options.cell_timeout)),
        startup_timeout=max(1, round(options.startup_timeout)),
        record_timing=False,
        store_widget_state=False,
        allow_errors=False,
        log=quiet_logger(),
    )
    # What verifies is generated, whatever a cell asks for.
    environ = child_environment({SWITCH_VARIABLE: "off", **_recorded_level(notebook)})
    return _Run(node, client, manager, log, options, say, environ)


def _recorded_level(notebook: JsonObject) -> dict[str, str]:
    """Return the variable that makes the recorded level a session's default.

    A notebook that names no level was recorded at what the default was there and then.
    """
    cells = read_notebook(notebook).cells
    levels = {cell.reference.level for cell in cells if cell.reference is not None}
    return {LEVEL_VARIABLE: levels.pop().value} if len(levels) == 1 else {}


async def _execute(run: _Run, folder: Path) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
        loop.add_signal_handler(signal.SIGTERM, task.cancel if task else loop.stop)
    graceful = False
    try:
        if await _start(run, folder):
            await _cells(run)
        graceful = True
    finally:
        await _stop(run, now=not graceful)


async def _start(run: _Run, folder: Path) -> bool:
    run.say("starting a kernel")
    with run.log.open("wb") as log:
        try:
            await run.client.async_start_new_kernel(
                cwd=str(folder), stdout=log, stderr=log, stdin=None, env=run.environ
            )
            run.process = getattr(run.manager.provisioner, "process", None)
            await run.client.async_start_new_kernel_client()
        except (OSError, RuntimeError, TimeoutError) as error:
            code = run.process.poll() if run.process is not None else None
            how = f"({ended_how(code)})" if code is not None else f"({_brief(str(error))})"
            run.reason = _with_log(f"the kernel did not start {how}", run)
            return False
    return True


async def _cells(run: _Run) -> None:
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    numbers = [i for i, cell in enumerate(run.node.cells, 1) if cell.get("cell_type") == "code"]
    for place, number in enumerate(numbers, start=1):
        cell = run.node.cells[number - 1]
        run.say(f"executing cell {place}/{len(numbers)}{_first_line(cell)}")
        run.done.add(number)
        run.log_start = log_size(run.log)
        try:
            await run.client.async_execute_cell(cell, number - 1, execution_count=place)
        except CellExecutionError as error:
            run.reason = f"{_brief(error.ename)}: {_brief(error.evalue)}"
        except CellTimeoutError:
            limit = f"{run.options.cell_timeout:g} s"
            run.reason = f"it ran longer than {limit} (--cell-timeout) and was interrupted"
            await run.manager.interrupt_kernel()
        except DeadKernelError:
            _raise_if_cancelled()
            run.reason = _with_log(f"the kernel died ({await _ending(run)})", run)
        if run.reason:
            run.failed = number
            return


def _raise_if_cancelled() -> None:
    # nbclient takes the cancellation of our task for the death of the kernel.
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _ending(run: _Run) -> str:
    """Return how the kernel's process ended; it may take a moment to be known."""
    for _ in range(20):
        code = run.process.poll() if run.process is not None else None
        if code is not None:
            return ended_how(code)
        await asyncio.sleep(0.1)
    return ended_how(None)


async def _stop(run: _Run, *, now: bool) -> None:
    if run.client.kc is not None:
        run.client.kc.stop_channels()
    if run.manager.has_kernel:
        # A kernel that is gone cannot be asked to go.
        dead = not await run.manager.is_alive()
        await run.manager.shutdown_kernel(now=now or dead)
    await run.manager.cleanup_resources()


def _first_line(cell: Any) -> str:
    lines = [line.strip() for line in str(cell.source).splitlines() if line.strip()]
    return f": {lines[0][:60]}" if lines else ""


def _brief(text: object) -> str:
    line = " ".join(plain(str(text)).split())
    return line if len(line) <= _MOST_CHARACTERS else line[: _MOST_CHARACTERS - 3] + "..."


def _with_log(text: str, run: _Run) -> str:
    lines = last_lines(run.log, run.log_start)
    return f"{text}; its last lines: {lines}" if lines else text


def _result(notebook: JsonObject, run: _Run) -> Execution:
    from nbformat.v4.rwbase import split_lines

    executed = split_lines(run.node).cells
    cells, not_run = [], []
    for number, (raw, new) in enumerate(zip(notebook["cells"], executed, strict=True), start=1):
        if raw.get("cell_type") != "code":
            cells.append(raw)
            continue
        if number not in run.done:
            not_run.append(number)
        outputs = json.loads(json.dumps(new["outputs"]))
        cells.append({**raw, "outputs": outputs, "execution_count": new["execution_count"]})
    return Execution({**notebook, "cells": cells}, run.failed, run.reason, tuple(not_run))
