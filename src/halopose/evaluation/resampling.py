"""Metrics of true positives under several distributions, with bootstrap draws over images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, partial

import numpy as np

from halopose.calibration.calibrate import DistributionSet
from halopose.errors import HaloposeError
from halopose.evaluation import metrics
from halopose.evaluation.bootstrap import resample_images
from halopose.evaluation.keypoint_statistics import FlatResiduals, KeypointStatistics
from halopose.evaluation.scores import AXES
from halopose.matching.matched_poses import MatchedPoses
from halopose.parallel import run_parallel
from halopose.protocol import Protocol
from halopose.types import Array
from halopose.uncertainty.distributions import Bivariate


def require_matches(matched: MatchedPoses, protocol: Protocol) -> None:
    """Check that there is a matched, labelled keypoint.

    Raises:
        HaloposeError: No detection matches an annotated object.
    """
    if not len(matched) or not matched.labelled.any():
        raise HaloposeError(
            f"no detection matches an annotated object at OKS {protocol.oks_threshold}: check that "
            "predictions and ground truth use the same images, pixels and keypoints"
        )


@dataclass(frozen=True)
class EvaluatedKeypoints:
    """The n labelled keypoints of true positives, before a distribution is applied.

    Attributes:
        residuals: Residuals of all n keypoints.
        kept_residuals: Residuals of the keypoints that pruning keeps.
        kept: (n,) whether pruning keeps the keypoint.
        keypoint: (n,) keypoint index.
        scale: (n,) object scale index.
        scale_count: Number of object scales.
        image: (n,) image index.
        image_count: Number of images that are resampled, including images without a match if they were given.
        visibility: (n,) visibility score, 1 if the model has none.
    """

    residuals: FlatResiduals
    kept_residuals: FlatResiduals
    kept: Array
    keypoint: Array
    scale: Array
    scale_count: int
    image: Array
    image_count: int
    visibility: Array

    @classmethod
    def of(
        cls,
        matched: MatchedPoses,
        distributions: DistributionSet,
        protocol: Protocol,
        scale_edges: Array,
        images: Array | None = None,
    ) -> EvaluatedKeypoints:
        """Flatten true positives.

        Args:
            matched: The true positives.
            distributions: Distributions to evaluate.
            protocol: Settings of the evaluation.
            scale_edges: Object areas that separate the object scales.
            images: Ids of the images to resample; default: the images of the true positives.
        """
        require_matches(matched, protocol)
        labelled = matched.labelled
        instance, keypoint = np.nonzero(labelled)
        kept = distributions.kept(matched)[labelled]
        residuals = FlatResiduals.of(matched)
        images = np.unique(matched.image_ids if images is None else images)
        scale = np.searchsorted(scale_edges, matched.area, side="left")
        visible = matched.visibility
        return cls(
            residuals=residuals,
            kept_residuals=residuals.take(np.flatnonzero(kept)),
            kept=kept,
            keypoint=keypoint,
            scale=scale[instance],
            scale_count=len(scale_edges) + 1,
            image=np.searchsorted(images, matched.image_ids)[instance],
            image_count=len(images),
            visibility=np.ones(len(keypoint)) if visible is None else visible[labelled],
        )

    def statistics_under(
        self, distribution: Bivariate, matched: MatchedPoses, protocol: Protocol
    ) -> tuple[KeypointStatistics, KeypointStatistics]:
        """Statistics of all keypoints and of the kept keypoints under a distribution.

        Args:
            distribution: The distribution.
            matched: The true positives.
            protocol: Settings of the evaluation.
        """
        found = KeypointStatistics.of(distribution, matched, protocol, self.residuals)
        return found, found.take(self.kept, self.kept_residuals)

    @property
    def similarity(self) -> Array:
        """Keypoint similarity (n,)."""
        return self.residuals.similarity


@dataclass(frozen=True)
class ResampledMetrics(EvaluatedKeypoints):
    """Evaluated keypoints with their statistics under each distribution, ready to be resampled.

    Attributes:
        statistics: Statistics of all keypoints by distribution.
        pruned: Statistics of the kept keypoints by distribution.
    """

    statistics: dict[str, KeypointStatistics]
    pruned: dict[str, KeypointStatistics]

    @classmethod
    def of(
        cls,
        matched: MatchedPoses,
        distributions: DistributionSet,
        protocol: Protocol,
        scale_edges: Array,
        images: Array | None = None,
    ) -> ResampledMetrics:
        """Evaluate true positives.

        Args:
            matched: The true positives.
            distributions: Distributions to evaluate.
            protocol: Settings of the evaluation.
            scale_edges: Object areas that separate the object scales.
            images: Ids of the images to resample; default: the images of the true positives.
        """
        evaluated = EvaluatedKeypoints.of(matched, distributions, protocol, scale_edges, images)
        pieces = [
            partial(evaluated.statistics_under, distribution, matched, protocol)
            for distribution in distributions.distributions.values()
        ]
        return cls.join(evaluated, dict(zip(distributions.distributions, run_parallel(pieces), strict=True)))

    @classmethod
    def join(
        cls, evaluated: EvaluatedKeypoints, found: Mapping[str, tuple[KeypointStatistics, KeypointStatistics]]
    ) -> ResampledMetrics:
        """Join evaluated keypoints with their statistics by distribution, of all and of the kept keypoints."""
        return cls(
            **{field.name: getattr(evaluated, field.name) for field in fields(evaluated)},
            statistics={name: whole for name, (whole, _) in found.items()},
            pruned={name: kept for name, (_, kept) in found.items()},
        )

    def scores(self, scales: bool = False) -> dict[str, float]:
        """Metrics without resampling; ``scales`` adds the metrics of each object scale."""
        weight = np.ones(len(self.kept), dtype=np.int64)
        return self._weighted(weight, rounds=10, seed=0) | (self._by_scale(weight) if scales else {})

    def draws(self, count: int, seed: int = 0, scales: bool = False) -> Iterator[dict[str, float]]:
        """Yield the metrics under resamplings of images. The same images and seed give the same resamplings.

        Args:
            count: Number of resamplings.
            seed: Seed of the resampling.
            scales: Add the metrics of each object scale.
        """
        for number, pick in enumerate(resample_images(self.image_count, count, seed)):
            weight = np.bincount(pick, minlength=self.image_count)[self.image]
            yield self._weighted(weight, rounds=1, seed=number) | (self._by_scale(weight) if scales else {})

    def _weighted(self, weight: Array, rounds: int, seed: int) -> dict[str, float]:
        """Metrics as ``distribution.metric``, ``pruned.distribution.metric``, and ranking metrics by name."""
        result: dict[str, float] = {}
        for distribution, statistics in self.statistics.items():
            pruned = self.pruned[distribution].resampled(weight[self.kept])
            result |= {f"{distribution}.{name}": value for name, value in statistics.resampled(weight).items()}
            result |= {f"pruned.{distribution}.{name}": value for name, value in pruned.items()}
        chance = metrics.random_keypoint_precision(self.similarity, weight, rounds=rounds, seed=seed)
        order, hits, ties = self._by_visibility
        total = weight.sum()
        return result | {
            "akp_random": chance,
            "akp_skill": metrics.skill(result["gaussian.akp"], chance),
            "akp_visibility": metrics.keypoint_precision_at(hits, weight[order], ties),
            "kept_fraction": float(weight @ self.kept / total) if total else float("nan"),
        }

    def _by_scale(self, weight: Array) -> dict[str, float]:
        """Gaussian ACE at each object scale, and its standard deviation over scales."""
        level = self.statistics["gaussian"].level["joint"]
        curves = metrics.coverage_of_levels(level, weight, self.scale, self.scale_count)
        by_scale = metrics.average_coverage_error(curves)
        return {
            **{f"scale.{number}.ace": float(value) for number, value in enumerate(by_scale)},
            "scale.spread": float(np.nanstd(by_scale)),
        }

    @cached_property
    def _by_visibility(self) -> tuple[Array, list[Array], Array | None]:
        """Order of descending visibility score, the ranks of the correct keypoints, and ties."""
        order = metrics.falling_order(self.visibility)
        ties = metrics.ties_of(self.visibility[order])
        return order, metrics.hits_by_threshold(metrics.grade(self.similarity)[order]), ties

    @property
    def coverage(self) -> dict[str, dict[str, Array]]:
        """Empirical coverage (99,) by distribution and axis, before pruning."""
        return {
            distribution: {axis: metrics.coverage_of_levels(one.level[axis])[0] for axis in AXES}
            for distribution, one in self.statistics.items()
        }

    @property
    def variance(self) -> dict[str, dict[str, Array]]:
        """Binned predicted and empirical variance by axis, after Gaussian calibration."""
        bins = {
            axis: metrics.variance_bins(*self.statistics["gaussian"].in_variance_order[axis], presorted=True)
            for axis in AXES
        }
        return {axis: {"predicted": one.predicted, "empirical": one.empirical} for axis, one in bins.items()}
