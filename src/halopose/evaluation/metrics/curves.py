"""Calibration curves: coverage by nominal level, Q-Q points, and reliability by the share kept (paper, section 4.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from halopose.sorting import falling_order
from halopose.types import Array

LEVELS = np.arange(1, 100) / 100


# --- coverage -------------------------------------------------------------------------------------------


def coverage(
    probability: Array,
    weight: Array | None = None,
    groups: Array | None = None,
    group_count: int = 1,
) -> Array:
    """Empirical coverage at LEVELS (eqs. 25, 26).

    Args:
        probability: (N,) probability of the smallest region that contains the true keypoint: the Mahalanobis CDF
            for joint coverage, |2 F(z) - 1| for marginal coverage. It is uniform if the distribution is calibrated.
        weight: (N,) number of copies of each sample.
        groups: (N,) group index of each sample.
        group_count: Number of groups.

    Returns:
        (99,), or (group_count, 99) if ``groups`` is given. NaN for groups without samples. A keypoint on the
        boundary of a region counts as inside.
    """
    curves = coverage_of_levels(level_index(probability), weight, groups, group_count)
    return np.asarray(curves if groups is not None else curves[0])


def level_index(probability: Array) -> Array:
    """Number of LEVELS below each probability (N,). All levels from this index on cover the sample."""
    guess = np.fmin(np.fmax(np.ceil(probability * 100) - 1, 0), len(LEVELS))
    # The product is rounded: correct it by comparing with the levels themselves.
    guess += (guess + 1) / 100 < probability
    guess -= (guess > 0) & (guess / 100 >= probability)
    return guess.astype(np.int64)


def coverage_of_levels(
    level: Array, weight: Array | None = None, groups: Array | None = None, group_count: int = 1
) -> Array:
    """``coverage`` (group_count, 99) from ``level_index`` (N,).

    Args:
        level: (N,) ``level_index`` of each sample.
        weight: (N,) number of copies of each sample.
        groups: (N,) group index of each sample.
        group_count: Number of groups.
    """
    return coverage_of_counts(level_counts(level, groups, group_count, weight))


def level_counts(level: Array, groups: Array | None = None, group_count: int = 1, weight: Array | None = None) -> Array:
    """Histogram (group_count, 100) of ``level_index`` (N,) by group; sufficient to compute the coverage.

    Args:
        level: (N,) ``level_index`` of each sample.
        groups: (N,) group index of each sample.
        group_count: Number of groups.
        weight: (N,) number of copies of each sample.
    """
    bins = len(LEVELS) + 1
    cell = level if groups is None else level + groups * bins
    return np.bincount(cell, weights=weight, minlength=bins * group_count).reshape(group_count, bins)


def coverage_of_counts(counts: Array) -> Array:
    """``coverage`` (group_count, 99) from ``level_counts`` (group_count, 100)."""
    with np.errstate(invalid="ignore"):
        return np.asarray(np.cumsum(counts[:, :-1], axis=1) / counts.sum(1, keepdims=True))


def average_coverage_error(curve: Array) -> Array:
    """ACE (...) of coverage curves (..., 99): mean absolute distance from the nominal levels (eq. 27)."""
    return np.asarray(np.abs(curve - LEVELS).mean(-1))


# --- Q-Q points -----------------------------------------------------------------------------------------


def qq_points(statistic: Array, quantile: Callable[[Array], Array], points: int = 200) -> tuple[Array, Array]:
    """Q-Q points of a statistic against a reference distribution (paper, appendix D.2).

    Half of the points are evenly spaced in rank. The other half are concentrated at both ends, where the tails
    are. The smallest and the largest sample are always included.

    Args:
        statistic: (N,) samples.
        quantile: Quantile function of the reference distribution.
        points: Maximum number of points.

    Returns:
        Theoretical and empirical quantiles (P,), at plotting positions (n - 1/2) / N.
    """
    return np.asarray(quantile(qq_positions(len(statistic), points))), qq_values(statistic, points)


def qq_positions(count: int, points: int = 200) -> Array:
    """Probabilities of the theoretical quantiles of ``qq_points`` for ``count`` samples."""
    return np.asarray((_qq_ranks(count, points) + 0.5) / count)


def qq_values(statistic: Array, points: int = 200, *, presorted: bool = False) -> Array:
    """Empirical quantiles of ``qq_points``.

    Args:
        statistic: (N,) samples.
        points: Maximum number of points.
        presorted: The samples are in ascending order already.
    """
    ordered = statistic if presorted else np.sort(statistic)
    return ordered[_qq_ranks(len(statistic), points)]


@lru_cache(maxsize=256)
def _qq_ranks(count: int, points: int) -> Array:
    """Ranks of the sorted samples that become Q-Q points."""
    if count <= points:
        return np.arange(count)
    even = np.linspace(0, 1, max(points - points // 2, 1))
    angle = np.linspace(0, np.pi, points // 2)
    ends = (1 - np.cos(np.pi * (1 - np.cos(angle)) / 2)) / 2
    chosen = np.concatenate([[0.0, 1.0], even, ends])[: max(points, 2)]
    return np.unique(np.round(chosen * (count - 1)).astype(np.int64))


# --- reliability ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReliabilityCurve:
    """Reliability of kept keypoints by the share kept.

    Attributes:
        kept: (P,) share of keypoints kept.
        reliability: (P,) share of the kept keypoints that are correct.
        threshold: (P,) confidence threshold that keeps this share.
    """

    kept: Array
    reliability: Array
    threshold: Array


def reliability_curve(
    confidence: Array, correct: Array, points: int = 101, *, presorted: bool = False
) -> ReliabilityCurve:
    """Reliability of the most confident keypoints, from the first one to all N.

    Args:
        confidence: (N,) confidences.
        correct: (N,) whether each keypoint is correct.
        points: Maximum number of points of the curve.
        presorted: The samples are in descending order of confidence already.
    """
    if not presorted:
        order = falling_order(confidence)
        confidence, correct = confidence[order], np.asarray(correct)[order]
    count = len(confidence)
    ranks = np.unique(np.round(np.linspace(1, count, min(points, count))).astype(np.int64))
    precision = np.cumsum(correct, dtype=np.int64)[ranks - 1] / ranks
    return ReliabilityCurve(ranks / max(count, 1), precision, confidence[ranks - 1])
