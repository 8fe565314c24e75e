"""A parser that checks that an html page is whole, for tests of pages."""

from html.parser import HTMLParser

EVIL = "</style><script>alert(1)</script>{{ 7 * 7 }}"


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.open, self.urls = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.urls += [value for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parsed(text):
    """Tags and urls of a page, each tag closed where it should be."""
    page = _Page()
    page.feed(text)
    page.close()
    assert not page.open
    return page
