"""A page of pictures: complete, escaped, with the common style."""

from __future__ import annotations

from halopose.reports.gallery import GallerySection, render_gallery
from tests.helpers.html_pages import EVIL, parsed


def test_parts_links_and_pictures_are_there_and_inert() -> None:
    parts = [
        GallerySection("First", "Words.", (("a/b.jpg", "a caption"), ("c.webp", EVIL))),
        GallerySection(EVIL, "More.", link="page.html", link_text="there"),
    ]
    text = render_gallery("Title", EVIL, parts)
    page = parsed(text)
    assert page.urls == ["data:,", "page.html"]
    assert text.count("<img ") == 2
    assert 'src="a/b.jpg"' in text
    assert page.tags.count("section") == 2
    assert "script" not in page.tags
    assert 'id="swap"' in text  # light or dark, without a script
