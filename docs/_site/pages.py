"""Pages of the site that lie elsewhere in the repository: examples with their source, changelog, weights.

A hook of mkdocs. In: the files of docs/. Out: those and the pages below, with links between them that hold.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "examples/README.md": "examples.md",
    "examples/photographs/README.md": "photographs.md",
    "models/README.md": "halopose-models.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from elsewhere."""
    for source, page in ELSEWHERE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        if source == "examples/README.md":
            text += "".join(map(listing, sorted((ROOT / "examples").glob("*.py"))))
        files.append(File.generated(config, page, content=with_links(text, (ROOT / source).parent)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of docs/ to pages from elsewhere, and from names in code to the reference."""
    if "/" in page.file.src_uri:
        return markdown
    linked = re.sub(r"(?<!\[)`(halopose\.[\w.]+)`", r"[`\1`][\1]", markdown)
    return with_links(linked, ROOT / "docs")


def listing(script: Path) -> str:
    """An example as a section of its page."""
    return f"\n## {script.name}\n\n```python\n{script.read_text(encoding='utf-8')}```\n"


def with_links(markdown: str, folder: Path) -> str:
    """Links to files of the repository (seen from the folder) as links to pages of the site."""

    def moved(match: re.Match[str]) -> str:
        path = (folder / match[1]).resolve()
        if not path.is_relative_to(ROOT):
            return match[0]
        place = path.relative_to(ROOT).as_posix()
        if place in ELSEWHERE:
            return f"]({ELSEWHERE[place]})"
        if place.startswith("examples/") and place.endswith(".py"):
            return f"](examples.md#{path.name.replace('.', '')})"
        return f"]({place.removeprefix('docs/')})" if place.startswith("docs/") else match[0]

    return re.sub(r"\]\((?!http|#)([^)#\s]+)\)", moved, markdown)
