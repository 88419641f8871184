"""Makes tokens, blocks and tables from models and notebooks safe and readable on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from jupyter_detllm.core.visible import clip, fitting, visible, width

__all__ = [
    "aligned",
    "block_text",
    "clip",
    "clip_left",
    "quoted",
    "token_text",
    "visible",
    "width",
]


def token_text(data: bytes) -> str:
    """Return a token's bytes as text, with bytes that are not valid UTF-8 as ``<0xE4>``."""
    return visible(_decoded(data))


def block_text(data: bytes) -> str:
    """Return bytes like `token_text`, but keep newlines and tabs."""
    lines = _decoded(data).replace("\r\n", "\n").split("\n")
    return "\n".join("\t".join(map(visible, line.split("\t"))) for line in lines)


def _decoded(data: bytes) -> str:
    out = []
    while data:
        try:
            out.append(data.decode("utf-8"))
            break
        except UnicodeDecodeError as error:
            out.append(data[: error.start].decode("utf-8"))
            out.extend(f"<0x{byte:02X}>" for byte in data[error.start : error.end])
            data = data[error.end :]
    return "".join(out)


def quoted(text: str) -> str:
    """Return a visible text in double quotes."""
    return '"' + text.replace('"', '\\"') + '"'


def clip_left(text: str, columns: int) -> str:
    """Return the tail of `text` that fits `columns`, with ``...`` if it was cut."""
    if len(text) <= 4 * columns and width(text) <= columns:
        return text
    kept = fitting(text[: -4 * columns - 1 : -1], columns - 3)
    return "..." + "".join(reversed(kept))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of visible texts as indented lines, their columns aligned."""
    widths = [max(map(width, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (text + " " * (w - width(text)) for text, w in zip(row, widths, strict=True))
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return lines
