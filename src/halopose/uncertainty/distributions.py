"""Bivariate Gaussian and Student-t distributions of a keypoint residual r = truth - prediction.

Distributions take lower-triangular Cholesky factors L (..., 2, 2) in pixels. All functions are batched and
differentiable.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from scipy import special
from torch import Tensor

from halopose.types import Array

Parameterisation = Literal["full", "diagonal", "isotropic"]
RAW_CHANNELS: dict[Parameterisation, int] = {"full": 3, "diagonal": 2, "isotropic": 1}

LOG_SIZE_BOUND = 8.0  # geometric-mean standard deviation within exp(+-8) strides
LOG_ASPECT_BOUND = 2.0  # ratio of the two diagonal entries within exp(+-4)
SHEAR_BOUND = 8.0  # off-diagonal entry within 8 geometric-mean standard deviations


def scale_tril_from_raw(
    raw: Tensor, parameterisation: Parameterisation = "full", stride: Tensor | float = 1.0
) -> Tensor:
    """Convert raw head outputs (..., 3 | 2 | 1) to Cholesky factors (..., 2, 2).

    L = stride * [[exp a, 0], [b, exp c]]; diagonal has b = 0, isotropic also c = a. Size, aspect and shear are clamped
    instead of a, b and c, so the condition number of L L^T is below 2e4. It is then positive definite in float32 for
    any finite input, and its gradients are finite.
    """
    channels = RAW_CHANNELS[parameterisation]
    if raw.shape[-1] != channels:
        raise ValueError(f"{parameterisation} dispersion takes {channels} channels, got {raw.shape[-1]}")
    a = raw[..., 0]
    b = raw[..., 1] if parameterisation == "full" else torch.zeros_like(a)
    c = a if parameterisation == "isotropic" else raw[..., -1]
    first, shear, second = factor_entries(a, b, c)
    factors = torch.stack([first, torch.zeros_like(a), shear, second], -1).reshape(*a.shape, 2, 2)
    if isinstance(stride, (int, float)):
        return factors * stride
    return factors * stride[..., None, None]


def factor_entries(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the entries l11, l21, l22 (...) of L in strides from raw head outputs (...)."""
    size = ((a + c) / 2).clamp(-LOG_SIZE_BOUND, LOG_SIZE_BOUND)
    aspect = ((a - c) / 2).clamp(-LOG_ASPECT_BOUND, LOG_ASPECT_BOUND)
    shear_limit = SHEAR_BOUND * torch.exp(size)
    b = torch.minimum(torch.maximum(b, -shear_limit), shear_limit)
    return torch.exp(size + aspect), b, torch.exp(size - aspect)


def scale_tril_from_covariance(covariance: Tensor) -> Tensor:
    """Return Cholesky factors (..., 2, 2) of positive definite matrices (..., 2, 2) in closed form."""
    xx, xy, yy = covariance[..., 0, 0], covariance[..., 1, 0], covariance[..., 1, 1]
    first = torch.sqrt(xx)
    shear = xy / first
    second = torch.sqrt(yy - torch.square(shear))
    return torch.stack([first, torch.zeros_like(first), shear, second], -1).reshape(*first.shape, 2, 2)


@dataclass(frozen=True)
class Bivariate(ABC):
    """Base class of elliptical distributions around zero with scale matrix L L^T."""

    scale_tril: Tensor

    @property
    def scale(self) -> Tensor:
        """Scale matrix L L^T (..., 2, 2)."""
        return self.scale_tril @ self.scale_tril.mT

    @property
    @abstractmethod
    def covariance(self) -> Tensor:
        """Covariance matrix (..., 2, 2)."""

    @abstractmethod
    def log_kernel(self, mahalanobis: Tensor) -> Tensor:
        """Log-density as a function of the squared distance, without its normalisation."""

    @abstractmethod
    def mahalanobis_cdf(self, mahalanobis: Tensor) -> Tensor:
        """Probability that the squared Mahalanobis distance is below the given one."""

    @abstractmethod
    def mahalanobis_quantile(self, probability: Tensor) -> Tensor:
        """Squared Mahalanobis distance that contains the given probability."""

    @abstractmethod
    def standard_cdf(self, standardized: Tensor) -> Tensor:
        """CDF of a coordinate divided by its scale; the last axis is x, y."""

    @abstractmethod
    def standard_quantile(self, probability: Tensor) -> Tensor:
        """Quantile of a coordinate divided by its scale; the last axis is x, y."""

    def whiten(self, residual: Tensor) -> Tensor:
        """L^-1 r (..., 2), by forward substitution."""
        first = residual[..., 0] / self.scale_tril[..., 0, 0]
        second = (residual[..., 1] - self.scale_tril[..., 1, 0] * first) / self.scale_tril[..., 1, 1]
        return torch.stack([first, second], dim=-1)

    def mahalanobis(self, residual: Tensor) -> Tensor:
        """Squared Mahalanobis distance r^T (L L^T)^-1 r (...)."""
        return self.whiten(residual).square().sum(-1)

    def log_prob(self, residual: Tensor) -> Tensor:
        """Log-density in pixel^-2 (...).

        ln 2 pi normalises both distributions: in two dimensions ln Gamma(nu/2) - ln Gamma(nu/2 + 1) + ln(nu pi) of the
        Student-t (eq. 15) is ln 2 pi for every nu.
        """
        log_det = self.scale_tril[..., 0, 0].log() + self.scale_tril[..., 1, 1].log()
        return self.log_kernel(self.mahalanobis(residual)) - log_det - math.log(2 * math.pi)

    @property
    def marginal_scale(self) -> Tensor:
        """Scale of each coordinate, the square root of the diagonal of L L^T (..., 2)."""
        return self.scale_tril.square().sum(-1).sqrt()

    def marginal_cdf(self, residual: Tensor) -> Tensor:
        """CDF of each coordinate (..., 2)."""
        return self.standard_cdf(residual / self.marginal_scale)

    def marginal_quantile(self, probability: Tensor | float) -> Tensor:
        """Quantile of each coordinate (..., 2)."""
        return self.standard_quantile(self._like(probability)) * self.marginal_scale

    def ellipse(self, probability: float) -> tuple[Tensor, Tensor]:
        """Semi-axes (..., 2), longer first, and the angle (...) of the longer one, of a probability region.

        The angle is in radians from the x towards the y axis, in (-pi/2, pi/2].
        """
        xx, xy, yy = self.scale[..., 0, 0], self.scale[..., 1, 0], self.scale[..., 1, 1]
        half_gap = torch.hypot((xx - yy) / 2, xy)
        major = (xx + yy) / 2 + half_gap
        minor = (xx * yy - xy.square()) / major
        radius = self.mahalanobis_quantile(self._like(probability))
        axes = torch.stack([major, minor], dim=-1) * radius.expand(major.shape)[..., None]
        return axes.sqrt(), torch.atan2(2 * xy, xx - yy) / 2

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw residuals (count, ..., 2): uniform direction, radius by its closed-form quantile."""
        shape = (count, *self.scale_tril.shape[:-2])
        uniform = torch.rand((2, *shape), generator=generator, dtype=self.scale_tril.dtype).to(self.scale_tril.device)
        radius = self.mahalanobis_quantile(uniform[0]).sqrt()
        angle = 2 * math.pi * uniform[1]
        direction = torch.stack([angle.cos(), angle.sin()], dim=-1)
        return (self.scale_tril @ (radius[..., None] * direction)[..., None])[..., 0]

    def _like(self, value: Tensor | float) -> Tensor:
        return torch.as_tensor(value, dtype=self.scale_tril.dtype, device=self.scale_tril.device)


@dataclass(frozen=True)
class Gaussian(Bivariate):
    """Gaussian distribution N(0, L L^T).

    Example:
        >>> distribution = Gaussian(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))  # L: 3 px along x, 1 px along y
        >>> distribution.covariance.tolist()
        [[9.0, 0.0], [0.0, 1.0]]
        >>> [round(float(axis), 1) for axis in distribution.ellipse(0.95)[0]]  # semi-axes that hold 95 %
        [7.3, 2.4]
        >>> round(float(distribution.mahalanobis_cdf(distribution.mahalanobis(torch.tensor([3.0, 0.0])))), 2)
        0.39
    """

    @property
    def covariance(self) -> Tensor:
        return self.scale

    def log_kernel(self, mahalanobis: Tensor) -> Tensor:
        return -mahalanobis / 2  # eq. 4

    def mahalanobis_cdf(self, mahalanobis: Tensor) -> Tensor:
        return -torch.expm1(-mahalanobis / 2)  # chi-square with two degrees of freedom

    def mahalanobis_quantile(self, probability: Tensor) -> Tensor:
        return -2 * torch.log1p(-probability)

    def standard_cdf(self, standardized: Tensor) -> Tensor:
        # ndtr loses the lower tail to rounding.
        return torch.special.erfc(-standardized / math.sqrt(2)) / 2

    def standard_quantile(self, probability: Tensor) -> Tensor:
        return torch.special.ndtri(probability)


@dataclass(frozen=True)
class StudentT(Bivariate):
    """Student-t distribution T_nu(0, L L^T), with dof broadcastable to the batch shape.

    The covariance is nu / (nu - 2) L L^T (eq. 17), unless a second-moment covariance is given. The latter stays finite
    as nu approaches 2.

    Example:
        >>> distribution = StudentT(torch.tensor([[3.0, 0.0], [0.0, 1.0]]), dof=torch.tensor(4.0))
        >>> distribution.covariance.tolist()
        [[18.0, 0.0], [0.0, 2.0]]
        >>> [round(float(axis), 1) for axis in distribution.ellipse(0.95)[0]]  # longer than the Gaussian's
        [11.2, 3.7]
    """

    dof: Tensor
    moment: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dof, Tensor):
            object.__setattr__(self, "dof", self._like(self.dof))

    @property
    def covariance(self) -> Tensor:
        if self.moment is not None:
            return self.moment
        excess = (self.dof - 2).clamp_min(torch.finfo(self.dof.dtype).tiny)
        covariance = (self.dof / excess)[..., None, None] * self.scale
        return torch.where((self.dof > 2)[..., None, None], covariance, torch.inf)

    def log_kernel(self, mahalanobis: Tensor) -> Tensor:
        return -(self.dof + 2) / 2 * torch.log1p(mahalanobis / self.dof)

    def mahalanobis_cdf(self, mahalanobis: Tensor) -> Tensor:
        # Half the squared distance is F(2, nu), whose CDF is elementary.
        return -torch.expm1(-self.dof / 2 * torch.log1p(mahalanobis / self.dof))

    def mahalanobis_quantile(self, probability: Tensor) -> Tensor:
        return self.dof * torch.expm1(-2 / self.dof * torch.log1p(-probability))

    def standard_cdf(self, standardized: Tensor) -> Tensor:
        cdf: Tensor = _StudentCdf.apply(standardized, self.dof[..., None])  # type: ignore[no-untyped-call]
        return cdf

    def standard_quantile(self, probability: Tensor) -> Tensor:
        quantile: Tensor = _StudentQuantile.apply(probability, self.dof[..., None])  # type: ignore[no-untyped-call]
        return quantile


def _student_density(value: Tensor, dof: Tensor) -> Tensor:
    """Return the density in the value's dtype; computed in double because the two gamma functions nearly cancel."""
    x, nu = value.double(), dof.double()
    log_norm = torch.lgamma(nu / 2 + 0.5) - torch.lgamma(nu / 2) - torch.log(nu * math.pi) / 2
    return torch.exp(log_norm - (nu / 2 + 0.5) * torch.log1p(x.square() / nu)).to(value.dtype)


def _through_numpy(function: Any, *tensors: Tensor) -> Tensor:
    result = function(*(tensor.detach().cpu().double().numpy() for tensor in tensors))
    return torch.as_tensor(np.asarray(result), dtype=tensors[0].dtype, device=tensors[0].device)


def _cdf_slope_in_dof(value: Tensor, dof: Tensor) -> Tensor:
    """Return d CDF / d nu by a five-point stencil, accurate to about 1e-10; there is no closed form."""

    def slope(nu: np.ndarray, x: np.ndarray) -> np.ndarray:
        step = 1e-3 * nu
        values = [special.stdtr(nu + k * step, x) for k in (-2, -1, 1, 2)]
        return np.asarray((values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * step))

    return _through_numpy(slope, dof.expand(value.shape), value)


def student_cdf(dof: Array, value: Array) -> Array:
    """Student-t CDF of values (..., V) with degrees of freedom (...)."""
    return np.asarray(special.stdtr(dof[..., None], value))


class _StudentCdf(torch.autograd.Function):
    """Student-t CDF with exact gradients; dof has a last axis of one."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, dof: Tensor) -> Tensor:
        ctx.save_for_backward(value, dof)
        return _through_numpy(lambda nu, x: student_cdf(nu[..., 0], x), dof, value).to(value.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        value, dof = ctx.saved_tensors
        by_value = grad * _student_density(value, dof)
        by_dof = (grad * _cdf_slope_in_dof(value, dof)) if ctx.needs_input_grad[1] else None
        return (
            by_value.sum_to_size(value.shape),
            None if by_dof is None else by_dof.sum_to_size(dof.shape),
        )


class _StudentQuantile(torch.autograd.Function):
    """Student-t quantile by scipy, differentiated as the inverse of the CDF."""

    @staticmethod
    def forward(ctx: Any, probability: Tensor, dof: Tensor) -> Tensor:
        value = _through_numpy(special.stdtrit, dof, probability).to(probability.dtype)
        ctx.save_for_backward(probability, value, dof)
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        probability, value, dof = ctx.saved_tensors
        by_probability = grad / _student_density(value, dof)
        by_dof = (-by_probability * _cdf_slope_in_dof(value, dof)) if ctx.needs_input_grad[1] else None
        return (
            by_probability.sum_to_size(probability.shape),
            None if by_dof is None else by_dof.sum_to_size(dof.shape),
        )
