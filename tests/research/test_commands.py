"""research/README.md maps published figures to commands; here it is checked against documentation and modules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "research" / "README.md").read_text(encoding="utf-8")
OTHERS = ("README.md", "CONTRIBUTING.md", "models/README.md")
PAGES = [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in OTHERS)]
COMMANDS = re.findall(r"`python -m research\.([^`]+)`", README)


def test_every_published_command_is_in_the_map() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"python -m research\.(\w+)", text))
    assert len(named) > 15
    assert named <= {command.split()[0] for command in COMMANDS}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_map_exists_with_its_options(command: str) -> None:
    module, *words = command.split()
    place = (ROOT / "research").joinpath(*module.split("."))
    files = sorted(place.glob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    if "research.shipped_data" in source:  # which has the options of all scripts about the shipped heads
        source += (ROOT / "research" / "shipped_data.py").read_text(encoding="utf-8")
    assert "def main" in source
    assert all(f'"{word}"' in source for word in words if word.startswith("-"))


def test_no_module_is_without_a_figure() -> None:
    imported = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "research").glob("*.py"))
    for path in (ROOT / "research").glob("*.py"):
        used = re.search(rf"from research(\.{path.stem}\b| import .*\b{path.stem}\b)", imported)
        assert path.stem == "__init__" or used or f"`python -m research.{path.stem}" in README, path.name
