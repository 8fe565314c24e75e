"""Per-keypoint statistics of one distribution, from which metrics, curves and resampled metrics are computed.

This is a thin layer over ``halopose.evaluation.metrics``. Statistics are flat and sorted once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy import special
from torch import Tensor

from halopose.evaluation import metrics
from halopose.evaluation.scores import AXES, CurvePoints, DistributionCurves, MetricSummary
from halopose.matching.matched_poses import MatchedPoses
from halopose.parallel import blocks, stack_columns
from halopose.protocol import Protocol
from halopose.sorting import whole_order
from halopose.types import Array
from halopose.uncertainty.distributions import Bivariate, Gaussian, StudentT
from halopose.uncertainty.pruning import Scalarisation, localization_confidence

_POINTS = 200
_SHARED_CURVES = ("variance", "moments_empirical", "moments_predicted")  # depend on covariances only
_KEYPOINT_POINTS = 41
_MOMENTS = ("xx", "xy", "yy")
_SUFFIXES = {axis: "" if axis == "joint" else f"_{axis}" for axis in AXES}
_OF_COVARIANCE = (*(f"ence{suffix}" for suffix in _SUFFIXES.values()), "akp")
_FEW = 6  # up to this number of groups, selecting each group is as fast as sorting


@dataclass(frozen=True)
class FlatResiduals:
    """The n labelled keypoints, before a distribution is applied.

    Attributes:
        residual: Residuals (n,) along x and y.
        squared: Squared residuals (n,) by AXES; the joint one is half the squared norm.
        similarity: (n,) keypoint similarities.
    """

    residual: dict[str, Array]
    squared: dict[str, Array]
    similarity: Array

    @classmethod
    def of(cls, matched: MatchedPoses) -> FlatResiduals:
        """Flatten the labelled keypoints of true positives."""
        labelled, similarity = matched.labelled, matched.similarity

        def columns(rows: slice) -> dict[str, Array]:
            index = np.flatnonzero(labelled[rows])
            x, y = _coordinates(matched.residual[rows], index)
            squares = np.square(x), np.square(y)
            names = ("x", "y", "squared x", "squared y", "squared joint", "similarity")
            both = (squares[0] + squares[1]) / 2
            return dict(zip(names, (x, y, *squares, both, similarity[rows].take(index)), strict=True))

        found = stack_columns(map(columns, blocks(len(matched))), int(np.count_nonzero(labelled)))
        return cls(
            {axis: found[axis] for axis in ("x", "y")},
            {axis: found[f"squared {axis}"] for axis in AXES},
            found["similarity"],
        )

    def take(self, index: Array) -> FlatResiduals:
        """The keypoints at the given indices."""
        residual, squared = (
            {axis: column.take(index) for axis, column in columns.items()} for columns in (self.residual, self.squared)
        )
        return FlatResiduals(residual, squared, self.similarity.take(index))

    @cached_property
    def grade(self) -> Array:
        """Number of similarity thresholds that each keypoint reaches (n,)."""
        return metrics.grade(self.similarity)


def _coordinates(residual: Array, index: Array) -> tuple[Array, Array]:
    """x and y (n,) of residuals (m, K, 2) at flat keypoint indices (n,)."""
    flat, place = residual.reshape(-1), 2 * index
    return flat.take(place), flat.take(place + 1)


@dataclass(frozen=True)
class KeypointStatistics:
    """Statistics of the n labelled keypoints under one distribution.

    Attributes:
        level: Number of coverage levels (n,) too small to contain the true keypoint, by AXES.
        statistic: Squared Mahalanobis distance and standardised coordinates (n,), by AXES; their surprisal for a
            Student-t.
        covariance: Entries (n,) of the covariance, named xx, xy and yy.
        half_trace: (n,) half the trace of the covariance.
        dof: (n,) degrees of freedom of a Student-t.
        nll: (n,) negative log-likelihood.
        confidence: (n,) localization confidence.
        residuals: The residuals.
    """

    level: dict[str, Array]
    statistic: dict[str, Array]
    covariance: dict[str, Array]
    half_trace: Array
    dof: Array | None
    nll: Array
    confidence: Array
    residuals: FlatResiduals

    @classmethod
    def of(
        cls,
        distribution: Bivariate,
        matched: MatchedPoses,
        protocol: Protocol,
        residuals: FlatResiduals | None = None,
    ) -> KeypointStatistics:
        """Compute the statistics of true positives.

        Args:
            distribution: Distribution of their residuals.
            matched: The true positives.
            protocol: Settings of the evaluation.
            residuals: Flattened residuals, if already computed.
        """
        residuals = residuals or FlatResiduals.of(matched)
        area, kappa = matched.confidence_area(protocol), matched.layout.kappa

        def columns(rows: slice) -> dict[str, Array]:
            index = np.flatnonzero(matched.labelled[rows])
            instance, keypoint = np.divmod(index, len(kappa))
            x, y = _coordinates(matched.residual[rows], index)
            found = _columns(labelled_distribution(distribution, rows, index), x, y)
            found["confidence"] = _confidence(
                found, area[rows].take(instance), kappa.take(keypoint), protocol.scalarisation
            )
            return found

        found = stack_columns(map(columns, blocks(len(matched))), len(residuals.similarity))
        return cls(
            level={axis: found[f"level {axis}"] for axis in AXES},
            statistic={axis: found[f"statistic {axis}"] for axis in AXES},
            covariance={moment: found[moment] for moment in _MOMENTS},
            half_trace=(found["xx"] + found["yy"]) / 2,
            dof=found.get("dof"),
            nll=found["nll"],
            confidence=found["confidence"],
            residuals=residuals,
        )

    def take(self, mask: Array, residuals: FlatResiduals | None = None) -> KeypointStatistics:
        """Statistics of some of the keypoints.

        Args:
            mask: (n,) which keypoints.
            residuals: Their residuals, if already computed.
        """
        index = np.flatnonzero(mask)
        level, statistic, covariance = (
            {name: column.take(index) for name, column in columns.items()}
            for columns in (self.level, self.statistic, self.covariance)
        )
        return KeypointStatistics(
            level,
            statistic,
            covariance,
            self.half_trace.take(index),
            None if self.dof is None else self.dof.take(index),
            self.nll.take(index),
            self.confidence.take(index),
            residuals or self.residuals.take(index),
        )

    def has_covariance(self, covariance: Mapping[str, Array]) -> bool:
        """Whether all covariances equal the given ones (n,) by entry. ENCE, AKP and their curves are then equal."""
        return all(np.array_equal(self.covariance[moment], covariance[moment]) for moment in _MOMENTS)

    @property
    def variance(self) -> dict[str, Array]:
        """Predicted variance (n,) by AXES; the joint one is half the trace."""
        return {"joint": self.half_trace, "x": self.covariance["xx"], "y": self.covariance["yy"]}

    @property
    def squared(self) -> dict[str, Array]:
        """Squared residuals (n,) by AXES; the joint one is half their sum."""
        return self.residuals.squared

    @cached_property
    def by_variance(self) -> dict[str, Array]:
        """Ascending order of predicted variance, by AXES."""
        return {axis: metrics.rising_order(self.variance[axis]) for axis in AXES}

    @cached_property
    def by_statistic(self) -> dict[str, Array]:
        """Ascending order of the statistic, by AXES."""
        return {axis: metrics.rising_order(self.statistic[axis]) for axis in AXES}

    @cached_property
    def by_confidence(self) -> Array:
        """Descending order of confidence."""
        return metrics.falling_order(self.confidence)

    @cached_property
    def ties(self) -> Array | None:
        """Group of equal confidence (n,) of each keypoint in descending order of confidence; None without ties."""
        return metrics.ties_of(self.confidence.take(self.by_confidence))

    @cached_property
    def hits(self) -> list[Array]:
        """Ranks of the correct keypoints at each similarity threshold."""
        return metrics.hits_by_threshold(self.residuals.grade[self.by_confidence])

    @cached_property
    def in_variance_order(self) -> dict[str, tuple[Array, Array]]:
        """Predicted variances and squared residuals in ascending order of variance, by AXES."""
        return {
            axis: (self.variance[axis].take(order), self.squared[axis].take(order))
            for axis, order in self.by_variance.items()
        }

    def resampled(self, weight: Array) -> dict[str, float]:
        """Scalar metrics; each keypoint counts ``weight`` (n,) times."""
        result: dict[str, float] = {}
        for axis, suffix in _SUFFIXES.items():
            curve = metrics.coverage_of_levels(self.level[axis], weight)[0]
            result[f"ace{suffix}"] = float(metrics.average_coverage_error(curve))
            bins = metrics.variance_bins(*self.in_variance_order[axis], weight[self.by_variance[axis]], presorted=True)
            result[f"ence{suffix}"] = metrics.expected_normalized_calibration_error(bins)
        total = weight.sum()
        result["nll"] = float(weight @ self.nll / total) if total else float("nan")
        result["akp"] = metrics.keypoint_precision_at(self.hits, weight[self.by_confidence], self.ties)
        return result


def summaries(statistics: KeypointStatistics, group: Array, count: int) -> list[MetricSummary]:
    """Scalar metrics and number of keypoints by group.

    Args:
        statistics: Statistics of n keypoints.
        group: (n,) group index of each keypoint.
        count: Number of groups.
    """
    return summaries_by(statistics, group, [np.arange(count)])[0]


def summaries_by(
    statistics: KeypointStatistics,
    cell: Array,
    groupings: Sequence[Array],
    reuse: Sequence[Sequence[MetricSummary]] | None = None,
) -> list[list[MetricSummary]]:
    """``summaries`` of several groupings of the same C cells. Keypoints are sorted and counted once, by cell.

    Args:
        statistics: Statistics of n keypoints.
        cell: (n,) cell index of each keypoint.
        groupings: For each grouping, the group index (C,) of each cell.
        reuse: Summaries of a distribution with the same covariances.
    """
    cells = len(groupings[0])
    sizes = [_total(np.bincount(cell, minlength=cells), grouping) for grouping in groupings]
    if reuse is None:
        columns = _by_covariance(statistics, cell, groupings, sizes)
    else:
        columns = [{name: [getattr(one, name) for one in group] for name in _OF_COVARIANCE} for group in reuse]
    levels = {axis: metrics.level_counts(statistics.level[axis], cell, cells) for axis in AXES}
    totals = np.bincount(cell, weights=statistics.nll, minlength=cells)
    result = []
    for found, size, grouping in zip(columns, sizes, groupings, strict=True):
        for axis, suffix in _SUFFIXES.items():
            curves = metrics.coverage_of_counts(_total(levels[axis], grouping))
            found[f"ace{suffix}"] = metrics.average_coverage_error(curves).tolist()
        with np.errstate(invalid="ignore"):
            found["nll"] = (_total(totals, grouping) / size).tolist()
        found["count"] = size.tolist()
        result.append(
            [MetricSummary(**dict(zip(found, row, strict=True))) for row in zip(*found.values(), strict=True)]
        )
    return result


def _by_covariance(
    statistics: KeypointStatistics, cell: Array, groupings: Sequence[Array], sizes: Sequence[Array]
) -> list[dict[str, list[Any]]]:
    """Columns of ``summaries_by`` that depend on covariances only (ENCE and AKP), by grouping."""
    columns: list[dict[str, list[Any]]] = [{} for _ in groupings]
    for axis, suffix in _SUFFIXES.items():
        ordered = statistics.in_variance_order[axis]
        members = _members(cell.take(statistics.by_variance[axis]), groupings)
        for found, size, member in zip(columns, sizes, members, strict=True):
            variance, squared = (each if len(size) == 1 else each.take(member) for each in ordered)
            found[f"ence{suffix}"] = metrics.normalized_calibration_errors(variance, squared, size)
    ranked = statistics.residuals.grade.take(statistics.by_confidence)
    members = _members(cell.take(statistics.by_confidence), groupings)

    def grouped(ranking: Array) -> Array:
        parts = zip(sizes, members, strict=True)
        return np.concatenate([ranking if len(size) == 1 else ranking.take(member) for size, member in parts])

    ties = None if statistics.ties is None else grouped(statistics.ties)
    precisions = metrics.keypoint_precisions(grouped(ranked), np.concatenate(sizes), ties)
    for found, part in zip(columns, np.split(precisions, np.cumsum([len(size) for size in sizes])[:-1]), strict=True):
        found["akp"] = part.tolist()
    return columns


def _total(values: Array, grouping: Array) -> Array:
    """Sums (G, ...) over the cells (C, ...) of each group."""
    result = np.zeros((int(grouping.max()) + 1, *values.shape[1:]), dtype=values.dtype)
    np.add.at(result, grouping, values)
    return result


def _members(cell: Array, groupings: Sequence[Array]) -> list[Array]:
    """Indices of the keypoints in order of their group, for each grouping. ``cell``: (n,) cell of each keypoint."""
    small = [grouping.astype(np.int16) for grouping in groupings]
    return [_sorted_groups(group.take(cell), int(group.max()) + 1) for group in small]


def _sorted_groups(group: Array, count: int) -> Array:
    """Stable ascending order (n,) of small group numbers (n,); empty if there is one group, which needs no order."""
    if count == 1:
        return np.zeros(0, dtype=np.int64)
    if count <= _FEW:
        return np.concatenate([np.flatnonzero(group == number) for number in range(count)])
    return whole_order(group)


def curves_of(
    statistics: KeypointStatistics, keypoint: Array, names: Sequence[str], reuse: DistributionCurves | None = None
) -> DistributionCurves:
    """Plot data: coverage, variance bins and Q-Q by axis, Q-Q by keypoint, and the moment matrices.

    Q-Q over all keypoints exists for a Gaussian only, because a Student-t differs by keypoint (paper, appendix D.2).

    Args:
        statistics: Statistics of n keypoints.
        keypoint: (n,) keypoint index.
        names: Names of the keypoints that get Q-Q points.
        reuse: Curves of a distribution with the same covariances.
    """
    own = _covariance_curves(statistics) if reuse is None else {name: getattr(reuse, name) for name in _SHARED_CURVES}
    return DistributionCurves(
        coverage={axis: metrics.coverage_of_levels(statistics.level[axis])[0] for axis in AXES},
        **own,
        qq=None if statistics.dof is not None else _qq(statistics, np.zeros_like(keypoint), 1, _POINTS)[0],
        qq_keypoints=_qq_keypoints(statistics, keypoint, names) if names and len(keypoint) else {},
    )


def _covariance_curves(statistics: KeypointStatistics) -> dict[str, Any]:
    """The curves that depend on covariances only."""
    residual = statistics.residuals.residual
    empirical, predicted = metrics.moment_matching(
        (residual["x"], residual["y"]), tuple(statistics.covariance[moment] for moment in _MOMENTS)
    )
    bins = {axis: metrics.variance_bins(*statistics.in_variance_order[axis], presorted=True) for axis in AXES}
    variance = {axis: CurvePoints(one.predicted, one.empirical) for axis, one in bins.items()}
    return dict(zip(_SHARED_CURVES, (variance, empirical, predicted), strict=True))


def _qq_keypoints(
    statistics: KeypointStatistics, keypoint: Array, names: Sequence[str]
) -> dict[str, dict[str, CurvePoints]]:
    """Q-Q points of every keypoint that has a sample."""
    known = np.flatnonzero(np.bincount(keypoint, minlength=len(names))).tolist()
    found = _qq(statistics, keypoint, len(names), _KEYPOINT_POINTS)
    return {names[number]: points for number, points in zip(known, found, strict=True)}


def _qq(statistics: KeypointStatistics, group: Array, count: int, points: int) -> list[dict[str, CurvePoints]]:
    """Q-Q points by axis of every non-empty group; a single group may be empty.

    The reference of a Student-t has the median degrees of freedom of the group.

    Args:
        statistics: Statistics of n keypoints.
        group: (n,) group index.
        count: Number of groups.
        points: Maximum number of points per curve.
    """
    sizes = np.bincount(group, minlength=count)
    sizes = sizes[sizes > 0] if count > 1 else sizes
    bounds = np.cumsum(sizes)[:-1]
    positions = [metrics.qq_positions(size, points) for size in sizes.tolist()]
    place = torch.from_numpy(np.concatenate(positions))
    unit = torch.eye(2, dtype=torch.float64)
    distribution: Bivariate = Gaussian(unit)
    if statistics.dof is not None:
        medians = [np.median(dof) for dof in np.split(statistics.dof.take(whole_order(group)), bounds)]
        distribution = StudentT(unit, torch.from_numpy(np.repeat(medians, [len(each) for each in positions])))
    marginal = distribution.standard_quantile(place[:, None])[:, 0].numpy()  # the same for x and y
    theoretical = {"joint": distribution.mahalanobis_quantile(place).numpy(), "x": marginal, "y": marginal}
    ends = np.cumsum([len(each) for each in positions])[:-1]
    columns: dict[str, list[CurvePoints]] = {}
    for axis in AXES:
        order = statistics.by_statistic[axis]
        if count > 1:
            order = order.take(whole_order(group.take(order)))
        parts = np.split(statistics.statistic[axis].take(order), bounds)
        empirical = np.concatenate([metrics.qq_values(part, points, presorted=True) for part in parts])
        if isinstance(distribution, StudentT):
            empirical = _from_surprisal(empirical, distribution.dof.numpy(), axis)
        pairs = zip(np.split(theoretical[axis], ends), np.split(empirical, ends), strict=True)
        columns[axis] = [CurvePoints(*pair) for pair in pairs]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def labelled_distribution(distribution: Bivariate, rows: slice, index: Array) -> Bivariate:
    """Flatten a distribution to labelled keypoints.

    Args:
        distribution: Distribution of (M, K) keypoints.
        rows: Rows to choose from the M true positives.
        index: Flat indices (n,) of the keypoints in these rows.

    Returns:
        Distribution of the n keypoints.
    """

    def taken(values: Tensor, size: int) -> Tensor:
        return torch.from_numpy(values[rows].numpy().reshape(-1, size).take(index, 0))

    factors = taken(distribution.scale_tril, 4).unflatten(1, (2, 2))
    if not isinstance(distribution, StudentT):
        return Gaussian(factors)
    moment = None if distribution.moment is None else taken(distribution.moment, 4).unflatten(1, (2, 2))
    return StudentT(factors, taken(distribution.dof.expand(distribution.scale_tril.shape[:2]), 1)[:, 0], moment)


def _columns(distribution: Bivariate, x: Array, y: Array) -> dict[str, Array]:
    """Statistics (n,) by name of residuals under their distribution (n,)."""
    first, shear, second = (distribution.scale_tril[:, i, j].contiguous() for i, j in ((0, 0), (1, 0), (1, 1)))
    along = torch.from_numpy(x) / first
    distance = along.square() + ((torch.from_numpy(y) - shear * along) / second).square()
    height = shear.square() + second.square()
    # The factor is triangular, so its first entry is the scale along x.
    standard = {"x": along, "y": torch.from_numpy(y) / height.sqrt()}
    both = distribution.standard_cdf(-torch.stack(list(standard.values())).abs().T)
    tail = dict(zip(standard, both.T, strict=True))
    log_det = first.log() + second.log()
    columns = {
        "nll": -(distribution.log_kernel(distance) - log_det - math.log(2 * math.pi)),
        "level joint": distribution.mahalanobis_cdf(distance),
        **{f"level {axis}": 1 - 2 * value for axis, value in tail.items()},
        "statistic joint": distance,
        **{f"statistic {axis}": value for axis, value in standard.items()},
        **_covariance(distribution, first, shear, height),
    }
    if isinstance(distribution, StudentT):
        columns["dof"] = distribution.dof
        columns |= {
            f"statistic {axis}": value for axis, value in _surprisal(distance, standard, tail, distribution.dof).items()
        }
    found = {name: value.numpy() for name, value in columns.items()}
    return found | {f"level {axis}": metrics.level_index(found[f"level {axis}"]).astype(np.uint8) for axis in AXES}


def _covariance(distribution: Bivariate, first: Tensor, shear: Tensor, height: Tensor) -> dict[str, Tensor]:
    """Entries (n,) of the covariance. For a Gaussian they follow from the factor without matrix products."""
    if isinstance(distribution, Gaussian):
        return {"xx": first.square(), "xy": first * shear, "yy": height}
    matrix = distribution.covariance
    return {"xx": matrix[:, 0, 0], "xy": matrix[:, 0, 1], "yy": matrix[:, 1, 1]}


def _confidence(found: Mapping[str, Array], area: Array, kappa: Array, scalarisation: Scalarisation) -> Array:
    """Localization confidence (n,) from the entries (n,) of the covariance."""
    matrix = np.array([[found["xx"], found["xy"]], [found["xy"], found["yy"]]])
    return localization_confidence(matrix.transpose(2, 0, 1)[:, None], area, kappa[:, None], scalarisation)[:, 0]


def _surprisal(
    distance: Tensor, standard: Mapping[str, Tensor], tail: Mapping[str, Tensor], dof: Tensor
) -> dict[str, Tensor]:
    """Surprisal: minus the log of the probability of a larger distance, with the sign of the coordinate.

    Folds have slightly different degrees of freedom. Keypoints of all folds can be sorted together by surprisal.
    """
    signed = {axis: -standard[axis].sign() * (2 * tail[axis]).log() for axis in standard}
    return {"joint": dof / 2 * torch.log1p(distance / dof), **signed}


def _from_surprisal(surprisal: Array, nu: Array, axis: str) -> Array:
    """Statistic (P,) with this surprisal (P,) under nu (P,) degrees of freedom."""
    if axis == "joint":
        return np.asarray(nu * np.expm1(2 / nu * surprisal))
    return np.asarray(-np.sign(surprisal) * special.stdtrit(nu, np.exp(-np.abs(surprisal)) / 2))
