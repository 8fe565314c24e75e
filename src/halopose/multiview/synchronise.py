"""How many frames films are apart, from the motion that they show.

In: the poses of each frame of each view. Out: offsets (V,): frame n of the first view is frame n + offset of
another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from halopose.multiview.people import epipolar_distance
from halopose.multiview.rig import View
from halopose.poses import PoseDistributions
from halopose.types import Array

_TAIL = 4.0
_FEWEST = 4


@dataclass(frozen=True)
class Offsets:
    """frames (V,): offsets to the first view, with fractions; spread: how far pairs disagree, in frames."""

    frames: Array
    spread: float

    @property
    def whole(self) -> Array:
        """The nearest whole frames (V,)."""
        return np.round(self.frames).astype(np.int64)


def estimate_offsets(
    views: Sequence[View], films: Sequence[Sequence[PoseDistributions]], reach: int = 10
) -> Offsets:
    """Offsets under which keypoints of all pairs of views lie best on each other's epipolar lines."""
    count = len(views)
    rows, lags, weights = [], [], []
    for i in range(count):
        for j in range(i + 1, count):
            cost = np.array(
                [_cost(views[i], views[j], films[i], films[j], lag) for lag in range(-reach, reach + 1)]
            )
            lag, curvature = _lowest(cost, reach)
            row = np.zeros(count)
            row[i], row[j] = -1, 1
            rows.append(row)
            lags.append(lag)
            weights.append(np.sqrt(max(curvature, 1e-9)))
    table, weight = np.array(rows)[:, 1:], np.array(weights)
    solved, *_ = np.linalg.lstsq(table * weight[:, None], np.array(lags) * weight, rcond=None)
    left = table @ solved - np.array(lags)
    return Offsets(np.concatenate([[0.0], solved]), float(np.sqrt(np.average(left**2, weights=weight**2))))


def _cost(
    first: View, second: View, one: Sequence[PoseDistributions], other: Sequence[PoseDistributions], lag: int
) -> float:
    """Mean robust distance of the persons of both views that agree best, frame by frame."""
    costs = []
    for frame in range(max(0, -lag), min(len(one), len(other) - lag)):
        a, b = one[frame], other[frame + lag]
        if not len(a) or not len(b):
            continue
        both = np.asarray(a.keep)[:, None] & np.asarray(b.keep)[None]
        distance = np.where(both, np.log1p(np.nan_to_num(epipolar_distance(first, second, a, b)) / _TAIL), 0.0)
        shared = both.sum(-1)
        mean = np.where(shared >= _FEWEST, distance.sum(-1) / np.maximum(shared, 1), 10.0)
        best = mean[linear_sum_assignment(mean)]
        costs.append(best[best < 10.0].min(initial=10.0))
    return float(np.mean(costs)) if costs else np.inf


def _lowest(cost: Array, reach: int) -> tuple[float, float]:
    """Where a parabola through the least cost and its neighbours is lowest, and how sharply it bends."""
    best = int(np.clip(cost.argmin(), 1, len(cost) - 2))
    below, at, above = cost[best - 1 : best + 2]
    curvature = above - 2 * at + below
    if not np.isfinite(curvature) or curvature <= 0:
        return float(cost.argmin() - reach), 0.0
    return float(best - reach + np.clip((below - above) / (2 * curvature), -1, 1)), float(curvature)


__all__ = ["Offsets", "estimate_offsets"]
