"""Notebooks read, executed, checked and written; cells judged by `core`."""

__all__: list[str] = []
