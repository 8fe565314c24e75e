"""Requirements by name, axes of the path, and the regions of a Stanford diagram."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halopose.errors import HaloposeError
from halopose.landing.requirements import REQUIREMENTS, count_stanford, path_axes, requirement


def test_the_path_axes_are_orthonormal_and_the_first_runs_down_the_path() -> None:
    axes = path_axes(np.radians(3.5))
    np.testing.assert_allclose(axes @ axes.T, np.eye(3), atol=1e-15)
    assert axes[0] @ [-np.cos(np.radians(3.5)), 0.0, np.sin(np.radians(3.5))] == pytest.approx(-1.0)
    assert (axes[1] == [0, 1, 0]).all()
    assert axes[2, 2] > 0.99


def test_the_risk_of_an_approach_is_shared_by_its_frames() -> None:
    wanted = requirement("cat-1")
    assert wanted is REQUIREMENTS["cat-1"]
    assert wanted.per_frame(200) * 200 == pytest.approx(wanted.risk)
    with pytest.raises(HaloposeError, match=r"unknown requirement 'cat-4': lpv-200"):
        requirement("cat-4")


def test_regions_of_a_stanford_diagram() -> None:
    #              fine  too wide  off but in limit  off, wide anyway  off and over the limit
    error = np.array([1.0, -20.0, 8.0, 60.0, -12.0])
    level = np.array([5.0, 30.0, 5.0, 50.0, 5.0])
    found = count_stanford(error, level, 10.0)
    assert (found.available, found.unavailable, found.misleading, found.hazardous) == (1, 1, 2, 1)


@given(st.integers(0, 2**32 - 1))
def test_every_known_position_is_in_one_region(seed: int) -> None:
    rng = np.random.default_rng(seed)
    error, level = rng.normal(0, 10, 50), rng.uniform(0, 40, 50)
    level[:5], error[45:] = np.inf, np.nan
    assert count_stanford(error, level, 15.0).total == 45
