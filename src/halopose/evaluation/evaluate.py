"""The evaluation protocol (paper, section 4): every metric of every law, before and after pruning.

In: true positives and the laws to compare. Out: ``Scores``. True positives of several shards join to exactly the
result of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from halopose.evaluation import metrics
from halopose.evaluation.bootstrap import interval_of
from halopose.evaluation.calibrations import LAWS, Laws, cross_fitted
from halopose.evaluation.keypoint_statistics import Statistics, curves_of, summaries
from halopose.evaluation.measured import Measured, demand_matches
from halopose.evaluation.promises import score_joint, score_regions
from halopose.evaluation.protocol import Protocol
from halopose.evaluation.scores import (
    CELL_LEVELS,
    METRICS,
    RANKINGS,
    CalibrationSummary,
    CoverageCells,
    LawScores,
    PrunedScores,
    PruningCurve,
    PruningRule,
    Scale,
    Scores,
)
from halopose.evaluation.side_by_side import side_by_side
from halopose.evaluation.true_positives import MatchedPoses
from halopose.types import Array, Counter
from halopose.uncertainty.distributions import Bivariate, StudentT

_SCALE_NAMES = {1: ["all"], 2: ["small", "large"], 3: ["small", "medium", "large"]}


def evaluate(
    matched: MatchedPoses,
    laws: Laws | None = None,
    protocol: Protocol | None = None,
    progress: Counter | None = None,
) -> Scores:
    """All metrics of all laws, overall, per keypoint and per object scale, before and after pruning.

    >>> from halopose.data.coco import parse_ground_truth, parse_predictions
    >>> from halopose.data.synthetic import World, synthesize
    >>> from halopose.evaluation.true_positives import match_poses
    >>> objects, results = synthesize(World(images=80, persons=200, overconfidence=2.0))
    >>> truth = parse_ground_truth("truth.json", objects)
    >>> scores = evaluate(match_poses(parse_predictions("predictions.json", results, truth), truth))
    >>> scores.student_t.ace < scores.gaussian.ace < scores.uncalibrated.ace
    True
    """
    protocol = protocol or Protocol()
    demand_matches(matched, protocol)
    laws = laws or cross_fitted(matched, protocol)
    edges = np.asarray(protocol.scale_edges, dtype=float)
    measured = Measured.of(matched, laws, protocol, edges)
    scales = _scale_table(matched.area, edges)
    # All at once, what takes longest first: no core waits for another between two kinds of scores.
    pieces: dict[str, Callable[[], Any]] = {
        **_promises(matched, laws, protocol, edges, scales),
        **_law_scores(measured, matched, scales),
        "akp_random": partial(metrics.random_keypoint_precision, measured.similarity, seed=protocol.seed),
        "akp_visibility": partial(metrics.average_keypoint_precision, measured.visibility, measured.similarity),
        "pruning_curve": partial(_pruning_curve, measured.statistics["gaussian"], protocol),
        "cells": partial(_cells, measured, len(matched.layout)),
    }
    found: dict[str, Any] = dict(zip(pieces, side_by_side(list(pieces.values())), strict=True))
    kept = {name: found.pop(f"pruned.{name}") for name in measured.pruned}
    scores = Scores(
        settings=asdict(protocol),
        given_family="gaussian" if matched.dof is None else "student-t",
        calibration=_calibration(laws),
        images=measured.image_count,
        matched_instances=len(matched),
        keypoints=len(measured.similarity),
        keypoint_names=matched.layout.names,
        scales=scales,
        akp_skill=metrics.skill(found["gaussian"].akp, found["akp_random"]),
        pruned=_pruned(measured, matched, laws, protocol, kept),
        limbs=matched.layout.limbs,
        **found,
    )
    return _with_intervals(scores, measured, protocol, progress) if protocol.bootstrap else scores


def _promises(
    matched: MatchedPoses, laws: Laws, protocol: Protocol, edges: Array, scales: Sequence[Scale]
) -> dict[str, Callable[[], Any]]:
    """What scores the joint law and regions, where there are any."""
    if laws.promises is None:
        return {}
    scale = np.searchsorted(edges, matched.area, side="left")
    masks = {one.name: scale == number for number, one in enumerate(scales)}
    return {
        "joint": partial(score_joint, matched, laws.laws, laws.promises, protocol),
        "regions": partial(score_regions, matched, laws.promises, laws.kept(matched), protocol, masks),
    }


def _law_scores(
    measured: Measured, matched: MatchedPoses, scales: Sequence[Scale]
) -> dict[str, Callable[[], LawScores]]:
    """What scores the laws, by name, of all keypoints and, ``pruned.`` before it, of those kept."""
    names = matched.layout.names
    keypoint, scale = measured.keypoint, measured.scale
    whole: dict[str, Callable[[], LawScores]] = {
        name: partial(_one_law, statistics, keypoint, scale, names, scales, names)
        for name, statistics in measured.statistics.items()
    }
    keypoint, scale = keypoint[measured.kept], scale[measured.kept]
    return whole | {
        f"pruned.{name}": partial(_one_law, statistics, keypoint, scale, names, scales, ())
        for name, statistics in measured.pruned.items()
    }


def _one_law(
    statistics: Statistics,
    keypoint: Array,
    scale: Array,
    names: Sequence[str],
    scales: Sequence[Scale],
    plotted: Sequence[str],
) -> LawScores:
    """Scalar metrics overall, per keypoint and per scale, and curves; Q-Q of the keypoints ``plotted``."""
    overall = summaries(statistics, np.zeros(len(keypoint), dtype=np.int64), 1)[0]
    per_scale = summaries(statistics, scale, len(scales))
    return LawScores(
        **vars(overall),
        per_keypoint=dict(zip(names, summaries(statistics, keypoint, len(names)), strict=True)),
        per_scale=dict(zip([one.name for one in scales], per_scale, strict=True)),
        curves=curves_of(statistics, keypoint, plotted),
    )


def _scale_table(area: Array, edges: Array) -> tuple[Scale, ...]:
    """Name, bounds of the area and number of instances of each object scale."""
    bounds = [0.0, *edges.tolist(), float("inf")]
    count = len(bounds) - 1
    names = _SCALE_NAMES.get(count, [f"scale {i + 1}" for i in range(count)])
    instances = np.bincount(np.searchsorted(edges, area, side="left"), minlength=count)
    return tuple(Scale(name, bounds[i], bounds[i + 1], int(instances[i])) for i, name in enumerate(names))


def _calibration(laws: Laws) -> CalibrationSummary:
    """Median calibration parameters by keypoint, for the reader of the report."""
    given, gaussian, student = (laws.laws[name] for name in LAWS)
    sigma = torch.diagonal(given.covariance, dim1=-2, dim2=-1)[..., 0].sqrt()
    tau = (gaussian.scale_tril[..., 0, 0] / sigma).median(0).values.numpy()
    if not isinstance(student, StudentT):
        return CalibrationSummary(laws.source, tau, None, None)
    dof = student.dof.expand(student.scale_tril.shape[:-2]).contiguous()  # torch's median misreads views
    return CalibrationSummary(laws.source, tau, dof.median(0).values.numpy(), _scale_ratio(student, given))


def _scale_ratio(student: Bivariate, given: Bivariate) -> Array:
    ratio = student.scale_tril[..., 0, 0] / given.scale_tril[..., 0, 0]
    return np.asarray(ratio.median(0).values.numpy())


def _pruned(
    measured: Measured, matched: MatchedPoses, laws: Laws, protocol: Protocol, kept: dict[str, Any]
) -> PrunedScores:
    visible = laws.visibility_threshold
    return PrunedScores(
        kept_fraction=float(measured.kept.mean()),
        threshold=float(np.mean(laws.threshold)),
        visibility_threshold=None if visible is None else float(np.mean(visible[np.isfinite(visible)])),
        rules=_pruning_rules(measured, matched, laws, protocol),
        **kept,
    )


def _pruning_rules(
    measured: Measured, matched: MatchedPoses, laws: Laws, protocol: Protocol
) -> tuple[PruningRule, ...]:
    """Pruning by localization confidence alone, and with the visibility score where that has a threshold."""
    correct = measured.similarity >= protocol.gamma_ks
    masks = {
        "nothing pruned": np.ones(len(correct), dtype=bool),
        "localization confidence": (laws.confidence >= laws.threshold[:, None])[matched.labelled],
    }
    if laws.visibility_threshold is not None:
        visible = (
            measured.visibility
            >= np.broadcast_to(laws.visibility_threshold[:, None], matched.labelled.shape)[matched.labelled]
        )
        masks["visibility score"] = visible
        masks["both"] = masks["localization confidence"] & visible
    return tuple(
        PruningRule(name, float(mask.mean()), float(correct[mask].mean()) if mask.any() else float("nan"))
        for name, mask in masks.items()
    )


def _pruning_curve(statistics: Statistics, protocol: Protocol) -> PruningCurve:
    """Reliability and NLL of the keypoints kept, by the share kept."""
    correct = statistics.similarity >= protocol.gamma_ks
    curve = metrics.reliability_curve(statistics.confidence, correct)
    running = np.cumsum(statistics.nll[statistics.by_confidence]) / np.arange(1, len(correct) + 1)
    ranks = np.round(curve.kept * len(correct)).astype(np.int64) - 1
    return PruningCurve(curve.kept, curve.reliability, curve.threshold, running[ranks])


def _cells(measured: Measured, keypoints: int) -> CoverageCells:
    """Coverage of every keypoint at every scale, (K, S) each."""
    shape = (keypoints, measured.scale_count)
    cell = measured.keypoint * shape[1] + measured.scale
    count = shape[0] * shape[1]
    coverage = {}
    for name, statistics in measured.statistics.items():
        curves = metrics.coverage_of_levels(statistics.level["joint"], None, cell, count)
        coverage[name] = {level: curves[:, level - 1].reshape(shape) for level in CELL_LEVELS}
    return CoverageCells(np.bincount(cell, minlength=count).reshape(shape), coverage)


def _with_intervals(scores: Scores, measured: Measured, protocol: Protocol, progress: Counter | None) -> Scores:
    """95 % bootstrap intervals over images of every law, before and after pruning, and of the ranking."""
    draws: list[dict[str, float]] = []
    for draw in measured.draws(protocol.bootstrap, protocol.seed):
        draws.append(draw)
        if progress:
            progress(len(draws), protocol.bootstrap)
    columns = {name: [draw[name] for draw in draws] for name in draws[0]}

    def with_interval(law: LawScores, prefix: str) -> LawScores:
        ends = {name: interval_of(law.metric(name), columns[f"{prefix}.{name}"]) for name in METRICS}
        return replace(law, interval=ends)

    pruned: dict[str, Any] = {name: with_interval(scores.pruned.law(name), f"pruned.{name}") for name in LAWS}
    whole: dict[str, Any] = {name: with_interval(scores.law(name), name) for name in LAWS}
    rankings = {name: interval_of(getattr(scores, name), columns[name]) for name in RANKINGS}
    return replace(scores, pruned=replace(scores.pruned, **pruned), interval=rankings, **whole)


__all__ = ["evaluate"]
