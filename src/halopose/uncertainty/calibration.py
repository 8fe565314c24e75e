"""Per-keypoint calibration of predicted dispersions as a Gaussian or a Student-t (paper, section 3.2).

In: residuals (N, K, 2), Cholesky factors (N, K, 2, 2), which keypoints are labelled (N, K), weights.
Out: modules that turn Cholesky factors (..., K, 2, 2) into calibrated distributions.

Calibration data must be disjoint from the data the heads were trained on and from the data scored later.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import Tensor, nn

from halopose.errors import HaloposeError
from halopose.types import Family
from halopose.uncertainty.conformal import Regions
from halopose.uncertainty.correlation import Correlation
from halopose.uncertainty.distributions import Gaussian, StudentT

if TYPE_CHECKING:
    from halopose.uncertainty.tails import Tails

log = logging.getLogger(__name__)

LARGEST_TAU = 1e6  # what is read from a file and claims more is damaged

NU_MIN = 2 + 1e-9
NU_MAX = 1e7
_STRIDES = (64, 8, 1)  # thinned data give the pass over all of it a good start
_THINNEST = 256
_GRID = 24
_GRID_ROWS = 512
_SMALL_STEP = 1e-3  # in log lam; so far the profile can be extrapolated
_NEWTON_GAIN = 1e-8  # nats that the last Newton step may still gain; what it leaves is about the square
_OTHER_GAIN = 1e-11  # the same for a bisection, which converges more slowly
_MAX_PASSES = 100
_CHUNK = 2048  # rows that stay in the cache during a pass
_TINY = 1e-300


@dataclass(frozen=True)
class Sample:
    """Squared Mahalanobis distances (N, K) under the uncalibrated dispersion, and their weights (N, K)."""

    mahalanobis: Tensor
    weight: Tensor

    @classmethod
    def of(
        cls,
        residual: Tensor,
        scale_tril: Tensor,
        labelled: Tensor | None = None,
        sample_weight: Tensor | None = None,
    ) -> Sample:
        """Measure residuals (N, K, 2) under factors (N, K, 2, 2); weights are (N,) or (N, K)."""
        if residual.shape[-1] != 2 or scale_tril.shape != (*residual.shape, 2) or residual.ndim != 3:
            raise HaloposeError(
                "calibration takes residuals (N, K, 2) and factors (N, K, 2, 2), "
                f"got {tuple(residual.shape)} and {tuple(scale_tril.shape)}"
            )
        rows, keypoints = residual.shape[:2]
        _check_shape("labelled", labelled, [(rows, keypoints)])
        _check_shape("sample weights", sample_weight, [(rows,), (rows, keypoints)])
        weight = torch.ones((rows, keypoints), dtype=torch.float64, device=residual.device)
        if sample_weight is not None:
            if not bool((torch.isfinite(sample_weight) & (sample_weight >= 0)).all()):
                raise HaloposeError("sample weights must be finite and not negative")
            weight = weight * (sample_weight[:, None] if sample_weight.ndim == 1 else sample_weight)
        mahalanobis = Gaussian(scale_tril.double()).mahalanobis(residual.double())
        if labelled is not None:
            weight = weight * labelled
            mahalanobis = torch.where(labelled, mahalanobis, 0.0)
        if not bool(torch.isfinite(mahalanobis).all()):
            raise HaloposeError("residuals or dispersions are not finite; remove those detections first")
        return cls(mahalanobis, weight)

    def pooled(self) -> Sample:
        """All keypoints as one (N * K, 1)."""
        return Sample(self.mahalanobis.reshape(-1, 1), self.weight.reshape(-1, 1))

    @property
    def effective(self) -> Tensor:
        """Kish's effective sample size of each keypoint (K,)."""
        total = self.weight.sum(0)
        return torch.where(total > 0, total.square() / self.weight.square().sum(0).clamp_min(_TINY), 0.0)


def _check_shape(name: str, value: Tensor | None, allowed: list[tuple[int, ...]]) -> None:
    if value is not None and tuple(value.shape) not in allowed:
        expected = " or ".join(str(shape) for shape in allowed)
        raise HaloposeError(f"{name} should have shape {expected}, got {tuple(value.shape)}")


def gaussian_temperature(sample: Sample) -> Tensor:
    """tau (K,) that minimises the weighted Gaussian NLL (eq. 12): tau^2 = sum(w m) / (2 sum w)."""
    moment = (sample.weight * sample.mahalanobis).sum(0) / (2 * sample.weight.sum(0))
    return moment.clamp_min(torch.finfo(moment.dtype).tiny).sqrt()


def student_parameters(sample: Sample) -> tuple[Tensor, Tensor]:
    """nu and tau (K,) that minimise the weighted Student-t NLL (eq. 18), nu within [NU_MIN, NU_MAX].

    In two dimensions the squared distance m follows a Lomax law with shape a = nu / 2 and scale
    lam = nu tau^2. For a given lam the best shape is 1 / E[log(1 + m / lam)], which leaves one smooth
    unknown per keypoint for a safeguarded Newton search. A grid over thinned data finds the valley, thinned
    data lead down into it, so that passes over all of the data are few. The Gaussian limit, nu = NU_MAX,
    has a closed form and wins where it is better.
    """
    total = sample.weight.sum(0).clamp_min(_TINY)
    mean = ((sample.weight * sample.mahalanobis).sum(0) / total).clamp_min(_TINY)
    limit = (mean * NU_MAX / 2).log()
    spread = (sample.weight * (sample.mahalanobis / mean).square()).sum(0) / total
    log_scale, at_end = _best_on_grid(_thinned(sample, max(1, len(sample.mahalanobis) // _GRID_ROWS)), limit)
    light = at_end & (spread <= 2)  # no valley, and none beyond: m spreads no more than an exponential law
    profile = None
    for stride in _STRIDES:
        if stride == 1 or len(sample.mahalanobis) // stride >= _THINNEST:
            log_scale, profile = _minimise_profile(_thinned(sample, stride), log_scale, limit, light)
    assert profile is not None  # the last stride is 1
    gaussian = profile.nll(log_scale) >= (mean / 2).log() + 1
    nu = torch.where(gaussian, NU_MAX, 2 * profile.shape)
    return nu, (torch.where(gaussian, limit, log_scale).exp() / nu).sqrt()


def _thinned(sample: Sample, stride: int) -> Sample:
    return Sample(sample.mahalanobis[::stride].contiguous(), sample.weight[::stride].contiguous())


def _lower_bound(sample: Sample) -> Tensor:
    """log lam (K,) below which the NLL can only fall as lam grows."""
    positive = torch.where((sample.mahalanobis > 0) & (sample.weight > 0), sample.mahalanobis, torch.inf)
    return positive.amin(0).clamp(_TINY, 1.0).log() - 7


def _best_on_grid(sample: Sample, limit: Tensor) -> tuple[Tensor, Tensor]:
    """log lam (K,) of the lowest NLL on a grid up to all but Gaussian tails, and whether that is its end."""
    lower = _lower_bound(sample)
    upper = torch.maximum(limit - math.log(NU_MAX / 100), lower)
    share = torch.linspace(0, 1, _GRID, dtype=torch.float64, device=lower.device)
    grid = (lower + share[:, None] * (upper - lower)).flatten()  # (GRID * K,): every point is a column
    profile = _Profile.at(sample.mahalanobis.repeat(1, _GRID), sample.weight.repeat(1, _GRID), grid)
    best = profile.nll(grid).unflatten(0, (_GRID, -1)).argmin(0)
    return grid.unflatten(0, (_GRID, -1)).gather(0, best[None])[0], best == _GRID - 1


@dataclass(frozen=True)
class _Profile:
    """NLL = log lam - log 2a + (a + 1) G at the best a, with G = E[log(1 + m / lam)], all (K,)."""

    growth: Tensor  # G
    first: Tensor  # dG / d log lam
    second: Tensor

    @classmethod
    def at(cls, mahalanobis: Tensor, weight: Tensor, log_scale: Tensor) -> _Profile:
        totals = torch.zeros((3, *log_scale.shape), dtype=torch.float64, device=log_scale.device)
        inverse = torch.exp(-log_scale)
        for rows, weights in zip(mahalanobis.split(_CHUNK), weight.split(_CHUNK), strict=True):
            ratio = rows * inverse
            growth = torch.log1p(ratio)
            share = ratio.div_(ratio + 1)
            weighted = weights * share
            totals[0] += growth.mul_(weights).sum(0)
            totals[1] += weighted.sum(0)
            totals[2] += share.mul_(weighted).sum(0)
        growth, share, square = totals / weight.sum(0).clamp_min(_TINY)
        return cls(growth, -share, share - square)

    @property
    def shape(self) -> Tensor:
        return (1 / self.growth.clamp_min(_TINY)).clamp(NU_MIN / 2, NU_MAX / 2)

    def nll(self, log_scale: Tensor) -> Tensor:
        """NLL less the constant of the dispersion, at the log lam that the profile was taken at."""
        return log_scale - (2 * self.shape).log() + (self.shape + 1) * self.growth

    @property
    def slope(self) -> Tensor:
        """d NLL / d log lam."""
        return 1 + (self.shape + 1) * self.first

    @property
    def curvature(self) -> Tensor:
        """d^2 NLL / d (log lam)^2; where a is free it follows lam, da / d log lam = -a^2 dG / d log lam."""
        free = (1 / self.growth.clamp_min(_TINY)) == self.shape
        return (self.shape + 1) * self.second - torch.where(free, (self.shape * self.first).square(), 0.0)

    @property
    def newton_step(self) -> Tensor:
        """Newton's step in log lam for heavy tails; near the Gaussian, where it suits better, in 1 / lam."""
        in_log = torch.where(self.curvature > 0, -self.slope / self.curvature, torch.inf)
        shrink = 1 + self.slope / (self.curvature + self.slope)
        in_inverse = torch.where(self.curvature + self.slope > 0, -shrink.clamp_min(_TINY).log(), torch.inf)
        return torch.where(self.shape > 5, in_inverse, in_log)

    def shifted(self, step: Tensor) -> _Profile:
        """The profile a small step in log lam away, without another pass over the data."""
        return _Profile(self.growth + step * self.first + step.square() / 2 * self.second, self.first, self.second)


def _minimise_profile(sample: Sample, start: Tensor, limit: Tensor, light: Tensor) -> tuple[Tensor, _Profile]:
    """log lam (K,) where the profile's slope is zero: Newton steps inside a closing bracket.

    Keypoints with light tails stay where they are.
    """
    lower, upper = _lower_bound(sample), limit
    current = torch.minimum(torch.maximum(start, lower), upper)
    for _ in range(_MAX_PASSES):
        profile = _Profile.at(sample.mahalanobis, sample.weight, current)
        slope, curvature = profile.slope, profile.curvature
        lower = torch.where(slope < 0, current, lower)
        upper = torch.where(slope > 0, current, upper)
        newton = current + profile.newton_step
        inside = (newton > lower) & (newton < upper)
        step = torch.where(inside, newton, (lower + upper) / 2) - current
        step = torch.where(light | (slope == 0), 0.0, step)
        current = current + step
        # A Newton step squares the error, so the gain still promised before it may be larger than after.
        tolerance = torch.where(inside & (curvature > 0), _NEWTON_GAIN, _OTHER_GAIN)
        promised = slope.abs() * torch.maximum(step.abs(), torch.expm1(-step).abs())
        if bool((promised <= tolerance).all()):
            if bool((step.abs() <= _SMALL_STEP).all()):
                return current, profile.shifted(step)
            break
    return current, _Profile.at(sample.mahalanobis, sample.weight, current)


Fitted = TypeVar("Fitted", bound="Calibration")  # a calibration of either family


class Calibration(nn.Module, ABC):
    """Common ground of both calibrations: one temperature per keypoint, fitted with shrinkage.

    A keypoint whose effective sample size n is under ``min_samples`` is blended, in the logarithm, with
    the value of all keypoints together: n / min_samples of its own. One without samples takes the pooled
    value, and ``fit`` warns and names it. From ``min_samples`` on nothing is blended.
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
        residual: Tensor,
        scale_tril: Tensor,
        labelled: Tensor | None = None,
        sample_weight: Tensor | None = None,
    ) -> Fitted:
        """Fit on residuals (N, K, 2) and uncalibrated factors (N, K, 2, 2); returns self."""
        self.fit_sample(Sample.of(residual, scale_tril, labelled, sample_weight))
        empty = torch.nonzero(self.effective_samples_ == 0).flatten().tolist()
        if empty:
            log.warning("no samples for keypoints %s: they take the values of all keypoints together", empty)
        return self

    def fit_sample(self: Fitted, sample: Sample) -> Fitted:
        """Fit where a keypoint without samples is nothing to warn of; returns self."""
        if sample.mahalanobis.shape[1] != self.keypoints:
            raise HaloposeError(
                f"this calibration has {self.keypoints} keypoints, the data {sample.mahalanobis.shape[1]}"
            )
        self.effective_samples_ = sample.effective
        if not bool((self.effective_samples_ > 0).any()):
            raise HaloposeError("no labelled keypoint to calibrate on: give more images or check the labels")
        self._fit(sample)
        return self

    @abstractmethod
    def _fit(self, sample: Sample) -> None:
        """Set the learned values from a sample that has at least one labelled keypoint."""

    def _shrink(self, own: Tensor, pooled: Tensor) -> Tensor:
        """Blend logarithms (K,) towards the pooled one (1,) where samples are few."""
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
        self.tau_ = torch.where(
            self.effective_samples_ >= self.min_samples, own, self._shrink(own.log(), pooled.log()).exp()
        )

    def forward(self, scale_tril: Tensor) -> Gaussian:
        """Calibrated law of factors (..., K, 2, 2)."""
        return Gaussian(scale_tril * self.tau_.to(scale_tril.dtype)[:, None, None])


class StudentTCalibration(Calibration):
    """Student-t dispersion-tail scaling, S = tau_k^2 Sigma with nu_k degrees of freedom (eqs. 16 to 18).

    Learned: ``tau_`` (K,), ``nu_`` (K,) > 2, and ``moment_tau_`` (K,), the temperature of the second-moment
    covariance. ``covariance="moment"`` (default) reports moment_tau^2 Sigma as the covariance, which does
    not explode as nu nears 2; ``covariance="paper"`` reports nu / (nu - 2) tau^2 Sigma (eq. 17).

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
        covariance: Literal["moment", "paper"] = "moment",
    ) -> None:
        super().__init__(keypoints, min_samples=min_samples)
        self.covariance = covariance
        self.register_buffer("nu_", torch.full((keypoints,), 30.0, dtype=torch.float64))
        self.register_buffer("moment_tau_", torch.ones(keypoints, dtype=torch.float64))

    def _fit(self, sample: Sample) -> None:
        enough = self.effective_samples_ >= self.min_samples
        nu, tau = student_parameters(sample)
        moment = gaussian_temperature(sample)
        if not bool(enough.all()):
            pool = sample.pooled()
            pooled_nu, pooled_tau = student_parameters(pool)
            nu = torch.where(enough, nu, 2 + self._shrink((nu - 2).log(), (pooled_nu - 2).log()).exp())
            tau = torch.where(enough, tau, self._shrink(tau.log(), pooled_tau.log()).exp())
            moment = torch.where(
                enough, moment, self._shrink(moment.log(), gaussian_temperature(pool).log()).exp()
            )
        self.nu_, self.tau_, self.moment_tau_ = nu, tau, moment

    def forward(self, scale_tril: Tensor) -> StudentT:
        """Calibrated law of factors (..., K, 2, 2)."""
        dtype = scale_tril.dtype
        moment = None
        if self.covariance == "moment":
            moment = Gaussian(scale_tril * self.moment_tau_.to(dtype)[:, None, None]).covariance
        return StudentT(scale_tril * self.tau_.to(dtype)[:, None, None], self.nu_.to(dtype), moment)


@dataclass(frozen=True)
class Calibrations:
    """Everything fitted on held-out data: both laws, and the thresholds below which a keypoint is pruned.

    threshold: of the localization confidence; -inf prunes nothing. visibility_threshold: of the visibility score
    (eq. 22), None where the confidence decides alone. regions: radii that hold whatever the law. correlation: how
    keypoints of an object err together. tails: Student-t laws of kept and of pruned keypoints, which then take the
    place of ``student``, the law of all of them. offset: mean residuals (K, 2) as shares of the root of an
    object's box area, which the laws are centred at; None: at the keypoints.
    """

    gaussian: GaussianCalibration
    student: StudentTCalibration
    threshold: float = float("-inf")
    visibility_threshold: float | None = None
    regions: Regions | None = None
    correlation: Correlation | None = None
    tails: Tails | None = None
    offset: Tensor | None = None

    @classmethod
    def none(cls, keypoints: int) -> Calibrations:
        """Nothing is scaled and nothing pruned, before anything is fitted."""
        return cls(GaussianCalibration(keypoints), StudentTCalibration(keypoints))

    def law(self, scale_tril: Tensor, family: Family, keep: Tensor) -> Gaussian | StudentT:
        """The calibrated law of uncalibrated factors (..., K, 2, 2), of which ``keep`` (..., K) are not pruned."""
        if family == "gaussian":
            return self.gaussian(scale_tril)
        return self.student(scale_tril) if self.tails is None else self.tails(scale_tril, keep)


def mean_nll(law: Gaussian | StudentT, residual: Tensor, weight: Tensor | None = None) -> float:
    """Weighted mean negative log-likelihood in nats, residuals in pixels."""
    nll = -law.log_prob(residual)
    if weight is None:
        return float(nll.mean())
    return float((weight * nll).sum() / weight.sum())


__all__ = [
    "NU_MAX",
    "NU_MIN",
    "Calibration",
    "Calibrations",
    "GaussianCalibration",
    "Sample",
    "StudentTCalibration",
    "gaussian_temperature",
    "mean_nll",
    "student_parameters",
]
