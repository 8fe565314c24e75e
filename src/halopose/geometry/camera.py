"""Cameras, their mounting and poses: rotations, projection with analytic Jacobians, undistortion.

Axes:
    World: x forward, y left, z up. The origin and the direction of x are chosen by the caller.
    Body: x forward, y right, z down.
    Camera: x right, y down, z forward. Pixel centres are at whole numbers.

A pose is a rotation from world axes to camera axes and the position of the camera in world axes:
point in camera = rotation @ (point - position). A perturbation (dp, dtheta) changes it to position + dp and
rotation @ Exp(-dtheta). Both parts are along the fixed world axes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from halopose.errors import HaloposeError
from halopose.types import Array

INTRINSICS = ("fx", "fy", "cx", "cy", "k1", "k2", "p1", "p2", "k3")  # order of the intrinsics' Jacobian
_FLIP = np.diag([1.0, -1.0, -1.0])  # forward-left-up to forward-right-down, and back
_CAMERA_FROM_FORWARD = np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
_SMALL_ANGLE = 1e-4
_NEWTON_STEPS = 20
_NEWTON_TOLERANCE = 1e-13  # in normalised coordinates


@dataclass(frozen=True)
class Camera:
    """Pinhole camera with Brown distortion.

    Attributes:
        fx: Focal length in x, in pixels.
        fy: Focal length in y, in pixels.
        cx: Principal point in x, in pixels.
        cy: Principal point in y, in pixels.
        width: Image width in pixels.
        height: Image height in pixels.
        distortion: Coefficients (k1, k2, p1, p2, k3) as in OpenCV.
    """

    fx: float
    fy: float
    cx: float
    cy: float
    width: int
    height: int
    distortion: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        if len(self.distortion) != 5:
            raise HaloposeError(f"a camera takes 5 distortion coefficients, got {len(self.distortion)}")
        if not (self.fx > 0 and self.fy > 0 and all(map(math.isfinite, self.parameters))):
            raise HaloposeError("a camera takes positive focal lengths and finite intrinsics")

    @classmethod
    def from_fov(cls, width: int, height: int, horizontal_fov: float) -> Camera:
        """Make a camera with square pixels and a centred principal point.

        Args:
            width: Image width in pixels.
            height: Image height in pixels.
            horizontal_fov: Horizontal field of view in radians.
        """
        focal = width / 2 / math.tan(horizontal_fov / 2)
        return cls(focal, focal, (width - 1) / 2, (height - 1) / 2, width, height)

    @classmethod
    def from_opencv(
        cls, matrix: ArrayLike, distortion: ArrayLike | None = None, size: tuple[int, int] | None = None
    ) -> Camera:
        """Make a camera from OpenCV's calibration.

        Args:
            matrix: OpenCV's cameraMatrix (3, 3).
            distortion: OpenCV's distCoeffs, 4 or 5 coefficients. None: no distortion.
            size: Image width and height; default: from the principal point.
        """
        entries = np.asarray(matrix, dtype=np.float64)
        if entries.shape != (3, 3) or abs(entries[0, 1]) > 1e-9 * abs(entries[0, 0]):
            raise HaloposeError(f"a camera matrix is (3, 3) without skew, got {entries.tolist()}")
        lens = np.zeros(0) if distortion is None else np.asarray(distortion, dtype=np.float64).ravel()
        if len(lens) > 5 and lens[5:].any():
            raise HaloposeError(
                "only the distortion coefficients k1, k2, p1, p2, k3 are supported: calibrate with five coefficients"
            )
        five = np.zeros(5)
        five[: min(len(lens), 5)] = lens[:5]
        (fx, _, cx), (_, fy, cy) = entries[:2]
        width, height = size or (round(2 * cx + 1), round(2 * cy + 1))
        k1, k2, p1, p2, k3 = map(float, five)
        return cls(float(fx), float(fy), float(cx), float(cy), int(width), int(height), (k1, k2, p1, p2, k3))

    def part(self, left: int, top: int, right: int, bottom: int, width: int) -> Camera:
        """Return the camera of a crop of the image that is scaled to a width."""
        scale = width / (right - left)
        cx, cy = scale * (self.cx - left + 0.5) - 0.5, scale * (self.cy - top + 0.5) - 0.5
        height = round(scale * (bottom - top))
        return Camera(scale * self.fx, scale * self.fy, cx, cy, width, height, self.distortion)

    @property
    def matrix(self) -> Array:
        """Intrinsic matrix (3, 3)."""
        return np.array([[self.fx, 0.0, self.cx], [0.0, self.fy, self.cy], [0.0, 0.0, 1.0]])

    @cached_property
    def centre_and_focal(self) -> tuple[Array, Array]:
        """(cx, cy) and (fx, fy), each (2, 1, 1)."""
        return np.array([[[self.cx]], [[self.cy]]]), np.array([[[self.fx]], [[self.fy]]])

    @property
    def parameters(self) -> tuple[float, ...]:
        """The nine parameters in the order of ``INTRINSICS``."""
        return (self.fx, self.fy, self.cx, self.cy, *self.distortion)

    @cached_property
    def distorted(self) -> bool:
        """Whether any distortion coefficient is not zero."""
        return any(self.distortion)

    def contains(self, pixels: Array) -> NDArray[np.bool_]:
        """Return which pixels (..., 2) lie in the image (...); false for NaN."""
        u, v = pixels[..., 0], pixels[..., 1]
        return (u >= -0.5) & (u <= self.width - 0.5) & (v >= -0.5) & (v <= self.height - 0.5)


def _zeros() -> Array:
    return np.zeros(3)


@dataclass(frozen=True)
class Mount:
    """Mounting of the camera on a vehicle.

    Attributes:
        rotation: Rotation (3, 3) from body axes to camera axes.
        lever_arm: Position of the camera (3,) in body axes.
    """

    rotation: Array = field(default_factory=_CAMERA_FROM_FORWARD.copy)
    lever_arm: Array = field(default_factory=_zeros)

    def __post_init__(self) -> None:
        if np.shape(self.rotation) != (3, 3) or np.shape(self.lever_arm) != (3,):
            raise HaloposeError(
                "a mount takes a rotation (3, 3) and a lever arm (3,), "
                f"got {np.shape(self.rotation)} and {np.shape(self.lever_arm)}"
            )
        if not np.allclose(self.rotation @ np.transpose(self.rotation), np.eye(3), atol=1e-6):
            raise HaloposeError("a mount's rotation must be orthonormal")
        if np.linalg.det(self.rotation) < 0:
            raise HaloposeError("a mount's rotation must not be a reflection: its determinant is -1")

    @classmethod
    def looking(
        cls, yaw: float = 0.0, pitch: float = 0.0, roll: float = 0.0, lever_arm: ArrayLike = (0.0, 0.0, 0.0)
    ) -> Mount:
        """Make the mount of a forward-looking camera, rotated by yaw, pitch and roll about the body axes.

        Args:
            yaw: Angle in radians.
            pitch: Angle in radians; negative looks down.
            roll: Angle in radians.
            lever_arm: Position of the camera (3,) in body axes.
        """
        turned = np.swapaxes(_body_to_reference(np.asarray(yaw), np.asarray(pitch), np.asarray(roll)), -1, -2)
        return cls(_CAMERA_FROM_FORWARD @ turned, np.asarray(lever_arm, dtype=np.float64))


# --- rotations --------------------------------------------------------------------------------------------


def skew(vector: Array) -> Array:
    """Return cross-product matrices (..., 3, 3) of vectors (..., 3): skew(a) @ b = a x b."""
    x, y, z = vector[..., 0], vector[..., 1], vector[..., 2]
    zero = np.zeros_like(x)
    rows = np.stack([zero, -z, y, z, zero, -x, -y, x, zero], axis=-1)
    return rows.reshape(*x.shape, 3, 3)


def exp_so3(vector: Array) -> Array:
    """Return rotation matrices (..., 3, 3) of rotation vectors (..., 3) (Rodrigues)."""
    angle = np.sqrt(np.square(vector).sum(-1))[..., None, None]
    square = angle * angle
    small = angle < _SMALL_ANGLE
    safe = np.where(small, 1.0, angle)
    first = np.where(small, 1 - square / 6, np.sin(safe) / safe)
    second = np.where(small, 0.5 - square / 24, 2 * np.square(np.sin(safe / 2) / safe))
    cross = skew(vector)
    return np.eye(3) + first * cross + second * (cross @ cross)


def log_so3(rotation: Array) -> Array:
    """Return rotation vectors (..., 3) of rotation matrices (..., 3, 3), of length pi at most."""
    diagonal = np.diagonal(rotation, axis1=-2, axis2=-1)
    trace = diagonal.sum(-1, keepdims=True)
    # 4 q q^T of the quaternion q. Its row with the largest diagonal entry is q up to scale, without cancellation.
    outer = np.empty((*rotation.shape[:-2], 4, 4))
    outer[..., 0, 0] = 1 + trace[..., 0]
    outer[..., [1, 2, 3], [1, 2, 3]] = 1 - trace + 2 * diagonal
    for i, j, k in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        outer[..., 0, i + 1] = outer[..., i + 1, 0] = rotation[..., k, j] - rotation[..., j, k]
        outer[..., i + 1, j + 1] = outer[..., j + 1, i + 1] = rotation[..., i, j] + rotation[..., j, i]
    best = np.argmax(np.diagonal(outer, axis1=-2, axis2=-1), axis=-1)[..., None, None]
    quaternion = np.take_along_axis(outer, best, axis=-2)[..., 0, :]
    quaternion = quaternion / np.linalg.norm(quaternion, axis=-1, keepdims=True)
    quaternion = np.where(quaternion[..., :1] < 0, -quaternion, quaternion)
    sine = np.linalg.norm(quaternion[..., 1:], axis=-1, keepdims=True)
    tiny = sine < 1e-12
    scale = np.where(tiny, 2.0, 2 * np.arctan2(sine, quaternion[..., :1]) / np.where(tiny, 1.0, sine))
    return scale * quaternion[..., 1:]


def _body_to_reference(yaw: Array, pitch: Array, roll: Array) -> Array:
    """Return Rz(yaw) Ry(pitch) Rx(roll) (..., 3, 3), from body axes to forward-right-down reference axes."""
    yaw, pitch, roll = np.broadcast_arrays(*(np.asarray(a, dtype=np.float64) for a in (yaw, pitch, roll)))
    cy, sy, cp, sp, cr, sr = np.cos(yaw), np.sin(yaw), np.cos(pitch), np.sin(pitch), np.cos(roll), np.sin(roll)
    rows = [
        cy * cp, cy * sp * sr - sy * cr, cy * sp * cr + sy * sr,
        sy * cp, sy * sp * sr + cy * cr, sy * sp * cr - cy * sr,
        -sp, cp * sr, cp * cr,
    ]  # fmt: skip
    return np.stack(rows, axis=-1).reshape(*yaw.shape, 3, 3)


def rotation_from_angles(yaw: ArrayLike, pitch: ArrayLike, roll: ArrayLike) -> Array:
    """Return rotations (..., 3, 3) from world axes to body axes.

    The angles are aerospace yaw, pitch and roll relative to forward-right-down axes.

    Args:
        yaw: (...) in radians; positive turns right.
        pitch: (...) in radians; positive is nose up.
        roll: (...) in radians; positive is right wing down.
    """
    body_to_frd = _body_to_reference(*(np.asarray(a, dtype=np.float64) for a in (yaw, pitch, roll)))
    return np.swapaxes(body_to_frd, -1, -2) @ _FLIP


def angles_from_rotation(rotation: Array) -> tuple[Array, Array, Array]:
    """Return yaw, pitch and roll (...) of rotations (..., 3, 3) from world axes to body axes."""
    frd = rotation @ _FLIP  # body from forward-right-down
    pitch = np.arctan2(-frd[..., 0, 2], np.hypot(frd[..., 0, 0], frd[..., 0, 1]))
    return np.arctan2(frd[..., 0, 1], frd[..., 0, 0]), pitch, np.arctan2(frd[..., 1, 2], frd[..., 2, 2])


def look_at(position: ArrayLike, target: ArrayLike, roll: ArrayLike = 0.0) -> Array:
    """Return rotations (..., 3, 3), world to camera, of cameras that look at a target.

    Args:
        position: Positions of the cameras (..., 3).
        target: Points that they look at (..., 3).
        roll: Roll (...) in radians.
    """
    aim = np.asarray(target, dtype=np.float64) - np.asarray(position, dtype=np.float64)
    yaw = np.arctan2(-aim[..., 1], aim[..., 0])
    pitch = np.arctan2(aim[..., 2], np.hypot(aim[..., 0], aim[..., 1]))
    return _CAMERA_FROM_FORWARD @ rotation_from_angles(yaw, pitch, roll)


# --- poses ------------------------------------------------------------------------------------------------


def camera_pose(rotation: Array, position: Array, mount: Mount) -> tuple[Array, Array]:
    """Return the camera's pose of a vehicle's pose: rotation (..., 3, 3) world to body, position (..., 3)."""
    return mount.rotation @ rotation, position + mount.lever_arm @ rotation


def body_pose(rotation: Array, position: Array, mount: Mount) -> tuple[Array, Array]:
    """Return the vehicle's pose, with rotation (..., 3, 3) world to body, of a camera's pose."""
    body = mount.rotation.T @ rotation
    return body, position - mount.lever_arm @ body


def perturb(rotation: Array, position: Array, change: Array) -> tuple[Array, Array]:
    """Perturb a pose by changes (..., 6): dp and dtheta along the world axes."""
    return rotation @ exp_so3(-change[..., 3:]), position + change[..., :3]


def pose_difference(rotation: Array, position: Array, other_rotation: Array, other_position: Array) -> Array:
    """Return the change (..., 6) from the first pose to the other; the inverse of ``perturb``."""
    turn = log_so3(np.swapaxes(other_rotation, -1, -2) @ rotation)
    return np.concatenate([other_position - position, turn], axis=-1)


# --- projection -------------------------------------------------------------------------------------------


def to_camera(rotation: Array, position: Array, points: Array) -> Array:
    """Transform points (K, 3) or (..., K, 3) from world axes to camera axes (..., K, 3)."""
    return (points - position[..., None, :]) @ np.swapaxes(rotation, -1, -2)


def project(camera: Camera, points: Array) -> Array:
    """Project points (..., 3) in camera axes to pixels (..., 2); NaN behind the camera."""
    x, y = _normalised(points)
    if camera.distorted:
        x, y = distort(x, y, camera.distortion)
    return np.stack([camera.fx * x + camera.cx, camera.fy * y + camera.cy], axis=-1)


def project_points(camera: Camera, rotation: Array, position: Array, points: Array) -> Array:
    """Project world points (K, 3) to pixels (..., K, 2) for poses (..., 3, 3) and (..., 3)."""
    return project(camera, to_camera(rotation, position, points))


def _normalised(points: Array) -> tuple[Array, Array]:
    depth = points[..., 2]
    inverse = 1 / np.where(depth > 0, depth, np.nan)
    return points[..., 0] * inverse, points[..., 1] * inverse


def distort(x: Array, y: Array, distortion: tuple[float, ...]) -> tuple[Array, Array]:
    """Apply Brown's distortion model to normalised coordinates."""
    k1, k2, p1, p2, k3 = distortion
    square = x * x + y * y
    radial = 1 + square * (k1 + square * (k2 + square * k3))
    return (
        x * radial + 2 * p1 * x * y + p2 * (square + 2 * x * x),
        y * radial + 2 * p2 * x * y + p1 * (square + 2 * y * y),
    )


def distort_jacobian(x: Array, y: Array, distortion: tuple[float, ...]) -> tuple[Array, Array, Array]:
    """Return dx'/dx, dx'/dy = dy'/dx and dy'/dy; symmetric because Brown's model is the gradient of a potential."""
    k1, k2, p1, p2, k3 = distortion
    square = x * x + y * y
    radial = 1 + square * (k1 + square * (k2 + square * k3))
    slope = 2 * (k1 + square * (2 * k2 + 3 * square * k3))
    xx = radial + slope * x * x + 2 * p1 * y + 6 * p2 * x
    yy = radial + slope * y * y + 2 * p2 * x + 6 * p1 * y
    return xx, slope * x * y + 2 * p1 * x + 2 * p2 * y, yy


def projection_jacobian(camera: Camera, points: Array) -> Array:
    """Return d pixel / d point (..., 2, 3) at points (..., 3) in camera axes."""
    x, y = _normalised(points)
    inverse = 1 / points[..., 2]
    if camera.distorted:
        xx, xy, yy = distort_jacobian(x, y, camera.distortion)
    else:
        xx, xy, yy = np.ones_like(x), np.zeros_like(x), np.ones_like(x)
    by_x = np.stack([camera.fx * xx, camera.fy * xy], axis=-1)
    by_y = np.stack([camera.fx * xy, camera.fy * yy], axis=-1)
    by_depth = -(x[..., None] * by_x + y[..., None] * by_y)
    return np.stack([by_x, by_y, by_depth], axis=-1) * inverse[..., None, None]


def pose_jacobian(camera: Camera, rotation: Array, position: Array, points: Array) -> Array:
    """Return d pixel / d (dp, dtheta) (..., K, 2, 6) of world points (K, 3) at poses (..., 3, 3) and (..., 3)."""
    offset = points - position[..., None, :]
    by_point = projection_jacobian(camera, offset @ np.swapaxes(rotation, -1, -2)) @ rotation[..., None, :, :]
    return np.concatenate([-by_point, by_point @ skew(offset)], axis=-1)


def intrinsics_jacobian(camera: Camera, points: Array) -> Array:
    """Return d pixel / d INTRINSICS (..., 2, 9) at points (..., 3) in camera axes."""
    x, y = _normalised(points)
    square = x * x + y * y
    powers = [square, square**2, None, None, square**3]
    x_distorted, y_distorted = distort(x, y, camera.distortion)
    jacobian = np.zeros((*x.shape, 2, 9))
    jacobian[..., 0, 0], jacobian[..., 1, 1] = x_distorted, y_distorted
    jacobian[..., 0, 2] = jacobian[..., 1, 3] = 1.0
    for column, power in enumerate(powers, start=4):
        if power is not None:
            jacobian[..., 0, column], jacobian[..., 1, column] = camera.fx * x * power, camera.fy * y * power
    jacobian[..., 0, 6], jacobian[..., 1, 6] = 2 * camera.fx * x * y, camera.fy * (square + 2 * y * y)
    jacobian[..., 0, 7], jacobian[..., 1, 7] = camera.fx * (square + 2 * x * x), 2 * camera.fy * x * y
    return jacobian


def normalise(camera: Camera, pixels: Array) -> Array:
    """Return undistorted normalised coordinates (..., 2) of pixels (..., 2), by Newton's method.

    The result is NaN where the lens model cannot be inverted, for example beyond the radius where it folds back.
    """
    x = (pixels[..., 0] - camera.cx) / camera.fx
    y = (pixels[..., 1] - camera.cy) / camera.fy
    if camera.distorted:
        x, y = _undistort(x, y, camera.distortion)
    return np.stack([x, y], axis=-1)


def _undistort(x_distorted: Array, y_distorted: Array, distortion: tuple[float, ...]) -> tuple[Array, Array]:
    x, y = x_distorted, y_distorted
    change = np.full_like(x, np.inf)
    with np.errstate(all="ignore"):  # diverging values become NaN below
        for _ in range(_NEWTON_STEPS):
            xx, xy, yy = distort_jacobian(x, y, distortion)
            there_x, there_y = distort(x, y, distortion)
            error_x, error_y = x_distorted - there_x, y_distorted - there_y
            determinant = xx * yy - xy * xy
            step_x = (yy * error_x - xy * error_y) / determinant
            step_y = (xx * error_y - xy * error_x) / determinant
            x, y = x + step_x, y + step_y
            change = np.abs(step_x) + np.abs(step_y)
            if not (change > _NEWTON_TOLERANCE).any():
                break
        # Beyond the fold the determinant is negative: Newton's method may have found a second inverse there.
        xx, xy, yy = distort_jacobian(x, y, distortion)
        valid = (change <= _NEWTON_TOLERANCE * 10) & (xx * yy > xy * xy) & (xx + yy > 0)
    return np.where(valid, x, np.nan), np.where(valid, y, np.nan)


def undistort(camera: Camera, pixels: Array) -> Array:
    """Return the undistorted positions (..., 2) of pixels (..., 2)."""
    plain = normalise(camera, pixels)
    return plain * (camera.fx, camera.fy) + (camera.cx, camera.cy)
