"""A position from corners and an attitude that is itself uncertain, by generalised least squares.

In: what ``solve_position`` takes, the covariance (3, 3) or (N, 3, 3) of the given rotation about the runway axes,
and perhaps that of the camera's intrinsics (9, 9). Out: a ``Solution`` whose position, cost and covariance count
these errors, which move all corners together: S = diag(covariances) + J A J' replaces the corners' covariances.
Lines (``lines``) may be seen beside the corners, and are moved by the same errors.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from halopose.geometry.camera import (
    Array,
    Camera,
    intrinsics_jacobian,
    pose_jacobian,
    project_points,
    to_camera,
)
from halopose.geometry.lines import Lines, line_intrinsics_jacobian, line_residuals
from halopose.geometry.pnp import Failure, Solution, solve_position
from halopose.geometry.pnp_refine import Mask

_STEPS = 2  # Gauss-Newton's, from the minimum for an exact attitude: the second is only to make sure
_STEPS_WITH_LINES = 5  # which may lead farther away


def solve_with_attitude(
    camera: Camera,
    points: Array,
    pixels: Array,
    covariance: Array,
    rotation: Array,
    attitude: Array,
    *,
    intrinsics: Array | None = None,
    shared: Array | None = None,
    lines: Lines | None = None,
    mask: Mask | None = None,
) -> Solution:
    """Position of least chi-square with the rotation (N, 3, 3) given up to an error of covariance ``attitude``.

    The pose covariance (N, 6, 6) has the attitude's own in its lower right part, and above it how both errors go
    together; that over the attitude's covariance is how far the position moves with the attitude. Where points err
    together, ``covariance`` is what each has of its own, and ``shared`` (N, K, 2, M) how far they move with each
    of M standard normal causes; or ``covariance`` is that of all of them together, (N, 2 K, 2 K). ``lines`` count
    beside the points, independent of them; the points alone must give a first position.
    """
    alone = covariance if covariance.ndim == 4 else own_blocks(covariance)
    if shared is not None:
        alone = alone + shared @ np.swapaxes(shared, 2, 3)  # what each has in all leads nearer than its own
    first = solve_position(camera, points, pixels, alone, rotation, mask=mask)
    good = np.flatnonzero(first.converged)
    if not len(good):
        return first
    mask = np.ones(pixels.shape[:2], dtype=bool) if mask is None else mask
    position, cost, total = step_with_attitude(
        camera, points if points.ndim == 2 else points[good], pixels[good], covariance[good], rotation[good],
        np.broadcast_to(attitude, (len(pixels), 3, 3))[good], first.position[good],
        intrinsics=intrinsics, shared=None if shared is None else shared[good], mask=mask[good],
        lines=None if lines is None else lines.select(good), steps=_STEPS if lines is None else _STEPS_WITH_LINES,
    )  # fmt: skip
    lost = ~(np.isfinite(position).all(1) & np.isfinite(cost) & np.isfinite(total).all((1, 2)))
    position[lost], cost[lost], total[lost] = np.nan, np.inf, np.nan
    failure = first.failure.copy()
    failure[good[lost]] = Failure.NOT_CONVERGED
    return replace(
        first,
        position=placed_at(first.position, good, position),
        cost=placed_at(first.cost, good, cost),
        covariance=placed_at(first.covariance, good, total),
        dof=first.dof if lines is None else first.dof + 2 * lines.stations.shape[1],
        failure=failure,
    )


def step_with_attitude(
    camera: Camera,
    points: Array,
    pixels: Array,
    covariance: Array,
    rotation: Array,
    attitude: Array,
    position: Array,
    *,
    intrinsics: Array | None = None,
    shared: Array | None = None,
    lines: Lines | None = None,
    mask: Mask | None = None,
    steps: int = 1,
) -> tuple[Array, Array, Array]:
    """Positions (N, 3) a few Gauss-Newton steps from given ones, their costs (N,) and covariances (N, 6, 6).

    One step from where a filter expects to be is all that its linear update would make of the pixels. Its weights
    do not depend on the pixels' own errors; those of a solution do, which then looks the surer the nearer it errs.
    """
    mask = np.ones(pixels.shape[:2], dtype=bool) if mask is None else mask
    kept = np.repeat(mask, 2, axis=1)
    spread = np.broadcast_to(attitude, (len(pixels), 3, 3))
    own = block_diagonal(covariance, kept)
    if shared is not None:
        causes = np.where(kept[..., None], shared.reshape(*kept.shape, -1), 0.0)
        own = own + causes @ np.swapaxes(causes, 1, 2)
    if lines is not None:
        own = _joined(own, lines.covariance)
    for _ in range(steps):
        by_pose, residual = linearised_pose(camera, rotation, position, points, pixels, kept)
        if lines is not None:
            away, by_line = line_residuals(camera, rotation, position, lines)
            by_pose, residual = np.concatenate([by_pose, by_line], 1), np.concatenate([residual, away], 1)
        by_position, by_angle = by_pose[..., :3], by_pose[..., 3:]
        noise = own + by_angle @ spread @ np.swapaxes(by_angle, 1, 2)
        if intrinsics is not None:
            by_lens = _by_intrinsics(camera, rotation, position, points, kept, lines)
            noise = noise + by_lens @ intrinsics @ np.swapaxes(by_lens, 1, 2)
        solved = np.linalg.solve(noise, np.concatenate([by_position, residual[..., None]], axis=2))
        weighted = np.swapaxes(solved[..., :3], 1, 2)
        inner = np.linalg.inv(weighted @ by_position)
        gain = inner @ weighted
        step = (gain @ residual[..., None])[..., 0]
        position = position + step
        left = residual - (by_position @ step[..., None])[..., 0]
    cost = (left * np.linalg.solve(noise, left[..., None])[..., 0]).sum(1)
    total = np.zeros((len(position), 6, 6))
    total[:, :3, :3], total[:, 3:, 3:] = (inner + np.swapaxes(inner, 1, 2)) / 2, spread
    total[:, :3, 3:] = -gain @ by_angle @ spread
    total[:, 3:, :3] = np.swapaxes(total[:, :3, 3:], 1, 2)
    return position, cost, total


def own_blocks(covariance: Array) -> Array:
    """Each point's own covariance (N, K, 2, 2) of all of them together (N, 2 K, 2 K)."""
    count = covariance.shape[1] // 2
    blocks = covariance.reshape(len(covariance), count, 2, count, 2)
    return np.moveaxis(blocks[:, np.arange(count), :, np.arange(count)], 0, 1)


def linearised_pose(
    camera: Camera, rotation: Array, position: Array, points: Array, pixels: Array, kept: Mask
) -> tuple[Array, Array]:
    """Jacobian by pose (N, 2 K, 6) and residuals (N, 2 K), zero where masked out."""
    rows = (len(position), kept.shape[1])
    jacobian = pose_jacobian(camera, rotation, position, points).reshape(*rows, 6)
    residual = (pixels - project_points(camera, rotation, position, points)).reshape(rows)
    return np.where(kept[..., None], jacobian, 0.0), np.where(kept, residual, 0.0)


def _by_intrinsics(
    camera: Camera, rotation: Array, position: Array, points: Array, kept: Mask, lines: Lines | None
) -> Array:
    """Jacobian of points and lines by the camera's parameters (N, 2 K + 2 L, 9), zero where masked out."""
    jacobian = intrinsics_jacobian(camera, to_camera(rotation, position, points))
    by_points = np.where(kept[..., None], jacobian.reshape(len(position), kept.shape[1], 9), 0.0)
    if lines is None:
        return by_points
    return np.concatenate([by_points, line_intrinsics_jacobian(camera, rotation, position, lines)], axis=1)


def _joined(first: Array, second: Array) -> Array:
    """Matrices (N, A, A) and (N, B, B) as the diagonal blocks of one (N, A + B, A + B)."""
    size = first.shape[1]
    result = np.zeros((len(first), size + second.shape[1], size + second.shape[1]))
    result[:, :size, :size], result[:, size:, size:] = first, second
    return result


def block_diagonal(covariance: Array, kept: Mask) -> Array:
    """Covariances (N, K, 2, 2), or one (N, 2 K, 2 K), as the latter; ones on the diagonal where masked out."""
    frames, count = len(covariance), kept.shape[1] // 2
    result = covariance
    if covariance.ndim == 4:
        result = np.zeros((frames, count, 2, count, 2))
        result[:, np.arange(count), :, np.arange(count), :] = np.moveaxis(covariance, 1, 0)
    result = np.where(kept[:, :, None] & kept[:, None, :], result.reshape(frames, 2 * count, 2 * count), 0.0)
    result[:, np.arange(2 * count), np.arange(2 * count)] += ~kept
    return result


def placed_at(array: Array, rows: NDArray[np.intp], values: Array) -> Array:
    """The array with other values in some rows."""
    result = array.copy()
    result[rows] = values
    return result
