"""The manifest of the evidence pages names a command for every section with numbers."""

from pathlib import Path

from research.evidence import FORMAT, MANIFEST, found_sections, run_all, sections

from halopose.data.files import read_json

PAGE = """# Results

Two sentences, no figure.

```console
halopose score a.json b.json -o out/  # ten minutes
```

## First

| a | 1.5 |

## Second

See `python -m research.regions --work work/`: 3 px.

## Words

No numbers.
"""


def test_a_section_has_its_own_commands_or_those_above() -> None:
    found = list(sections("page.md", PAGE))
    assert [(one.title, one.commands, one.lines) for one in found] == [
        ("First", ("halopose score a.json b.json -o out/",), (9, 12)),
        ("Second", ("python -m research.regions --work work/",), (13, 16)),
    ]


def test_the_manifest_is_that_of_the_pages() -> None:
    """A few sections may be newer: a release writes the manifest anew."""
    content = read_json(MANIFEST)
    assert content["format"] == FORMAT
    told = {(one["page"], one["title"], tuple(one["commands"])) for one in content["sections"]}
    found = {(one.page, one.title, one.commands) for one in found_sections()}
    assert len(told & found) >= 0.8 * len(found)
    assert all(len(one["commit"]) == 9 for one in content["sections"])


def test_every_section_with_numbers_has_a_command() -> None:
    assert [f"{one.page}: {one.title}" for one in found_sections() if not one.commands] == []


def test_commands_of_a_page_run_once(tmp_path: Path) -> None:
    assert run_all(tmp_path, "no such page") == 0
    assert list((tmp_path / "logs").iterdir()) == []
