"""Estimate OKS sigmas of custom keypoints, from repeated labels or from the residuals of a model.

COCO defines sigma_k^2 = E[d_k^2 / s^2], with d the distance of a label from the true keypoint and s^2 the area of the
object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from halopose.boxes import intersection_over_union, xywh_to_xyxy
from halopose.calibration.dispersion_features import missing_keypoints
from halopose.data.coco import Annotated
from halopose.errors import HaloposeError
from halopose.matching.matched_poses import matched_pairs
from halopose.poses import GroundTruth, PoseDistributions
from halopose.protocol import Protocol
from halopose.types import Array

SAME_OBJECT = 0.5  # IoU of boxes from which labels of two annotators are of one object
_SAME_FILE = 0.8  # the same within one file, where other objects may overlap too
_ENOUGH = 20  # samples of a keypoint that is not shrunk to the others
_BEST = 0.25  # share of the best-scored keypoints that the floor is taken from


@dataclass(frozen=True)
class SigmaEstimate:
    """Estimated sigmas of K keypoints.

    Attributes:
        names: Names of the keypoints.
        sigmas: Estimates (K,).
        error: Standard errors (K,).
        samples: Numbers of samples (K,).
        source: "repeats" of labels, or the "residuals" of a model on its easiest keypoints.
    """

    names: tuple[str, ...]
    sigmas: Array
    error: Array
    samples: Array
    source: Literal["repeats", "residuals"]


def sigmas_from_repeats(labels: Sequence[Annotated]) -> SigmaEstimate:
    """Estimate sigmas from objects that were labelled more than once.

    Args:
        labels: Files of different annotators, whose images are told apart by file name, or a single file in which
            objects are labelled repeatedly. Labels are of one object if their boxes overlap.

    Raises:
        HaloposeError: The files have different keypoints, or no object is labelled twice.
    """
    layout = labels[0].truth.layout
    if any(each.truth.layout.names != layout.names for each in labels):
        raise HaloposeError("the label files have different keypoints")
    squares: list[list[float]] = [[] for _ in layout.names]
    least = _SAME_FILE if len(labels) == 1 else SAME_OBJECT
    for group in _groups(labels, least):
        points = np.stack([labels[file].truth.keypoints[row] for file, row in group])
        labelled = np.stack([labels[file].truth.labelled[row] for file, row in group])
        area = np.mean([labels[file].truth.area[row] for file, row in group])
        for k in np.flatnonzero(labelled.sum(0) > 1).tolist():
            own = points[labelled[:, k], k]
            squares[k].append(float(np.square(own - own.mean(0)).sum() / (len(own) - 1) / area))
    if not any(squares):
        raise HaloposeError("no object is labelled twice: give the files of two annotators, or --predictions")
    means = np.array([np.mean(own) if own else np.nan for own in squares])
    return _estimate(layout.names, means, np.array([len(own) for own in squares]), "repeats")


def sigmas_from_residuals(predictions: PoseDistributions, truth: GroundTruth) -> SigmaEstimate:
    """Estimate sigmas from the residuals of the best-scored quarter of a model's keypoints.

    These residuals contain the model's own errors, and only the labels of easy keypoints: they tell the tolerances of
    keypoints relative to each other.

    Args:
        predictions: Detections of the labelled images.
        truth: Labelled objects.

    Raises:
        HaloposeError: No detection matches an object by its box.
    """
    detections, objects = matched_pairs(predictions, truth, Protocol(match="box", score_threshold=0.0))
    found = predictions[detections]
    labelled = truth.labelled[objects] & ~missing_keypoints(found)
    if not labelled.any():
        raise HaloposeError("no detection matches a labelled object by its box: check that images and pixels agree")
    square = np.square(truth.keypoints[objects] - found.keypoints).sum(-1) / truth.area[objects][:, None]
    score = np.repeat(found.scores[:, None], len(truth.layout), axis=1)
    score = score if found.visibility is None else found.visibility
    means, samples = [], []
    for k in range(len(truth.layout)):
        own = square[labelled[:, k], k][np.argsort(-score[labelled[:, k], k], kind="stable")]
        best = own[: max(round(_BEST * len(own)), min(_ENOUGH, len(own)))]
        means.append(np.median(best) / np.log(2) if len(best) else np.nan)  # of a circular Gaussian
        samples.append(len(best))
    return _estimate(truth.layout.names, np.array(means), np.array(samples), "residuals")


def _estimate(
    names: tuple[str, ...], means: Array, samples: Array, source: Literal["repeats", "residuals"]
) -> SigmaEstimate:
    """Estimate from mean squares (K,), shrunk in the logarithm to those of all keypoints where samples are few."""
    pooled = np.log(np.nansum(means * samples) / samples[np.isfinite(means)].sum())
    share = np.minimum(samples / _ENOUGH, 1.0)
    own = np.where(samples > 0, np.log(np.maximum(np.nan_to_num(means), 1e-12)), pooled)
    sigmas = np.exp((share * own + (1 - share) * pooled) / 2)
    return SigmaEstimate(names, sigmas, sigmas / 2 / np.sqrt(np.maximum(samples, 1)), samples, source)


def _groups(labels: Sequence[Annotated], least: float) -> list[list[tuple[int, int]]]:
    """Labels (file, row) of one object each: labels of the same image whose boxes overlap the first one's."""
    by_image: dict[str | int, list[tuple[int, int]]] = {}
    for file, each in enumerate(labels):
        names = dict(zip(each.images.tolist(), each.names, strict=True))
        for row, image in enumerate(each.truth.image_ids.tolist()):
            if each.truth.labelled[row].any():
                by_image.setdefault(names[image] or image, []).append((file, row))
    groups: list[list[tuple[int, int]]] = []
    for entries in by_image.values():
        boxes = np.stack([xywh_to_xyxy(labels[file].truth.boxes[row]) for file, row in entries])
        left = list(range(len(entries)))
        while left:
            first, *left = left
            overlap = intersection_over_union(boxes[[first] * len(left)], boxes[left]) if left else np.zeros(0)
            group, files = [entries[first]], {entries[first][0]}
            for place in np.argsort(-overlap, kind="stable").tolist():
                file = entries[left[place]][0]
                if overlap[place] >= least and (len(labels) == 1 or file not in files):
                    group.append(entries[left[place]])
                    files.add(file)
            chosen = set(group)
            left = [number for number in left if entries[number] not in chosen]
            if len(group) > 1:
                groups.append(group)
    return groups
