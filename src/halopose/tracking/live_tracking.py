"""Causal tracks of a film: the output of ``Tracker`` after each frame.

Nothing depends on later frames. An object appears once it is confirmed and stays until its track ends. Its box is that
of its last detection. The motion model is not fitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.poses import PoseDistributions
from halopose.tracking.motion import Motion, Warp
from halopose.tracking.tracker import Tracker, TrackSettings
from halopose.tracking.tracks import NO_TRACK, PoseTracks, TrackWindow, check_warps, is_certain, least_certain
from halopose.types import Array


def track_live(
    frames: Sequence[PoseDistributions],
    layout: Keypoints,
    *,
    rate: float,
    settings: TrackSettings | None = None,
    motion: Motion | None = None,
    warps: Sequence[Warp | None] | None = None,
) -> PoseTracks:
    """Track the objects of a film causally.

    Args:
        frames: Poses of each frame.
        layout: Keypoint layout.
        rate: Frame rate in frames per second.
        settings: Thresholds of the tracker.
        motion: Motion and error model; default ``Motion.typical``.
        warps: Image motion before each frame, if the camera moves.

    Raises:
        HaloposeError: No object is confirmed.

    Example:
    >>> from halopose.tracking.synthetic_films import Film, synthesize_film
    >>> frames = synthesize_film(Film(frames=12, missed=0.0)).frames
    >>> whole, part = (track_live(frames[:count], Keypoints.of(17), rate=30.0) for count in (12, 8))
    >>> bool((whole.poses.keypoints[: len(part)] == part.poses.keypoints).all())
    True
    """
    for window in track_live_windows(frames, layout, rate=rate, settings=settings, motion=motion, warps=warps):
        if window.tracks is not None:
            return window.tracks
    raise HaloposeError(NO_TRACK)


def track_live_windows(
    frames: Iterable[PoseDistributions],
    layout: Keypoints,
    *,
    rate: float,
    settings: TrackSettings | None = None,
    motion: Motion | None = None,
    warps: Sequence[Warp | None] | None = None,
    window: int | None = None,
) -> Iterator[TrackWindow]:
    """Track the objects of a film causally, one window of frames after the other; windows change no result.

    Args:
        frames: Poses of each frame; an iterator may go on without end, as that of a camera does.
        layout: Keypoint layout.
        rate: Frame rate in frames per second.
        settings: Thresholds of the tracker.
        motion: Motion and error model; default ``Motion.typical``.
        warps: Image motion before each frame, if the camera moves. With an iterator it may grow as frames arrive.
        window: Number of frames in a window; None for the whole film.

    Yields:
        Windows that cover all frames in order.
    """
    if isinstance(frames, Sequence):
        check_warps(frames, warps)
    tracker = Tracker(layout, rate, settings, motion)
    least, start, number = 0.0, 0, -1
    classes: dict[int, int] = {}
    parts: list[tuple[PoseDistributions, Array, Array, Array]] = []
    for number, poses in enumerate(frames):
        identities, known = tracker.update(poses, None if warps is None else warps[number])
        if len(poses):
            least = max(least, least_certain([poses], layout))
        if len(identities):
            rows, found = tracker.seen_as, tracker.seen_as >= 0
            if poses.class_ids is not None:
                for identity, row in zip(identities[found].tolist(), rows[found].tolist(), strict=True):
                    classes.setdefault(identity, int(poses.class_ids[row]))
            observed = np.zeros(known.keypoints.shape[:2], dtype=bool)
            observed[found] = np.asarray(poses.keep)[rows[found]] if tracker.settings.prune else True
            shown = replace(
                known,
                keep=is_certain(known.covariance, tracker.size, layout, least),
                class_ids=np.array([classes.get(identity, 1) for identity in identities.tolist()]),
                image_ids=np.full(len(identities), number),
            )
            parts.append((shown, identities, observed, tracker.velocity))
        if window and number + 1 - start == window:
            yield TrackWindow(start, number + 1, _joined(parts, rate, layout, tracker.motion))
            start, parts = number + 1, []
    if start <= number:
        yield TrackWindow(start, number + 1, _joined(parts, rate, layout, tracker.motion))


def _joined(
    parts: Sequence[tuple[PoseDistributions, Array, Array, Array]], rate: float, layout: Keypoints, motion: Motion
) -> PoseTracks | None:
    """Tracks from the output of successive frames."""
    if not parts:
        return None
    poses = PoseDistributions.concatenate([part[0] for part in parts])
    identities, observed, velocity = (np.concatenate([part[i] for part in parts]) for i in (1, 2, 3))
    return PoseTracks(poses, poses, identities, observed, velocity, rate, layout, motion)
