"""PnP with correlated keypoints: one joint covariance of all keypoints instead of separate covariances."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from halopose.errors import HaloposeError
from halopose.geometry.attitude import linearised_pose, solve_with_attitude
from halopose.geometry.camera import perturb
from halopose.geometry.observations import Observations, block_diagonal
from halopose.geometry.pnp import SAME_MINIMUM, Failure, Minimum, Solution, solve_pose
from halopose.types import Array, Mask
from halopose.uncertainty.joint_distribution import squared_radius

_STEPS = 10
_CONVERGED = 1e-6  # length of the last step in standard deviations


def solve_jointly(observations: Observations, *, ground: bool = True) -> Solution:
    """Find the pose of least chi-square under joint covariances, or the position with a given rotation.

    The search starts from the solution of independent keypoints, and from both poses that a plane allows.

    Args:
        observations: With a covariance (N, 2 K, 2 K), such as ``PoseDistributions.joint_covariance``.
        ground: The points lie on the ground, as for ``solve_pose``.

    Example:
        >>> from halopose.geometry.camera import Camera, look_at, project_points
        >>> camera = Camera.from_fov(640, 384, 0.5)
        >>> plate = np.array([[0, 1, 0], [0, -1, 0], [5, -1, 0], [5, 1, 0.0]])
        >>> eye = np.array([-9.0, 0.5, 2.0])
        >>> pixels = project_points(camera, look_at(eye, [3.0, 0, 0]), eye, plate)[None]
        >>> joint = 0.5 * np.eye(8) + 0.5  # half of the variance is common to all coordinates
        >>> solve_jointly(Observations(camera, plate, pixels, joint[None])).position.round(3).tolist()
        [[-9.0, 0.5, 2.0]]
    """
    if observations.covariance.ndim != 3:
        frames, count = observations.pixels.shape[:2]
        raise HaloposeError(
            f"joint covariances should have shape {(frames, 2 * count, 2 * count)}, got {observations.covariance.shape}"
        )
    if observations.R_cam_world is not None:
        return solve_with_attitude(observations)
    if observations.attitude_covariance is not None or observations.intrinsics_covariance is not None:
        raise HaloposeError("errors of rotation or intrinsics need a given rotation: give R_cam_world")
    first = solve_pose(replace(observations, covariance=observations.independent_covariance), ground=ground)
    if not first.converged.any():
        return first
    one, other = (_minimum(observations, start) for start in (first, first.alternative))
    return _better(first, one, other)


def position_ellipsoid(solution: Solution, probability: float, nu: float = math.inf) -> Array:
    """Return matrices M (N, 3, 3) of ellipsoids (p - position)' M^-1 (p - position) <= 1 that contain the position.

    The position is taken as linear in the pixels, so it has the degrees of freedom of the keypoints.

    Args:
        solution: N poses or positions.
        probability: Probability that an ellipsoid contains the true position.
        nu: Degrees of freedom of the keypoints' joint Student-t (``joint_dof``); infinite for a Gaussian.

    Example:
        >>> from halopose.geometry.camera import Camera, look_at, project_points
        >>> camera = Camera.from_fov(640, 384, 0.5)
        >>> plate = np.array([[0, 1, 0], [0, -1, 0], [5, -1, 0], [5, 1, 0.0]])
        >>> eye = np.array([-9.0, 0.5, 2.0])
        >>> pixels = project_points(camera, look_at(eye, [3.0, 0, 0]), eye, plate)[None]
        >>> solution = solve_jointly(Observations(camera, plate, pixels, np.eye(8)[None]))
        >>> sizes = [np.sqrt(position_ellipsoid(solution, 0.95, nu)[0, 0, 0]) for nu in (np.inf, 10.0)]
        >>> bool(1.0 < sizes[1] / sizes[0] < 1.1)
        True
    """
    if not (0 < probability < 1 and nu > 2):
        raise HaloposeError(
            "an ellipsoid needs a probability between 0 and 1 and more than 2 degrees of freedom, "
            f"got {probability} and {nu}"
        )
    scale = 1.0 if math.isinf(nu) else (nu - 2) / nu
    return np.asarray(solution.covariance[:, :3, :3] * (scale * squared_radius(3, probability, nu)))


def _minimum(observations: Observations, start: Minimum) -> tuple[Minimum, Array]:
    """Return the minima near N poses and their covariances (N, 6, 6); NaN where the search does not converge."""
    some = np.flatnonzero(np.isfinite(start.cost))
    frames = len(start.cost)
    result = Minimum(np.full((frames, 3, 3), np.nan), np.full((frames, 3), np.nan), np.full(frames, np.inf))
    spread = np.full((frames, 6, 6), np.nan)
    if not len(some):
        return result, spread
    rotation, position, cost, total, sound = _refined(
        observations.select(some), start.rotation[some], start.position[some]
    )
    found = some[sound]
    result.rotation[found], result.position[found], result.cost[found] = rotation[sound], position[sound], cost[sound]
    spread[found] = total[sound]
    return result, spread


def _better(first: Solution, one: tuple[Minimum, Array], other: tuple[Minimum, Array]) -> Solution:
    """Return the lower of two minima as the solution and the other, if distinct, as its alternative."""
    swap = other[0].cost < one[0].cost
    best, second = _chosen(swap, other[0], one[0]), _chosen(swap, one[0], other[0])
    covariance = np.where(swap[:, None, None], other[1], one[1])
    distance = np.square(second.position - best.position).sum(1)
    alone = ~(distance > SAME_MINIMUM * covariance[:, :3, :3].trace(0, 1, 2))
    none = Minimum(np.full_like(second.rotation, np.nan), second.position * np.nan, np.full_like(best.cost, np.inf))
    failure = np.where(first.converged & np.isinf(best.cost), Failure.NOT_CONVERGED, first.failure)
    return Solution(
        best.rotation, best.position, best.cost, covariance, first.dof, failure, _chosen(alone, none, second)
    )


def _chosen(which: Mask, one: Minimum, other: Minimum) -> Minimum:
    """Return the first where ``which`` (N,) is true, else the other."""
    return Minimum(
        np.where(which[:, None, None], one.rotation, other.rotation),
        np.where(which[:, None], one.position, other.position),
        np.where(which, one.cost, other.cost),
    )


def _refined(observations: Observations, R_cam_world: Array, p_world: Array) -> tuple[Array, Array, Array, Array, Mask]:
    """Return poses after Gauss-Newton steps, costs (N,), covariances (N, 6, 6) and the frames that converged (N,)."""
    kept = np.repeat(observations.used, 2, axis=1)
    seen = observations.points, observations.pixels, kept
    factor = np.linalg.inv(np.linalg.cholesky(block_diagonal(observations.covariance, kept)))
    for _ in range(_STEPS):
        by_pose, residual = linearised_pose(observations.camera, R_cam_world, p_world, *seen)
        rows, left = factor @ by_pose, factor @ residual[..., None]
        # Metres and radians differ by orders of magnitude, so columns are scaled before the inverse.
        scale = 1 / np.sqrt(np.square(rows).sum(1, keepdims=True))
        scaled = rows * scale
        transposed = np.swapaxes(scaled, 1, 2)
        total = np.linalg.inv(transposed @ scaled) * scale * np.swapaxes(scale, 1, 2)
        step = (total @ np.swapaxes(rows, 1, 2) @ left)[..., 0]
        R_cam_world, p_world = perturb(R_cam_world, p_world, step)
        # The length of the step in standard deviations; its square is the decrease of the chi-square.
        length = np.linalg.norm((rows @ step[..., None])[..., 0], axis=1)
        if (length < _CONVERGED).all():
            break
    _, residual = linearised_pose(observations.camera, R_cam_world, p_world, *seen)
    cost = np.square(factor @ residual[..., None]).sum((1, 2))
    return R_cam_world, p_world, cost, total, np.asarray(length < 1e-2)
