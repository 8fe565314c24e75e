"""Read camera calibrations of OpenCV and ROS, with an optional mount.

Pinhole and Brown-Conrady cameras are used unchanged. Keypoints of a fisheye camera are first moved, with their
covariances, to the pixels of a pinhole camera.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import yaml

from halopose.errors import HaloposeError
from halopose.geometry.camera import Camera, Mount
from halopose.geometry.opencv_file import read_opencv
from halopose.poses import PoseDistributions
from halopose.types import Array

_MODELS = {
    "plumb_bob": "brown", "rational_polynomial": "brown", "none": "brown", "": "brown",
    "equidistant": "fisheye", "fisheye": "fisheye", "kannala_brandt": "fisheye",
}  # fmt: skip
_ROUNDED = 2e-3  # rounding error of a rotation with three decimals
_STEP = 0.5  # pixels, step of the numerical Jacobian of a fisheye


@dataclass(frozen=True)
class Lens:
    """A camera, its mounting, and the four fisheye coefficients if it has a fisheye lens."""

    camera: Camera
    mount: Mount = field(default_factory=Mount)
    fisheye: tuple[float, ...] = ()

    def rectified(self, poses: PoseDistributions) -> PoseDistributions:
        """Convert poses to the pinhole ``camera``; unchanged if this is no fisheye."""
        if not self.fisheye or not len(poses):
            return poses
        step = _STEP * np.array([[[1.0, 0.0]], [[0.0, 1.0]]])
        ends = [self._moved(poses.mean + sign * step[:, None]) for sign in (1, -1)]
        jacobian = np.moveaxis((ends[0] - ends[1]) / (2 * _STEP), 0, -1)  # (N, K, 2, 2)
        spread = [
            jacobian @ np.asarray(each) @ np.swapaxes(jacobian, -1, -2) for each in (poses.covariance, poses.scale)
        ]
        moved = self._moved(poses.keypoints)
        offset = None if poses.offset is None else self._moved(poses.mean) - moved
        return replace(poses, keypoints=moved, covariance=spread[0], scale=spread[1], offset=offset)

    def rectified_image(self, image: Array) -> Array:
        """Convert an image (h, w, 3) to the pinhole ``camera``; unchanged if this is no fisheye."""
        if not self.fisheye:
            return image
        matrix = self.camera.matrix
        return np.asarray(cv2.fisheye.undistortImage(image, matrix, np.asarray(self.fisheye), Knew=matrix))

    def bent(self, pixels: Array) -> Array:
        """Convert pixels (N, 2) of the pinhole ``camera`` to pixels of the image."""
        if not self.fisheye:
            return pixels
        rays = (pixels - [self.camera.cx, self.camera.cy]) / [self.camera.fx, self.camera.fy]
        matrix, coefficients = self.camera.matrix, np.asarray(self.fisheye)
        return np.asarray(cv2.fisheye.distortPoints(rays[:, None], matrix, coefficients)).reshape(pixels.shape)

    def _moved(self, pixels: Array) -> Array:
        matrix, coefficients = self.camera.matrix, np.asarray(self.fisheye)
        flat = np.ascontiguousarray(pixels, dtype=np.float64).reshape(-1, 1, 2)
        return np.asarray(cv2.fisheye.undistortPoints(flat, matrix, coefficients, P=matrix)).reshape(pixels.shape)


def read_camera(path: Path | str) -> Lens:
    """Read a camera from a yaml file: OpenCV's FileStorage, ROS's ``camera_info`` file, or a ``CameraInfo`` message."""
    path = Path(path)
    content = read_opencv(path)
    matrix = _numbers(path, content, ("camera_matrix", "K", "k", "Camera_1_matrix"), "the camera matrix", (9,))
    width, height = (_size(path, content, name) for name in ("width", "height"))
    model = str(content.get("distortion_model", content.get("camera_model", ""))).lower()
    if model not in _MODELS:
        raise HaloposeError(f"{path}: unknown distortion model {model!r}, give plumb_bob or equidistant")
    keys = ("distortion_coefficients", "D", "d", "dist_coeffs")
    lens = _numbers(path, content, keys, "the distortion", (0, 4, 5, 8), default=())
    fx, skew, cx, _, fy, cy = matrix[:6]
    if abs(skew) > 1e-6 * fx or min(fx, fy) <= 1:
        raise HaloposeError(
            f"{path}: focal lengths {fx:g} and {fy:g} with skew {skew:g} are no pinhole's: the matrix is "
            "[fx 0 cx; 0 fy cy; 0 0 1] in pixels"
        )
    if not (0 < cx < width and 0 < cy < height):
        raise HaloposeError(
            f"{path}: the principal point ({cx:g}, {cy:g}) lies outside of {width} by {height} pixels: is the "
            "calibration of another image size?"
        )
    mount = _mount(path, content.get("mount"))
    if _MODELS[model] == "fisheye":
        if len(lens) != 4:
            raise HaloposeError(f"{path}: a fisheye takes 4 coefficients, got {len(lens)}")
        return Lens(Camera(fx, fy, cx, cy, width, height), mount, lens)
    if len(lens) == 8 and any(lens[5:]):
        raise HaloposeError(f"{path}: 8 coefficients (rational) are not supported: calibrate with 5, or a fisheye")
    k1, k2, p1, p2, k3 = (*lens[:5], *([0.0] * 5))[:5]
    return Lens(Camera(fx, fy, cx, cy, width, height, (k1, k2, p1, p2, k3)), mount)


def camera_text(camera: Camera, mount: Mount) -> str:
    """Return the text of a ``camera_info`` file with a mount, as ``read_camera`` reads it."""
    return yaml.safe_dump(
        {
            "image_width": camera.width,
            "image_height": camera.height,
            "camera_name": "nose",
            "camera_matrix": {"rows": 3, "cols": 3, "data": camera.matrix.ravel().tolist()},
            "distortion_model": "plumb_bob",
            "distortion_coefficients": {"rows": 1, "cols": 5, "data": list(map(float, camera.distortion))},
            "mount": {
                "rotation": np.asarray(mount.rotation).ravel().tolist(),
                "lever_arm": np.asarray(mount.lever_arm).tolist(),
            },
        },
        sort_keys=False,
    )


def _numbers(
    path: Path,
    content: dict[str, Any],
    names: Sequence[str],
    what: str,
    counts: tuple[int, ...],
    default: tuple[float, ...] | None = None,
) -> tuple[float, ...]:
    found = next((content[name] for name in names if name in content), default)
    if found is None:
        raise HaloposeError(f"{path} has no {names[0]}: give a calibration of OpenCV or ROS")
    values = found.get("data") if isinstance(found, dict) else found
    try:
        numbers = tuple(np.asarray(values, dtype=np.float64).ravel().tolist())
    except (TypeError, ValueError, OverflowError):
        raise HaloposeError(f"{path}: {what} is not a list of numbers") from None
    if len(numbers) not in counts:
        raise HaloposeError(f"{path}: {what} takes {' or '.join(map(str, counts))} numbers, got {len(numbers)}")
    wrong = [value for value in numbers if not np.isfinite(value)]
    if wrong:
        raise HaloposeError(f"{path}: {what} takes finite numbers, got {wrong[0]}: calibrate again")
    return numbers


def _size(path: Path, content: dict[str, Any], name: str) -> int:
    value = content.get(f"image_{name}", content.get(name))
    if value is None:
        raise HaloposeError(f"{path} has no image_{name}: add the image size of the calibration")
    try:
        size = float(value)  # some writers give 640.0, xml gives '640'
    except (TypeError, ValueError, OverflowError):
        size = 0.0
    if not size.is_integer() or size <= 0:
        raise HaloposeError(f"{path}: image_{name} takes a whole number of pixels, got {str(value)[:40]}")
    return int(size)


def _mount(path: Path, given: Any) -> Mount:
    """Read angles in degrees as for ``Mount.looking``, or a rotation (9,), with a lever arm (3,) in metres."""
    if given is None:
        return Mount()
    if not isinstance(given, dict):
        raise HaloposeError(f"{path}: mount takes yaw_deg, pitch_deg, roll_deg and lever_arm")
    arm = np.array(_numbers(path, given, ("lever_arm",), "the lever arm", (3,), default=(0.0, 0.0, 0.0)))
    if "rotation" in given:
        turn = np.array(_numbers(path, given, ("rotation",), "the mount's rotation", (9,))).reshape(3, 3)
        return Mount(_orthonormal(path, turn), arm)
    unknown = sorted(str(key) for key in set(given) - {"yaw_deg", "pitch_deg", "roll_deg", "lever_arm"})
    if unknown:
        raise HaloposeError(f"{path}: mount does not know {unknown[0]!r}: yaw_deg, pitch_deg, roll_deg, lever_arm")
    names = ("yaw_deg", "pitch_deg", "roll_deg")
    yaw, pitch, roll = (_numbers(path, given, (name,), name, (1,), default=(0.0,))[0] for name in names)
    return Mount.looking(np.radians(yaw), np.radians(pitch), np.radians(roll), arm)


def _orthonormal(path: Path, turn: Array) -> Array:
    """Return the rotation (3, 3) nearest to a rounded one; raise an error for any other matrix."""
    left, sizes, right = np.linalg.svd(turn)
    if np.abs(sizes - 1).max() > _ROUNDED:
        raise HaloposeError(f"{path}: the mount's rotation is not orthonormal: give three or more decimals of each")
    nearest = np.asarray(left @ right)
    if np.linalg.det(nearest) < 0:
        raise HaloposeError(
            f"{path}: the mount's rotation mirrors (its determinant is -1): rows are the camera's right, down and "
            "forward in forward, right and down of the aircraft"
        )
    return turn if np.allclose(turn, nearest, rtol=0, atol=1e-9) else nearest
