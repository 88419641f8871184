"""Deterministic LLM generations in Jupyter: seeded, stamped and checked again."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
