"""Coverage against plain loops, at the levels themselves and their neighbours in floating point."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halopose.evaluation.metrics import LEVELS, average_coverage_error, coverage, coverage_of_levels, level_index
from halopose.types import Array

SEEDS = st.integers(0, 2**32 - 1)


def by_loop(probability: Array, weight: Array | None) -> Array:
    """Eqs. 25 and 26: the share of samples whose region is no larger than the nominal one."""
    return np.array([np.average(probability <= level, weights=weight) for level in LEVELS])


def awkward(rng: np.random.Generator, n: int) -> Array:
    """Probabilities anywhere, on the levels, and one step of floating point beside them."""
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
    ours = average_coverage_error(curves)
    for i in np.ndindex(3, 4):
        expected = sum(abs(c - a) for c, a in zip(curves[i], LEVELS, strict=True)) / 99
        assert ours[i] == pytest.approx(expected, rel=1e-12)
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
