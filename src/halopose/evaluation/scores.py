"""Result types of an evaluation: the content of metrics.json with names and types.

``evaluate`` returns ``Scores``; reports, tables and verdicts read it. ``from_json`` inverts ``to_json``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

import numpy as np

from halopose.calibration.calibrate import DISTRIBUTIONS
from halopose.errors import HaloposeError
from halopose.evaluation.match_scores import MatchScores
from halopose.evaluation.metrics import LEVELS
from halopose.evaluation.region_scores import JointScores, NoveltyScores, RegionScores
from halopose.types import Array

AXES = ("joint", "x", "y")
CELL_LEVELS = (50, 90, 95)  # per cent
METRICS = ("ace", "ace_x", "ace_y", "ence", "ence_x", "ence_y", "nll", "akp")
RANKINGS = ("akp_random", "akp_visibility", "akp_skill")
Interval = tuple[float, float]
T = TypeVar("T")


@dataclass(frozen=True)
class MetricSummary:
    """Scalar metrics of one distribution: joint, and along x and y.

    Attributes:
        ace: ACE of the ellipses.
        ace_x: ACE of the intervals along x.
        ace_y: ACE of the intervals along y.
        ence: ENCE of half the trace.
        ence_x: ENCE of the variance along x.
        ence_y: ENCE of the variance along y.
        nll: NLL in nats per keypoint.
        akp: Average keypoint precision of the ranking by covariance.
        count: Number of keypoints.
    """

    ace: float
    ace_x: float
    ace_y: float
    ence: float
    ence_x: float
    ence_y: float
    nll: float
    akp: float
    count: int

    def metric(self, name: str) -> float:
        """The metric of this name, one of METRICS."""
        return float(getattr(self, name))


@dataclass(frozen=True)
class CurvePoints:
    """Points (P,) of a curve: expected (predicted or theoretical) against empirical values."""

    expected: Array
    empirical: Array


@dataclass(frozen=True)
class DistributionCurves:
    """Plot data of one distribution.

    Attributes:
        coverage: Empirical coverage (99,) at 1 to 99 %, by axis.
        variance: Predicted and empirical variance in bins, by axis.
        moments_empirical: (2, 2) second moments of the residuals.
        moments_predicted: (2, 2) mean predicted covariance.
        qq: Q-Q points over all keypoints by axis, for a Gaussian only.
        qq_keypoints: Q-Q points by keypoint name and axis.
    """

    coverage: dict[str, Array]
    variance: dict[str, CurvePoints]
    moments_empirical: Array
    moments_predicted: Array
    qq: dict[str, CurvePoints] | None
    qq_keypoints: dict[str, dict[str, CurvePoints]]


@dataclass(frozen=True)
class DistributionScores(MetricSummary):
    """Metrics of one distribution overall, per keypoint and per object scale, with curves.

    Attributes:
        per_keypoint: Metrics by keypoint name.
        per_scale: Metrics by object scale.
        curves: Plot data.
        interval: 95 % bootstrap interval of each metric; empty without a bootstrap.
    """

    per_keypoint: dict[str, MetricSummary]
    per_scale: dict[str, MetricSummary]
    curves: DistributionCurves
    interval: dict[str, Interval] = field(default_factory=dict)


@dataclass(frozen=True)
class ScaleScores:
    """An object scale.

    Attributes:
        name: Name, such as "small".
        low: Smallest area in square pixels.
        high: Largest area in square pixels.
        instances: Number of matched instances.
    """

    name: str
    low: float
    high: float
    instances: int


@dataclass(frozen=True)
class CalibrationSummary:
    """Parameters of the calibrations, medians over folds.

    Attributes:
        source: Where the calibrations come from, in words.
        tau: Temperatures (K,) of the Gaussian.
        nu: Degrees of freedom (K,) of the Student-t.
        tau_t: Temperatures (K,) of the Student-t.
    """

    source: str
    tau: Array
    nu: Array | None
    tau_t: Array | None


@dataclass(frozen=True)
class PruningRule:
    """Result of one pruning rule: share of keypoints kept, and share of the kept keypoints that are correct."""

    name: str
    kept_fraction: float
    reliability: float


@dataclass(frozen=True)
class PruningCurve:
    """Reliability and NLL by the share of keypoints kept.

    Attributes:
        kept: Shares kept (P,).
        reliability: Share of the kept keypoints that are correct (P,).
        threshold: Confidence thresholds (P,).
        nll: NLL (P,) of the kept keypoints.
    """

    kept: Array
    reliability: Array
    threshold: Array
    nll: Array


@dataclass(frozen=True)
class PrunedScores:
    """Scores of the three distributions over the keypoints that pruning keeps.

    Attributes:
        kept_fraction: Share of keypoints kept.
        threshold: Confidence threshold, mean over folds.
        visibility_threshold: Threshold of the visibility score, mean over the folds that have one.
        rules: Results of the pruning rules.
        uncalibrated: Scores of the given distribution.
        gaussian: Scores after Gaussian calibration.
        student_t: Scores after Student-t calibration.
    """

    kept_fraction: float
    threshold: float
    visibility_threshold: float | None
    rules: tuple[PruningRule, ...]
    uncalibrated: DistributionScores
    gaussian: DistributionScores
    student_t: DistributionScores

    def distribution(self, name: str) -> DistributionScores:
        """Scores of one of DISTRIBUTIONS by its name."""
        scores: DistributionScores = getattr(self, name)
        return scores


@dataclass(frozen=True)
class CoverageCells:
    """Number of samples and coverage (K, S) by keypoint and object scale; coverage by distribution and level (%)."""

    count: Array
    coverage: dict[str, dict[int, Array]]


@dataclass(frozen=True)
class CustomScore:
    """A metric of a plug-in.

    Attributes:
        title: Label in reports.
        value: Value by distribution; keys such as ``pruned.gaussian`` are values after pruning.
        interval: 95 % bootstrap interval by the same keys; empty without a bootstrap.
    """

    title: str
    value: dict[str, float]
    interval: dict[str, Interval] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Json content."""
        return {"title": self.title, "value": dict(self.value), "interval": _lists(self.interval)}

    @classmethod
    def from_json(cls, content: Any) -> CustomScore:
        """Read back json content."""
        values = {str(name): _number(value) for name, value in content["value"].items()}
        return cls(str(content["title"]), values, _intervals(content))


@dataclass(frozen=True)
class Scores:
    """All metrics of the three distributions, before and after pruning.

    Attributes:
        settings: Settings of the protocol.
        given_family: Family of the given (uncalibrated) distribution.
        calibration: Parameters of the calibrations.
        images: Number of images.
        matched_instances: Number of detections that match an annotated object.
        keypoints: Number of labelled keypoints of these detections.
        keypoint_names: Names of the K keypoints.
        scales: Object scales.
        uncalibrated: Scores of the given distribution.
        gaussian: Scores after Gaussian calibration.
        student_t: Scores after Student-t calibration.
        akp_random: AKP of a random ranking.
        akp_visibility: AKP of the visibility score.
        akp_skill: (AKP - akp_random) / (1 - akp_random) of the covariance.
        pruned: Scores after pruning.
        pruning_curve: Reliability and NLL by the share kept.
        cells: Coverage by keypoint and object scale.
        interval: 95 % bootstrap intervals of ``akp_random``, ``akp_visibility`` and ``akp_skill``.
        regions: Coverage of conformal regions.
        joint: Scores of the joint distribution.
        limbs: Pairs of keypoints that are connected in pictures.
        novelty: Out-of-distribution alarms, if the artifact has such a model.
        custom: Metrics of plug-ins by name.
        matches: Calibration with noise floors, proper scores and groups of keypoints, by kind of match: "oks" and
            "box". The other attributes are those of ``settings["match"]``.
        preset: Preset of the evaluation, else of the fit.
        departures: Differences from the paper in fit and evaluation; None if nothing was fitted here.

    Example:
        >>> from halopose.data.coco import parse_ground_truth, parse_predictions
        >>> from halopose.data.synthetic_poses import World, synthesize
        >>> from halopose.evaluation.evaluate import evaluate
        >>> from halopose.matching.matched_poses import match_poses
        >>> objects, results = synthesize(World(images=20, persons=60))
        >>> truth = parse_ground_truth("truth.json", objects)
        >>> scores = evaluate(match_poses(parse_predictions("predictions.json", results, truth), truth))
        >>> scores.distribution("gaussian").per_keypoint["nose"].ace == scores.gaussian.per_keypoint["nose"].ace
        True
        >>> Scores.from_json(scores.to_json()).akp_skill == scores.akp_skill
        True
    """

    settings: dict[str, Any]
    given_family: str
    calibration: CalibrationSummary
    images: int
    matched_instances: int
    keypoints: int
    keypoint_names: tuple[str, ...]
    scales: tuple[ScaleScores, ...]
    uncalibrated: DistributionScores
    gaussian: DistributionScores
    student_t: DistributionScores
    akp_random: float
    akp_visibility: float
    akp_skill: float
    pruned: PrunedScores
    pruning_curve: PruningCurve
    cells: CoverageCells
    interval: dict[str, Interval] = field(default_factory=dict)
    regions: RegionScores | None = None
    joint: JointScores | None = None
    limbs: tuple[tuple[int, int], ...] = ()
    novelty: NoveltyScores | None = None
    custom: dict[str, CustomScore] = field(default_factory=dict)
    matches: dict[str, MatchScores] = field(default_factory=dict)
    preset: str | None = None
    departures: tuple[str, ...] | None = None

    @property
    def main_match(self) -> MatchScores | None:
        """Calibration with noise floors on the true positives of the protocol; None if it was not measured."""
        return self.matches.get(self.settings.get("match", "oks"))

    def distribution(self, name: str) -> DistributionScores:
        """Scores of one of DISTRIBUTIONS by its name."""
        scores: DistributionScores = getattr(self, name)
        return scores

    def __repr__(self) -> str:
        return (
            f"Scores({self.matched_instances} instances, {self.keypoints} keypoints; ACE {self.gaussian.ace:.4f} "
            f"Gaussian, {self.student_t.ace:.4f} Student-t; skill {self.akp_skill:.3f})"
        )

    def to_json(self) -> dict[str, Any]:
        """The content of metrics.json."""
        pruned = self.pruned
        return {
            "settings": self.settings,
            "given_family": self.given_family,
            "calibration": {key: value for key, value in vars(self.calibration).items() if value is not None},
            "images": self.images,
            "matched_instances": self.matched_instances,
            "keypoints": self.keypoints,
            "keypoint_names": list(self.keypoint_names),
            "scales": [asdict(scale) for scale in self.scales],
            **{name: _distribution_to_json(self.distribution(name)) for name in DISTRIBUTIONS},
            **{name: getattr(self, name) for name in RANKINGS},
            "pruned": {
                "kept_fraction": pruned.kept_fraction,
                "threshold": pruned.threshold,
                "visibility_threshold": pruned.visibility_threshold,
                "rules": [asdict(rule) for rule in pruned.rules],
                **{name: _distribution_to_json(pruned.distribution(name)) for name in DISTRIBUTIONS},
            },
            "pruning_curve": dict(vars(self.pruning_curve)),
            "cells": {
                "count": self.cells.count,
                **{
                    name: {str(level): table for level, table in tables.items()}
                    for name, tables in self.cells.coverage.items()
                },
            },
            "curves": {name: _curves_to_json(self.distribution(name).curves) for name in DISTRIBUTIONS},
            "curves_pruned": {name: _curves_to_json(pruned.distribution(name).curves) for name in DISTRIBUTIONS},
            **({"interval": _lists(self.interval)} if self.interval else {}),
            **({"regions": self.regions.to_json()} if self.regions else {}),
            **({"joint": self.joint.to_json()} if self.joint else {}),
            **({"novelty": self.novelty.to_json()} if self.novelty else {}),
            **({"custom": {name: one.to_json() for name, one in self.custom.items()}} if self.custom else {}),
            **({"matches": {name: one.to_json() for name, one in self.matches.items()}} if self.matches else {}),
            **({"preset": self.preset} if self.preset else {}),
            **({"departures": list(self.departures)} if self.departures is not None else {}),
            "limbs": [list(limb) for limb in self.limbs],
        }

    @classmethod
    def from_json(cls, content: Any) -> Scores:
        """Scores read back from the content of a metrics.json."""
        try:
            return _scores(content)
        except KeyError as error:
            raise HaloposeError(f"not the metrics of an evaluation: {error} is missing") from None
        except (TypeError, ValueError, AttributeError, OverflowError):
            raise HaloposeError("not the metrics of an evaluation: score the predictions again") from None


# --- to json --------------------------------------------------------------------------------------------


def _summary_to_json(summary: MetricSummary) -> dict[str, Any]:
    return {column.name: getattr(summary, column.name) for column in fields(MetricSummary)}


def _distribution_to_json(distribution: DistributionScores) -> dict[str, Any]:
    return {
        **_summary_to_json(distribution),
        "per_keypoint": {name: _summary_to_json(one) for name, one in distribution.per_keypoint.items()},
        "per_scale": {name: _summary_to_json(one) for name, one in distribution.per_scale.items()},
        **({"interval": _lists(distribution.interval)} if distribution.interval else {}),
    }


def _curves_to_json(curves: DistributionCurves) -> dict[str, Any]:
    return {
        "coverage": curves.coverage,
        "variance": {axis: _points_to_json(points, "predicted") for axis, points in curves.variance.items()},
        "moments": {"empirical": curves.moments_empirical, "predicted": curves.moments_predicted},
        "qq": None if curves.qq is None else _qq_to_json(curves.qq),
        "qq_keypoints": {name: _qq_to_json(axes) for name, axes in curves.qq_keypoints.items()},
    }


def _qq_to_json(axes: dict[str, CurvePoints]) -> dict[str, Any]:
    return {axis: _points_to_json(points, "theoretical") for axis, points in axes.items()}


def _points_to_json(points: CurvePoints, name: str) -> dict[str, Any]:
    return {name: points.expected, "empirical": points.empirical}


def _lists(intervals: Mapping[str, Interval]) -> dict[str, list[float]]:
    return {name: list(ends) for name, ends in intervals.items()}


# --- from json ------------------------------------------------------------------------------------------


def _scores(content: Any) -> Scores:
    names = tuple(str(name) for name in content["keypoint_names"])
    scales = tuple(_scale(scale) for scale in content["scales"])
    whole: dict[str, Any] = {name: _distribution(content[name], content["curves"][name]) for name in DISTRIBUTIONS}
    ranking: dict[str, Any] = {name: _number(content[name]) for name in RANKINGS}
    curve = content["pruning_curve"]
    kept = _array(curve["kept"], None)
    return Scores(
        settings=_settings(content["settings"]),
        given_family=str(content["given_family"]),
        calibration=_calibration(content["calibration"], len(names)),
        images=int(content["images"]),
        matched_instances=int(content["matched_instances"]),
        keypoints=int(content["keypoints"]),
        keypoint_names=names,
        scales=scales,
        **whole,
        **ranking,
        pruned=_pruned(content["pruned"], content["curves_pruned"]),
        pruning_curve=PruningCurve(
            kept, *(_array(curve[name], len(kept)) for name in ("reliability", "threshold", "nll"))
        ),
        cells=_cells(content["cells"], (len(names), len(scales))),
        interval=_intervals(content),
        regions=_optional(content.get("regions"), RegionScores.from_json),
        joint=_optional(content.get("joint"), lambda part: JointScores.from_json(part, len(names))),
        limbs=tuple((int(a), int(b)) for a, b in content.get("limbs", [])),
        novelty=_optional(content.get("novelty"), NoveltyScores.from_json),
        custom={str(name): CustomScore.from_json(one) for name, one in content.get("custom", {}).items()},
        matches={str(name): MatchScores.from_json(one) for name, one in content.get("matches", {}).items()},
        preset=_optional(content.get("preset"), str),
        departures=_optional(content.get("departures"), lambda lines: tuple(str(line) for line in lines)),
    )


def _settings(content: Any) -> dict[str, Any]:
    """Settings with tuples instead of lists, as in ``Protocol``."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in content.items()}


def _scale(content: Any) -> ScaleScores:
    low, high = _number(content["low"]), _number(content["high"], np.inf)
    return ScaleScores(str(content["name"]), low, high, int(content["instances"]))


def _calibration(content: Any, keypoints: int) -> CalibrationSummary:
    tau, nu, tau_t = (
        _optional(content.get(name), lambda values: _array(values, keypoints)) for name in ("tau", "nu", "tau_t")
    )
    if tau is None:
        raise KeyError("tau")
    return CalibrationSummary(str(content["source"]), tau, nu, tau_t)


def _pruned(content: Any, curves: Any) -> PrunedScores:
    rules = (
        PruningRule(str(rule["name"]), _number(rule["kept_fraction"]), _number(rule["reliability"]))
        for rule in content["rules"]
    )
    distributions: dict[str, Any] = {name: _distribution(content[name], curves[name]) for name in DISTRIBUTIONS}
    return PrunedScores(
        kept_fraction=_number(content["kept_fraction"]),
        threshold=_number(content["threshold"], -np.inf),
        visibility_threshold=_optional(content.get("visibility_threshold"), float),
        rules=tuple(rules),
        **distributions,
    )


def _cells(content: Any, shape: tuple[int, int]) -> CoverageCells:
    coverage = {
        name: {level: _array(content[name][str(level)], *shape) for level in CELL_LEVELS} for name in DISTRIBUTIONS
    }
    count = _array(content["count"], *shape)
    if not np.isfinite(count).all():
        raise ValueError("a count of samples is missing")
    return CoverageCells(count.astype(np.int64), coverage)


def _distribution(content: Any, curves: Any) -> DistributionScores:
    return DistributionScores(
        **vars(_summary(content)),
        per_keypoint={name: _summary(one) for name, one in content["per_keypoint"].items()},
        per_scale={name: _summary(one) for name, one in content["per_scale"].items()},
        curves=_curves(curves),
        interval=_intervals(content),
    )


def _summary(content: Any) -> MetricSummary:
    return MetricSummary(**{name: _number(content[name]) for name in METRICS}, count=int(content["count"]))


def _curves(content: Any) -> DistributionCurves:
    return DistributionCurves(
        coverage={axis: _array(content["coverage"][axis], len(LEVELS)) for axis in AXES},
        variance={axis: _points(content["variance"][axis], "predicted") for axis in AXES},
        moments_empirical=_array(content["moments"]["empirical"], 2, 2),
        moments_predicted=_array(content["moments"]["predicted"], 2, 2),
        qq=_optional(content["qq"], _qq),
        qq_keypoints={name: _qq(axes) for name, axes in content["qq_keypoints"].items()},
    )


def _qq(content: Any) -> dict[str, CurvePoints]:
    return {axis: _points(content[axis], "theoretical") for axis in AXES}


def _points(content: Any, name: str) -> CurvePoints:
    expected = _array(content[name], None)
    return CurvePoints(expected, _array(content["empirical"], len(expected)))


def _intervals(content: Any) -> dict[str, Interval]:
    found = content.get("interval", {}).items()
    return {str(name): (_number(low), _number(high)) for name, (low, high) in found}


def _number(value: Any, missing: float = float("nan")) -> float:
    """A number; null in json stands for a value that is not finite."""
    return missing if value is None else float(value)


def _array(values: Any, *shape: int | None) -> Array:
    """Array of the given shape, where None allows any length; null becomes NaN."""
    array = np.array(values, dtype=float)
    if len(array.shape) != len(shape) or any(n not in (None, m) for n, m in zip(shape, array.shape, strict=True)):
        raise ValueError(f"expected numbers of shape {shape}")
    return array


def _optional(value: Any, convert: Callable[[Any], T]) -> T | None:
    return None if value is None else convert(value)
