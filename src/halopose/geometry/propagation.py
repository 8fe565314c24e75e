"""Covariance of a pose or position from the covariances of the keypoints (paper, first-order propagation).

Arguments that all functions share:
    rotation, position: Poses (N, 3, 3) and (N, 3) of the camera in world axes.
    points: World points (K, 3) or (N, K, 3).
    covariance: In pixel^2, of each keypoint (N, K, 2, 2), or joint (N, 2 K, 2 K).
    mask: (N, K), true for the points to use. None: all.

Pose covariances (N, 6, 6) are in world axes, position before rotation as in ROS.

Errors n of other inputs, such as the attitude, add to the covariance of the minimiser x of ||y - h(x, n)||^2 in the
metric W. By the implicit function theorem, dx / dn = -(Jx' W Jx)^-1 Jx' W Jn in Gauss-Newton's approximation.
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
    """Return the position covariance (N, 3, 3) for a fixed rotation, (J' W J)^-1 (paper).

    It is complete only if the rotation is exact. After a full PnP it does not contain the error of the rotation.
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
    """Return the pose covariance (N, 6, 6) of a full PnP; the rotation is marginalised out of its position part.

    Args:
        camera: The camera.
        rotation: See the module.
        position: See the module.
        points: See the module.
        covariance: See the module.
        mask: See the module.
        intrinsics: Covariance (9, 9) of the camera's parameters in the order of ``INTRINSICS``. None: exact.
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
    """Return the pose covariance (N, 6, 6) of a PnP for the position only, with the attitude error propagated.

    The position depends on the given attitude, so their errors are correlated.

    Args:
        camera: The camera.
        rotation: See the module.
        position: See the module.
        points: See the module.
        covariance: See the module.
        mask: See the module.
        attitude: Covariance (3, 3) or (N, 3, 3) of the given rotation about the world axes. None: exact.
        intrinsics: Covariance (9, 9) of the camera's parameters in the order of ``INTRINSICS``. None: exact.
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
    """Return the covariance (N, 3, 3) of the camera's attitude about the world axes.

    Args:
        attitude: Covariance of the vehicle's attitude (3, 3) about the world axes.
        rotation: Rotations of the camera (N, 3, 3).
        mount: Covariance of the mounting angles (3, 3) about the camera axes.
    """
    return attitude + _sandwich(_transpose(rotation), mount)


def body_covariance(covariance: Array, rotation: Array, mount: Mount, mount_covariance: Array | None = None) -> Array:
    """Convert the pose covariance of the camera to that of the vehicle's reference point.

    Args:
        covariance: Pose covariances of the camera (N, 6, 6).
        rotation: Rotations of the camera (N, 3, 3).
        mount: Mounting of the camera.
        mount_covariance: Covariance (6, 6) of the lever arm along the body axes and of the mounting angles about the
            camera axes. After a PnP for the position only, set the mounting angles to zero, because the attitude
            covariance already contains them.
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
    """Return the pose covariance (6, 6) of one frame by the unscented transform with 4 K sigma points.

    The sigma points lie sqrt(2 K) standard deviations from the pixels and have equal weights (kappa = 0). This keeps
    the result, taken about their mean, positive semidefinite.

    Args:
        solve: Solver.
        pixels: Pixels (K, 2).
        covariance: Covariances (K, 2, 2) or (2 K, 2 K).
    """
    count = len(pixels)
    offsets = _factor(covariance, count).T.reshape(2 * count, count, 2) * np.sqrt(2 * count)
    return _spread(solve, pixels, pixels + np.concatenate([offsets, -offsets]))


def monte_carlo_covariance(solve: Solver, pixels: Array, covariance: Array, draws: int = 1000, seed: int = 0) -> Array:
    """Return the pose covariance (6, 6) of one frame by Monte Carlo.

    Args:
        solve: Solver.
        pixels: Pixels (K, 2).
        covariance: Covariances (K, 2, 2) or (2 K, 2 K).
        draws: Number of random draws.
        seed: Random seed.
    """
    noise = np.random.default_rng(seed).normal(size=(draws, pixels.size))
    offsets = noise @ _factor(covariance, len(pixels)).T
    return _spread(solve, pixels, pixels + offsets.reshape(draws, *pixels.shape))


def _spread(solve: Solver, pixels: Array, around: Array) -> Array:
    """Return the covariance (6, 6) of the poses of sampled pixels (M, K, 2), relative to the pose of the pixels."""
    centre, found = solve(pixels[None]), solve(around)
    if not (centre.converged.all() and found.converged.all()):
        reasons = sorted({reason for reason in centre.reasons + found.reasons if reason != "solved"})
        raise HaloposeError(f"no pose, and so no covariance, for some pixels within the noise: {reasons[0]}")
    change = pose_difference(centre.rotation, centre.position, found.rotation, found.position)
    change = change - change.mean(0)
    return change.T @ change / len(change)


def _whitened(
    camera: Camera, rotation: Array, position: Array, points: Array, covariance: Array, mask: Mask | None
) -> tuple[Array, Array]:
    """Return whitened Jacobians by pose (N, 2 K, 6) and by intrinsics (N, 2 K, 9); zero where masked out."""
    used: Mask = np.array(True) if mask is None else mask[..., None, None]
    rows = (len(position), 2 * points.shape[-2])
    by_pose = pose_jacobian(camera, rotation, position, points)
    by_intrinsics = intrinsics_jacobian(camera, to_camera(rotation, position, points))
    if covariance.ndim == 4:
        factor = np.linalg.inv(np.linalg.cholesky(np.where(used, covariance, np.eye(2))))
        by_pose, by_intrinsics = factor @ by_pose, factor @ by_intrinsics
    # np.where instead of a product with zero: masked points may be NaN or behind the camera.
    by_pose = np.where(used, by_pose, 0.0).reshape(*rows, 6)
    by_intrinsics = np.where(used, by_intrinsics, 0.0).reshape(*rows, 9)
    if covariance.ndim == 3:
        kept = np.ones(rows, dtype=bool) if mask is None else np.repeat(mask, 2, axis=1)
        factor = np.linalg.inv(np.linalg.cholesky(block_diagonal(covariance, kept)))
        by_pose, by_intrinsics = factor @ by_pose, factor @ by_intrinsics
    return by_pose, by_intrinsics


def _factor(covariance: Array, count: int) -> Array:
    """Return the Cholesky factor (2 K, 2 K) of covariances (K, 2, 2) or (2 K, 2 K) of one frame."""
    whole = block_diagonal(covariance[None], np.ones((1, 2 * count), dtype=bool))[0]
    return np.linalg.cholesky(whole)


def _inverse(jacobian: Array) -> Array:
    """Return (J' J)^-1 (N, P, P) of whitened Jacobians (N, M, P); columns are scaled to unit length first."""
    scale = 1 / np.sqrt(np.square(jacobian).sum(1, keepdims=True))
    scaled = jacobian * scale
    return np.asarray(np.linalg.inv(_transpose(scaled) @ scaled) * (scale * _transpose(scale)))


def _sandwich(change: Array, covariance: Array) -> Array:
    return np.asarray(change @ covariance @ _transpose(change))


def _transpose(matrix: Array) -> Array:
    return np.swapaxes(matrix, -1, -2)
