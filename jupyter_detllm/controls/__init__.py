"""Changes to the process: determinism controls, seeds, torch flags."""

__all__: list[str] = []
