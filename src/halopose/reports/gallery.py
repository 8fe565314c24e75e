"""Html page with sections of text, links and pictures; the picture files are beside the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halopose.reports.html import page


@dataclass(frozen=True)
class GallerySection:
    """A section with pictures (address, caption) and an optional link."""

    title: str
    text: str
    pictures: tuple[tuple[str, str], ...] = ()
    link: str = ""
    link_text: str = ""


def render_gallery(title: str, summary: str, parts: Sequence[GallerySection]) -> str:
    """The page (html)."""
    return page("gallery.html", title=title, summary=summary, parts=parts)
