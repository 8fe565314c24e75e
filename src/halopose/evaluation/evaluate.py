"""Evaluation protocol (paper, section 4): all metrics of all distributions, before and after pruning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from halopose.calibration.calibrate import DISTRIBUTIONS, DistributionSet, cross_fit, cross_fitted, warn_of_few
from halopose.calibration.dispersion_model import match_predicted
from halopose.evaluation import metrics
from halopose.evaluation.bootstrap import confidence_interval
from halopose.evaluation.conditional_coverage import MatchPart, score_distribution, score_matches
from halopose.evaluation.custom_metrics import score_custom
from halopose.evaluation.keypoint_statistics import KeypointStatistics, curves_of, summaries_by
from halopose.evaluation.region_evaluation import RegionEvaluation, joint_gains, score_joint, score_regions
from halopose.evaluation.resampling import EvaluatedKeypoints, ResampledMetrics, require_matches
from halopose.evaluation.scores import (
    CELL_LEVELS,
    METRICS,
    RANKINGS,
    CalibrationSummary,
    CoverageCells,
    DistributionScores,
    MetricSummary,
    PrunedScores,
    PruningCurve,
    PruningRule,
    ScaleScores,
    Scores,
)
from halopose.matching.matched_poses import MatchedPoses
from halopose.parallel import run_parallel, single_threaded
from halopose.plugins import custom_metrics
from halopose.poses import GroundTruth, PoseDistributions
from halopose.protocol import Protocol
from halopose.types import Array, Counter
from halopose.uncertainty.distributions import Bivariate, Gaussian, StudentT

_SCALE_NAMES = {1: ["all"], 2: ["small", "large"], 3: ["small", "medium", "large"]}


def evaluate(
    matched: MatchedPoses,
    distributions: DistributionSet | None = None,
    protocol: Protocol | None = None,
    progress: Counter | None = None,
    others: Sequence[tuple[MatchedPoses, DistributionSet, Protocol]] = (),
) -> Scores:
    """Evaluate true positives: overall, per keypoint and per object scale, before and after pruning.

    Args:
        matched: Detections matched to annotated objects.
        distributions: Distributions to compare; by default they are calibrated by cross-fitting over images.
        protocol: Settings of the evaluation.
        progress: Called after every bootstrap draw.
        others: True positives by other kinds of match, with their distributions and protocols. They are reported in
            ``Scores.matches``.

    Raises:
        HaloposeError: No detection matches an annotated object.

    Example:
        >>> from halopose.data.coco import parse_ground_truth, parse_predictions
        >>> from halopose.data.synthetic_poses import World, synthesize
        >>> from halopose.matching.matched_poses import match_poses
        >>> objects, results = synthesize(World(images=80, persons=200, overconfidence=2.0))
        >>> truth = parse_ground_truth("truth.json", objects)
        >>> scores = evaluate(match_poses(parse_predictions("predictions.json", results, truth), truth))
        >>> scores.student_t.ace < scores.gaussian.ace < scores.uncalibrated.ace
        True
    """
    with single_threaded():
        return _evaluate(matched, distributions, protocol or Protocol(), progress, others)


def evaluate_predictions(
    predictions: PoseDistributions,
    truth: GroundTruth,
    protocol: Protocol | None = None,
    progress: Counter | None = None,
    **known: Any,
) -> Scores:
    """Match predictions to objects by OKS and by box, calibrate by cross-fitting and evaluate both.

    Calibrations are fitted on the matches of the protocol and applied to both kinds.

    Args:
        predictions: Detections with distributions.
        truth: Annotated objects of the same images.
        protocol: Settings of the evaluation.
        progress: Called after every bootstrap draw.
        **known: Calibrations fitted elsewhere, as ``cross_fit`` takes them.
    """
    protocol = protocol or Protocol()
    matched = match_predicted(predictions, truth, protocol)
    require_matches(matched, protocol)
    if not known:
        warn_of_few(matched, len(truth.images))
    with single_threaded():
        fitted = cross_fit(matched, protocol, **known)
        distributions = fitted.apply(matched)
        others = []
        if protocol.extended:
            other = replace(protocol, match="box" if protocol.match == "oks" else "oks")
            also = match_predicted(predictions, truth, other)
            others = [(also, fitted.apply(also, other), other)] if also.labelled.any() else []
        return _evaluate(matched, distributions, protocol, progress, others)


def _evaluate(
    matched: MatchedPoses,
    distributions: DistributionSet | None,
    protocol: Protocol,
    progress: Counter | None,
    others: Sequence[tuple[MatchedPoses, DistributionSet, Protocol]],
) -> Scores:
    require_matches(matched, protocol)
    distributions = distributions or cross_fitted(matched, protocol)
    edges = np.asarray(protocol.scale_edges, dtype=float)
    evaluated = EvaluatedKeypoints.of(matched, distributions, protocol, edges)
    scales = _scale_table(matched.area, edges)
    regions = RegionEvaluation.of(matched, distributions.fold_regions)
    # One list of tasks, the longest first, so that no core is idle between two kinds of scores.
    tasks: dict[str, Callable[[], Any]] = {
        "calibrated": partial(_calibrated_scores, distributions, matched, evaluated, protocol, scales),
        "uncalibrated": partial(
            _distribution_scores, "uncalibrated", distributions, matched, evaluated, protocol, scales
        ),
        **_joint_scores(matched, distributions, regions, protocol, edges, scales),
        **{
            f"{which.match} {name}": partial(score_distribution, poses, one, name, which)
            for poses, one, which in others
            for name in one.distributions
        },
        "akp_random": partial(metrics.random_keypoint_precision, evaluated.similarity, seed=protocol.seed),
        "calibration": partial(_calibration, distributions),
        "akp_visibility": partial(metrics.average_keypoint_precision, evaluated.visibility, evaluated.similarity),
    }
    found: dict[str, Any] = dict(zip(tasks, run_parallel(list(tasks.values())), strict=True))
    by_distribution: dict[str, _Scored] = {"uncalibrated": found.pop("uncalibrated"), **found.pop("calibrated")}
    parts = {protocol.match: {name: one.match for name, one in by_distribution.items() if one.match is not None}}
    for _, one, which in others:
        parts[which.match] = {name: found.pop(f"{which.match} {name}") for name in one.distributions}
    found |= {name: one.whole for name, one in by_distribution.items()}
    if regions is not None:
        alone = {name: one.whole.nll for name, one in by_distribution.items()}
        found["joint"] = score_joint(matched, found["joint"], alone, regions, protocol)
    kinds = ((matched, distributions, protocol), *others) if protocol.extended else ()
    matches = run_parallel([partial(score_matches, *kind, parts[kind[2].match]) for kind in kinds])
    curve = by_distribution["gaussian"].pruning_curve
    assert curve is not None
    scores = Scores(
        settings=asdict(protocol),
        given_family="gaussian" if matched.dof is None else "student-t",
        images=evaluated.image_count,
        matched_instances=len(matched),
        keypoints=len(evaluated.similarity),
        keypoint_names=matched.layout.names,
        scales=scales,
        akp_skill=metrics.skill(by_distribution["gaussian"].whole.akp, found["akp_random"]),
        pruned=_pruned(
            evaluated, matched, distributions, protocol, {name: one.kept for name, one in by_distribution.items()}
        ),
        pruning_curve=curve,
        cells=_cells(evaluated, len(matched.layout), {name: one.cells for name, one in by_distribution.items()}),
        limbs=matched.layout.limbs,
        custom=score_custom(custom_metrics(), matched, distributions, evaluated, protocol),
        matches={kind[2].match: one for kind, one in zip(kinds, matches, strict=True)},
        **found,
    )
    if not protocol.bootstrap:
        return scores
    statistics = {name: one.statistics for name, one in by_distribution.items() if one.statistics is not None}
    return _with_intervals(scores, ResampledMetrics.join(evaluated, statistics), protocol, progress)


def _joint_scores(
    matched: MatchedPoses,
    distributions: DistributionSet,
    regions: RegionEvaluation | None,
    protocol: Protocol,
    edges: Array,
    scales: Sequence[ScaleScores],
) -> dict[str, Callable[[], Any]]:
    """Tasks that score the joint distribution and the regions; none without them."""
    if regions is None:
        return {}
    scale = np.searchsorted(edges, matched.area, side="left")
    masks = {one.name: scale == number for number, one in enumerate(scales)}
    return {
        "joint": partial(joint_gains, matched, distributions.distributions, regions),
        "regions": partial(score_regions, matched, regions, distributions.kept(matched), protocol, masks),
    }


@dataclass(frozen=True)
class _Scored:
    """Scores of one distribution.

    Attributes:
        whole: Scores of all keypoints.
        kept: Scores of the keypoints that pruning keeps.
        cells: (C, 99) coverage by keypoint and object scale.
        covariance: Entries (n,) of the covariance by name.
        pruning_curve: For the Gaussian only.
        statistics: Statistics of all and of the kept keypoints, if a bootstrap needs them.
        match: Scores for ``Scores.matches``; None if the evaluation is not extended.
    """

    whole: DistributionScores
    kept: DistributionScores
    cells: Array
    covariance: dict[str, Array]
    pruning_curve: PruningCurve | None
    statistics: tuple[KeypointStatistics, KeypointStatistics] | None
    match: MatchPart | None


def _calibrated_scores(
    distributions: DistributionSet,
    matched: MatchedPoses,
    evaluated: EvaluatedKeypoints,
    protocol: Protocol,
    scales: Sequence[ScaleScores],
) -> dict[str, _Scored]:
    """Scores of both calibrated distributions. They usually have the same covariances, which are scored once."""
    gaussian = _distribution_scores("gaussian", distributions, matched, evaluated, protocol, scales)
    student = _distribution_scores("student_t", distributions, matched, evaluated, protocol, scales, gaussian)
    return {"gaussian": gaussian, "student_t": student}


def _distribution_scores(
    name: str,
    distributions: DistributionSet,
    matched: MatchedPoses,
    evaluated: EvaluatedKeypoints,
    protocol: Protocol,
    scales: Sequence[ScaleScores],
    other: _Scored | None = None,
) -> _Scored:
    """Score one distribution.

    Args:
        name: Name of the distribution.
        distributions: All distributions.
        matched: The true positives.
        evaluated: Their labelled keypoints.
        protocol: Settings of the evaluation.
        scales: Object scales.
        other: Scores of another distribution. If the covariances are equal, results that depend on them only are
            reused.
    """
    whole = KeypointStatistics.of(distributions.distributions[name], matched, protocol, evaluated.residuals)
    names = matched.layout.names
    cell = evaluated.keypoint * len(scales) + evaluated.scale
    count = len(names) * len(scales)
    reuse: tuple[DistributionScores | None, DistributionScores | None] = (None, None)
    if other is not None and whole.has_covariance(other.covariance):
        reuse = (other.whole, other.kept)
    scores = _one_distribution(whole, cell, names, scales, names, reuse[0])
    cells = metrics.coverage_of_levels(whole.level["joint"], None, cell, count)
    curve = _pruning_curve(whole, protocol) if name == "gaussian" else None
    match = score_distribution(matched, distributions, name, protocol, whole) if protocol.extended else None
    kept = whole.take(evaluated.kept, evaluated.kept_residuals)
    statistics = (whole, kept) if protocol.bootstrap else None
    covariance = whole.covariance
    del whole  # frees as much memory as the rest needs
    plotted = names if name == "gaussian" else ()
    kept_scores = _one_distribution(kept, cell[evaluated.kept], names, scales, plotted, reuse[1])
    return _Scored(scores, kept_scores, cells, covariance, curve, statistics, match)


def _one_distribution(
    statistics: KeypointStatistics,
    cell: Array,
    names: Sequence[str],
    scales: Sequence[ScaleScores],
    plotted: Sequence[str],
    reuse: DistributionScores | None = None,
) -> DistributionScores:
    """Scalar metrics overall, per keypoint and per scale, and curves.

    Args:
        statistics: Statistics of n keypoints.
        cell: (n,) keypoint index times the number of scales, plus the scale index.
        names: Keypoint names.
        scales: Object scales.
        plotted: Names of the keypoints that get Q-Q points.
        reuse: Scores of a distribution with the same covariances.
    """
    cells = np.arange(len(names) * len(scales))
    keypoint, scale = np.divmod(cells, len(scales))
    known: list[list[MetricSummary]] | None = None
    if reuse is not None:
        known = [[reuse], list(reuse.per_keypoint.values()), list(reuse.per_scale.values())]
    groupings = [np.zeros_like(cells), keypoint, scale]
    [[overall], per_keypoint, per_scale] = summaries_by(statistics, cell, groupings, known)
    return DistributionScores(
        **vars(overall),
        per_keypoint=dict(zip(names, per_keypoint, strict=True)),
        per_scale=dict(zip([one.name for one in scales], per_scale, strict=True)),
        curves=curves_of(statistics, cell // len(scales), plotted, None if reuse is None else reuse.curves),
    )


def _scale_table(area: Array, edges: Array) -> tuple[ScaleScores, ...]:
    """Name, area bounds and number of instances of each object scale."""
    bounds = [0.0, *edges.tolist(), float("inf")]
    count = len(bounds) - 1
    names = _SCALE_NAMES.get(count, [f"scale {i + 1}" for i in range(count)])
    instances = np.bincount(np.searchsorted(edges, area, side="left"), minlength=count)
    return tuple(ScaleScores(name, bounds[i], bounds[i + 1], int(instances[i])) for i, name in enumerate(names))


def _calibration(distributions: DistributionSet) -> CalibrationSummary:
    """Median calibration parameters by keypoint."""
    given, gaussian, student = (distributions.distributions[name] for name in DISTRIBUTIONS)
    # The first entry of the triangular factor of a Gaussian is the standard deviation along x.
    sigma = given.scale_tril[..., 0, 0] if isinstance(given, Gaussian) else given.covariance[..., 0, 0].sqrt()
    tau = (gaussian.scale_tril[..., 0, 0] / sigma).median(0).values.numpy()
    if not isinstance(student, StudentT):
        return CalibrationSummary(distributions.source, tau, None, None)
    dof = student.dof.expand(student.scale_tril.shape[:-2]).contiguous()  # torch's median is wrong for expanded views
    return CalibrationSummary(distributions.source, tau, dof.median(0).values.numpy(), _scale_ratio(student, given))


def _scale_ratio(student: Bivariate, given: Bivariate) -> Array:
    ratio = student.scale_tril[..., 0, 0] / given.scale_tril[..., 0, 0]
    return np.asarray(ratio.median(0).values.numpy())


def _pruned(
    evaluated: EvaluatedKeypoints,
    matched: MatchedPoses,
    distributions: DistributionSet,
    protocol: Protocol,
    kept: dict[str, Any],
) -> PrunedScores:
    visible = distributions.visibility_threshold
    return PrunedScores(
        kept_fraction=float(evaluated.kept.mean()),
        threshold=float(np.mean(distributions.threshold)),
        visibility_threshold=None if visible is None else float(np.mean(visible[np.isfinite(visible)])),
        rules=_pruning_rules(evaluated, matched, distributions, protocol),
        **kept,
    )


def _pruning_rules(
    evaluated: EvaluatedKeypoints, matched: MatchedPoses, distributions: DistributionSet, protocol: Protocol
) -> tuple[PruningRule, ...]:
    """Pruning by localization confidence, by visibility score if it has a threshold, and by both."""
    correct = evaluated.similarity >= protocol.gamma_ks
    masks = {
        "nothing pruned": np.ones(len(correct), dtype=bool),
        "localization confidence": (distributions.confidence >= distributions.threshold[:, None])[matched.labelled],
    }
    if distributions.visibility_threshold is not None:
        visible = (
            evaluated.visibility
            >= np.broadcast_to(distributions.visibility_threshold[:, None], matched.labelled.shape)[matched.labelled]
        )
        masks["visibility score"] = visible
        masks["both"] = masks["localization confidence"] & visible
    return tuple(
        PruningRule(name, float(mask.mean()), float(correct[mask].mean()) if mask.any() else float("nan"))
        for name, mask in masks.items()
    )


def _pruning_curve(statistics: KeypointStatistics, protocol: Protocol) -> PruningCurve:
    """Reliability and NLL of the kept keypoints by the share kept."""
    order = statistics.by_confidence
    correct = statistics.residuals.similarity.take(order) >= protocol.gamma_ks
    curve = metrics.reliability_curve(statistics.confidence.take(order), correct, presorted=True)
    running = np.cumsum(statistics.nll.take(order))
    ranks = np.round(curve.kept * len(correct)).astype(np.int64) - 1
    return PruningCurve(curve.kept, curve.reliability, curve.threshold, running[ranks] / (ranks + 1))


def _cells(evaluated: EvaluatedKeypoints, keypoints: int, curves: Mapping[str, Array]) -> CoverageCells:
    """Coverage (K, S) by keypoint and object scale."""
    shape = (keypoints, evaluated.scale_count)
    count = np.bincount(evaluated.keypoint * shape[1] + evaluated.scale, minlength=shape[0] * shape[1])
    coverage = {
        name: {level: curve[:, level - 1].reshape(shape) for level in CELL_LEVELS} for name, curve in curves.items()
    }
    return CoverageCells(count.reshape(shape), coverage)


def _with_intervals(scores: Scores, measured: ResampledMetrics, protocol: Protocol, progress: Counter | None) -> Scores:
    """Add 95 % bootstrap intervals over images to all metrics."""
    draws: list[dict[str, float]] = []
    for draw in measured.draws(protocol.bootstrap, protocol.seed):
        draws.append(draw)
        if progress:
            progress(len(draws), protocol.bootstrap)
    columns = {name: [draw[name] for draw in draws] for name in draws[0]}

    def with_interval(distribution: DistributionScores, prefix: str) -> DistributionScores:
        ends = {
            name: confidence_interval(name, distribution.metric(name), columns[f"{prefix}.{name}"]) for name in METRICS
        }
        return replace(distribution, interval=ends)

    pruned: dict[str, Any] = {
        name: with_interval(scores.pruned.distribution(name), f"pruned.{name}") for name in DISTRIBUTIONS
    }
    whole: dict[str, Any] = {name: with_interval(scores.distribution(name), name) for name in DISTRIBUTIONS}
    rankings = {name: confidence_interval(name, getattr(scores, name), columns[name]) for name in RANKINGS}
    return replace(scores, pruned=replace(scores.pruned, **pruned), interval=rankings, **whole)
