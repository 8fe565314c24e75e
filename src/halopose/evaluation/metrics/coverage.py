"""Coverage: do regions of nominal probability hold that share of the truth? (paper, section 4.2)

In: for each keypoint the probability of the smallest region that holds its truth (N,), which is uniform
if calibrated: the Mahalanobis CDF for joint, |2 F(z) - 1| for marginal coverage. Out: curves and ACE.
"""

from __future__ import annotations

import numpy as np

from halopose.types import Array

LEVELS = np.arange(1, 100) / 100


def level_index(probability: Array) -> Array:
    """Number of LEVELS below each probability (N,): the levels from there on cover the sample."""
    guess = np.fmin(np.fmax(np.ceil(probability * 100) - 1, 0), len(LEVELS))
    # Multiplying rounds; compare with the levels themselves.
    guess += (guess + 1) / 100 < probability
    guess -= (guess > 0) & (guess / 100 >= probability)
    return guess.astype(np.int64)


def coverage(
    probability: Array,
    weight: Array | None = None,
    groups: Array | None = None,
    group_count: int = 1,
) -> Array:
    """Empirical coverage (99,) at LEVELS, or (group_count, 99) by group index (N,) (eqs. 25, 26).

    Truth on the boundary of a region counts as inside. A group without samples is NaN.
    """
    curves = coverage_of_levels(level_index(probability), weight, groups, group_count)
    return np.asarray(curves if groups is not None else curves[0])


def coverage_of_levels(
    level: Array, weight: Array | None = None, groups: Array | None = None, group_count: int = 1
) -> Array:
    """``coverage`` (group_count, 99) of already computed ``level_index`` (N,)."""
    return coverage_of_counts(level_counts(level, groups, group_count, weight))


def level_counts(level: Array, groups: Array | None = None, group_count: int = 1, weight: Array | None = None) -> Array:
    """How many samples (group_count, 100) have each ``level_index`` (N,): all that coverage needs of them."""
    bins = len(LEVELS) + 1
    cell = level if groups is None else level + groups * bins
    return np.bincount(cell, weights=weight, minlength=bins * group_count).reshape(group_count, bins)


def coverage_of_counts(counts: Array) -> Array:
    """``coverage`` (group_count, 99) of ``level_counts`` (group_count, 100)."""
    with np.errstate(invalid="ignore"):
        return np.asarray(np.cumsum(counts[:, :-1], axis=1) / counts.sum(1, keepdims=True))


def average_coverage_error(curve: Array) -> Array:
    """ACE (...) of coverage curves (..., 99) (eq. 27)."""
    return np.asarray(np.abs(curve - LEVELS).mean(-1))
