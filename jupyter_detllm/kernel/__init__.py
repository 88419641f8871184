"""The kernel side: magics, the shared engine, and stamps in outputs."""

__all__: list[str] = []
