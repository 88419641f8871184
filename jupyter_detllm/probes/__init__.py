"""Reads the environment: one collector per group of the fingerprint.

Nothing heavy is imported for this: versions come from metadata, GPUs from the driver's library
without a CUDA context, torch's state from a torch that is already imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from jupyter_detllm.core.fingerprint import FieldValue, Fingerprint
from jupyter_detllm.probes import hardware, process, software

__all__ = ["HasFields", "collect_environment"]


class HasFields(Protocol):
    """A report that provides fingerprint fields, such as the report on the controls."""

    def fields(self) -> dict[str, FieldValue]:
        """Return the fields by name."""
        ...


def collect_environment(
    *,
    control_report: HasFields | None = None,
    engine_fields: Mapping[str, FieldValue] | None = None,
    model_fields: Mapping[str, FieldValue] | None = None,
) -> Fingerprint:
    """Return the current fingerprint of this process; `engine_fields` are the live engine's."""
    values: dict[str, FieldValue] = {
        **software.collect(),
        **hardware.collect(),
        **process.collect_torch(),
        **(control_report.fields() if control_report is not None else {}),
        **(engine_fields or {}),
        **(model_fields or {}),
    }
    return Fingerprint.build({name: value for name, value in values.items() if value is not None})
