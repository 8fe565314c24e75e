"""The index page of the demo is complete and escaped."""

from __future__ import annotations

from research.demo import index

from tests.helpers.html_pages import EVIL, parsed


def test_pictures_and_links_are_there_and_inert() -> None:
    text = index({"a": [{}], EVIL: [{}, {}]})
    page = parsed(text)
    assert page.urls == ["data:,", "landing/landing.html", "report/report.html"]
    assert text.count("<img ") == 3
    assert page.tags.count("section") == 3
    assert "script" not in page.tags
    assert "a: 1 person<" in text
    assert 'id="swap"' in text  # light or dark, without a script
