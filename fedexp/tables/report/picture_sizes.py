"""The sizes that a picture's file stores: its width, and the size of its smallest text.

A page that scales the picture can compute the height of its smallest letters from them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# Key of the text chunk of a PNG file that has the size of the smallest text in points.
SMALLEST_FONT = "smallest font"
_SIZES = re.compile(r'<svg data-font="([\d.]+)" data-width="([\d.]+)"')
# Number of points in a metre.
_POINTS = 72 / 0.0254


def with_sizes(svg: str, font: float, width: float) -> str:
    """Store the sizes in the root element of an SVG.

    Args:
        svg: The drawing.
        font: Size of the smallest text in points, 0 if there is no text.
        width: Width of the drawing in points.
    """
    return svg.replace("<svg", f'<svg data-font="{font:g}" data-width="{width:g}"', 1)


def sizes_of_svg(svg: str) -> tuple[float, float] | None:
    """Read (font, width) as `with_sizes` stored them. None if they are not stored."""
    found = _SIZES.search(svg)
    return (float(found[1]), float(found[2])) if found else None


def sizes_of_png(png: bytes) -> tuple[float, float] | None:
    """Read (font, width) of a PNG file, None if the file does not store them.

    The font is in the text chunk `SMALLEST_FONT`. The width in points follows from the
    number of pixels and their density.
    """
    texts = dict(text.split(b"\0", 1) for kind, text in _chunks(png) if kind == b"tEXt")
    font = texts.get(SMALLEST_FONT.encode())
    width = width_of_png(png)
    return (float(font), width) if font is not None and width else None


def width_of_png(png: bytes) -> float:
    """Read the width of a PNG file in points, 0 if it stores no density of pixels."""
    chunks = dict(_chunks(png))
    density = int.from_bytes(chunks.get(b"pHYs", b"")[:4], "big")
    return int.from_bytes(chunks[b"IHDR"][:4], "big") / density * _POINTS if density else 0.0


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the chunks of a PNG file as (type, data)."""
    # A chunk has a length, a type, its data and a checksum, after the file's signature.
    at = 8
    while at + 8 <= len(png):
        length = int.from_bytes(png[at : at + 4], "big")
        yield png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        at += length + 12
