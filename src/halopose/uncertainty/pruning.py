"""Pruning unreliable keypoints by their predicted covariance (paper, section 3.3).

In: covariances (..., K, 2, 2), object areas, correctness on held-out data. Out: a confidence, a threshold,
a mask. Pruning is only ever a mask: coordinates stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from halopose.errors import HaloposeError
from halopose.evaluation.metrics import falling_order
from halopose.poses import Array

Scalarisation = Literal["trace", "determinant", "eigenvalue"]
ThresholdRule = Literal["youden", "distance", "f1"]

GAMMA_KS = 0.5  # a keypoint is reliable if its similarity reaches this, COCO's lowest threshold


def scalarise(covariance: Array, scalarisation: Scalarisation = "trace") -> Array:
    """Size (...) of covariances (..., 2, 2): trace, square root of the determinant, or larger eigenvalue."""
    xx, xy, yy = covariance[..., 0, 0], covariance[..., 0, 1], covariance[..., 1, 1]
    if scalarisation == "trace":
        return np.asarray(xx + yy)
    if scalarisation == "determinant":
        return np.asarray(np.sqrt(np.maximum(xx * yy - xy**2, 0)))
    if scalarisation == "eigenvalue":
        return np.asarray((xx + yy) / 2 + np.hypot((xx - yy) / 2, xy))
    raise HaloposeError(f"unknown scalarisation {scalarisation!r}: trace, determinant or eigenvalue")


def localization_confidence(
    covariance: Array, area: Array, sigmas: Array, scalarisation: Scalarisation = "trace"
) -> Array:
    """c (..., K) = -phi(covariance) / (s^2 kappa^2) of covariances (..., K, 2, 2), areas (...) (eq. 19)."""
    kappa = 2 * np.asarray(sigmas)
    return -scalarise(covariance, scalarisation) / (np.asarray(area)[..., None] * kappa**2)


def select_threshold(
    confidence: Array, correct: Array, rule: ThresholdRule = "youden", weight: Array | None = None
) -> float:
    """Threshold on the confidence (N,) that best separates correct from wrong keypoints (eq. 21).

    youden maximises TPR - FPR, distance minimises the distance to the ROC's corner (0, 1), f1 maximises
    the F1 score. Among equals the lowest threshold, which keeps most. Where all keypoints are correct, or
    none is, there is nothing to learn: -inf, which keeps everything.
    """
    order = np.argsort(-confidence)
    ordered, hit = confidence[order], np.asarray(correct, dtype=bool)[order]
    mass = np.ones(len(ordered)) if weight is None else np.asarray(weight, dtype=float)[order]
    true, false = np.cumsum(mass * hit), np.cumsum(mass * ~hit)
    if not len(ordered) or true[-1] == 0 or false[-1] == 0:
        return float("-inf")
    last = np.flatnonzero(np.r_[ordered[1:] != ordered[:-1], True])  # keep all of a tie or none
    true, false = true[last], false[last]
    tpr, fpr = true / true[-1], false / false[-1]
    if rule == "youden":
        merit = tpr - fpr
    elif rule == "distance":
        merit = -np.hypot(fpr, 1 - tpr)
    elif rule == "f1":
        merit = 2 * true / (true[-1] + true + false)
    else:
        raise HaloposeError(f"unknown threshold rule {rule!r}: youden, distance or f1")
    best = len(merit) - 1 - int(np.argmax(merit[::-1]))
    return float(ordered[last[best]])


def select_thresholds(confidence: Array, correct: Array, labelled: Array, rule: ThresholdRule = "youden") -> Array:
    """A threshold per keypoint (K,) from confidences (N, K); a keypoint of one kind only keeps everything."""
    return np.array(
        [select_threshold(confidence[mask, k], correct[mask, k], rule) for k, mask in enumerate(labelled.T)]
    )


def keep_mask(
    confidence: Array,
    threshold: float | Array,
    visibility: Array | None = None,
    visibility_threshold: float = 0.0,
) -> Array:
    """Keypoints (..., K) to keep: visible enough, and confident enough (eq. 22)."""
    keep = confidence >= threshold
    if visibility is not None:
        keep = keep & (visibility >= visibility_threshold)
    return np.asarray(keep)


@dataclass(frozen=True)
class ReliabilityCurve:
    """What pruning buys: by share of keypoints kept (P,), how many of those are correct, and where to cut."""

    kept: Array
    reliability: Array
    threshold: Array


def reliability_curve(confidence: Array, correct: Array, points: int = 101) -> ReliabilityCurve:
    """Reliability of the keypoints kept, from the most confident few to all (N,)."""
    order = falling_order(confidence)
    precision = np.cumsum(np.asarray(correct, dtype=float)[order]) / np.arange(1, len(order) + 1)
    ranks = np.unique(np.round(np.linspace(1, len(order), min(points, len(order)))).astype(np.int64)) - 1
    return ReliabilityCurve((ranks + 1) / max(len(order), 1), precision[ranks], confidence[order][ranks])
