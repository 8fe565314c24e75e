"""COCO's keypoint similarity and greedy one-to-one matching of detections and objects, over many images at once.

The matched indices are equal to those of pycocotools. Images are independent, so the greedy loop runs over the ranks
of the detections, not over images.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from halopose.boxes import intersection_over_union, xywh_to_xyxy
from halopose.errors import HaloposeError
from halopose.parallel import blocks, run_parallel
from halopose.poses import GroundTruth, PoseDistributions
from halopose.protocol import IOU_THRESHOLD, MAX_DETECTIONS, SCORE_THRESHOLD
from halopose.sorting import falling_order, whole_order
from halopose.types import Array
from halopose.uncertainty.whitening import squares

Similarity = Literal["oks", "iou"]
OKS_THRESHOLDS = np.linspace(0.5, 0.95, 10)
_BLOCK = 8192  # detections per block
_SLACK = 1e-6  # added to the bound on the exponent, far more than its rounding error


def keypoint_similarity(residual: Array, area: Array, kappa: Array) -> Array:
    """Keypoint similarity (eq. 20).

    Args:
        residual: Residuals (..., K, 2).
        area: Object areas (...).
        kappa: Keypoint constants (K,), two times sigma.

    Returns:
        Similarities (..., K).
    """
    scale = 2 * np.asarray(area)[..., None] * np.asarray(kappa) ** 2
    return np.asarray(np.exp(-squares(residual) / scale))


@dataclass(frozen=True)
class Pairs:
    """All P pairs of a detection and an object of the same image and class, which form a group.

    Detections beyond the largest number per group have no pairs.

    Attributes:
        rank: Position (P,) of the detection in its group, in descending order of score.
        slot: Position (P,) of the object in its group, in file order.
        detection: Index (P,) of the detection.
        object: Index (P,) of the object.
        similarity: OKS (P,), or IoU of the boxes.
    """

    rank: Array
    slot: Array
    detection: Array
    object: Array
    similarity: Array


def object_keypoint_similarity(
    predictions: PoseDistributions, truth: GroundTruth, detection: Array, object: Array
) -> Array:
    """OKS of pairs of detections and objects (eq. 1).

    An object without labelled keypoints is compared by its box, grown by its size on every side, as in COCO. Objects
    with the same number of labelled keypoints are summed together, so that sums are rounded as in pycocotools.

    Args:
        predictions: Detections.
        truth: Annotated objects.
        detection: Index (P,) of the detection of each pair.
        object: Index (P,) of the object of each pair.

    Returns:
        OKS (P,).
    """
    if not len(detection):
        return np.zeros(0)
    counts = np.count_nonzero(truth.labelled[object], axis=1)
    order = whole_order(counts)
    detection, object, counts = detection.take(order), object.take(order), counts.take(order)
    unlabelled = int(np.searchsorted(counts, 1))  # pairs with an object that has no labelled keypoint
    residual = predictions.keypoints[detection] - truth.keypoints[object]
    residual[:unlabelled] = _distance_to_grown_box(
        predictions.keypoints[detection[:unlabelled]], truth.boxes[object[:unlabelled]]
    )
    np.square(residual, out=residual)
    exponent = residual[..., 0] + residual[..., 1]
    exponent /= truth.layout.kappa**2
    exponent /= (truth.area[object] + np.spacing(1))[:, None]
    exponent /= -2
    labelled = truth.labelled[object]
    labelled[:unlabelled] = True
    similarity = np.exp(exponent[labelled])
    oks, begin = np.empty(len(order)), 0
    for pairs in np.split(order, np.flatnonzero(np.diff(counts)) + 1):
        # These pairs have the same number of keypoints: they are the rows of a matrix.
        end = begin + np.count_nonzero(labelled[: len(pairs)])
        labelled = labelled[len(pairs) :]
        rows = similarity[begin:end].reshape(len(pairs), -1)
        oks[pairs] = rows.sum(1) / rows.shape[1]
        begin = end
    return oks


def _can_reach(
    keypoints: Array, truth: GroundTruth, objects: Array, detection: Array, object: Array, least: float
) -> Array:
    """Whether the OKS of pairs can reach a value; False only if it cannot.

    The distance between a predicted and a true keypoint is at least the distance between the bounding boxes of all
    predicted and all true keypoints.

    Args:
        keypoints: Predicted keypoints (n, K, 2).
        truth: Annotated objects.
        objects: Index (m,) of the objects of the pairs in ``truth``.
        detection: Index (P,) of each pair's detection in ``keypoints``.
        object: Index (P,) of each pair's object in ``objects``.
        least: OKS to reach.
    """
    labelled, area = truth.labelled[objects].T, truth.area[objects]
    reach = 2 * (-np.log(least) + _SLACK) * truth.layout.kappa.max() ** 2 * (area + np.spacing(1))
    squared = np.zeros(len(detection))
    for axis in range(2):
        points, wanted = keypoints[..., axis].T.copy(), truth.keypoints[objects, :, axis].T
        low, high = points.min(0), points.max(0)
        begin, end = np.where(labelled, wanted, np.inf).min(0), np.where(labelled, wanted, -np.inf).max(0)
        before = begin.take(object) - high.take(detection)
        after = low.take(detection) - end.take(object)
        squared += np.square(np.maximum(np.maximum(before, after), 0))
    # Objects without labelled keypoints are compared by box, and NaN is left to the similarity: both are kept.
    return ~((squared > np.where(labelled.any(0), reach, np.inf).take(object)) & np.isfinite(squared))


def _distance_to_grown_box(points: Array, boxes: Array) -> Array:
    """Per-axis distance (P, K, 2) of points to the box grown by its size on every side."""
    corner, size = boxes[:, None, :2], boxes[:, None, 2:]
    low, high = corner - size, corner + size * 2
    return np.asarray(np.maximum(0, low - points) + np.maximum(0, points - high))


def candidate_pairs(
    predictions: PoseDistributions,
    truth: GroundTruth,
    max_detections: int = MAX_DETECTIONS,
    least: float = 0.0,
    similarity: Similarity = "oks",
) -> Pairs:
    """All pairs that COCO compares: same image, same class, and the detections of highest score.

    Args:
        predictions: Detections of any number of images.
        truth: Annotated objects of these images.
        max_detections: Largest number of detections per image and class.
        least: OKS below which pairs are not needed; pairs that are too far apart to reach it are left out.
        similarity: "oks", or "iou" for the IoU of the boxes.
    """
    least = least if similarity == "oks" else 0.0
    image_ids, class_ids = _ids(predictions, truth)
    classes = np.unique(np.concatenate([truth.class_ids, class_ids]))
    group_of = np.searchsorted(truth.images, image_ids) * len(classes) + np.searchsorted(classes, class_ids)
    object_group = np.searchsorted(truth.images, truth.image_ids) * len(classes) + np.searchsorted(
        classes, truth.class_ids
    )
    by_score = falling_order(predictions.scores)
    detections = by_score.take(whole_order(group_of.take(by_score)))
    ranks = _position_in_run(group_of[detections])
    detections, ranks = detections[ranks < max_detections], ranks[ranks < max_detections]
    objects = whole_order(object_group)
    slots = _position_in_run(object_group[objects])
    # Pair every detection with all objects of its group.
    begin = np.searchsorted(object_group[objects], group_of[detections], side="left")
    repeat = np.searchsorted(object_group[objects], group_of[detections], side="right") - begin
    some = np.flatnonzero(repeat)
    corners = xywh_to_xyxy(truth.boxes)

    def pairs_of(rows: slice) -> tuple[Array, Array, Array]:
        """Indices of a block's pairs in ``detections`` and ``objects``, and their similarity."""
        expanded, position = _expanded(predictions, truth, detections, objects, some[rows], begin, repeat, least)
        pair = detections[expanded], objects[position]
        if similarity == "oks":
            return expanded, position, object_keypoint_similarity(predictions, truth, *pair)
        return expanded, position, intersection_over_union(predictions.boxes[pair[0]], corners[pair[1]])

    parts = run_parallel([partial(pairs_of, rows) for rows in blocks(len(some), _BLOCK)])
    expanded, position, found = (np.concatenate(each) for each in zip(*parts, strict=True))
    detection, object = detections[expanded], objects[position]
    return Pairs(rank=ranks[expanded], slot=slots[position], detection=detection, object=object, similarity=found)


def _expanded(
    predictions: PoseDistributions,
    truth: GroundTruth,
    detections: Array,
    objects: Array,
    rows: Array,
    begin: Array,
    repeat: Array,
    least: float,
) -> tuple[Array, Array]:
    """Pair some rows of ``detections`` with the objects of their groups whose OKS can reach ``least``.

    Returns:
        Indices (P,) in ``detections``, and indices (P,) in ``objects``.
    """
    expanded = np.repeat(rows, repeat[rows])
    within = np.arange(len(expanded)) - np.repeat(np.cumsum(repeat[rows]) - repeat[rows], repeat[rows])
    position = begin[expanded] + within
    if least <= 0 or not len(expanded):
        return expanded, position
    lowest = position.min()
    near = np.flatnonzero(
        _can_reach(
            predictions.keypoints[detections[rows]],
            truth,
            objects[lowest : position.max() + 1],
            np.repeat(np.arange(len(rows)), repeat[rows]),
            position - lowest,
            least,
        )
    )
    return expanded.take(near), position.take(near)


def _ids(predictions: PoseDistributions, truth: GroundTruth) -> tuple[Array, Array]:
    """Image and class of each detection; by default the only image or class of the annotations."""
    images, classes = predictions.image_ids, predictions.class_ids
    known = np.unique(truth.class_ids)
    if (images is None and len(truth.images) != 1) or (classes is None and len(known) > 1):
        raise HaloposeError(
            "the annotations have several images or classes: give the predictions image_ids and class_ids"
        )
    if images is None:
        images = np.full(len(predictions), truth.images[0])
    if classes is None:
        classes = np.full(len(predictions), known[0] if len(known) else 0)
    if not np.isin(images, truth.images).all():
        unknown = np.setdiff1d(images, truth.images)
        raise HaloposeError(
            f"{len(unknown)} images with detections, such as {unknown[0]}, are not in the ground truth: "
            "give the annotations of the same images"
        )
    return images, classes


def _position_in_run(sorted_keys: Array) -> Array:
    """0, 1, 2, ... within each run of equal keys."""
    if not len(sorted_keys):
        return np.zeros(0, dtype=np.int64)
    starts = np.flatnonzero(np.r_[True, sorted_keys[1:] != sorted_keys[:-1]])
    return np.asarray(np.arange(len(sorted_keys)) - np.repeat(starts, np.diff(np.r_[starts, len(sorted_keys)])))


def greedy_match(
    pairs: Pairs,
    detections: int,
    ignore: Array,
    crowd: Array,
    thresholds: Array = OKS_THRESHOLDS,
) -> Array:
    """Match detections to objects greedily, in descending order of score, as COCO does.

    A detection takes the free object of highest similarity at or above the threshold, the later one on a tie. It
    takes an ignored object only if no other is left. Only crowds can be taken more than once.

    Args:
        pairs: All pairs of detections and objects.
        detections: Number N of detections.
        ignore: Whether each object is ignored (M,).
        crowd: Whether each object is a crowd (M,).
        thresholds: Smallest similarities (T,).

    Returns:
        Index (T, N) of the object of each detection at each threshold, or -1.
    """
    taken = np.full((len(thresholds), detections), -1, dtype=np.int64)
    thresholds = np.minimum(thresholds, 1 - 1e-10)
    near = np.flatnonzero(pairs.similarity >= thresholds.min(initial=1.0))
    if not len(near):
        return taken
    pairs = Pairs(**{name: values.take(near) for name, values in vars(pairs).items()})
    # For each rank and detection: ignored objects first, then ascending OKS, then position. The last one is chosen.
    order = np.lexsort((pairs.slot, pairs.similarity, ~ignore[pairs.object], pairs.detection, pairs.rank))
    rank, detection, object, oks = (
        pairs.rank[order],
        pairs.detection[order],
        pairs.object[order],
        pairs.similarity[order],
    )
    bounds = np.searchsorted(rank, np.arange(rank[-1] + 2))
    for t, threshold in enumerate(thresholds):
        free = np.ones(len(ignore), dtype=bool)
        for begin, end in itertools.pairwise(bounds):
            eligible = begin + np.flatnonzero((oks[begin:end] >= threshold) & free[object[begin:end]])
            # The last eligible pair of each detection is its match.
            owner = detection[eligible]
            last = eligible[np.append(owner[1:] != owner[:-1], True)[: len(eligible)]]
            taken[t, detection[last]] = object[last]
            free[object[last]] = crowd[object[last]]
    return taken


def true_pairs(
    predictions: PoseDistributions,
    truth: GroundTruth,
    oks_threshold: float = 0.5,
    max_detections: int = MAX_DETECTIONS,
) -> tuple[Array, Array]:
    """True positives by OKS; ignored objects have no matches.

    Args:
        predictions: Detections of any number of images.
        truth: Annotated objects of these images.
        oks_threshold: Smallest OKS of a match.
        max_detections: Largest number of detections per image and class.

    Returns:
        Indices (P,) of the detections, and indices (P,) of their objects.
    """
    if not len(truth):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    pairs = candidate_pairs(predictions, truth, max_detections, oks_threshold)
    taken = greedy_match(pairs, len(predictions), truth.ignore, truth.crowd, np.array([oks_threshold]))[0]
    detections = np.flatnonzero((taken >= 0) & ~truth.ignore[taken])
    return detections, taken[detections]


def true_pairs_by_box(
    predictions: PoseDistributions,
    truth: GroundTruth,
    iou_threshold: float = IOU_THRESHOLD,
    score_threshold: float = SCORE_THRESHOLD,
    max_detections: int = MAX_DETECTIONS,
) -> tuple[Array, Array]:
    """True positives by IoU of the boxes; ignored objects have no matches.

    Keypoints are not compared, so detections with swapped limbs or keypoints of another person remain.

    Args:
        predictions: Detections of any number of images.
        truth: Annotated objects of these images.
        iou_threshold: Smallest IoU of a match.
        score_threshold: Smallest score of a detection.
        max_detections: Largest number of detections per image and class.

    Returns:
        Indices (P,) of the detections, and indices (P,) of their objects.
    """
    chosen = np.flatnonzero(predictions.scores >= score_threshold)
    if not len(truth) or not len(chosen):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    pairs = candidate_pairs(predictions[chosen], truth, max_detections, similarity="iou")
    taken = greedy_match(pairs, len(chosen), truth.ignore, truth.crowd, np.array([iou_threshold]))[0]
    detections = np.flatnonzero((taken >= 0) & ~truth.ignore[taken])
    return chosen[detections], taken[detections]
