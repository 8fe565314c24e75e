"""The analysis of residuals as one html page that needs nothing but a browser; its plots are drawn here as SVG.

In: the content of analysis.json, as analysed or as read back. Out: the page's text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from halopose.errors import HaloposeError
from halopose.report import rounded

_NEEDED = ("tails", "shape", "keypoint_correlation", "dependence", "shift", "downweighting", "recommendations")


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic axis from low to high."""

    label: str
    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def place(self, value: float | None) -> float | None:
        """Where a value lies, 0 at the low end and 1 at the high one; None if nowhere."""
        if value is None or (self.log and value <= 0):
            return None
        bend = math.log if self.log else float
        share = (bend(value) - bend(self.low)) / (bend(self.high) - bend(self.low))
        return share if -0.02 <= share <= 1.02 else None

    def marks(self) -> list[tuple[float, str]]:
        """Place and text of each tick."""
        places = [(self.place(tick), f"{tick:g}") for tick in self.ticks]
        return [(place, text) for place, text in places if place is not None]


@dataclass(frozen=True)
class Curve:
    """A named line; ``kind`` is its style, as in the report."""

    label: str
    kind: str
    points: list[tuple[float, float]]


@dataclass(frozen=True)
class Plot:
    """Curves and bars in a unit square."""

    title: str
    x: Axis
    y: Axis
    curves: list[Curve]
    bars: list[tuple[float, float, float]]

    @classmethod
    def of(
        cls,
        title: str,
        x: Axis,
        y: Axis,
        series: Sequence[tuple[str, str, Sequence[Any], Sequence[Any]]],
        bars: Sequence[tuple[float, float, float]] = (),
    ) -> Plot:
        """series: label, kind, xs and ys; bars: left and right in x, height in y."""
        curves = []
        for label, kind, xs, ys in series:
            pairs = [(x.place(a), y.place(b)) for a, b in zip(xs, ys, strict=True)]
            curves.append(Curve(label, kind, [(a, b) for a, b in pairs if a is not None and b is not None]))
        places = [(x.place(left), x.place(right), y.place(height)) for left, right, height in bars]
        drawn = [(a, b, c) for a, b, c in places if a is not None and b is not None and c is not None]
        return cls(title, x, y, curves, drawn)


def render(result: dict[str, Any], title: str = "Residuals before heads") -> str:
    """The page (html) of an analysis."""
    missing = [key for key in _NEEDED if key not in result]
    if missing:
        raise HaloposeError(f"this is not the content of an analysis: {missing[0]} is missing")
    result = rounded(result)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("halopose"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    css = (resources.files("halopose") / "templates" / "report.css").read_text(encoding="utf-8")
    page = environment.get_template("analysis.html").render(
        title=title,
        css=Markup(css),
        summary=(
            f"{result['images']:,} images, {result['matched_instances']:,} matched instances, "
            f"{result['keypoints']:,} keypoints, {result['assigned_cells']:,} cells assigned in training."
        ),
        advice=result["recommendations"],
        survival=[_survival(result["tails"][kind], label) for kind, label in _TAILS.items()],
        keypoints=_keypoint_rows(result),
        names=[name.replace("_", " ") for name in result["keypoint_names"]],
        correlation=_correlation_rows(result),
        strongest=_strongest(result),
        dependence=[_dependence(name, table) for name, table in result["dependence"].items()],
        shift=_shift(result["shift"]),
        weights=[[_text(row[key], digits) for key, digits in _WEIGHTS] for row in result["shift"]["weights"]],
        downweighting=_downweighting(result["downweighting"]),
        facts=_facts(result),
        settings=[(key.replace("_", " "), str(value)) for key, value in result["settings"].items()],
    )
    return page.encode("utf-8", "replace").decode("utf-8")


_TAILS = {"constant": "One spread per keypoint", "binned": "Spread explained by bins"}
_WEIGHTS = (("alpha", 1), ("effective", 2), ("distance", 3), ("effective_scaled", 2), ("distance_scaled", 3))
_RADIUS_TICKS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


def _survival(tail: dict[str, Any], title: str) -> Plot:
    curves = tail["survival"]
    x = Axis("radius in deviations", 0.1, 30, _RADIUS_TICKS, log=True)
    y = Axis("share of residuals beyond", 1e-5, 1, (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0), log=True)
    series = [
        (label, kind, curves["radius"], curves[name])
        for label, kind, name in (
            ("residuals", "uncalibrated", "empirical"),
            ("Gaussian", "gaussian", "gaussian"),
            ("Student-t", "student_t", "student_t"),
        )
    ]
    return Plot.of(title, x, y, series)


def _dependence(name: str, table: dict[str, Any]) -> Plot:
    count = len(table["normalized"])
    largest = max(value for value in table["normalized"] if value is not None)
    y = Axis("relative spread", 0, 1.1 * largest, tuple(_nice_ticks(1.1 * largest)))
    x = Axis(_BIN_LABELS[name], -0.6, count - 0.4, ())
    bars = [(k - 0.4, k + 0.4, value) for k, value in enumerate(table["normalized"]) if value is not None]
    return Plot.of(f"{name.capitalize()}: {table['normalized_ratio']:.1f}-fold", x, y, [], bars)


_BIN_LABELS = {
    "scale": "small to large objects",
    "confidence": "unsure to sure detections",
    "visibility": "hidden to visible keypoints",
    "level": "fine to coarse levels",
}


def _nice_ticks(high: float) -> list[float]:
    step = 10.0 ** math.floor(math.log10(high / 2))
    step = next(step * factor for factor in (1, 2, 5, 10) if high / (step * factor) <= 5)
    return [round(step * k, 10) for k in range(int(high / step) + 1)]


def _shift(shift: dict[str, Any]) -> Plot:
    x = Axis("|r| / (s κ)", 0.02, 10, (0.03, 0.1, 0.3, 1.0, 3.0, 10.0), log=True)
    y = Axis("share of keypoints within", 0, 1, (0, 0.25, 0.5, 0.75, 1))
    series = [
        ("assigned in training", "uncalibrated", shift["radius"], shift["assigned"]),
        ("matched at inference", "student_t", shift["radius"], shift["matched"]),
    ]
    return Plot.of("Normalised radius", x, y, series)


def _downweighting(found: dict[str, Any]) -> Plot:
    x = Axis("u = |r| / (s κ)", 0, 5, (0, 1, 2, 3, 4, 5))
    y = Axis("weight left, w(u)", 0, 1.05, (0, 0.25, 0.5, 0.75, 1))
    series = [
        ("Gaussian", "gaussian", found["radius"], found["gaussian"]),
        ("OKS", "uncalibrated", found["radius"], found["oks"]),
        (f"Student-t, nu {found['nu']:.1f}", "student_t", found["radius"], found["student_t"]),
    ]
    share = np.asarray(found["histogram"]["share"], dtype=float)
    edges = found["histogram"]["edges"]
    heights = share / max(share.max(), 1e-12)
    bars = [(edges[k], edges[k + 1], float(height)) for k, height in enumerate(heights)]
    return Plot.of("Downweighting", x, y, series, bars)


def _keypoint_rows(result: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Name and figures of each keypoint: count, nu twice, gain, ratio, correlation, correlation with the limb."""
    constant, binned = result["tails"]["constant"], result["tails"]["binned"]
    image, limb = result["shape"]["image"], result["shape"].get("limb")
    rows = []
    for k, name in enumerate(result["keypoint_names"]):
        cells = [f"{constant['count'][k]:,}", _text(constant["nu"][k], 1), _text(binned["nu"][k], 1)]
        cells.append(_text(binned["gain"][k], 2))
        cells.append(_starred(image, "ratio", k))
        cells.append(_starred(image, "correlation", k))
        cells.append("–" if limb is None else _starred(limb, "correlation", k))
        rows.append((name.replace("_", " "), cells))
    return rows


def _starred(frame: dict[str, Any], name: str, k: int) -> str:
    return _text(frame[name][k], 2) + ("*" if frame[f"{name}_significant"][k] else "")


def _correlation_rows(result: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Name and, for each other keypoint, text and background of the correlation; only the lower triangle."""
    rows = []
    for k, (name, row) in enumerate(
        zip(result["keypoint_names"], result["keypoint_correlation"]["matrix"], strict=True)
    ):
        cells = [(_percent(value), _shade(value)) for value in row[:k]]
        rows.append((name.replace("_", " "), cells))
    return rows


def _percent(value: float | None) -> str:
    return "" if value is None else _text(100 * value, 0)


def _shade(value: float | None) -> str:
    if value is None:
        return ""
    return f"rgba(var(--{'over' if value > 0 else 'under'}), {min(abs(value), 1):.2f})"


def _strongest(result: dict[str, Any]) -> str:
    names = [name.replace("_", " ") for name in result["keypoint_names"]]
    return "; ".join(
        f"{names[entry['pair'][0]]} and {names[entry['pair'][1]]} {_text(entry['correlation'], 2)}"
        for entry in result["keypoint_correlation"]["strongest"]
    )


def _facts(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures that stand beside the advice."""
    binned, found = result["tails"]["binned"], result["downweighting"]
    return [
        ("Median ν, spread explained", _text(binned["nu_median"], 1)),
        ("Beyond 3 deviations", f"{100 * binned['beyond_3']['empirical']:.1f}\N{NO-BREAK SPACE}%"),
        ("All but ignored by OKS", f"{100 * found['ignored_share']:.1f}\N{NO-BREAK SPACE}%"),
        ("Their part of the squared error", f"{100 * found['ignored_energy']:.0f}\N{NO-BREAK SPACE}%"),
    ]


def _text(value: float | None, decimals: int) -> str:
    text = "–" if value is None else f"{value:.{decimals}f}"
    return text.replace("-", "−") if value is not None and float(text) else text.lstrip("-")


__all__ = ["render"]
