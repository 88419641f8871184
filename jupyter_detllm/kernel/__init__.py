"""The kernel side: magics, the shared engine and what a cell leaves in the notebook."""

__all__: list[str] = []
