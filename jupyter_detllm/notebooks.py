"""The part of the Python API that works on notebook files: check, compare, rerun and replay.

Each does what the command of its name does and returns a `Report`: ``exit_code`` as the
command's, ``cells`` with a verdict each. What they execute runs in processes of their own, so
that this one needs no engine; on a GPU the memory that an engine of this kernel holds is
missing there. Nothing of the kernel's part is imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from jupyter_detllm.core.verdict import Policy
from jupyter_detllm.errors import UsageError

if TYPE_CHECKING:
    from jupyter_detllm.verify.report import Report

__all__ = ["PathOrText", "check", "compare", "replay", "rerun"]

PathOrText: TypeAlias = str | Path
"""A file, as text or as a path."""


def check(path: PathOrText, *, policy: str | None = None) -> Report:
    """Check a notebook file; nothing is executed and no engine is needed.

    Parameters
    ----------
    path
        The notebook.
    policy
        ``tokens`` (the default), ``bitwise``, ``within(ATOL)`` or ``prefix(N)``.

    Returns
    -------
    Report
        ``exit_code`` as that of `jupyter detllm check`, and ``cells`` with a ``verdict``.

    Raises
    ------
    UsageError
        If an argument is not a path, or the policy is not valid.
    """
    from jupyter_detllm.verify.service import check_paths

    return check_paths(_paths((path,)), _policy(policy))


def compare(left: PathOrText, right: PathOrText, *, policy: str | None = None) -> Report:
    """Compare two notebooks, two fingerprints, or one of each; nothing is executed.

    Parameters
    ----------
    left, right
        Files, called A and B in the report. For a notebook, the stamps in its outputs are
        used, or its references if it has none.
    policy
        ``tokens`` (the default), ``bitwise``, ``within(ATOL)`` or ``prefix(N)``.

    Returns
    -------
    Report
        A verdict per cell, and the environment's differences, likeliest first.

    Raises
    ------
    UsageError
        If an argument is not a path, or the policy is not valid.
    """
    from jupyter_detllm.verify.compare import compare_paths

    first, second = _paths((left, right))
    return compare_paths(first, second, _policy(policy))


def rerun(
    *notebooks: PathOrText,
    policy: str | None = None,
    save: bool = False,
    kernel: str | None = None,
    cell_timeout: float = 600.0,
) -> Report:
    """Execute a copy of each notebook in a fresh kernel and compare it with its references.

    Parameters
    ----------
    *notebooks
        Files; not changed unless `save` is set.
    policy
        As for `compare`.
    save
        Write the new outputs to the files whose cells all ran.
    kernel
        Name of an installed kernel; this environment's Python by default.
    cell_timeout
        Time limit of a cell, in seconds.

    Returns
    -------
    Report
        A verdict per stamped cell.

    Raises
    ------
    UsageError
        If an argument is not a path, or the policy is not valid.
    """
    from jupyter_detllm.verify.rerun import ExecutionOptions, rerun_paths

    options = ExecutionOptions(kernel, cell_timeout)
    return rerun_paths(_paths(notebooks), _policy(policy), options=options, save=save)


def replay(
    *notebooks: PathOrText,
    policy: str | None = None,
    models: Sequence[str] = (),
    max_tokens_total: int | None = None,
) -> Report:
    """Send the recorded requests of notebooks to an engine again, without running their code.

    Parameters
    ----------
    *notebooks
        Files; none is written.
    policy
        As for `compare`.
    models
        Models and folders that may be loaded in addition to ``demo``, including folders of
        LoRA adapters. A notebook cannot choose what is loaded.
    max_tokens_total
        Limit on prompt and new tokens of the whole run (default 200,000).

    Returns
    -------
    Report
        A verdict per stamped cell.

    Raises
    ------
    UsageError
        If the notebooks request more than is allowed.
    """
    from jupyter_detllm.verify.plan import Permissions
    from jupyter_detllm.verify.replay import replay_paths

    if isinstance(models, str):
        raise UsageError(f"models is the text {models[:40]!r}", expected="a list of names")
    permissions = Permissions(models=tuple(models))
    if max_tokens_total is not None:
        permissions = Permissions(max_tokens_total, tuple(models))
    return replay_paths(_paths(notebooks), _policy(policy), permissions=permissions).report


def _paths(given: Sequence[object]) -> list[PathOrText]:
    if not given:
        raise UsageError("there is no file", expected="at least one")
    paths = [Path(item) for item in given if isinstance(item, (str, PathLike))]
    if len(paths) < len(given):
        kind = next(type(i).__name__ for i in given if not isinstance(i, (str, PathLike)))
        raise UsageError(f"a notebook is a {kind}", expected="paths")
    return list(paths)


def _policy(policy: object) -> Policy | None:
    if policy is None:
        return None
    if not isinstance(policy, str):
        raise UsageError(f"the policy is a {type(policy).__name__}", expected="text")
    return Policy.parse(policy)
