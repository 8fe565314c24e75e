"""Self-contained html page of a residual analysis, from the content of analysis.json."""

from __future__ import annotations

from typing import Any

import numpy as np

from halopose.errors import HaloposeError
from halopose.reports.html import freedom, number, page
from halopose.reports.plots import Axis, Curve, Plot
from halopose.reports.score_report import rounded

_NEEDED = ("tails", "shape", "keypoint_correlation", "dependence", "shift", "downweighting", "recommendations")


def render_analysis(result: dict[str, Any], title: str = "Residuals before heads") -> str:
    """The page (html) of an analysis."""
    missing = [key for key in _NEEDED if key not in result]
    if missing:
        raise HaloposeError(f"not the content of an analysis: {missing[0]} is missing")
    result = rounded(result)
    return page(
        "analysis.html",
        title=title,
        summary=(
            f"{result['images']:,} images, {result['matched_instances']:,} detections that match an annotated object "
            f"with OKS ≥ {result['settings']['oks_threshold']:g}, {result['keypoints']:,} labelled keypoints, "
            f"{result['assigned_cells']:,} cells assigned in training."
        ),
        advice=result["recommendations"],
        survival=[_survival(result["tails"][kind], label) for kind, label in _TAILS.items()],
        keypoints=_keypoint_rows(result),
        names=[name.replace("_", " ") for name in result["keypoint_names"]],
        correlation=_correlation_rows(result),
        strongest=_strongest(result),
        dependence=_dependence(result["dependence"]),
        shift=_shift(result["shift"]),
        weights=[[number(row[key], digits) for key, digits in _WEIGHTS] for row in result["shift"]["weights"]],
        downweighting=_downweighting(result["downweighting"]),
        facts=_facts(result),
        settings=[(key.replace("_", " "), str(value)) for key, value in result["settings"].items()],
    )


_TAILS = {"constant": "One scale per keypoint", "binned": "Scale by bins"}
_WEIGHTS = (("alpha", 1), ("effective", 2), ("distance", 3), ("effective_scaled", 2), ("distance_scaled", 3))


def _survival(tail: dict[str, Any], title: str) -> Plot:
    found = tail["survival"]
    curves = [
        Curve(label, kind, found["radius"], found[name])
        for label, kind, name in (
            ("residuals", "uncalibrated", "empirical"),
            ("Gaussian", "gaussian", "gaussian"),
            ("Student-t", "student_t", "student_t"),
        )
    ]
    x, y = Axis.log("radius in standard deviations", 0.1, 30), Axis.log("share of residuals beyond", 1e-5, 1)
    return Plot(title, x, y, curves)


def _dependence(tables: dict[str, dict[str, Any]]) -> list[Plot]:
    """Bar charts with a common y axis."""
    largest = max(value for table in tables.values() for value in table["normalized"] if value is not None)
    y = Axis.linear("relative scale", 0, 1.05 * largest)
    return [_bins(name, table, y) for name, table in tables.items()]


def _bins(name: str, table: dict[str, Any], y: Axis) -> Plot:
    names = [f"{float(f'{edge:.2g}'):g}" for edge in table["edges"]]
    x = Axis.of_bins(
        _BIN_LABELS[name], len(names) - (name != "level"), names
    )  # levels are named bins, others have edges
    bars = [(k - 0.4, k + 0.4, value) for k, value in enumerate(table["normalized"]) if value is not None]
    return Plot(f"{name.capitalize()}: {table['normalized_ratio']:.1f}-fold", x, y, bars=bars)


_BIN_LABELS = {
    "scale": "side of the object, px",
    "confidence": "confidence of the detection",
    "visibility": "visibility of the keypoint",
    "level": "level, fine to coarse",
}


def _shift(shift: dict[str, Any]) -> Plot:
    curves = [
        Curve("assigned in training", "uncalibrated", shift["radius"], shift["assigned"]),
        Curve("matched at inference", "student_t", shift["radius"], shift["matched"]),
    ]
    x, y = Axis.log("|r| / (s κ)", 0.02, 10), Axis.linear("share of keypoints within", 0, 1)
    return Plot("Normalised radius", x, y, curves)


def _downweighting(found: dict[str, Any]) -> Plot:
    curves = [
        Curve("Gaussian", "gaussian", found["radius"], found["gaussian"]),
        Curve("OKS", "uncalibrated", found["radius"], found["oks"]),
        Curve(f"Student-t, ν {freedom(found['nu'])}", "student_t", found["radius"], found["student_t"]),
    ]
    edges, share = found["histogram"]["edges"], found["histogram"]["share"]
    heights = np.array(share, dtype=float) / max(*share, 1e-12)
    bars = list(zip(edges[:-1], edges[1:], heights.tolist(), strict=True))
    x, y = Axis.linear("u = |r| / (s κ)", 0, 5), Axis.linear("weight w(u)", 0, 1.05)
    return Plot("Downweighting", x, y, curves, bars)


def _keypoint_rows(result: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Name and values of each keypoint: count, nu twice, gain, ratio, correlation, correlation along the limb."""
    constant, binned = result["tails"]["constant"], result["tails"]["binned"]
    image, limb = result["shape"]["image"], result["shape"].get("limb")
    rows = []
    for k, name in enumerate(result["keypoint_names"]):
        cells = [f"{constant['count'][k]:,}", freedom(constant["nu"][k]), freedom(binned["nu"][k])]
        cells.append(number(binned["gain"][k], 2))
        cells.append(_starred(image, "ratio", k))
        cells.append(_starred(image, "correlation", k))
        cells.append("–" if limb is None else _starred(limb, "correlation", k))
        rows.append((name.replace("_", " "), cells))
    return rows


def _starred(frame: dict[str, Any], name: str, k: int) -> str:
    return number(frame[name][k], 2) + ("*" if frame[f"{name}_significant"][k] else "")


def _correlation_rows(result: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Name, and text and background colour of the correlation with each keypoint before it."""
    rows = []
    for k, (name, row) in enumerate(
        zip(result["keypoint_names"], result["keypoint_correlation"]["matrix"], strict=True)
    ):
        cells = [(_percent(value), _shade(value)) for value in row[:k]]
        rows.append((name.replace("_", " "), cells))
    return rows


def _percent(value: float | None) -> str:
    return "" if value is None else number(100 * value, 0)


def _shade(value: float | None) -> str:
    if value is None:
        return ""
    colour = "over" if value > 0 else "under"
    return f"color-mix(in srgb, var(--{colour}) {100 * min(abs(value), 1):.0f}%, transparent)"


def _strongest(result: dict[str, Any]) -> str:
    names = [name.replace("_", " ") for name in result["keypoint_names"]]
    return "; ".join(
        f"{names[entry['pair'][0]]} and {names[entry['pair'][1]]} {number(entry['correlation'], 2)}"
        for entry in result["keypoint_correlation"]["strongest"]
    )


def _facts(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Key figures next to the recommendations."""
    binned, found = result["tails"]["binned"], result["downweighting"]
    return [
        ("Median ν, scale by bins", freedom(binned["nu_median"])),
        ("Beyond 3 standard deviations", f"{100 * binned['beyond_3']['empirical']:.1f}\N{NO-BREAK SPACE}%"),
        ("Weight under OKS below 0.1", f"{100 * found['ignored_share']:.1f}\N{NO-BREAK SPACE}%"),
        ("Their share of the squared error", f"{100 * found['ignored_energy']:.0f}\N{NO-BREAK SPACE}%"),
    ]
