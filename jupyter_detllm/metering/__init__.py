"""The cost of generating: rates, latencies, memory. Volatile: never stamped or compared."""

__all__: list[str] = []
