"""Dispersion of keypoints from what any pose model states: scores, boxes, posture, and its covariances if it has any.

The standard deviation of keypoint k is a base times exp(b_k + x' w_k), where x are piecewise linear functions of the
features. The base is the object's size or the stated covariance. The weights maximise a Student-t likelihood, which
is convex in them, and are shrunk towards their mean over the keypoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from halopose.calibration.dispersion_features import (
    FEATURES,
    Feature,
    feature_columns,
    missing_keypoints,
    object_size,
)
from halopose.data.splits import image_folds
from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.matching.matched_poses import MatchedPoses, match_poses, matched_pairs
from halopose.poses import GroundTruth, PoseDistributions
from halopose.protocol import Protocol
from halopose.types import Array
from halopose.uncertainty.whitening import factors, squares, whiten

Base = Literal["size", "stated"]

SCORE_FEATURES: tuple[Feature, ...] = ("score", "visibility", "size", "neighbours", "posture")
_FALLING = ("score", "visibility")  # a higher score never widens
_RISING = ("size", "stated")  # a larger object or a larger stated dispersion never narrows
_INNER, _WHOLE = (0.03, 0.5, 0.97), (0.0, 0.5, 1.0)  # quantiles at the knots of the piecewise linear functions
_DOF = 4.0  # of the likelihood; heavy enough that gross errors do not set the scale
_OWN_WEIGHT = 30.0  # precision of the prior of a keypoint's weights around their mean
_OWN_LEVEL = 0.5  # the same of a keypoint's level
_MEAN_WEIGHT = 1.0  # precision of the prior of mean weights around zero
_SHAPE_SAMPLES = 30.0  # samples that the prior of a keypoint's shape, a circle, is worth
_WIDEST = 20.0  # of |log sigma - log base|; a file that says more is damaged


@dataclass(frozen=True, eq=False)
class DispersionModel:
    """Dispersion of K keypoints from features of a detection.

    Attributes:
        base: What the dispersion is a multiple of: the object's "size", or the "stated" covariance.
        features: Names of the features.
        layout: The K keypoints.
        knots: Knots of the piecewise linear function of each feature column.
        level: Log of the standard deviation over the base (K,) where all functions are 0.
        weights: Weights (K, P) of the P segments between knots.
        shape: Matrices (K, 2, 2) of determinant 1 that give ellipses their form; circles for a stated base.
    """

    base: Base
    features: tuple[Feature, ...]
    layout: Keypoints
    knots: dict[str, tuple[float, ...]]
    level: Array
    weights: Array
    shape: Array

    @classmethod
    def fit(
        cls,
        predictions: PoseDistributions,
        truth: GroundTruth,
        protocol: Protocol,
        features: Sequence[Feature] = SCORE_FEATURES,
        base: Base = "size",
    ) -> DispersionModel:
        """Fit on true positives by likelihood.

        Args:
            predictions: Detections of the annotated images. Their covariances count only for a stated base.
            truth: Annotated objects.
            protocol: How detections are matched.
            features: Names of the features.
            base: What the dispersion is a multiple of.

        Raises:
            HaloposeError: No labelled keypoint is matched.
        """
        detections, objects = matched_pairs(predictions, truth, protocol)
        found, layout = predictions[detections], truth.layout
        labelled = truth.labelled[objects] & ~missing_keypoints(found)
        if not labelled.any():
            raise HaloposeError("no labelled keypoint is matched: check that images and pixels agree")
        columns = feature_columns(found, layout, features)
        knots = {name: _knots(name, values[labelled]) for name, values in columns.items()}
        residual = truth.keypoints[objects] - found.mean
        base_factors = _base_factors(found, base)
        distance = squares(whiten(residual, base_factors))
        design, bounds = _design(columns, knots), _bounds(knots, base)
        level, weights = _likeliest(design, np.where(labelled, distance, 0.0), labelled, bounds)
        circle = np.tile(np.eye(2), (len(layout), 1, 1))
        model = cls(base, tuple(features), layout, knots, level, weights, circle)
        if base == "stated":
            return model
        spread = np.exp(model._log_sigma(columns)) * object_size(found)[:, None]
        return replace(model, shape=_shapes(residual / spread[..., None], labelled))

    def apply(self, predictions: PoseDistributions) -> PoseDistributions:
        """Detections under Gaussians of the model's dispersion; the rest is unchanged."""
        if predictions.keypoint_count != len(self.layout):
            raise HaloposeError(
                f"the calibration has {len(self.layout)} keypoints, the predictions {predictions.keypoint_count}"
            )
        columns = feature_columns(predictions, self.layout, self.features)
        factor = np.exp(2 * self._log_sigma(columns))[..., None, None]
        if self.base == "stated":
            dispersion = predictions.scale * factor
        else:
            dispersion = self.shape * np.square(object_size(predictions))[:, None, None, None] * factor
        return replace(
            predictions, covariance=dispersion, scale=dispersion, dof=None, dispersion=None, regions=None,
            correlation=None,
        )  # fmt: skip

    def _log_sigma(self, columns: dict[str, Array]) -> Array:
        """Log (N, K) of the standard deviation over the base."""
        return np.asarray(self.level + np.einsum("nkp,kp->nk", _design(columns, self.knots), self.weights))

    def to_json(self) -> dict[str, Any]:
        """Plain json content."""
        return {
            "base": self.base,
            "features": list(self.features),
            "layout": self.layout.to_json(),
            "knots": {name: list(values) for name, values in self.knots.items()},
            "level": self.level.tolist(),
            "weights": self.weights.tolist(),
            "shape": self.shape.tolist(),
        }

    @classmethod
    def from_json(cls, content: Any) -> DispersionModel:
        """The inverse of ``to_json``; a ValueError, KeyError or TypeError if the content is not that."""
        layout = Keypoints.from_json(content["layout"])
        features = tuple(content["features"])
        if content["base"] not in ("size", "stated") or any(name not in FEATURES for name in features):
            raise ValueError("an unknown base or feature")
        knots = {str(name): tuple(map(float, values)) for name, values in content["knots"].items()}
        rising = all(np.isfinite(values).all() and (np.diff(values) > 0).all() for values in knots.values())
        segments = sum(max(len(values) - 1, 0) for values in knots.values())
        level, weights, shape = (np.asarray(content[name], dtype=float) for name in ("level", "weights", "shape"))
        weights = weights.reshape(len(level), -1)
        if not rising or level.shape != (len(layout),) or weights.shape != (len(layout), segments):
            raise ValueError("wrong number of weights")
        if shape.shape != (len(layout), 2, 2) or not (np.linalg.det(shape) > 0).all() or not (shape[:, 0, 0] > 0).all():
            raise ValueError("a shape that is not positive definite")
        if not (np.abs(level) + np.abs(weights).sum(1) < _WIDEST).all():
            raise ValueError("weights out of range")
        return cls(content["base"], features, layout, knots, level, weights, shape)


def cross_fitted_dispersions(
    predictions: PoseDistributions,
    truth: GroundTruth,
    protocol: Protocol,
    features: Sequence[Feature] = SCORE_FEATURES,
    base: Base = "size",
) -> PoseDistributions:
    """Detections, each image under a model fitted on the other folds of images."""
    if predictions.image_ids is None:
        raise HaloposeError("the detections need image_ids to be divided into folds")
    images = np.intersect1d(predictions.image_ids, truth.image_ids)
    if len(images) < 2:
        raise HaloposeError("a dispersion model needs at least two images with detections and objects")
    chosen = np.full(len(predictions), -1)
    known = np.isin(predictions.image_ids, images)
    chosen[known] = image_folds(predictions.image_ids[known], min(protocol.folds, len(images)))
    dispersion = np.zeros_like(predictions.scale)
    for number in range(chosen.max() + 1):
        rest = np.setdiff1d(images, predictions.image_ids[chosen == number])
        others = predictions[np.isin(predictions.image_ids, rest)]
        model = DispersionModel.fit(others, truth.select_images(rest), protocol, features, base)
        rows = (chosen == number) | ((chosen < 0) & (number == 0))  # no object is in the images of the latter
        dispersion[rows] = model.apply(predictions[rows]).scale
    return replace(predictions, covariance=dispersion, scale=dispersion, dof=None, regions=None, correlation=None)


def match_predicted(predictions: PoseDistributions, truth: GroundTruth, protocol: Protocol) -> MatchedPoses:
    """``match_poses`` without keypoints that were not predicted: they have no place to be uncertain about."""
    matched = match_poses(predictions, truth, protocol)
    detections, _ = matched_pairs(predictions, truth, protocol)
    return replace(matched, labelled=matched.labelled & ~missing_keypoints(predictions[detections]))


def _base_factors(poses: PoseDistributions, base: Base) -> Array:
    """Cholesky factors (N, K, 2, 2) of the base."""
    if base == "stated":
        return factors(poses.scale)
    circle = object_size(poses)[:, None, None, None] * np.eye(2)
    return np.asarray(np.broadcast_to(circle, (len(poses), poses.keypoint_count, 2, 2)))


def _knots(name: str, values: Array) -> tuple[float, ...]:
    """Quantiles of a column's values (n,); fewer than two if they are all the same."""
    return tuple(np.unique(np.quantile(values, _WHOLE if name in _RISING else _INNER)).tolist())


def _design(columns: dict[str, Array], knots: dict[str, tuple[float, ...]]) -> Array:
    """Piecewise linear basis (N, K, P): each segment rises from 0 to 1 between adjacent knots."""
    segments = [
        np.clip((columns[name] - low) / (high - low), 0.0, 1.0)
        for name, values in knots.items()
        for low, high in pairwise(values)
    ]
    shape = next(iter(columns.values())).shape
    return np.stack(segments, axis=-1) if segments else np.zeros((*shape, 0))


def _bounds(knots: dict[str, tuple[float, ...]], base: Base) -> list[tuple[float | None, float | None]]:
    """Bounds of the weights of P segments that keep the dispersion monotone in scores, size and stated dispersion."""
    bounds: list[tuple[float | None, float | None]] = []
    for name, values in knots.items():
        for low, high in pairwise(values):
            if name in _FALLING:
                bounds.append((None, 0.0))
            elif name == base:  # the base itself rises by the width of the segment
                bounds.append((low - high, None))
            else:
                bounds.append((None, None))
    return bounds


def _likeliest(
    design: Array, distance: Array, labelled: Array, bounds: list[tuple[float | None, float | None]]
) -> tuple[Array, Array]:
    """Levels (K,) and weights (K, P) of the highest posterior for squared distances (N, K) under the base.

    With d = 2 log sigma the loss of a keypoint is d + (nu / 2 + 1) log(1 + m exp(-d) / nu), convex in d.
    """
    count, segments = distance.shape[1], design.shape[2]
    whole = np.concatenate([np.ones((*distance.shape, 1)), design], axis=2)
    weight = labelled.astype(float)
    middle = np.median(distance[labelled])
    start = np.zeros((count, segments + 1))
    start[:, 0] = np.log(max(middle, 1e-12)) / 2
    own = np.full(segments + 1, _OWN_WEIGHT)
    own[0] = _OWN_LEVEL

    def loss(flat: Array) -> tuple[float, Array]:
        given = flat.reshape(count, segments + 1)
        log_variance = 2 * np.einsum("nkp,kp->nk", whole, given)
        ratio = distance * np.exp(-np.clip(log_variance, -60, 60))
        value = weight * (log_variance + (_DOF / 2 + 1) * np.log1p(ratio / _DOF))
        slope = weight * (2 - (_DOF + 2) * ratio / (_DOF + ratio))
        mean = given.mean(0)
        apart = given - mean
        gradient = np.einsum("nk,nkp->kp", slope, whole) + own * apart
        gradient[:, 1:] += _MEAN_WEIGHT * mean[1:] / count
        prior = (own * np.square(apart)).sum() + _MEAN_WEIGHT * np.square(mean[1:]).sum()
        return float(value.sum() + prior / 2), gradient.ravel()

    from scipy.optimize import minimize  # predicting starts without it

    box = [(None, None), *bounds] * count
    found = minimize(loss, start.ravel(), jac=True, method="L-BFGS-B", bounds=box, options={"maxiter": 500})
    solution = found.x.reshape(count, segments + 1)
    return solution[:, 0], solution[:, 1:]


def _shapes(residual: Array, labelled: Array) -> Array:
    """Second moments (K, 2, 2) of scaled residuals (N, K, 2), gross errors bounded, with determinant 1."""
    weight = labelled / (1 + np.square(residual).sum(-1) / _DOF)  # of a Student-t
    kept = np.where(labelled[..., None], residual, 0.0)
    moment = np.einsum("nk,nki,nkj->kij", weight, kept, kept)
    mean = np.trace(moment.sum(0)) / 2 / max(weight.sum(), 1.0)
    moment += _SHAPE_SAMPLES * max(mean, 1e-12) * np.eye(2)
    return np.asarray(moment / np.sqrt(np.linalg.det(moment))[:, None, None])
