"""Variance calibration: squared residuals against predicted variances (paper, section 4.2).

Joint calibration compares half the trace with half the squared norm. Marginal calibration compares one coordinate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from halopose.sorting import rising_order
from halopose.types import Array

BINS = 20


@dataclass(frozen=True)
class VarianceBins:
    """Mean predicted variance and mean squared residual of each bin (B,), in squared pixels."""

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

    The first N mod B bins contain one sample more than the others. Fewer samples than bins give fewer bins.

    Args:
        predicted: (N,) predicted variances.
        squared: (N,) squared residuals.
        weight: (N,) number of copies of each sample.
        bins: Number of bins.
        presorted: The samples are in ascending order of predicted variance already.
    """
    if not presorted:
        order = rising_order(predicted)
        predicted, squared = predicted[order], squared[order]
        weight = None if weight is None else weight[order]
    total = len(predicted) if weight is None else int(weight.sum())
    bins = min(bins, total)
    if not bins:
        return VarianceBins(np.zeros(0), np.zeros(0))
    edges = _edges(total, bins)
    if weight is None:
        sums = [np.add.reduceat(values, edges[:-1]) for values in (predicted, squared)]
    else:
        # Interpolating the cumulative sum splits a sample whose copies lie on both sides of an edge.
        ranks = np.concatenate([[0.0], np.cumsum(weight)])
        sums = [
            np.diff(np.interp(edges, ranks, np.concatenate([[0.0], np.cumsum(weight * values)])))
            for values in (predicted, squared)
        ]
    return VarianceBins(sums[0] / np.diff(edges), sums[1] / np.diff(edges))


def _edges(total: int, bins: int) -> Array:
    """Ranks at which the bins begin, then the end (bins + 1,)."""
    size, larger = divmod(total, bins)
    return np.arange(bins + 1) * size + np.minimum(np.arange(bins + 1), larger)


def expected_normalized_calibration_error(bins: VarianceBins) -> float:
    """ENCE (eq. 29): mean over bins of |RMSE - RMV| / RMV. NaN without samples."""
    return float(np.mean(_errors(bins))) if len(bins.predicted) else float("nan")


def _errors(bins: VarianceBins) -> Array:
    predicted, empirical = np.sqrt(bins.predicted), np.sqrt(bins.empirical)
    return np.asarray(np.abs(empirical - predicted) / predicted)


def normalized_calibration_errors(predicted: Array, squared: Array, sizes: Array) -> list[float]:
    """ENCE of G groups of samples.

    Args:
        predicted: (N,) predicted variances, group after group, in ascending order within each group.
        squared: (N,) squared residuals in the same order.
        sizes: (G,) number of samples of each group.
    """
    bins = np.minimum(sizes, BINS)
    if not bins.any():
        return [float("nan")] * len(sizes)
    first = np.cumsum(bins) - bins
    number = np.arange(bins.sum()) - np.repeat(first, bins)
    size, larger = np.divmod(sizes, np.maximum(bins, 1))
    begin = np.cumsum(sizes) - sizes
    edges = np.repeat(begin, bins) + number * np.repeat(size, bins) + np.minimum(number, np.repeat(larger, bins))
    counts = np.diff(np.append(edges, len(predicted)))
    errors = _errors(VarianceBins(*(np.add.reduceat(values, edges) / counts for values in (predicted, squared))))
    result = np.full(len(sizes), np.nan)
    full = bins == BINS
    result[full] = errors[np.repeat(full, bins)].reshape(-1, BINS).mean(1)
    for group in np.flatnonzero((bins > 0) & ~full).tolist():
        result[group] = np.mean(errors[first[group] : first[group] + bins[group]])
    return [float(value) for value in result]


def moment_matching(
    residual: Sequence[Array], covariance: Sequence[Array], weight: Array | None = None
) -> tuple[Array, Array]:
    """Empirical and predicted second moments, which agree for a calibrated distribution.

    Args:
        residual: x and y (N,).
        covariance: Entries xx, xy and yy (N,).
        weight: (N,) number of copies of each sample.

    Returns:
        E[r r^T] and E[Sigma], (2, 2) each. NaN without samples.
    """
    x, y = residual
    weight = np.ones(len(x)) if weight is None else weight
    total = weight.sum()
    if not total:
        return np.full((2, 2), np.nan), np.full((2, 2), np.nan)
    empirical = [np.einsum("n,n,n->", weight, a, b) for a, b in ((x, x), (x, y), (y, y))]
    predicted = [np.einsum("n,n->", weight, entry) for entry in covariance]
    return _symmetric(empirical) / total, _symmetric(predicted) / total


def _symmetric(entries: Sequence[float]) -> Array:
    """Symmetric matrix (2, 2) from its entries xx, xy and yy."""
    xx, xy, yy = entries
    return np.array([[xx, xy], [xy, yy]])
