"""The refinement in plain floats against the batched one, step by step and to the end."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from halopose.geometry import pnp, pnp_refine, scalar
from tests.helpers.approaches import CAMERA, CORNERS, sight
from tests.helpers.values import present

SEEDS = st.integers(0, 2**32 - 1)


@given(SEEDS, st.sampled_from([3, 6]))
def test_plain_floats_equal_numpy(seed: int, free: int) -> None:
    seen = sight(1500.0, 1, np.random.default_rng(seed))
    problem, _ = pnp._prepare(CAMERA, CORNERS, seen.pixels, seen.covariance, None, None, 4)
    start = pnp_refine.Pose.at(seen.rotation[..., None], seen.position[:, None], problem.centre)
    few, fine = present(pnp_refine._refine_few(problem, start, free))
    many, converged = pnp_refine._refine_many(problem, pnp_refine.evaluate(problem, start, free))
    assert fine.all()
    assert converged.all()
    np.testing.assert_allclose(few.pose.turn, many.pose.turn, rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(few.pose.bearing, many.pose.bearing, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(few.normal, many.normal, rtol=1e-9, atol=1e-6)
    np.testing.assert_allclose(few.cost, many.cost, rtol=1e-9)


def test_plain_floats_give_up_where_steps_fail() -> None:
    behind: list[tuple[float, ...]] = [(0.0, 0.0, -2.0, 0.0, 0.0, 1.0, 1.0, 0.0)]
    eye, ahead = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], [0.0, 0.0, 1.0]
    assert scalar.refine(behind, eye, ahead, 6, 1e-7, 1e-6, 10) is None
    lone: list[tuple[float, ...]] = [(0.0, 0.0, 2.0, 0.1, 0.0, 1.0, 1.0, 0.0)]  # which leaves the matrix singular
    assert scalar.refine(lone, eye, ahead, 6, 1e-7, 1e-6, 10) is None
