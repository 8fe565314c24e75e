"""Pose of any object in camera axes with its covariance: ``solve_pnp``, with the interface of OpenCV's ``solvePnP``.

The solvers in ``pnp`` return the pose of the camera relative to the points. This module converts it to OpenCV's
convention: tvec is the position of the object's origin in camera axes (x right, y down, z forward), and rvec rotates
object axes to camera axes. The covariance has the order of ROS's PoseWithCovariance: x, y, z, then rotations about
the fixed x, y and z axes of the camera. Correlated pixel errors are given as a joint covariance (2 K, 2 K).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from halopose.errors import HaloposeError
from halopose.geometry.camera import Camera, log_so3, skew
from halopose.geometry.joint import solve_jointly
from halopose.geometry.observations import Observations, block_diagonal, diagonal_blocks
from halopose.geometry.pnp import solve_pose
from halopose.types import Array, Mask


@dataclass(frozen=True)
class ObjectPose:
    """Poses of an object in camera axes; without the leading N if one image was given.

    Attributes:
        retval: Whether there is a pose (N,); the pose is NaN if not.
        rvec: Rotation vectors (N, 3) as in OpenCV.
        tvec: Translations (N, 3) as in OpenCV.
        covariance: Covariances (N, 6, 6) about the camera's axes, translation before rotation.
        cost: Chi-square of the residuals (N,).
        dof: Degrees of freedom of the cost (N,).
        ambiguity: Cost divided by the cost of the other pose that a plane allows (N,): 0 without another pose, 1 if
            both fit equally well.
        reasons: Outcome of each image in words.
    """

    retval: Mask
    rvec: Array
    tvec: Array
    covariance: Array
    cost: Array
    dof: NDArray[np.int64]
    ambiguity: Array
    reasons: list[str]

    @property
    def opencv(self) -> tuple[bool, Array, Array]:
        """Result of one image in the form of ``cv2.solvePnP``: retval, rvec (3, 1), tvec (3, 1)."""
        if self.rvec.ndim != 1:
            raise HaloposeError("OpenCV's result is for one image: give image_points of shape (K, 2)")
        return bool(self.retval), self.rvec[:, None], self.tvec[:, None]

    @property
    def quaternion(self) -> Array:
        """Rotations as quaternions x, y, z, w (N, 4), the order of ROS."""
        angle = np.linalg.norm(self.rvec, axis=-1, keepdims=True)
        half = 0.5 * np.sinc(angle / 2 / np.pi)
        return np.concatenate([self.rvec * half, np.cos(angle / 2)], axis=-1)


def solve_pnp(
    object_points: ArrayLike,
    image_points: ArrayLike,
    covariances: ArrayLike,
    camera: Camera,
    *,
    mask: Mask | None = None,
    nu: Array | None = None,
) -> ObjectPose:
    """Find the pose of an object from four or more points.

    Args:
        object_points: Points of the object (K, 3) or (N, K, 3).
        image_points: Their pixels (K, 2) or (N, K, 2).
        covariances: In pixel^2: (K, 2, 2) or (N, K, 2, 2); joint covariances (2 K, 2 K) or (N, 2 K, 2 K) in the
            order x1, y1, x2, ...; or one variance for all points.
        camera: The camera; ``Camera.from_opencv`` converts OpenCV's cameraMatrix and distCoeffs.
        mask: (K,) or (N, K), true for the points to use. None: all.
        nu: Degrees of freedom (K,) of Student-t residuals with ``covariances`` as scale matrices. None: Gaussian.

    Example:
        >>> camera = Camera.from_opencv([[800, 0, 320], [0, 800, 240], [0, 0, 1]])
        >>> square = np.array([[-0.1, 0.1, 0], [0.1, 0.1, 0], [0.1, -0.1, 0], [-0.1, -0.1, 0]])  # metres
        >>> seen = np.array([[278.3, 200.1], [358.5, 203.2], [358.4, 276.9], [278.4, 279.8]])
        >>> pose = solve_pnp(square, seen, 0.3**2, camera)
        >>> bool(pose.retval), pose.covariance.shape
        (True, (6, 6))
    """
    points, pixels = np.asarray(object_points, dtype=np.float64), np.asarray(image_points, dtype=np.float64)
    if pixels.ndim not in (2, 3) or pixels.shape[-1] != 2:
        raise HaloposeError(f"image_points should have shape (K, 2) or (N, K, 2), got {pixels.shape}")
    single = pixels.ndim == 2
    pixels = pixels[None] if single else pixels
    blocks, joint = _covariances(np.asarray(covariances, dtype=np.float64), *pixels.shape[:2])
    kept = None if mask is None else np.broadcast_to(np.asarray(mask, dtype=bool), pixels.shape[:2])
    if joint is not None and nu is not None:
        raise HaloposeError(
            "joint covariances with Student-t residuals are not supported: leave nu out, or give covariances "
            "(N, K, 2, 2)"
        )
    solution = (
        solve_pose(Observations(camera, points, pixels, blocks, mask=kept, nu=nu), ground=False)
        if joint is None
        else solve_jointly(Observations(camera, points, pixels, _definite(joint, kept), mask=kept), ground=False)
    )
    rotation, position = solution.rotation, solution.position
    result = ObjectPose(
        solution.converged,
        log_so3(rotation),
        -(rotation @ position[..., None])[..., 0],
        _seen_from_camera(solution.covariance, rotation, position),
        solution.cost,
        solution.dof,
        solution.ambiguity,
        solution.reasons,
    )
    return _only(result) if single else result


def _only(many: ObjectPose) -> ObjectPose:
    """Remove the leading axis of a batch of one."""
    return ObjectPose(
        many.retval[0], many.rvec[0], many.tvec[0], many.covariance[0], many.cost[0], many.dof[0],
        many.ambiguity[0], many.reasons,
    )  # fmt: skip


def _covariances(given: Array, frames: int, count: int) -> tuple[Array, Array | None]:
    """Return covariances (N, K, 2, 2) of the points, and joint covariances (N, 2 K, 2 K) or None."""
    shape = (frames, count, 2, 2)
    if given.ndim == 0:
        return np.broadcast_to(given * np.eye(2), shape), None
    # The shape is ambiguous only for a single point, which determines no pose.
    if given.shape in ((count, 2, 2), shape):
        return np.broadcast_to(given, shape), None
    if given.shape in ((2 * count, 2 * count), (frames, 2 * count, 2 * count)):
        joint = np.broadcast_to(given, (frames, 2 * count, 2 * count))
        return diagonal_blocks(joint), joint
    raise HaloposeError(
        f"covariances of {count} points should have shape {shape}, {(frames, 2 * count, 2 * count)}, or the same "
        f"without the first axis, or be one variance; got {given.shape}"
    )


def _definite(joint: Array, kept: Mask | None) -> Array:
    """Check that joint covariances (N, 2 K, 2 K) are positive definite; set those with NaN at used points to NaN."""
    counted = joint if kept is None else block_diagonal(joint, np.repeat(kept, 2, axis=1))
    finite = np.asarray(np.isfinite(counted).all((1, 2)))
    if not (np.linalg.eigvalsh(counted[finite])[:, 0] > 0).all():
        raise HaloposeError("a joint covariance is not positive definite: check that it is symmetric")
    return np.where(finite[:, None, None], joint, np.nan)


def _seen_from_camera(covariance: Array, rotation: Array, position: Array) -> Array:
    """Convert covariances (N, 6, 6) of the camera's pose in object axes to those of the object's pose in camera axes.

    With t = -R p, a change dp, dtheta of the camera moves t by -R dp - R [p]x dtheta and rotates by -R dtheta.
    """
    change = np.zeros_like(covariance)
    change[:, :3, :3] = change[:, 3:, 3:] = -rotation
    change[:, :3, 3:] = -rotation @ skew(position)
    return np.asarray(change @ covariance @ np.swapaxes(change, 1, 2))
