"""Per-keypoint calibration of predicted dispersions as a Gaussian or a Student-t (paper, section 3.2).

Calibrators are fitted on residuals (N, K, 2) and Cholesky factors (N, K, 2, 2), and turn factors (..., K, 2, 2) into
calibrated distributions. Calibration data must be disjoint from the training data of the heads and from the data scored
later.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from halopose.calibration.correlation import Correlation
from halopose.calibration.estimation import Sample, gaussian_temperature, student_parameters
from halopose.errors import HaloposeError
from halopose.protocol import CovarianceKind
from halopose.types import Array, Family
from halopose.uncertainty.distributions import Gaussian, StudentT
from halopose.uncertainty.regions import Regions

if TYPE_CHECKING:
    from halopose.calibration.split_student_t import SplitStudentT

log = logging.getLogger(__name__)

LARGEST_TAU = 1e6  # a larger value in a file means damage
NEAR_TWO = 2.5  # below these degrees of freedom eq. 17 depends on few large residuals


Fitted = TypeVar("Fitted", bound="Calibration")  # a calibration of either family


class Calibration(nn.Module, ABC):
    """Base class of both calibrations: one temperature per keypoint, fitted with shrinkage.

    The value of a keypoint with an effective sample size n below ``min_samples`` is blended, in the logarithm, with the
    value of all keypoints pooled: its own weight is n / min_samples. A keypoint without samples takes the pooled value,
    and ``fit`` warns.
    """

    family: Family
    tau_: Tensor

    def __init__(self, keypoints: int, *, min_samples: float = 50.0) -> None:
        super().__init__()
        self.min_samples = min_samples
        self.register_buffer("tau_", torch.ones(keypoints, dtype=torch.float64))
        self.register_buffer("effective_samples_", torch.zeros(keypoints, dtype=torch.float64))

    @property
    def keypoints(self) -> int:
        return int(self.tau_.shape[0])

    def fit(
        self: Fitted,
        residual: Tensor | Array,
        scale_tril: Tensor | Array,
        labelled: Tensor | Array | None = None,
        sample_weight: Tensor | Array | None = None,
    ) -> Fitted:
        """Fit on residuals (N, K, 2) and uncalibrated factors (N, K, 2, 2), tensors or arrays; returns self.

        ``labelled`` (N, K) is true or false, or COCO's 0, 1 and 2, of which 0 means not labelled.
        """
        flags = None if labelled is None else _flags(_tensor("labelled", labelled))
        weight = None if sample_weight is None else _tensor("sample weights", sample_weight)
        sample = Sample.of(_tensor("residuals", residual), _tensor("factors", scale_tril), flags, weight)
        return self.fit_sample(sample)

    def fit_sample(self: Fitted, sample: Sample, *, quiet: bool = False) -> Fitted:
        """Fit on squared distances; returns self. ``quiet``: do not warn of keypoints without samples."""
        if sample.mahalanobis.shape[1] != self.keypoints:
            raise HaloposeError(
                f"this calibration has {self.keypoints} keypoints, the data {sample.mahalanobis.shape[1]}"
            )
        self.effective_samples_ = sample.effective
        if not bool((self.effective_samples_ > 0).any()):
            raise HaloposeError("no labelled keypoint to calibrate on: give more images or check the labels")
        self._fit(sample)
        empty = torch.nonzero(self.effective_samples_ == 0).flatten().tolist()
        if empty and not quiet:
            log.warning("no samples for keypoints %s: they take the values of all keypoints pooled", empty)
        return self

    @abstractmethod
    def _fit(self, sample: Sample) -> None:
        """Set the learned values from a sample that has at least one labelled keypoint."""

    def widened(self: Fitted, factor: Tensor) -> Fitted:
        """Return a copy with temperatures times factors (K,)."""
        other = deepcopy(self)
        other.tau_ = self.tau_ * factor
        return other

    @property
    def _enough(self) -> Tensor:
        """Which keypoints (K,) stand alone; one without samples never does."""
        return (self.effective_samples_ >= self.min_samples) & (self.effective_samples_ > 0)

    def _shrink(self, own: Tensor, pooled: Tensor) -> Tensor:
        """Blend logarithms (K,) with the pooled one (1,) where samples are few."""
        share = (self.effective_samples_ / self.min_samples).clamp(max=1.0)
        share = torch.where(self.effective_samples_ > 0, share, 0.0)
        blended = share * torch.nan_to_num(own) + (1 - share) * pooled
        return torch.where(share == 1.0, own, blended)


class GaussianCalibration(Calibration):
    """Gaussian variance scaling, Sigma -> tau_k^2 Sigma (eq. 11), for filters and PnP.

    Parameters: ``keypoints``, and ``min_samples`` for the shrinkage. Learned: ``tau_`` (K,).

    >>> factors = torch.eye(2, dtype=torch.float64).expand(400, 1, 2, 2)  # 1 px, says the model
    >>> residual = 3 * Gaussian(factors[0]).sample(400, torch.Generator().manual_seed(0))  # in truth 3 px
    >>> calibration = GaussianCalibration(keypoints=1).fit(residual, factors)
    >>> round(float(calibration.tau_), 1)
    3.0
    >>> calibration(factors).covariance.shape
    torch.Size([400, 1, 2, 2])
    """

    family: Family = "gaussian"

    def _fit(self, sample: Sample) -> None:
        pooled = gaussian_temperature(sample.pooled())
        own = gaussian_temperature(sample)
        self.tau_ = torch.where(self._enough, own, self._shrink(own.log(), pooled.log()).exp())

    def forward(self, scale_tril: Tensor) -> Gaussian:
        """Return the calibrated distribution of factors (..., K, 2, 2)."""
        return Gaussian(scale_tril * self.tau_.to(scale_tril.dtype)[:, None, None])

    def covariance(self, dispersion: Array) -> Array:
        """Return calibrated covariances of dispersions (..., K, 2, 2) as an array."""
        tau = self.tau_.numpy()
        return np.asarray(dispersion * (tau * tau)[:, None, None])


class StudentTCalibration(Calibration):
    """Student-t dispersion-tail scaling, S = tau_k^2 Sigma with nu_k degrees of freedom (eqs. 16 to 18).

    Fitted values are ``tau_`` (K,), ``nu_`` (K,) > 2, and ``moment_tau_`` (K,), the temperature of the covariance
    moment_tau^2 Sigma. It follows eq. 17, nu / (nu - 2) tau^2 Sigma, except for keypoints with nu below ``NEAR_TWO``:
    their covariance has the second moment of the residuals. ``covariance="paper"`` is eq. 17 for all keypoints,
    ``covariance="moment"`` the second moment for all.

    Example:
        >>> factors = torch.eye(2, dtype=torch.float64).expand(4000, 1, 2, 2)
        >>> true = StudentT(factors[0], dof=torch.tensor([5.0], dtype=torch.float64))
        >>> residual = 2 * true.sample(4000, torch.Generator().manual_seed(0))
        >>> calibration = StudentTCalibration(keypoints=1).fit(residual, factors)
        >>> round(float(calibration.tau_)), round(float(calibration.nu_))
        (2, 5)
    """

    family: Family = "student-t"
    nu_: Tensor
    moment_tau_: Tensor

    def __init__(
        self,
        keypoints: int,
        *,
        min_samples: float = 50.0,
        covariance: CovarianceKind = "auto",
    ) -> None:
        super().__init__(keypoints, min_samples=min_samples)
        self.covariance = covariance
        self.register_buffer("nu_", torch.full((keypoints,), 30.0, dtype=torch.float64))
        self.register_buffer("moment_tau_", torch.ones(keypoints, dtype=torch.float64))

    def _fit(self, sample: Sample) -> None:
        enough = self._enough
        nu, tau = student_parameters(sample)
        moment = gaussian_temperature(sample)
        if not bool(enough.all()):
            pool = sample.pooled()
            pooled_nu, pooled_tau = student_parameters(pool)
            nu = torch.where(enough, nu, 2 + self._shrink((nu - 2).log(), (pooled_nu - 2).log()).exp())
            tau = torch.where(enough, tau, self._shrink(tau.log(), pooled_tau.log()).exp())
            moment = torch.where(enough, moment, self._shrink(moment.log(), gaussian_temperature(pool).log()).exp())
        if self.covariance == "auto":
            moment = torch.where(nu >= NEAR_TWO, tau * (nu / (nu - 2)).sqrt(), moment)
        self.nu_, self.tau_, self.moment_tau_ = nu, tau, moment

    def widened(self, factor: Tensor) -> StudentTCalibration:
        """Return a copy with temperatures times factors (K,)."""
        other = super().widened(factor)
        other.moment_tau_ = self.moment_tau_ * factor
        return other

    def forward(self, scale_tril: Tensor) -> StudentT:
        """Return the calibrated distribution of factors (..., K, 2, 2)."""
        dtype = scale_tril.dtype
        moment = None
        if self.covariance != "paper":
            moment = Gaussian(scale_tril * self.moment_tau_.to(dtype)[:, None, None]).covariance
        return StudentT(scale_tril * self.tau_.to(dtype)[:, None, None], self.nu_.to(dtype), moment)


@dataclass(frozen=True)
class Calibrations:
    """Everything fitted on held-out data: both distributions, thresholds, regions and correlation.

    Attributes:
        gaussian: Gaussian calibration.
        student: Student-t calibration of all keypoints.
        threshold: threshold of the localization confidence; -inf prunes nothing.
        visibility_threshold: threshold of the visibility score (eq. 22); None if only the confidence decides.
        regions: radii of the conformal regions.
        correlation: correlation of the keypoints of an object.
        split_student: Student-t calibrations of kept and of pruned keypoints, used instead of ``student``.
        offset: mean residuals (K, 2) relative to the square root of the box area; None for zero.
    """

    gaussian: GaussianCalibration
    student: StudentTCalibration
    threshold: float = float("-inf")
    visibility_threshold: float | None = None
    regions: Regions | None = None
    correlation: Correlation | None = None
    split_student: SplitStudentT | None = None
    offset: Tensor | None = None

    @classmethod
    def none(cls, keypoints: int) -> Calibrations:
        """Return identity calibrations without pruning."""
        return cls(GaussianCalibration(keypoints), StudentTCalibration(keypoints))

    def distribution(self, scale_tril: Tensor, family: Family, keep: Tensor) -> Gaussian | StudentT:
        """Return the calibrated distribution of factors (..., K, 2, 2), of which pruning keeps ``keep`` (..., K)."""
        if family == "gaussian":
            return self.gaussian(scale_tril)
        return self.student(scale_tril) if self.split_student is None else self.split_student(scale_tril, keep)


def _tensor(name: str, values: Tensor | Array) -> Tensor:
    """Convert an array to a tensor; a tensor is unchanged."""
    if isinstance(values, Tensor):
        return values
    try:
        return torch.from_numpy(np.array(values))
    except (TypeError, ValueError):
        raise HaloposeError(f"{name} should be a tensor or an array of numbers") from None


def _flags(labelled: Tensor) -> Tensor:
    """Return which keypoints are labelled, from flags or COCO's 0, 1 and 2."""
    if labelled.dtype != torch.bool and not bool(((labelled == 0) | (labelled == 1) | (labelled == 2)).all()):
        raise HaloposeError("labelled should be true or false, or 0, 1 and 2 as in COCO: weights are sample_weight")
    return labelled > 0
