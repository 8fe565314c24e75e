"""Manifest of the evidence pages: which command and which commit each section's numbers come from.

    python -m research.evidence                      # writes docs/evidence/manifest.json
    python -m research.evidence --run folder/        # runs every command of the pages in this folder, one by one

The numbers of a section come from the commands in its code, or else from those of the sections above it, or the first
of the page. The commit is the last one that changed the section. Commands name data by relative paths
(`coco-pose/data.yaml`, `work/`): put links to the data into the folder. A command that has finished is not repeated;
its output is in `folder/logs/`. `--only persons` runs the commands of one page. `research.paper_pages` copies the
output of `halopose paper` into `paper-*.md`. Tables of the other pages are copied by hand.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from halopose.cli.terminal import say
from halopose.data.files import make_folder, write_json, write_text

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "evidence"
MANIFEST = PAGES / "manifest.json"
FORMAT = "halopose-evidence-1"
_COMMANDS = ("python -m research.", "python -m benchmarks", "halopose ", "make bench")
_NUMBER = re.compile(r"\d")


@dataclass(frozen=True)
class Section:
    """A section with numbers.

    Attributes:
        page: File name of the page.
        title: Heading.
        commands: Commands that print its numbers.
        lines: First and last line, from 1.
    """

    page: str
    title: str
    commands: tuple[str, ...]
    lines: tuple[int, int]


def sections(page: str, text: str) -> Iterator[Section]:
    """Sections of a page that have numbers outside code, with their commands."""
    title, start, above = "", 1, list[tuple[int, tuple[str, ...]]]()
    body: list[str] = []
    lines = [*text.splitlines(), "# end"]
    fenced = False
    for number, line in enumerate(lines, start=1):
        fenced ^= line.startswith("```")
        if not line.startswith("#") or fenced:
            body.append(line)
            continue
        own = tuple(dict.fromkeys(_commands("\n".join(body))))
        prose = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", "\n".join(body), flags=re.DOTALL)
        if own:
            above.append((number, own))
        commands = own or (above[-1][1] if above else ())
        if title and _NUMBER.search(prose):
            yield Section(page, title, commands, (start, number - 1))
        title, start, body = line.lstrip("# "), number, []


def _commands(text: str) -> Iterator[str]:
    """Commands in code blocks and in code within sentences."""
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        yield from (line.split("  #")[0].strip() for line in block.splitlines() if line.startswith(_COMMANDS))
    for code in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if code.startswith("python -m research."):
            yield code


def found_sections() -> list[Section]:
    """Sections of all evidence pages."""
    pages = sorted(path for path in PAGES.glob("*.md") if path.name != "index.md")
    found = []
    for path in pages:
        text = path.read_text(encoding="utf-8")
        own = list(sections(path.name, text))
        first = tuple(_commands(text))[:1]  # an introduction sums up what follows
        found += [one if one.commands else replace(one, commands=first) for one in own]
    return found


def commit_of(section: Section) -> str:
    """The last commit that changed the section's lines; empty outside a repository."""
    first, last = section.lines
    command = ["git", "blame", "--line-porcelain", "-L", f"{first},{last}", "--", str(PAGES / section.page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = re.findall(r"^([0-9a-f]{40}) .*?^committer-time (\d+)$", done.stdout, re.MULTILINE | re.DOTALL)
    found = [(int(time), commit) for commit, time in found if set(commit) != {"0"}]
    return max(found)[1][:9] if found else ""


def write_manifest() -> None:
    """Write the manifest of all pages."""
    entries = [
        {**{name: value for name, value in asdict(one).items() if name != "lines"}, "commit": commit_of(one)}
        for one in found_sections()
    ]
    write_json(MANIFEST, {"format": FORMAT, "sections": entries}, indent=1)
    say(f"{len(entries)} sections -> {MANIFEST}")


def run_all(folder: Path, only: str | None) -> int:
    """Run every command once; returns the number of commands that failed."""
    commands = dict.fromkeys(
        command for one in found_sections() if only is None or one.page == f"{only}.md" for command in one.commands
    )
    logs, failed = make_folder(folder / "logs"), 0
    for command in commands:
        log = logs / f"{hashlib.sha256(command.encode()).hexdigest()[:12]}.txt"
        if log.exists():
            continue
        words = shlex.split(command)
        if words[0] == "make":
            words = [*words, "-C", str(ROOT)]
        elif words[0] == "python":
            words[0] = sys.executable
        say(command)
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            failed += 1
            say(f"failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}")
        else:
            write_text(log, f"$ {command}\n{done.stdout}")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="folder with the data, in which every command runs")
    parser.add_argument("--only", help="page whose commands to run, without .md")
    given = parser.parse_args()
    if given.run is None:
        write_manifest()
    elif failed := run_all(given.run, given.only):
        raise SystemExit(f"{failed} commands failed")


if __name__ == "__main__":
    main()
