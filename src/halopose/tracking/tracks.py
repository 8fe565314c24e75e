"""Tracks of a film: smoothed keypoints with covariances, with gaps bridged."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.poses import PoseDistributions
from halopose.tracking.motion import MeasurementSeries, Motion, Warp, run_smoother
from halopose.tracking.motion_fitting import FIT_FRAMES, fit_motion, longest
from halopose.tracking.tracker import Track, Tracker, TrackSettings, sizes
from halopose.types import Array

NO_TRACK = "no object has enough detections for a track: lower --confirm or --score"
CSV_HEADER = "frame,time,track_id,keypoint,x,y,xx,xy,yy,vx,vy,observed,keep\n"
WINDOW = 3000  # frames that are smoothed at a time in long films
_MARGIN = 10.0  # seconds on both sides of a window, over which the smoother forgets its start


@dataclass(frozen=True)
class PoseTracks:
    """M poses of tracked objects, sorted by frame and identity.

    Attributes:
        poses: Smoothed Gaussian poses; ``image_ids`` are frame numbers.
        filtered: The same poses from the frames up to theirs, with the motion model of the whole film.
        track_ids: Identities (M,).
        observed: Whether a keypoint was measured in the frame (M, K); False where bridged.
        velocity: Velocities (M, K, 2) of ``poses`` in pixels per second.
        rate: Frame rate in frames per second.
        layout: Keypoint layout.
        motion: Motion and error model.

    Example:
    >>> spread = np.tile(4 * np.eye(2), (1, 17, 1, 1))
    >>> standing = np.random.default_rng(0).uniform(0, 100, (1, 17, 2))
    >>> places = [standing + [2.0 * n, 0.0] for n in range(12)]
    >>> boxes = [np.concatenate([p.min(1), p.max(1)], axis=1) for p in places]
    >>> frames = [PoseDistributions(b, np.ones(1), p, spread, spread) for p, b in zip(places, boxes)]
    >>> tracks = track(frames, Keypoints.of(17), rate=25.0)
    >>> len(tracks), tracks.track_ids.tolist()[:2], tracks.poses.covariance.shape
    (12, [1, 1], (12, 17, 2, 2))
    >>> bool((tracks.poses.covariance[5, :, 0, 0] < 4).all())  # smaller than in any single frame
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
        """Frame number of each pose (M,)."""
        return np.asarray(self.poses.image_ids)

    def rows(self, *, frame: int | None = None, identity: int | None = None) -> Array:
        """Indices (m,) of the poses of a frame, of an object, or of both."""
        chosen = np.ones(len(self), dtype=bool)
        if frame is not None:
            chosen &= self.frames == frame
        if identity is not None:
            chosen &= self.track_ids == identity
        return np.flatnonzero(chosen)

    def to_json(self) -> list[dict[str, Any]]:
        """COCO result entries of the smoothed poses with ``track_id``, ``frame`` and ``observed``."""
        extra = zip(self.track_ids.tolist(), self.frames.tolist(), self.observed.tolist(), strict=True)
        return [
            {**entry, "track_id": identity, "frame": frame, "observed": observed}
            for entry, (identity, frame, observed) in zip(self.poses.to_json(), extra, strict=True)
        ]

    def to_csv(self, header: bool = True) -> str:
        """One row per pose and keypoint: position, covariance, velocity, whether it was observed and is kept."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        text.write(CSV_HEADER if header else "")
        keep = np.asarray(self.poses.keep)
        for row, (frame, identity) in enumerate(zip(self.frames.tolist(), self.track_ids.tolist(), strict=True)):
            for k, name in enumerate(self.layout.names):
                (x, y), ((xx, xy), (_, yy)) = self.poses.keypoints[row, k], self.poses.covariance[row, k]
                numbers = [f"{value:.6g}" for value in (x, y, xx, xy, yy, *self.velocity[row, k])]
                flags = [int(self.observed[row, k]), int(keep[row, k])]
                writer.writerow([frame, f"{frame / self.rate:.4f}", identity, name, *numbers, *flags])
        return text.getvalue()

    def to_supervision(self, frame: int) -> Any:
        """``supervision.KeyPoints`` of one frame, with covariance and ``tracker_id`` in its data."""
        rows = self.rows(frame=frame)
        points = self.poses[rows].to_supervision()
        points.data["tracker_id"] = self.track_ids[rows]
        return points

    def to_detections(self, frame: int) -> Any:
        """``supervision.Detections`` of one frame with ``tracker_id``, for annotators and zones."""
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


@dataclass(frozen=True)
class TrackWindow:
    """Tracks of the frames from ``start`` up to ``stop``; None if there is no object."""

    start: int
    stop: int
    tracks: PoseTracks | None


def track(
    frames: Sequence[PoseDistributions],
    layout: Keypoints,
    *,
    rate: float,
    settings: TrackSettings | None = None,
    motion: Motion | None = None,
    warps: Sequence[Warp | None] | None = None,
) -> PoseTracks:
    """Track and smooth the objects of a film.

    Args:
        frames: Poses of each frame.
        layout: Keypoint layout.
        rate: Frame rate in frames per second.
        settings: Thresholds of the tracker.
        motion: Motion and error model; by default it is fitted, and the film is then tracked again with it.
        warps: Image motion before each frame, if the camera moves.

    Raises:
        HaloposeError: No object has enough detections.
    """
    for window in track_windows(frames, layout, rate=rate, settings=settings, motion=motion, warps=warps):
        if window.tracks is not None:
            return window.tracks
    raise HaloposeError(NO_TRACK)


def track_windows(
    frames: Sequence[PoseDistributions],
    layout: Keypoints,
    *,
    rate: float,
    settings: TrackSettings | None = None,
    motion: Motion | None = None,
    warps: Sequence[Warp | None] | None = None,
    window: int | None = None,
) -> Iterator[TrackWindow]:
    """Track and smooth the objects of a film, one window of frames after the other.

    Smoothing a window also uses the frames around it (10 s, or the longest gap if that is longer). Memory is bounded
    by the length of the window if ``frames`` is a ``FrameStore``. A film of one window is smoothed as a whole.

    Args:
        frames: Poses of each frame.
        layout: Keypoint layout.
        rate: Frame rate in frames per second.
        settings: Thresholds of the tracker.
        motion: Motion and error model; by default it is fitted, and the film is then tracked again with it.
        warps: Image motion before each frame, if the camera moves.
        window: Number of frames in a window; None for the whole film.

    Yields:
        Windows that cover all frames in order.
    """
    check_warps(frames, warps)
    settings = settings or TrackSettings()
    found = follow(frames, layout, rate, settings, motion, warps)
    if motion is None:
        measured = [
            measure(frames, one, layout, rate, settings, warps, range(min(len(one.span), FIT_FRAMES)))
            for one in longest(found)
        ]
        motion = fit_motion(measured, len(layout))
        found = follow(frames, layout, rate, settings, motion, warps)
    if not found:
        raise HaloposeError(NO_TRACK)
    least = least_certain(frames, layout)
    extents = {one.identity: _median_size(frames, one, layout) for one in found} if window else {}
    length, margin = window or len(frames), math.ceil(max(_MARGIN, settings.gap) * rate) + 1
    for start in range(0, len(frames), length):
        stop = min(start + length, len(frames))
        parts, identities = [], []
        for one in found:
            rows = _with_margin(one, start, stop, margin)
            if not rows:
                continue
            measured_part = measure(frames, one, layout, rate, settings, warps, rows, extents.get(one.identity))
            part = _smoothed(measured_part, frames, one, rows, layout, motion, least)
            numbers = np.asarray(part[0].image_ids)
            inside = (numbers >= start) & (numbers < stop)
            parts.append((part[0][inside], part[1][inside], part[2][inside], part[3][inside]))
            identities.append(np.full(int(inside.sum()), one.identity))
        yield TrackWindow(start, stop, _joined(parts, identities, rate, layout, motion))


def _joined(
    parts: Sequence[tuple[PoseDistributions, PoseDistributions, Array, Array]],
    identities: Sequence[Array],
    rate: float,
    layout: Keypoints,
    motion: Motion,
) -> PoseTracks | None:
    """Tracks of all objects, sorted by frame and identity."""
    if not parts:
        return None
    poses = PoseDistributions.concatenate([part[0] for part in parts])
    filtered = PoseDistributions.concatenate([part[1] for part in parts])
    observed, velocity = (np.concatenate([part[i] for part in parts]) for i in (2, 3))
    identity = np.concatenate(identities)
    order = np.lexsort((identity, np.asarray(poses.image_ids)))
    whole = (poses[order], filtered[order], identity[order], observed[order], velocity[order])
    return PoseTracks(*whole, rate, layout, motion)


def check_warps(frames: Sequence[PoseDistributions], warps: Sequence[Warp | None] | None) -> None:
    """Raise ``HaloposeError`` unless there is one warp for each frame."""
    if warps is not None and len(warps) != len(frames):
        raise HaloposeError(f"give one warp for each of the {len(frames)} frames, got {len(warps)}")


def follow(
    frames: Sequence[PoseDistributions],
    layout: Keypoints,
    rate: float,
    settings: TrackSettings,
    motion: Motion | None,
    warps: Sequence[Warp | None] | None,
) -> list[Track]:
    """Confirmed tracks of a film."""
    tracker = Tracker(layout, rate, settings, motion)
    for number, poses in enumerate(frames):
        tracker.update(poses, None if warps is None else warps[number])
    return tracker.tracks


def _with_margin(one: Track, start: int, stop: int, margin: int) -> range:
    """Indices into the track for a window of frames with its margins, from a detection to a detection."""
    rows = one.span
    if one.first >= stop or one.first + len(rows) <= start:
        return range(0)
    low, high = max(start - margin - one.first, 0), min(stop + margin - one.first, len(rows))
    while rows[low] < 0:
        low -= 1
    while rows[high - 1] < 0:
        high += 1
    return range(low, high)


def _median_size(frames: Sequence[PoseDistributions], one: Track, layout: Keypoints) -> float:
    """Median size of an object over its detections."""
    found = [sizes(frames[one.first + n][row], layout)[0] for n, row in enumerate(one.span) if row >= 0]
    return float(np.median(found))


def measure(
    frames: Sequence[PoseDistributions],
    one: Track,
    layout: Keypoints,
    rate: float,
    settings: TrackSettings,
    warps: Sequence[Warp | None] | None,
    rows: range | None = None,
    size: float | None = None,
) -> MeasurementSeries:
    """Measurements of an object from its first to its last detection.

    Args:
        frames: Poses of each frame.
        one: Track of the object.
        layout: Keypoint layout.
        rate: Frame rate in frames per second.
        settings: Thresholds of the tracker.
        warps: Image motion before each frame, or None.
        rows: Part of the track; default all of it.
        size: Median size of the object, if it is known.
    """
    span, count = one.span, len(layout)
    rows = range(len(span)) if rows is None else rows
    seen, factor = np.full((len(rows), count, 2), np.nan), np.tile(np.eye(2), (len(rows), count, 1, 1))
    used = np.zeros((len(rows), count), dtype=bool)
    distribution = frames[0].dof
    nu = None if distribution is None else np.ones((len(rows), count))
    for frame, place in enumerate(rows):
        if span[place] < 0:
            continue
        pose = frames[one.first + place][span[place]]
        seen[frame], factor[frame] = pose.mean[0], np.linalg.cholesky(pose.scale[0])
        used[frame] = np.asarray(pose.keep[0]) if settings.prune and pose.keep is not None else True
        if nu is not None and pose.dof is not None:
            nu[frame] = np.broadcast_to(pose.dof, (1, count))[0]
    part = () if warps is None else tuple(warps[one.first + rows.start : one.first + rows.stop])
    size = _median_size(frames, one, layout) if size is None else size
    return MeasurementSeries(seen, factor, used, nu, size, 1 / rate, part)


def _smoothed(
    measured: MeasurementSeries,
    frames: Sequence[PoseDistributions],
    one: Track,
    rows: range,
    layout: Keypoints,
    motion: Motion,
    least: float,
) -> tuple[PoseDistributions, PoseDistributions, Array, Array]:
    """Smoothed poses, filtered poses, observed keypoints and velocities of a part of a track."""
    smoothed, causal = run_smoother(measured, motion)
    between, held, scores, classes = _boxes(frames, one, rows)
    numbers = one.first + np.arange(rows.start, rows.stop)
    results = []
    for state, boxes in ((smoothed, between), (causal.after, held)):
        place, spread = state.place
        certain = is_certain(spread, measured.size, layout, least)
        results.append(
            PoseDistributions(boxes, scores, place, spread, spread, keep=certain, class_ids=classes, image_ids=numbers)
        )
    return results[0], results[1], measured.used, smoothed.mean[..., 2:4]


def is_certain(spread: Array, size: Array | float, layout: Keypoints, least: float) -> Array:
    """Whether keypoints (T, K) with covariances (T, K, 2, 2) are at least as certain as ``least``.

    Args:
        spread: Covariances (T, K, 2, 2).
        size: Size of the object in pixels.
        layout: Keypoint layout.
        least: Limit from ``least_certain``.
    """
    tolerance = np.asarray(size, dtype=np.float64)[..., None] * layout.kappa
    return np.asarray(np.trace(spread, axis1=-2, axis2=-1) <= least * tolerance**2)


def least_certain(frames: Sequence[PoseDistributions], layout: Keypoints) -> float:
    """Largest total variance over (size kappa)^2 of a kept keypoint: the limit of a reliable keypoint."""
    largest = 0.0
    for poses in frames:
        if not len(poses):
            continue
        relative = np.trace(poses.covariance, axis1=-2, axis2=-1) / (sizes(poses, layout)[:, None] * layout.kappa) ** 2
        largest = max(largest, float(np.max(relative, initial=0.0, where=np.asarray(poses.keep, dtype=bool))))
    return largest


def _boxes(frames: Sequence[PoseDistributions], one: Track, part: range) -> tuple[Array, Array, Array, Array]:
    """Boxes, scores and classes of an object in every frame of a part of its track.

    Returns:
        Boxes (T, 4) interpolated over gaps, boxes (T, 4) held over gaps, scores (T,) that are 0 in gaps, and the
        class (T,) of the first detection.
    """
    rows = np.array(one.span[part.start : part.stop])
    seen = np.flatnonzero(rows >= 0)
    start = one.first + part.start
    found = [frames[start + int(frame)][int(rows[frame])] for frame in seen]
    first = frames[one.first][one.rows[0]]
    corners = np.concatenate([pose.boxes for pose in found])
    between = np.stack([np.interp(np.arange(len(rows)), seen, column) for column in corners.T], axis=1)
    held = corners[np.cumsum(rows >= 0) - 1]
    scores = np.zeros(len(rows))
    scores[seen] = [pose.scores[0] for pose in found]
    kind = 1 if first.class_ids is None else int(first.class_ids[0])
    return between, held, scores, np.full(len(rows), kind)
