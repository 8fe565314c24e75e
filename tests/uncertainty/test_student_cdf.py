"""Student's t of many values under few degrees of freedom is scipy's, and so it is under many."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from halopose.uncertainty.student_cdf import student_cdf


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.floats(0.5, 20), st.floats(0.5, 20))
def test_few_kinds_are_scipys_out_into_the_tails(seed: int, one: float, other: float) -> None:
    rng = np.random.default_rng(seed)
    dof = rng.choice([one, other, 2.0, 20.0], 3000)
    value = rng.choice([-1, 1], (3000, 2)) * 10 ** rng.uniform(-8, 8, (3000, 2))
    np.testing.assert_allclose(student_cdf(dof, value), special.stdtr(dof[:, None], value), rtol=1e-13)


@pytest.mark.parametrize("case", ["many", "one of its own", "large", "few values"])
def test_other_kinds_are_left_to_scipy(case: str) -> None:
    rng = np.random.default_rng(1)
    dof = np.full(5000, 3.0)
    if case == "many":
        dof = rng.uniform(2, 9, 5000)
    elif case == "one of its own":
        dof[17] = 3.1
    elif case == "large":
        dof[:] = 1e7
    else:
        dof = dof[:100]
    value = rng.standard_t(3, (len(dof), 1))
    np.testing.assert_array_equal(student_cdf(dof, value), special.stdtr(dof[:, None], value))


def test_ends_and_what_is_not_a_number() -> None:
    dof = np.full(1000, 4.5)
    value = np.tile([0.0, -np.inf, np.inf, np.nan], (1000, 1))
    np.testing.assert_allclose(student_cdf(dof, value), np.tile([0.5, 0.0, 1.0, np.nan], (1000, 1)), rtol=1e-13)
