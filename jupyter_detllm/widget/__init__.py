"""The panel of `%detllm show`: what it says, as text, as static HTML, as a widget."""

__all__: list[str] = []
