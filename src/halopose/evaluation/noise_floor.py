"""Noise floor: the calibration errors that a perfectly calibrated model would show on the same images.

ACE and ENCE are means of absolute errors, so they are positive even for perfect calibration. The noise floor keeps the
images, their clusters of keypoints and the spread of their errors, and removes the mean error.

ACE: each image's deviation from the empirical curve is multiplied by a random sign (wild cluster bootstrap, Liu 1988;
Cameron, Gelbach and Miller 2008). ENCE: standardised residuals are permuted between images.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halopose.evaluation import metrics
from halopose.evaluation.keypoint_statistics import KeypointStatistics
from halopose.evaluation.match_scores import UNKNOWN_FLOOR, NoiseFloor
from halopose.evaluation.metrics.variance import BINS
from halopose.evaluation.scores import AXES
from halopose.parallel import blocks
from halopose.sorting import whole_order
from halopose.types import Array

DRAWS = 400
FEWEST_DRAWS, MOST_PERMUTED = 50, 2_000_000  # for the ENCE: draws, and keypoints summed over draws
MOST_SIGNS = 4_000_000  # in memory at once
FEWEST_IMAGES = 10  # with fewer images there is no noise floor


def coverage_floors(levels: Sequence[Array], image: Array, images: int, seed: int = 0) -> list[NoiseFloor]:
    """Noise floors of the ACE of several distributions of the same keypoints.

    Args:
        levels: ``level_index`` (n,) of the keypoints, by distribution.
        image: Image index (n,).
        images: Number of images.
        seed: Seed of the random signs.
    """
    counts = np.stack([metrics.level_counts(level, image, images) for level in levels], axis=1)
    if np.count_nonzero(counts[:, 0].any(1)) < FEWEST_IMAGES:
        return [UNKNOWN_FLOOR] * len(levels)
    # Sums of counts are whole numbers, which single precision holds exactly up to 2^24.
    exact = np.float32 if len(image) < 2**24 else np.float64
    columns, rng = counts.reshape(images, -1).astype(exact), np.random.default_rng(seed)
    share = (np.cumsum(counts.sum(0), axis=1) / len(image))[:, :-1]
    draws = []
    for rows in blocks(DRAWS, max(1, MOST_SIGNS // images)):
        signs = rng.integers(0, 2, (rows.stop - rows.start, images)).astype(exact) * 2 - 1
        drawn = np.cumsum((signs @ columns).reshape(len(signs), *counts.shape[1:]), axis=2, dtype=np.float64)
        draws.append(np.abs(drawn[..., :-1] - drawn[..., -1:] * share).mean(2) / len(image))
    return [_summary(column) for column in np.concatenate(draws).T]


def variance_floors(statistics: KeypointStatistics, image: Array, seed: int = 0) -> list[NoiseFloor]:
    """Noise floors of the ENCE by axis, from permutations of the standardised squared residuals of whole images.

    Every predicted variance is then right up to a common factor, which is removed. Tails and clusters are kept.

    Args:
        statistics: Statistics of n keypoints.
        image: Image index (n,).
        seed: Seed of the permutations of images.
    """
    count, size = len(image), np.bincount(image)
    size = size[size > 0]
    if len(size) < FEWEST_IMAGES:
        return [UNKNOWN_FLOOR] * len(AXES)
    bins = min(BINS, count)
    number = np.repeat(np.arange(bins), count // bins + (np.arange(bins) < count % bins))
    columns = [
        _by_image(*statistics.in_variance_order[axis], number, image[statistics.by_variance[axis]]) for axis in AXES
    ]
    total = [np.bincount(bin_of, variance, bins) for bin_of, variance, _ in columns]
    begin, rng = np.cumsum(size) - size, np.random.default_rng(seed)
    draws = []
    for _ in range(min(DRAWS, max(FEWEST_DRAWS, MOST_PERMUTED // count))):
        order = rng.permutation(len(size))
        moved = size[order]
        place = np.repeat(begin[order] - (np.cumsum(moved) - moved), moved) + np.arange(count)
        draws.append([np.bincount(bin_of, variance * standard[place], bins) for bin_of, variance, standard in columns])
    errors = np.abs(np.sqrt(np.array(draws) / total) - 1).mean(2)
    return [_summary(column) for column in errors.T]


def _by_image(predicted: Array, squared: Array, number: Array, image: Array) -> tuple[Array, Array, Array]:
    """Bins, predicted variances and standardised squares (n,), sorted by image, from arrays sorted by variance."""
    standard, order = squared / predicted, whole_order(image)
    return number[order], predicted[order], (standard / standard.mean())[order]


def floors_of(statistics: KeypointStatistics, image: Array, images: int, seed: int = 0) -> dict[str, NoiseFloor]:
    """Noise floors by metric (ace, ace_x, ..., ence_y).

    Args:
        statistics: Statistics of n keypoints.
        image: (n,) image index.
        images: Number of images.
        seed: Seed of the draws.
    """
    found = {
        "ace": coverage_floors([statistics.level[axis] for axis in AXES], image, images, seed),
        "ence": variance_floors(statistics, image, seed),
    }
    suffixes = ["" if axis == "joint" else f"_{axis}" for axis in AXES]
    return {name + suffix: floor for name, row in found.items() for suffix, floor in zip(suffixes, row, strict=True)}


def _summary(draws: Array) -> NoiseFloor:
    low, high = np.quantile(draws, [0.025, 0.975])
    return NoiseFloor(float(draws.mean()), float(low), float(high))
