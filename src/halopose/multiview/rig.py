"""Calibrated cameras of one scene, and readers for their calibration files.

Formats: OpenCV yaml and xml, Pose2Sim and Anipose toml, Qualisys qca. Positions are in metres.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import ArrayLike

from halopose.data.bounded_text import read_toml
from halopose.errors import HaloposeError
from halopose.geometry.camera import Camera, project, projection_jacobian, to_camera
from halopose.geometry.opencv_file import matrix_of, read_opencv
from halopose.types import Array

_UNREADABLE = (
    LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError,
    ElementTree.ParseError, cv2.error,  # LookupError: also an unknown text encoding
)  # fmt: skip
_UNITS = {"m": 1.0, "cm": 0.01, "mm": 0.001}
_SUBPIXELS = 64.0  # Qualisys units per pixel
_FLIP = np.diag([1.0, -1.0, -1.0])  # Qualisys cameras look along minus z, with y up
_LARGEST_FILE = 1_000_000  # bytes


@dataclass(frozen=True)
class CalibratedView:
    """A calibrated camera.

    Attributes:
        name: Name of the camera.
        camera: Intrinsics and lens distortion.
        rotation: Rotation (3, 3) from world axes to camera axes.
        position: Position (3,) in world axes.
    """

    name: str
    camera: Camera
    rotation: Array
    position: Array

    @classmethod
    def from_opencv(
        cls,
        name: str,
        matrix: ArrayLike,
        distortion: ArrayLike | None,
        rvec: ArrayLike,
        tvec: ArrayLike,
        size: tuple[int, int] | None = None,
    ) -> CalibratedView:
        """View from OpenCV's parameters: a world point X has camera coordinates R X + t.

        Args:
            name: Name of the camera.
            matrix: Camera matrix (3, 3).
            distortion: Distortion coefficients, or None.
            rvec: Rotation vector (3,), or rotation matrix (3, 3).
            tvec: Translation (3,).
            size: Image width and height, if known.
        """
        turn = np.asarray(rvec, dtype=np.float64)
        rotation = turn if turn.shape == (3, 3) else np.asarray(cv2.Rodrigues(turn.reshape(3))[0], dtype=np.float64)
        if not np.allclose(rotation @ rotation.T, np.eye(3), atol=1e-4):
            raise HaloposeError(f"the rotation of camera {name} is not orthonormal")
        if np.linalg.det(rotation) < 0:
            raise HaloposeError(
                f"the rotation of camera {name} has determinant -1, which is a reflection: flip one axis"
            )
        offset = np.asarray(tvec, dtype=np.float64).reshape(3)
        return cls(name, Camera.from_opencv(matrix, distortion, size), rotation, -rotation.T @ offset)

    def project(self, points: Array) -> Array:
        """Pixels (..., 2) of points (..., 3) in world axes; NaN behind the camera."""
        return project(self.camera, to_camera(self.rotation, self.position, points))

    def jacobian(self, points: Array) -> Array:
        """d pixel / d point (..., 2, 3) at points (..., 3) in world axes."""
        return projection_jacobian(self.camera, to_camera(self.rotation, self.position, points)) @ self.rotation


def read_calibration(path: Path, unit: str | None = None) -> list[CalibratedView]:
    """Read the views of a calibration file; positions in metres.

    Args:
        path: Calibration file.
        unit: Unit of the file's lengths: m, cm or mm; default that of the file format.

    Raises:
        HaloposeError: The file is missing, damaged or of an unknown format, or has fewer than two cameras.
    """
    if unit is not None and unit not in _UNITS:
        raise HaloposeError(f"unknown unit {unit!r}: use {', '.join(_UNITS)}")
    if not path.is_file():
        raise HaloposeError(f"no file {path}: give a calibration file of OpenCV, Pose2Sim, Anipose or Qualisys")
    name = path.name.lower()
    if path.stat().st_size > _LARGEST_FILE:
        raise HaloposeError(f"{path} has more than {_LARGEST_FILE} bytes, which no calibration needs: check the file")
    try:
        if name.endswith(".toml"):
            views, default_unit = _toml(path), "m"
        elif name.endswith((".qca.txt", ".qca")):
            views, default_unit = _qualisys(path), "mm"
        elif name.endswith((".yml", ".yaml", ".xml")):
            views, default_unit = _opencv(path), "m"
        else:
            raise HaloposeError(
                f"{path} has an unknown file extension: use .toml, .qca.txt, or OpenCV's .yml, .yaml or .xml"
            )
    except OSError as error:
        raise HaloposeError(f"cannot read {path}: {error.strerror or error}") from None
    except _UNREADABLE as error:
        raise HaloposeError(f"{path} is not a readable calibration file: {error}") from None
    names = [view.name for view in views]
    for view in views:
        if names.count(view.name) > 1:
            raise HaloposeError(
                f"{path} has {names.count(view.name)} cameras called {view.name}: give each another name"
            )
        if not (np.isfinite(view.rotation).all() and np.isfinite(view.position).all()):
            raise HaloposeError(
                f"{path}: the rotation or position of camera {view.name} is not finite: calibrate it again"
            )
    if len(views) < 2:
        raise HaloposeError(f"{path} has {len(views)} cameras: triangulation needs at least two")
    scale = _UNITS[unit or default_unit]
    return [CalibratedView(view.name, view.camera, view.rotation, view.position * scale) for view in views]


def _toml(path: Path) -> list[CalibratedView]:
    """Pose2Sim and Anipose toml: one table per camera, with rotation vectors."""
    views = []
    for key, table in read_toml(path).items():
        if not isinstance(table, dict) or "matrix" not in table:
            continue
        if table.get("fisheye"):
            raise HaloposeError(f"{path}: camera {key} is a fisheye camera, which is not supported: undistort its film")
        size = table.get("size")
        views.append(
            CalibratedView.from_opencv(
                str(table.get("name", key)),
                table["matrix"],
                table.get("distortions"),
                table["rotation"],
                table["translation"],
                None if size is None else (round(size[0]), round(size[1])),
            )
        )
    return views


def _qualisys(path: Path) -> list[CalibratedView]:
    """Qualisys xml: rotation entries r11 to r33, lengths in millimetres, intrinsics in 1/64 pixel."""
    views: list[CalibratedView] = []
    for entry in ElementTree.parse(path).getroot().iter("camera"):
        if entry.get("active", "1") == "0":
            continue
        turn, lens, field = (_numbers(entry, name) for name in ("transform", "intrinsic", "fov_video"))
        rows = np.array([[turn[f"r{i}{j}"] for j in (1, 2, 3)] for i in (1, 2, 3)])
        matrix = np.eye(3)
        matrix[0, 0], matrix[1, 1] = lens["focalLengthU"] / _SUBPIXELS, lens["focalLengthV"] / _SUBPIXELS
        matrix[0, 2] = lens["centerPointU"] / _SUBPIXELS - field["left"]
        matrix[1, 2] = lens["centerPointV"] / _SUBPIXELS - field["top"]
        distortion = [lens[f"radialDistortion{i}"] for i in (1, 2)]
        distortion += [lens[f"tangentalDistortion{i}"] for i in (1, 2)] + [lens["radialDistortion3"]]
        size = (round(field["right"] - field["left"]) + 1, round(field["bottom"] - field["top"]) + 1)
        name = entry.get("serial") or f"camera_{len(views) + 1}"
        turned, position = _FLIP @ rows, np.array([turn["x"], turn["y"], turn["z"]])
        views.append(CalibratedView.from_opencv(name, matrix, distortion, turned, -turned @ position, size))
    return views


def _numbers(entry: ElementTree.Element, name: str) -> dict[str, float]:
    found = entry.find(name)
    if found is None:
        raise KeyError(f"a camera has no {name}")
    return {key: float(value) for key, value in found.attrib.items() if _is_number(value)}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _opencv(path: Path) -> list[CalibratedView]:
    """OpenCV FileStorage: names, and K_, dist_, R_ (or Rot_) and T_ for each camera, as in EasyMocap."""
    content = read_opencv(path)
    names = content["names"]
    views = []
    for name in map(str, names if isinstance(names, list) else [names]):
        matrix, lens, turn, full, offset = (
            None if entry is None else matrix_of(entry)
            for entry in (content.get(f"{key}_{name}") for key in ("K", "dist", "R", "Rot", "T"))
        )
        turn = full if turn is None else turn
        if matrix is None or offset is None or turn is None:
            raise KeyError(f"camera {name} needs K_{name}, R_{name} and T_{name}")
        views.append(CalibratedView.from_opencv(name, matrix, lens, turn, offset))
    return views
