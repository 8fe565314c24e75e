"""Draw docs/images/speed-history.svg: ratios of the whole runs in benchmarks/history over time.

    python -m benchmarks --json benchmarks/history/DATE.json     # a whole run on a quiet machine
    python -m benchmarks.history                                 # redraw the chart

Ratios of different machines are comparable only roughly, so each machine has its own symbol.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.runs import ROOT, Run

FOLDER = ROOT / "benchmarks" / "history"
TARGET = ROOT / "docs" / "images" / "speed-history.svg"
# Row, title and target; a line above the target is good for the first group, below it for the second.
FASTER = (
    ("protocol.pycocotools", "protocol / pycocotools", 10.0),
    ("protocol.faster-coco-eval", "protocol / faster-coco-eval", 3.0),
    ("student.nu-4", "Student-t / scipy", None),
    ("training.epoch", "epoch / with base model", None),
    ("landing.pnp", "PnP / scipy", None),
    ("landing.fix", "position fix / subsets", None),
)
COSTS = (
    ("predicting.yolo11n-sparse", "sparse heads / base model", 1.02),
    ("predicting.shipped", "shipped heads / base model", 1.02),
    ("predicting.framework", "shipped heads / YOLO.predict", 1.01),
    ("predicting.novelty", "out-of-distribution / without", 1.005),
    ("exporting.topk", "exported / framework export", 1.03),
    ("exporting.pytorch", "exported / PyTorch", None),
)
WIDTH, PANEL_WIDTH, PANEL_HEIGHT, GAP, COLUMNS = 760, 240, 110, 20, 3
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1b1f23 }
  .label { fill: #57606a; font-size: 11px }
  .axis { stroke: #57606a; stroke-width: 0.5; fill: none }
  .line { stroke: #2f8f83; fill: none; stroke-width: 1.5 }
  .mark { fill: #2f8f83 }
  .target { stroke: #b35900; stroke-width: 1; stroke-dasharray: 4 3 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .label { fill: #9da7b1 } .axis { stroke: #9da7b1 }
    .line { stroke: #3fb6a8 } .mark { fill: #3fb6a8 } .target { stroke: #e0903f }
  }
"""


def runs(folder: Path = FOLDER) -> list[Run]:
    """All runs of a folder, the oldest first."""
    return sorted((Run.read(path) for path in folder.glob("*.json")), key=lambda run: run.date)


def chart(found: Sequence[Run]) -> str:
    """The runs as SVG: one panel for each ratio, one point for each run."""
    machines = list(dict.fromkeys(run.machine.processor for run in found))
    parts, top = [], 0.0
    for title, rows in (("Times faster than the peer", FASTER), ("Time relative to running without", COSTS)):
        parts.append(f'<text x="0" y="{top + 12:.0f}">{title}</text>')
        for number, (name, label, target) in enumerate(rows):
            left = number % COLUMNS * (PANEL_WIDTH + GAP)
            parts += _panel(
                found, machines, name, label, target, left, top + 24 + number // COLUMNS * (PANEL_HEIGHT + GAP)
            )
        top += 34 + math.ceil(len(rows) / COLUMNS) * (PANEL_HEIGHT + GAP)
    for number, machine in enumerate(machines):
        parts.append(_mark(8 + number * 330, top + 4, number))
        parts.append(f'<text class="label" x="{18 + number * 330}" y="{top + 8:.0f}">{escape(machine)}</text>')
    first, last = (f"{run.date[:10]}, {run.commit}" for run in (found[0], found[-1]))
    note = f"{len(found)} whole runs, {first} to {last}; dashed: target"
    parts.append(f'<text class="label" x="0" y="{top + 28:.0f}">{note}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-4 -4 {WIDTH + 8} {top + 40:.0f}" role="img"'
    described = '  aria-label="Ratios of whole benchmark runs over time">'
    return "\n".join([head, described, f"<style>{STYLE}</style>", *parts, "</svg>"]) + "\n"


def _panel(
    found: Sequence[Run], machines: list[str], name: str, label: str, target: float | None, left: float, top: float
) -> list[str]:
    rows = [(number, run, run.row(name)) for number, run in enumerate(found)]
    values = [(number, run, row.value) for number, run, row in rows if row is not None and row.value is not None]
    levels = [value for *_, value in values] + ([target] if target else [])
    low, high = (min(levels), max(levels)) if levels else (0.0, 1.0)
    low, high = low - 0.1 * (high - low or 1), high + 0.1 * (high - low or 1)
    bottom, width = top + PANEL_HEIGHT - 8, PANEL_WIDTH - 50

    def at(number: int, value: float) -> tuple[float, float]:
        x = left + 36 + width * (number + 0.5) / len(found)
        return x, bottom - (PANEL_HEIGHT - 30) * (value - low) / (high - low)

    points = [at(number, value) for number, _, value in values]
    parts = [f'<text class="label" x="{left:.0f}" y="{top + 12:.0f}">{escape(label)}</text>']
    parts.append(f'<path class="axis" d="M{left + 34:.0f} {top + 20:.0f} V{bottom:.0f} h{width:.0f}"/>')
    for value in sorted({min(levels), max(levels)}) if levels else []:
        y = at(0, value)[1] + 4
        parts.append(f'<text class="label" x="{left + 30:.0f}" y="{y:.1f}" text-anchor="end">{value:.3g}</text>')
    if target:
        parts.append(f'<path class="target" d="M{left + 34:.0f} {at(0, target)[1]:.1f} h{width:.0f}"/>')
    if points:
        parts.append('<path class="line" d="M' + " L".join(f"{x:.1f} {y:.1f}" for x, y in points) + '"/>')
    for (x, y), (_, run, value) in zip(points, values, strict=True):
        tip = escape(f"{value:g}, {run.date[:10]}, {run.commit}")
        parts.append(_mark(x, y, machines.index(run.machine.processor), tip))
    return parts


def _mark(x: float, y: float, kind: int, tip: str = "") -> str:
    """A disc, square or diamond."""
    shapes = ("M-3 0 a3 3 0 1 0 6 0 a3 3 0 1 0 -6 0z", "M-3 -3 h6 v6 h-6z", "M0 -4 l4 4 l-4 4 l-4 -4z")
    title = f"<title>{tip}</title>" if tip else ""
    path = shapes[kind % len(shapes)]
    return f'<path class="mark" transform="translate({x:.1f} {y:.1f})" d="{path}">{title}</path>'


def main() -> None:
    TARGET.write_text(chart(runs()), encoding="utf-8")


if __name__ == "__main__":
    main()
