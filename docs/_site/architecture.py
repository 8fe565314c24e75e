"""Draw docs/images/architecture.svg: the packages in layers, and the way from a frozen model to a prediction.

python docs/_site/architecture.py
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

TARGET = Path(__file__).parents[1] / "images" / "architecture.svg"
LAYERS = (
    ("plug-in", ("landing",)),
    ("command line", ("cli",)),
    ("pages", ("reports",)),
    ("studies", ("studies", "multiview", "finetuning")),
    ("prediction", ("prediction", "deploy")),
    ("training", ("fitting",)),
    ("protocol", ("evaluation",)),
    ("inputs", ("hosts", "geometry", "tracking")),
    ("calibration", ("calibration", "matching", "data")),
    ("values", ("poses", "protocol", "drawing")),
    ("method", ("uncertainty", "keypoints, boxes, types", "runtime")),
)
STEPS = ("host", "collect", "train", "calibrate", "prune", "artifact", "predict, evaluate, export")
STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1b1f23 }
  .label { fill: #57606a; font-size: 12px }
  rect { fill: #e6f2f1; stroke: #2f8f83; rx: 6 }
  path { stroke: #57606a; fill: none; stroke-width: 1.5 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .label { fill: #9da7b1 } rect { fill: #17312e; stroke: #3fb6a8 } path { stroke: #9da7b1 }
  }
"""
WIDTH, HEIGHT, GAP = 760, 34, 10


def box(x: float, y: float, width: float, text: str) -> str:
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{HEIGHT}" rx="6"/>'
        f'<text x="{x + width / 2:.0f}" y="{y + 22:.0f}" text-anchor="middle">{escape(text)}</text>'
    )


def layers(top: float) -> list[str]:
    """A row of boxes for each layer, the highest first."""
    parts = []
    for number, (label, names) in enumerate(LAYERS):
        y = top + number * (HEIGHT + GAP)
        parts.append(f'<text class="label" x="0" y="{y + 22:.0f}">{label}</text>')
        width = (WIDTH - 100 - GAP * (len(names) - 1)) / len(names)
        parts += [box(100 + place * (width + GAP), y, width, name) for place, name in enumerate(names)]
    return parts


def steps(top: float) -> list[str]:
    """The steps from left to right with arrows between them."""
    parts, x = [], 0.0
    space = (WIDTH - sum(map(step_width, STEPS))) / (len(STEPS) - 1)
    for number, name in enumerate(STEPS):
        width = step_width(name)
        parts.append(box(x, top, width, name))
        if number < len(STEPS) - 1:
            parts.append(f'<path d="M{x + width + 3:.0f} {top + 17} h{space - 6:.0f} m-5 -4 l5 4 l-5 4"/>')
        x += width + space
    return parts


def step_width(name: str) -> float:
    return 24 + 7.2 * len(name)


def main() -> None:
    top = 80.0
    height = top + len(LAYERS) * (HEIGHT + GAP) + 4
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-4 -4 {WIDTH + 8} {height:.0f}" role="img"',
        '  aria-label="Steps from a frozen model to predictions, and the packages of halopose in layers">',
        f"<style>{STYLE}</style>",
        *steps(0),
        f'<text class="label" x="0" y="{top - 16:.0f}">Packages: a package imports only from rows below it.</text>',
        *layers(top),
        "</svg>",
    ]
    TARGET.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
