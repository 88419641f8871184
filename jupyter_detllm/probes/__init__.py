"""Reads the world: one collector per group of the fingerprint."""

from __future__ import annotations

__all__: list[str] = []
