"""Pruning unreliable keypoints by their predicted covariance (paper, section 3.3).

In: covariances (..., K, 2, 2), object areas, correctness on held-out data. Out: a confidence, a threshold,
a mask. Pruning is only ever a mask: coordinates stay as they are.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

import numpy as np
from scipy import stats

from halopose.errors import HaloposeError
from halopose.sorting import falling_order
from halopose.types import Array

Scalarisation = Literal["trace", "determinant", "eigenvalue"]
ThresholdRule = Literal["youden", "distance", "f1"]
RULES = (*get_args(ThresholdRule), "risk:0.05@0.95")
_PROMISE = re.compile(r"risk:([0-9.]+)@([0-9.]+)")
_STEPS = 400  # thresholds that a promise is tried at
_FEWEST = 0.05  # share of the keypoints that a promise is first tried at: fewer say nothing

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
    covariance: Array, area: Array, kappa: Array, scalarisation: Scalarisation = "trace"
) -> Array:
    """c (..., K) = -phi(covariance) / (s^2 kappa^2) of covariances (..., K, 2, 2), areas (...) (eq. 19)."""
    return -scalarise(covariance, scalarisation) / (np.asarray(area)[..., None] * np.asarray(kappa) ** 2)


def select_threshold(confidence: Array, correct: Array, rule: str = "youden", among: Array | None = None) -> float:
    """Threshold on the confidence (N,) that best separates correct from wrong keypoints (eq. 21).

    youden maximises TPR - FPR, distance minimises the distance to the ROC's corner (0, 1), f1 maximises
    the F1 score. Among equals the lowest threshold, which keeps most. Where all keypoints are correct, or
    none is, there is nothing to learn: -inf, which keeps everything. among: keypoints (N,) that another rule
    keeps anyway; the threshold is then the one that does best together with that rule.
    """
    correct = np.asarray(correct, dtype=bool)
    positives, negatives = int(correct.sum()), int((~correct).sum())
    if among is not None:
        confidence, correct = confidence[among], correct[among]
    if not positives or not negatives or correct.all() or not correct.any():
        return float("-inf")
    order = falling_order(confidence)
    ordered, hit = confidence.take(order), correct.take(order)
    last = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))  # keep all of a tie or none
    true = np.cumsum(hit).take(last)
    false = last + 1 - true
    tpr, fpr = true / positives, false / negatives
    if rule == "youden":
        merit = tpr - fpr
    elif rule == "distance":
        merit = -np.hypot(fpr, 1 - tpr)
    elif rule == "f1":
        merit = 2 * true / (positives + true + false)
    else:
        raise HaloposeError(f"unknown threshold rule {rule!r}: youden, distance or f1")
    best = len(merit) - 1 - int(np.argmax(merit[::-1]))
    return float(ordered[last[best]])


def promise_of(rule: str) -> tuple[float, float] | None:
    """Risk and certainty of a rule such as ``risk:0.05@0.95``; None for the rules of ``select_threshold``."""
    if rule in get_args(ThresholdRule):
        return None
    found = _PROMISE.fullmatch(rule)
    try:
        risk, certainty = (float(part) for part in found.groups()) if found else (0.0, 0.0)
    except ValueError:
        risk = certainty = 0.0
    if not (0 < risk < 1 and 0.5 <= certainty < 1):
        raise HaloposeError(
            f"unknown threshold rule {rule!r}: {', '.join(RULES[:-1])}, or a promise such as {RULES[-1]}, at most "
            "5 % of what is kept is wrong, with 95 % certainty"
        )
    return risk, certainty


def promised_threshold(confidence: Array, correct: Array, image_ids: Array, risk: float, certainty: float) -> float:
    """The lowest threshold of which it is certain that at most ``risk`` of the keypoints kept (N,) are wrong.

    Learn then test: thresholds are tried from the strictest on, each by a t-test over images (N,), in which a
    keypoint kept counts 1 - risk if it is wrong and - risk if not, and one more image, of the average size, counts
    as wrong throughout; the last before the first that fails is taken. inf, keeping nothing, if none passes.
    """
    _, image, count = np.unique(image_ids, return_inverse=True, return_counts=True)
    images = len(count)
    if images < 2:
        return float("inf")
    order = falling_order(confidence)
    ordered, image = confidence[order], image[order]
    excess = np.where(correct[order], -risk, 1 - risk)
    last = np.flatnonzero(np.r_[ordered[1:] != ordered[:-1], True]) + 1  # keep all of a tie or none
    last = last[last >= min(_FEWEST * len(ordered), last[-1])]
    quantile = float(stats.t.ppf(certainty, images - 1))
    chosen = float("inf")
    for kept in last[np.unique(np.linspace(0, len(last) - 1, _STEPS).astype(int))].tolist():
        sums = np.bincount(image[:kept], excess[:kept], minlength=images)
        mean = (sums.sum() + (1 - risk) * kept / images) / (images + 1)
        if mean + quantile * sums.std(ddof=1) / np.sqrt(images) > 0:
            break
        chosen = float(ordered[kept - 1])
    return chosen


def keep_mask(
    confidence: Array,
    threshold: float | Array,
    visibility: Array | None = None,
    visibility_threshold: float | Array | None = None,
) -> Array:
    """Keypoints (..., K) to keep: visible enough, and confident enough (eq. 22).

    Without a visibility score, or without a threshold for it, the confidence decides alone.
    """
    keep = confidence >= threshold
    if visibility is not None and visibility_threshold is not None:
        keep = keep & (visibility >= visibility_threshold)
    return np.asarray(keep)
