"""mkdocs hook: pages from other folders of the repository, links between pages, and the generated command reference."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))  # mkdocs loads a hook without its folder

from cli_reference import COMMANDS, command_reference
from notebooks import TUTORIALS, page_of

from halopose import __version__

ROOT = Path(__file__).parents[2]
OUTSIDE = {
    "examples/README.md": "examples.md",
    "examples/photographs/README.md": "photographs.md",
    "models/README.md": "halopose-models.md",
    "research/README.md": "research.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "tests/README.md": "tests.md",
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show the version in the header, and link to the repository if the environment names it, as GitHub's does.

    The link is in the footer: for one in the header the theme asks GitHub's servers for the number of stars.
    """
    config.site_name = f"halopose {__version__}"
    if repository := os.environ.get("GITHUB_REPOSITORY"):
        link = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"
        config.extra["social"] = [{"icon": "material/source-repository", "link": link, "name": repository}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, and a page for each notebook."""
    for name in TUTORIALS:
        page = f"tutorials/{name}.md"
        markdown, pictures = page_of(name)
        content = with_links(markdown, ROOT / "docs" / "tutorials", page, keep=f"{name}.ipynb")
        files.append(File.generated(config, page, content=content))
        for picture, data in pictures.items():
            files.append(File.generated(config, f"tutorials/{picture}", content=data))
    for source, page in OUTSIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        if source == "examples/README.md":
            text += "".join(map(listing, sorted((ROOT / "examples").glob("*.py"))))
        content = with_links(text, (ROOT / source).parent, page)
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Insert the command reference; link to pages from outside docs/, and from names in code to the API reference."""
    source = page.file.src_uri
    if source.startswith(("reference/api/", "tutorials/")) or source in OUTSIDE.values():
        return markdown
    if COMMANDS in markdown:
        return markdown.replace(COMMANDS, command_reference())
    linked = re.sub(r"(?<!\[)`(halopose\.[\w.]+)`", r"[`\1`][\1]", markdown)
    return with_links(linked, (ROOT / "docs" / source).parent, source)


def listing(script: Path) -> str:
    """Return an example as a section of its page."""
    return f"\n## {script.name}\n\n```python\n{script.read_text(encoding='utf-8')}```\n"


def with_links(markdown: str, folder: Path, page: str, keep: str = "") -> str:
    """Rewrite links to files of the repository as links to pages of the site.

    Args:
        markdown: Text of the page.
        folder: Folder of the source file; its links are relative to it.
        page: Place of the page on the site, such as `how-to/ros2.md`.
        keep: A link that stays as it is.
    """

    def rewritten(match: re.Match[str]) -> str:
        path = Path(os.path.normpath(folder / match[1]))
        if match[1] == keep or not path.is_relative_to(ROOT):
            return match[0]
        place = path.relative_to(ROOT).as_posix()
        anchor = ""
        if place in OUTSIDE:
            target = OUTSIDE[place]
        elif place.startswith("examples/") and place.endswith(".py"):
            target, anchor = "examples.md", f"#{path.name.replace('.', '')}"
        elif place.startswith("docs/"):
            target = place.removeprefix("docs/").replace(".ipynb", ".md")  # the page of a notebook
        else:
            return match[0]
        return f"]({os.path.relpath(target, Path(page).parent)}{anchor}"

    return re.sub(r"\]\((?!http|#)([^)#\s]+)", rewritten, markdown)
