"""Charts of pages as standalone SVG files, for markdown and papers."""

from __future__ import annotations

import re
from html import escape

import jinja2

from halopose.reports.plots import Plot

# Distinguishable with colour vision deficiency, on light and on dark paper.
_COLOURS = {
    "uncalibrated": "#c2510a", "gaussian": "#0b6aa6", "student_t": "#0a7d5a", "plain": "#8a5a9e", "ideal": "#8a8f98",
    "t2": "#9fd8c2", "t4": "#5fbb9a", "t10": "#2f9a76", "t30": "#0a6b4d",
}  # fmt: skip
_STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#6b7280;stroke:none}.title{font-weight:600}.grid{stroke:#8883;}"
    ".axis{stroke:#888}.line{fill:none;stroke-width:1.7;stroke-linejoin:round}.mark{fill:#fff;stroke-width:1.5}"
    ".amount{fill:#8885}.ideal.line{stroke-width:1;stroke-dasharray:3 3}"
    + "".join(
        f".{kind}{{stroke:{colour}}}text.{kind}{{fill:{colour};stroke:none}}" for kind, colour in _COLOURS.items()
    )
)
_LEGEND = 15  # pixels per line of the legend


def svg_file(plot: Plot, width: int = 345, height: int = 300) -> str:
    """A chart as the text of an SVG file, with its title and legend.

    Args:
        plot: The chart.
        width: Width in pixels.
        height: Height in pixels of title and drawing, without the legend.
    """
    environment = jinja2.Environment(loader=jinja2.PackageLoader("halopose.reports"), autoescape=True)
    module = environment.get_template("chart.html").make_module()
    panel = str(module.chart(plot, width, height))  # type: ignore[attr-defined]
    found = re.search(r"<svg[^>]*>(.*?)</svg>", panel, re.DOTALL)
    drawing = "" if found is None else re.sub(r"\s*\n\s*", "\n", found.group(1)).strip()
    title = f'<text class="title" x="4" y="14">{escape(plot.title)}</text>' if plot.title else ""
    top = 20 if plot.title else 0
    keys = plot.keys()
    lines = [
        f'<text class="{kind}" x="47" y="{top + height + _LEGEND * (row + 1) - 6}">\N{EM DASH} {escape(label)}</text>'
        for row, (kind, label) in enumerate(keys)
    ]
    tall = top + height + _LEGEND * len(keys) + 4
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {tall}" width="{width}" height="{tall}">'
        f'<style>{_STYLE}</style>{title}<g transform="translate(0 {top})">{drawing}</g>{"".join(lines)}</svg>\n'
    )
