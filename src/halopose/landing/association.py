"""Identify the runway to land on among the detections in an image.

A detection is associated if its corners lie where the runway's corners are expected, given the covariance of the
difference (position, attitude and corners). One corner may be wrong; ``geometry.integrity`` finds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import chdtri

from halopose.errors import HaloposeError
from halopose.geometry.camera import (
    Camera,
    Mount,
    camera_pose,
    pose_jacobian,
    project_points,
    rotation_from_angles,
)
from halopose.poses import PoseDistributions
from halopose.prediction.predictor import Predictor
from halopose.types import Array

NO_RUNWAY = "no runway detected"
OUT_OF_DISTRIBUTION = "the detection is out of distribution"
NOT_WHERE_EXPECTED = "the detection is not where the runway is expected"
AMBIGUOUS = "ambiguous: the detection fits two runways"

_GATE = float(chdtri(6, 1e-4))  # gate for the squared distance of three corners
_ODDS = 2 * np.log(1e3)  # difference of squared distances for a likelihood ratio of 1000
_THREE = [[2 * c + d for c in range(4) if c != left for d in (0, 1)] for left in range(4)]


@dataclass(frozen=True)
class CornerDetections:
    """Corners of the runway in N frames; NaN and a score of 0 in frames without it.

    Attributes:
        pixels: corners (N, 4, 2).
        covariance: covariances (N, 4, 2, 2).
        scale: scale matrices (N, 4, 2, 2).
        keep: whether pruning keeps the corner (N, 4).
        score: scores (N,).
        dof: degrees of freedom (N, 4) of a Student-t distribution; None for a Gaussian.
        reasons: why a frame has no runway (N).
    """

    pixels: Array
    covariance: Array
    scale: Array
    keep: Array
    score: Array
    dof: Array | None = None
    reasons: tuple[str, ...] = ()

    @classmethod
    def empty(cls, count: int, *, student: bool = False) -> CornerDetections:
        """Return ``count`` frames without a runway.

        Args:
            count: number of frames.
            student: whether corners will have a Student-t distribution.
        """
        dof = np.full((count, 4), np.nan) if student else None
        spread = np.full((count, 4, 2, 2), np.nan)
        keep, reasons = np.zeros((count, 4), dtype=bool), (NO_RUNWAY,) * count
        return cls(np.full((count, 4, 2), np.nan), spread, spread.copy(), keep, np.zeros(count), dof, reasons)

    def __len__(self) -> int:
        return len(self.score)

    @property
    def seen(self) -> Array:
        """Whether frames (N,) show the runway."""
        return self.score > 0

    def reason(self, n: int) -> str:
        """Return why frame n does not show the runway."""
        return self.reasons[n] if self.reasons else NO_RUNWAY

    def select(self, index: Any) -> CornerDetections:
        """Return some of the frames."""
        names = ["pixels", "covariance", "scale", "keep", "score", *(["dof"] if self.dof is not None else [])]
        chosen = np.arange(len(self))[index].tolist()
        return replace(
            self,
            **{name: getattr(self, name)[index] for name in names},
            reasons=tuple(self.reason(n) for n in chosen),
        )

    @classmethod
    def of_frame(cls, poses: PoseDistributions, found: Association, *, student: bool = False) -> CornerDetections:
        """Return one frame with the detection that an association found, if any.

        Args:
            poses: detections in the image.
            found: the association.
            student: whether corners have a Student-t distribution.
        """
        if found.index is None:
            return replace(cls.empty(1, student=student), reasons=(found.reason,))
        row = slice(found.index, found.index + 1)
        dof = np.full((1, 4), np.nan) if poses.dof is None else poses.dof[row]
        return cls(
            np.asarray(poses.mean[row], dtype=np.float64),
            np.asarray(poses.covariance[row], dtype=np.float64),
            np.asarray(poses.scale[row], dtype=np.float64),
            np.ones((1, 4), dtype=bool) if poses.keep is None else poses.keep[row],
            np.asarray(poses.scores[row], dtype=np.float64),
            dof if student else None,
            (found.reason,),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[CornerDetections]) -> CornerDetections:
        """Concatenate the frames of several groups."""
        if not parts:
            return cls.empty(0)
        names = ["pixels", "covariance", "scale", "keep", "score", *(["dof"] if parts[0].dof is not None else [])]
        joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        return cls(**joined, reasons=tuple(part.reason(n) for part in parts for n in range(len(part))))


@dataclass(frozen=True)
class Viewpoint:
    """Estimated pose of the aircraft with its covariance, from which the runway is seen.

    Attributes:
        camera: the camera.
        mount: its mounting.
        position: position (3,) of the aircraft in runway axes.
        covariance: its covariance (3, 3).
        attitude: yaw, pitch and roll (3,).
        attitude_covariance: covariance (3, 3) of the attitude about the runway axes.
    """

    camera: Camera
    mount: Mount
    position: Array
    covariance: Array
    attitude: Array
    attitude_covariance: Array

    def expect(self, corners: Array) -> tuple[Array, Array]:
        """Return the expected pixels (8,) of corners (4, 3), and their covariance (8, 8)."""
        rotation, eye = camera_pose(rotation_from_angles(*self.attitude), self.position, self.mount)
        pixels = project_points(self.camera, rotation, eye, corners).ravel()
        jacobian = pose_jacobian(self.camera, rotation, eye, corners).reshape(8, 6)
        by_place, by_turn = jacobian[:, :3], jacobian[:, 3:]
        spread = by_place @ self.covariance @ by_place.T + by_turn @ self.attitude_covariance @ by_turn.T
        return pixels, spread


@dataclass(frozen=True)
class Association:
    """Index of the detection that is the runway to land on; None with the reason if there is none."""

    index: int | None
    reason: str = ""


def expected_corners(camera: Camera, mount: Mount, positions: Array, attitudes: Array, corners: Array) -> Array:
    """Project corners (4, 3) from positions (N, 3) and attitudes (N, 3) to pixels (N, 4, 2); NaN behind the camera."""
    rotation, eye = camera_pose(rotation_from_angles(*np.asarray(attitudes).T), positions, mount)
    return project_points(camera, rotation, eye, corners)


def in_distribution_only(poses: PoseDistributions, alarm: float) -> PoseDistributions:
    """Return the detections that are in distribution at a false-alarm rate; all if the artifact has no such model."""
    return poses if poses.novelty is None or not alarm else poses[poses.in_distribution(alarm)]


def associate(poses: PoseDistributions, view: Viewpoint, runway: Array, others: Sequence[Array] = ()) -> Association:
    """Find the detection of a runway.

    There is none if no detection is where the runway is expected. There is none if the choice is not clear: two
    different detections fit, or the detection fits another runway as well.

    Args:
        poses: detections in the image.
        view: estimated pose of the aircraft.
        runway: corners (4, 3) of the runway to land on.
        others: corners (4, 3) of the other runways nearby.
    """
    if not len(poses):
        return Association(None, NO_RUNWAY)
    mine = _distances(poses, view, runway)
    fitting = np.flatnonzero(mine <= _GATE)
    if not len(fitting):
        return Association(None, NOT_WHERE_EXPECTED)
    best = int(fitting[np.argmin(mine[fitting])])
    for other in others:
        if _distances(poses[best], view, other)[0] < mine[best] + _ODDS:
            return Association(None, AMBIGUOUS)
    for rival in fitting.tolist():
        if rival != best and mine[rival] < mine[best] + _ODDS and not _alike(poses, best, rival):
            return Association(None, AMBIGUOUS)
    return Association(best)


def fits(poses: PoseDistributions, view: Viewpoint, corners: Array) -> Array:
    """Which detections (N,) lie where corners (4, 3) are expected."""
    return np.asarray(_distances(poses, view, corners) <= _GATE)


def _distances(poses: PoseDistributions, view: Viewpoint, corners: Array) -> Array:
    """Return squared distances (N,) of detections to the expected corners, over the three corners that fit best."""
    expected, spread = view.expect(corners)
    result = np.full(len(poses), np.inf)
    if not np.isfinite(expected).all():
        return result
    for n in range(len(poses)):
        total = spread.copy()
        for corner in range(4):
            part = slice(2 * corner, 2 * corner + 2)
            total[part, part] += poses.covariance[n, corner]
        away = poses.mean[n].ravel() - expected
        result[n] = min(away[rows] @ np.linalg.solve(total[np.ix_(rows, rows)], away[rows]) for rows in _THREE)
    return result


def _alike(poses: PoseDistributions, one: int, other: int) -> bool:
    """Return whether two detections are of the same runway: most of their corners agree within their covariances."""
    away = poses.mean[one] - poses.mean[other]
    spread = poses.covariance[one] + poses.covariance[other]
    distance = (away * np.linalg.solve(spread, away[..., None])[..., 0]).sum(1)
    return bool(np.sort(distance)[2] < chdtri(2, 1e-3))


def detect_runways(model: Predictor, images: Iterable[Any], *, conf: float = 0.25) -> list[PoseDistributions]:
    """Detect runways image by image."""
    return [detect_in_image(model, image, conf) for image in images]


def detect_in_image(model: Predictor, image: Any, conf: float) -> PoseDistributions:
    """Detect runways in an image."""
    poses = model.predict(image, conf=conf)[0]
    if poses.keypoint_count != 4:
        raise HaloposeError(f"give a runway detector: this model has {poses.keypoint_count} keypoints, not 4")
    return poses


def as_pose_distributions(corner_detections: CornerDetections) -> list[PoseDistributions]:
    """Return the detection of each frame, which may be empty."""
    found = []
    for n, seen in enumerate(corner_detections.seen.tolist()):
        rows = slice(n, n + 1) if seen else slice(n, n)
        pixels = corner_detections.pixels[rows]
        boxes = np.concatenate([pixels.min(1), pixels.max(1)], axis=1) if seen else np.zeros((0, 4))
        spread = corner_detections.covariance[rows], corner_detections.scale[rows]
        dof = None if corner_detections.dof is None else corner_detections.dof[rows]
        found.append(
            PoseDistributions(
                boxes, corner_detections.score[rows], pixels, *spread, dof=dof, keep=corner_detections.keep[rows]
            )
        )
    return found
