"""Calibration by kind of match and by group of keypoints (visibility flag, crowding, score and others)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from halopose.calibration.calibrate import DistributionSet
from halopose.evaluation import metrics
from halopose.evaluation.keypoint_statistics import KeypointStatistics
from halopose.evaluation.match_scores import (
    CONDITIONS,
    MATCH_LEVELS,
    GroupCalibration,
    KeypointGroup,
    MatchedDistribution,
    MatchScores,
    NoiseFloor,
    ProperScores,
)
from halopose.evaluation.metrics.proper_scores import crps_gaussian, crps_student, energy_score, pit_histogram
from halopose.evaluation.metrics.selective import selective_scores
from halopose.evaluation.noise_floor import coverage_floors, floors_of
from halopose.evaluation.region_evaluation import RegionEvaluation
from halopose.evaluation.region_scores import REGION_LEVELS
from halopose.matching.matched_poses import MatchedPoses
from halopose.parallel import run_parallel
from halopose.protocol import Protocol
from halopose.types import Array
from halopose.uncertainty.distributions import Bivariate, StudentT

GROUPED = ("gaussian", "student_t")  # distributions that are evaluated by group
MOST_SCORED = 20_000  # largest number of keypoints, evenly spaced, for proper scores
_CROWDING = ((0.1, "IoU under 0.1"), (0.3, "IoU 0.1 to 0.3"), (math.inf, "IoU over 0.3"))
_SCORES = ((0.25, "under 0.25"), (0.5, "0.25 to 0.5"), (0.75, "0.5 to 0.75"), (math.inf, "over 0.75"))
_QUARTERS = ("smallest quarter", "second quarter", "third quarter", "largest quarter")


@dataclass(frozen=True)
class MatchPart:
    """Scores of one distribution on one kind of true positives, and the ``level_index`` (n,) of its keypoints."""

    scores: MatchedDistribution
    level: Array


def score_distribution(
    matched: MatchedPoses,
    distributions: DistributionSet,
    name: str,
    protocol: Protocol,
    statistics: KeypointStatistics | None = None,
) -> MatchPart:
    """Evaluate the calibration of one distribution, with noise floors.

    Args:
        matched: The true positives.
        distributions: All distributions.
        name: Name of the distribution.
        protocol: Settings of the evaluation.
        statistics: Statistics of the labelled keypoints, if already computed.
    """
    distribution = distributions.distributions[name]
    statistics = statistics or KeypointStatistics.of(distribution, matched, protocol)
    images, image = _images(matched)
    curve = metrics.coverage_of_levels(statistics.level["joint"])[0]
    bins = metrics.variance_bins(*statistics.in_variance_order["joint"], presorted=True)
    scores = MatchedDistribution(
        ace=float(metrics.average_coverage_error(curve)),
        ence=metrics.expected_normalized_calibration_error(bins),
        nll=float(statistics.nll.mean()),
        coverage={level: float(curve[level - 1]) for level in MATCH_LEVELS},
        floors=floors_of(statistics, image, images, protocol.seed),
        proper=proper_scores(matched, distribution),
    )
    return MatchPart(scores, statistics.level["joint"])


def score_matches(
    matched: MatchedPoses,
    distributions: DistributionSet,
    protocol: Protocol,
    parts: Mapping[str, MatchPart] | None = None,
) -> MatchScores:
    """Evaluate the calibration of all distributions on one kind of true positives.

    Args:
        matched: The true positives.
        distributions: Distributions that were evaluated.
        protocol: Settings of the evaluation; ``match`` is the kind of match.
        parts: Scores by distribution, if already computed.
    """
    if parts is None:
        parts = {
            name: score_distribution(matched, distributions, name, protocol) for name in distributions.distributions
        }
    images, image = _images(matched)
    confidence = distributions.confidence[matched.labelled]
    correct = matched.similarity[matched.labelled] >= protocol.gamma_ks
    tasks: list[Callable[[], Any]] = [
        partial(_groups, matched, distributions, image, [parts[name].level for name in GROUPED], protocol),
        partial(selective_scores, confidence, correct, image, images, protocol.bootstrap, protocol.seed),
    ]
    groups, selective = run_parallel(tasks)
    return MatchScores(
        condition=CONDITIONS[protocol.match].format(**vars(protocol)),
        images=images,
        instances=len(matched),
        keypoints=len(image),
        distributions={name: part.scores for name, part in parts.items()},
        groups=groups,
        selective=selective,
        regions=_region_coverage(matched, distributions),
    )


def _images(matched: MatchedPoses) -> tuple[int, Array]:
    """Number of images, and the image index (n,) of each labelled keypoint."""
    images, image = np.unique(matched.image_ids, return_inverse=True)
    return len(images), image.repeat(matched.labelled.sum(1))


def proper_scores(matched: MatchedPoses, distribution: Bivariate) -> ProperScores:
    """Proper scores over labelled keypoints, at most ``MOST_SCORED`` of them."""
    places = np.argwhere(matched.labelled)
    instance, keypoint = places[:: max(1, len(places) // MOST_SCORED)].T
    residual, area = matched.residual[instance, keypoint], matched.area[instance]
    factors = distribution.scale_tril.numpy()[instance, keypoint]
    student = distribution if isinstance(distribution, StudentT) else None
    dof = None if student is None else student.dof.expand(matched.labelled.shape).numpy()[instance, keypoint]
    scale = np.sqrt(np.square(factors).sum(-1))
    crps = [
        crps_gaussian(residual[:, axis] / scale[:, axis], scale[:, axis])
        if dof is None
        else crps_student(residual[:, axis] / scale[:, axis], scale[:, axis], dof)
        for axis in range(2)
    ]
    first = residual[:, 0] / factors[:, 0, 0]
    squared = first**2 + ((residual[:, 1] - factors[:, 1, 0] * first) / factors[:, 1, 1]) ** 2
    root_determinant = factors[:, 0, 0] * factors[:, 1, 1]
    if dof is None:
        surprisal, radius, log_kernel = squared / 2, np.full(len(squared), -2 * math.log(0.1)), squared / 2
    else:
        surprisal = dof / 2 * np.log1p(squared / dof)
        radius = dof * np.expm1(-2 / dof * math.log(0.1))
        log_kernel = (dof + 2) / dof * surprisal
    return ProperScores(
        energy=float(energy_score(residual, factors, dof).mean()),
        crps_x=float(crps[0].mean()),
        crps_y=float(crps[1].mean()),
        nll_relative=float((log_kernel + np.log(2 * np.pi * root_determinant / area)).mean()),
        sharpness=float(np.median(np.pi * radius * root_determinant / area)),
        pit=pit_histogram(-np.expm1(-surprisal)),
    )


def _groups(
    matched: MatchedPoses, distributions: DistributionSet, image: Array, levels: Sequence[Array], protocol: Protocol
) -> tuple[KeypointGroup, ...]:
    """Calibration of each group that has keypoints, from the ``level_index`` (n,) of the GROUPED distributions."""
    found = []
    for kind, name, mask in _masks(matched, distributions, protocol):
        rows = np.flatnonzero(mask)
        if not len(rows):
            continue
        present, own = np.unique(image[rows], return_inverse=True)
        inside = [level[rows] for level in levels]
        floors = coverage_floors(inside, own, len(present), protocol.seed)
        calibrations = [_group_calibration(*pair) for pair in zip(inside, floors, strict=True)]
        by_name = dict(zip(GROUPED, calibrations, strict=True))
        found.append(KeypointGroup(kind, name, len(rows), len(present), by_name))
    return tuple(found)


def _group_calibration(level: Array, floor: NoiseFloor) -> GroupCalibration:
    curve = metrics.coverage_of_levels(level)[0]
    coverage = {level: float(curve[level - 1]) for level in MATCH_LEVELS}
    return GroupCalibration(float(metrics.average_coverage_error(curve)), floor, coverage)


def _masks(
    matched: MatchedPoses, distributions: DistributionSet, protocol: Protocol
) -> Iterator[tuple[str, str, Array]]:
    """Kind, name and mask (n,) of each group."""
    instance, keypoint = np.nonzero(matched.labelled)
    if matched.occluded is not None:
        occluded = matched.occluded[instance, keypoint]
        yield from (("visibility flag", "occluded", occluded), ("visibility flag", "visible", ~occluded))
    if matched.truncated is not None:
        cut = matched.truncated[instance]
        yield from (("truncation", "box touches the border", cut), ("truncation", "whole", ~cut))
    if matched.crowding is not None:
        yield from _binned("crowding", _CROWDING, matched.crowding[instance])
    if matched.scores is not None:
        yield from _binned("detection score", _SCORES, matched.scores[instance])
    edges = np.asarray(protocol.scale_edges, dtype=float)
    scale = np.searchsorted(edges, matched.area, side="left")[instance]
    names = {1: ("all",), 2: ("small", "large"), 3: ("small", "medium", "large")}.get(
        len(edges) + 1, tuple(f"scale {number + 1}" for number in range(len(edges) + 1))
    )
    yield from (("object size", name, scale == number) for number, name in enumerate(names))
    relative_variance = -distributions.confidence[matched.labelled]  # variance over (kappa s)^2
    quarter = np.searchsorted(np.quantile(relative_variance, [0.25, 0.5, 0.75]), relative_variance)
    yield from (("stated sigma", name, quarter == number) for number, name in enumerate(_QUARTERS))
    yield from (("keypoint", name, keypoint == number) for number, name in enumerate(matched.layout.names))


def _binned(kind: str, bins: tuple[tuple[float, str], ...], values: Array) -> Iterator[tuple[str, str, Array]]:
    low = -math.inf
    for high, name in bins:
        yield kind, name, (values >= low) & (values < high)
        low = high


def _region_coverage(matched: MatchedPoses, distributions: DistributionSet) -> dict[int, float] | None:
    """Coverage of conformal regions, by level in per cent."""
    fitted = RegionEvaluation.of(matched, distributions.fold_regions)
    if fitted is None:
        return None
    held = matched.distance[..., None] <= fitted.radius[fitted.table]
    return {level: float(held[..., n][matched.labelled].mean()) for n, level in enumerate(REGION_LEVELS)}
