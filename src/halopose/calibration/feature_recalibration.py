"""Recalibration from files: with the stated covariances, from features, or from scores alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from halopose.calibration.calibrate import fit_gaussian, fit_student
from halopose.calibration.calibration_file import CalibrationFile
from halopose.calibration.dispersion_features import Feature
from halopose.calibration.dispersion_model import (
    SCORE_FEATURES,
    Base,
    DispersionModel,
    cross_fitted_dispersions,
    match_predicted,
)
from halopose.data.splits import image_folds
from halopose.errors import HaloposeError
from halopose.matching.matched_poses import MatchedPoses
from halopose.poses import GroundTruth, PoseDistributions
from halopose.protocol import Protocol
from halopose.types import Array, Family

_CERTAIN = 2.0  # standard errors by which features must improve the held-out likelihood


@dataclass(frozen=True)
class HeldOutGain:
    """What features gain over temperatures alone, on images that neither was fitted on.

    Attributes:
        nats: Mean gain in log-likelihood per keypoint.
        error: Standard error of it over images.
    """

    nats: float
    error: float

    @property
    def certain(self) -> bool:
        """Whether the gain is more than chance."""
        return self.nats > _CERTAIN * self.error


@dataclass(frozen=True)
class Recalibration:
    """A calibration and what it rests on.

    Attributes:
        file: The calibration.
        matched: True positives it was fitted on.
        gain: What the features gain over temperatures alone; None if there was nothing to compare.
    """

    file: CalibrationFile
    matched: MatchedPoses
    gain: HeldOutGain | None = None


def recalibrate_predictions(
    predictions: PoseDistributions,
    truth: GroundTruth,
    images: Array,
    family: Family,
    protocol: Protocol,
    features: Sequence[Feature] = (),
    *,
    stated: bool = True,
) -> Recalibration:
    """Fit a calibration on detections of annotated images.

    Args:
        predictions: Detections of these images.
        truth: Objects of these images.
        images: Ids (I,) of the images, matched or not.
        family: Distribution of the result.
        protocol: How detections are matched and the pruning threshold is chosen.
        features: What the dispersion may depend on; default: nothing with stated covariances, and everything that
            needs none without.
        stated: Whether the covariances of the detections count. If they do, features are used only where they
            improve the likelihood of held-out images by more than chance.

    Raises:
        HaloposeError: No detection matches an object.
    """
    plain = match_predicted(predictions, truth, protocol)
    if not len(plain):
        raise HaloposeError("no detection matches an annotated object: check that images and pixels agree")
    if stated and not features:
        return Recalibration(CalibrationFile.fit(plain, images, family, protocol), plain)
    base: Base = "stated" if stated else "size"
    names = tuple(features) or SCORE_FEATURES
    if not stated and "stated" in names:
        raise HaloposeError("the predictions have no covariances: leave stated out of the features")
    crossed = match_predicted(
        cross_fitted_dispersions(predictions, truth, protocol, names, base), truth, protocol
    )  # temperatures fitted on the model's own images would be too small
    gain = _gain(plain, crossed, family, protocol) if stated else None
    if gain is not None and not gain.certain:
        return Recalibration(CalibrationFile.fit(plain, images, family, protocol), plain, gain)
    file = CalibrationFile.fit(crossed, images, family, protocol)
    model = DispersionModel.fit(predictions, truth, protocol, names, base)
    return Recalibration(replace(file, dispersion=model), crossed, gain)


def with_dispersions(predictions: PoseDistributions, files: Sequence[CalibrationFile]) -> PoseDistributions:
    """Detections with the dispersions that calibrations are of.

    Raises:
        HaloposeError: Two calibrations are of different dispersions.
    """
    models = [None if file.dispersion is None else file.dispersion.to_json() for file in files]
    if any(model != models[0] for model in models):
        raise HaloposeError("the calibrations have different dispersion models: fit both on the same images")
    if not files or files[0].dispersion is None:
        return predictions
    return files[0].dispersion.apply(predictions)


def _gain(plain: MatchedPoses, crossed: MatchedPoses, family: Family, protocol: Protocol) -> HeldOutGain:
    """Gain of dispersions from features over the stated ones, both with temperatures of other folds."""
    folds = min(protocol.folds, len(np.unique(plain.image_ids)))
    if folds < 2:
        return HeldOutGain(0.0, math.inf)
    fold = image_folds(plain.image_ids, folds)
    gain = _held_out(crossed, fold, family, protocol) - _held_out(plain, fold, family, protocol)
    gain = np.where(plain.labelled, gain, 0.0).sum(1)
    _, image = np.unique(plain.image_ids, return_inverse=True)
    by_image, count = np.bincount(image, gain), np.bincount(image, plain.labelled.sum(1))
    mean = by_image.sum() / max(count.sum(), 1)
    spread = np.square(by_image - mean * count).sum()
    return HeldOutGain(float(mean), float(np.sqrt(spread) / max(count.sum(), 1)))


def _held_out(matched: MatchedPoses, fold: Array, family: Family, protocol: Protocol) -> Array:
    """Log-likelihood (M, K) under what was fitted on the other folds (M,)."""
    found = np.zeros(matched.labelled.shape)
    for number in np.unique(fold):
        rest, rows = matched.select(np.flatnonzero(fold != number)), matched.select(np.flatnonzero(fold == number))
        if family == "gaussian":
            own = fit_gaussian(rest, protocol.min_samples)(torch.from_numpy(rows.covariance_tril))
        else:
            own = fit_student(rest, protocol.covariance, protocol.min_samples)(torch.from_numpy(rows.scale_tril))
        found[fold == number] = own.log_prob(torch.from_numpy(rows.residual)).numpy()
    return found
