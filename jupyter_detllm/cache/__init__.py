"""Results kept on this machine, so that an equal request need not be generated again."""

__all__: list[str] = []
