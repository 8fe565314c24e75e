"""What pruning buys: how many of the keypoints kept are correct, by the share kept.

In: confidences and correctness (N,). Out: the curve.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from halopose.sorting import falling_order
from halopose.types import Array


@dataclass(frozen=True)
class ReliabilityCurve:
    """By share of keypoints kept (P,): how many of those are correct, and the threshold that keeps them."""

    kept: Array
    reliability: Array
    threshold: Array


def reliability_curve(
    confidence: Array, correct: Array, points: int = 101, *, presorted: bool = False
) -> ReliabilityCurve:
    """Reliability of the keypoints kept, from the most confident few to all (N,).

    ``presorted`` samples are in order of falling confidence already.
    """
    if not presorted:
        order = falling_order(confidence)
        confidence, correct = confidence[order], np.asarray(correct)[order]
    count = len(confidence)
    ranks = np.unique(np.round(np.linspace(1, count, min(points, count))).astype(np.int64))
    precision = np.cumsum(correct, dtype=np.int64)[ranks - 1] / ranks
    return ReliabilityCurve(ranks / max(count, 1), precision, confidence[ranks - 1])
