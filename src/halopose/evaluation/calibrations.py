"""The three regimes to compare: the law as given, calibrated as a Gaussian, calibrated as a Student-t.

In: true positives, and calibrations fitted elsewhere if there are any. Out: a law each over (M, K) and the
pruning thresholds, none of them fitted on the images it is used on.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from halopose.errors import HaloposeError
from halopose.evaluation.matching import keypoint_similarity
from halopose.evaluation.true_positives import MatchedPoses, Protocol
from halopose.poses import Array
from halopose.uncertainty.calibration import GaussianCalibration, StudentTCalibration
from halopose.uncertainty.distributions import Bivariate, Gaussian, StudentT, scale_tril_from_covariance
from halopose.uncertainty.pruning import localization_confidence, select_threshold

REGIMES = ("uncalibrated", "gaussian", "student_t")


@dataclass(frozen=True)
class Regimes:
    """The laws to compare, each over (M, K), the pruning mask (M, K), and where they came from."""

    laws: dict[str, Bivariate]
    covariance: Array  # the second-moment covariance that pruning looks at
    thresholds: Array  # (M,), one per instance as folds differ
    source: str


def given_law(matched: MatchedPoses, covariance: Literal["moment", "paper"] = "moment") -> Bivariate:
    """The predictions' own law over (M, K): Student-t if they have degrees of freedom, else Gaussian."""
    scale_tril = scale_tril_from_covariance(torch.from_numpy(matched.scale))
    if matched.dof is None:
        return Gaussian(scale_tril)
    moment = torch.from_numpy(matched.covariance) if covariance == "moment" else None
    return StudentT(scale_tril, torch.from_numpy(matched.dof), moment)


def fit_gaussian(matched: MatchedPoses, min_samples: float = 50.0) -> GaussianCalibration:
    """Calibrate the predicted covariances on true positives."""
    calibration = GaussianCalibration(matched.labelled.shape[1], min_samples=min_samples)
    calibration.fit(*_residuals(matched, matched.covariance), torch.from_numpy(matched.labelled))
    return calibration


def fit_student(
    matched: MatchedPoses, covariance: Literal["moment", "paper"] = "moment", min_samples: float = 50.0
) -> StudentTCalibration:
    """Calibrate scale and tails of the predicted scale matrices on true positives."""
    calibration = StudentTCalibration(matched.labelled.shape[1], min_samples=min_samples, covariance=covariance)
    calibration.fit(*_residuals(matched, matched.scale), torch.from_numpy(matched.labelled))
    return calibration


def _residuals(matched: MatchedPoses, dispersion: Array) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(matched.residual), scale_tril_from_covariance(torch.from_numpy(dispersion))


def pruning_threshold(matched: MatchedPoses, covariance: Array, protocol: Protocol) -> float:
    """Threshold on the localization confidence, chosen on these true positives."""
    confidence = localization_confidence(
        covariance, matched.confidence_area(protocol), matched.sigmas, protocol.scalarisation
    )
    similarity = keypoint_similarity(matched.residual, matched.area, matched.sigmas)
    labelled = matched.labelled
    return select_threshold(
        confidence[labelled], similarity[labelled] >= protocol.gamma_ks, protocol.threshold_rule
    )


@dataclass(frozen=True)
class Given:
    """What was fitted on other data already, and need not be fitted again."""

    gaussian: GaussianCalibration | None = None
    student: StudentTCalibration | None = None
    threshold: float | None = None

    @property
    def names(self) -> list[str]:
        return [field.name for field in fields(self) if getattr(self, field.name) is not None]


@dataclass(frozen=True)
class Fitted:
    """What held-out data yield: both calibrations and the pruning threshold."""

    gaussian: GaussianCalibration
    student: StudentTCalibration
    threshold: float

    @classmethod
    def on(cls, matched: MatchedPoses, protocol: Protocol, given: Given | None = None) -> Fitted:
        """Calibrate on true positives, then choose the threshold on the calibrated covariances."""
        given = given or Given()
        gaussian = given.gaussian or fit_gaussian(matched, protocol.min_samples)
        student = given.student or fit_student(matched, protocol.covariance, protocol.min_samples)
        threshold = given.threshold
        if threshold is None:
            law = gaussian(scale_tril_from_covariance(torch.from_numpy(matched.covariance)))
            threshold = pruning_threshold(matched, law.covariance.numpy(), protocol)
        return cls(gaussian, student, threshold)

    def regimes(self, matched: MatchedPoses) -> Regimes:
        """The three regimes of other true positives."""
        law = self.gaussian(scale_tril_from_covariance(torch.from_numpy(matched.covariance)))
        student = self.student(scale_tril_from_covariance(torch.from_numpy(matched.scale)))
        return Regimes(
            laws={
                "uncalibrated": given_law(matched, self.student.covariance),
                "gaussian": law,
                "student_t": student,
            },
            covariance=law.covariance.numpy(),
            thresholds=np.full(len(matched), self.threshold),
            source="",
        )


def cross_fitted(matched: MatchedPoses, protocol: Protocol, given: Given | None = None) -> Regimes:
    """The three regimes, each image under what was fitted on the other folds of images.

    What is given was fitted on other data and takes the place of what would be fitted.
    """
    names = given.names if given else []
    everything = len(names) == len(fields(Given))
    fold = np.zeros(len(matched)) if everything else image_folds(matched.image_ids, protocol.folds)
    parts: list[Regimes] = []
    indices: list[Array] = []
    for number in np.unique(fold):
        fitted = Fitted.on(matched.select(np.flatnonzero(fold != number)), protocol, given)
        indices.append(np.flatnonzero(fold == number))
        parts.append(fitted.regimes(matched.select(indices[-1])))
    back = np.argsort(np.concatenate(indices))
    folds = f"{len(parts)} folds of images, each scored with what was fitted on the others"
    return Regimes(
        laws={name: _join([part.laws[name] for part in parts], back) for name in REGIMES},
        covariance=np.concatenate([part.covariance for part in parts])[back],
        thresholds=np.concatenate([part.thresholds for part in parts])[back],
        source="; ".join([f"given: {', '.join(names)}"] * bool(names) + [folds] * (not everything)),
    )


def hashed_order(images: Array) -> Array:
    """Distinct image ids (I,) in an order that has nothing to do with their values."""
    images = np.unique(images)
    with np.errstate(over="ignore"):
        mixed = images.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.asarray(images[np.argsort(mixed ^ (mixed >> np.uint64(32)), kind="stable")])


def image_folds(image_ids: Array, folds: int) -> Array:
    """Fold (N,) of each image id: the distinct ids in hashed order, dealt out in turn."""
    order = hashed_order(image_ids)
    if len(order) < 2:
        raise HaloposeError("calibration and scoring need different images: give at least two with matches")
    by_id = np.argsort(order)
    return np.asarray(by_id[np.searchsorted(order, image_ids, sorter=by_id)] % folds)


def _join(laws: list[Bivariate], back: Array) -> Bivariate:
    index = torch.from_numpy(back)
    scale_tril = torch.cat([law.scale_tril for law in laws])[index]
    if not isinstance(laws[0], StudentT):
        return Gaussian(scale_tril)
    students = [law for law in laws if isinstance(law, StudentT)]
    dof = torch.cat([law.dof.expand(law.scale_tril.shape[:-2]) for law in students])[index]
    moments = [law.moment for law in students if law.moment is not None]
    return StudentT(scale_tril, dof, torch.cat(moments)[index] if moments else None)
