"""True positives: detections matched to annotated objects, with residuals and predicted distributions.

All metrics and calibrations are computed from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from halopose.boxes import box_area, intersection_over_union, xywh_to_xyxy
from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.matching.greedy_matching import keypoint_similarity, true_pairs, true_pairs_by_box
from halopose.parallel import map_blocks
from halopose.poses import GroundTruth, PoseDistributions
from halopose.protocol import Protocol
from halopose.types import Array
from halopose.uncertainty.distributions import scale_tril_from_covariance
from halopose.uncertainty.missing_keypoints import rising_places
from halopose.uncertainty.pruning import localization_confidence
from halopose.uncertainty.whitening import directions, squares, whiten


@dataclass(frozen=True)
class MatchedPoses:
    """M true positives of K keypoints, in image order.

    Attributes:
        image_ids: Image ids (M,).
        objects: Index (M,) of each object in the ground truth.
        residual: Residuals (M, K, 2): true keypoint minus mean of the predicted distribution, in pixels.
        labelled: Whether the true keypoint is known (M, K).
        covariance: Predicted covariances (M, K, 2, 2).
        scale: Predicted scale matrices (M, K, 2, 2); for a Gaussian the covariances.
        visibility: Visibility scores (M, K), or None.
        area: Annotated object areas s^2 (M,).
        box_area: Areas (M,) of the predicted boxes.
        dof: Degrees of freedom of a Student-t; None for a Gaussian.
        layout: Names, sigmas and limbs of the keypoints.
        correlation: Predicted correlations (M, 2K, 2K) of the whitened residuals, or None.
        offset: Means of the distributions minus the predicted keypoints (M, K, 2); None if zero.
        scores: Scores (M,) of the detections, or None.
        crowding: Largest IoU (M,) of the object's box with the box of another object of the image, or None.
        occluded: Whether the keypoint is occluded (M, K), as in ``GroundTruth``.
        truncated: Whether the object is cut by the image border (M,), as in ``GroundTruth``.
    """

    image_ids: Array
    objects: Array
    residual: Array
    labelled: Array
    covariance: Array
    scale: Array
    visibility: Array | None
    area: Array
    box_area: Array
    dof: Array | None
    layout: Keypoints
    correlation: Array | None = None
    offset: Array | None = None
    scores: Array | None = None
    crowding: Array | None = None
    occluded: Array | None = None
    truncated: Array | None = None

    def __len__(self) -> int:
        return len(self.area)

    @classmethod
    def concatenate(cls, parts: Sequence[MatchedPoses]) -> MatchedPoses:
        """Join true positives of different images. The order of the parts does not matter."""
        if not parts:
            raise HaloposeError("there is nothing to concatenate: give at least one part")
        seen: set[int] = set()
        for part in parts:
            if not part.like(parts[0]):
                raise HaloposeError(
                    "the parts differ in keypoints, distribution or visibility scores: join parts of one model only"
                )
            images = set(part.image_ids.tolist())
            if seen & images:
                shared = min(seen & images)
                raise HaloposeError(f"two parts contain image {shared}: split the data by image")
            seen |= images
        joined: dict[str, Any] = {}
        for name in parts[0]._columns():
            columns = [getattr(part, name) for part in parts]
            joined[name] = None if any(column is None for column in columns) else np.concatenate(columns)
        return replace(parts[0], **joined).select(np.lexsort((joined["objects"], joined["image_ids"])))

    def like(self, other: MatchedPoses) -> bool:
        """Whether both have the same keypoint layout, kind of distribution and optional fields."""
        same_family = (self.dof is None) == (other.dof is None)
        same_scores = all(
            (getattr(self, name) is None) == (getattr(other, name) is None)
            for name in ("visibility", "correlation", "offset")
        )
        return self.layout == other.layout and same_family and same_scores

    def select(self, index: Array) -> MatchedPoses:
        """The true positives at the given indices."""
        chosen: dict[str, Any] = {name: getattr(self, name)[index] for name in self._columns()}
        if self.scale is self.covariance:
            chosen["scale"] = chosen["covariance"]
        return replace(self, **chosen)

    def _columns(self) -> list[str]:
        """Names of the fields with one row per true positive."""
        names = [field.name for field in fields(self) if field.name != "layout"]
        return [name for name in names if getattr(self, name) is not None]

    def moved(self, offset: Array | None) -> MatchedPoses:
        """Move the means of the distributions.

        Args:
            offset: Shift (K, 2) of each keypoint as a share of the object size; None for no shift.
        """
        if offset is None:
            return self
        shift = offset * np.sqrt(self.box_area)[:, None, None]
        total = shift if self.offset is None else self.offset + shift
        return replace(self, residual=self.residual - shift, offset=total)

    def confidence(self, covariance: Array, protocol: Protocol) -> Array:
        """Localization confidence (M, K) of covariances (M, K, 2, 2) (eq. 19)."""
        area = self.confidence_area(protocol)
        return localization_confidence(covariance, area, self.layout.kappa, protocol.scalarisation)

    def confidence_area(self, protocol: Protocol) -> Array:
        """Object areas s^2 (M,) of the localization confidence."""
        return self.area if protocol.area == "annotation" else self.box_area * self.layout.area_factor

    @cached_property
    def scale_tril(self) -> Array:
        """Cholesky factors (M, K, 2, 2) of the predicted scale matrices."""
        return _factors(self.scale)

    @cached_property
    def covariance_tril(self) -> Array:
        """Cholesky factors (M, K, 2, 2) of the predicted covariances."""
        return self.scale_tril if self.scale is self.covariance else _factors(self.covariance)

    @cached_property
    def distance(self) -> Array:
        """Squared Mahalanobis distances (M, K) of the residuals under the predicted scale matrices."""
        return _distances(self.residual, self.scale_tril)

    @cached_property
    def covariance_distance(self) -> Array:
        """Squared Mahalanobis distances (M, K) of the residuals under the predicted covariances."""
        same = self.scale is self.covariance
        return self.distance if same else _distances(self.residual, self.covariance_tril)

    @cached_property
    def places(self) -> Array:
        """Row-major indices (n,) of the labelled keypoints, in ascending order of distance."""
        return rising_places(self.distance, self.labelled)

    @cached_property
    def direction(self) -> Array:
        """Unit vectors (M, K, 2) along the whitened residuals."""
        residual, factors, labelled = self.residual, self.scale_tril, self.labelled
        return map_blocks(lambda rows: directions(residual[rows], factors[rows], labelled[rows])[1], len(self))

    @cached_property
    def similarity(self) -> Array:
        """Keypoint similarity (M, K) of the predicted keypoints, not of the means (eq. 20), labelled or not."""
        kappa, offset = self.layout.kappa, self.offset

        def similarity(rows: slice) -> Array:
            residual = self.residual[rows] if offset is None else self.residual[rows] + offset[rows]
            return keypoint_similarity(residual, self.area[rows], kappa)

        return map_blocks(similarity, len(self))


def _distances(residual: Array, factors: Array) -> Array:
    """Squared lengths (M, K) of residuals (M, K, 2) whitened by factors (M, K, 2, 2)."""
    return map_blocks(lambda rows: squares(whiten(residual[rows], factors[rows])), len(residual))


def _factors(matrices: Array) -> Array:
    """Cholesky factors (M, K, 2, 2) of matrices (M, K, 2, 2)."""
    return map_blocks(lambda rows: scale_tril_from_covariance(torch.from_numpy(matrices[rows])).numpy(), len(matrices))


def matched_pairs(predictions: PoseDistributions, truth: GroundTruth, protocol: Protocol) -> tuple[Array, Array]:
    """Match detections to objects.

    Args:
        predictions: Detections.
        truth: Annotated objects of the same images.
        protocol: Settings of the match.

    Returns:
        Indices (M,) of the true positives and indices (M,) of their objects, in image order.
    """
    if protocol.match == "oks":
        detections, objects = true_pairs(predictions, truth, protocol.oks_threshold, protocol.max_detections)
    else:
        detections, objects = true_pairs_by_box(
            predictions, truth, protocol.iou_threshold, protocol.score_threshold, protocol.max_detections
        )
    order = np.lexsort((objects, truth.image_ids[objects]))
    return detections[order], objects[order]


def match_poses(predictions: PoseDistributions, truth: GroundTruth, protocol: Protocol | None = None) -> MatchedPoses:
    """Match detections to objects and keep the true positives.

    Args:
        predictions: Detections with distributions.
        truth: Annotated objects of the same images.
        protocol: Settings; its ``match`` is "oks", as in COCO and in the paper, or "box".
    """
    protocol = protocol or Protocol()
    if predictions.keypoint_count != truth.keypoint_count:
        raise HaloposeError(
            f"the predictions have {predictions.keypoint_count} keypoints, the ground truth has "
            f"{truth.keypoint_count}: give data of the same keypoints"
        )
    detections, objects = matched_pairs(predictions, truth, protocol)
    covariance = predictions.covariance[detections]
    return MatchedPoses(
        image_ids=truth.image_ids[objects],
        objects=objects,
        residual=truth.keypoints[objects] - predictions.mean[detections],
        labelled=truth.labelled[objects],
        covariance=covariance,
        scale=covariance if predictions.scale is predictions.covariance else predictions.scale[detections],
        visibility=None if predictions.visibility is None else predictions.visibility[detections],
        area=truth.area[objects],
        box_area=box_area(predictions.boxes[detections]),
        dof=None if predictions.dof is None else predictions.dof[detections],
        layout=truth.layout,
        correlation=None if predictions.correlation is None else predictions.correlation[detections],
        offset=None if predictions.offset is None else predictions.offset[detections],
        scores=predictions.scores[detections],
        crowding=_crowding(truth)[objects],
        occluded=None if truth.occluded is None else truth.occluded[objects],
        truncated=None if truth.truncated is None else truth.truncated[objects],
    )


def _crowding(truth: GroundTruth) -> Array:
    """Largest IoU (M,) of each object's box with that of another object of its image; 0 if it is alone."""
    order = np.argsort(truth.image_ids, kind="stable")
    image = truth.image_ids[order]
    begin, end = (np.searchsorted(image, image, side=side) for side in ("left", "right"))
    first = np.repeat(np.arange(len(order)), end - begin)
    second = np.arange(len(first)) - np.repeat(np.cumsum(end - begin) - (end - begin), end - begin) + begin[first]
    others = first != second
    first, second = first[others], second[others]
    corners = xywh_to_xyxy(truth.boxes[order])
    crowding = np.zeros(len(order))
    np.maximum.at(crowding, first, intersection_over_union(corners[first], corners[second]))
    result = np.empty_like(crowding)
    result[order] = crowding
    return result
