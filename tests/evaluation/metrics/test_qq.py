"""Q-Q points against their definition: sorted statistics at the plotting positions (n - 1/2) / N."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from halopose.evaluation.metrics import qq_points
from halopose.types import Array

SEEDS = st.integers(0, 2**32 - 1)


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
def test_there_are_about_as_many_points_as_asked_for_with_the_extremes(n: int, points: int) -> None:
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


def test_no_samples() -> None:
    theoretical, empirical = qq_points(np.zeros(0), identity)
    assert theoretical.shape == empirical.shape == (0,)
