"""Thresholds on the localization confidence, chosen on held-out keypoints (paper, section 3.3)."""

from __future__ import annotations

import numpy as np
from scipy import special

from halopose.errors import HaloposeError
from halopose.sorting import falling_order
from halopose.types import Array

_STEPS = 400  # number of candidate thresholds of a risk guarantee
_FEWEST = 0.05  # share of the keypoints at the strictest candidate: fewer carry too little evidence


def select_threshold(confidence: Array, correct: Array, rule: str = "youden", among: Array | None = None) -> float:
    """Return the threshold of the confidence (N,) that best separates correct from wrong keypoints (eq. 21).

    If all keypoints are correct, or none is, the threshold is -inf, which keeps everything. Of equally good thresholds
    the lowest is taken.

    Args:
        confidence: confidences (N,).
        correct: which keypoints (N,) are correct.
        rule: youden maximises TPR - FPR, distance minimises the distance to the corner (0, 1) of the ROC, f1 maximises
            the F1 score.
        among: keypoints (N,) that another rule keeps; the threshold is then the best one together with that rule.
    """
    correct = np.asarray(correct, dtype=bool)
    positives, negatives = int(correct.sum()), int((~correct).sum())
    if among is not None:
        confidence, correct = confidence[among], correct[among]
    if not positives or not negatives or correct.all() or not correct.any():
        return float("-inf")
    order = falling_order(confidence)
    ordered, hit = confidence.take(order), correct.take(order)
    last = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))  # keep all equal values or none
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


def guaranteed_threshold(confidence: Array, correct: Array, image_ids: Array, risk: float, certainty: float) -> float:
    """Return the lowest threshold with at most ``risk`` wrong kept keypoints (N,) at this certainty; inf if there is
    none.

    Learn then test: thresholds are tried from the strictest on with a t-test over images (N,). A kept keypoint counts 1
    - risk if it is
    wrong and -risk otherwise; one more image of average size counts as completely wrong. The last threshold before the
    first failure is taken.
    """
    _, image, count = np.unique(image_ids, return_inverse=True, return_counts=True)
    images = len(count)
    if images < 2:
        return float("inf")
    order = falling_order(confidence)
    ordered, image = confidence[order], image[order]
    excess = np.where(correct[order], -risk, 1 - risk)
    last = np.flatnonzero(np.r_[ordered[1:] != ordered[:-1], True]) + 1  # keep all equal values or none
    last = last[last >= min(_FEWEST * len(ordered), last[-1])]
    quantile = float(special.stdtrit(images - 1, certainty))
    chosen = float("inf")
    for kept in last[np.unique(np.linspace(0, len(last) - 1, _STEPS).astype(int))].tolist():
        sums = np.bincount(image[:kept], excess[:kept], minlength=images)
        mean = (sums.sum() + (1 - risk) * kept / images) / (images + 1)
        if mean + quantile * sums.std(ddof=1) / np.sqrt(images) > 0:
            break
        chosen = float(ordered[kept - 1])
    return chosen
