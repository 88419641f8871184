"""What stands in front of a server: equal requests answered once."""

__all__: list[str] = []
