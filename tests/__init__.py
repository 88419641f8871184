"""Tests, and what they share."""

__all__: list[str] = []
