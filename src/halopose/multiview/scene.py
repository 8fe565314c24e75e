"""Reconstruct a scene from the films of several cameras: persons over time, with 3D keypoints and covariances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.multiview.person_matching import LIKENESS, group_people
from halopose.multiview.rig import CalibratedView
from halopose.multiview.triangulation import Points, ViewObservations, triangulate_points
from halopose.poses import PoseDistributions
from halopose.tracking.motion import MeasurementSeries, run_smoother
from halopose.tracking.motion_fitting import fit_motion
from halopose.types import Array, Mask

_NEAR = 0.5  # metres: largest median motion of a person's keypoints between two detections
_GAP = 1.0  # seconds that a person may be undetected
_FAR = 1e6


@dataclass(frozen=True)
class SceneBuildSettings:
    """Settings of ``build_scene``.

    Attributes:
        score: Smallest confidence of a detection.
        likeness: Smallest agreement of two detections of one person, from 0 to 1.
        confirm: Smallest number of frames of a person.
        consistent: Probability of the chi-square test that rejects contradicting views; None keeps all views.
        weighted: Whether to weight pixels by their covariances; False is for comparison.
    """

    score: float = 0.25
    likeness: float = LIKENESS
    confirm: int = 5
    consistent: float | None = 0.999
    weighted: bool = True


@dataclass(frozen=True)
class SceneObservations:
    """Observations of N keypoints, one for each frame, person and keypoint, in V views.

    Attributes:
        observations: Pixels and covariances in each view.
        frame: Frame numbers (N,).
        person: Numbers (N,) of the persons within their frame.
        keypoint: Keypoint indices (N,).
        scores: Visibility scores (N, V) of the base model.
    """

    observations: ViewObservations
    frame: Array
    person: Array
    keypoint: Array
    scores: Array

    def __len__(self) -> int:
        return len(self.frame)


@dataclass(frozen=True)
class Person:
    """One person over T frames.

    Attributes:
        identity: Number of the person, from 1.
        frames: Frame numbers (T,).
        place: Keypoints (T, K, 3) in metres, NaN where unknown.
        covariance: Covariances (T, K, 3, 3), NaN where unknown.
        views: Number of views used (T, K).
        cost: Chi-squares of the residuals (T, K).
    """

    identity: int
    frames: Array
    place: Array
    covariance: Array
    views: Array
    cost: Array


@dataclass(frozen=True)
class ReconstructedScene:
    """Persons of a scene, with the views and observations they were reconstructed from.

    Attributes:
        persons: Persons.
        views: Calibrated views.
        layout: Keypoint layout.
        rate: Frame rate in frames per second.
        offsets: Offsets of the films (V,) in frames.
        gathered: Observations of all keypoints.
        points: Triangulated points of these observations.
    """

    persons: list[Person]
    views: list[CalibratedView]
    layout: Keypoints
    rate: float
    offsets: Array
    gathered: SceneObservations
    points: Points

    @property
    def frames(self) -> int:
        """Number of frames up to the last one with a person."""
        return 1 + max((int(person.frames.max()) for person in self.persons), default=-1)


def build_scene(
    views: Sequence[CalibratedView],
    films: Sequence[Sequence[PoseDistributions]],
    layout: Keypoints,
    *,
    rate: float,
    offsets: Array | None = None,
    settings: SceneBuildSettings | None = None,
) -> ReconstructedScene:
    """Triangulate and link the persons of synchronous films.

    Args:
        views: Calibrated views (V of them).
        films: Poses of every frame of every view.
        layout: Keypoint layout.
        rate: Frame rate in frames per second.
        offsets: Known offsets (V,) of the films in frames; default zero.
        settings: Thresholds.

    Raises:
        HaloposeError: The films do not fit the views, or no person was found.
    """
    if len(films) != len(views):
        raise HaloposeError(f"{len(views)} cameras and {len(films)} films: give one film for each camera")
    settings = settings or SceneBuildSettings()
    offsets = np.zeros(len(views), dtype=np.int64) if offsets is None else offsets
    gathered = gather(views, films, layout, offsets, settings)
    if not len(gathered):
        raise HaloposeError(
            "no person is seen by two cameras in one frame: check the calibration and the order of the films"
        )
    points = triangulate_points(
        views, gathered.observations, consistent=settings.consistent, weighted=settings.weighted
    )
    persons = _link(gathered, points, len(layout), rate, settings.confirm)
    if not persons:
        raise HaloposeError(
            f"no person is found in {settings.confirm} frames: check the offsets and that the films show one scene, "
            "or give longer films"
        )
    return ReconstructedScene(persons, list(views), layout, rate, offsets, gathered, points)


def gather(
    views: Sequence[CalibratedView],
    films: Sequence[Sequence[PoseDistributions]],
    layout: Keypoints,
    offsets: Array,
    settings: SceneBuildSettings,
) -> SceneObservations:
    """Group the detections of each frame into persons, and list the observations of their keypoints.

    Args:
        views: Calibrated views (V of them).
        films: Poses of every frame of every view.
        layout: Keypoint layout.
        offsets: Offsets (V,) of the films in whole frames.
        settings: Thresholds.
    """
    first, last = (
        max(0, -int(offsets.min())),
        min(len(film) - int(o) for film, o in zip(films, offsets, strict=True)),
    )
    rows: list[list[Array]] = []
    for frame in range(first, last):
        poses = [film[frame + int(offset)] for film, offset in zip(films, offsets, strict=True)]
        if sum(map(bool, map(len, poses))) < 2:
            continue
        poses = [one[one.scores >= settings.score] for one in poses]
        for number, members in enumerate(group_people(views, poses, settings.likeness)):
            rows.append(_rows(poses, members, frame, number, len(layout)))
    if not rows:
        no_scores = np.zeros((0, len(views)))
        empty = ViewObservations(np.zeros((0, len(views), 2)), np.zeros((0, len(views), 2, 2)), no_scores.astype(bool))
        return SceneObservations(empty, np.zeros(0), np.zeros(0), np.zeros(0), no_scores)
    pixels, covariance, scale, nu, used, scores, where = (np.concatenate(part) for part in zip(*rows, strict=True))
    tails = None if np.isinf(nu).all() else nu
    seen = ViewObservations(pixels, covariance, used.astype(bool), scale, tails)
    return SceneObservations(seen, where[:, 0], where[:, 1], where[:, 2], scores)


def _rows(poses: Sequence[PoseDistributions], members: Array, frame: int, number: int, count: int) -> list[Array]:
    """Observations of one person's keypoints in all views: arrays with K rows."""
    shape = (count, len(poses))
    pixels, covariance = np.full((*shape, 2), np.nan), np.tile(np.eye(2), (*shape, 1, 1))
    scale, nu = covariance.copy(), np.full(shape, np.inf)
    used, scores = np.zeros(shape, dtype=bool), np.zeros(shape)
    for view, member in enumerate(members):
        if member < 0:
            continue
        pose = poses[view][int(member)]
        pixels[:, view], covariance[:, view] = pose.mean[0], pose.covariance[0]
        scale[:, view], used[:, view] = pose.scale[0], np.asarray(pose.keep)[0]
        scores[:, view] = 1.0 if pose.visibility is None else pose.visibility[0]
        if pose.dof is not None:
            nu[:, view] = np.broadcast_to(pose.dof, (1, count))[0]
    where = np.stack([np.full(count, frame), np.full(count, number), np.arange(count)], axis=1)
    return [pixels, covariance, scale, nu, used, scores, where]


def _link(gathered: SceneObservations, points: Points, count: int, rate: float, confirm: int) -> list[Person]:
    """Link the persons of successive frames by the smallest median distance of their keypoints."""
    place, covariance = points.place.reshape(-1, count, 3), points.covariance.reshape(-1, count, 3, 3)
    views, cost = points.used.sum(1).reshape(-1, count), points.cost.reshape(-1, count)
    frame = gathered.frame.reshape(-1, count)[:, 0]
    tracks: list[list[int]] = []
    for now in np.unique(frame):
        rows = np.flatnonzero(frame == now)
        recent = [track for track in tracks if now - frame[track[-1]] <= _GAP * rate]
        apart = np.full((len(recent), len(rows)), _FAR)
        for i, track in enumerate(recent):
            for j, row in enumerate(rows):
                moved = np.linalg.norm(place[row] - place[track[-1]], axis=-1)
                if np.isfinite(moved).sum() >= 3:
                    apart[i, j] = np.nanmedian(moved)
        assigned = set()
        for i, j in zip(*linear_sum_assignment(apart), strict=True):
            if apart[i, j] < _NEAR:
                recent[i].append(int(rows[j]))
                assigned.add(int(rows[j]))
        tracks += [[int(row)] for row in rows if int(row) not in assigned]
    kept = [np.array(track) for track in tracks if len(track) >= confirm]
    return [Person(number, frame[t], place[t], covariance[t], views[t], cost[t]) for number, t in enumerate(kept, 1)]


def smooth_scene(scene: ReconstructedScene) -> ReconstructedScene:
    """Smooth the persons of a scene over time and bridge gaps, with the motion model of ``tracking``."""
    measured = [_measured(person, scene.rate) for person in scene.persons]
    motion = fit_motion(measured, len(scene.layout))
    persons = []
    for person, one in zip(scene.persons, measured, strict=True):
        smoothed, _ = run_smoother(one, motion)
        place, covariance = smoothed.place
        known = np.asarray(one.used.any(0))[None, :, None]
        views, cost = (_spread_out(part, person.frames, len(one)) for part in (person.views, person.cost))
        frames = person.frames[0] + np.arange(len(one))
        place, covariance = np.where(known, place, np.nan), np.where(known[..., None], covariance, np.nan)
        persons.append(Person(person.identity, frames, place, covariance, views, cost))
    return replace(scene, persons=persons)


def _spread_out(values: Array, frames: Array, length: int) -> Array:
    result = np.zeros((length, *values.shape[1:]))
    result[(frames - frames[0]).astype(int)] = np.nan_to_num(values)
    return result


def _measured(person: Person, rate: float) -> MeasurementSeries:
    length = int(person.frames[-1] - person.frames[0]) + 1
    at = (person.frames - person.frames[0]).astype(int)
    count = person.place.shape[1]
    seen, factor = np.zeros((length, count, 3)), np.tile(np.eye(3), (length, count, 1, 1))
    used: Mask = np.zeros((length, count), dtype=bool)
    finite = np.asarray(np.isfinite(person.place).all(-1) & np.isfinite(person.covariance).all((-1, -2)))
    seen[at] = np.where(finite[..., None], person.place, 0.0)
    factor[at] = np.linalg.cholesky(np.where(finite[..., None, None], person.covariance, np.eye(3)))
    used[at] = finite
    spread_xyz = np.nanstd(np.where(finite[..., None], person.place, np.nan), axis=1)
    size = 2 * float(np.nanmedian(np.linalg.norm(spread_xyz, axis=-1)))
    return MeasurementSeries(seen, factor, used, None, size, 1 / rate)
