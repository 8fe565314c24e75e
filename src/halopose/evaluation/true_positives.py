"""True positives: detections matched to annotated objects, the raw material of every score.

In: predictions and ground truth of a data set. Out: residuals and predicted laws over (M, K), in image order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from halopose.errors import HaloposeError
from halopose.evaluation.matching import MAX_DETECTIONS, candidate_pairs, greedy_match
from halopose.poses import Array, GroundTruth, PoseDistributions
from halopose.uncertainty.pruning import GAMMA_KS, Scalarisation, ThresholdRule


@dataclass(frozen=True)
class Protocol:
    """Settings of an evaluation; the defaults are the paper's.

    area: the s^2 of the localization confidence, ``annotation`` as in the paper, or ``box``, the predicted
    box's area times ``box_area_factor``, which is all there is at inference. The similarity of a keypoint
    always takes the annotated area. min_samples: as in ``Calibration``. scale_edges: areas that part the
    object scales. folds: how many parts the images are cut into, so that each is scored with a calibration
    that never saw it.

    >>> Protocol(area="box", bootstrap=200).oks_threshold
    0.5
    """

    oks_threshold: float = 0.5
    max_detections: int = MAX_DETECTIONS
    area: Literal["annotation", "box"] = "annotation"
    box_area_factor: float = 0.53
    scalarisation: Scalarisation = "trace"
    threshold_rule: ThresholdRule = "youden"
    gamma_ks: float = GAMMA_KS
    covariance: Literal["moment", "paper"] = "moment"
    min_samples: float = 50.0
    scale_edges: tuple[float, ...] = (32.0**2, 96.0**2)
    folds: int = 5
    bootstrap: int = 0
    seed: int = 0


@dataclass(frozen=True)
class MatchedPoses:
    """M true positives of K keypoints: residuals (M, K, 2) and the predicted law of each, in image order."""

    image_ids: Array
    objects: Array
    residual: Array
    labelled: Array
    covariance: Array
    scale: Array
    visibility: Array
    area: Array
    box_area: Array
    dof: Array | None
    names: tuple[str, ...]
    sigmas: Array

    def __len__(self) -> int:
        return len(self.area)

    @classmethod
    def concatenate(cls, parts: Sequence[MatchedPoses]) -> MatchedPoses:
        """Join shards that hold different images; the order of the shards does not matter."""
        if not parts:
            raise HaloposeError("nothing to concatenate: give at least one shard")
        seen: set[int] = set()
        for part in parts:
            if part.names != parts[0].names or not all(
                np.array_equal(getattr(part, name), getattr(parts[0], name)) for name in ("dof", "sigmas")
            ):
                raise HaloposeError("the shards differ in their keypoints, sigmas or degrees of freedom")
            images = set(part.image_ids.tolist())
            if seen & images:
                raise HaloposeError("two shards hold the same image: split the data by image")
            seen |= images
        joined: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in cls._columns()
        }
        return replace(parts[0], **joined).select(np.lexsort((joined["objects"], joined["image_ids"])))

    def select(self, index: Array) -> MatchedPoses:
        """The true positives at the given indices."""
        chosen: dict[str, Any] = {name: getattr(self, name)[index] for name in self._columns()}
        return replace(self, **chosen)

    @classmethod
    def _columns(cls) -> list[str]:
        """Fields with a row per true positive."""
        return [field.name for field in fields(cls) if field.name not in ("dof", "names", "sigmas")]

    def confidence_area(self, protocol: Protocol) -> Array:
        """s^2 (M,) that the localization confidence takes."""
        return self.area if protocol.area == "annotation" else self.box_area * protocol.box_area_factor


def match_poses(
    predictions: PoseDistributions, truth: GroundTruth, protocol: Protocol | None = None
) -> MatchedPoses:
    """Match detections to objects as COCO does and keep the true positives."""
    protocol = protocol or Protocol()
    if predictions.keypoint_count != truth.keypoint_count:
        raise HaloposeError(
            f"predictions have {predictions.keypoint_count} keypoints, ground truth {truth.keypoint_count}"
        )
    pairs = candidate_pairs(predictions, truth, protocol.max_detections)
    thresholds = np.array([protocol.oks_threshold])
    taken = greedy_match(pairs, len(predictions), truth.ignore, truth.crowd, thresholds)[0]
    detections = np.flatnonzero((taken >= 0) & ~truth.ignore[taken])
    objects = taken[detections]
    order = np.lexsort((objects, truth.image_ids[objects]))
    detections, objects = detections[order], objects[order]
    sides = predictions.boxes[detections, 2:] - predictions.boxes[detections, :2]
    visibility = predictions.visibility
    return MatchedPoses(
        image_ids=truth.image_ids[objects],
        objects=objects,
        residual=truth.keypoints[objects] - predictions.keypoints[detections],
        labelled=truth.labelled[objects],
        covariance=predictions.covariance[detections],
        scale=predictions.scale[detections],
        visibility=np.ones(truth.labelled[objects].shape) if visibility is None else visibility[detections],
        area=truth.area[objects],
        box_area=np.maximum(sides.prod(1), 1.0),
        dof=predictions.dof,
        names=truth.names,
        sigmas=truth.sigmas,
    )
