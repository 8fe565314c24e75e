"""The distribution of vision errors: parameters are recovered from samples."""

import numpy as np
import pytest
from research.vision_distribution import CornerErrorDistribution

from halopose.types import Array

WHITE, LASTING, SECONDS = np.array([0.4, 0.6, 0.3]), np.array([0.6, 0.4, 0.5]), 18.0
FLIGHTS, FRAMES = 24, 60


def flown(rng: np.random.Generator) -> tuple[Array, Array]:
    """Times (N,) and errors (N, 3) of a flight whose parts have factors of 40 degrees of freedom, of mean one."""
    times = np.arange(float(FRAMES))
    alike = np.exp(-np.abs(times[:, None] - times) / SECONDS)
    lasting = np.linalg.cholesky(alike) @ rng.standard_normal((FRAMES, 3))
    of_white, of_lasting = 19.0 / rng.gamma(20.0, size=2)
    white = np.sqrt(WHITE * of_white) * rng.standard_normal((FRAMES, 3))
    return times, white + np.sqrt(LASTING * of_lasting) * lasting


@pytest.fixture(scope="module")
def flights() -> list[tuple[Array, Array]]:
    rng = np.random.default_rng(4)
    return [flown(rng) for _ in range(FLIGHTS)]


def test_the_distribution_is_found_again(flights: list[tuple[Array, Array]]) -> None:
    distribution = CornerErrorDistribution.fitted(flights)
    lasting = distribution.lasting * distribution.lasting_freedom / (distribution.lasting_freedom - 2)
    np.testing.assert_allclose(distribution.white * distribution.freedom / (distribution.freedom - 2), WHITE, rtol=0.15)
    np.testing.assert_allclose(lasting, LASTING, rtol=0.3)
    assert distribution.persistence == pytest.approx(SECONDS, rel=0.3)
    assert "of what lasts" in str(distribution)


def test_errors_that_last_are_likelier_by_a_distribution_that_knows_it(flights: list[tuple[Array, Array]]) -> None:
    """Against frames in any order, whose errors are as large but do not last."""
    distribution = CornerErrorDistribution(WHITE, LASTING, SECONDS, 40.0, 40.0)
    rng = np.random.default_rng(5)
    for times, errors in flights:
        assert distribution.likelihood(times, errors) > distribution.likelihood(times, rng.permutation(errors)) + 5
