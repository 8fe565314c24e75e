"""Covariance of a pose or position from the covariances of the keypoints (paper, first-order propagation).

In: poses (N, 3, 3) and (N, 3), runway points (K, 3) or (N, K, 3), covariances in pixel^2 of each keypoint
(N, K, 2, 2), or of all together (N, 2 K, 2 K).
Out: (N, 6, 6), positions before angles as in ROS, both along the runway axes; (N, 3, 3) is its upper left part.

What is known only with an error, n, adds to the covariance of the minimiser x of ||y - h(x, n)||^2 in the metric W
by the implicit function theorem, in Gauss-Newton's approximation: dx / dn = -(Jx' W Jx)^-1 Jx' W Jn.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from halopose.errors import HaloposeError
from halopose.geometry.camera import Camera, Mount, intrinsics_jacobian, pose_difference, pose_jacobian, skew, to_camera
from halopose.geometry.observations import block_diagonal
from halopose.geometry.pnp import Solution
from halopose.types import Array, Mask

Solver = Callable[[Array], Solution]  # pixels (M, K, 2) to M poses


def fixed_rotation_covariance(
    camera: Camera, rotation: Array, position: Array, points: Array, covariance: Array, mask: Mask | None = None
) -> Array:
    """Position covariance (N, 3, 3) with the rotation held fixed, (J' W J)^-1: the paper's form.

    It is the whole truth only if the rotation is; after a full PnP it leaves out the rotation's own error.
    """
    by_pose, _ = _whitened(camera, rotation, position, points, covariance, mask)
    return _inverse(by_pose[..., :3])


def pose_covariance(
    camera: Camera,
    rotation: Array,
    position: Array,
    points: Array,
    covariance: Array,
    mask: Mask | None = None,
    *,
    intrinsics: Array | None = None,
) -> Array:
    """Pose covariance (N, 6, 6) of a full PnP; its position part has the rotation marginalised out.

    ``intrinsics`` (9, 9) is the covariance of the camera's parameters in the order of ``INTRINSICS``.
    """
    by_pose, by_intrinsics = _whitened(camera, rotation, position, points, covariance, mask)
    total = _inverse(by_pose)
    if intrinsics is not None:
        total = total + _sandwich(-total @ _transpose(by_pose) @ by_intrinsics, intrinsics)
    return total


def position_covariance(
    camera: Camera,
    rotation: Array,
    position: Array,
    points: Array,
    covariance: Array,
    mask: Mask | None = None,
    *,
    attitude: Array | None = None,
    intrinsics: Array | None = None,
) -> Array:
    """Pose covariance (N, 6, 6) of a PnP for the position alone, with the attitude's error carried over.

    ``attitude`` (3, 3) or (N, 3, 3) is the covariance of the camera's given rotation about the runway axes; the
    position moves with it, so that the two are correlated. Without it the attitude counts as exact.
    """
    by_pose, by_intrinsics = _whitened(camera, rotation, position, points, covariance, mask)
    by_position, by_angle = by_pose[..., :3], by_pose[..., 3:]
    inner = _inverse(by_position)
    gain = -inner @ _transpose(by_position)
    total = np.zeros((len(inner), 6, 6))
    total[:, :3, :3] = inner
    if intrinsics is not None:
        total[:, :3, :3] += _sandwich(gain @ by_intrinsics, intrinsics)
    if attitude is not None:
        carried = np.concatenate([gain @ by_angle, np.broadcast_to(np.eye(3), inner.shape)], axis=1)
        total += _sandwich(carried, attitude)
    return total


def camera_attitude_covariance(attitude: Array, rotation: Array, mount: Array) -> Array:
    """Covariance (N, 3, 3) of the camera's attitude from the aircraft's (3, 3), about the runway axes.

    ``mount`` (3, 3) is the covariance of the mounting angles about the camera axes, ``rotation`` (N, 3, 3) the
    camera's.
    """
    return attitude + _sandwich(_transpose(rotation), mount)


def body_covariance(covariance: Array, rotation: Array, mount: Mount, mount_covariance: Array | None = None) -> Array:
    """Pose covariance (N, 6, 6) of the aircraft's reference point from the camera's (N, 6, 6).

    ``rotation`` (N, 3, 3) is the camera's. ``mount_covariance`` (6, 6) is that of the lever arm along the body
    axes and of the mounting angles about the camera axes. After a PnP for the position alone the mounting angles
    already count in the attitude: leave them zero here.
    """
    outward = _transpose(rotation)
    arm = skew((outward @ mount.rotation) @ mount.lever_arm)
    change = np.broadcast_to(np.eye(6), covariance.shape).copy()
    change[:, :3, 3:] = arm
    total = _sandwich(change, covariance)
    if mount_covariance is not None:
        by_mount = np.zeros_like(change)
        by_mount[:, :3, :3] = -outward @ mount.rotation
        by_mount[:, :3, 3:] = arm @ outward
        by_mount[:, 3:, 3:] = outward
        total = total + _sandwich(by_mount, mount_covariance)
    return total


def unscented_covariance(solve: Solver, pixels: Array, covariance: Array) -> Array:
    """Pose covariance (6, 6) of one frame through 4 K sigma points, pixels (K, 2) and covariances (K, 2, 2) or
    (2 K, 2 K).

    The sigma points lie sqrt(2 K) standard deviations out and weigh alike (kappa = 0), which keeps the result
    positive semidefinite; it is taken about their mean.
    """
    count = len(pixels)
    offsets = _factor(covariance, count).T.reshape(2 * count, count, 2) * np.sqrt(2 * count)
    return _spread(solve, pixels, pixels + np.concatenate([offsets, -offsets]))


def monte_carlo_covariance(solve: Solver, pixels: Array, covariance: Array, draws: int = 1000, seed: int = 0) -> Array:
    """Pose covariance (6, 6) of one frame from random pixels around its own (K, 2)."""
    noise = np.random.default_rng(seed).normal(size=(draws, pixels.size))
    offsets = noise @ _factor(covariance, len(pixels)).T
    return _spread(solve, pixels, pixels + offsets.reshape(draws, *pixels.shape))


def _spread(solve: Solver, pixels: Array, around: Array) -> Array:
    """Covariance (6, 6) of the poses of many pixels (M, K, 2), as changes of the pose of the given ones."""
    centre, found = solve(pixels[None]), solve(around)
    if not (centre.converged.all() and found.converged.all()):
        reasons = sorted({reason for reason in centre.reasons + found.reasons if reason != "solved"})
        raise HaloposeError(f"some pixels within the noise give no pose, so it has no covariance: {reasons[0]}")
    change = pose_difference(centre.rotation, centre.position, found.rotation, found.position)
    change = change - change.mean(0)
    return change.T @ change / len(change)


def _whitened(
    camera: Camera, rotation: Array, position: Array, points: Array, covariance: Array, mask: Mask | None
) -> tuple[Array, Array]:
    """Whitened Jacobians by pose (N, 2 K, 6) and by intrinsics (N, 2 K, 9), zero where masked out."""
    used: Mask = np.array(True) if mask is None else mask[..., None, None]
    rows = (len(position), 2 * points.shape[-2])
    by_pose = pose_jacobian(camera, rotation, position, points)
    by_intrinsics = intrinsics_jacobian(camera, to_camera(rotation, position, points))
    if covariance.ndim == 4:
        factor = np.linalg.inv(np.linalg.cholesky(np.where(used, covariance, np.eye(2))))
        by_pose, by_intrinsics = factor @ by_pose, factor @ by_intrinsics
    # Not times zero: what is masked out may be anything, even behind the camera.
    by_pose = np.where(used, by_pose, 0.0).reshape(*rows, 6)
    by_intrinsics = np.where(used, by_intrinsics, 0.0).reshape(*rows, 9)
    if covariance.ndim == 3:
        kept = np.ones(rows, dtype=bool) if mask is None else np.repeat(mask, 2, axis=1)
        factor = np.linalg.inv(np.linalg.cholesky(block_diagonal(covariance, kept)))
        by_pose, by_intrinsics = factor @ by_pose, factor @ by_intrinsics
    return by_pose, by_intrinsics


def _factor(covariance: Array, count: int) -> Array:
    """The Cholesky factor (2 K, 2 K) of covariances (K, 2, 2) or (2 K, 2 K) of one frame."""
    whole = block_diagonal(covariance[None], np.ones((1, 2 * count), dtype=bool))[0]
    return np.linalg.cholesky(whole)


def _inverse(jacobian: Array) -> Array:
    """(J' J)^-1 (N, P, P) of whitened Jacobians (N, M, P), with columns scaled alike first."""
    scale = 1 / np.sqrt(np.square(jacobian).sum(1, keepdims=True))
    scaled = jacobian * scale
    return np.asarray(np.linalg.inv(_transpose(scaled) @ scaled) * (scale * _transpose(scale)))


def _sandwich(change: Array, covariance: Array) -> Array:
    return np.asarray(change @ covariance @ _transpose(change))


def _transpose(matrix: Array) -> Array:
    return np.swapaxes(matrix, -1, -2)
