"""The pytest plugin ``detllm``: its options, and the start of a session that uses them.

Every pytest run of an environment loads it, so without ``--detllm`` it imports only pytest.
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
        "recorded, stale, stripped, unstamped, not_comparable, relaxed",
    )
    add(
        "--detllm-strict-fingerprint",
        action="store_true",
        help="fail where the fingerprint differs, whatever the generations",
    )
    _add_execution(group)


def _add_execution(group: pytest.OptionGroup) -> None:
    for name, what in (("cell", "of a cell"), ("startup", "for the start of a kernel")):
        group.addoption(
            f"--detllm-{name}-timeout",
            type=float,
            default=600.0,
            metavar="SECONDS",
            help=f"rerun: time limit {what} (default 600)",
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
        help="replay: a Hugging Face id or folder to allow in addition to demo; may be repeated",
    )
    group.addoption(
        "--detllm-max-tokens-total",
        type=int,
        metavar="N",
        help="replay: limit on prompt and new tokens of all notebooks together",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start a session with ``--detllm``; refuse the other options without it."""
    if config.getoption("detllm"):
        from jupyter_detllm.pytest_plugin.session import start

        start(config)
        return
    # Only what was typed: options in `addopts` wait there for a run with --detllm.
    for argument in config.invocation_params.args:
        if str(argument).startswith("--detllm-"):
            raise pytest.UsageError(f"{argument} does nothing without --detllm")
