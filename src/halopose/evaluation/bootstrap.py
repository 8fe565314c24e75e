"""Resampling images: how sure a metric is, and a difference of two measured on the same images.

In: metrics under resample_images of images. Out: margins, intervals and paired differences; of a plain share the
standard error in closed form.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from halopose.types import Array

MAY_BE_NEGATIVE = ("nll", "akp_skill")  # other metrics are shares or mean absolute errors


@dataclass(frozen=True)
class Difference:
    """A difference of two metrics and half the width of its 95 % interval."""

    value: float
    margin: float

    @property
    def low(self) -> float:
        return self.value - self.margin

    @property
    def high(self) -> float:
        return self.value + self.margin

    @property
    def decided(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0


def resample_images(images: int, count: int, seed: int = 0) -> Array:
    """Which images are drawn (count, images), with replacement; always the same for the same numbers."""
    return np.random.default_rng(seed).integers(images, size=(count, images))


def half_width(draws: Array | list[float]) -> float:
    """Half the width of a 95 % interval: 1.96 bootstrap standard errors.

    Not the draws' percentiles: ACE and ENCE are means of absolute errors, which resampling noise inflates, so
    the percentiles of a well calibrated law would exclude its own estimate.
    """
    return 1.96 * float(np.std(draws, ddof=1)) if len(draws) > 1 else float("nan")


def confidence_interval(metric: str, estimate: float, draws: Array | list[float]) -> tuple[float, float]:
    """95 % interval around an estimate; that of a metric that cannot be negative ends at 0."""
    margin = half_width(draws)
    low = estimate - margin
    return (low if metric in MAY_BE_NEGATIVE else max(low, 0.0), estimate + margin)


def clustered_share(hits: Array, image: Array) -> tuple[float, float]:
    """Share of hits (n,), and its standard error as a ratio over images (n,), whose samples are not independent.

    >>> share, error = clustered_share(np.array([True, False, False, True]), np.array([1, 2, 3, 4]))
    >>> share, round(error, 3)
    (0.5, 0.289)
    """
    if not len(hits):
        return float("nan"), float("nan")
    place = np.unique(image, return_inverse=True)[1]
    count, share = np.bincount(place), float(np.mean(hits))
    if len(count) < 2:
        return share, float("nan")
    off = np.bincount(place, hits) - share * count
    return share, float(np.sqrt((off @ off) / (len(count) * (len(count) - 1))) / count.mean())


class PairedMetrics:
    """Metrics by name, and each under the same resample_images of images (B,)."""

    estimate: dict[str, float]
    draws: dict[str, Array]

    def margin(self, metric: str) -> float:
        """Half the width of a metric's 95 % interval."""
        return half_width(self.draws[metric])

    def minus(self, other: PairedMetrics, metric: str, of_other: str | None = None) -> Difference:
        """This metric minus another's, paired image by image."""
        second = of_other or metric
        draws = self.draws[metric] - other.draws[second]
        return Difference(self.estimate[metric] - other.estimate[second], half_width(draws))
