"""Self-contained html report of an evaluation.

Verdict and tables are in the html. A script draws the plots from the embedded metrics.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from halopose.calibration.calibrate import DISTRIBUTIONS
from halopose.evaluation.region_scores import ALARM_RATES, REGION_LEVELS
from halopose.evaluation.scores import METRICS, CustomScore, DistributionScores, Interval, PrunedScores, Scores
from halopose.reports.html import asset, digits_of, embedded, freedom, number, page, percent
from halopose.reports.match_report import match_tables
from halopose.reports.region_report import (
    alarm_rows,
    held_rows,
    joint_rows,
    missing_guarantees,
    region_rows,
    region_sizes,
    rows_before_keypoints,
    skeletons,
)
from halopose.reports.score_text import TITLES
from halopose.reports.verdict import coverage_at, verdict
from halopose.types import Array
from halopose.uncertainty.regions import CONDITION

_DIGITS = 5  # significant digits in the page, enough for plots
_HIGHER_IS_BETTER = ("akp",)


@dataclass(frozen=True)
class ScoreCell:
    """A number of the main table as text, its bootstrap interval, and whether it is the best of its row."""

    text: str
    interval: str
    best: bool


def render_report(scores: Scores, title: str = "Pose uncertainty report") -> str:
    """The page (html) of an evaluation."""
    return page(
        "report.html",
        title=title,
        js=asset("report.js"),
        data=embedded(rounded(scores.to_json())),
        verdict=[sentence.replace(" %", "\N{NO-BREAK SPACE}%") for sentence in verdict(scores)],
        summary=_summary(scores),
        regimes=DISTRIBUTIONS,
        held={name: percent(coverage_at(scores, name, 95)) for name in DISTRIBUTIONS},
        kept=percent(scores.pruned.kept_fraction),
        rows=main_table(scores),
        baselines=_baselines(scores),
        pruning=_pruning_table(scores),
        matches=match_tables(scores),
        condition=CONDITION,
        region_levels=REGION_LEVELS,
        regions=region_rows(scores),
        region_cut=rows_before_keypoints(scores),
        region_sizes=region_sizes(scores),
        region_note=missing_guarantees(scores),
        joint=joint_rows(scores),
        skeletons=skeletons(scores),
        alarm_rates=ALARM_RATES,
        alarms=alarm_rows(scores),
        alarms_held=held_rows(scores),
        settings=_settings(scores),
        moments=_moments(scores),
        parameters=_parameters(scores),
    )


def rounded(content: Any) -> Any:
    """Json content with numbers at five significant digits; NaN and infinity become null."""
    if isinstance(content, dict):
        return {str(key): rounded(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [rounded(value) for value in content]
    if isinstance(content, (np.ndarray, np.generic)):
        return rounded(content.tolist())
    if isinstance(content, float):
        return float(f"{content:.{_DIGITS}g}") if math.isfinite(content) else None
    return content


def _summary(scores: Scores) -> str:
    source = scores.calibration.source
    return (
        f"{scores.images:,} images, {scores.matched_instances:,} detections that match an annotated object with "
        f"OKS ≥ {scores.settings['oks_threshold']:g}, {scores.keypoints:,} labelled keypoints."
        + (f" Calibration: {source}." if source else "")
    )


def main_table(scores: Scores) -> list[tuple[str, list[ScoreCell]]]:
    """Label and cells of each metric: the distributions over all keypoints, then after pruning."""
    rows = [
        (
            TITLES[key],
            [cell for part in (scores, scores.pruned) for cell in _cells(part, key, digits_of(key))],
        )
        for key in METRICS
    ]
    return rows + [(one.title, _custom_cells(one)) for one in scores.custom.values()]


def _custom_cells(one: CustomScore) -> list[ScoreCell]:
    """Values of a plug-in's metric; none is marked as best."""
    names = [*DISTRIBUTIONS, *(f"pruned.{name}" for name in DISTRIBUTIONS)]
    return [ScoreCell(number(one.value[name], 4), _interval(one.interval.get(name), 4), False) for name in names]


def _cells(part: Scores | PrunedScores, key: str, decimals: int) -> list[ScoreCell]:
    """One metric by distribution; all values with the same text as the best are marked as best."""
    distributions: list[DistributionScores] = [part.distribution(name) for name in DISTRIBUTIONS]
    values = [distribution.metric(key) for distribution in distributions]
    known = [value for value in values if math.isfinite(value)]
    chosen = max if key in _HIGHER_IS_BETTER else min
    best = number(chosen(known), decimals) if known else None
    texts = [number(value, decimals) for value in values]
    return [
        ScoreCell(text, _interval(distribution.interval.get(key), decimals), text == best)
        for distribution, text in zip(distributions, texts, strict=True)
    ]


def _interval(ends: Interval | None, decimals: int) -> str:
    if ends is None or not all(map(math.isfinite, ends)):
        return ""
    return f"{number(ends[0], decimals)} to {number(ends[1], decimals)}"


def _baselines(scores: Scores) -> list[tuple[str, str, str]]:
    """References for AKP: label, value, interval."""
    keys = {
        "akp_random": "AKP of a random ranking",
        "akp_visibility": "AKP of the visibility score",
        "akp_skill": "Skill of the covariance",
    }
    return [
        (label, number(getattr(scores, key), digits_of(key)), _interval(scores.interval.get(key), digits_of(key)))
        for key, label in keys.items()
    ]


def _pruning_table(scores: Scores) -> list[tuple[str, str, str]]:
    """Pruning rules: name, share kept, share of the kept keypoints that are reliable."""
    return [(rule.name, percent(rule.kept_fraction), percent(rule.reliability)) for rule in scores.pruned.rules]


def _settings(scores: Scores) -> list[tuple[str, str]]:
    entries = {"given_family": scores.given_family, **scores.settings}
    if scores.departures is not None:
        entries |= {"preset": scores.preset, "departures from the paper": "; ".join(scores.departures) or "none"}
    entries["pruning threshold"] = scores.pruned.threshold
    entries["visibility threshold"] = scores.pruned.visibility_threshold
    return [(key.replace("_", " "), _setting(value)) for key, value in rounded(entries).items()]


def _setting(value: Any) -> str:
    if value is None:
        return "none"
    return ", ".join(_setting(entry) for entry in value) if isinstance(value, list) else str(value)


def _moments(scores: Scores) -> list[tuple[str, list[tuple[str, list[list[str]]]]]]:
    """Second moments of the residuals and of each distribution, before and after pruning."""
    result = []
    for label, part in (("All keypoints", scores), ("After pruning", scores.pruned)):
        matrices = [("Residuals", part.distribution("uncalibrated").curves.moments_empirical)]
        matrices += [(title, part.distribution(name).curves.moments_predicted) for name, title in DISTRIBUTIONS.items()]
        result.append((label, [(name, _matrix(matrix)) for name, matrix in matrices]))
    return result


def _matrix(matrix: Array) -> list[list[str]]:
    return [[number(float(value), 2) for value in row] for row in matrix]


def _parameters(scores: Scores) -> list[tuple[str, list[str]]]:
    """Calibration parameters by keypoint: tau of the Gaussian, nu and tau of the Student-t; medians over folds."""
    calibration = scores.calibration
    columns = ((calibration.tau, number), (calibration.nu, freedom), (calibration.tau_t, number))
    return [
        (name, [show(None if column is None else float(column[k]), 3) for column, show in columns])
        for k, name in enumerate(scores.keypoint_names)
    ]
