"""A parser that checks that an html page is whole, and a browser that shows it, for tests of pages."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
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
        if tag not in ("meta", "link", "input"):
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


def shown(text: str, probe: str, width: int, folder: Path) -> dict[str, str]:
    """Run a script when the page is loaded; return the data of the body. Fails if the console has output."""
    page = folder / "page.html"
    script = f'<script>addEventListener("load", () => {{ {probe} }});</script>'
    # A page without a script allows none; the probe is not part of it.
    text = text.replace("default-src 'none'", "default-src 'unsafe-inline'").replace("</body>", script + "</body>")
    page.write_text(text, encoding="utf-8")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
    command += ["--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    body = re.search(r"<body[^>]*>", done.stdout)
    assert body is not None
    return dict(re.findall(r'data-(\w+)="([^"]*)"', body[0]))
