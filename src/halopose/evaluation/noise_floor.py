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
from halopose.types import Array

DRAWS = 400
FEWEST_DRAWS, MOST_PERMUTED = 50, 2_000_000  # for the ENCE: draws, and keypoints summed over draws
FEWEST_IMAGES = 10  # with fewer images there is no noise floor


def random_signs(images: int, draws: int = DRAWS, seed: int = 0) -> Array:
    """Random signs (draws, images) of the images.

    Args:
        images: Number of images.
        draws: Number of draws.
        seed: Seed of the draws.
    """
    return np.random.default_rng(seed).integers(0, 2, (draws, images)).astype(np.float64) * 2 - 1


def coverage_floor(level: Array, image: Array, signs: Array) -> NoiseFloor:
    """Noise floor of the ACE.

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


def variance_floor(predicted: Array, squared: Array, image: Array, seed: int = 0) -> NoiseFloor:
    """Noise floor of the ENCE, from permutations of the standardised squared residuals of whole images.

    Every predicted variance is then right up to a common factor, which is removed. Tails and clusters are kept.

    Args:
        predicted: Predicted variances (n,) in ascending order.
        squared: Squared residuals (n,) in the same order.
        image: Image index (n,) in the same order.
        seed: Seed of the permutations of images.
    """
    bins, count = min(BINS, len(predicted)), len(predicted)
    members = np.unique(image)
    if len(members) < FEWEST_IMAGES:
        return UNKNOWN_FLOOR
    # The first bins hold one sample more, as in ``metrics.variance_bins``.
    size, larger = divmod(count, bins)
    number = np.repeat(np.arange(bins), size + (np.arange(bins) < larger))
    total = np.bincount(number, predicted, bins)
    standard = squared / predicted
    standard = standard / standard.mean()
    order = np.argsort(image, kind="stable")
    bin_of, variance, standard = number[order], predicted[order], standard[order]
    parts = np.split(np.arange(count), np.flatnonzero(np.diff(image[order])) + 1)
    rng = np.random.default_rng(seed)
    errors = []
    for _ in range(min(DRAWS, max(FEWEST_DRAWS, MOST_PERMUTED // count))):
        permuted = standard[np.concatenate([parts[place] for place in rng.permutation(len(parts))])]
        ratio = np.bincount(bin_of, variance * permuted, bins) / total
        errors.append(np.abs(np.sqrt(ratio) - 1).mean())
    return _summary(np.array(errors))


def floors_of(statistics: KeypointStatistics, image: Array, images: int, seed: int = 0) -> dict[str, NoiseFloor]:
    """Noise floors by metric (ace, ace_x, ..., ence_y).

    Args:
        statistics: Statistics of n keypoints.
        image: (n,) image index.
        images: Number of images.
        seed: Seed of the draws.
    """
    signs, floors = random_signs(images, seed=seed), {}
    for axis in AXES:
        suffix = "" if axis == "joint" else f"_{axis}"
        floors[f"ace{suffix}"] = coverage_floor(statistics.level[axis], image, signs)
        order = statistics.by_variance[axis]
        floors[f"ence{suffix}"] = variance_floor(*statistics.in_variance_order[axis], image.take(order), seed)
    return floors


def _summary(draws: Array) -> NoiseFloor:
    low, high = np.quantile(draws, [0.025, 0.975])
    return NoiseFloor(float(draws.mean()), float(low), float(high))
