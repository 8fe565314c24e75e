"""A parser that checks that an html page is whole, for tests of pages."""

from __future__ import annotations

from html.parser import HTMLParser

EVIL = "</style><script>alert(1)</script>{{ 7 * 7 }}"


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.urls: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.urls += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(text: str) -> _Page:
    """Tags and urls of a page, each tag closed where it should be."""
    page = _Page()
    page.feed(text)
    page.close()
    assert not page.open
    return page
