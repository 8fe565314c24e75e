"""Checks of logs against what the camera sees: a wrong height datum and a magnetic heading."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halopose.geometry.camera import camera_pose, project_points, rotation_from_angles
from halopose.landing.navigation.sensors import Measurement
from halopose.landing.recordings.cameras import Lens
from halopose.landing.recordings.logs import attitudes_at
from halopose.landing.recordings.runway_sites import Site
from halopose.poses import PoseDistributions
from halopose.types import Array

_FEWEST = 8  # frames
_HEIGHT_M = 12.0
_HEADING_RAD = np.radians(1.5)
_SCATTER = 0.35  # median absolute deviation of a constant error, as a share of its median


def check_inputs(
    times: Array, detections: Sequence[PoseDistributions], lens: Lens, site: Site, measured: Sequence[Measurement]
) -> list[str]:
    """Compare the best detection of each frame with the runway projected from GNSS position and logged attitude.

    A difference in elevation that is constant in metres is a height datum, and a difference in azimuth that is
    constant in degrees is a heading reference. Errors of mount or position vary with the distance.

    Args:
        times: log time of the frames (N,).
        detections: rectified detections of the frames (N).
        lens: camera with its mount.
        site: the runway.
        measured: measurements of all logs.

    Returns:
        One line per cause that was found.
    """
    fixes = [each for each in measured if each.source == "gnss"]
    rows = [n for n, poses in enumerate(detections) if len(poses)]
    if len(fixes) < 2 or len(rows) < _FEWEST:
        return []
    stamps, places = np.array([each.time for each in fixes]), np.array([each.value for each in fixes])
    position = np.stack([np.interp(times[rows], stamps, axis, np.nan, np.nan) for axis in places.T], axis=1)
    angles = attitudes_at(measured, times[rows])
    rotation, eye = camera_pose(rotation_from_angles(*np.nan_to_num(angles).T), np.nan_to_num(position), lens.mount)
    expected = project_points(lens.camera, rotation, eye, site.corners).mean(1)
    seen = np.stack([detections[n].mean[int(np.argmax(detections[n].scores))].mean(0) for n in rows])
    known = np.isfinite(angles).all(1) & np.isfinite(position).all(1) & np.isfinite(expected).all(1)
    if known.sum() < _FEWEST:
        return []
    difference = (_directions(lens, expected) - _directions(lens, seen))[known]
    apart = np.linalg.norm(eye[:, None] - site.corners, axis=2)  # (N, 4)
    distance = 1 / np.mean(1 / apart, axis=1)[known]  # scale at which a shift moves the mean of the four corners
    lines = []
    height = _constant(difference[:, 1] * distance, difference[:, 1])
    if abs(height) > _HEIGHT_M:
        side = "above" if height > 0 else "below"
        lines.append(
            f"GNSS heights are {abs(height):.0f} m {side} what the camera sees: give GNSS and --runway the same height "
            "datum (ellipsoid or mean sea level)"
        )
    heading = _constant(-difference[:, 0], difference[:, 0] * distance)
    if abs(heading) > _HEADING_RAD:
        lines.append(
            f"headings are {np.degrees(heading):+.1f} degrees off what the camera sees: give true headings, not "
            "magnetic ones, and check the yaw of the mount"
        )
    return lines


def _directions(lens: Lens, pixels: Array) -> Array:
    """Return azimuth to the right and elevation downwards (N, 2), in radians, of pixels (N, 2)."""
    camera = lens.camera
    return np.arctan((pixels - (camera.cx, camera.cy)) / (camera.fx, camera.fy))


def _constant(values: Array, rival: Array) -> float:
    """Return the median of values (N,) if they scatter less than a rival explanation (N,); else 0."""
    scatter = _relative_scatter(values)
    return float(np.median(values)) if scatter < min(_SCATTER, _relative_scatter(rival)) else 0.0


def _relative_scatter(values: Array) -> float:
    """Return the median absolute deviation of values (N,) relative to their median."""
    middle = float(np.median(values))
    return float(np.median(np.abs(values - middle))) / max(abs(middle), 1e-12)
