"""Average keypoint precision (AKP): how well a confidence ranks keypoints by correctness (paper, section 4.1).

AKP is the 101-point interpolated AP, averaged over COCO's similarity thresholds. The correct keypoints of a tie are
spread evenly over it. The order of the samples then does not matter, and a constant confidence scores the share of
correct keypoints.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from halopose.sorting import falling_order
from halopose.types import Array

KS_THRESHOLDS = np.linspace(0.5, 0.95, 10)
_RECALLS = np.linspace(0.0, 1.0, 101)


def average_precision(
    confidence: Array, correct: Array, weight: Array | None = None, positives: int | None = None
) -> float:
    """101-point interpolated AP, equal to pycocotools' accumulation.

    Args:
        confidence: (N,) confidences. Ties keep the given order, as in pycocotools.
        correct: (N,) whether each sample is correct.
        weight: (N,) number of copies of each sample.
        positives: Number of objects to find, if some of them have no sample.

    Returns:
        The AP, or NaN if there is no object to find.
    """
    order = falling_order(np.asarray(confidence))
    weight = np.ones(len(order), dtype=np.int64) if weight is None else np.asarray(weight)[order]
    return _precision_at(np.flatnonzero(np.asarray(correct)[order]), _Counts.of(weight), positives)


@dataclass(frozen=True)
class _Counts:
    """Weights (N,) in descending order of confidence, and their cumulative sum (N,)."""

    weight: Array
    cumulative: Array

    @classmethod
    def of(cls, weight: Array) -> _Counts:
        return cls(weight, np.cumsum(weight))


def ties_of(confidence: Array) -> Array | None:
    """Number of the group of equal confidence (N,) of each sample, from sorted confidences; None without ties."""
    changed = confidence[1:] != confidence[:-1]
    return None if changed.all() else np.append(0, np.cumsum(changed))


def _precision_at(hits: Array, counts: _Counts, positives: int | None = None) -> float:
    """AP of a ranking whose correct samples are at the positions ``hits``."""
    found, ranks = np.cumsum(counts.weight[hits]), counts.cumulative[hits]
    total = int(found[-1]) if len(found) else 0
    positives = total if positives is None else positives
    if positives == 0:
        return float("nan")
    if total == 0:
        return 0.0
    first = np.searchsorted(found, _needed(positives))
    # Upper envelope of the precision: the maximum between two recalls, then a running maximum from the end.
    precision = found / np.maximum(ranks, 1)
    stretches = np.maximum.reduceat(precision, first[first < len(hits)])
    envelope = np.maximum.accumulate(stretches[::-1])[::-1]
    return float(envelope.sum() / len(_RECALLS))


def _precision_with_ties(hits: Array, weight: Array, ties: Array) -> float:
    """AP of a ranking in which the correct samples of a tie are spread evenly over it.

    The m-th of h correct samples of a tie with n samples has the rank m n / h after all samples before the tie.
    Precision is monotone within a tie, so its maximum over higher recalls is there or at the end of a tie.
    """
    size, correct = np.bincount(ties, weight), np.bincount(ties[hits], weight[hits], int(ties[-1]) + 1)
    some = np.flatnonzero(correct)
    if not len(some):
        return float("nan")
    found, rank = np.cumsum(correct)[some], np.cumsum(size)[some]
    needed = _needed(int(found[-1]))
    own = np.searchsorted(found, needed)
    place = rank[own] - (found[own] - needed) * (size[some] / correct[some])[own]
    later = np.maximum.accumulate((found / rank)[::-1])[::-1]
    return float(np.maximum(needed / place, later[own]).sum() / len(_RECALLS))


def _needed(positives: int | Array) -> Array:
    """Number of hits that reaches each recall: the smallest n >= 1 with n / positives >= recall, in floating point."""
    guess = np.ceil(_RECALLS * positives)
    guess -= (guess - 1) / positives >= _RECALLS
    guess += guess / positives < _RECALLS
    return np.maximum(guess, 1).astype(np.int64)


def average_keypoint_precision(
    confidence: Array, similarity: Array, weight: Array | None = None, *, presorted: bool = False
) -> float:
    """AKP of a ranking (eq. 24).

    Args:
        confidence: (N,) confidences.
        similarity: (N,) keypoint similarities.
        weight: (N,) number of copies of each sample.
        presorted: The samples are in descending order of confidence already.

    Returns:
        The AKP. A threshold that no keypoint reaches counts as 0. NaN without keypoints.
    """
    confidence = np.asarray(confidence)
    if not presorted:
        order = falling_order(confidence)
        confidence, similarity = confidence[order], np.asarray(similarity)[order]
        weight = None if weight is None else np.asarray(weight)[order]
    ties = ties_of(confidence)
    if weight is None:
        return float(keypoint_precisions(grade(similarity), np.array([len(similarity)]), ties)[0])
    return keypoint_precision_at(hits_by_threshold(grade(similarity)), weight, ties)


def grade(similarity: Array) -> Array:
    """Number of KS_THRESHOLDS that each similarity (N,) reaches; AKP depends on similarity only through it."""
    return np.searchsorted(KS_THRESHOLDS, similarity, side="right").astype(np.uint8)


def keypoint_precisions(grades: Array, sizes: Array, ties: Array | None = None) -> Array:
    """AKP (G,) of G rankings of ``sizes`` (G,) keypoints, concatenated.

    Args:
        grades: (N,) grades in descending order of confidence.
        sizes: (G,) number of keypoints of each ranking.
        ties: (N,) group of equal confidence, as of ``ties_of``; None if no ranking has ties.
    """
    ends = np.cumsum(sizes)
    if ties is not None:
        bounds = zip(ends - sizes, ends, strict=True)
        return np.array([_with_ties(grades[low:high], ties[low:high]) for low, high in bounds])
    closed = np.insert(grades, ends, 0)  # a miss after every ranking
    small = np.int32 if len(closed) < 2**31 else np.int64  # half the memory traffic
    begin = np.append(0, ends + np.arange(1, len(sizes) + 1)).astype(small)
    values = np.zeros((len(sizes), len(KS_THRESHOLDS)))
    misses = np.flatnonzero(closed < len(KS_THRESHOLDS)).astype(small)
    missed = closed.take(misses)
    for number in reversed(range(len(KS_THRESHOLDS))):
        # A keypoint that misses a threshold misses all higher ones.
        left = np.flatnonzero(missed <= number)
        misses, missed = misses.take(left), missed.take(left)
        values[:, number] = _precisions(misses, begin)
    return np.where(sizes > 0, values.mean(1), np.nan)


def _with_ties(grades: Array, ties: Array) -> float:
    """AKP of one ranking with ties, whose groups are numbered by descending confidence."""
    own = ties - ties.min(initial=0)
    return keypoint_precision_at(hits_by_threshold(grades), np.ones(len(grades), dtype=np.int64), own)


def _precisions(misses: Array, begin: Array) -> Array:
    """AP (G,) of concatenated rankings; 0 for a ranking without a hit.

    Precision rises at hits and falls at misses. Its maximum between two recalls is therefore just before a miss or
    at the last hit. Misses are few, so only they are examined.

    Args:
        misses: Positions of the incorrect samples over all rankings.
        begin: (G + 1,) first position of each ranking, then the end.
    """
    hits = misses - np.arange(len(misses), dtype=misses.dtype)  # number before each miss, over all rankings
    bounds = np.searchsorted(misses, begin).astype(misses.dtype)
    counts = np.diff(bounds)
    before = begin[:-1] - bounds[:-1]  # number of hits in the previous rankings
    positives = np.diff(begin) - counts
    some = np.flatnonzero(positives)
    values = np.zeros(len(counts))
    if not len(some):
        return values
    precision = (hits - np.repeat(before, counts)) / np.maximum(misses - np.repeat(begin[:-1], counts), 1)
    needed = _needed(positives[some, None]).astype(misses.dtype)
    last = np.append(np.maximum(needed[:, 1:] - 1, needed[:, :-1]), positives[some, None], axis=1)
    offset = before[some, None]
    stretches = np.maximum.reduceat(precision, np.searchsorted(hits, offset + needed).ravel()).reshape(last.shape)
    rank = last + np.searchsorted(hits, offset + last) - bounds[some, None]
    stretches = np.maximum(stretches, last / rank)
    envelope = np.maximum.accumulate(stretches[:, ::-1], axis=1)[:, ::-1]
    values[some] = np.ascontiguousarray(envelope).sum(1) / len(_RECALLS)  # same rounding as for a single ranking
    return values


def hits_by_threshold(grades: Array) -> list[Array]:
    """Positions of the correct keypoints at each of KS_THRESHOLDS, in a ranking with these grades (N,)."""
    return [np.flatnonzero(grades > number) for number in range(len(KS_THRESHOLDS))]


def keypoint_precision_at(hits: list[Array], weight: Array, ties: Array | None = None) -> float:
    """AKP of a ranking from its ``hits_by_threshold``.

    Args:
        hits: Positions of the correct keypoints at each similarity threshold.
        weight: (N,) number of copies of each keypoint.
        ties: (N,) group of equal confidence, as of ``ties_of``.
    """
    if not weight.any():
        return float("nan")
    if ties is not None:
        return float(np.nan_to_num([_precision_with_ties(positions, weight, ties) for positions in hits]).mean())
    counts = _Counts.of(weight)
    return float(np.nan_to_num([_precision_at(positions, counts) for positions in hits]).mean())


def random_keypoint_precision(
    similarity: Array, weight: Array | None = None, *, rounds: int = 10, seed: int = 0
) -> float:
    """AKP of a random ranking: mean over ``rounds`` seeded shuffles. The order of the samples does not matter.

    Args:
        similarity: (N,) keypoint similarities.
        weight: (N,) number of copies of each sample.
        rounds: Number of shuffles.
        seed: Seed of the shuffles.
    """
    generator = np.random.default_rng(seed)
    grades = grade(similarity)
    if weight is None:
        grades = np.sort(grades, kind="stable")
        shuffled = np.concatenate([generator.permutation(grades) for _ in range(rounds)])
        return float(keypoint_precisions(shuffled, np.full(rounds, len(grades))).mean())
    key = grades.astype(np.int64) * (int(weight.max(initial=0)) + 1) + weight
    order = np.argsort(key.astype(np.min_scalar_type(int(key.max(initial=0)))), kind="stable")  # small: a radix sort
    grades, weight = grades[order], weight[order]
    values = []
    for _ in range(rounds):
        order = generator.permutation(len(grades))
        values.append(keypoint_precision_at(hits_by_threshold(grades[order]), weight[order]))
    return float(np.mean(values))


def skill(akp: float, akp_random: float) -> float:
    """Skill (AKP - AKP_random) / (1 - AKP_random): 0 for a random ranking, 1 for a perfect one."""
    return (akp - akp_random) / (1 - akp_random) if akp_random < 1 else float("nan")
