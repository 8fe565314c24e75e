"""The evaluation protocol (paper, section 4): every metric of every regime, before and after pruning.

In: true positives and the regimes to compare. Out: one plain dictionary, the content of metrics.json.
Matches of several shards join to exactly the result of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from halopose.errors import HaloposeError
from halopose.evaluation import metrics
from halopose.evaluation.calibrations import REGIMES, Regimes, cross_fitted
from halopose.evaluation.keypoint_statistics import Statistics, curves_of, summaries
from halopose.evaluation.matching import keypoint_similarity
from halopose.evaluation.true_positives import MatchedPoses, Protocol, match_poses
from halopose.poses import Array
from halopose.uncertainty.distributions import Bivariate, StudentT
from halopose.uncertainty.pruning import localization_confidence, reliability_curve

SCALAR_METRICS = ("ace", "ace_x", "ace_y", "ence", "ence_x", "ence_y", "nll", "akp")


def evaluate(
    matched: MatchedPoses,
    regimes: Regimes | None = None,
    protocol: Protocol | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """All metrics of all regimes, overall, per keypoint and per scale, before and after pruning.

    >>> from halopose.data.coco import parse_ground_truth, parse_predictions
    >>> from halopose.data.synthetic import World, synthesize
    >>> objects, results = synthesize(World(images=80, persons=200, overconfidence=2.0))
    >>> truth = parse_ground_truth("truth.json", objects)
    >>> scores = evaluate(match_poses(parse_predictions("predictions.json", results, truth), truth))
    >>> scores["student_t"]["ace"] < scores["gaussian"]["ace"] < scores["uncalibrated"]["ace"]
    True
    """
    protocol = protocol or Protocol()
    if not len(matched) or not matched.labelled.any():
        raise HaloposeError(
            f"no detection matches an annotated object at OKS {protocol.oks_threshold}: check that "
            "predictions and ground truth use the same images, pixels and keypoints"
        )
    regimes = regimes or cross_fitted(matched, protocol)
    frame = _Frame.of(matched, regimes, protocol)
    measured = {name: frame.measure(regimes.laws[name]) for name in REGIMES}
    similarity = frame.similarity[frame.labelled]
    visibility = matched.visibility[frame.labelled]
    akp_random = metrics.random_keypoint_precision(similarity, seed=protocol.seed)
    result: dict[str, Any] = {
        "settings": asdict(protocol),
        "given_family": "gaussian" if matched.dof is None else "student-t",
        "calibration": {"source": regimes.source, **_parameters(regimes)},
        "images": frame.image_count,
        "matched_instances": len(matched),
        "keypoints": len(similarity),
        "keypoint_names": list(matched.names),
        "scales": frame.scales,
        **{name: part.block for name, part in measured.items()},
        "akp_random": akp_random,
        "akp_visibility": metrics.average_keypoint_precision(visibility, similarity),
        "akp_skill": metrics.skill(measured["gaussian"].block["akp"], akp_random),
        "pruned": {
            "kept_fraction": float(frame.kept.mean()),
            "threshold": float(np.mean(regimes.thresholds)),
            **{name: part.pruned_block for name, part in measured.items()},
        },
        "pruning_curve": _pruning_curve(measured["gaussian"].statistics, protocol),
        "cells": _cells(measured, frame),
        "curves": {name: part.curves for name, part in measured.items()},
        "curves_pruned": {name: part.pruned_curves for name, part in measured.items()},
    }
    if protocol.bootstrap:
        _add_intervals(result, measured, frame, visibility, protocol, progress)
    return result


@dataclass(frozen=True)
class _Measured:
    """One regime: its statistics and scores, of all keypoints and of those kept."""

    statistics: Statistics
    block: dict[str, Any]
    curves: dict[str, Any]
    pruned: Statistics
    pruned_block: dict[str, Any]
    pruned_curves: dict[str, Any]


@dataclass(frozen=True)
class _Frame:
    """What the regimes share: the true positives, and where each evaluated keypoint belongs (n,)."""

    matched: MatchedPoses
    protocol: Protocol
    similarity: Array  # (M, K)
    keypoint: Array
    scale: Array
    image: Array
    image_count: int
    kept: Array
    scales: list[dict[str, Any]]

    @property
    def labelled(self) -> Array:
        return self.matched.labelled

    @classmethod
    def of(cls, matched: MatchedPoses, regimes: Regimes, protocol: Protocol) -> _Frame:
        instance, keypoint = np.nonzero(matched.labelled)
        images, image = np.unique(matched.image_ids, return_inverse=True)
        scale = np.searchsorted(np.asarray(protocol.scale_edges), matched.area, side="left")
        confidence = localization_confidence(
            regimes.covariance, matched.confidence_area(protocol), matched.sigmas, protocol.scalarisation
        )
        return cls(
            matched=matched,
            protocol=protocol,
            similarity=keypoint_similarity(matched.residual, matched.area, matched.sigmas),
            keypoint=keypoint,
            scale=scale[instance],
            image=image[instance],
            image_count=len(images),
            kept=(confidence >= regimes.thresholds[:, None])[matched.labelled],
            scales=_scale_table(scale, protocol.scale_edges),
        )

    def measure(self, law: Bivariate) -> _Measured:
        """Everything about one regime."""
        confidence = localization_confidence(
            law.covariance.numpy(),
            self.matched.confidence_area(self.protocol),
            self.matched.sigmas,
            self.protocol.scalarisation,
        )
        statistics = Statistics.of(law, self.matched.residual, self.labelled, confidence, self.similarity)
        pruned = statistics.take(self.kept)
        keypoint, scale = self.keypoint[self.kept], self.scale[self.kept]
        return _Measured(
            statistics,
            self._block(statistics, self.keypoint, self.scale),
            curves_of(statistics, self.keypoint, self.matched.names),
            pruned,
            self._block(pruned, keypoint, scale),
            curves_of(pruned, keypoint, ()),
        )

    def _block(self, statistics: Statistics, keypoint: Array, scale: Array) -> dict[str, Any]:
        """Scalar metrics overall, per keypoint and per scale."""
        names, scales = self.matched.names, [entry["name"] for entry in self.scales]
        return {
            **summaries(statistics, np.zeros(len(keypoint), dtype=np.int64), 1)[0],
            "per_keypoint": dict(zip(names, summaries(statistics, keypoint, len(names)), strict=True)),
            "per_scale": dict(zip(scales, summaries(statistics, scale, len(scales)), strict=True)),
        }


def _scale_table(scale: Array, edges: Sequence[float]) -> list[dict[str, Any]]:
    """Name, bounds of the area and number of instances of each object scale."""
    bounds = [0.0, *edges, float("inf")]
    count = len(bounds) - 1
    known = {1: ["all"], 2: ["small", "large"], 3: ["small", "medium", "large"]}
    names = known.get(count, [f"scale {i + 1}" for i in range(count)])
    return [
        {"name": name, "low": bounds[i], "high": bounds[i + 1], "instances": int((scale == i).sum())}
        for i, name in enumerate(names)
    ]


def _parameters(regimes: Regimes) -> dict[str, Any]:
    """Median calibration parameters by keypoint, for the reader of the report."""
    given, gaussian, student = (regimes.laws[name] for name in REGIMES)
    tau = gaussian.scale_tril[..., 0, 0] / torch.diagonal(given.covariance, dim1=-2, dim2=-1)[..., 0].sqrt()
    result: dict[str, Any] = {"tau": tau.median(0).values.tolist()}
    if isinstance(student, StudentT):
        dof = student.dof.expand(student.scale_tril.shape[:-2]).contiguous()  # torch's median misreads views
        result["nu"] = dof.median(0).values.tolist()
        result["tau_t"] = (student.scale_tril[..., 0, 0] / given.scale_tril[..., 0, 0]).median(0).values.tolist()
    return result


def _pruning_curve(statistics: Statistics, protocol: Protocol) -> dict[str, Any]:
    """Reliability and NLL of the keypoints kept, by the share kept."""
    correct = statistics.similarity >= protocol.gamma_ks
    curve = reliability_curve(statistics.confidence, correct)
    running = np.cumsum(statistics.nll[statistics.by_confidence]) / np.arange(1, len(correct) + 1)
    ranks = np.round(curve.kept * len(correct)).astype(np.int64) - 1
    return {
        "kept": curve.kept,
        "reliability": curve.reliability,
        "threshold": curve.threshold,
        "nll": running[ranks],
    }


def _cells(measured: dict[str, _Measured], frame: _Frame) -> dict[str, Any]:
    """Coverage at 50, 90 and 95 % of every keypoint at every scale, (K, S) each."""
    shape = (len(frame.matched.names), len(frame.scales))
    cell = frame.keypoint * shape[1] + frame.scale
    cells = shape[0] * shape[1]
    result: dict[str, Any] = {"count": np.bincount(cell, minlength=cells).reshape(shape)}
    for name, part in measured.items():
        curves = metrics.coverage_of_levels(part.statistics.level["joint"], None, cell, cells)
        result[name] = {str(level): curves[:, level - 1].reshape(shape) for level in (50, 90, 95)}
    return result


def _add_intervals(
    result: dict[str, Any],
    measured: dict[str, _Measured],
    frame: _Frame,
    visibility: Array,
    protocol: Protocol,
    progress: Callable[[int, int], None] | None,
) -> None:
    """95 % bootstrap intervals over images, at ``interval`` of every block and of the result itself."""
    generator = np.random.default_rng(protocol.seed)
    picks = generator.integers(frame.image_count, size=(protocol.bootstrap, frame.image_count))
    similarity = frame.similarity[frame.labelled]
    order = metrics.falling_order(visibility)
    hits = metrics.hits_by_threshold(similarity[order])

    def resample(number: int) -> dict[tuple[str, str], dict[str, float]]:
        weight = np.bincount(picks[number], minlength=frame.image_count)[frame.image]
        draw = {("all", name): part.statistics.resampled(weight) for name, part in measured.items()}
        for name, part in measured.items():
            draw["pruned", name] = part.pruned.resampled(weight[frame.kept])
        chance = metrics.random_keypoint_precision(similarity, weight, rounds=1, seed=number)
        draw["all", "ranking"] = {
            "akp_random": chance,
            "akp_skill": metrics.skill(draw["all", "gaussian"]["akp"], chance),
            "akp_visibility": metrics.keypoint_precision_at(hits, len(order), weight[order]),
        }
        return draw

    draws = []
    for number in range(protocol.bootstrap):
        draws.append(resample(number))
        if progress:
            progress(len(draws), protocol.bootstrap)
    for key, values in draws[0].items():
        blocks = result["pruned"] if key[0] == "pruned" else result
        block = result if key[1] == "ranking" else blocks[key[1]]
        block["interval"] = {name: _interval(block[name], [draw[key][name] for draw in draws]) for name in values}


def _interval(estimate: float, draws: list[float]) -> list[float]:
    """Estimate +- 1.96 bootstrap standard errors.

    Not the draws' percentiles: ACE and ENCE are means of absolute errors, which resampling noise inflates, so
    the percentiles of a well calibrated law would exclude its own estimate.
    """
    margin = 1.96 * float(np.std(draws, ddof=1)) if len(draws) > 1 else float("nan")
    return [max(estimate - margin, 0.0) if estimate >= 0 else estimate - margin, estimate + margin]


__all__ = ["REGIMES", "SCALAR_METRICS", "MatchedPoses", "Protocol", "Regimes", "evaluate", "match_poses"]
