"""What a text is expected to look like: a regular expression, or a JSON schema."""

__all__: list[str] = []
