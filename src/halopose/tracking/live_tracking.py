"""Tracks of a film as they were known at the time: what ``Tracker`` says after each frame, kept.

In: the poses of each frame. Out: ``PoseTracks`` in which nothing depends on a later frame: an object appears once
it is confirmed and stays until it is given up, its box is the last that was seen, and its motion is not learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.poses import PoseDistributions
from halopose.tracking.motion import Motion, Warp
from halopose.tracking.tracker import Tracker, TrackSettings
from halopose.tracking.tracks import NO_TRACK, PoseTracks, is_certain, least_certain
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
    """Follow the objects of a film as if it were seen live; arguments as of ``tracks.track``.

    motion: known from elsewhere; else that of ``Motion.typical``.

    >>> from halopose.tracking.synthetic_films import Film, synthesize_film
    >>> frames = synthesize_film(Film(frames=12, missed=0.0)).frames
    >>> whole, part = (track_live(frames[:count], Keypoints.of(17), rate=30.0) for count in (12, 8))
    >>> bool((whole.poses.keypoints[: len(part)] == part.poses.keypoints).all())
    True
    """
    if warps is not None and len(warps) != len(frames):
        raise HaloposeError(f"give a warp for each of the {len(frames)} frames, got {len(warps)}")
    tracker = Tracker(layout, rate, settings, motion)
    least = 0.0
    classes: dict[int, int] = {}
    parts: list[tuple[PoseDistributions, Array, Array, Array]] = []
    for number, poses in enumerate(frames):
        identities, known = tracker.update(poses, None if warps is None else warps[number])
        least = max(least, least_certain([poses], layout))
        if not len(identities):
            continue
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
    if not parts:
        raise HaloposeError(NO_TRACK)
    together = PoseDistributions.concatenate([part[0] for part in parts])
    identities, observed, velocity = (np.concatenate([part[i] for part in parts]) for i in (1, 2, 3))
    return PoseTracks(together, together, identities, observed, velocity, rate, layout, tracker.motion)
