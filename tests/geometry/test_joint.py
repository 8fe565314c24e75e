"""PnP with a joint covariance of all keypoints: equal to the other forms in special cases, and calibrated."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import least_squares

from halopose.errors import HaloposeError
from halopose.geometry.attitude import solve_with_attitude
from halopose.geometry.camera import Camera, exp_so3, look_at, perturb, pose_difference, project, project_points
from halopose.geometry.joint import position_ellipsoid, solve_jointly
from halopose.geometry.observations import Observations, diagonal_blocks
from halopose.geometry.pnp import solve_pose, solve_position
from halopose.geometry.propagation import (
    monte_carlo_covariance,
    pose_covariance,
    position_covariance,
    unscented_covariance,
)
from halopose.types import Array
from halopose.uncertainty.joint_distribution import joint_covariance, own_and_shared, whitened_correlation
from tests.helpers.approaches import rectangle

CAMERA = Camera(1200.0, 1200.0, 319.5, 191.5, 640, 384)
CORNERS = rectangle(2500.0, 45.0)
EYE = np.array([-900.0, 5.0, 50.0])
TURN = look_at(EYE, [300.0, 0.0, 0.0], 0.02)


def correlated() -> tuple[Array, Array]:
    """A correlation (8, 8) that is far from none, and covariances (1, 4, 2, 2)."""
    loads = np.random.default_rng(0).normal(size=(8, 2))
    correlation = whitened_correlation((loads @ loads.T + 0.5 * np.eye(8))[None])[0]
    return correlation, np.array([[[[0.3, 0.1], [0.1, 0.2]]] * 4])


def noisy(count: int, seed: int = 1) -> tuple[Array, Array]:
    """Pixels (count, 4, 2) with that noise, and its joint covariance (count, 8, 8)."""
    correlation, covariance = correlated()
    joint = joint_covariance(covariance, correlation)[0]
    exact = project_points(CAMERA, TURN, EYE, CORNERS)
    noise = np.random.default_rng(seed).multivariate_normal(np.zeros(8), joint, size=count)
    return exact + noise.reshape(count, 4, 2), np.broadcast_to(joint, (count, 8, 8))


def test_independent_points_are_solved_as_ever() -> None:
    pixels, joint = noisy(20)
    blocks = diagonal_blocks(joint)
    alone = joint_covariance(blocks, np.eye(8))
    found, expected = (
        solve_jointly(Observations(CAMERA, CORNERS, pixels, alone)),
        solve_pose(Observations(CAMERA, CORNERS, pixels, blocks)),
    )
    np.testing.assert_allclose(found.position, expected.position, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(found.cost, expected.cost, rtol=1e-5)
    np.testing.assert_allclose(found.covariance, expected.covariance, rtol=1e-3, atol=1e-9)
    turned = np.broadcast_to(TURN, (20, 3, 3))
    found = solve_jointly(Observations(CAMERA, CORNERS, pixels, alone, turned))
    np.testing.assert_allclose(
        found.position,
        solve_position(Observations(CAMERA, CORNERS, pixels, blocks, turned)).position,
        rtol=1e-5,
        atol=1e-4,
    )


def test_common_causes_equal_a_joint_covariance() -> None:
    correlation, covariance = correlated()
    pixels, joint = noisy(10)
    own, shared = own_and_shared(np.repeat(covariance, 10, axis=0), correlation)
    turned, attitude = np.broadcast_to(TURN, (10, 3, 3)), 1e-6 * np.eye(3)
    first = solve_with_attitude(Observations(CAMERA, CORNERS, pixels, own, turned, attitude, shared=shared))
    second = solve_jointly(Observations(CAMERA, CORNERS, pixels, joint, turned, attitude_covariance=attitude))
    np.testing.assert_allclose(first.position, second.position, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(first.covariance, second.covariance, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("given", [False, True])
def test_the_spread_of_solutions_is_as_stated(given: bool) -> None:
    count = 1500
    pixels, joint = noisy(count)
    turned = np.broadcast_to(TURN, (count, 3, 3)) if given else None
    found = solve_jointly(Observations(CAMERA, CORNERS, pixels, joint, turned))
    assert found.converged.all()
    change = pose_difference(TURN, EYE, found.rotation, found.position)
    stated = position_covariance if given else pose_covariance
    expected = stated(CAMERA, TURN[None], EYE[None], CORNERS, joint[:1])[0]
    free = 3 if given else 6
    np.testing.assert_allclose(change[:, :free].std(0), np.sqrt(np.diag(expected))[:free], rtol=0.08)
    # The chi-square of what is left has 8 coordinates less what was solved for.
    assert found.cost.mean() == pytest.approx(8 - free, rel=0.12)


def test_sigma_points_and_draws_take_it_too() -> None:
    _, joint = noisy(1)
    expected = pose_covariance(CAMERA, TURN[None], EYE[None], CORNERS, joint)[0]

    def solve(seen: Array) -> object:
        return solve_jointly(Observations(CAMERA, CORNERS, seen, np.broadcast_to(joint[0], (len(seen), 8, 8))))

    exact = project_points(CAMERA, TURN, EYE, CORNERS)
    for found in (
        unscented_covariance(solve, exact, joint[0]),  # type: ignore[arg-type]
        monte_carlo_covariance(solve, exact, joint[0], draws=800),  # type: ignore[arg-type]
    ):
        np.testing.assert_allclose(np.sqrt(np.diag(found)), np.sqrt(np.diag(expected)), rtol=0.1)


def test_masked_points_may_be_anything() -> None:
    pixels, joint = noisy(3)
    mask = np.tile([True, True, False, True], (3, 1))
    turned = np.broadcast_to(TURN, (3, 3, 3))
    some = np.repeat(mask[0], 2)
    expected = solve_jointly(
        Observations(CAMERA, CORNERS[mask[0]], pixels[:, mask[0]], joint[:, some][..., some], turned)
    )
    pixels[:, 2] = 1e7
    found = solve_jointly(Observations(CAMERA, CORNERS, pixels, joint, turned, mask=mask))
    np.testing.assert_allclose(found.position, expected.position, rtol=1e-6, atol=1e-4)


def test_mistakes_are_named() -> None:
    pixels, joint = noisy(2)
    with pytest.raises(HaloposeError, match=r"\(2, 8, 8\)"):
        solve_jointly(Observations(CAMERA, CORNERS, pixels, diagonal_blocks(joint)))
    with pytest.raises(HaloposeError, match="given rotation"):
        solve_jointly(Observations(CAMERA, CORNERS, pixels, joint, attitude_covariance=np.eye(3)))


@pytest.mark.parametrize("nu", [np.inf, 8.0])
def test_ellipsoids_have_their_nominal_coverage(nu: float) -> None:
    """Pixels of a joint Student-t with the covariance that the solver is told."""
    count, rng = 2000, np.random.default_rng(3)
    correlation, covariance = correlated()
    joint = joint_covariance(0.2 * covariance, correlation)[0]
    noise = rng.multivariate_normal(np.zeros(8), joint, size=count)
    if np.isfinite(nu):
        noise *= np.sqrt((nu - 2) / rng.chisquare(nu, size=count))[:, None]
    pixels = project_points(CAMERA, TURN, EYE, CORNERS) + noise.reshape(count, 4, 2)
    turned = np.broadcast_to(TURN, (count, 3, 3))
    found = solve_jointly(Observations(CAMERA, CORNERS, pixels, np.broadcast_to(joint, (count, 8, 8)), turned))
    away = found.position - EYE
    for probability in (0.5, 0.95, 0.99):
        region = position_ellipsoid(found, probability, nu)
        inside = np.einsum("ni,ni->n", away, np.linalg.solve(region, away[..., None])[..., 0]) <= 1
        assert inside.mean() == pytest.approx(probability, abs=3.5 * np.sqrt(probability * (1 - probability) / count))
    with pytest.raises(HaloposeError, match="degrees of freedom"):
        position_ellipsoid(found, 0.95, 2.0)


def test_both_poses_of_a_plane_are_weighed_by_the_joint_distribution() -> None:
    """A small tag far away: both minima have the joint cost, and the lower one is returned."""
    camera, tag = (
        Camera(800, 800, 320, 240, 640, 480),
        0.1 * np.array([[-1.0, 1, 0], [1, 1, 0], [1, -1, 0], [-1, -1, 0]]),
    )
    loads = np.random.default_rng(5).normal(size=(8, 3))
    joint = 0.1 * (loads @ loads.T + 0.1 * np.eye(8))
    whiten = np.linalg.inv(np.linalg.cholesky(joint))
    exact = project(camera, tag @ exp_so3(np.array([0.2, 0.1, 0.0])).T + [0.0, 0.0, 3.0])
    pixels = exact + np.random.default_rng(6).multivariate_normal(np.zeros(8), joint, 100).reshape(-1, 4, 2)
    together = np.broadcast_to(joint, (100, 8, 8))
    found = solve_jointly(Observations(camera, tag, pixels, together), ground=False)
    apart = solve_pose(Observations(camera, tag, pixels, diagonal_blocks(together)), ground=False)
    both = np.flatnonzero(np.isfinite(found.alternative.cost))
    assert len(both) > 50
    assert (found.cost[both] <= found.alternative.cost[both]).all()
    for frame in both[:5]:
        for pose in (found, found.alternative):
            rotation, position = pose.rotation[frame], pose.position[frame]

            def left(change: Array, seen: Array = pixels[frame], turn: Array = rotation, at: Array = position) -> Array:
                return whiten @ (seen - project_points(camera, *perturb(turn, at, change), tag)).ravel()

            least = least_squares(left, np.zeros(6), x_scale=0.1, xtol=1e-12, ftol=1e-12)
            assert pose.cost[frame] == pytest.approx(2 * least.cost, rel=1e-4, abs=1e-6)
    # Where each point counts alone, the other pose may seem the better one.
    other = np.abs(found.rotation - apart.rotation).max((1, 2)) > 0.1
    assert other.any()
    assert (np.abs(found.alternative.rotation - apart.rotation)[other].max((1, 2)) < 0.1).any()
