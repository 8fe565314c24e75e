"""A page of pictures that lie beside it, with links to other pages; in the style of all pages.

In: parts with text, a link and pictures. Out: html.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halopose.reports.html import page


@dataclass(frozen=True)
class GallerySection:
    """A section: pictures are (address, caption)."""

    title: str
    text: str
    pictures: tuple[tuple[str, str], ...] = ()
    link: str = ""
    link_text: str = ""


def render_gallery(title: str, summary: str, parts: Sequence[GallerySection]) -> str:
    """The whole page."""
    return page("gallery.html", title=title, summary=summary, parts=parts)
