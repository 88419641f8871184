"""Test vectors shared with the lab extension."""

__all__: list[str] = []
