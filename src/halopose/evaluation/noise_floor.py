"""Noise floor: the calibration errors that a perfectly calibrated model would show on the same images.

ACE and ENCE are means of absolute errors, so chance alone makes them positive, and an interval around the estimate
never contains 0. The floor keeps the images, their clusters of keypoints and the spread of their errors, and removes
the mean error: each image's deviation from the empirical curve is multiplied by a random sign (wild cluster
bootstrap, Liu 1988; Cameron, Gelbach and Miller 2008).
"""

from __future__ import annotations

import numpy as np

from halopose.evaluation import metrics
from halopose.evaluation.keypoint_statistics import KeypointStatistics
from halopose.evaluation.match_scores import UNKNOWN_FLOOR, NoiseFloor
from halopose.evaluation.metrics.variance import BINS
from halopose.evaluation.scores import AXES
from halopose.types import Array

DRAWS = 400
FEWEST_IMAGES = 10  # with fewer no floor can be told


def random_signs(images: int, draws: int = DRAWS, seed: int = 0) -> Array:
    """Signs (draws, images) of the images."""
    return np.random.default_rng(seed).integers(0, 2, (draws, images)).astype(np.float64) * 2 - 1


def coverage_floor(level: Array, image: Array, signs: Array) -> NoiseFloor:
    """Floor of the ACE.

    Args:
        level: ``level_index`` (n,) of the keypoints.
        image: Image index (n,).
        signs: Signs (B, I) of the images.
    """
    images = signs.shape[1]
    counts = metrics.level_counts(level, image, images)
    if np.count_nonzero(counts.sum(1)) < FEWEST_IMAGES:
        return UNKNOWN_FLOOR
    inside, total = np.cumsum(counts, axis=1)[:, :-1], counts.sum(1)
    deviation = inside - total[:, None] * (inside.sum(0) / total.sum())
    return _summary(np.abs(signs @ deviation).mean(1) / total.sum())


def variance_floor(predicted: Array, squared: Array, image: Array, signs: Array) -> NoiseFloor:
    """Floor of the ENCE.

    Args:
        predicted: Predicted variances (n,), rising.
        squared: Squared residuals (n,) in the same order.
        image: Image index (n,) in the same order.
        signs: Signs (B, I) of the images.
    """
    images, bins = signs.shape[1], min(BINS, len(predicted))
    if len(np.unique(image)) < FEWEST_IMAGES:
        return UNKNOWN_FLOOR
    # The first bins hold one sample more, as in ``metrics.variance_bins``.
    size, larger = divmod(len(predicted), bins)
    number = np.repeat(np.arange(bins), size + (np.arange(bins) < larger))
    total = np.bincount(number, predicted, bins)
    ratio = np.bincount(number, squared, bins) / total
    # The squared residuals are scaled to the stated variance of their bin: the mean error goes, the tails stay.
    error = squared / np.maximum(ratio, 1e-300)[number] - predicted
    deviation = np.bincount(image * bins + number, error, images * bins).reshape(images, bins)
    moved = np.maximum(1 + signs @ deviation / total, 0)
    return _summary(np.abs(np.sqrt(moved) - 1).mean(1))


def floors_of(statistics: KeypointStatistics, image: Array, images: int, seed: int = 0) -> dict[str, NoiseFloor]:
    """Floors by metric (ace, ace_x, ..., ence_y) of keypoints on images (n,)."""
    signs, floors = random_signs(images, seed=seed), {}
    for axis in AXES:
        suffix = "" if axis == "joint" else f"_{axis}"
        floors[f"ace{suffix}"] = coverage_floor(statistics.level[axis], image, signs)
        order = statistics.by_variance[axis]
        floors[f"ence{suffix}"] = variance_floor(*statistics.in_variance_order[axis], image.take(order), signs)
    return floors


def _summary(draws: Array) -> NoiseFloor:
    low, high = np.quantile(draws, [0.025, 0.975])
    return NoiseFloor(float(draws.mean()), float(low), float(high))
