"""Exports for other tools: pins, container files, kernelspecs."""

__all__: list[str] = []
