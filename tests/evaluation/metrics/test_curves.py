"""Coverage, Q-Q points and reliability against plain loops and brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from halopose.evaluation.metrics import (
    LEVELS,
    average_coverage_error,
    coverage,
    coverage_of_levels,
    level_index,
    qq_points,
    reliability_curve,
)
from halopose.types import Array

SEEDS = st.integers(0, 2**32 - 1)


def by_loop(probability: Array, weight: Array | None) -> Array:
    """Eqs. 25 and 26: share of samples whose region is at most the nominal one."""
    return np.array([np.average(probability <= level, weights=weight) for level in LEVELS])


def awkward(rng: np.random.Generator, n: int) -> Array:
    """Random probabilities, probabilities on the levels, and their neighbours in floating point."""
    on = rng.choice(LEVELS, n)
    ends = rng.choice([0.0, 1.0], n)
    choices = np.stack([rng.random(n), on, np.nextafter(on, 0), np.nextafter(on, 1), ends])
    return choices[rng.integers(0, len(choices), n), np.arange(n)]


def test_levels_are_the_papers() -> None:
    assert LEVELS.shape == (99,)
    assert LEVELS.tolist() == [i / 100 for i in range(1, 100)]


def test_level_index_is_exact_at_levels_and_their_neighbours() -> None:
    probability = np.concatenate(
        [
            *(LEVELS, np.nextafter(LEVELS, 0), np.nextafter(LEVELS, 1), LEVELS + 2e-16, LEVELS - 2e-16),
            [0.0, 1.0, 5e-324, 1e-300, np.nextafter(1, 0), 0.999, 0.5],
        ]
    )
    assert np.array_equal(level_index(probability), np.searchsorted(LEVELS, probability, side="left"))


@settings(max_examples=200)
@given(st.lists(st.floats(0, 1), min_size=0, max_size=50))
def test_level_index_equals_searchsorted(values: Any) -> None:
    probability = np.array(values, dtype=float)
    assert np.array_equal(level_index(probability), np.searchsorted(LEVELS, probability, side="left"))


@given(SEEDS, st.integers(1, 300))
def test_coverage_equals_a_loop(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    probability, weight = awkward(rng, n), rng.integers(0, 4, n) + (np.arange(n) == 0)
    np.testing.assert_allclose(coverage(probability), by_loop(probability, np.ones(n)), rtol=1e-12)
    np.testing.assert_allclose(coverage(probability, weight), by_loop(probability, weight), rtol=1e-12)
    copied = coverage(probability.repeat(weight))
    np.testing.assert_allclose(coverage(probability, weight), copied, rtol=1e-12)


@given(SEEDS, st.integers(1, 200), st.integers(1, 6))
def test_groups_are_each_one_alone(seed: int, n: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    probability, group, weight = awkward(rng, n), rng.integers(0, count, n), rng.integers(1, 4, n)
    curves = coverage(probability, weight, group, count + 1)
    assert curves.shape == (count + 1, 99)
    assert np.isnan(curves[count]).all()
    for g in np.unique(group):
        alone = coverage(probability[group == g], weight[group == g])
        np.testing.assert_allclose(curves[g], alone, rtol=1e-12)
    again = coverage_of_levels(level_index(probability), weight, group, count + 1)
    np.testing.assert_array_equal(curves, again)


@given(SEEDS)
def test_average_coverage_error_is_the_mean_gap(seed: int) -> None:
    curves = np.random.default_rng(seed).random((3, 4, 99))
    own = average_coverage_error(curves)
    for i in np.ndindex(3, 4):
        expected = sum(abs(c - a) for c, a in zip(curves[i], LEVELS, strict=True)) / 99
        assert own[i] == pytest.approx(expected, rel=1e-12)
    assert average_coverage_error(LEVELS) == 0


def test_uniform_probabilities_are_calibrated_and_others_not() -> None:
    n = 10_000
    uniform = (np.arange(n) + 0.5) / n
    assert average_coverage_error(coverage(uniform)) < 1e-12
    assert average_coverage_error(coverage(np.zeros(n))) == pytest.approx(0.5)
    assert average_coverage_error(coverage(np.ones(n))) == pytest.approx(0.5)
    assert (coverage(uniform**2) >= LEVELS).all()  # smaller regions suffice: underconfident
    assert (coverage(uniform**0.5) <= LEVELS).all()


def test_no_samples_are_nan() -> None:
    assert np.isnan(coverage(np.zeros(0))).all()
    assert np.isnan(average_coverage_error(coverage(np.zeros(0))))


def identity(probability: Array) -> Array:
    return probability


@given(SEEDS, st.integers(1, 200))
def test_few_samples_give_every_point(seed: int, n: int) -> None:
    statistic = np.random.default_rng(seed).normal(size=n)
    theoretical, empirical = qq_points(statistic, stats.norm.ppf)
    expected = [stats.norm.ppf((i - 0.5) / n) for i in range(1, n + 1)]
    np.testing.assert_allclose(theoretical, expected, rtol=1e-12, atol=1e-15)
    assert empirical.tolist() == sorted(statistic)


@given(SEEDS, st.integers(2, 50_000), st.sampled_from([5, 41, 200]))
def test_points_are_a_subset_with_both_extremes(seed: int, n: int, points: int) -> None:
    statistic = np.random.default_rng(seed).normal(size=n)
    position, empirical = qq_points(statistic, identity, points)
    rank = position * n - 0.5
    np.testing.assert_allclose(rank, np.round(rank), atol=1e-6)
    rank = np.round(rank).astype(int)
    assert np.array_equal(empirical, np.sort(statistic)[rank])
    assert rank[0] == 0
    assert rank[-1] == n - 1
    assert (np.diff(rank) > 0).all()
    assert len(rank) <= min(n, points)


@pytest.mark.parametrize(("n", "points"), [(10, 41), (41, 41), (100_000, 41), (1000, 200)])
def test_requested_number_of_points_includes_the_extremes(n: int, points: int) -> None:
    theoretical, empirical = qq_points(np.arange(n), identity, points)
    assert theoretical.shape == empirical.shape
    assert min(n, points) * 0.75 <= len(theoretical) <= min(n, points)
    assert empirical[[0, -1]].tolist() == [0, n - 1]


def test_points_are_denser_in_the_tails() -> None:
    position, _ = qq_points(np.arange(100_000), identity)
    assert (position < 0.01).sum() > 10
    assert (position > 0.99).sum() > 10
    assert np.diff(position).max() < 0.02  # and leave no gap in the middle


@pytest.mark.parametrize("distribution", [stats.norm(), stats.t(5), stats.chi2(2)], ids=["norm", "t", "chi2"])
def test_the_right_distribution_lies_on_the_diagonal(distribution: Any) -> None:
    n = 20_000
    statistic = distribution.ppf(np.random.default_rng(0).permutation((np.arange(n) + 0.5) / n))
    theoretical, empirical = qq_points(statistic, distribution.ppf)
    np.testing.assert_allclose(theoretical, empirical, rtol=1e-9, atol=1e-12)
    theoretical, empirical = qq_points(1.1 * statistic, distribution.ppf)
    np.testing.assert_allclose(1.1 * theoretical, empirical, rtol=1e-9, atol=1e-12)


def test_qq_of_no_samples() -> None:
    theoretical, empirical = qq_points(np.zeros(0), identity)
    assert theoretical.shape == empirical.shape == (0,)


@given(st.integers(0, 2**32 - 1), st.integers(1, 300), st.sampled_from([1, 2, 11, 101, 1000]))
def test_reliability_curve_equals_brute_force(seed: int, n: int, points: int) -> None:
    rng = np.random.default_rng(seed)
    confidence, correct = -rng.random(n), rng.random(n) < 0.7
    curve = reliability_curve(confidence, correct, points)
    order = np.argsort(-confidence)
    again = reliability_curve(confidence[order], correct[order], points, presorted=True)
    np.testing.assert_equal(vars(again), vars(curve))
    assert len(curve.kept) <= min(points, n)
    if points > 1:
        assert curve.kept[-1] == 1
        assert curve.reliability[-1] == pytest.approx(correct.mean(), rel=1e-12)
    assert np.round(curve.kept[0] * n) == 1
    assert (np.diff(curve.kept) > 0).all()
    for share, reliability, threshold in zip(curve.kept, curve.reliability, curve.threshold, strict=True):
        kept = confidence >= threshold
        assert kept.mean() == pytest.approx(share, rel=1e-12)
        assert correct[kept].mean() == pytest.approx(reliability, rel=1e-12)
    if points >= n:
        assert len(curve.kept) == n
