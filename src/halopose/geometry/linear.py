"""One linearisation of a frame's residuals, and what every solution without one point would have been.

In: what was solved, and its solution. Out: a ``Linear`` with the position's covariance with all points and without
each, and how much of the chi-square goes with each point.

What is known with an error, the attitude and the camera's intrinsics, is unknown too, with a prior, and so is what
makes points err together: the rows of different points stay independent, and leaving one out is taking its rows
from the normal matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from halopose.geometry.camera import (
    Array,
    Camera,
    intrinsics_jacobian,
    pose_jacobian,
    project_points,
    to_camera,
)
from halopose.geometry.pnp import Solution
from halopose.geometry.pnp_refine import Mask


@dataclass(frozen=True)
class Linear:
    """Covariances of the position with all points (N, 3, 3) and without each (N, K, 3, 3), and shares (N, K).

    A share is how much lower the chi-square is without the point: under no fault a chi-square with two degrees of
    freedom. ``separation`` (N, K, 3) is how far the position moves. What cannot be solved is infinite.
    """

    covariance: Array
    without: Array
    separation: Array
    shares: Array


def linearise(
    camera: Camera,
    points: Array,
    pixels: Array,
    covariance: Array,
    solution: Solution,
    mask: Mask,
    *,
    rotation: Array | None = None,
    attitude: Array | None = None,
    intrinsics: Array | None = None,
    shared: Array | None = None,
) -> Linear:
    """Linearise at solutions (N) that all converged; the rest is what they were solved from."""
    turned = solution.rotation if rotation is None else rotation
    jacobian, prior = _unknowns(camera, points, turned, solution.position, rotation, attitude, intrinsics, shared)
    residual = pixels - project_points(camera, turned, solution.position, points)
    used = mask[..., None, None]
    factor = np.linalg.inv(np.linalg.cholesky(np.where(used, covariance, np.eye(2))))
    # Not times zero: what is masked out may be anything, even behind the camera.
    rows = np.where(used, factor @ jacobian, 0.0)
    left = np.where(used[..., 0], (factor @ residual[..., None])[..., 0], 0.0)
    normals = np.swapaxes(rows, -1, -2) @ rows  # (N, K, P, P)
    pulls = (np.swapaxes(rows, -1, -2) @ left[..., None])[..., 0]
    total, pull = normals.sum(1) + prior, pulls.sum(1)
    inverse = scaled_inverse(total)
    others = scaled_inverse(total[:, None] - normals)
    step = (inverse @ pull[..., None])[..., 0]
    moved = (others @ (pull[:, None] - pulls)[..., None])[..., 0]
    gained = (pull * step).sum(-1)
    kept = ((pull[:, None] - pulls) * moved).sum(-1)
    shares = np.square(left).sum(-1) + kept - gained[:, None]
    separation = np.where(used[..., 0], moved[..., :3] - step[:, None, :3], 0.0)
    finite = np.isfinite(others[..., 0, 0]) & mask
    return Linear(inverse[:, :3, :3], others[..., :3, :3], separation, np.where(finite, np.maximum(shares, 0.0), 0.0))


def _unknowns(
    camera: Camera,
    points: Array,
    turned: Array,
    position: Array,
    rotation: Array | None,
    attitude: Array | None,
    intrinsics: Array | None,
    shared: Array | None,
) -> tuple[Array, Array]:
    """Jacobian (N, K, 2, P) by the position, then by all else in units of its spread, and the prior (P, P)."""
    by_pose = pose_jacobian(camera, turned, position, points)
    parts, free = [by_pose[..., :3]], 3
    if rotation is None:
        parts, free = [by_pose], 6
    elif attitude is not None:
        parts.append(by_pose[..., 3:] @ root_of(attitude)[:, None])
    if intrinsics is not None:
        parts.append(intrinsics_jacobian(camera, to_camera(turned, position, points)) @ root_of(intrinsics))
    if shared is not None:
        parts.append(shared)
    jacobian = np.concatenate(parts, axis=-1)
    prior = np.zeros(jacobian.shape[-1])
    prior[free:] = 1.0
    return jacobian, np.diag(prior)


def root_of(covariance: Array) -> Array:
    """A factor R of covariances (..., m, m) = R R', also of those that know something exactly."""
    values, vectors = np.linalg.eigh(covariance)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0))[..., None, :])


def scaled_inverse(matrices: Array) -> Array:
    """Inverses of positive definite (..., P, P), their diagonals scaled to one first; infinite where singular."""
    diagonal = np.einsum("...ii->...i", matrices)
    sound = (diagonal > 0).all(-1)
    size = matrices.shape[-1]
    scale = 1 / np.sqrt(np.where(sound[..., None], diagonal, 1.0))
    scaled = np.where(sound[..., None, None], matrices * scale[..., None] * scale[..., None, :], np.eye(size))
    sound = sound & (np.linalg.eigvalsh(scaled)[..., 0] > 1e-13)
    inner = np.linalg.inv(np.where(sound[..., None, None], scaled, np.eye(size)))
    return np.where(sound[..., None, None], inner * scale[..., None] * scale[..., None, :], np.inf)
