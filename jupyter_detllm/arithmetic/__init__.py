"""Kernels whose result is defined down to every rounding and the order of every sum."""
