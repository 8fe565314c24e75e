"""Learns from a film how its keypoints move and how long their errors last, by the likelihood of what is seen.

In: what was seen of each object, as ``MeasurementSeries``. Out: the ``Motion`` under which it is most likely.

Every value of a grid goes through the film at once. The stated covariances tell how large errors are; motion is
what is smooth over many frames, an error that lasts is not as smooth, a new one not at all: so all three can be
told apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halopose.tracking.motion import MeasurementSeries, Motion, log_likelihood
from halopose.types import Array

_ACCELERATIONS = np.geomspace(0.1, 30.0, 6)  # object sizes / s^1.5
_SHARES = np.array([0.05, 0.3, 0.6, 0.9, 0.97])
_MEMORIES = np.array([0.1, 0.4, 1.6])  # seconds
_FINER = np.array([0.5, 0.71, 1.0, 1.41, 2.0])  # times the accelerations found first
_FRAMES = 400  # of a film that are looked at
_LEAST_FRAMES = 10  # of an object that says something
_ALIKE = 1.0  # natural logarithms by which keypoints' accelerations differ, before the film says otherwise


def fit_motion(tracks: Sequence[MeasurementSeries], keypoints: int) -> Motion:
    """The most likely ``Motion`` of the objects of a film; the typical one if it is too short to tell."""
    chosen = _enough(tracks)
    if not chosen:
        return Motion.typical(keypoints)
    motion = _best(chosen, _grid(_ACCELERATIONS, _SHARES, _MEMORIES), len(_ACCELERATIONS))
    odds = np.log(motion.share / (1 - motion.share)) + np.array([-0.8, 0.0, 0.8])
    finer = _grid(_FINER, 1 / (1 + np.exp(-odds)), motion.memory * np.array([0.6, 1.0, 1.6]))
    return _best(chosen, Motion(finer.acceleration * motion.acceleration, finer.share, finer.memory), len(_FINER))


def _enough(tracks: Sequence[MeasurementSeries]) -> list[MeasurementSeries]:
    """The longest objects, up to so many frames in all."""
    left, chosen = _FRAMES, []
    for track in sorted(tracks, key=len, reverse=True):
        if left < _LEAST_FRAMES or len(track) < _LEAST_FRAMES:
            break
        chosen.append(track.first(left))
        left -= len(chosen[-1])
    return chosen


def _grid(accelerations: Array, shares: Array, memories: Array) -> Motion:
    """All combinations (G,), the acceleration running fastest."""
    memory, share, acceleration = (
        part.reshape(-1, 1) for part in np.meshgrid(memories, shares, accelerations, indexing="ij")
    )
    return Motion(acceleration, share, memory)


def _best(tracks: Sequence[MeasurementSeries], grid: Motion, fastest: int) -> Motion:
    """Share and memory of all keypoints together; under them the acceleration of each, drawn towards their mean.

    fastest: how many accelerations there are.
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
    """Where parabolas through the best (K,) of heights (A, K) and its neighbours are highest."""
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
