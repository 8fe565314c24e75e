"""Selective prediction: how well a confidence separates correct from wrong keypoints.

Reference:
    Traub et al., Overcoming common flaws in the evaluation of selective classification systems, 2024 (AUGRC).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from halopose.evaluation.bootstrap import half_width, resample_images
from halopose.types import Array


@dataclass(frozen=True)
class SelectiveEstimate:
    """A metric, and half the width of its 95 % interval; NaN without a bootstrap."""

    value: float
    margin: float


@dataclass(frozen=True)
class SelectiveScores:
    """Selective-prediction metrics of a confidence over correct and wrong keypoints.

    Attributes:
        auroc: Probability that a correct keypoint has a higher confidence than a wrong one; 0.5 for a random ranking.
        aurc: Mean error rate of the kept keypoints over all shares kept; lower is better.
        augrc: Mean share of all keypoints that are kept and wrong, over all shares kept; lower is better.
        wrong: Share of wrong keypoints.
    """

    auroc: SelectiveEstimate
    aurc: SelectiveEstimate
    augrc: SelectiveEstimate
    wrong: float


def auroc(confidence: Array, correct: Array, weight: Array | None = None) -> float:
    """Area under the ROC curve; ties count half. NaN if all keypoints are correct or all are wrong.

    Args:
        confidence: (n,) confidences.
        correct: (n,) whether the keypoint is correct.
        weight: (n,) number of copies of each keypoint.
    """
    correct = np.asarray(correct, dtype=bool)
    weight = np.ones(len(correct)) if weight is None else np.asarray(weight, dtype=float)
    _, place = np.unique(confidence, return_inverse=True)
    right, wrong = (np.bincount(place, weight * mask, place.max(initial=0) + 1) for mask in (correct, ~correct))
    pairs = right.sum() * wrong.sum()
    below = np.cumsum(wrong) - wrong / 2
    return float(right @ below / pairs) if pairs else float("nan")


def risk_areas(confidence: Array, correct: Array, weight: Array | None = None) -> tuple[float, float]:
    """AURC and AUGRC: means of the error rate and of the joint error rate over shares kept.

    Tied keypoints are kept together: their errors are spread evenly over the tie.

    Args:
        confidence: (n,) confidences.
        correct: (n,) whether the keypoint is correct.
        weight: (n,) number of copies of each keypoint.
    """
    weight = np.ones(len(confidence)) if weight is None else np.asarray(weight, dtype=float)
    _, place = np.unique(-np.asarray(confidence), return_inverse=True)
    groups = place.max(initial=-1) + 1
    total, wrong = (np.bincount(place, values, groups) for values in (weight, weight * ~np.asarray(correct, bool)))
    count = total.sum()
    if not count:
        return float("nan"), float("nan")
    rate = np.divide(wrong, total, out=np.zeros(groups), where=total > 0)
    before = np.cumsum(wrong) - wrong
    start = np.cumsum(total) - total
    joint = (before * total + rate * total * total / 2).sum() / count**2
    # Within a tie the error rate is (before + rate (k - start)) / k at k keypoints kept.
    some = total > 0
    ends = start[some] + total[some]
    ratio = np.log(ends / np.maximum(start[some], 0.5))
    first = start[some] == 0
    constant = np.where(first, 0.0, (before[some] - rate[some] * start[some]) * ratio)
    return float((constant + rate[some] * total[some]).sum() / count), float(joint)


def selective_scores(
    confidence: Array, correct: Array, image: Array, images: int, draws: int = 0, seed: int = 0
) -> SelectiveScores:
    """AUROC, AURC and AUGRC with bootstrap intervals over images.

    Args:
        confidence: (n,) confidences.
        correct: (n,) whether the keypoint is correct.
        image: (n,) image index.
        images: Number of images.
        draws: Number of resamplings, at most 200; 0 for no intervals.
        seed: Seed of the resampling.
    """

    def all_three(weight: Array | None) -> tuple[float, float, float]:
        return (auroc(confidence, correct, weight), *risk_areas(confidence, correct, weight))

    drawn = [
        all_three(np.bincount(pick, minlength=images)[image]) for pick in resample_images(images, min(draws, 200), seed)
    ]
    margins = [half_width(np.array(column)) for column in zip(*drawn, strict=True)] or [float("nan")] * 3
    areas = [SelectiveEstimate(*pair) for pair in zip(all_three(None), margins, strict=True)]
    return SelectiveScores(
        areas[0], areas[1], areas[2], wrong=float(1 - np.mean(correct)) if len(correct) else float("nan")
    )
