"""Position with an uncertain attitude: equal to a pose with a prior, and with a calibrated covariance."""

import numpy as np
import pytest
from scipy.optimize import least_squares

from halopose.geometry.attitude import solve_with_attitude
from halopose.geometry.camera import Camera, look_at, perturb, project_points
from halopose.geometry.observations import Observations
from halopose.geometry.pnp import solve_position
from halopose.types import Array
from tests.helpers.approaches import rectangle

CAMERA = Camera.from_fov(640, 384, np.radians(30))
CORNERS = rectangle(2500.0, 45.0)
POSITION = np.array([-2000.0, 20.0, 115.0])
ROTATION = look_at(POSITION, np.array([600.0, 0.0, 0.0]))
PIXELS = project_points(CAMERA, ROTATION, POSITION, CORNERS)
ATTITUDE = np.diag(np.square([8e-4, 1.2e-3, 1e-3]))


def simulated(count: int, seed: int, attitude: Array = ATTITUDE) -> tuple[Array, Array, Array]:
    """Corners with noise, and rotations that are off by a draw from the attitude's covariance."""
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(count, 4, 2, 2)) * 0.2 + 0.5 * np.eye(2)
    pixels = PIXELS + (root @ rng.normal(size=(count, 4, 2, 1)))[..., 0]
    turn = rng.normal(size=(count, 3)) @ np.linalg.cholesky(attitude).T
    change = np.concatenate([np.zeros((count, 3)), turn], axis=1)
    given, _ = perturb(np.broadcast_to(ROTATION, (count, 3, 3)), np.zeros((count, 3)), change)
    return pixels, root @ np.swapaxes(root, -1, -2), given


def test_it_is_the_pose_that_fits_corners_and_attitude_best() -> None:
    pixels, covariance, given = simulated(5, 1)
    solution = solve_with_attitude(Observations(CAMERA, CORNERS, pixels, covariance, given, ATTITUDE))
    for n in range(5):
        whiten, prior = (
            np.linalg.inv(np.linalg.cholesky(covariance[n])),
            np.linalg.inv(np.linalg.cholesky(ATTITUDE)),
        )

        def residual(x: Array, n: int = n, whiten: Array = whiten, prior: Array = prior) -> Array:
            turned, place = perturb(given[n], solution.position[n], x * [100, 1, 1, 1e-3, 1e-3, 1e-3])
            off = pixels[n] - project_points(CAMERA, turned, place, CORNERS)
            return np.concatenate([(whiten @ off[..., None]).ravel(), prior @ x[3:] * 1e-3])

        best = least_squares(residual, np.zeros(6), xtol=1e-14, ftol=1e-14, gtol=1e-14)
        deviation = np.sqrt(np.diag(solution.covariance[n])[:3])
        assert np.abs(best.x[:3] * [100, 1, 1]) == pytest.approx(0, abs=0.05 * deviation.max())
        assert solution.cost[n] == pytest.approx(2 * best.cost, rel=0.02, abs=1e-3)


def test_errors_have_the_stated_covariance() -> None:
    pixels, covariance, given = simulated(2000, 2)
    covariance = np.broadcast_to(covariance.mean(0), covariance.shape)
    rng = np.random.default_rng(3)
    pixels = PIXELS + (np.linalg.cholesky(covariance) @ rng.normal(size=(2000, 4, 2, 1)))[..., 0]
    solution = solve_with_attitude(Observations(CAMERA, CORNERS, pixels, covariance, given, ATTITUDE))
    error = solution.position - POSITION
    spread = np.sqrt(np.diagonal(np.median(solution.covariance, axis=0))[:3])
    np.testing.assert_allclose(error.std(0), spread, rtol=0.1)
    assert solution.cost.mean() == pytest.approx(5, rel=0.06)
    distance = np.einsum("ni,ni->n", error, np.linalg.solve(solution.covariance[:, :3, :3], error[..., None])[..., 0])
    assert 0.93 < (distance < 7.815).mean() < 0.97


def test_an_exact_attitude_changes_nothing() -> None:
    pixels, covariance, given = simulated(20, 4)
    mask = np.ones((20, 4), dtype=bool)
    mask[::2, 1] = False
    sure = solve_with_attitude(Observations(CAMERA, CORNERS, pixels, covariance, given, 1e-18 * np.eye(3), mask=mask))
    plain = solve_position(Observations(CAMERA, CORNERS, pixels, covariance, given, mask=mask))
    np.testing.assert_allclose(sure.position, plain.position, atol=0.02)
    np.testing.assert_allclose(sure.cost, plain.cost, rtol=1e-4)
    np.testing.assert_allclose(sure.covariance[:, :3, :3], plain.covariance[:, :3, :3], rtol=1e-2)


def test_masked_points_may_hold_any_value() -> None:
    pixels, covariance, given = simulated(4, 6)
    mask = np.ones((4, 4), dtype=bool)
    mask[:, 2] = False
    known = solve_with_attitude(Observations(CAMERA, CORNERS, pixels, covariance, given, ATTITUDE, mask=mask))
    pixels[:, 2], covariance[:, 2] = np.nan, np.nan
    solution = solve_with_attitude(Observations(CAMERA, CORNERS, pixels, covariance, given, ATTITUDE, mask=mask))
    np.testing.assert_allclose(solution.position, known.position, rtol=1e-6)
    np.testing.assert_allclose(solution.covariance, known.covariance, rtol=1e-4, atol=1e-12)


def test_unsolved_frames_stay_unsolved() -> None:
    pixels, covariance, given = simulated(3, 5)
    pixels[1] = np.nan
    solution = solve_with_attitude(Observations(CAMERA, CORNERS, pixels, covariance, given, ATTITUDE))
    assert solution.converged.tolist() == [True, False, True]
    assert np.isnan(solution.position[1]).all()
    nothing = solve_with_attitude(Observations(CAMERA, CORNERS, pixels[[1]], covariance[[1]], given[[1]], ATTITUDE))
    assert not nothing.converged.any()
