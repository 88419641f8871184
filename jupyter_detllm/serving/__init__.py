"""`jupyter detllm serve`: a server at a level, and its result cache."""

__all__: list[str] = []
