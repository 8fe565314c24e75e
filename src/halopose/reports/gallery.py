"""Html page with sections of text, links and pictures; the picture files are beside the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halopose.reports.html import page


@dataclass(frozen=True)
class GallerySection:
    """A section of the page.

    Attributes:
        title: Heading.
        text: Text below the heading.
        pictures: Address and caption of each picture.
        link: Address of a link; empty for none.
        link_text: Text of the link.
    """

    title: str
    text: str
    pictures: tuple[tuple[str, str], ...] = ()
    link: str = ""
    link_text: str = ""


def render_gallery(title: str, summary: str, parts: Sequence[GallerySection]) -> str:
    """The page (html).

    Args:
        title: Title of the page.
        summary: Text below the title.
        parts: Sections.
    """
    return page("gallery.html", title=title, summary=summary, parts=parts)
