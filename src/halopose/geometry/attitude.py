"""A position under a given rotation that has an error, by generalised least squares.

Errors of the rotation, of the camera's intrinsics and of shared causes move all points together. The covariance of
the residuals is S = diag(covariances) + J A J', with A the covariance of these errors and J the Jacobian by them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from halopose.errors import HaloposeError
from halopose.geometry.camera import (
    Camera,
    intrinsics_jacobian,
    pose_jacobian,
    project_points,
    to_camera,
)
from halopose.geometry.lines import line_intrinsics_jacobian, line_residuals
from halopose.geometry.observations import Observations, block_diagonal
from halopose.geometry.pnp import Failure, Solution, solve_position
from halopose.types import Array, Mask

_STEPS = 2  # Gauss-Newton steps from the minimum for an exact rotation; the second only confirms the first
_STEPS_WITH_LINES = 5  # lines may move the minimum farther


def solve_with_attitude(observations: Observations) -> Solution:
    """Find the position of least chi-square under given rotations with covariance ``attitude_covariance``.

    The points alone must determine a first position; lines count in addition to them.

    Args:
        observations: Points and pixels with given rotations.

    Returns:
        Positions of N frames. The covariance (N, 6, 6) holds the given attitude covariance as its rotation part, and
        the correlation of position and rotation.
    """
    if observations.nu is not None:
        raise HaloposeError("Student-t residuals with an uncertain rotation are not supported: leave nu out")
    alone = observations.independent_covariance
    if observations.shared is not None:  # the total covariance of each point gives a better first position
        alone = alone + observations.shared @ np.swapaxes(observations.shared, 2, 3)
    first = solve_position(replace(observations, covariance=alone))
    good = np.flatnonzero(first.converged)
    if not len(good):
        return first
    lines = observations.lines
    position, cost, total = step_with_attitude(
        observations.select(good), first.position[good], steps=_STEPS if lines is None else _STEPS_WITH_LINES
    )
    failed = ~(np.isfinite(position).all(1) & np.isfinite(cost) & np.isfinite(total).all((1, 2)))
    position[failed], cost[failed], total[failed] = np.nan, np.inf, np.nan
    failure = first.failure.copy()
    failure[good[failed]] = Failure.NOT_CONVERGED
    return replace(
        first,
        position=_with_rows(first.position, good, position),
        cost=_with_rows(first.cost, good, cost),
        covariance=_with_rows(first.covariance, good, total),
        dof=first.dof if lines is None else first.dof + 2 * lines.stations.shape[1],
        failure=failure,
    )


def step_with_attitude(observations: Observations, p_world: Array, *, steps: int = 1) -> tuple[Array, Array, Array]:
    """Take Gauss-Newton steps from given positions.

    One step from the position that a filter predicts equals the filter's linear update. Its weights do not depend on
    the errors of the pixels. The weights at a solution do: solutions that err towards the points get too small
    covariances.

    Args:
        observations: Points and pixels with given rotations.
        p_world: Positions (N, 3) to start from.
        steps: Number of steps.

    Returns:
        Positions (N, 3), costs (N,) and covariances (N, 6, 6).
    """
    R_cam_world, camera, lines = observations.R_cam_world, observations.camera, observations.lines
    if R_cam_world is None:
        raise HaloposeError("a position needs the camera's rotation: give R_cam_world, or solve for the whole pose")
    kept = np.repeat(observations.used, 2, axis=1)
    attitude = observations.attitude_covariance
    spread = np.broadcast_to(np.zeros((3, 3)) if attitude is None else attitude, (len(observations), 3, 3))
    own = block_diagonal(observations.covariance, kept)
    if observations.shared is not None:
        causes = np.where(kept[..., None], observations.shared.reshape(*kept.shape, -1), 0.0)
        own = own + causes @ np.swapaxes(causes, 1, 2)
    if lines is not None:
        own = _joined(own, lines.covariance)
    for _ in range(steps):
        by_pose, residual = linearised_pose(
            camera, R_cam_world, p_world, observations.points, observations.pixels, kept
        )
        if lines is not None:
            distance, by_line = line_residuals(camera, R_cam_world, p_world, lines)
            by_pose, residual = np.concatenate([by_pose, by_line], 1), np.concatenate([residual, distance], 1)
        by_position, by_angle = by_pose[..., :3], by_pose[..., 3:]
        noise = own + by_angle @ spread @ np.swapaxes(by_angle, 1, 2)
        if observations.intrinsics_covariance is not None:
            by_lens = _by_intrinsics(observations, R_cam_world, p_world, kept)
            noise = noise + by_lens @ observations.intrinsics_covariance @ np.swapaxes(by_lens, 1, 2)
        solved = np.linalg.solve(noise, np.concatenate([by_position, residual[..., None]], axis=2))
        weighted = np.swapaxes(solved[..., :3], 1, 2)
        inner = np.linalg.inv(weighted @ by_position)
        gain = inner @ weighted
        step = (gain @ residual[..., None])[..., 0]
        p_world = p_world + step
        left = residual - (by_position @ step[..., None])[..., 0]
    cost = (left * np.linalg.solve(noise, left[..., None])[..., 0]).sum(1)
    total = np.zeros((len(p_world), 6, 6))
    total[:, :3, :3], total[:, 3:, 3:] = (inner + np.swapaxes(inner, 1, 2)) / 2, spread
    total[:, :3, 3:] = -gain @ by_angle @ spread
    total[:, 3:, :3] = np.swapaxes(total[:, :3, 3:], 1, 2)
    return p_world, cost, total


def linearised_pose(
    camera: Camera, R_cam_world: Array, p_world: Array, points: Array, pixels: Array, kept: Mask
) -> tuple[Array, Array]:
    """Return Jacobians by the pose (N, 2 K, 6) and residuals (N, 2 K), zero where ``kept`` (N, 2 K) is false."""
    rows = (len(p_world), kept.shape[1])
    jacobian = pose_jacobian(camera, R_cam_world, p_world, points).reshape(*rows, 6)
    residual = (pixels - project_points(camera, R_cam_world, p_world, points)).reshape(rows)
    return np.where(kept[..., None], jacobian, 0.0), np.where(kept, residual, 0.0)


def _by_intrinsics(observations: Observations, R_cam_world: Array, p_world: Array, kept: Mask) -> Array:
    """Return the Jacobian of points and lines by the camera's parameters (N, 2 K + 2 L, 9), zero where masked out."""
    camera = observations.camera
    jacobian = intrinsics_jacobian(camera, to_camera(R_cam_world, p_world, observations.points))
    by_points = np.where(kept[..., None], jacobian.reshape(len(p_world), kept.shape[1], 9), 0.0)
    if observations.lines is None:
        return by_points
    by_lines = line_intrinsics_jacobian(camera, R_cam_world, p_world, observations.lines)
    return np.concatenate([by_points, by_lines], axis=1)


def _joined(first: Array, second: Array) -> Array:
    """Return matrices (N, A, A) and (N, B, B) as the diagonal blocks of one (N, A + B, A + B)."""
    size = first.shape[1]
    result = np.zeros((len(first), size + second.shape[1], size + second.shape[1]))
    result[:, :size, :size], result[:, size:, size:] = first, second
    return result


def _with_rows(array: Array, rows: Array, values: Array) -> Array:
    """Return the array with other values in some rows."""
    result = array.copy()
    result[rows] = values
    return result
