"""Linear algebra of the solvers."""

import numpy as np

from halopose.geometry.linear import scaled_inverse


def test_matrices_that_have_no_inverse_are_infinite() -> None:
    with np.errstate(all="ignore"):
        huge = np.array([[1e-300, 1e300], [1e300, 1e-300]])
        given = np.stack([np.diag([2.0, 4.0]), huge, np.full((2, 2), np.nan), np.ones((2, 2)), np.diag([np.inf, 1.0])])
        found = scaled_inverse(given)
    np.testing.assert_allclose(found[0], np.diag([0.5, 0.25]))
    assert np.isinf(found[1:]).all()
