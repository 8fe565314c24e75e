"""Estimate the motion and error model of a film by maximum likelihood on a grid.

The parameters are identifiable because the predicted covariances fix the size of the errors. Motion is smooth over
many frames, correlated errors over few frames, and white errors over none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halopose.tracking.motion import MeasurementSeries, Motion, log_likelihood
from halopose.tracking.tracker import Track
from halopose.types import Array

_ACCELERATIONS = np.geomspace(0.1, 30.0, 6)  # object sizes / s^1.5
_SHARES = np.array([0.05, 0.3, 0.6, 0.9, 0.97])
_MEMORIES = np.array([0.1, 0.4, 1.6])  # seconds
_FINER = np.array([0.5, 0.71, 1.0, 1.41, 2.0])  # times the accelerations found first
FIT_FRAMES = 400  # largest number of frames used
_LEAST_FRAMES = 10  # shortest usable track
_ALIKE = 1.0  # prior standard deviation of the keypoints' log accelerations around their mean


def fit_motion(tracks: Sequence[MeasurementSeries], keypoints: int) -> Motion:
    """Most likely ``Motion`` of the objects of a film; ``Motion.typical`` if the tracks are too short.

    Args:
        tracks: Measurements of the objects.
        keypoints: Number of keypoints.
    """
    chosen = _enough(tracks)
    if not chosen:
        return Motion.typical(keypoints)
    motion = _best(chosen, _grid(_ACCELERATIONS, _SHARES, _MEMORIES), len(_ACCELERATIONS))
    odds = np.log(motion.share / (1 - motion.share)) + np.array([-0.8, 0.0, 0.8])
    finer = _grid(_FINER, 1 / (1 + np.exp(-odds)), motion.memory * np.array([0.6, 1.0, 1.6]))
    return _best(chosen, Motion(finer.acceleration * motion.acceleration, finer.share, finer.memory), len(_FINER))


def longest(tracks: Sequence[Track]) -> list[Track]:
    """Longest tracks that ``fit_motion`` needs: it uses at most ``FIT_FRAMES`` frames in total."""
    chosen: list[Track] = []
    for one in sorted(tracks, key=lambda one: len(one.span), reverse=True):
        if sum(len(other.span) for other in chosen) >= FIT_FRAMES:
            break
        chosen.append(one)
    return chosen


def _enough(tracks: Sequence[MeasurementSeries]) -> list[MeasurementSeries]:
    """The longest tracks, up to the largest number of frames in total."""
    left, chosen = FIT_FRAMES, []
    for track in sorted(tracks, key=len, reverse=True):
        if left < _LEAST_FRAMES or len(track) < _LEAST_FRAMES:
            break
        chosen.append(track.first(left))
        left -= len(chosen[-1])
    return chosen


def _grid(accelerations: Array, shares: Array, memories: Array) -> Motion:
    """All combinations (G,), with the acceleration as the fastest index."""
    memory, share, acceleration = (
        part.reshape(-1, 1) for part in np.meshgrid(memories, shares, accelerations, indexing="ij")
    )
    return Motion(acceleration, share, memory)


def _best(tracks: Sequence[MeasurementSeries], grid: Motion, fastest: int) -> Motion:
    """Best share and memory for all keypoints, and the acceleration of each keypoint, shrunk towards their mean.

    Args:
        tracks: Measurements of the objects.
        grid: Grid of motion models.
        fastest: Number of accelerations in the grid.
    """
    likely = np.sum([log_likelihood(track, grid) for track in tracks], axis=0)
    shape = (-1, fastest, likely.shape[1])
    table, acceleration = (
        likely.reshape(shape),
        np.log(np.broadcast_to(grid.acceleration, likely.shape)).reshape(shape),
    )
    common = np.take_along_axis(acceleration, table.sum(2).argmax(1)[:, None, None], 1).mean(2, keepdims=True)
    table = table - 0.5 * np.square((acceleration - common) / _ALIKE)
    best = table.argmax(1)  # (combinations of share and memory, K)
    row = int(np.take_along_axis(table, best[:, None], 1).sum((1, 2)).argmax())
    found = _peak(acceleration[row], table[row], best[row])
    share, memory = (part.reshape(-1, fastest)[row, 0] for part in (grid.share, grid.memory))
    return Motion(np.exp(found), share, memory)


def _peak(place: Array, height: Array, best: Array) -> Array:
    """Positions (K,) of the maxima of parabolas through the best (K,) of the heights (A, K) and its neighbours."""
    inner = np.clip(best, 1, len(place) - 2)
    columns = np.arange(len(best))
    below, at, above = (height[inner + shift, columns] for shift in (-1, 0, 1))
    left, middle, right = (place[inner + shift, columns] for shift in (-1, 0, 1))
    rise, fall = (at - below) / (middle - left), (above - at) / (right - middle)
    curvature = (fall - rise) / (right - left)
    with np.errstate(divide="ignore", invalid="ignore"):
        top = (left + middle) / 2 - rise / (2 * curvature)
    inside = (curvature < 0) & (best == inner)
    return np.where(inside, np.clip(top, left, right), place[best, columns])
