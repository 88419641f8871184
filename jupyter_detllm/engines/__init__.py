"""Engines: what generates. Each is one module; `base` holds what they share."""

__all__: list[str] = []
