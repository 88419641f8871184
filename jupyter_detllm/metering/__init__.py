"""What generating costs: rates, latencies, memory. Volatile: never stamped, never compared."""

__all__: list[str] = []
