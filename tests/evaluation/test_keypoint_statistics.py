"""Keypoint statistics against their definitions, weights as copies, and diagnostics that detect every flaw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from halopose import parallel
from halopose.calibration.calibrate import stated_distribution
from halopose.evaluation.keypoint_statistics import (
    FlatResiduals,
    KeypointStatistics,
    curves_of,
    summaries,
    summaries_by,
)
from halopose.evaluation.scores import AXES, METRICS, CurvePoints, DistributionCurves, MetricSummary
from halopose.matching.matched_poses import MatchedPoses
from halopose.protocol import Protocol
from halopose.types import Array
from halopose.uncertainty.distributions import Bivariate, Gaussian, StudentT
from tests.helpers.evaluations import partly_labelled, poses

SEEDS = st.integers(0, 2**32 - 1)


def statistics_of(distribution: Bivariate, matched: MatchedPoses) -> KeypointStatistics:
    return KeypointStatistics.of(distribution, matched, Protocol())


def overall(statistics: KeypointStatistics) -> MetricSummary:
    return summaries(statistics, np.zeros(len(statistics.nll), dtype=np.int64), 1)[0]


def diagnose(distribution: Bivariate, matched: MatchedPoses) -> tuple[MetricSummary, DistributionCurves]:
    """Scalars and plot data of one distribution."""
    statistics = statistics_of(distribution, matched)
    return overall(statistics), curves_of(statistics, np.nonzero(matched.labelled)[1], matched.layout.names)


def qq_ratio(curves: DistributionCurves, axis: str, low: float, high: float, name: str = "k0") -> float:
    """Mean of empirical over theoretical quantiles between two positions."""
    points = curves.qq_keypoints[name][axis] if curves.qq is None else curves.qq[axis]
    start, stop = int(low * len(points.expected)), int(high * len(points.expected))
    return float(np.mean((points.empirical / points.expected)[start:stop]))


# --- the right distribution passes, every flaw is detected ---------------------------------------------------


@pytest.fixture(scope="module", params=[None, 5], ids=["gaussian", "student-t"])
def truthful(request: pytest.FixtureRequest) -> MatchedPoses:
    """200,000 keypoints that follow their predicted distribution."""
    return poses(50_000, 4, request.param, seed=1)


def test_data_drawn_from_the_model_are_calibrated(truthful: MatchedPoses) -> None:
    summary, curves = diagnose(stated_distribution(truthful), truthful)
    assert summary.count == 200_000
    for axis in ("", "_x", "_y"):
        assert summary.metric(f"ace{axis}") <= 0.003
        assert summary.metric(f"ence{axis}") <= 0.02
    assert qq_ratio(curves, "joint", 0.3, 0.9) == pytest.approx(1, abs=0.03)
    assert qq_ratio(curves, "x", 0.7, 0.9) == pytest.approx(1, abs=0.03)
    assert qq_ratio(curves, "y", 0.1, 0.3) == pytest.approx(1, abs=0.03)
    size = np.trace(curves.moments_predicted)
    np.testing.assert_allclose(curves.moments_empirical / size, curves.moments_predicted / size, atol=0.05)


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_every_diagnostic_sees_a_scale_error(truthful: MatchedPoses, factor: float) -> None:
    distribution = stated_distribution(truthful)
    flawed: Bivariate = replace(distribution, scale_tril=distribution.scale_tril * factor)
    if isinstance(flawed, StudentT):
        flawed = replace(flawed, moment=distribution.covariance * factor**2)
    right, _ = diagnose(distribution, truthful)
    wrong, curves = diagnose(flawed, truthful)
    for axis in ("", "_x", "_y"):
        assert wrong.metric(f"ace{axis}") > 0.015 > 5 * right.metric(f"ace{axis}")
        assert wrong.metric(f"ence{axis}") == pytest.approx(abs(1 / factor - 1), abs=0.03)
        assert wrong.metric(f"ence{axis}") > 3 * right.metric(f"ence{axis}")
    assert wrong.nll > right.nll + 0.005
    assert qq_ratio(curves, "joint", 0.3, 0.8) == pytest.approx(factor**-2, rel=0.03)
    assert qq_ratio(curves, "x", 0.7, 0.9) == pytest.approx(1 / factor, rel=0.03)


def test_coverage_and_qq_see_a_wrong_tail(truthful: MatchedPoses) -> None:
    """The covariance is right and the shape is wrong: variance calibration alone does not detect it."""
    distribution = stated_distribution(truthful)
    flawed: Bivariate
    if isinstance(distribution, StudentT):
        flawed = Gaussian(torch.linalg.cholesky(distribution.covariance))
    else:
        flawed = StudentT(
            distribution.scale_tril * (3 / 5) ** 0.5, torch.full((4,), 5.0).double(), distribution.covariance
        )
    right, _ = diagnose(distribution, truthful)
    wrong, curves = diagnose(flawed, truthful)
    assert wrong.ence == pytest.approx(right.ence, rel=1e-6)
    for axis in ("", "_x", "_y"):
        assert wrong.metric(f"ace{axis}") > 0.015 > 5 * right.metric(f"ace{axis}")
    assert wrong.nll > right.nll + 0.01
    tail, body = qq_ratio(curves, "joint", 0.95, 1), qq_ratio(curves, "joint", 0.2, 0.5)
    if isinstance(distribution, StudentT):
        assert tail > 1.5  # further out than a Gaussian goes
        assert body < 0.95
    else:
        assert tail < 0.7
        assert body > 1.05


def test_marginals_and_nll_see_swapped_axes(truthful: MatchedPoses) -> None:
    distribution = stated_distribution(truthful)
    scale, covariance = (matrix[..., ::-1, ::-1].copy() for matrix in (truthful.scale, truthful.covariance))
    swapped = replace(truthful, scale=scale, covariance=covariance)
    right, _ = diagnose(distribution, truthful)
    wrong, _ = diagnose(stated_distribution(swapped), swapped)
    for axis in ("_x", "_y"):
        assert wrong.metric(f"ace{axis}") > 0.02
        assert wrong.metric(f"ence{axis}") > 0.1
    assert wrong.nll > right.nll + 0.1
    assert wrong.ence == pytest.approx(right.ence, rel=1e-6)  # the trace is the same


# --- definitions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nu", [None, 4])
def test_statistics_are_their_definitions(nu: float | None) -> None:
    """Coverage by the inequalities of the paper (eqs. 25, 26 and appendix D.1), Q-Q by appendix D.2."""
    matched = partly_labelled(poses(400, 3, nu, seed=3))
    distribution = stated_distribution(matched)
    scalars, curves = diagnose(distribution, matched)
    mask = matched.labelled
    residual, scale, covariance = (
        matched.residual[mask],
        matched.scale[mask],
        distribution.covariance.numpy()[mask],
    )
    distance = np.einsum("ni,nij,nj->n", residual, np.linalg.inv(scale), residual)
    standard = residual / np.sqrt(np.diagonal(scale, axis1=1, axis2=2))
    joint, marginal = (stats.chi2(2), stats.norm()) if nu is None else (stats.f(2, nu), stats.t(nu))
    limit = 1 if nu is None else 2
    levels = np.arange(1, 100) / 100
    np.testing.assert_allclose(curves.coverage["joint"], [(distance <= limit * joint.ppf(a)).mean() for a in levels])
    for i, axis in enumerate("xy"):
        expected = [(np.abs(standard[:, i]) <= marginal.ppf((1 + a) / 2)).mean() for a in levels]
        np.testing.assert_allclose(curves.coverage[axis], expected)
    assert scalars.ace == pytest.approx(np.abs(curves.coverage["joint"] - levels).mean(), rel=1e-12)
    assert scalars.count == mask.sum()
    nll = -distribution.log_prob(torch.from_numpy(matched.residual)).numpy()[mask]
    assert scalars.nll == pytest.approx(nll.mean(), rel=1e-12)
    order = np.argsort(covariance.trace(axis1=1, axis2=2))
    parts = np.array_split(order, 20)
    half = (residual**2).sum(1) / 2
    np.testing.assert_allclose(curves.variance["joint"].empirical, [half[p].mean() for p in parts])
    for k, name in enumerate(matched.layout.names):
        mine = np.nonzero(mask)[1] == k
        for i, axis in enumerate("xy"):
            assert_on_qq(curves.qq_keypoints[name][axis], standard[mine, i], marginal.ppf)
        assert_on_qq(curves.qq_keypoints[name]["joint"], distance[mine], lambda p: limit * joint.ppf(p))
    assert (curves.qq is None) == (nu is not None)


def assert_on_qq(points: CurvePoints, values: Array, quantile: Callable[[Array], Array]) -> None:
    """Every point is (q((n - 1/2) / N), n-th smallest value) for some n."""
    expected = quantile((np.arange(len(values)) + 0.5) / len(values))
    rank = np.abs(expected[:, None] - points.expected).argmin(0)
    np.testing.assert_allclose(points.expected, expected[rank], rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(points.empirical, np.sort(values)[rank], rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("nu", [None, 4])
def test_resampling_with_ones_changes_nothing(nu: float | None) -> None:
    matched = partly_labelled(poses(500, 3, nu, seed=4))
    statistics = statistics_of(stated_distribution(matched), matched)
    whole = overall(statistics)
    resampled = statistics.resampled(np.ones(len(statistics.nll), dtype=int))
    assert set(resampled) == set(METRICS)
    for name, value in resampled.items():
        assert value == pytest.approx(whole.metric(name), rel=1e-12), name


def repeated(statistics: KeypointStatistics, weight: Array) -> KeypointStatistics:
    """The same statistics with copies instead of weights."""
    index = np.arange(len(weight)).repeat(weight)

    def copied(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: column[index] for name, column in value.items()}
        if isinstance(value, FlatResiduals):
            return FlatResiduals(**{field.name: copied(getattr(value, field.name)) for field in fields(value)})
        return None if value is None else value[index]

    return KeypointStatistics(**{field.name: copied(getattr(statistics, field.name)) for field in fields(statistics)})


@settings(max_examples=15)
@given(SEEDS, st.sampled_from([None, 4]))
def test_resampling_is_copying(seed: int, nu: float | None) -> None:
    rng = np.random.default_rng(seed)
    matched = partly_labelled(poses(100, 3, nu, seed=seed % 1000), seed)
    statistics = statistics_of(stated_distribution(matched), matched)
    weight = rng.integers(0, 4, len(statistics.nll))
    expected = overall(repeated(statistics, weight))
    for name, value in statistics.resampled(weight).items():
        assert value == pytest.approx(expected.metric(name), rel=1e-10), name


def test_nothing_drawn_has_no_metrics() -> None:
    """An empty group gives NaN: a zero would look like a measurement and narrow the interval."""
    matched = poses(20, 3)
    statistics = statistics_of(stated_distribution(matched), matched)
    for name, value in statistics.resampled(np.zeros(60, dtype=int)).items():
        assert np.isnan(value), name
    empty = statistics.take(np.zeros(60, dtype=bool))
    for name, value in empty.resampled(np.zeros(0, dtype=int)).items():
        assert np.isnan(value), name


@settings(max_examples=15)
@given(SEEDS, st.sampled_from([None, 4]))
def test_taking_a_part_is_measuring_the_part(seed: int, nu: float | None) -> None:
    rng = np.random.default_rng(seed)
    matched = poses(60, 3, nu, seed=seed % 1000)
    kept = rng.random(matched.labelled.shape) < 0.6
    distribution = stated_distribution(matched)
    taken = statistics_of(distribution, matched).take(kept[matched.labelled])
    direct = statistics_of(distribution, replace(matched, labelled=kept))
    group = np.nonzero(kept)[1]
    assert summaries(taken, group, 3) == summaries(direct, group, 3)
    for axis in AXES:
        np.testing.assert_array_equal(taken.by_variance[axis], direct.by_variance[axis])
    np.testing.assert_array_equal(taken.by_confidence, direct.by_confidence)


@pytest.mark.parametrize("nu", [None, 4])
def test_measuring_in_blocks_is_measuring_the_distribution(nu: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every column against the methods of the distribution, in blocks of 7 objects and in one block."""
    matched = partly_labelled(poses(100, 3, nu, seed=8))
    distribution, protocol = stated_distribution(matched), Protocol(scalarisation="determinant")
    mask = torch.from_numpy(matched.labelled)
    whole = KeypointStatistics.of(distribution, matched, protocol)
    covariance = distribution.covariance.numpy()
    close: dict[str, Any] = {"rtol": 1e-13, "atol": 0}
    np.testing.assert_allclose(
        whole.nll, -distribution.log_prob(torch.from_numpy(matched.residual))[mask].numpy(), **close
    )
    np.testing.assert_allclose(whole.confidence, matched.confidence(covariance, protocol)[mask], **close)
    for number, axis in enumerate("xy"):
        np.testing.assert_allclose(whole.variance[axis], covariance[mask][:, number, number], **close)
    np.testing.assert_allclose(whole.covariance["xy"], covariance[mask][:, 0, 1], **close)
    monkeypatch.setattr(parallel, "BLOCK_ROWS", 7)
    again = KeypointStatistics.of(distribution, matched, protocol)
    for name in ("nll", "confidence", "half_trace"):
        np.testing.assert_array_equal(getattr(again, name), getattr(whole, name))
    for name in ("level", "statistic", "covariance", "variance", "squared"):
        for axis, column in getattr(whole, name).items():
            np.testing.assert_array_equal(getattr(again, name)[axis], column)


def test_several_groupings_are_each_one_alone() -> None:
    """Sums by cell are added in another order, so the mean NLL may differ in its last bits."""
    matched = partly_labelled(poses(300, 4, 4, seed=5))
    statistics = statistics_of(stated_distribution(matched), matched)
    instance, keypoint = np.nonzero(matched.labelled)
    cell = 2 * keypoint + instance % 2
    groupings = [np.zeros(8, dtype=int), np.arange(8) // 2, np.arange(8) % 2]
    for grouping, found in zip(groupings, summaries_by(statistics, cell, groupings), strict=True):
        alone = summaries(statistics, grouping[cell], len(found))
        for one, other in zip(found, alone, strict=True):
            assert one.nll == pytest.approx(other.nll, rel=1e-14)
            assert replace(one, nll=0.0) == replace(other, nll=0.0)


def test_groups_are_each_one_alone() -> None:
    matched = partly_labelled(poses(300, 4, 4, seed=5))
    statistics = statistics_of(stated_distribution(matched), matched)
    group = np.nonzero(matched.labelled)[1]
    for k, block in enumerate(summaries(statistics, group, 5)[:4]):
        alone = overall(statistics.take(group == k))
        assert vars(block) == pytest.approx(vars(alone), rel=1e-12)
    empty = summaries(statistics, group, 5)[4]
    assert empty.count == 0
    assert all(np.isnan(empty.metric(name)) for name in METRICS)
