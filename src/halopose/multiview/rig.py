"""Cameras that stand somewhere: views of one scene, and the calibration files of the tools that make them.

In: OpenCV yaml or xml, Pose2Sim's and Anipose's toml, Qualisys' qca. Out: a ``CalibratedView`` for each camera,
in metres.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import ArrayLike

from halopose.errors import HaloposeError
from halopose.geometry.camera import Camera, project, projection_jacobian, to_camera
from halopose.geometry.opencv_file import matrix_of, read_opencv
from halopose.types import Array

_NOT_ONE = (
    KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError,
    ElementTree.ParseError, cv2.error,
)  # fmt: skip
_UNITS = {"m": 1.0, "cm": 0.01, "mm": 0.001}
_SUBPIXELS = 64.0  # of Qualisys, to a pixel
_FLIP = np.diag([1.0, -1.0, -1.0])  # Qualisys looks along minus z, with y up


@dataclass(frozen=True)
class CalibratedView:
    """A camera at a place: rotation (3, 3) from world axes to camera axes, position (3,) in world axes."""

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
        """OpenCV's words: world point X is seen at R X + t, R of rvec (3,) or as a matrix (3, 3)."""
        turn = np.asarray(rvec, dtype=np.float64)
        rotation = turn if turn.shape == (3, 3) else np.asarray(cv2.Rodrigues(turn.reshape(3))[0], dtype=np.float64)
        if not np.allclose(rotation @ rotation.T, np.eye(3), atol=1e-4):
            raise HaloposeError(f"the rotation of camera {name} is not orthonormal")
        if np.linalg.det(rotation) < 0:
            raise HaloposeError(f"the rotation of camera {name} is a mirror image, with determinant -1: turn an axis")
        offset = np.asarray(tvec, dtype=np.float64).reshape(3)
        return cls(name, Camera.from_opencv(matrix, distortion, size), rotation, -rotation.T @ offset)

    def project(self, points: Array) -> Array:
        """Pixels (..., 2) of points (..., 3) in world axes; NaN behind the camera."""
        return project(self.camera, to_camera(self.rotation, self.position, points))

    def jacobian(self, points: Array) -> Array:
        """d pixel / d point (..., 2, 3) at points (..., 3) in world axes."""
        return projection_jacobian(self.camera, to_camera(self.rotation, self.position, points)) @ self.rotation


def read_calibration(path: Path, unit: str | None = None) -> list[CalibratedView]:
    """Views of a calibration file, in metres; ``unit`` of its lengths: m, cm or mm, else what its kind uses."""
    if unit is not None and unit not in _UNITS:
        raise HaloposeError(f"unknown unit {unit!r}: {', '.join(_UNITS)}")
    if not path.is_file():
        raise HaloposeError(f"no file {path}: give a calibration by OpenCV, Pose2Sim, Anipose or Qualisys")
    name = path.name.lower()
    try:
        if name.endswith(".toml"):
            views, usual = _toml(path), "m"
        elif name.endswith((".qca.txt", ".qca")):
            views, usual = _qualisys(path), "mm"
        elif name.endswith((".yml", ".yaml", ".xml")):
            views, usual = _opencv(path), "m"
        else:
            raise HaloposeError(f"{path} is of no known kind: .toml, .qca.txt, or OpenCV's .yml, .yaml, .xml")
    except _NOT_ONE as error:
        raise HaloposeError(f"{path} is no calibration that is known here: {error}") from None
    names = [view.name for view in views]
    for view in views:
        if names.count(view.name) > 1:
            raise HaloposeError(f"{path} has {names.count(view.name)} cameras called {view.name}: give each its name")
        if not (np.isfinite(view.rotation).all() and np.isfinite(view.position).all()):
            raise HaloposeError(f"{path}: camera {view.name} is nowhere: its rotation or position is not finite")
    if len(views) < 2:
        raise HaloposeError(f"{path} has {len(views)} cameras: it takes two to triangulate")
    scale = _UNITS[unit or usual]
    return [CalibratedView(view.name, view.camera, view.rotation, view.position * scale) for view in views]


def _toml(path: Path) -> list[CalibratedView]:
    """Pose2Sim's and Anipose's: a table for each camera, with rotation vectors."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib
    content: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    views = []
    for key, table in content.items():
        if not isinstance(table, dict) or "matrix" not in table:
            continue
        if table.get("fisheye"):
            raise HaloposeError(f"{path}: camera {key} is a fisheye, which is unknown here: undistort its film")
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
    """Qualisys' xml: rotations as rows r11 to r33, lengths in millimetres, intrinsics in 64ths of a pixel."""
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
        raise KeyError(f"a camera without {name}")
    return {key: float(value) for key, value in found.attrib.items() if _is_number(value)}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _opencv(path: Path) -> list[CalibratedView]:
    """OpenCV's FileStorage: names, and K_, dist_, R_ (or Rot_) and T_ of each camera, as EasyMocap has them."""
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
