"""Variance calibration: are squared residuals as large as predicted, at every size? (paper, section 4.2)

In: predicted variances and squared residuals (N,): half trace and half squared norm for joint, one
coordinate for marginal calibration. Out: bins of equal count, ENCE, and the moment-matching matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from halopose.evaluation.metrics.order import rising_order
from halopose.types import Array

BINS = 20


@dataclass(frozen=True)
class VarianceBins:
    """Mean predicted variance and mean squared residual (B,) of each bin, in squared pixels."""

    predicted: Array
    empirical: Array


def variance_bins(
    predicted: Array,
    squared: Array,
    weight: Array | None = None,
    *,
    bins: int = BINS,
    presorted: bool = False,
) -> VarianceBins:
    """Sort by predicted variance and average within bins of equal count (eq. 28).

    The first N mod B bins hold one sample more than the others. Fewer samples than bins give fewer bins.
    """
    if not presorted:
        order = rising_order(predicted)
        predicted, squared = predicted[order], squared[order]
        weight = None if weight is None else weight[order]
    total = len(predicted) if weight is None else int(weight.sum())
    bins = min(bins, total)
    if not bins:
        return VarianceBins(np.zeros(0), np.zeros(0))
    size, larger = divmod(total, bins)
    edges = np.arange(bins + 1) * size + np.minimum(np.arange(bins + 1), larger)
    if weight is None:
        sums = [np.add.reduceat(values, edges[:-1]) for values in (predicted, squared)]
    else:
        # A sample that straddles an edge is shared out by interpolating the running sum.
        ranks = np.concatenate([[0.0], np.cumsum(weight)])
        sums = [
            np.diff(np.interp(edges, ranks, np.concatenate([[0.0], np.cumsum(weight * values)])))
            for values in (predicted, squared)
        ]
    return VarianceBins(sums[0] / np.diff(edges), sums[1] / np.diff(edges))


def expected_normalized_calibration_error(bins: VarianceBins) -> float:
    """ENCE (eq. 29) on root-mean quantities; NaN without samples."""
    if not len(bins.predicted):
        return float("nan")
    predicted, empirical = np.sqrt(bins.predicted), np.sqrt(bins.empirical)
    return float(np.mean(np.abs(empirical - predicted) / predicted))


def moment_matching(residual: Array, covariance: Array, weight: Array | None = None) -> tuple[Array, Array]:
    """E[r r^T] and E[Sigma] (2, 2) of residuals (N, 2) and covariances (N, 2, 2), which should agree; else NaN."""
    weight = np.ones(len(residual)) if weight is None else weight
    total = weight.sum()
    if not total:
        return np.full((2, 2), np.nan), np.full((2, 2), np.nan)
    return (
        np.einsum("n,ni,nj->ij", weight, residual, residual) / total,
        np.einsum("n,nij->ij", weight, covariance) / total,
    )
