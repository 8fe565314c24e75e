"""Match detections to known objects by the similarity of their keypoint distributions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from halopose.types import Array


class Similarity(NamedTuple):
    """Similarity of N objects and M detections.

    Attributes:
        expected: Expected OKS (N, M) under both distributions. It decreases with uncertainty and selects the best
            of several candidates.
        near: OKS (N, M) with tolerances widened by both covariances. It is 1 where the means agree and decides
            whether a pair is possible.
    """

    expected: Array
    near: Array


def similarity(
    place: Array, spread: Array, seen: Array, covariance: Array, used: Array, tolerance: Array
) -> Similarity:
    """Similarity of objects and detections.

    For a normal residual with mean d and covariance S, the expectation of exp(-|r|^2 / 2 t^2) is
    t^2 / sqrt|S + t^2 I| exp(-d' (S + t^2 I)^-1 d / 2).

    Args:
        place: Keypoints (N, K, 2) of the objects.
        spread: Covariances (N, K, 2, 2) of the objects.
        seen: Keypoints (M, K, 2) of the detections.
        covariance: Covariances (M, K, 2, 2) of the detections.
        used: Whether a keypoint of a detection is used (M, K).
        tolerance: OKS tolerance (M, K) in pixels: object size times kappa.
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
    """Pairs (object, detection) with the largest total expected OKS; ``near`` must reach ``least``."""
    value = np.where(similar.near >= least, similar.expected, -1.0)
    rows, columns = linear_sum_assignment(value, maximize=True)
    return [(int(a), int(b)) for a, b in zip(rows, columns, strict=True) if value[a, b] >= 0]
