"""What pruning buys: how many of the keypoints kept are correct, by the share kept.

In: confidences and correctness (N,). Out: the curve.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from halopose.types import Array
from halopose.uncertainty.order import falling_order


@dataclass(frozen=True)
class ReliabilityCurve:
    """By share of keypoints kept (P,): how many of those are correct, and the threshold that keeps them."""

    kept: Array
    reliability: Array
    threshold: Array


def reliability_curve(confidence: Array, correct: Array, points: int = 101) -> ReliabilityCurve:
    """Reliability of the keypoints kept, from the most confident few to all (N,)."""
    order = falling_order(confidence)
    precision = np.cumsum(np.asarray(correct, dtype=float)[order]) / np.arange(1, len(order) + 1)
    ranks = np.unique(np.round(np.linspace(1, len(order), min(points, len(order)))).astype(np.int64)) - 1
    return ReliabilityCurve((ranks + 1) / max(len(order), 1), precision[ranks], confidence[order][ranks])
