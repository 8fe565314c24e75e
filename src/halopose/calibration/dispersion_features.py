"""What a detection says about the accuracy of its keypoints, without any covariance: scores, size, posture.

In: detections. Out: named columns (N, K) for ``DispersionModel``. Nothing here looks at the ground truth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np

from halopose.boxes import box_area
from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.poses import PoseDistributions
from halopose.types import Array

Feature = Literal["score", "visibility", "size", "stated", "neighbours", "posture"]

FEATURES: tuple[Feature, ...] = get_args(Feature)
_SCORE_LIMIT = 1e-3  # probabilities are kept this far from 0 and 1
_LENGTH_LIMIT = 1e-2  # distances, as shares of the object's size, are kept above this
_FLATTEST = 0.1  # a pose on a line is as large as this share of its length


def parse_features(text: str) -> tuple[Feature, ...]:
    """Names of features from a list with commas.

    Example:
        >>> parse_features("score,size")
        ('score', 'size')
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in FEATURES]
    if unknown or not names:
        wrong = f"unknown feature {unknown[0]!r}" if unknown else "no feature given"
        raise HaloposeError(f"{wrong}: choose from {', '.join(FEATURES)}, separated by commas")
    return tuple(name for name in FEATURES if name in names)


def missing_keypoints(poses: PoseDistributions) -> Array:
    """Keypoints (N, K) that the model did not predict: COCO's convention is x = y = score = 0."""
    if poses.visibility is None:
        return np.zeros(poses.keypoints.shape[:2], dtype=bool)
    return np.asarray((poses.visibility == 0) & (poses.keypoints == 0).all(-1))


def object_size(poses: PoseDistributions) -> Array:
    """Side (N,) in pixels of a square as large as the box; at least 1 px, and larger for very flat boxes."""
    width, height = (poses.boxes[:, 2:] - poses.boxes[:, :2]).T
    flat = np.square(_FLATTEST) * (np.square(width) + np.square(height))
    return np.asarray(np.sqrt(np.maximum(np.maximum(box_area(poses.boxes), flat), 1.0)))


def feature_columns(poses: PoseDistributions, layout: Keypoints, features: Sequence[Feature]) -> dict[str, Array]:
    """Columns (N, K) of the features; posture has four of them.

    Args:
        poses: Detections. A detection without keypoint scores has the detection score at every keypoint.
        layout: Names, limbs and mirror partners of the keypoints.
        features: Names of the features.
    """
    columns: dict[str, Array] = {}
    for name in features:
        columns |= _COLUMNS[name](poses, layout)
    return columns


def _log_odds(score: Array) -> Array:
    """Log-odds of probabilities; scores above 1, as some models state, stay in order."""
    inside = np.clip(score, _SCORE_LIMIT, 1 - _SCORE_LIMIT)
    return np.asarray(np.log(inside / (1 - inside)) + np.maximum(score - 1, 0.0))


def _keypoint_scores(poses: PoseDistributions) -> Array:
    if poses.visibility is None:
        return np.repeat(poses.scores[:, None], poses.keypoint_count, axis=1)
    return poses.visibility


def _score(poses: PoseDistributions, layout: Keypoints) -> dict[str, Array]:
    return {"score": np.repeat(_log_odds(poses.scores)[:, None], len(layout), axis=1)}


def _visibility(poses: PoseDistributions, layout: Keypoints) -> dict[str, Array]:
    return {"visibility": _log_odds(_keypoint_scores(poses))}


def _size(poses: PoseDistributions, layout: Keypoints) -> dict[str, Array]:
    return {"size": np.repeat(np.log(object_size(poses))[:, None], len(layout), axis=1)}


def _stated(poses: PoseDistributions, layout: Keypoints) -> dict[str, Array]:
    """Log of the stated standard deviation in pixels."""
    return {"stated": np.log(np.maximum(np.linalg.det(poses.scale), 1e-300)) / 4}


def _neighbours(poses: PoseDistributions, layout: Keypoints) -> dict[str, Array]:
    """Mean log-odds of the scores of adjacent keypoints."""
    return {"neighbours": _log_odds(_keypoint_scores(poses)) @ _adjacency(layout).T}


def _posture(poses: PoseDistributions, layout: Keypoints) -> dict[str, Array]:
    """Mean log length of limbs, log distance to the mirror partner, distance from the box's edge, log aspect."""
    size = object_size(poses)[:, None]
    apart = poses.keypoints[:, :, None] - poses.keypoints[:, None]
    length = np.log(np.sqrt(np.square(apart).sum(-1)) / size[:, None] + _LENGTH_LIMIT)
    count = len(layout)
    mirror = np.asarray(layout.mirror if layout.mirror is not None else np.arange(count))
    own = np.arange(count)
    extent = np.maximum(poses.boxes[:, 2:] - poses.boxes[:, :2], 1.0)
    place = (poses.keypoints - poses.boxes[:, None, :2]) / extent[:, None]
    aspect = np.log(extent[:, 0] / extent[:, 1])
    return {
        "limb length": np.einsum("nkj,kj->nk", length, _adjacency(layout)),
        "mirror distance": np.where(mirror == own, 0.0, length[:, own, mirror]),
        "edge distance": np.minimum(place, 1 - place).min(-1),
        "aspect": np.repeat(aspect[:, None], count, axis=1),
    }


def _adjacency(layout: Keypoints) -> Array:
    """Weights (K, K) whose rows average over the keypoints at the ends of a keypoint's limbs; else over all others."""
    count = len(layout)
    joined = np.zeros((count, count))
    for a, b in layout.limbs:
        joined[a, b] = joined[b, a] = 1.0
    others = np.ones((count, count)) - np.eye(count)
    alone = joined.sum(1) == 0
    joined[alone] = others[alone]
    return np.asarray(joined / np.maximum(joined.sum(1, keepdims=True), 1.0))


_COLUMNS: dict[str, Callable[[PoseDistributions, Keypoints], dict[str, Array]]] = {
    "score": _score,
    "visibility": _visibility,
    "size": _size,
    "stated": _stated,
    "neighbours": _neighbours,
    "posture": _posture,
}
