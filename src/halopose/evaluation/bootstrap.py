"""Metrics under resamplings of images that several models or rows share, so that differences are paired.

In: true positives and what was fitted on others. Out: every scalar metric by name, and its bootstrap draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from halopose.errors import HaloposeError
from halopose.evaluation import metrics
from halopose.evaluation.calibrations import Fitted
from halopose.evaluation.keypoint_statistics import AXES, Statistics
from halopose.evaluation.matching import keypoint_similarity
from halopose.evaluation.true_positives import MatchedPoses, Protocol
from halopose.poses import Array
from halopose.uncertainty.pruning import localization_confidence

SCALES = 5  # object scales, with as many instances each


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


def margin_of(draws: Array) -> float:
    """1.96 bootstrap standard errors; for why not percentiles see ``evaluation``."""
    return 1.96 * float(np.std(draws, ddof=1)) if len(draws) > 1 else float("nan")


def resamplings(images: int, count: int) -> Array:
    """Which images are drawn (count, images), with replacement; always the same for the same numbers."""
    return np.random.default_rng(0).integers(images, size=(count, images))


class Paired:
    """Metrics by name, and each under the same resamplings of images (B,)."""

    estimate: dict[str, float]
    draws: dict[str, Array]

    def margin(self, metric: str) -> float:
        """Half the width of a metric's 95 % interval."""
        return margin_of(self.draws[metric])

    def minus(self, other: Paired, metric: str, of_other: str | None = None) -> Difference:
        """This metric minus another's, paired image by image."""
        second = of_other or metric
        draws = self.draws[metric] - other.draws[second]
        return Difference(self.estimate[metric] - other.estimate[second], margin_of(draws))


@dataclass(frozen=True)
class Measured:
    """Evaluated keypoints (n,) of one row: statistics by regime, and image, scale and fate of each."""

    statistics: dict[str, Statistics]
    pruned: dict[str, Statistics]
    kept: Array
    image: Array
    images: int
    scale: Array
    scales: list[str]

    @classmethod
    def of(
        cls, matched: MatchedPoses, fitted: Fitted, protocol: Protocol, images: Array | None = None
    ) -> Measured:
        """Measure true positives under what was fitted on others.

        images: ids to resample, where models that match in different images are compared; else all that match.
        """
        if not len(matched) or not matched.labelled.any():
            raise HaloposeError("no detection of the evaluation images matches an object: give more images")
        laws = {name: law for name, law in fitted.regimes(matched).laws.items() if name != "uncalibrated"}
        area, labelled = matched.confidence_area(protocol), matched.labelled
        confidence = {
            name: localization_confidence(law.covariance.numpy(), area, matched.sigmas, protocol.scalarisation)
            for name, law in laws.items()
        }
        similarity = keypoint_similarity(matched.residual, matched.area, matched.sigmas)
        statistics = {
            name: Statistics.of(law, matched.residual, labelled, confidence[name], similarity)
            for name, law in laws.items()
        }
        kept = (confidence["gaussian"] >= fitted.threshold)[labelled]
        instance = np.nonzero(labelled)[0]
        images = np.unique(matched.image_ids if images is None else images)
        edges = np.quantile(matched.area, np.arange(1, SCALES) / SCALES)
        return cls(
            statistics=statistics,
            pruned={name: one.take(kept) for name, one in statistics.items()},
            kept=kept,
            image=np.searchsorted(images, matched.image_ids)[instance],
            images=len(images),
            scale=np.searchsorted(edges, matched.area)[instance],
            scales=_scale_names(np.sqrt(edges)),
        )

    def draws(self, count: int) -> Iterator[dict[str, float]]:
        """Metrics under resamplings of images, the same for every row of the same images."""
        for number, pick in enumerate(resamplings(self.images, count)):
            weight = np.bincount(pick, minlength=self.images)[self.image]
            yield self._weighted(weight, rounds=1, seed=number)

    def scores(self) -> dict[str, float]:
        """Metrics of the images as they are."""
        return self._weighted(np.ones(len(self.kept), dtype=np.int64), rounds=10, seed=0)

    def _weighted(self, weight: Array, rounds: int, seed: int) -> dict[str, float]:
        result: dict[str, float] = {}
        for regime, statistics in self.statistics.items():
            pruned = self.pruned[regime].resampled(weight[self.kept])
            result |= {f"{regime}.{name}": value for name, value in statistics.resampled(weight).items()}
            result |= {f"pruned.{regime}.{name}": value for name, value in pruned.items()}
        gaussian = self.statistics["gaussian"]
        chance = metrics.random_keypoint_precision(gaussian.similarity, weight, rounds=rounds, seed=seed)
        curves = metrics.coverage_of_levels(gaussian.level["joint"], weight, self.scale, SCALES)
        by_scale = metrics.average_coverage_error(curves)
        return result | {
            "akp_skill": metrics.skill(result["gaussian.akp"], chance),
            "kept_fraction": float(weight @ self.kept / max(weight.sum(), 1)),
            **{f"scale.{number}.ace": float(value) for number, value in enumerate(by_scale)},
            "scale.spread": float(np.nanstd(by_scale)),
        }

    @property
    def coverage(self) -> dict[str, dict[str, Array]]:
        """Empirical coverage (99,) by regime and axis, before pruning."""
        return {
            regime: {axis: metrics.coverage_of_levels(one.level[axis])[0] for axis in AXES}
            for regime, one in self.statistics.items()
        }

    @property
    def variance(self) -> dict[str, dict[str, Array]]:
        """Predicted and actual variance in bins, by axis, after Gaussian calibration."""
        bins = {
            axis: metrics.variance_bins(*self.statistics["gaussian"].in_variance_order[axis], presorted=True)
            for axis in AXES
        }
        return {axis: {"predicted": one.predicted, "empirical": one.empirical} for axis, one in bins.items()}


def _scale_names(sides: Array) -> list[str]:
    """Bins of the object's side in pixels, in words."""
    inner = [f"{low:.0f} to {high:.0f}" for low, high in pairwise(sides)]
    return [f"under {sides[0]:.0f}", *inner, f"over {sides[-1]:.0f}"]
