"""Bootstrap over images: intervals of metrics, and of paired differences between two models on the same images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import special

from halopose.types import Array

MAY_BE_NEGATIVE = ("nll", "akp_skill")  # other metrics are shares or mean absolute errors


@dataclass(frozen=True)
class Difference:
    """Difference of two metrics.

    Attributes:
        value: The difference.
        margin: Half the width of its 95 % interval.
        p: Probability of a difference at least as large if there is none in truth; NaN if it was not computed.
    """

    value: float
    margin: float
    p: float = float("nan")

    @property
    def low(self) -> float:
        return self.value - self.margin

    @property
    def high(self) -> float:
        return self.value + self.margin

    @property
    def significant(self) -> bool:
        """Whether the 95 % interval excludes zero."""
        return self.low > 0 or self.high < 0


def resample_images(images: int, count: int, seed: int = 0) -> Array:
    """Draw images with replacement. The same arguments give the same draws.

    Args:
        images: Number of images.
        count: Number of resamplings.
        seed: Seed of the draws.

    Returns:
        Indices (count, images) of the images.
    """
    return np.random.default_rng(seed).integers(images, size=(count, images))


def half_width(draws: Array | list[float]) -> float:
    """Half the width of a 95 % interval: 1.96 bootstrap standard errors.

    Percentiles of the draws are not used: ACE and ENCE are means of absolute errors, which resampling noise
    inflates. The percentiles of a well calibrated distribution would exclude its own estimate.
    """
    return 1.96 * float(np.std(draws, ddof=1)) if len(draws) > 1 else float("nan")


def repeated_difference(values: Array, draws: Array) -> Difference:
    """Mean difference over seeds, with the variance of images and of seeds together.

    The variance over images is that of the mean over seeds under resampling. The variance of training is that between
    seeds over their number. The interval takes a Student-t with Satterthwaite's degrees of freedom, as seeds are few.

    Args:
        values: (S,) difference with each seed.
        draws: (S, B) difference with each seed under resamplings of images that all seeds share.
    """
    value, count = float(np.mean(values)), len(values)
    images = float(np.var(draws.mean(0), ddof=1)) if draws.shape[1] > 1 else float("nan")
    training = float(np.var(values, ddof=1)) / count if count > 1 else 0.0
    error = float(np.sqrt(images + training))
    if error == 0:
        return Difference(value, 0.0, 0.0 if value else 1.0)
    share = training / (images + training)
    dof = (count - 1) / share**2 if share > 0 else np.inf
    margin = float(special.stdtrit(dof, 0.975) if np.isfinite(dof) else 1.96) * error
    tail = special.stdtr(dof, -abs(value) / error) if np.isfinite(dof) else special.ndtr(-abs(value) / error)
    return Difference(value, margin, float(2 * tail))


def holm(p: Array) -> Array:
    """P-values (n,) adjusted for n tests by Holm's method; NaN is the p-value of a test that was not made.

    Example:
        >>> holm(np.array([0.01, 0.04, 0.03])).tolist()
        [0.03, 0.06, 0.06]
    """
    adjusted = np.full(len(p), np.nan)
    order = np.argsort(p)[: int(np.isfinite(p).sum())]
    factors = np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * factors), 1.0)
    return adjusted


def confidence_interval(metric: str, estimate: float, draws: Array | list[float]) -> tuple[float, float]:
    """95 % interval around an estimate, cut at 0 for a metric that cannot be negative.

    Args:
        metric: Name of the metric.
        estimate: Its value without resampling.
        draws: Its values under resamplings of images.

    Returns:
        Lower and upper end.
    """
    margin = half_width(draws)
    low = estimate - margin
    return (low if metric in MAY_BE_NEGATIVE else max(low, 0.0), estimate + margin)


def clustered_share(hits: Array, image: Array) -> tuple[float, float]:
    """Share of hits, and its standard error with images as clusters.

    Samples of one image are not independent, so the standard error is that of a ratio over images.

    Args:
        hits: (n,) booleans.
        image: (n,) image of each sample.

    Example:
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
    """Metrics of one model on a set of images, with bootstrap draws that other models on these images share.

    Attributes:
        estimate: Metrics by name.
        draws: Each metric under the same B resamplings of images (B,).
    """

    estimate: dict[str, float]
    draws: dict[str, Array]

    def margin(self, metric: str) -> float:
        """Half the width of the 95 % interval of a metric."""
        return half_width(self.draws[metric])

    def minus(self, other: PairedMetrics, metric: str, of_other: str | None = None) -> Difference:
        """Paired difference to a metric of another model.

        Args:
            other: The other model.
            metric: Name of the metric.
            of_other: Its name in the other model, if it differs.
        """
        second = of_other or metric
        draws = self.draws[metric] - other.draws[second]
        return Difference(self.estimate[metric] - other.estimate[second], half_width(draws))
