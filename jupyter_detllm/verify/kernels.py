"""Fresh kernels in this environment: started with a log, and how they ended."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import signal
import sys
from pathlib import Path
from typing import Any

from jupyter_detllm.core.notebook import JsonObject
from jupyter_detllm.core.redact import redact_text
from jupyter_detllm.errors import ExecutionError, installing

__all__ = [
    "check_language",
    "ended_how",
    "kernel_manager",
    "last_lines",
    "log_size",
    "plain",
    "quiet_logger",
]

_OWN = "detllm-this-python"
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")


def quiet_logger() -> logging.Logger:
    """Return a logger that says nothing: what matters is in the report."""
    logger = logging.getLogger("jupyter_detllm.rerun")
    logger.propagate = False
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
    return logger


def check_language(notebook: JsonObject, kernel: str | None) -> None:
    """Refuse a notebook that this environment's Python cannot run.

    Raises
    ------
    ExecutionError
        When its language is another, and no kernel was chosen.
    """
    metadata = notebook.get("metadata")
    spec = metadata.get("kernelspec") if isinstance(metadata, dict) else None
    language = spec.get("language") if isinstance(spec, dict) else None
    if kernel is None and isinstance(language, str) and language.lower() != "python":
        raise ExecutionError(
            f"the notebook is written in {language[:40]}",
            expected="Python, or a kernel chosen by name",
            fix="--kernel NAME (`jupyter kernelspec list` lists them)",
        )


def kernel_manager(kernel: str | None, folder: Path) -> Any:
    """Return a manager for the installed kernel of that name, or for this very Python.

    Parameters
    ----------
    kernel
        Name of a kernelspec; None for the interpreter that runs this.
    folder
        A temporary folder of the caller.

    Raises
    ------
    ExecutionError
        When the kernel, or what is needed to run one, is not installed.
    """
    for module in ("nbclient", "jupyter_client", *(("ipykernel",) if kernel is None else ())):
        if importlib.util.find_spec(module) is None:
            raise ExecutionError(f"{module} is not installed", fix=installing("verify"))
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
    from jupyter_client.manager import AsyncKernelManager

    if kernel is None:
        specs = KernelSpecManager(kernel_dirs=[str(_write_spec(folder))])
    else:
        specs = KernelSpecManager()
        try:
            specs.get_kernel_spec(kernel)
        except (NoSuchKernel, ValueError):
            names = ", ".join(sorted(specs.find_kernel_specs())) or "none is installed"
            raise ExecutionError(f"there is no kernel {kernel[:40]!r}", expected=names) from None
    return AsyncKernelManager(
        kernel_name=kernel or _OWN, kernel_spec_manager=specs, log=quiet_logger()
    )


def _write_spec(folder: Path) -> Path:
    """Write a kernelspec of this interpreter; return the folder to look for it in.

    A spec found by name might belong to another environment.
    """
    specs = folder / "kernels"
    (specs / _OWN).mkdir(parents=True)
    launch = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {
        "argv": [*launch, "--HistoryManager.hist_file=:memory:"],
        "display_name": "this Python",
        "language": "python",
    }
    (specs / _OWN / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
    return specs


def ended_how(returncode: int | None) -> str:
    """Return how a process ended, in words."""
    if returncode is None:
        return "it does not answer"
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = "unknown"
    memory = ", often for lack of memory" if name == "SIGKILL" else ""
    return f"signal {-returncode}, {name}{memory}"


def log_size(log: Path) -> int:
    """Return how many bytes a kernel has written to its log."""
    try:
        return log.stat().st_size
    except OSError:
        return 0


def last_lines(log: Path, since: int = 0, most: int = 3) -> str:
    """Return the last lines a kernel wrote after byte `since`, redacted, on one line."""
    try:
        with log.open("rb") as file:
            file.seek(max(since, log_size(log) - 4000))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    from jupyter_detllm.probes.process import home_and_user

    home, user = home_and_user()
    lines = [line.strip() for line in plain(text).splitlines() if line.strip()]
    return redact_text(" / ".join(lines[-most:])[-600:], home=home, user=user)


def plain(text: str) -> str:
    """Return `text` without terminal escape sequences."""
    return _ANSI.sub("", text)
