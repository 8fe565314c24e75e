"""A scene from the films of several cameras: persons across views and over time, keypoints with covariances.

In: views, and the poses of each frame of each of them. Out: ``ReconstructedScene``, whose persons are smoothed if
asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from halopose.errors import HaloposeError
from halopose.geometry.pnp_refine import Mask
from halopose.keypoints import Keypoints
from halopose.multiview.person_matching import LIKENESS, group_people
from halopose.multiview.rig import CalibratedView
from halopose.multiview.triangulation import Points, ViewObservations, triangulate_points
from halopose.poses import PoseDistributions
from halopose.tracking.motion import MeasurementSeries, run_smoother
from halopose.tracking.motion_fitting import fit_motion
from halopose.types import Array

_NEAR = 0.5  # metres that a person's keypoints may move from one frame to the next, in the median
_GAP = 1.0  # seconds that a person may be away
_FAR = 1e6


@dataclass(frozen=True)
class SceneBuildSettings:
    """What counts, and who is a person.

    score: of detections that count. likeness: from which two are one person. confirm: frames that make a person.
    consistent: probability of a chi-square beyond which a view goes, None to keep all. weighted: False to count
    all pixels alike, for comparison.
    """

    score: float = 0.25
    likeness: float = LIKENESS
    confirm: int = 5
    consistent: float | None = 0.999
    weighted: bool = True


@dataclass(frozen=True)
class Gathered:
    """What the views see of each keypoint of each person in each frame: N sightings, and which those are (N,)."""

    sightings: ViewObservations
    frame: Array
    person: Array
    keypoint: Array
    scores: Array  # (N, V): visibility of the keypoint, as the base states it

    def __len__(self) -> int:
        return len(self.frame)


@dataclass(frozen=True)
class Person:
    """One person: frames (T,), keypoints (T, K, 3) in metres with covariances (T, K, 3, 3), NaN where unknown.

    views (T, K): how many count; cost (T, K): chi-square of their residuals.
    """

    identity: int
    frames: Array
    place: Array
    covariance: Array
    views: Array
    cost: Array


@dataclass(frozen=True)
class ReconstructedScene:
    """Persons in space, the views that saw them, and what they were seen as."""

    persons: list[Person]
    views: list[CalibratedView]
    layout: Keypoints
    rate: float
    offsets: Array
    gathered: Gathered
    points: Points

    @property
    def frames(self) -> int:
        """How many frames there are, up to the last in which anybody is seen."""
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
    """Triangulate the persons of films that run together, but for known offsets (V,) in frames."""
    if len(films) != len(views):
        raise HaloposeError(f"{len(views)} cameras and {len(films)} films: give one film for each camera")
    settings = settings or SceneBuildSettings()
    offsets = np.zeros(len(views), dtype=np.int64) if offsets is None else offsets
    gathered = gather(views, films, layout, offsets, settings)
    if not len(gathered):
        raise HaloposeError("no person is seen by two cameras at once: check the calibration and the films' order")
    points = triangulate_points(views, gathered.sightings, consistent=settings.consistent, weighted=settings.weighted)
    persons = _link(gathered, points, len(layout), rate, settings.confirm)
    if not persons:
        raise HaloposeError(
            f"nobody is followed through {settings.confirm} frames: check the offsets and that the films are of "
            "one scene, or give longer ones"
        )
    return ReconstructedScene(persons, list(views), layout, rate, offsets, gathered, points)


def gather(
    views: Sequence[CalibratedView],
    films: Sequence[Sequence[PoseDistributions]],
    layout: Keypoints,
    offsets: Array,
    settings: SceneBuildSettings,
) -> Gathered:
    """Group detections of each frame into persons, and list their keypoints."""
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
        nothing = np.zeros((0, len(views)))
        empty = ViewObservations(np.zeros((0, len(views), 2)), np.zeros((0, len(views), 2, 2)), nothing.astype(bool))
        return Gathered(empty, np.zeros(0), np.zeros(0), np.zeros(0), nothing)
    pixels, covariance, scale, nu, used, scores, where = (np.concatenate(part) for part in zip(*rows, strict=True))
    tails = None if np.isinf(nu).all() else nu
    seen = ViewObservations(pixels, covariance, used.astype(bool), scale, tails)
    return Gathered(seen, where[:, 0], where[:, 1], where[:, 2], scores)


def _rows(poses: Sequence[PoseDistributions], members: Array, frame: int, number: int, count: int) -> list[Array]:
    """What all views see of one person's keypoints: K rows of everything."""
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


def _link(gathered: Gathered, points: Points, count: int, rate: float, confirm: int) -> list[Person]:
    """Persons over time: those whose keypoints are nearest to where they were."""
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
        taken = set()
        for i, j in zip(*linear_sum_assignment(apart), strict=True):
            if apart[i, j] < _NEAR:
                recent[i].append(int(rows[j]))
                taken.add(int(rows[j]))
        tracks += [[int(row)] for row in rows if int(row) not in taken]
    kept = [np.array(track) for track in tracks if len(track) >= confirm]
    return [Person(number, frame[t], place[t], covariance[t], views[t], cost[t]) for number, t in enumerate(kept, 1)]


def smooth_scene(scene: ReconstructedScene) -> ReconstructedScene:
    """The scene with its persons smoothed over time and gaps bridged, as ``tracking`` does it in pictures."""
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
    good = np.asarray(np.isfinite(person.place).all(-1) & np.isfinite(person.covariance).all((-1, -2)))
    seen[at] = np.where(good[..., None], person.place, 0.0)
    factor[at] = np.linalg.cholesky(np.where(good[..., None, None], person.covariance, np.eye(3)))
    used[at] = good
    extent = np.nanstd(np.where(good[..., None], person.place, np.nan), axis=1)
    size = 2 * float(np.nanmedian(np.linalg.norm(extent, axis=-1)))
    return MeasurementSeries(seen, factor, used, None, size, 1 / rate)
