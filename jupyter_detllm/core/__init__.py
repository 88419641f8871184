"""The pure part: values in, values out. No I/O, no clock, no environment."""

__all__: list[str] = []
