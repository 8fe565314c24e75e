"""COCO's keypoint similarity and greedy one-to-one matching, over a whole data set at once.

In: detections and annotated objects of many images. Out: which detection took which object, equal to
pycocotools index for index. Images are independent, so the greedy loop runs over ranks, not images.
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
_BLOCK = 8192  # detections that are looked at at once
_SLACK = 1e-6  # of a bound on the exponent, far more than its rounding


def keypoint_similarity(residual: Array, area: Array, kappa: Array) -> Array:
    """KS (..., K) of residuals (..., K, 2) on objects of the given area (...) (eq. 20)."""
    scale = 2 * np.asarray(area)[..., None] * np.asarray(kappa) ** 2
    return np.asarray(np.exp(-squares(residual) / scale))


@dataclass(frozen=True)
class Pairs:
    """All (detection, object) pairs of the same image and class.

    Detections past the cap, and groups without objects, have no pairs.

    Attributes:
        rank: Position (P,) of the detection in its group, by falling score.
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
    """OKS (P,) of detections and objects given by index (P,) (eq. 1).

    An object without labelled keypoints is compared by its box doubled in size, as COCO does. Objects with
    the same number of labelled keypoints go together: their sums then round exactly as pycocotools' do.
    """
    if not len(detection):
        return np.zeros(0)
    counts = np.count_nonzero(truth.labelled[object], axis=1)
    order = whole_order(counts)
    detection, object, counts = detection.take(order), object.take(order), counts.take(order)
    bare = int(np.searchsorted(counts, 1))  # pairs with an object that has no labelled keypoint
    apart = predictions.keypoints[detection] - truth.keypoints[object]
    apart[:bare] = _distance_to_doubled_box(predictions.keypoints[detection[:bare]], truth.boxes[object[:bare]])
    np.square(apart, out=apart)
    exponent = apart[..., 0] + apart[..., 1]
    exponent /= truth.layout.kappa**2
    exponent /= (truth.area[object] + np.spacing(1))[:, None]
    exponent /= -2
    labelled = truth.labelled[object]
    labelled[:bare] = True
    similarity = np.exp(exponent[labelled])
    oks, begin = np.empty(len(order)), 0
    for pairs in np.split(order, np.flatnonzero(np.diff(counts)) + 1):
        # Equally many keypoints each: rows of a matrix.
        end = begin + np.count_nonzero(labelled[: len(pairs)])
        labelled = labelled[len(pairs) :]
        rows = similarity[begin:end].reshape(len(pairs), -1)
        oks[pairs] = rows.sum(1) / rows.shape[1]
        begin = end
    return oks


def _within_reach(
    found: Array, truth: GroundTruth, objects: Array, detection: Array, object: Array, least: float
) -> Array:
    """Whether the OKS of pairs (P,), by their places among found keypoints (n, K, 2) and objects (m,), can be
    ``least`` or more.

    No keypoint is nearer to its own than the boxes around all of them are to each other.
    """
    labelled, area = truth.labelled[objects].T, truth.area[objects]
    reach = 2 * (-np.log(least) + _SLACK) * truth.layout.kappa.max() ** 2 * (area + np.spacing(1))
    squared = np.zeros(len(detection))
    for axis in range(2):
        points, wanted = found[..., axis].T.copy(), truth.keypoints[objects, :, axis].T
        low, high = points.min(0), points.max(0)
        begin, end = np.where(labelled, wanted, np.inf).min(0), np.where(labelled, wanted, -np.inf).max(0)
        before = begin.take(object) - high.take(detection)
        after = low.take(detection) - end.take(object)
        squared += np.square(np.maximum(np.maximum(before, after), 0))
    # Without labelled keypoints boxes are compared; what is not a number is left to the similarity.
    return ~((squared > np.where(labelled.any(0), reach, np.inf).take(object)) & np.isfinite(squared))


def _distance_to_doubled_box(points: Array, boxes: Array) -> Array:
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
    """All pairs that COCO compares: same image, same class, the best ``max_detections`` by score.

    Args:
        predictions: Detections of any number of images.
        truth: Annotated objects of these images.
        max_detections: Detections compared per image and class.
        least: OKS below which pairs are not needed; pairs that are too far apart to reach it are left out.
        similarity: OKS, or IoU of the boxes.
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
    # Expand every detection by the objects of its group.
    begin = np.searchsorted(object_group[objects], group_of[detections], side="left")
    repeat = np.searchsorted(object_group[objects], group_of[detections], side="right") - begin
    some = np.flatnonzero(repeat)
    corners = xywh_to_xyxy(truth.boxes)

    def pairs_of(rows: slice) -> tuple[Array, Array, Array]:
        """Places in detections and objects of a block's pairs, and their similarity."""
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
    """Pairs (P,) of some rows of ``detections`` with objects of their groups within reach, as places in both."""
    expanded = np.repeat(rows, repeat[rows])
    within = np.arange(len(expanded)) - np.repeat(np.cumsum(repeat[rows]) - repeat[rows], repeat[rows])
    position = begin[expanded] + within
    if least <= 0 or not len(expanded):
        return expanded, position
    lowest = position.min()
    near = np.flatnonzero(
        _within_reach(
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
    """Image and class of each detection; one image or one class need not be said."""
    images, classes = predictions.image_ids, predictions.class_ids
    known = np.unique(truth.class_ids)
    if (images is None and len(truth.images) != 1) or (classes is None and len(known) > 1):
        raise HaloposeError("predictions need image_ids and class_ids: the truth has several images or classes")
    if images is None:
        images = np.full(len(predictions), truth.images[0])
    if classes is None:
        classes = np.full(len(predictions), known[0] if len(known) else 0)
    if not np.isin(images, truth.images).all():
        raise HaloposeError("some detections belong to images that are not in the ground truth")
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
    """Object (T, N) taken by each of N detections at each threshold, or -1.

    The best-scored detection of a group chooses first: the object of highest similarity at or above the
    threshold, the later one on a tie, an ignored one only if no other is left; only crowds are shared.
    ignore and crowd (M,) are flags of the objects.
    """
    taken = np.full((len(thresholds), detections), -1, dtype=np.int64)
    thresholds = np.minimum(thresholds, 1 - 1e-10)
    near = np.flatnonzero(pairs.similarity >= thresholds.min(initial=1.0))
    if not len(near):
        return taken
    pairs = Pairs(**{name: values.take(near) for name, values in vars(pairs).items()})
    # Within (rank, detection): other objects before ignored ones, then by OKS, then by position.
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
            # The last eligible pair of each detection is its choice.
            choosers = detection[eligible]
            last = eligible[np.append(choosers[1:] != choosers[:-1], True)[: len(eligible)]]
            taken[t, detection[last]] = object[last]
            free[object[last]] = crowd[object[last]]
    return taken


def true_pairs(
    predictions: PoseDistributions,
    truth: GroundTruth,
    oks_threshold: float = 0.5,
    max_detections: int = MAX_DETECTIONS,
) -> tuple[Array, Array]:
    """Detections (P,) that are true positives, and the object (P,) of each; ignored objects match nobody here."""
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
    """Detections (P,) whose box matches the box of an object, and the object (P,) of each.

    Keypoints play no part in the match, so detections with swapped limbs or of the wrong person stay in. Ignored
    objects match nobody.

    Args:
        predictions: Detections of any number of images.
        truth: Annotated objects of these images.
        iou_threshold: Smallest IoU of a match.
        score_threshold: Smallest score of a detection that is matched.
        max_detections: Detections matched per image and class.
    """
    chosen = np.flatnonzero(predictions.scores >= score_threshold)
    if not len(truth) or not len(chosen):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    pairs = candidate_pairs(predictions[chosen], truth, max_detections, similarity="iou")
    taken = greedy_match(pairs, len(chosen), truth.ignore, truth.crowd, np.array([iou_threshold]))[0]
    detections = np.flatnonzero((taken >= 0) & ~truth.ignore[taken])
    return chosen[detections], taken[detections]
