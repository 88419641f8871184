"""The pytest plugin ``detllm``: its options, and the start of a session that uses them.

Loaded by every pytest run of an environment, so it imports pytest and nothing of ours
until ``--detllm`` is given.
"""

from __future__ import annotations

import pytest

__all__ = ["pytest_addoption", "pytest_configure"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--detllm`` and the options that go with it."""
    group = parser.getgroup("detllm", "generations in notebooks (jupyter-detllm)")
    add = group.addoption
    add(
        "--detllm",
        action="store_true",
        help="verify the stamped cells of collected notebooks, one test per cell",
    )
    add(
        "--detllm-mode",
        choices=("check", "rerun", "replay"),
        default="check",
        help="check (default): compare what the files hold; rerun: execute a copy of each "
        "notebook; replay: send the recorded requests to an engine",
    )
    add(
        "--detllm-update",
        choices=("none", "new", "all"),
        default="none",
        help="promote stamps to references at the end: new ones, or all that differ",
    )
    add("--detllm-policy", metavar="POLICY", help="bitwise, tokens, within(ATOL) or prefix(N)")
    add(
        "--detllm-accept",
        metavar="LIST",
        default="",
        help="what is skipped instead of failed though it was not verified, comma-separated: "
        "recorded, stale, unstamped, not_comparable, relaxed",
    )
    add(
        "--detllm-strict-fingerprint",
        action="store_true",
        help="fail where the fingerprint differs, whatever the generations",
    )
    _add_execution(group)


def _add_execution(group: pytest.OptionGroup) -> None:
    for name, what in (("cell", "a cell may run"), ("startup", "a kernel may take to start")):
        group.addoption(
            f"--detllm-{name}-timeout",
            type=float,
            default=600.0,
            metavar="SECONDS",
            help=f"rerun: longest {what} (default 600)",
        )
    group.addoption(
        "--detllm-kernel",
        metavar="NAME",
        help="rerun: an installed kernel; default: this environment's Python",
    )
    group.addoption(
        "--detllm-allow-model",
        action="append",
        default=[],
        metavar="NAME_OR_PATH",
        help="replay: a Hugging Face id or a folder that may be loaded, besides demo; may be "
        "repeated",
    )
    group.addoption(
        "--detllm-max-tokens-total",
        type=int,
        metavar="N",
        help="replay: most prompt and new tokens that all notebooks together may ask for",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start a session of ours under ``--detllm``; refuse our options without it."""
    if config.getoption("detllm"):
        from jupyter_detllm.pytest_plugin.session import start

        start(config)
        return
    # Only what was typed: options in `addopts` wait there for a run with --detllm.
    for argument in config.invocation_params.args:
        if str(argument).startswith("--detllm-"):
            raise pytest.UsageError(f"{argument} does nothing without --detllm")
