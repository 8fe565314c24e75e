"""Noise floor: the calibration errors that a perfectly calibrated model would show on the same images.

ACE and ENCE are means of absolute errors, so they are positive even for perfect calibration. The noise floor keeps the
images, their clusters of keypoints and the spread of their errors, and removes the mean error.

ACE: each image's deviation from the empirical curve is multiplied by a random sign (wild cluster bootstrap, Liu 1988;
Cameron, Gelbach and Miller 2008). ENCE: standardised residuals are permuted between images.
"""

from __future__ import annotations

import numpy as np

from halopose.evaluation import metrics
from halopose.evaluation.keypoint_statistics import KeypointStatistics
from halopose.evaluation.match_scores import UNKNOWN_FLOOR, NoiseFloor
from halopose.evaluation.metrics.variance import BINS
from halopose.evaluation.scores import AXES
from halopose.sorting import whole_order
from halopose.types import Array

DRAWS = 400
FEWEST_DRAWS, MOST_PERMUTED = 50, 2_000_000  # for the ENCE: draws, and keypoints summed over draws
FEWEST_IMAGES = 10  # with fewer images there is no noise floor


def random_signs(images: int, draws: int = DRAWS, seed: int = 0) -> Array:
    """Random signs (draws, images) of the images, 1 or -1 in single precision.

    Args:
        images: Number of images.
        draws: Number of draws.
        seed: Seed of the draws.
    """
    return np.random.default_rng(seed).integers(0, 2, (draws, images)).astype(np.float32) * 2 - 1


def coverage_floor(level: Array, image: Array, signs: Array) -> NoiseFloor:
    """Noise floor of the ACE.

    Args:
        level: ``level_index`` (n,) of the keypoints.
        image: Image index (n,).
        signs: Signs (B, I) of the images.
    """
    images = signs.shape[1]
    counts = metrics.level_counts(level, image, images)
    if np.count_nonzero(counts.any(1)) < FEWEST_IMAGES:
        return UNKNOWN_FLOOR
    # Sums of counts are whole numbers, which single precision holds exactly up to 2^24.
    exact = np.float32 if len(level) < 2**24 else np.float64
    drawn = np.cumsum(signs.astype(exact, copy=False) @ counts.astype(exact), axis=1, dtype=np.float64)
    share = np.cumsum(counts.sum(0))[:-1] / len(level)
    return _summary(np.abs(drawn[:, :-1] - drawn[:, -1:] * share).mean(1) / len(level))


def shuffled_places(image: Array, seed: int = 0) -> Array:
    """Places (B, n) of keypoints, sorted by image, after permutations of whole images.

    Args:
        image: Image index (n,).
        seed: Seed of the permutations.
    """
    size = np.bincount(image)
    size = size[size > 0]
    begin, rng = np.cumsum(size) - size, np.random.default_rng(seed)
    draws = min(DRAWS, max(FEWEST_DRAWS, MOST_PERMUTED // len(image)))
    places = np.empty((draws, len(image)), dtype=np.int32)
    for row in places:
        order = rng.permutation(len(size))
        moved = size[order]
        row[:] = np.repeat(begin[order] - (np.cumsum(moved) - moved), moved)
    return places + np.arange(len(image), dtype=np.int32)


def variance_floor(predicted: Array, squared: Array, image: Array, places: Array) -> NoiseFloor:
    """Noise floor of the ENCE, from permutations of the standardised squared residuals of whole images.

    Every predicted variance is then right up to a common factor, which is removed. Tails and clusters are kept.

    Args:
        predicted: Predicted variances (n,) in ascending order.
        squared: Squared residuals (n,) in the same order.
        image: Image index (n,) in the same order.
        places: ``shuffled_places`` (B, n) of the images.
    """
    bins, count = min(BINS, len(predicted)), len(predicted)
    if len(np.unique(image)) < FEWEST_IMAGES:
        return UNKNOWN_FLOOR
    order = whole_order(image)
    back = np.empty_like(order)
    back[order] = np.arange(count)  # from the order of images to that of variances
    standard = (squared / predicted)[order]
    standard /= standard.mean()
    # The first bins hold one sample more, as in ``metrics.variance_bins``.
    begin = np.arange(bins) * (count // bins) + np.minimum(np.arange(bins), count % bins)
    ratio = [np.add.reduceat(predicted * standard.take(row.take(back)), begin) for row in places]
    return _summary(np.abs(np.sqrt(ratio / np.add.reduceat(predicted, begin)) - 1).mean(1))


def floors_of(statistics: KeypointStatistics, image: Array, images: int, seed: int = 0) -> dict[str, NoiseFloor]:
    """Noise floors by metric (ace, ace_x, ..., ence_y).

    Args:
        statistics: Statistics of n keypoints.
        image: (n,) image index.
        images: Number of images.
        seed: Seed of the draws.
    """
    signs, places, floors = random_signs(images, seed=seed), shuffled_places(image, seed), {}
    for axis in AXES:
        suffix = "" if axis == "joint" else f"_{axis}"
        floors[f"ace{suffix}"] = coverage_floor(statistics.level[axis], image, signs)
        order = statistics.by_variance[axis]
        floors[f"ence{suffix}"] = variance_floor(*statistics.in_variance_order[axis], image.take(order), places)
    return floors


def _summary(draws: Array) -> NoiseFloor:
    low, high = np.quantile(draws, [0.025, 0.975])
    return NoiseFloor(float(draws.mean()), float(low), float(high))
