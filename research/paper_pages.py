"""Copy the page of `halopose paper` into the documentation.

    halopose paper coco-pose/data.yaml --base yolo11n-pose.pt --epochs 4 --bootstrap 60 --pictures 0 -o paper/
    python -m research.paper_pages paper/ --name coco --command "halopose paper ..." --note "..."

Writes docs/evidence/paper-NAME.md and its charts into docs/images/paper-NAME/.
"""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

from halopose.cli.terminal import say
from halopose.data.files import make_folder, write_text
from research.evidence import ROOT


def page_of(text: str, name: str, command: str, note: str) -> str:
    """The page for the documentation: with its command, and links to the folder of its charts."""
    title, _, rest = text.partition("\n")
    linked = re.sub(r"\]\(([\w-]+\.svg)\)", rf"](../images/paper-{name}/\1)", rest)
    return f"{title}\n\n```console\n{command}\n```\n\n{note}\n{linked}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="output of halopose paper")
    parser.add_argument("--name", required=True)
    parser.add_argument("--command", required=True, help="the command that made it")
    parser.add_argument("--note", required=True, help="condition of the run, in words")
    given = parser.parse_args()
    images = make_folder(ROOT / "docs" / "images" / f"paper-{given.name}")
    for chart in sorted(given.folder.glob("*.svg")):
        shutil.copyfile(chart, images / chart.name)
    text = (given.folder / "paper.md").read_text(encoding="utf-8")
    page = ROOT / "docs" / "evidence" / f"paper-{given.name}.md"
    write_text(page, page_of(text, given.name, given.command, given.note))
    say(f"-> {page}, {images}")


if __name__ == "__main__":
    main()
