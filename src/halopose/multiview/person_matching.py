"""Match persons across views: detections whose keypoints lie on each other's epipolar lines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halopose.geometry.camera import distort_jacobian, normalise, skew
from halopose.multiview.rig import CalibratedView
from halopose.poses import PoseDistributions
from halopose.types import Array

_TAIL = 4.0  # of the robust agreement 1 / (1 + m / tail), which is 0.5 at two standard deviations
_FEWEST = 4  # keypoints that two detections must have in common
LIKENESS = 0.5  # smallest agreement of two detections of one person


def epipolar_distance(
    first: CalibratedView, second: CalibratedView, one: PoseDistributions, other: PoseDistributions
) -> Array:
    """Squared distances (N, M, K) from the epipolar constraint, in standard deviations.

    With rays x and y, e = y' E x is zero for one point, and its variance follows from both covariances. The result
    is chi-square with one degree of freedom if both detections show the same person.

    Args:
        first: First view.
        second: Second view.
        one: Poses (N) in the first view.
        other: Poses (M) in the second view.
    """
    relative_rotation = second.rotation @ first.rotation.T
    essential = skew(second.rotation @ (first.position - second.position)) @ relative_rotation
    rays = [_rays(view, poses) for view, poses in ((first, one), (second, other))]
    (x, spread_x), (y, spread_y) = rays
    line_y = x @ essential.T  # (N, K, 3): epipolar lines of y
    line_x = y @ essential
    error = np.einsum("mki,nki->nmk", y, line_y)
    to_y = np.einsum("nki,mkij,nkj->nmk", line_y[..., :2], spread_y, line_y[..., :2])
    to_x = np.einsum("mki,nkij,mkj->nmk", line_x[..., :2], spread_x, line_x[..., :2])
    return np.asarray(error**2 / (to_x + to_y))


def _rays(view: CalibratedView, poses: PoseDistributions) -> tuple[Array, Array]:
    """Rays (N, K, 3) with last entry 1, and covariances (N, K, 2, 2) of the other entries; NaN off the lens."""
    plain = normalise(view.camera, poses.mean)
    focal = np.array([view.camera.fx, view.camera.fy])
    ray = np.concatenate([plain, np.ones((*plain.shape[:-1], 1))], axis=-1)
    spread = poses.covariance / (focal[:, None] * focal)
    if view.camera.distorted:
        xx, xy, yy = distort_jacobian(plain[..., 0], plain[..., 1], view.camera.distortion)
        # Inverse of the Jacobian of the lens distortion, which is symmetric.
        inverse = np.stack([yy, -xy, -xy, xx], axis=-1) / (xx * yy - xy * xy)[..., None]
        inverse = inverse.reshape(*xx.shape, 2, 2)
        spread = inverse @ spread @ inverse
    return ray, spread


def likeness(first: CalibratedView, second: CalibratedView, one: PoseDistributions, other: PoseDistributions) -> Array:
    """Agreement (N, M) of the detections of two views from 0 to 1, over the keypoints kept in both.

    Args:
        first: First view.
        second: Second view.
        one: Poses (N) in the first view.
        other: Poses (M) in the second view.
    """
    if not len(one) or not len(other):
        return np.zeros((len(one), len(other)))
    distance = epipolar_distance(first, second, one, other)
    both = np.asarray(one.keep)[:, None] & np.asarray(other.keep)[None] & np.isfinite(distance)
    closeness = np.where(both, 1 / (1 + np.nan_to_num(distance) / _TAIL), 0.0)
    count = both.sum(-1)
    return np.where(count >= _FEWEST, closeness.sum(-1) / np.maximum(count, 1), 0.0)


def group_people(views: Sequence[CalibratedView], poses: Sequence[PoseDistributions], least: float = LIKENESS) -> Array:
    """Group the detections of all views into persons by agglomerative clustering.

    The most similar detections are joined first. Two groups join if they have no view in common and their mean
    agreement reaches ``least``.

    Args:
        views: Calibrated views (V of them).
        poses: Detections of each view.
        least: Smallest mean agreement.

    Returns:
        Persons (P, V) as detection indices, -1 where a view has none. Persons seen in one view only are left out.
    """
    start = np.cumsum([0, *map(len, poses)])
    total = int(start[-1])
    alike = np.zeros((total, total))
    for i in range(len(views)):
        for j in range(i + 1, len(views)):
            table = likeness(views[i], views[j], poses[i], poses[j])
            alike[start[i] : start[i + 1], start[j] : start[j + 1]] = table
    alike = alike + alike.T
    view_of = np.repeat(np.arange(len(views)), np.diff(start))
    groups = {n: [n] for n in range(total)}
    group_of = np.arange(total)
    pairs = [(int(a), int(b)) for a, b in np.argwhere(np.triu(alike) >= least)]
    for a, b in sorted(pairs, key=lambda pair: -alike[pair]):
        one, other = groups[int(group_of[a])], groups[int(group_of[b])]
        disjoint = set(view_of[one].tolist()).isdisjoint(view_of[other].tolist())
        if one is not other and disjoint and alike[np.ix_(one, other)].mean() >= least:
            groups[int(group_of[a])] = one + other
            merged = int(group_of[b])
            group_of[other] = group_of[a]
            del groups[merged]
    people = [members for members in groups.values() if len(members) > 1]
    result = np.full((len(people), len(views)), -1, dtype=np.int64)
    for row, members in enumerate(sorted(people, key=len, reverse=True)):
        for member in members:
            result[row, view_of[member]] = member - start[view_of[member]]
    return result
