"""A chart as a few SVG shapes: inline in a page, or as JSON for a widget. Escaped; no colours.

What draws a chart gives its shapes presentation attributes, or classes of the page's style.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from jupyter_detllm.core.canonical import Json

__all__ = ["Chart", "Shape", "curve", "shape"]


@dataclass(frozen=True, slots=True)
class Shape:
    """One element: ``polyline``, ``line``, ``circle``, ``rect`` or ``text``.

    `text` is the content of a text, and the tooltip of anything else.
    """

    tag: str
    attributes: tuple[tuple[str, str], ...]
    text: str = ""

    def markup(self) -> str:
        """Return the element."""
        attributes = "".join(f' {name}="{escape(value)}"' for name, value in self.attributes)
        text = escape(self.text)
        content = text if self.tag == "text" or not text else f"<title>{text}</title>"
        return f"<{self.tag}{attributes}>{content}</{self.tag}>"


def shape(tag: str, text: str = "", /, **attributes: str | float) -> Shape:
    """Return a shape; ``text_anchor`` is the attribute ``text-anchor``, ``class_`` is ``class``."""
    return Shape(
        tag,
        tuple(
            (
                name.rstrip("_").replace("_", "-"),
                value if isinstance(value, str) else f"{round(value, 1):g}",
            )
            for name, value in attributes.items()
        ),
        text,
    )


def curve(points: Iterable[tuple[float, float]], **attributes: str | float) -> Shape:
    """Return a line through points."""
    return shape("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), **attributes)


@dataclass(frozen=True, slots=True)
class Chart:
    """Shapes in a box of `width` by `height`; `alt` says the same in words."""

    width: int
    height: int
    alt: str
    shapes: tuple[Shape, ...]

    def to_json(self) -> dict[str, Json]:
        """Return the plot as JSON, for a widget."""
        return {
            "width": str(self.width),
            "height": str(self.height),
            "alt": self.alt,
            "shapes": [
                {"tag": s.tag, "attributes": dict(s.attributes), "text": s.text}
                for s in self.shapes
            ],
        }

    def svg(self) -> str:
        """Return one element that needs no style sheet."""
        alt = escape(self.alt)
        return self._element(
            f'aria-label="{alt}" width="{self.width}" height="{self.height}" '
            'style="max-width:100%"',
            f"<title>{alt}</title>",
        )

    def styled_svg(self, title: str, uid: str) -> str:
        """Return one element with a title, for a page whose style sheet sets its size.

        `uid` is the prefix of its identifiers in the page.
        """
        return self._element(
            f'aria-labelledby="{uid}-t {uid}-d"',
            f'<title id="{uid}-t">{escape(title)}</title>'
            f'<desc id="{uid}-d">{escape(self.alt)}</desc>',
        )

    def _element(self, attributes: str, about: str) -> str:
        shapes = "".join(shape.markup() for shape in self.shapes)
        box = f'viewBox="0 0 {self.width} {self.height}"'
        return f'<svg role="img" {attributes} {box}>{about}{shapes}</svg>'
