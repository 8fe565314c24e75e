"""Estimate the time offsets between films from the motion of the keypoints.

Frame n of the first view is frame n + offset of another view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from halopose.errors import HaloposeError
from halopose.multiview.person_matching import epipolar_distance
from halopose.multiview.rig import CalibratedView
from halopose.poses import PoseDistributions
from halopose.types import Array

_TAIL = 4.0
_FEWEST = 4
_CLEAR = 0.25  # relative gap between the smallest cost and the median over all lags
_CERTAIN = 5.0  # the same gap in standard errors


@dataclass(frozen=True)
class Offsets:
    """Estimated time offsets.

    Attributes:
        frames: Offsets (V,) to the first view in frames, with fractions.
        spread: Root-mean-square disagreement between pairs of views, in frames.
    """

    frames: Array
    spread: float

    @property
    def whole(self) -> Array:
        """Offsets (V,) rounded to whole frames."""
        return np.round(self.frames).astype(np.int64)


def estimate_offsets(
    views: Sequence[CalibratedView], films: Sequence[Sequence[PoseDistributions]], reach: int = 10
) -> Offsets:
    """Estimate the offsets for which the keypoints fit the epipolar geometry of all pairs of views best.

    Pairs without a clear minimum are left out.

    Args:
        views: Calibrated views.
        films: Poses of every frame of every view.
        reach: Largest offset to try, in frames.

    Raises:
        HaloposeError: The pairs with a clear minimum do not connect all views.
    """
    count = len(views)
    rows, lags, weights = [], [], []
    for i in range(count):
        for j in range(i + 1, count):
            found = _lag(views[i], views[j], films[i], films[j], reach)
            if found is None:
                continue
            row = np.zeros(count)
            row[i], row[j] = -1, 1
            rows.append(row)
            lags.append(found[0])
            weights.append(np.sqrt(found[1]))
    table, weight = np.array(rows).reshape(-1, count)[:, 1:], np.array(weights)
    if np.linalg.matrix_rank(table) < count - 1:
        raise HaloposeError(
            f"cannot estimate offsets up to {reach} frames: there is too little motion, or the offsets are larger; "
            "give the offsets as numbers"
        )
    solution, *_ = np.linalg.lstsq(table * weight[:, None], np.array(lags) * weight, rcond=None)
    residual = table @ solution - np.array(lags)
    return Offsets(np.concatenate([[0.0], solution]), float(np.sqrt(np.average(residual**2, weights=weight**2))))


def _lag(
    first: CalibratedView,
    second: CalibratedView,
    one: Sequence[PoseDistributions],
    other: Sequence[PoseDistributions],
    reach: int,
) -> tuple[float, float] | None:
    """Offset between two films and the curvature of the cost there, or None if there is no clear minimum.

    A minimum is clear if it does not lie at the largest offset and is well below the median cost.
    """
    with_poses = [(frame, poses) for frame, poses in enumerate(one) if len(poses)]
    costs = [_costs(first, second, with_poses, other, lag) for lag in range(-reach, reach + 1)]
    mean = np.array([part.mean() if len(part) else np.inf for part in costs])
    best = int(mean.argmin())
    if best in (0, 2 * reach) or not np.isfinite(mean[best - 1 : best + 2]).all():
        return None
    noise = costs[best].std() / np.sqrt(len(costs[best]))
    gap = np.median(mean[np.isfinite(mean)]) - mean[best]
    if gap <= max(_CLEAR * mean[best], _CERTAIN * noise):
        return None
    below, at, above = mean[best - 1 : best + 2]
    curvature = above - 2 * at + below
    if curvature <= 0:
        return None
    return float(best - reach + np.clip((below - above) / (2 * curvature), -1, 1)), float(curvature)


def _costs(
    first: CalibratedView,
    second: CalibratedView,
    one: Sequence[tuple[int, PoseDistributions]],
    other: Sequence[PoseDistributions],
    lag: int,
) -> Array:
    """Robust distance (T,) of the best matching persons of both views, for each frame that has detections."""
    costs = []
    for frame, a in one:
        if not 0 <= frame + lag < len(other) or not len(other[frame + lag]):
            continue
        b = other[frame + lag]
        distance_sq = epipolar_distance(first, second, a, b)
        shared_keypoints = np.asarray(a.keep)[:, None] & np.asarray(b.keep)[None] & np.isfinite(distance_sq)
        distance = np.where(shared_keypoints, np.log1p(np.nan_to_num(distance_sq) / _TAIL), 0.0)
        shared = shared_keypoints.sum(-1)
        mean = np.where(shared >= _FEWEST, distance.sum(-1) / np.maximum(shared, 1), 10.0)
        best = mean[linear_sum_assignment(mean)]
        costs.append(best[best < 10.0].min(initial=10.0))
    return np.array(costs)
