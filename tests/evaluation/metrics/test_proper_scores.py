"""Proper scores against numerical integration and simulation."""

import numpy as np
import pytest
from scipy import integrate, stats

from halopose.evaluation.metrics.proper_scores import crps_gaussian, crps_student, energy_score, pit_histogram


@pytest.mark.parametrize("nu", [None, 2.3, 5.0, 40.0, 1e7])
@pytest.mark.parametrize("residual", [-7.0, 0.0, 1.5])
def test_crps_is_the_integral_of_the_squared_difference_of_the_cdfs(nu: float | None, residual: float) -> None:
    scale = 2.5
    known = stats.norm(0, scale) if nu is None else stats.t(nu, 0, scale)
    below = integrate.quad(lambda x: known.cdf(x) ** 2, -np.inf, residual, epsabs=1e-10)[0]
    above = integrate.quad(lambda x: known.sf(x) ** 2, residual, np.inf, epsabs=1e-10)[0]
    z, width = np.array([residual / scale]), np.array([scale])
    found = crps_gaussian(z, width) if nu is None else crps_student(z, width, np.array([nu]))
    assert found[0] == pytest.approx(below + above, rel=1e-5)


@pytest.mark.parametrize("nu", [None, 4.0])
def test_energy_score_is_that_of_a_large_sample(nu: float | None) -> None:
    rng = np.random.default_rng(0)
    factor, residual, draws = np.array([[3.0, 0.0], [1.0, 0.7]]), np.array([2.0, -1.0]), 400_000
    white = rng.normal(size=(2, draws, 2))
    if nu is not None:
        white = white / np.sqrt(rng.chisquare(nu, (2, draws, 1)) / nu)
    first, second = white @ factor.T
    expected = np.linalg.norm(first - residual, axis=1).mean() - np.linalg.norm(first - second, axis=1).mean() / 2
    found = energy_score(residual[None], factor[None], None if nu is None else np.array([nu]))
    assert found[0] == pytest.approx(expected, rel=0.01)


def test_energy_score_is_lowest_for_the_true_scale() -> None:
    rng = np.random.default_rng(1)
    residual = rng.normal(size=(4000, 2))
    scores = [energy_score(residual, np.tile(size * np.eye(2), (4000, 1, 1)), None).mean() for size in (0.8, 1, 1.25)]
    assert min(scores) == scores[1]


def test_pit_histogram_counts_shares() -> None:
    probability = np.array([0.0, 0.049, 0.5, 1.0])
    assert pit_histogram(probability).tolist() == [0.5, *[0.0] * 9, 0.25, *[0.0] * 8, 0.25]
    assert np.isnan(pit_histogram(np.zeros(0))).all()
