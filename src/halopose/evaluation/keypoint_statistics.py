"""What the metrics are made of: per-keypoint statistics of one law, flat and sorted once.

In: a law over (M, K), true positives. Out: scalar summaries by group, curves for plots, and summaries
under resampling weights. All of it is a thin layer over ``halopose.evaluation.metrics``.
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
_SHARED_CURVES = ("variance", "moments_empirical", "moments_predicted")  # by laws of the same covariances
_KEYPOINT_POINTS = 41
_MOMENTS = ("xx", "xy", "yy")
_ORDERS = ("by_variance", "by_statistic")
_SUFFIXES = {axis: "" if axis == "joint" else f"_{axis}" for axis in AXES}
_OF_COVARIANCE = (*(f"ence{suffix}" for suffix in _SUFFIXES.values()), "akp")
_FEW = 6  # groups that are found one by one as fast as by sorting


@dataclass(frozen=True)
class FlatResiduals:
    """The labelled keypoints (n,) before any law: residuals along x and y, their squares by AXES, similarities."""

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
        taken = FlatResiduals(residual, squared, self.similarity.take(index))
        return taken

    @cached_property
    def grade(self) -> Array:
        """How many similarity thresholds each keypoint reaches."""
        return metrics.grade(self.similarity)


def _coordinates(residual: Array, index: Array) -> tuple[Array, Array]:
    """x and y (n,) of the residuals (m, K, 2) at places (n,) among them."""
    flat, place = residual.reshape(-1), 2 * index
    return flat.take(place), flat.take(place + 1)


@dataclass(frozen=True)
class KeypointStatistics:
    """KeypointStatistics (n,) of the labelled keypoints under one law; dictionaries are keyed by AXES, or by moment."""

    level: dict[str, Array]  # number of coverage levels too small to hold the truth
    statistic: dict[str, Array]  # squared distance and standardised coordinates; for a Student-t see _surprise
    covariance: dict[str, Array]  # xx, xy and yy
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
        """Measure true positives under their law. residuals: theirs, if they are known already."""
        residuals = residuals or FlatResiduals.of(matched)
        area, kappa = matched.confidence_area(protocol), matched.layout.kappa

        def columns(rows: slice) -> dict[str, Array]:
            index = np.flatnonzero(matched.labelled[rows])
            instance, keypoint = np.divmod(index, len(kappa))
            x, y = _coordinates(matched.residual[rows], index)
            found = _under(_labelled(distribution, rows, index), x, y)
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
        """The keypoints of a mask (n,), in the same orders. residuals: theirs, if they are known already."""
        index = np.flatnonzero(mask)
        level, statistic, covariance = (
            {name: column.take(index) for name, column in columns.items()}
            for columns in (self.level, self.statistic, self.covariance)
        )
        taken = KeypointStatistics(
            level,
            statistic,
            covariance,
            self.half_trace.take(index),
            None if self.dof is None else self.dof.take(index),
            self.nll.take(index),
            self.confidence.take(index),
            residuals or self.residuals.take(index),
        )
        return taken

    def as_wide_as(self, covariance: Mapping[str, Array]) -> bool:
        """Whether covariances are the given ones, entry by entry: then all orders but those of statistics are."""
        return all(np.array_equal(self.covariance[moment], covariance[moment]) for moment in _MOMENTS)

    @property
    def variance(self) -> dict[str, Array]:
        """Predicted variance by AXES; the joint one is half the trace."""
        return {"joint": self.half_trace, "x": self.covariance["xx"], "y": self.covariance["yy"]}

    @property
    def squared(self) -> dict[str, Array]:
        """Squared residuals by AXES; the joint one is half their sum."""
        return self.residuals.squared

    @cached_property
    def by_variance(self) -> dict[str, Array]:
        """Order of rising predicted variance."""
        return {axis: metrics.rising_order(self.variance[axis]) for axis in AXES}

    @cached_property
    def by_statistic(self) -> dict[str, Array]:
        """Order of rising statistic."""
        return {axis: metrics.rising_order(self.statistic[axis]) for axis in AXES}

    @cached_property
    def by_confidence(self) -> Array:
        """Order of falling confidence; ties keep their order."""
        return metrics.falling_order(self.confidence)

    @cached_property
    def hits(self) -> list[Array]:
        """Ranks of the correct keypoints at each similarity threshold."""
        return metrics.hits_by_threshold(self.residuals.grade[self.by_confidence])

    @cached_property
    def in_variance_order(self) -> dict[str, tuple[Array, Array]]:
        """Predicted variances and squared residuals in order of rising variance."""
        return {
            axis: (self.variance[axis].take(order), self.squared[axis].take(order))
            for axis, order in self.by_variance.items()
        }

    def resampled(self, weight: Array) -> dict[str, float]:
        """Scalar metrics with each keypoint counted ``weight`` (n,) times."""
        result: dict[str, float] = {}
        for axis, suffix in _SUFFIXES.items():
            curve = metrics.coverage_of_levels(self.level[axis], weight)[0]
            result[f"ace{suffix}"] = float(metrics.average_coverage_error(curve))
            bins = metrics.variance_bins(*self.in_variance_order[axis], weight[self.by_variance[axis]], presorted=True)
            result[f"ence{suffix}"] = metrics.expected_normalized_calibration_error(bins)
        total = weight.sum()
        result["nll"] = float(weight @ self.nll / total) if total else float("nan")
        result["akp"] = metrics.keypoint_precision_at(self.hits, weight[self.by_confidence])
        return result


def summaries(statistics: KeypointStatistics, group: Array, count: int) -> list[MetricSummary]:
    """Scalar metrics and number of keypoints of each of ``count`` groups, by group index (n,)."""
    return summaries_by(statistics, group, [np.arange(count)])[0]


def summaries_by(
    statistics: KeypointStatistics,
    cell: Array,
    groupings: Sequence[Array],
    like: Sequence[Sequence[MetricSummary]] | None = None,
) -> list[list[MetricSummary]]:
    """``summaries`` of several groupings of the same cells. cell (n,): index; groupings (C,): the group of each.

    Keypoints are sorted and counted once, by cell. like: those of a law with the same covariances.
    """
    cells = len(groupings[0])
    sizes = [_total(np.bincount(cell, minlength=cells), grouping) for grouping in groupings]
    if like is None:
        columns = _by_covariance(statistics, cell, groupings, sizes)
    else:
        columns = [{name: [getattr(one, name) for one in group] for name in _OF_COVARIANCE} for group in like]
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
    """The columns of ``summaries_by`` that look at a law's covariances alone, ENCE and AKP, by grouping."""
    columns: list[dict[str, list[Any]]] = [{} for _ in groupings]
    for axis, suffix in _SUFFIXES.items():
        ordered = statistics.in_variance_order[axis]
        members = _members(cell.take(statistics.by_variance[axis]), groupings)
        for found, size, member in zip(columns, sizes, members, strict=True):
            variance, squared = (each if len(size) == 1 else each.take(member) for each in ordered)
            found[f"ence{suffix}"] = metrics.normalized_calibration_errors(variance, squared, size)
    ranked = statistics.residuals.grade.take(statistics.by_confidence)
    members = _members(cell.take(statistics.by_confidence), groupings)
    grades = np.concatenate(
        [ranked if len(size) == 1 else ranked.take(member) for size, member in zip(sizes, members, strict=True)]
    )
    precisions = metrics.keypoint_precisions(grades, np.concatenate(sizes))
    for found, part in zip(columns, np.split(precisions, np.cumsum([len(size) for size in sizes])[:-1]), strict=True):
        found["akp"] = part.tolist()
    return columns


def _total(values: Array, grouping: Array) -> Array:
    """Sums (G, ...) over the cells (C, ...) of each group."""
    result = np.zeros((int(grouping.max()) + 1, *values.shape[1:]), dtype=values.dtype)
    np.add.at(result, grouping, values)
    return result


def _members(cell: Array, groupings: Sequence[Array]) -> list[Array]:
    """Where keypoints, by cell (n,), of each group stand, group by group, under each of the groupings."""
    small = [grouping.astype(np.int16) for grouping in groupings]
    return [_sorted_groups(group.take(cell), int(group.max()) + 1) for group in small]


def _sorted_groups(group: Array, count: int) -> Array:
    """Indices (n,) of small numbers (n,) in rising order; none where there is one group: all are in order."""
    if count == 1:
        return np.zeros(0, dtype=np.int64)
    if count <= _FEW:
        return np.concatenate([np.flatnonzero(group == number) for number in range(count)])
    return whole_order(group)


def curves_of(
    statistics: KeypointStatistics, keypoint: Array, names: Sequence[str], like: DistributionCurves | None = None
) -> DistributionCurves:
    """Plot data: coverage, variance bins and Q-Q by axis, Q-Q by keypoint, and the moment matrices.

    Q-Q over all keypoints exists for a Gaussian; Student-t laws differ by keypoint (paper, appendix D.2). like: of
    a law with the same covariances.
    """
    own = _covariance_curves(statistics) if like is None else {name: getattr(like, name) for name in _SHARED_CURVES}
    return DistributionCurves(
        coverage={axis: metrics.coverage_of_levels(statistics.level[axis])[0] for axis in AXES},
        **own,
        qq=None if statistics.dof is not None else _qq(statistics, np.zeros_like(keypoint), 1, _POINTS)[0],
        qq_keypoints=_qq_keypoints(statistics, keypoint, names) if names else {},
    )


def _covariance_curves(statistics: KeypointStatistics) -> dict[str, Any]:
    """The curves that look at a law's covariances alone."""
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
    """Q-Q points of each keypoint that there is."""
    known = np.flatnonzero(np.bincount(keypoint, minlength=len(names))).tolist()
    found = _qq(statistics, keypoint, len(names), _KEYPOINT_POINTS)
    return {names[number]: points for number, points in zip(known, found, strict=True)}


def _qq(statistics: KeypointStatistics, group: Array, count: int, points: int) -> list[dict[str, CurvePoints]]:
    """Q-Q points by axis of those of ``count`` groups, by index (n,), that there are; a single one may be empty.

    Each is under the median of its degrees of freedom.
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
    marginal = distribution.standard_quantile(place[:, None])[:, 0].numpy()  # of x and of y
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
            empirical = _from_surprise(empirical, distribution.dof.numpy(), axis)
        pairs = zip(np.split(theoretical[axis], ends), np.split(empirical, ends), strict=True)
        columns[axis] = [CurvePoints(*pair) for pair in pairs]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _labelled(distribution: Bivariate, rows: slice, index: Array) -> Bivariate:
    """The law (n,) of keypoints at places (n,) among those of some rows, one after the other."""

    def taken(values: Tensor, size: int) -> Tensor:
        return torch.from_numpy(values[rows].numpy().reshape(-1, size).take(index, 0))

    factors = taken(distribution.scale_tril, 4).unflatten(1, (2, 2))
    if not isinstance(distribution, StudentT):
        return Gaussian(factors)
    moment = None if distribution.moment is None else taken(distribution.moment, 4).unflatten(1, (2, 2))
    return StudentT(factors, taken(distribution.dof.expand(distribution.scale_tril.shape[:2]), 1)[:, 0], moment)


def _under(distribution: Bivariate, x: Array, y: Array) -> dict[str, Array]:
    """Columns (n,) of residuals under their law (n,), by name."""
    first, shear, second = (distribution.scale_tril[:, i, j].contiguous() for i, j in ((0, 0), (1, 0), (1, 1)))
    along = torch.from_numpy(x) / first
    distance = along.square() + ((torch.from_numpy(y) - shear * along) / second).square()
    height = shear.square() + second.square()
    # The factor is triangular: its first entry is the scale of x.
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
            f"statistic {axis}": value for axis, value in _surprise(distance, standard, tail, distribution.dof).items()
        }
    found = {name: value.numpy() for name, value in columns.items()}
    return found | {f"level {axis}": metrics.level_index(found[f"level {axis}"]).astype(np.uint8) for axis in AXES}


def _covariance(distribution: Bivariate, first: Tensor, shear: Tensor, height: Tensor) -> dict[str, Tensor]:
    """Its entries (n,). A Gaussian's from its factor's: products of many small matrices take five times longer."""
    if isinstance(distribution, Gaussian):
        return {"xx": first.square(), "xy": first * shear, "yy": height}
    matrix = distribution.covariance
    return {"xx": matrix[:, 0, 0], "xy": matrix[:, 0, 1], "yy": matrix[:, 1, 1]}


def _confidence(found: Mapping[str, Array], area: Array, kappa: Array, scalarisation: Scalarisation) -> Array:
    """Localization confidence (n,) of covariances given by their entries (n,)."""
    matrix = np.array([[found["xx"], found["xy"]], [found["xy"], found["yy"]]])
    return localization_confidence(matrix.transpose(2, 0, 1)[:, None], area, kappa[:, None], scalarisation)[:, 0]


def _surprise(
    distance: Tensor, standard: Mapping[str, Tensor], tail: Mapping[str, Tensor], dof: Tensor
) -> dict[str, Tensor]:
    """Minus the log of the probability to lie further out, with the coordinate's sign.

    Folds have slightly different degrees of freedom; on this scale their keypoints can be sorted together.
    """
    signed = {axis: -standard[axis].sign() * (2 * tail[axis]).log() for axis in standard}
    return {"joint": dof / 2 * torch.log1p(distance / dof), **signed}


def _from_surprise(surprise: Array, nu: Array, axis: str) -> Array:
    """The statistic (P,) with that surprise (P,) under nu (P,) degrees of freedom."""
    if axis == "joint":
        return np.asarray(nu * np.expm1(2 / nu * surprise))
    return np.asarray(-np.sign(surprise) * special.stdtrit(nu, np.exp(-np.abs(surprise)) / 2))
