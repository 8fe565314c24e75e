"""The linearised cost against central differences, steps against LAPACK, and minima from poor starts."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halopose.geometry import pnp
from halopose.geometry.camera import Camera, perturb
from halopose.geometry.observations import Observations
from halopose.geometry.pnp import Pose, evaluate, refine
from halopose.types import Array
from tests.helpers.approaches import CAMERA, CORNERS, LENS, sight

SEEDS = st.integers(0, 2**32 - 1)
AWAY = np.array([60.0, 5.0, 5.0, 4e-3, 4e-3, 4e-3])


def started(
    seed: int, camera: Camera = CAMERA, nu: Array | None = None, frames: int = 3, away: Array = AWAY
) -> tuple[Any, Any]:
    """A problem and poses at a distance from its minima."""
    rng = np.random.default_rng(seed)
    seen = sight(1500.0, frames, rng, camera=camera)
    problem, _ = pnp._prepare(Observations(camera, CORNERS, seen.pixels, seen.covariance, nu=nu), 4)
    change = away * rng.choice([-1.0, 1.0], (frames, 6))
    rotation, position = perturb(seen.rotations, np.tile(seen.position, (frames, 1)), change)
    return problem, Pose.at(rotation.transpose(1, 2, 0), position.T, problem.centre)


@given(SEEDS, st.sampled_from([3, 6]), st.booleans(), st.sampled_from([None, 4.0]))
def test_the_slope_of_the_cost_equals_central_differences(
    seed: int, free: int, distorted: bool, nu: Array | None
) -> None:
    problem, pose = started(seed, LENS if distorted else CAMERA, None if nu is None else np.full(4, nu))
    slope = -2 * evaluate(problem, pose, free).normal[:free, free]
    for unknown in range(free):
        step = np.zeros((free, 3))
        step[unknown] = 1e-6
        high, low = (evaluate(problem, pose.moved(sign * step), free).cost for sign in (1, -1))
        np.testing.assert_allclose(slope[unknown], (high - low) / 2e-6, rtol=1e-4, atol=1e-4 * np.abs(slope).max())


@given(SEEDS)
def test_a_moved_pose_keeps_a_rotation(seed: int) -> None:
    _, pose = started(seed)
    rotation, centre = pose.moved(np.random.default_rng(seed).normal(size=(6, 3))).unpacked()
    turns = rotation.transpose(2, 0, 1)
    np.testing.assert_allclose(turns @ turns.swapaxes(1, 2), np.tile(np.eye(3), (3, 1, 1)), atol=1e-12)
    np.testing.assert_allclose(np.linalg.det(turns), 1.0)
    assert (centre[2] > 0).all()


@pytest.mark.parametrize("free", [3, 6])
def test_a_far_start_ends_where_a_near_one_does(free: int) -> None:
    """Over or far behind the threshold, where plain steps fail and damping must come in."""
    near = started(5, frames=40, away=AWAY * ([1] * 3 + [0] * 3) / 10)
    far = started(5, frames=40, away=np.array([1450.0, 40.0, 60.0, 0.0, 0.0, 0.0]))
    expected, _ = refine(*near, free)
    fit, converged = refine(*far, free)
    assert converged.all()
    np.testing.assert_allclose(fit.cost, expected.cost, rtol=1e-5, atol=1e-6)
