"""Expectations on texts: a regular expression or a JSON schema."""

__all__: list[str] = []
