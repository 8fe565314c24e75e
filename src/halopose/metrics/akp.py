"""Average keypoint precision: does a confidence rank keypoints by correctness? (paper, section 4.1)

In: confidences and keypoint similarities (N,). Out: 101-point interpolated AP, averaged over COCO's
similarity thresholds, with the value of a random ranking beside it.
"""

from __future__ import annotations

import numpy as np

from halopose.poses import Array

KS_THRESHOLDS = np.linspace(0.5, 0.95, 10)
_RECALLS = np.linspace(0.0, 1.0, 101)


def average_precision(
    confidence: Array, correct: Array, weight: Array | None = None, positives: int | None = None
) -> float:
    """101-point interpolated AP (N,), equal to pycocotools' accumulation.

    Ties in confidence keep the order given. ``positives`` is the number of objects to find where some
    have no sample at all; NaN if there is none to find.
    """
    order = np.argsort(-np.asarray(confidence), kind="stable")
    sorted_weight = None if weight is None else np.asarray(weight)[order]
    return _sorted_precision(np.asarray(correct, dtype=bool)[order], sorted_weight, positives)


def _sorted_precision(correct: Array, weight: Array | None, positives: int | None = None) -> float:
    """AP of samples already in order of falling confidence."""
    hits = np.flatnonzero(correct)
    if weight is None:
        found, ranks = np.arange(1, len(hits) + 1), hits + 1
    else:
        hits = hits[weight[hits] > 0]
        found, ranks = np.cumsum(weight[hits]), np.cumsum(weight)[hits]
    total = int(found[-1]) if len(found) else 0
    positives = total if positives is None else positives
    if positives == 0:
        return float("nan")
    if total == 0:
        return 0.0
    first = _first_hit(found, weight is None, _needed(positives))
    reached = first < len(hits)
    # Precision's upper envelope from each recall on: a maximum per stretch between recalls, then backwards.
    stretches = np.maximum.reduceat(found / ranks, first[reached])
    envelope = np.maximum.accumulate(stretches[::-1])[::-1]
    return float(envelope.sum() / len(_RECALLS))


def _needed(positives: int) -> Array:
    """Hits needed for each recall: the smallest n >= 1 with n / positives >= recall, in floating point."""
    guess = np.ceil(_RECALLS * positives)
    guess -= (guess - 1) / positives >= _RECALLS
    guess += guess / positives < _RECALLS
    return np.maximum(guess, 1).astype(np.int64)


def _first_hit(found: Array, plain: bool, needed: Array) -> Array:
    """Index of the hit that reaches each needed count."""
    return np.minimum(needed - 1, len(found)) if plain else np.searchsorted(found, needed)


def average_keypoint_precision(
    confidence: Array, similarity: Array, weight: Array | None = None, *, presorted: bool = False
) -> float:
    """AKP (eq. 24) of confidences and keypoint similarities (N,).

    Zero at thresholds that no keypoint reaches; NaN without keypoints. ``presorted`` samples are in
    order of falling confidence already.
    """
    if not presorted:
        order = np.argsort(-np.asarray(confidence), kind="stable")
        similarity = np.asarray(similarity)[order]
        weight = None if weight is None else np.asarray(weight)[order]
    if not len(similarity) or (weight is not None and not weight.any()):
        return float("nan")
    values = [_sorted_precision(similarity >= threshold, weight) for threshold in KS_THRESHOLDS]
    return float(np.nan_to_num(values).mean())


def random_keypoint_precision(
    similarity: Array, weight: Array | None = None, *, rounds: int = 10, seed: int = 0
) -> float:
    """AKP of a random ranking: the mean of ``rounds`` seeded shuffles."""
    generator = np.random.default_rng(seed)
    values = []
    for _ in range(rounds):
        order = generator.permutation(len(similarity))
        shuffled = None if weight is None else weight[order]
        values.append(average_keypoint_precision(order, similarity[order], shuffled, presorted=True))
    return float(np.mean(values))


def skill(akp: float, akp_random: float) -> float:
    """Share of the way from a random to a perfect ranking, comparable between detectors."""
    return (akp - akp_random) / (1 - akp_random) if akp_random < 1 else float("nan")
