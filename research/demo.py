"""``make demo``: ellipses on photographs, a landing by camera, and a report on data whose distribution is known.

    python -m research.demo -o demo

The photographs come with the ultralytics package. ``halopose.hosts.model_zoo`` fetches YOLO11n-pose.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ultralytics

from halopose.data.files import read_json
from halopose.reports.html import page


@dataclass(frozen=True)
class GallerySection:
    """A section of the page.

    Attributes:
        title: Heading.
        text: Text below the heading.
        pictures: Address and caption of each picture.
        link: Address of a link; empty for none.
        link_text: Text of the link.
    """

    title: str
    text: str
    pictures: tuple[tuple[str, str], ...] = ()
    link: str = ""
    link_text: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("demo"))
    output = parser.parse_args().output
    photographs = Path(ultralytics.__file__).parent / "assets"
    halopose("predict", photographs, "-o", output / "poses")
    halopose(
        "land",
        "simulate",
        "--weather",
        "dusk",
        "--seed",
        11,
        "--rate",
        0.5,
        "--outage",
        "gnss:30-70",
        "-o",
        output / "landing",
    )
    halopose("synthesize", "-o", output / "synthetic")
    halopose(
        "score", output / "synthetic" / "predictions.json", output / "synthetic" / "truth.json",
        "-o", output / "report", "--bootstrap", 50,
    )  # fmt: skip
    found = by_photograph(read_json(output / "poses" / "predictions.json"))
    print(table(found))
    (output / "index.html").write_text(index(found), encoding="utf-8")
    print(f"\nOpen {output / 'index.html'}")


def halopose(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "halopose", *map(str, arguments)], check=True)


def by_photograph(entries: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Detections by picture name."""
    found: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        found.setdefault(Path(entry["file_name"]).stem, []).append(entry)
    return found


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Detections with the standard deviation of their most and least certain keypoints, in pixels."""
    lines = [f"{'photograph':12}{'person':>8}{'score':>8}{'kept':>8}{'best px':>9}{'median px':>11}{'worst px':>10}"]
    for name, detections in found.items():
        for number, entry in enumerate(detections):
            spread = np.sqrt([(xx + yy) / 2 for xx, _, yy in entry["covariance"]])
            kept = f"{sum(entry['keep'])}/{len(entry['keep'])}"
            lines.append(
                f"{name:12}{number + 1:8}{entry['score']:8.2f}{kept:>8}"
                f"{spread.min():9.1f}{np.median(spread):11.1f}{spread.max():10.1f}"
            )
    return "\n".join(lines)


def index(found: dict[str, list[dict[str, Any]]]) -> str:
    """A page with the pictures and links to the other pages."""
    pictures = tuple(
        (f"poses/{name}.jpg", f"{name}: {len(entries)} {'person' if len(entries) == 1 else 'persons'}")
        for name, entries in found.items()
    )
    return page(
        "gallery.html",
        package="research",
        title="Keypoints with calibrated uncertainty",
        summary="Output of `make demo`: photographs, a simulated landing, and a report on synthetic predictions.",
        parts=[
            GallerySection(
                "Photographs",
                "95 % ellipses of YOLO11n-pose with the shipped heads; grey keypoints are pruned as "
                "unreliable. The keypoints are those of the unchanged model.",
                pictures,
            ),
            GallerySection(
                "A landing by camera",
                "The four corners of a runway with their covariances, solved for the aircraft's position and "
                "fused with the other sensors; GNSS is out for forty seconds.",
                (("landing/landing.webp", "An approach by camera"),),
                "landing/landing.html",
                "Full page of this approach",
            ),
            GallerySection(
                "The protocol",
                "Synthetic predictions with a known error distribution, scored like any prediction file.",
                link="report/report.html",
                link_text="The report",
            ),
        ],
    )


if __name__ == "__main__":
    main()
