"""Causal tracker: predicts the keypoints of each object, matches detections to objects, and updates the filter.

It uses no later frames and can run live; ``tracks`` smooths a finished film.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from halopose.boxes import box_area
from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.poses import PoseDistributions
from halopose.tracking.detection_pairing import pair, similarity
from halopose.tracking.motion import Motion, State, Warp, begin, predict, update
from halopose.tracking.responsive_filter import LASTING_SHARE, responsive_motion
from halopose.types import Array

_SIZE_MEMORY = 0.9  # weight of the previous size of an object at each detection


@dataclass(frozen=True)
class TrackSettings:
    """Settings of the tracker.

    Attributes:
        score: Smallest confidence of a detection that starts a track; weaker detections only continue tracks.
        confirm: Number of detections after which a track is reported.
        gap: Seconds that an object may be undetected.
        similarity: Smallest OKS of object and detection, with tolerances widened by the covariances.
        duplicate: OKS with a detected object above which a detection starts no track.
        prune: Whether to ignore pruned keypoints.
        responsive: Factor of the accelerations of the responsive filter, which has less jitter and lag and wider
            covariances; 1 is usual, more follows faster, less is calmer. 0: use ``motion``. The responsive filter also
            uses pruned keypoints.
    """

    score: float = 0.25
    confirm: int = 3
    gap: float = 1.0
    similarity: float = 0.3
    duplicate: float = 0.6
    prune: bool = True
    responsive: float = 0.0

    def __post_init__(self) -> None:
        if self.confirm < 1 or not self.gap >= 0 or not all(0 <= x <= 1 for x in (self.score, self.similarity)):
            raise HaloposeError(
                "invalid track settings: confirm must be 1 or more, gap 0 or more, score and similarity from 0 to 1"
            )
        if not 0 <= self.responsive <= 100:
            raise HaloposeError(f"responsive is a factor from 0 to 100, got {self.responsive:g}")


@dataclass
class Track:
    """Track of one object.

    Attributes:
        identity: Number of the object.
        first: First frame.
        rows: Index of its detection in every frame since ``first``, -1 where it was not detected.
        seen: Number of detections.
        unseen: Number of frames since the last detection.
    """

    identity: int
    first: int
    rows: list[int] = field(default_factory=list)
    seen: int = field(init=False, default=0)
    unseen: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        rows, self.rows = self.rows, []
        for row in rows:
            self.add(row)

    def add(self, row: int) -> None:
        """Append a frame: the index of the detection, or -1."""
        self.rows.append(row)
        self.seen += row >= 0
        self.unseen = 0 if row >= 0 else self.unseen + 1

    @property
    def span(self) -> list[int]:
        """``rows`` up to the last detection."""
        return self.rows[: len(self.rows) - self.unseen]


class Tracker:
    """Tracker of one film or stream.

    Args:
        layout: Keypoint layout.
        rate: Frame rate in frames per second.
        settings: Thresholds.
        motion: Motion and error model; default ``Motion.typical``.

    Example:
    >>> from halopose.keypoints import Keypoints
    >>> spread = np.tile(4 * np.eye(2), (1, 17, 1, 1))
    >>> standing = np.random.default_rng(0).uniform(0, 100, (1, 17, 2))
    >>> tracker = Tracker(Keypoints.of(17), rate=25.0)
    >>> for frame in range(4):
    ...     seen = standing + [2.0 * frame, 0.0]
    ...     box = np.concatenate([seen.min(1), seen.max(1)], axis=1)
    ...     ids, poses = tracker.update(PoseDistributions(box, np.ones(1), seen, spread, spread))
    >>> ids.tolist(), poses.covariance.shape
    ([1], (1, 17, 2, 2))
    """

    def __init__(
        self,
        layout: Keypoints,
        rate: float,
        settings: TrackSettings | None = None,
        motion: Motion | None = None,
    ) -> None:
        if not rate > 0:
            raise HaloposeError(f"the frame rate must be positive, got {rate}")
        self.layout, self.step, self.settings = layout, 1 / rate, settings or TrackSettings()
        self.motion = motion or Motion.typical(len(layout))
        self.ended: list[Track] = []
        self._live: list[Track] = []
        self._state = State(np.zeros((0, len(layout), 6)), np.zeros((0, len(layout), 6, 6)))
        self._lasting = np.zeros((0, len(layout), 2, 2))  # covariance of errors that the filter cannot average out
        self._size = np.zeros(0)
        self._boxes = np.zeros((0, 4))
        self._scores = np.zeros(0)
        self._shown = np.zeros(0, dtype=bool)
        self._frame = 0
        self._identities = 0
        self._nobody = self._known()

    @property
    def tracks(self) -> list[Track]:
        """Confirmed tracks in the order of their identities."""
        tracks = [*self.ended, *self._live]
        return sorted((t for t in tracks if t.seen >= self.settings.confirm), key=lambda track: track.identity)

    def update(self, poses: PoseDistributions, warp: Warp | None = None) -> tuple[Array, PoseDistributions]:
        """Process the poses of the next frame.

        Args:
            poses: Poses of the frame.
            warp: Image motion since the last frame, if the camera moves.

        Returns:
            Identities (N,) and filtered poses of all confirmed objects.
        """
        if poses.keypoint_count != len(self.layout):
            raise HaloposeError(f"the tracker has {len(self.layout)} keypoints, the poses have {poses.keypoint_count}")
        if not len(poses) and not self._live:  # fast path for long times without objects
            self._frame += 1
            return self._nobody
        self._state = predict(self._state, self._current_motion(), self._size, self.step, warp)
        pairs = self._pairs(poses)
        self._correct(poses, pairs)
        taken = {column for _, column in pairs}
        self._drop()
        self._begin(poses, [n for n in range(len(poses)) if n not in taken])
        self._frame += 1
        return self._known()

    def _pairs(self, poses: PoseDistributions) -> list[tuple[int, int]]:
        """Pairs of tracks and detections: confident detections are matched first."""
        used, tolerance = self._used(poses), self._tolerance(poses)
        place, spread = self._place()
        similar = similarity(place, spread, poses.mean, poses.covariance, used, tolerance)
        free, found = np.arange(len(place)), []
        for group in (poses.scores >= self.settings.score, poses.scores < self.settings.score):
            columns = np.flatnonzero(group)
            part = type(similar)(*(table[np.ix_(free, columns)] for table in similar))
            chosen = [(int(free[a]), int(columns[b])) for a, b in pair(part, self.settings.similarity)]
            free = np.setdiff1d(free, [a for a, _ in chosen])
            found += chosen
        return found

    def _current_motion(self) -> Motion:
        """Motion and error model (N, K) of the next frame."""
        factor = self.settings.responsive
        return responsive_motion(self._state, self._size, factor) if factor else self.motion

    def _place(self) -> tuple[Array, Array]:
        """Positions (N, K, 2) and their covariances (N, K, 2, 2)."""
        place, spread = self._state.place
        return place, spread + self._lasting

    def _measured(self, state: State, poses: PoseDistributions) -> tuple[State, Array]:
        """Update states with the detections of the same rows.

        Returns:
            Updated states, and covariances (N, K, 2, 2) of the lasting errors.
        """
        used = np.asarray(poses.keep, dtype=bool) | (not self.settings.prune)
        if self.settings.responsive:
            used = used | (poses.keypoints != 0).any(-1)  # a missing keypoint of another tool is at 0, 0
            motion = responsive_motion(state, sizes(poses, self.layout), self.settings.responsive)
            state, _ = update(state, motion, poses.mean, np.linalg.cholesky(poses.covariance), used, None, None)
            return state, LASTING_SHARE * poses.covariance
        nu = None if poses.dof is None else np.broadcast_to(poses.dof, used.shape)
        state, _ = update(state, self.motion, poses.mean, np.linalg.cholesky(poses.scale), used, nu, None)
        return state, np.zeros_like(poses.covariance)

    def _used(self, poses: PoseDistributions) -> Array:
        """Whether a keypoint is used (N, K); all keypoints of a pose without kept keypoints are used."""
        keep = np.asarray(poses.keep, dtype=bool) if self.settings.prune else np.ones(poses.keypoints.shape[:2], bool)
        return keep | ~keep.any(1, keepdims=True)

    def _tolerance(self, poses: PoseDistributions) -> Array:
        return sizes(poses, self.layout)[:, None] * self.layout.kappa

    def _correct(self, poses: PoseDistributions, pairs: list[tuple[int, int]]) -> None:
        rows, columns = (np.array([p[i] for p in pairs], dtype=np.int64) for i in (0, 1))
        found = dict(pairs)
        for number, track in enumerate(self._live):
            track.add(found.get(number, -1))
        self._scores[:] = 0.0
        if not len(rows):
            return
        state = State(self._state.mean[rows], self._state.covariance[rows])
        chosen = poses[columns]
        state, self._lasting[rows] = self._measured(state, chosen)
        mean, covariance = self._state.mean.copy(), self._state.covariance.copy()
        mean[rows], covariance[rows] = state
        self._state = State(mean, covariance)
        new = sizes(chosen, self.layout)
        self._size[rows] = _SIZE_MEMORY * self._size[rows] + (1 - _SIZE_MEMORY) * new
        self._boxes[rows], self._scores[rows] = chosen.boxes, chosen.scores

    def _drop(self) -> None:
        """End tracks out of sight for too long, and those that were lost before they were confirmed."""
        limit = max(1, round(self.settings.gap / self.step))
        stay = []
        for number, track in enumerate(self._live):
            patience = limit if track.seen >= self.settings.confirm else min(limit, 2)
            if track.unseen <= patience:
                stay.append(number)
            else:
                self.ended.append(track)
        self._live = [self._live[n] for n in stay]
        self._state = State(self._state.mean[stay], self._state.covariance[stay])
        self._lasting, self._size = self._lasting[stay], self._size[stay]
        self._boxes, self._scores = self._boxes[stay], self._scores[stay]

    def _begin(self, poses: PoseDistributions, left: list[int]) -> None:
        left = [n for n in left if poses.scores[n] >= self.settings.score]
        if not left:
            return
        new = poses[np.array(left)]
        place, _ = self._state.place
        nothing = np.zeros((1, 1, 2, 2))
        seen_now = np.array([track.rows[-1] >= 0 for track in self._live], dtype=bool)
        overlap = similarity(
            place[seen_now], nothing, new.mean, nothing, self._used(new), self._tolerance(new)
        ).expected
        fresh = np.flatnonzero(~(overlap > self.settings.duplicate).any(0))
        new = new[fresh]
        used = np.asarray(new.keep, dtype=bool) | (not self.settings.prune)
        size = sizes(new, self.layout)
        first = begin(new.mean, used, size)
        first, lasting = self._measured(first, new)
        for number in fresh:
            self._identities += 1
            self._live.append(Track(self._identities, self._frame, [left[int(number)]]))
        joined = [np.concatenate([old, add]) for old, add in zip(self._state, first, strict=True)]
        self._state = State(*joined)
        self._lasting = np.concatenate([self._lasting, lasting])
        self._size = np.concatenate([self._size, size])
        self._boxes, self._scores = np.concatenate([self._boxes, new.boxes]), np.r_[self._scores, new.scores]

    def _known(self) -> tuple[Array, PoseDistributions]:
        shown = np.array([track.seen >= self.settings.confirm for track in self._live], dtype=bool)
        self._shown = shown
        place, spread = self._place()
        identities = np.array([track.identity for track in self._live], dtype=np.int64)
        return identities[shown], PoseDistributions(
            self._boxes[shown], self._scores[shown], place[shown], spread[shown], spread[shown]
        )

    @property
    def velocity(self) -> Array:
        """Velocities (N, K, 2), in pixels per second, of the objects that the last update returned."""
        return self._state.mean[self._shown, :, 2:4]

    @property
    def size(self) -> Array:
        """Sizes (N,) of these objects in pixels."""
        return self._size[self._shown]

    @property
    def seen_as(self) -> Array:
        """Index of the detection (N,) of each of these objects in the last frame, -1 where it was not detected."""
        rows = np.array([track.rows[-1] for track in self._live], dtype=np.int64)
        return rows[self._shown]


def sizes(poses: PoseDistributions, layout: Keypoints) -> Array:
    """Sizes (N,) of detected objects in pixels: square root of box area times area factor."""
    return np.sqrt(np.maximum(box_area(poses.boxes) * layout.area_factor, 1.0))
