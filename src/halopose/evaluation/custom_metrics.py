"""Metrics of plug-ins, computed in addition to those of the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from halopose.calibration.calibrate import DISTRIBUTIONS, DistributionSet
from halopose.evaluation.bootstrap import half_width, resample_images
from halopose.evaluation.keypoint_statistics import labelled_distribution
from halopose.evaluation.resampling import EvaluatedKeypoints
from halopose.evaluation.scores import CustomScore
from halopose.matching.matched_poses import MatchedPoses
from halopose.plugins import CustomMetric
from halopose.protocol import Protocol
from halopose.types import Array
from halopose.uncertainty.distributions import Bivariate


def score_custom(
    metrics: Sequence[CustomMetric],
    matched: MatchedPoses,
    distributions: DistributionSet,
    evaluated: EvaluatedKeypoints,
    protocol: Protocol,
) -> dict[str, CustomScore]:
    """Compute metrics of plug-ins for all distributions, before and after pruning.

    Args:
        metrics: Metrics of the installed plug-ins.
        matched: Detections matched to annotated objects.
        distributions: The distributions to compare.
        evaluated: The labelled keypoints of ``matched``.
        protocol: Settings, such as the number of bootstrap draws.
    """
    if not metrics:
        return {}
    parts = {
        **{name: _Subset.of(distributions.distributions[name], matched) for name in DISTRIBUTIONS},
        **{
            f"pruned.{name}": _Subset.of(distributions.distributions[name], matched, evaluated.kept)
            for name in DISTRIBUTIONS
        },
    }
    draws = [
        np.bincount(pick, minlength=evaluated.image_count)[evaluated.image]
        for pick in resample_images(evaluated.image_count, protocol.bootstrap, protocol.seed)
    ]
    return {metric.name: _score(metric, parts, draws, np.ones(len(evaluated.kept), np.int64)) for metric in metrics}


@dataclass(frozen=True)
class _Subset:
    residual: Array
    distribution: Bivariate
    mask: Array

    @classmethod
    def of(cls, distribution: Bivariate, matched: MatchedPoses, kept: Array | None = None) -> _Subset:
        index = np.flatnonzero(matched.labelled)
        mask = np.ones(len(index), dtype=bool) if kept is None else kept
        chosen = index[mask]
        residual = matched.residual.reshape(-1, 2)[chosen]
        return cls(residual, labelled_distribution(distribution, slice(None), chosen), mask)


def _score(metric: CustomMetric, parts: dict[str, _Subset], draws: Sequence[Array], ones: Array) -> CustomScore:
    def value(part: _Subset, weight: Array) -> float:
        return float(metric.compute(part.residual, part.distribution, weight[part.mask]))

    values = {name: value(part, ones) for name, part in parts.items()}
    interval: dict[str, Any] = {}
    if draws:
        margins = {name: half_width([value(part, draw) for draw in draws]) for name, part in parts.items()}
        interval = {name: (values[name] - margin, values[name] + margin) for name, margin in margins.items()}
    return CustomScore(metric.title, values, interval)
