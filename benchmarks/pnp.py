"""Weighted PnP: one frame against scipy's least squares and against solving every subset, many against OpenCV."""

from __future__ import annotations

import cv2
import numpy as np
from scipy.optimize import least_squares

from benchmarks.interleave import Comparison, compare
from halopose.geometry.attitude import solve_with_attitude
from halopose.geometry.camera import Camera, exp_so3, look_at, perturb, pose_jacobian, project_points
from halopose.geometry.integrity import assess
from halopose.geometry.observations import Observations
from halopose.geometry.pnp import solve_pose, solve_position
from halopose.landing.runway import runway_corners

CAMERA = Camera(1200.0, 1200.0, 319.5, 191.5, 640, 384)
CORNERS = runway_corners(2500.0, 45.0)
FRAMES = 1000
SINGLES = 20


def compare_one(rounds: int = 50) -> tuple[Comparison, float]:
    """One solve from the same start; also returns the largest excess of our cost over scipy's."""
    rotation, position, pixels, covariance = _frames(SINGLES)
    change = np.array([20.0, 2.0, 2.0, 3e-3, 3e-3, 3e-3])  # as a tracker would predict
    start_rotation, start_position = perturb(rotation, position, change)
    factor = np.linalg.inv(np.linalg.cholesky(covariance[0]))

    start = (start_rotation[:1], start_position[:1])

    def ours() -> list[float]:
        return [
            float(solve_pose(Observations(CAMERA, CORNERS, one[None], covariance[:1]), start=start).cost[0])
            for one in pixels
        ]

    def peer() -> list[float]:
        return [_by_scipy(one, factor, start[0][0], start[1][0]) for one in pixels]

    gap = float(np.max(np.array(ours()) - np.array(peer())))
    result = compare(ours, peer, rounds)
    return result.divided(SINGLES, SINGLES), gap


def compare_many(rounds: int = 5) -> Comparison:
    """A thousand frames without a start; both poses of the plane are refined."""
    _, _, pixels, covariance = _frames(FRAMES)
    return compare(
        lambda: solve_pose(Observations(CAMERA, CORNERS, pixels, covariance)),
        lambda: [_by_opencv(one) for one in pixels],
        rounds,
    )


def compare_position(rounds: int = 50) -> tuple[Comparison, float]:
    """One position with known attitude, without a start; also returns the excess of our cost over scipy's."""
    rotation, position, pixels, covariance = _frames(SINGLES)
    factor = np.linalg.inv(np.linalg.cholesky(covariance[0]))
    start = position[0] + [20.0, 2.0, 2.0]

    def ours() -> list[float]:
        seen = [(one[None], covariance[:1], rotation[:1]) for one in pixels]
        return [float(solve_position(Observations(CAMERA, CORNERS, *one)).cost[0]) for one in seen]

    def peer() -> list[float]:
        return [_position_by_scipy(one, factor, rotation[0], start) for one in pixels]

    gap = float(np.max(np.array(ours()) - np.array(peer())))
    result = compare(ours, peer, rounds)
    return result.divided(SINGLES, SINGLES), gap


def compare_fix(rounds: int = 50) -> Comparison:
    """The position fix of one frame: position with an uncertain attitude, check, exclusion, protection levels.

    The peer solves again for every subset of the corners.
    """
    rotation, _, pixels, covariance = _frames(SINGLES)
    attitude = 1e-6 * np.eye(3)

    def ours() -> None:
        for one in pixels:
            assess(Observations(CAMERA, CORNERS, one[None], covariance[:1], rotation[:1], attitude_covariance=attitude))

    def peer() -> None:
        for one in pixels:
            _by_subsets(one[None], covariance[:1], rotation[:1], attitude)

    result = compare(ours, peer, rounds)
    return result.divided(SINGLES, SINGLES)


def _by_subsets(pixels: np.ndarray, covariance: np.ndarray, rotation: np.ndarray, attitude: np.ndarray) -> None:
    """Solve with all corners for the check, again for the protection levels, and without each corner."""
    all_corners, without_one = np.ones((1, 4), dtype=bool), ~np.eye(4, dtype=bool)
    for _ in range(2):
        solve_with_attitude(Observations(CAMERA, CORNERS, pixels, covariance, rotation, attitude, mask=all_corners))
    found, spread, turned = (np.repeat(array, 4, axis=0) for array in (pixels, covariance, rotation))
    solve_with_attitude(Observations(CAMERA, CORNERS, found, spread, turned, attitude, mask=without_one))


def _position_by_scipy(pixels: np.ndarray, factor: np.ndarray, rotation: np.ndarray, start: np.ndarray) -> float:
    def residual(place: np.ndarray) -> np.ndarray:
        return (factor @ (project_points(CAMERA, rotation, place, CORNERS) - pixels)[..., None]).ravel()

    def jacobian(place: np.ndarray) -> np.ndarray:
        return (factor @ pose_jacobian(CAMERA, rotation, place, CORNERS)[..., :3]).reshape(-1, 3)

    found = least_squares(residual, start, jac=jacobian, x_scale="jac")
    np.linalg.inv(found.jac.T @ found.jac)
    return float(2 * found.cost)


def _frames(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Poses on a three-degree approach at 1,500 m, noisy pixels (N, 4, 2) and their covariances (N, 4, 2, 2)."""
    rng = np.random.default_rng(0)
    position = np.broadcast_to([-1500.0, 5.0, 78.6], (count, 3))
    rotation = look_at(position, [300.0, 0.0, 0.0])
    angle = rng.uniform(0, np.pi, 4)
    turn = exp_so3(angle[:, None] * [0.0, 0.0, 1.0])[:, :2, :2]
    factor = turn * rng.uniform(0.3, 1.0, (4, 1, 2))
    noise = (factor @ rng.normal(size=(count, 4, 2, 1)))[..., 0]
    covariance = np.broadcast_to(factor @ factor.swapaxes(1, 2), (count, 4, 2, 2))
    return rotation, position, project_points(CAMERA, rotation, position, CORNERS) + noise, covariance


def _by_scipy(pixels: np.ndarray, factor: np.ndarray, rotation: np.ndarray, position: np.ndarray) -> float:
    """MINPACK with our analytic Jacobian, over changes of rotation vector and position from the start."""

    def residual(change: np.ndarray) -> np.ndarray:
        moved = project_points(CAMERA, *perturb(rotation, position, change), CORNERS)
        return (factor @ (moved - pixels)[..., None]).ravel()

    def jacobian(change: np.ndarray) -> np.ndarray:
        # At the moved pose; the turn is small enough for its own derivative to be the identity.
        moved = pose_jacobian(CAMERA, *perturb(rotation, position, change), CORNERS)
        return (factor @ moved).reshape(-1, 6)

    found = least_squares(residual, np.zeros(6), jac=jacobian, x_scale="jac")
    information = found.jac.T @ found.jac
    np.linalg.inv(information)
    return float(2 * found.cost)


def _by_opencv(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    _, vector, offset = cv2.solvePnP(CORNERS, pixels, CAMERA.matrix, None, flags=cv2.SOLVEPNP_IPPE)
    return cv2.solvePnPRefineLM(CORNERS, pixels, CAMERA.matrix, None, vector, offset)
