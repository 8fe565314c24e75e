"""What the metrics are made of: per-keypoint statistics of one law, flat and sorted once.

In: a law over (M, K), residuals, labels. Out: scalar summaries by group, curves for plots, and summaries
under resampling weights. All of it is a thin layer over ``halopose.evaluation.metrics``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy import special
from torch import Tensor

from halopose.evaluation import metrics
from halopose.evaluation.scores import AXES, Curves, Points, Summary
from halopose.types import Array
from halopose.uncertainty.distributions import Bivariate, Gaussian, StudentT

_POINTS = 200
_KEYPOINT_POINTS = 41


@dataclass(frozen=True)
class Statistics:
    """Statistics (n,) of the labelled keypoints under one law; dictionaries are keyed by AXES."""

    level: dict[str, Array]  # number of coverage levels too small to hold the truth
    statistic: dict[str, Array]  # squared distance and standardised coordinates; for a Student-t see _surprise
    variance: dict[str, Array]
    squared: dict[str, Array]
    dof: Array | None
    nll: Array
    confidence: Array
    similarity: Array
    residual: Array
    covariance: Array

    @classmethod
    def of(
        cls, law: Bivariate, residual: Array, labelled: Array, confidence: Array, similarity: Array
    ) -> Statistics:
        """Measure residuals (M, K, 2) under the law and flatten the labelled ones."""
        mask = torch.from_numpy(labelled)
        dof = law.dof.expand(mask.shape)[mask] if isinstance(law, StudentT) else None
        covariance = law.covariance[mask].numpy()
        flat = type(law)(law.scale_tril[mask], *(() if dof is None else (dof,)))
        r = torch.from_numpy(residual)[mask]
        distance = flat.mahalanobis(r)
        standard = r / flat.marginal_scale
        tail = flat.standard_cdf(-standard.abs())
        probability = {
            "joint": flat.mahalanobis_cdf(distance),
            "x": 1 - 2 * tail[:, 0],
            "y": 1 - 2 * tail[:, 1],
        }
        statistic = {"joint": distance, "x": standard[:, 0], "y": standard[:, 1]}
        if dof is not None:
            statistic = _surprise(distance, standard, tail, dof)
        squared = np.square(r.numpy())
        return cls(
            level={
                axis: metrics.level_index(value.numpy()).astype(np.uint8) for axis, value in probability.items()
            },
            statistic={axis: value.numpy() for axis, value in statistic.items()},
            variance={
                "joint": (covariance[:, 0, 0] + covariance[:, 1, 1]) / 2,
                "x": covariance[:, 0, 0],
                "y": covariance[:, 1, 1],
            },
            squared={"joint": squared.sum(1) / 2, "x": squared[:, 0], "y": squared[:, 1]},
            dof=None if dof is None else dof.numpy(),
            nll=-flat.log_prob(r).numpy(),
            confidence=confidence[labelled],
            similarity=similarity[labelled],
            residual=r.numpy(),
            covariance=covariance,
        )

    def take(self, mask: Array) -> Statistics:
        """The keypoints of a mask (n,); the orders found so far carry over."""
        index = np.flatnonzero(mask)
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        chosen: dict[str, Any] = {
            name: {axis: column.take(index) for axis, column in value.items()}
            if isinstance(value, dict)
            else None
            if value is None
            else value.take(index, axis=0)
            for name, value in values.items()
        }
        taken = replace(self, **chosen)
        place = np.cumsum(mask) - 1
        by_variance = {axis: place[order[mask[order]]] for axis, order in self.by_variance.items()}
        vars(taken)["by_variance"] = by_variance
        vars(taken)["by_confidence"] = place[self.by_confidence[mask[self.by_confidence]]]
        vars(taken)["grade"] = self.grade.take(index)
        return taken

    @cached_property
    def by_variance(self) -> dict[str, Array]:
        """Order of rising predicted variance."""
        return {axis: metrics.rising_order(self.variance[axis]) for axis in AXES}

    @cached_property
    def by_confidence(self) -> Array:
        """Order of falling confidence; ties keep their order."""
        return metrics.falling_order(self.confidence)

    @cached_property
    def grade(self) -> Array:
        """How many similarity thresholds each keypoint reaches."""
        return metrics.grade(self.similarity)

    @cached_property
    def hits(self) -> list[Array]:
        """Ranks of the correct keypoints at each similarity threshold."""
        return metrics.hits_by_threshold(self.grade[self.by_confidence])

    @cached_property
    def in_variance_order(self) -> dict[str, tuple[Array, Array]]:
        """Predicted variances and squared residuals in order of rising variance."""
        return {
            axis: (self.variance[axis][order], self.squared[axis][order])
            for axis, order in self.by_variance.items()
        }

    def resampled(self, weight: Array) -> dict[str, float]:
        """Scalar metrics with each keypoint counted ``weight`` (n,) times."""
        result: dict[str, float] = {}
        for axis in AXES:
            suffix = "" if axis == "joint" else f"_{axis}"
            curve = metrics.coverage_of_levels(self.level[axis], weight)[0]
            result[f"ace{suffix}"] = float(metrics.average_coverage_error(curve))
            bins = metrics.variance_bins(
                *self.in_variance_order[axis], weight[self.by_variance[axis]], presorted=True
            )
            result[f"ence{suffix}"] = metrics.expected_normalized_calibration_error(bins)
        total = weight.sum()
        result["nll"] = float(weight @ self.nll / total) if total else float("nan")
        result["akp"] = metrics.keypoint_precision_at(self.hits, weight[self.by_confidence])
        return result


def summaries(statistics: Statistics, group: Array, count: int) -> list[Summary]:
    """Scalar metrics and number of keypoints of each of ``count`` groups, by group index (n,)."""
    sizes = np.bincount(group, minlength=count)
    columns: dict[str, list[Any]] = {}
    for axis in AXES:
        suffix = "" if axis == "joint" else f"_{axis}"
        curves = metrics.coverage_of_levels(statistics.level[axis], None, group, count)
        columns[f"ace{suffix}"] = metrics.average_coverage_error(curves).tolist()
        members = _members(statistics.by_variance[axis], group, count)
        columns[f"ence{suffix}"] = metrics.normalized_calibration_errors(
            statistics.variance[axis].take(members), statistics.squared[axis].take(members), sizes
        )
    totals = np.bincount(group, weights=statistics.nll, minlength=count)
    columns["nll"] = [float(t / n) if n else float("nan") for t, n in zip(totals, sizes, strict=True)]
    ranked = statistics.grade.take(_members(statistics.by_confidence, group, count))
    columns["akp"] = metrics.keypoint_precisions(ranked, sizes).tolist()
    columns["count"] = sizes.tolist()
    return [Summary(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def _members(order: Array, group: Array, count: int) -> Array:
    """Indices (n,) group by group, each in the given order."""
    if count == 1:
        return order
    return order.take(np.argsort(group.astype(np.int16).take(order), kind="stable"))


def curves_of(statistics: Statistics, keypoint: Array, names: Sequence[str]) -> Curves:
    """Plot data: coverage, variance bins and Q-Q by axis, Q-Q by keypoint, and the moment matrices.

    Q-Q over all keypoints exists for a Gaussian; Student-t laws differ by keypoint (paper, appendix D.2).
    """
    empirical, predicted = metrics.moment_matching(statistics.residual, statistics.covariance)
    everyone = np.arange(len(keypoint))
    sizes = np.bincount(keypoint, minlength=len(names))
    members = np.split(_members(everyone, keypoint, len(names)), np.cumsum(sizes)[:-1]) if names else []
    return Curves(
        coverage={axis: metrics.coverage_of_levels(statistics.level[axis])[0] for axis in AXES},
        variance={axis: _variance_curve(statistics, axis) for axis in AXES},
        moments_empirical=empirical,
        moments_predicted=predicted,
        qq=None if statistics.dof is not None else _qq(statistics, everyone, _POINTS),
        qq_keypoints={
            name: _qq(statistics, index, _KEYPOINT_POINTS)
            for name, index in zip(names, members, strict=False)
            if len(index)
        },
    )


def _variance_curve(statistics: Statistics, axis: str) -> Points:
    order = statistics.by_variance[axis]
    predicted, squared = statistics.variance[axis][order], statistics.squared[axis][order]
    bins = metrics.variance_bins(predicted, squared, presorted=True)
    return Points(bins.predicted, bins.empirical)


def _qq(statistics: Statistics, members: Array, points: int) -> dict[str, Points]:
    """Q-Q points by axis of some keypoints, under the median of their degrees of freedom."""
    unit = torch.eye(2, dtype=torch.float64)
    law: Bivariate = Gaussian(unit)
    if statistics.dof is not None:
        law = StudentT(unit, torch.tensor(np.median(statistics.dof.take(members))))
    found = {}
    for axis in AXES:
        quantile = law.mahalanobis_quantile if axis == "joint" else law.standard_quantile
        theoretical, empirical = metrics.qq_points(
            statistics.statistic[axis].take(members),
            lambda p: quantile(torch.from_numpy(p)).numpy(),  # noqa: B023
            points,
        )
        if isinstance(law, StudentT):
            empirical = _from_surprise(empirical, float(law.dof), axis)
        found[axis] = Points(theoretical, empirical)
    return found


def _surprise(distance: Tensor, standard: Tensor, tail: Tensor, dof: Tensor) -> dict[str, Tensor]:
    """Minus the log of the probability to lie further out, with the coordinate's sign.

    Folds have slightly different degrees of freedom; on this scale their keypoints can be sorted together.
    """
    signed = -standard.sign() * (2 * tail).log()
    return {"joint": dof / 2 * torch.log1p(distance / dof), "x": signed[:, 0], "y": signed[:, 1]}


def _from_surprise(surprise: Array, nu: float, axis: str) -> Array:
    """The statistic with that surprise under nu degrees of freedom."""
    if axis == "joint":
        return np.asarray(nu * np.expm1(2 / nu * surprise))
    return np.asarray(-np.sign(surprise) * special.stdtrit(nu, np.exp(-np.abs(surprise)) / 2))
