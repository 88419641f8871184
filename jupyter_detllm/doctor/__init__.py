"""Doctor: findings about a notebook and its environment, with their fixes."""

__all__: list[str] = []
