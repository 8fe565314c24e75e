"""Variance bins against numpy.array_split, ENCE and moments against plain loops."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halopose.evaluation.metrics import (
    expected_normalized_calibration_error,
    moment_matching,
    normalized_calibration_errors,
    variance_bins,
)
from halopose.evaluation.metrics.variance import VarianceBins
from halopose.types import Array

SEEDS = st.integers(0, 2**32 - 1)
CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 0}


def heteroscedastic(rng: np.random.Generator, n: int) -> tuple[Array, Array]:
    predicted = np.exp(rng.normal(0, 2, n))
    return predicted, predicted * rng.exponential(1, n)


def by_split(predicted: Array, squared: Array, bins: int) -> tuple[list[float], list[float]]:
    order = np.argsort(predicted, kind="stable")
    parts = [part for part in np.array_split(order, bins) if len(part)]
    return [predicted[p].mean() for p in parts], [squared[p].mean() for p in parts]


@given(SEEDS, st.integers(1, 400), st.sampled_from([1, 2, 7, 20, 33]))
def test_bins_equal_array_split(seed: int, n: int, bins: int) -> None:
    predicted, squared = heteroscedastic(np.random.default_rng(seed), n)
    own = variance_bins(predicted, squared, bins=bins)
    expected = by_split(predicted, squared, bins)
    assert len(own.predicted) == min(n, bins)
    np.testing.assert_allclose(own.predicted, expected[0], **CLOSE)
    np.testing.assert_allclose(own.empirical, expected[1], **CLOSE)


@given(SEEDS, st.integers(1, 400), st.sampled_from([1, 7, 20]))
def test_weights_are_copies(seed: int, n: int, bins: int) -> None:
    rng = np.random.default_rng(seed)
    predicted, squared = heteroscedastic(rng, n)
    weight = rng.integers(0, 4, n)
    weighted = variance_bins(predicted, squared, weight, bins=bins)
    copied = variance_bins(predicted.repeat(weight), squared.repeat(weight), bins=bins)
    assert len(weighted.predicted) == len(copied.predicted) == min(bins, weight.sum())
    # Bins are differences of running sums, exact to 1e-12 of the sum.
    for name, values in (("predicted", predicted), ("empirical", squared)):
        own, expected = getattr(weighted, name), getattr(copied, name)
        np.testing.assert_allclose(own, expected, rtol=1e-12, atol=1e-12 * values.max())
    assert expected_normalized_calibration_error(weighted) == pytest.approx(
        expected_normalized_calibration_error(copied), rel=1e-10, nan_ok=True
    )


@given(SEEDS, st.integers(30, 400))
def test_weights_are_copies_when_predictions_tie(seed: int, n: int) -> None:
    """Ties in the predicted variance keep the given order, as for a constant covariance per keypoint."""
    rng = np.random.default_rng(seed)
    predicted, squared = rng.integers(1, 4, n).astype(float), rng.exponential(1, n)
    weight = rng.integers(0, 4, n)
    weighted = variance_bins(predicted, squared, weight)
    copied = variance_bins(predicted.repeat(weight), squared.repeat(weight))
    np.testing.assert_allclose(weighted.empirical, copied.empirical, rtol=1e-10)


@given(SEEDS, st.integers(1, 400))
def test_ties_keep_the_order_given(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    predicted, squared = rng.integers(1, 4, n).astype(float), rng.exponential(1, n)
    expected = by_split(predicted, squared, 20)[1]
    np.testing.assert_allclose(variance_bins(predicted, squared).empirical, expected, **CLOSE)


@given(SEEDS)
def test_presorted_data_need_no_sorting(seed: int) -> None:
    rng = np.random.default_rng(seed)
    predicted, squared = heteroscedastic(rng, 103)
    weight = rng.integers(0, 3, 103)
    order = np.argsort(predicted)
    for w, sorted_weight in ((None, None), (weight, weight[order])):
        first = variance_bins(predicted, squared, w)
        second = variance_bins(predicted[order], squared[order], sorted_weight, presorted=True)
        np.testing.assert_array_equal(first.predicted, second.predicted)
        np.testing.assert_array_equal(first.empirical, second.empirical)


@given(SEEDS, st.integers(1, 30))
def test_ence_is_its_definition(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    bins = VarianceBins(rng.exponential(1, n) + 0.1, rng.exponential(1, n))
    pairs = zip(bins.predicted, bins.empirical, strict=True)
    expected = sum(abs(np.sqrt(e) - np.sqrt(v)) / np.sqrt(v) for v, e in pairs) / n
    assert expected_normalized_calibration_error(bins) == pytest.approx(expected, rel=1e-12)


def test_ence_measures_a_scale_error() -> None:
    predicted = np.geomspace(0.1, 1e4, 1000)
    for factor in (0.5, 1.0, 1.1, 3.0):
        bins = variance_bins(predicted, factor**2 * predicted)
        assert expected_normalized_calibration_error(bins) == pytest.approx(abs(factor - 1), abs=1e-12)
    # A constant prediction with the right mean is found out: the residuals do differ.
    truth = np.sort(predicted)
    assert expected_normalized_calibration_error(variance_bins(np.full(1000, truth.mean()), truth)) > 0.5


def test_no_samples() -> None:
    empty = variance_bins(np.zeros(0), np.zeros(0))
    assert empty.predicted.shape == empty.empirical.shape == (0,)
    assert np.isnan(expected_normalized_calibration_error(empty))
    weightless = variance_bins(np.ones(3), np.ones(3), np.zeros(3, dtype=int))
    assert np.isnan(expected_normalized_calibration_error(weightless))


@given(SEEDS, st.integers(1, 50))
def test_moments_equal_a_loop(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    residual, root = rng.normal(size=(n, 2)), rng.normal(size=(n, 2, 2))
    covariance = root @ np.swapaxes(root, 1, 2)
    weight = rng.integers(0, 4, n) + (np.arange(n) == 0)
    for w in (None, weight):
        entries = covariance[:, 0, 0], covariance[:, 0, 1], covariance[:, 1, 1]
        empirical, predicted = moment_matching(tuple(residual.T), entries, w)
        copies = np.arange(n) if w is None else np.arange(n).repeat(w)
        outer = sum(np.outer(residual[i], residual[i]) for i in copies) / len(copies)
        np.testing.assert_allclose(empirical, outer, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(predicted, covariance[copies].mean(0), rtol=1e-12, atol=1e-13)


@given(SEEDS, st.lists(st.integers(0, 90), min_size=1, max_size=6))
def test_groups_at_once_equal_each_group_alone(seed: int, sizes: list[int]) -> None:
    rng = np.random.default_rng(seed)
    parts = [heteroscedastic(rng, size) for size in sizes]
    parts = [(one[np.argsort(one)], other) for one, other in parts]
    predicted, squared = (np.concatenate([part[i] for part in parts]) for i in range(2))
    alone = [expected_normalized_calibration_error(variance_bins(*part, presorted=True)) for part in parts]
    np.testing.assert_array_equal(normalized_calibration_errors(predicted, squared, np.array(sizes)), alone)
