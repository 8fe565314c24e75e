"""Tracks of a whole film: every object's keypoints smoothed both ways, gaps bridged, with covariances throughout.

In: the poses of each frame. Out: ``PoseTracks``, as json, csv, or what supervision takes.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.poses import PoseDistributions
from halopose.tracking.motion import MeasurementSeries, Motion, Warp, run_smoother
from halopose.tracking.motion_fitting import fit_motion
from halopose.tracking.tracker import Track, Tracker, TrackSettings, sizes
from halopose.types import Array

NO_TRACK = "no object is seen often enough to be a track: lower --confirm or --score"
_COLUMNS = ["frame", "time", "track_id", "keypoint", "x", "y", "xx", "xy", "yy", "vx", "vy", "observed", "keep"]


@dataclass(frozen=True)
class PoseTracks:
    """M poses of tracked objects, by frame and then by identity.

    poses: smoothed with all frames, Gaussian, ``image_ids`` is the number of the frame; filtered: the same poses
    from the frames up to theirs, but with the motion of the whole film (``live`` needs nothing of later frames).
    track_ids (M,); observed (M, K): a keypoint was measured in this frame, not bridged; velocity (M, K, 2) of
    ``poses`` in pixels a second; rate: frames a second; motion: what was learnt of the film.

    >>> spread = np.tile(4 * np.eye(2), (1, 17, 1, 1))
    >>> standing = np.random.default_rng(0).uniform(0, 100, (1, 17, 2))
    >>> places = [standing + [2.0 * n, 0.0] for n in range(12)]
    >>> boxes = [np.concatenate([p.min(1), p.max(1)], axis=1) for p in places]
    >>> frames = [PoseDistributions(b, np.ones(1), p, spread, spread) for p, b in zip(places, boxes)]
    >>> tracks = track(frames, Keypoints.of(17), rate=25.0)
    >>> len(tracks), tracks.track_ids.tolist()[:2], tracks.poses.covariance.shape
    (12, [1, 1], (12, 17, 2, 2))
    >>> bool((tracks.poses.covariance[5, :, 0, 0] < 4).all())  # surer than any frame alone
    True
    """

    poses: PoseDistributions
    filtered: PoseDistributions
    track_ids: Array
    observed: Array
    velocity: Array
    rate: float
    layout: Keypoints
    motion: Motion

    def __len__(self) -> int:
        return len(self.poses)

    @property
    def frames(self) -> Array:
        """Number of the frame of each pose (M,)."""
        return np.asarray(self.poses.image_ids)

    def rows(self, *, frame: int | None = None, identity: int | None = None) -> Array:
        """Which poses (m,) are of a frame, of an object, or of both."""
        chosen = np.ones(len(self), dtype=bool)
        if frame is not None:
            chosen &= self.frames == frame
        if identity is not None:
            chosen &= self.track_ids == identity
        return np.flatnonzero(chosen)

    def to_json(self) -> list[dict[str, Any]]:
        """COCO results of the smoothed poses, each with ``track_id``, ``frame`` and ``observed``."""
        extra = zip(self.track_ids.tolist(), self.frames.tolist(), self.observed.tolist(), strict=True)
        return [
            {**entry, "track_id": identity, "frame": frame, "observed": observed}
            for entry, (identity, frame, observed) in zip(self.poses.to_json(), extra, strict=True)
        ]

    def to_csv(self) -> str:
        """A row for each keypoint of each pose: place, covariance, velocity, whether it was seen and is kept."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_COLUMNS)
        keep = np.asarray(self.poses.keep)
        for row, (frame, identity) in enumerate(zip(self.frames.tolist(), self.track_ids.tolist(), strict=True)):
            for k, name in enumerate(self.layout.names):
                (x, y), ((xx, xy), (_, yy)) = self.poses.keypoints[row, k], self.poses.covariance[row, k]
                numbers = [f"{value:.6g}" for value in (x, y, xx, xy, yy, *self.velocity[row, k])]
                flags = [int(self.observed[row, k]), int(keep[row, k])]
                writer.writerow([frame, f"{frame / self.rate:.4f}", identity, name, *numbers, *flags])
        return text.getvalue()

    def to_supervision(self, frame: int) -> Any:
        """A ``supervision.KeyPoints`` of one frame, covariance and ``tracker_id`` in its data."""
        rows = self.rows(frame=frame)
        points = self.poses[rows].to_supervision()
        points.data["tracker_id"] = self.track_ids[rows]
        return points

    def to_detections(self, frame: int) -> Any:
        """A ``supervision.Detections`` of one frame with its ``tracker_id``, as annotators and zones take it."""
        try:
            import supervision
        except ImportError:
            raise HaloposeError("to_detections needs the supervision package: pip install supervision") from None
        rows = self.rows(frame=frame)
        return supervision.Detections(
            xyxy=self.poses.boxes[rows].astype(np.float32),
            confidence=self.poses.scores[rows],
            class_id=np.zeros(len(rows), dtype=int),
            tracker_id=self.track_ids[rows],
        )


def track(
    frames: Sequence[PoseDistributions],
    layout: Keypoints,
    *,
    rate: float,
    settings: TrackSettings | None = None,
    motion: Motion | None = None,
    warps: Sequence[Warp | None] | None = None,
) -> PoseTracks:
    """Follow and smooth the objects of a film, given the poses of each frame.

    motion: known already; else it is fitted, and the film is gone through again with it. warps: how the picture
    moved from the frame before to each frame, if the camera did.
    """
    if warps is not None and len(warps) != len(frames):
        raise HaloposeError(f"give a warp for each of the {len(frames)} frames, got {len(warps)}")
    settings = settings or TrackSettings()
    found = follow(frames, layout, rate, settings, motion, warps)
    if motion is None:
        measured = [measure(frames, one, layout, rate, settings, warps) for one in found]
        motion = fit_motion(measured, len(layout))
        found = follow(frames, layout, rate, settings, motion, warps)
    if not found:
        raise HaloposeError(NO_TRACK)
    least = least_certain(frames, layout)
    parts = [
        _smoothed(measure(frames, one, layout, rate, settings, warps), frames, one, layout, motion, least)
        for one in found
    ]
    poses = PoseDistributions.concatenate([part[0] for part in parts])
    filtered = PoseDistributions.concatenate([part[1] for part in parts])
    identities = np.concatenate([np.full(len(part[0]), one.identity) for part, one in zip(parts, found, strict=True)])
    observed, velocity = (np.concatenate([part[i] for part in parts]) for i in (2, 3))
    order = np.lexsort((identities, np.asarray(poses.image_ids)))
    whole = (poses[order], filtered[order], identities[order], observed[order], velocity[order])
    return PoseTracks(*whole, rate, layout, motion)


def follow(
    frames: Sequence[PoseDistributions],
    layout: Keypoints,
    rate: float,
    settings: TrackSettings,
    motion: Motion | None,
    warps: Sequence[Warp | None] | None,
) -> list[Track]:
    """Which detections of a film are which object."""
    tracker = Tracker(layout, rate, settings, motion)
    for number, poses in enumerate(frames):
        tracker.update(poses, None if warps is None else warps[number])
    return tracker.tracks


def measure(
    frames: Sequence[PoseDistributions],
    one: Track,
    layout: Keypoints,
    rate: float,
    settings: TrackSettings,
    warps: Sequence[Warp | None] | None,
) -> MeasurementSeries:
    """What was seen of an object from its first to its last detection."""
    rows, count = one.span, len(layout)
    seen, factor = np.full((len(rows), count, 2), np.nan), np.tile(np.eye(2), (len(rows), count, 1, 1))
    used = np.zeros((len(rows), count), dtype=bool)
    distribution = next(iter(frames)).dof
    nu = None if distribution is None else np.ones((len(rows), count))
    size = []
    for frame, row in enumerate(rows):
        if row < 0:
            continue
        pose = frames[one.first + frame][row]
        seen[frame], factor[frame] = pose.mean[0], np.linalg.cholesky(pose.scale[0])
        used[frame] = np.asarray(pose.keep[0]) if settings.prune and pose.keep is not None else True
        if nu is not None and pose.dof is not None:
            nu[frame] = np.broadcast_to(pose.dof, (1, count))[0]
        size.append(float(sizes(pose, layout)[0]))
    part = () if warps is None else tuple(warps[one.first : one.first + len(rows)])
    return MeasurementSeries(seen, factor, used, nu, float(np.median(size)), 1 / rate, part)


def _smoothed(
    measured: MeasurementSeries,
    frames: Sequence[PoseDistributions],
    one: Track,
    layout: Keypoints,
    motion: Motion,
    least: float,
) -> tuple[PoseDistributions, PoseDistributions, Array, Array]:
    """Smoothed and filtered poses of an object, which keypoints were observed, and velocities."""
    smoothed, causal = run_smoother(measured, motion)
    between, held, scores, classes = _boxes(frames, one)
    numbers = one.first + np.arange(len(measured))
    results = []
    for state, boxes in ((smoothed, between), (causal.after, held)):
        place, spread = state.place
        certain = is_certain(spread, measured.size, layout, least)
        results.append(
            PoseDistributions(boxes, scores, place, spread, spread, keep=certain, class_ids=classes, image_ids=numbers)
        )
    return results[0], results[1], measured.used, smoothed.mean[..., 2:4]


def is_certain(spread: Array, size: Array | float, layout: Keypoints, least: float) -> Array:
    """Which keypoints (T, K) of covariances (T, K, 2, 2) are as certain as the least certain that is kept."""
    tolerance = np.asarray(size, dtype=np.float64)[..., None] * layout.kappa
    return np.asarray(np.trace(spread, axis1=-2, axis2=-1) <= least * tolerance**2)


def least_certain(frames: Sequence[PoseDistributions], layout: Keypoints) -> float:
    """Total variance over (size kappa)^2 of the least certain keypoint that is kept: what counts as reliable."""
    largest = 0.0
    for poses in frames:
        if not len(poses):
            continue
        relative = np.trace(poses.covariance, axis1=-2, axis2=-1) / (sizes(poses, layout)[:, None] * layout.kappa) ** 2
        largest = max(largest, float(np.max(relative, initial=0.0, where=np.asarray(poses.keep, dtype=bool))))
    return largest


def _boxes(frames: Sequence[PoseDistributions], one: Track) -> tuple[Array, Array, Array, Array]:
    """Boxes (T, 4) twice, where none was seen between those that were, or the last one; scores (T,), classes (T,).

    Scores are 0 where none was seen; the class is that of the first.
    """
    rows = np.array(one.span)
    seen = np.flatnonzero(rows >= 0)
    found = [frames[one.first + int(frame)][int(rows[frame])] for frame in seen]
    corners = np.concatenate([pose.boxes for pose in found])
    between = np.stack([np.interp(np.arange(len(rows)), seen, column) for column in corners.T], axis=1)
    held = corners[np.cumsum(rows >= 0) - 1]
    scores = np.zeros(len(rows))
    scores[seen] = [pose.scores[0] for pose in found]
    kind = 1 if found[0].class_ids is None else int(found[0].class_ids[0])
    return between, held, scores, np.full(len(rows), kind)
