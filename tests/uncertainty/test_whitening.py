"""Lengths and directions of whitened residuals against direct solves and the distributions of scipy."""

import numpy as np
import pytest
from scipy import stats

from halopose.uncertainty.whitening import directions, log_survival, squared_length, stretched, whiten


def test_whitened_residuals_are_direction_times_length() -> None:
    rng = np.random.default_rng(0)
    residual, factors = rng.normal(size=(20, 3, 2)), np.tril(rng.normal(size=(20, 3, 2, 2)) + 3 * np.eye(2))
    residual[0, 0] = 0.0
    labelled = rng.random((20, 3)) < 0.7
    white = whiten(residual, factors)
    np.testing.assert_allclose(white, np.linalg.solve(factors, residual[..., None])[..., 0])
    length, direction = directions(residual, factors, labelled)
    np.testing.assert_allclose(length[..., None] * direction, np.where(labelled[..., None], white, 0.0), atol=1e-12)


@pytest.mark.parametrize("dof", [2.5, 7.0, np.inf])
def test_survival_is_that_of_the_distribution_of_squared_lengths(dof: float) -> None:
    squared = np.array([0.0, 0.3, 2.0, 40.0])
    distribution = stats.chi2(2) if np.isinf(dof) else stats.f(2, dof, scale=2)
    np.testing.assert_allclose(log_survival(squared, dof), distribution.logsf(squared), atol=1e-12)
    np.testing.assert_allclose(squared_length(log_survival(squared, dof), dof), squared, atol=1e-9)


def test_stretching_keeps_directions_and_order() -> None:
    vectors = np.random.default_rng(1).normal(size=(50, 4, 2))
    found = stretched(vectors, 5.0, np.inf)
    np.testing.assert_allclose(stretched(found, np.inf, 5.0), vectors, rtol=1e-9)
    np.testing.assert_allclose(np.arctan2(found[..., 1], found[..., 0]), np.arctan2(vectors[..., 1], vectors[..., 0]))
