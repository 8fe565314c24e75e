"""Which detection is which known object: the similarity of keypoint distributions, and the best pairing of all.

In: where N objects are expected and M detections are seen, keypoints and covariances of both. Out: pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from halopose.types import Array


class Similarity(NamedTuple):
    """Of N objects and M detections (N, M): OKS that is ``expected`` under both laws, and how ``near`` they are.

    ``near`` is OKS with the tolerance of each keypoint widened by both covariances: 1 where the means agree,
    however uncertain they are. It tells whether two may be one; the expected OKS, which is less where less is
    known, tells which of several are.
    """

    expected: Array
    near: Array


def similarity(
    place: Array, spread: Array, seen: Array, covariance: Array, used: Array, tolerance: Array
) -> Similarity:
    """Of objects (N, K, 2) with covariances (N, K, 2, 2) and detections (M, K, 2) with theirs (M, K, 2, 2).

    used (M, K): keypoints that count; tolerance (M, K): OKS's own, object size times kappa, in pixels. For a
    residual that is normal with covariance S about d, the mean of exp(-|r|^2 / 2 t^2) is
    t^2 / sqrt|S + t^2 I| exp(-d' (S + t^2 I)^-1 d / 2).
    """
    square = tolerance**2
    dx, dy = np.moveaxis(seen[None] - place[:, None], -1, 0)
    total = spread[:, None] + covariance[None]
    xx, yy, xy = total[..., 0, 0] + square, total[..., 1, 1] + square, total[..., 0, 1]
    determinant = xx * yy - xy * xy
    close = np.exp(-0.5 * (yy * dx * dx - 2 * xy * dx * dy + xx * dy * dy) / determinant)
    share = used / np.maximum(used.sum(1, keepdims=True), 1)
    return Similarity((close * square / np.sqrt(determinant) * share).sum(-1), (close * share).sum(-1))


def pair(similar: Similarity, least: float) -> list[tuple[int, int]]:
    """Pairs (object, detection) of the largest expected OKS in all, among those that are near enough."""
    value = np.where(similar.near >= least, similar.expected, -1.0)
    rows, columns = linear_sum_assignment(value, maximize=True)
    return [(int(a), int(b)) for a, b in zip(rows, columns, strict=True) if value[a, b] >= 0]
