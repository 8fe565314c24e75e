"""The report: one html page that needs nothing but a browser, not even a network.

In: the content of metrics.json, as evaluated or as read back. Out: the page's text, with verdict and
tables in the html itself and the plots drawn by its script from the metrics embedded in it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from markupsafe import Markup

from halopose.errors import HaloposeError
from halopose.reports.page import page
from halopose.reports.verdict import coverage_at, number, verdict

REGIMES = {"uncalibrated": "Uncalibrated", "gaussian": "Gaussian", "student_t": "Student-t"}
_DIGITS = 5  # what a plot can show; keeps the page small
_NEEDED = (
    *REGIMES,
    "keypoint_names",
    "scales",
    "pruned",
    "pruning_curve",
    "cells",
    "curves",
    "curves_pruned",
)
_METRICS = {
    "ace": ("ACE", 4),
    "ace_x": ("ACE x", 4),
    "ace_y": ("ACE y", 4),
    "ence": ("ENCE", 4),
    "ence_x": ("ENCE x", 4),
    "ence_y": ("ENCE y", 4),
    "nll": ("NLL", 3),
    "akp": ("AKP", 4),
}
_HIGHER_IS_BETTER = ("akp",)


@dataclass(frozen=True)
class Cell:
    """A number of the main table as shown, its bootstrap interval, and whether it is the row's best."""

    text: str
    interval: str
    best: bool


def render(metrics: dict[str, Any], title: str = "Pose uncertainty report") -> str:
    """The page (html) of an evaluation."""
    missing = [key for key in _NEEDED if key not in metrics]
    if missing:
        raise HaloposeError(f"these are not the metrics of an evaluation: {missing[0]} is missing")
    metrics = rounded(metrics)
    return page(
        "report.html",
        title=title,
        js=_asset("report.js"),
        data=_embedded(metrics),
        verdict=[sentence.replace(" %", "\N{NO-BREAK SPACE}%") for sentence in verdict(metrics)],
        summary=_summary(metrics),
        regimes=REGIMES,
        held={regime: _percent(coverage_at(metrics, regime, 95)) for regime in REGIMES},
        kept=_percent(number(metrics["pruned"].get("kept_fraction")), 0),
        rows=main_table(metrics),
        baselines=_baselines(metrics),
        settings=_settings(metrics),
        moments=_moments(metrics),
        parameters=_parameters(metrics),
    )


def rounded(content: Any) -> Any:
    """Plain json content: numbers at five significant digits; NaN and infinity become null."""
    if isinstance(content, dict):
        return {str(key): rounded(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [rounded(value) for value in content]
    if isinstance(content, (np.ndarray, np.generic)):
        return rounded(content.tolist())
    if isinstance(content, float):
        return float(f"{content:.{_DIGITS}g}") if math.isfinite(content) else None
    return content


def _embedded(content: Any) -> Markup:
    """Json that cannot end its script element: ascii only, and no character that html looks for."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _asset(name: str) -> Markup:
    return Markup((resources.files("halopose.reports") / "templates" / name).read_text(encoding="utf-8"))


def _summary(metrics: dict[str, Any]) -> str:
    counts = [
        f"{metrics[key]:,} {label}"
        for key, label in (
            ("images", "images"),
            ("matched_instances", "matched instances"),
            ("keypoints", "keypoints"),
        )
        if isinstance(metrics.get(key), int)
    ]
    source = (metrics.get("calibration") or {}).get("source")
    return ", ".join(counts) + "." + (f" Calibration: {source}." if source else "")


def main_table(metrics: dict[str, Any]) -> list[tuple[str, list[Cell]]]:
    """Label and cells of each metric: the regimes over all keypoints, then the regimes after pruning."""
    return [
        (label, [cell for part in (metrics, metrics["pruned"]) for cell in _cells(part, key, decimals)])
        for key, (label, decimals) in _METRICS.items()
    ]


def _cells(part: dict[str, Any], key: str, decimals: int) -> list[Cell]:
    """One metric by regime; regimes that read the same as the best are best too."""
    blocks = [part.get(regime) or {} for regime in REGIMES]
    values = [number(block.get(key)) for block in blocks]
    known = [value for value in values if value is not None]
    chosen = max if key in _HIGHER_IS_BETTER else min
    best = _number(chosen(known), decimals) if known else None
    texts = [_number(value, decimals) for value in values]
    return [
        Cell(text, _interval(block.get("interval"), key, decimals), text == best)
        for block, text in zip(blocks, texts, strict=True)
    ]


def _interval(intervals: Any, key: str, decimals: int) -> str:
    ends = (intervals or {}).get(key) or []
    bounds = [number(end) for end in ends]
    if len(bounds) != 2 or None in bounds:
        return ""
    return f"{_number(bounds[0], decimals)} to {_number(bounds[1], decimals)}"


def _baselines(metrics: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What AKP is compared with: label, value, interval."""
    keys = {
        "akp_random": "AKP of a random ranking",
        "akp_visibility": "AKP of the visibility score",
        "akp_skill": "Skill of the covariance",
    }
    return [
        (label, _number(number(metrics.get(key)), 4), _interval(metrics.get("interval"), key, 4))
        for key, label in keys.items()
    ]


def _number(value: float | None, decimals: int) -> str:
    return "–" if value is None else f"{value:.{decimals}f}".replace("-", "−")


def _percent(share: float | None, decimals: int = 1) -> str:
    return "–" if share is None else f"{100 * share:.{decimals}f}\N{NO-BREAK SPACE}%"


def _settings(metrics: dict[str, Any]) -> list[tuple[str, str]]:
    entries = {"given_family": metrics.get("given_family"), **(metrics.get("settings") or {})}
    entries["pruning threshold"] = metrics["pruned"].get("threshold", "")
    return [(key.replace("_", " "), _setting(value)) for key, value in entries.items()]


def _setting(value: Any) -> str:
    if value is None:
        return "none"
    return ", ".join(_setting(entry) for entry in value) if isinstance(value, list) else str(value)


def _moments(metrics: dict[str, Any]) -> list[tuple[str, list[tuple[str, list[list[str]]]]]]:
    """Second moments by part of the data: what the residuals have, then what each law predicts."""
    result = []
    for part, label in (("curves", "All keypoints"), ("curves_pruned", "After pruning")):
        found = {regime: ((metrics[part] or {}).get(regime) or {}).get("moments") or {} for regime in REGIMES}
        matrices = [("Residuals", found["uncalibrated"].get("empirical"))]
        matrices += [(REGIMES[regime], moments.get("predicted")) for regime, moments in found.items()]
        result.append((label, [(name, _matrix(matrix)) for name, matrix in matrices if matrix]))
    return result


def _matrix(matrix: list[list[Any]]) -> list[list[str]]:
    return [[_number(number(value), 2) for value in row] for row in matrix]


def _parameters(metrics: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Median calibration parameters (tau, nu, tau of the Student-t) by keypoint."""
    calibration = metrics.get("calibration") or {}
    columns = [calibration.get(key) or [] for key in ("tau", "nu", "tau_t")]
    return [
        (name, [_number(number(column[k]) if k < len(column) else None, 3) for column in columns])
        for k, name in enumerate(metrics["keypoint_names"])
        if any(columns)
    ]
