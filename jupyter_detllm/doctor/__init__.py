"""What can be wrong around a notebook: findings, one module per kind, and what mends them."""

__all__: list[str] = []
