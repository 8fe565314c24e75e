"""Which runway corners the camera sees: detections of many frames as arrays that PnP takes.

In: a model that predicts corners with their distributions, images, and roughly where the corners should be. Out:
``Sightings``, one per frame, with the covariance and the pruning mask of every corner.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from halopose.errors import HaloposeError
from halopose.geometry.camera import Camera, Mount, camera_pose, project_points, rotation_from_angles
from halopose.poses import PoseDistributions
from halopose.predictor import UncertainPose
from halopose.types import Array

NEAR = 3.0  # a detection belongs to the runway if its corners lie within so many runway sizes of where expected


@dataclass(frozen=True)
class Sightings:
    """Corners of N frames: pixels (N, 4, 2), covariance and scale (N, 4, 2, 2), keep (N, 4), score (N,).

    Frames without a detection hold NaN and a score of 0. dof (4,) is a Student-t's, or None.
    """

    pixels: Array
    covariance: Array
    scale: Array
    keep: Array
    score: Array
    dof: Array | None = None

    def __len__(self) -> int:
        return len(self.score)

    @property
    def seen(self) -> Array:
        """Which frames have a detection (N,)."""
        return self.score > 0

    def select(self, index: Any) -> Sightings:
        """Some of the frames."""
        names = ("pixels", "covariance", "scale", "keep", "score")
        return replace(self, **{name: getattr(self, name)[index] for name in names})


def expected_corners(camera: Camera, mount: Mount, positions: Array, attitudes: Array, corners: Array) -> Array:
    """Where corners (4, 3) should appear (N, 4, 2) from positions (N, 3) and attitudes (N, 3); NaN if behind."""
    rotation, eye = camera_pose(rotation_from_angles(*np.asarray(attitudes).T), positions, mount)
    return project_points(camera, rotation, eye, corners)


def choose(poses: PoseDistributions, expected: Array, *, oriented: bool = True) -> int | None:
    """The detection whose corners lie nearest to those expected (4, 2), if any is near at all.

    Several runways may be in view, and only geometry tells which one is meant. If the camera is not ``oriented``
    by a known attitude, the place in the image tells nothing and the shape is all that counts.
    """
    if not len(poses):
        return None
    size = np.ptp(expected, axis=0).max()
    away = poses.keypoints - expected
    if not oriented:
        away = away - away.mean(1, keepdims=True)
    distance = np.hypot(*np.moveaxis(away, 2, 0)).mean(1)
    best = int(np.argmin(distance))
    return best if distance[best] <= NEAR * max(size, 10.0) else None


def sight(
    model: UncertainPose,
    images: Iterable[Any],
    expected: Array,
    *,
    conf: float = 0.25,
    oriented: Array | None = None,
) -> Sightings:
    """Detect the runway in every image; expected (N, 4, 2) are the corners by the other sensors.

    ``oriented`` (N,) is False where these knew no attitude.
    """
    count = len(expected)
    found = Sightings(
        pixels=np.full((count, 4, 2), np.nan),
        covariance=np.full((count, 4, 2, 2), np.nan),
        scale=np.full((count, 4, 2, 2), np.nan),
        keep=np.zeros((count, 4), dtype=bool),
        score=np.zeros(count),
        dof=None,
    )
    dof = None
    for number, (image, place) in enumerate(zip(images, expected, strict=True)):
        poses = model.predict(image, conf=conf)[0]
        if poses.keypoint_count != 4:
            raise HaloposeError(f"give a runway detector: this model has {poses.keypoint_count} keypoints, not 4")
        best = choose(poses, place, oriented=oriented is None or bool(oriented[number]))
        dof = poses.dof
        if best is not None:
            found.pixels[number] = poses.keypoints[best]
            found.covariance[number], found.scale[number] = poses.covariance[best], poses.scale[best]
            found.keep[number] = True if poses.keep is None else poses.keep[best]
            found.score[number] = poses.scores[best]
    return replace(found, dof=dof)
