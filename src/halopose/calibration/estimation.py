"""Maximum-likelihood temperatures and degrees of freedom from squared Mahalanobis distances (paper, eqs. 12 and 18)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from halopose.errors import HaloposeError
from halopose.types import Array
from halopose.uncertainty.distributions import Gaussian

NU_MIN = 2 + 1e-9
NU_MAX = 1e7
TINY = 1e-300
_GRID, _GRID_ROWS = 24, 512  # candidates of log lam, and distances that they are compared on
_NEAR_GAUSSIAN = 5.0  # shape from which Newton steps are taken in 1 / lam
_SMALL_RATIO = 1e-3  # of mean distance to lam; below it log(1 + x) loses digits
_GAIN = 1e-9  # expected gain in nats of the last step
_MAX_STEPS = 100
_BOUNDS = np.geomspace(0.1, 1e3, 81)  # candidates; the likelihood is flat around its maximum
_BOUND_ROWS = 50_000  # rows that the candidates are compared on
_MIN_BOUND_GAIN = 10.0  # nats


@dataclass(frozen=True)
class Sample:
    """Squared Mahalanobis distances under the uncalibrated dispersion.

    Attributes:
        mahalanobis: Squared distances (N, K).
        weight: Weights (N, K); 0 where a keypoint is not labelled.
    """

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
        """Compute the distances of residuals.

        Args:
            residual: Residuals (N, K, 2).
            scale_tril: Cholesky factors (N, K, 2, 2).
            labelled: Which keypoints (N, K) are labelled; default: all.
            sample_weight: Weights (N,) or (N, K).

        Raises:
            HaloposeError: Shapes do not match, or values are not finite.
        """
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
        return cls._of_labelled(Gaussian(scale_tril.double()).mahalanobis(residual.double()), labelled, weight)

    @classmethod
    def of_distances(cls, mahalanobis: Tensor, labelled: Tensor) -> Sample:
        """Sample of squared distances (N, K) of labelled keypoints (N, K), each with weight 1."""
        return cls._of_labelled(mahalanobis, labelled, torch.ones_like(mahalanobis))

    @classmethod
    def _of_labelled(cls, mahalanobis: Tensor, labelled: Tensor | None, weight: Tensor) -> Sample:
        if labelled is not None:
            weight = weight * labelled
            mahalanobis = torch.where(labelled, mahalanobis, 0.0)
        if not bool(torch.isfinite(mahalanobis).all()):
            raise HaloposeError("residuals or dispersions are not finite; remove those detections first")
        return cls(mahalanobis, weight)

    def pooled(self) -> Sample:
        """All keypoints as one, (N * K, 1)."""
        return Sample(self.mahalanobis.reshape(-1, 1), self.weight.reshape(-1, 1))

    @property
    def effective(self) -> Tensor:
        """Kish's effective sample size (K,) of each keypoint."""
        total = self.weight.sum(0)
        return torch.where(total > 0, total.square() / self.weight.square().sum(0).clamp_min(TINY), 0.0)


def gaussian_temperature(sample: Sample) -> Tensor:
    """Temperatures tau (K,) that minimise the weighted Gaussian NLL: tau^2 = sum(w m) / (2 sum w) (eq. 12)."""
    moment = (sample.weight * sample.mahalanobis).sum(0) / (2 * sample.weight.sum(0))
    return moment.clamp_min(torch.finfo(moment.dtype).tiny).sqrt()


def student_parameters(sample: Sample) -> tuple[Tensor, Tensor]:
    """Degrees of freedom nu and temperatures tau that minimise the weighted Student-t NLL (eq. 18).

    In two dimensions the squared distance m has a Lomax distribution with shape a = nu / 2 and scale lam = nu tau^2.
    For a given lam the best shape is 1 / G, G = E[log(1 + m / lam)], which leaves one unknown:

        NLL(lam) = log lam - log 2a + (a + 1) G

    A grid over a part of the data finds the lowest valley of log lam; safeguarded Newton steps on all data find its
    minimum. The Gaussian limit nu = NU_MAX has a closed form and is taken where it is better.

    Returns:
        nu (K,) within [NU_MIN, NU_MAX], and tau (K,).
    """
    distance, weight = sample.mahalanobis.cpu().numpy(), sample.weight.cpu().numpy()
    with np.errstate(all="ignore"):  # values that overflow are not used
        found = [_student(m[w > 0], w[w > 0]) for m, w in zip(distance.T, weight.T, strict=True)]
    nu, tau = torch.tensor(found, dtype=torch.float64, device=sample.mahalanobis.device).T
    return nu, tau


def _student(distance: Array, weight: Array) -> tuple[float, float]:
    """nu and tau of one keypoint from squared distances (n,) and weights (n,); nan without any."""
    if not len(distance):
        return math.nan, math.nan
    distance = distance.astype(np.float64)
    weight = weight / weight.sum()
    mean = max(float(weight @ distance), TINY)
    limit = math.log(mean * NU_MAX / 2)  # log lam of the Gaussian limit
    low, high = _lowest_log_scale(distance), limit
    log_scale = _best_of_grid(distance, weight, low, limit)
    growth = math.inf
    for _ in range(_MAX_STEPS):
        growth, first, second = _means(distance, weight, log_scale, mean)
        slope, curvature, shape = _derivatives(growth, first, second)
        low, high = (log_scale if slope < 0 else low), (log_scale if slope > 0 else high)
        step = _newton_step(slope, curvature, shape)
        if not low < log_scale + step < high:
            step = (low + high) / 2 - log_scale
        log_scale += step
        if abs(slope * step) < _GAIN:
            growth += step * (step * (first - second) / 2 - first)
            break
    if not profile_nll(growth, log_scale) < math.log(mean / 2) + 1:
        return NU_MAX, math.sqrt(math.exp(limit) / NU_MAX)
    nu = 2 * float(_best_shape(growth))
    return nu, math.sqrt(math.exp(log_scale) / nu)


def _means(distance: Array, weight: Array, log_scale: float, mean: float) -> tuple[float, float, float]:
    """E[log(1 + m / lam)], E[u] and E[u^2], with u = m / (lam + m)."""
    ratio = distance * math.exp(-log_scale)
    whole = 1 + ratio
    growth = np.log(whole) if mean * math.exp(-log_scale) > _SMALL_RATIO else np.log1p(ratio)
    share = ratio / whole
    return float(weight @ growth), float(weight @ share), float(weight @ np.square(share))


def _derivatives(growth: float, first: float, second: float) -> tuple[float, float, float]:
    """Slope and curvature of the NLL over log lam, and the best shape."""
    shape = float(_best_shape(growth))
    free = 1 / max(growth, TINY) == shape  # inside its bounds the shape changes with lam
    curvature = (shape + 1) * (first - second) - ((shape * first) ** 2 if free else 0.0)
    return 1 - (shape + 1) * first, curvature, shape


def _newton_step(slope: float, curvature: float, shape: float) -> float:
    """Newton's step in log lam, near the Gaussian in 1 / lam; inf where the curvature is not positive."""
    if shape <= _NEAR_GAUSSIAN:
        return -slope / curvature if curvature > 0 else math.inf
    curvature += slope
    return -math.log1p(slope / curvature) if curvature > max(-slope, 0.0) else math.inf


def _lowest_log_scale(distance: Array) -> float:
    """log lam below which the NLL can only fall as lam grows."""
    positive = distance[distance > 0]
    least = float(positive.min()) if len(positive) else 1.0
    return math.log(min(max(least, TINY), 1.0)) - 7


def _best_of_grid(distance: Array, weight: Array, lower: float, limit: float) -> float:
    """log lam of the lowest NLL on a grid, refined by a parabola through its neighbours."""
    stride = max(1, len(distance) // _GRID_ROWS)
    distance, weight = distance[::stride], weight[::stride] / weight[::stride].sum()
    grid = np.linspace(lower, max(limit - math.log(NU_MAX / 100), lower), _GRID)
    growth = np.log1p(np.exp(-grid)[:, None] * distance) @ weight
    nll = profile_nll(growth, grid)
    best = int(nll.argmin())
    if not 0 < best < _GRID - 1:
        return float(grid[best])
    before, here, after = nll[best - 1 : best + 2]
    return float(grid[best] + (before - after) / (2 * max(before - 2 * here + after, TINY)) * (grid[1] - grid[0]))


def _best_shape(growth: Array | float) -> Array:
    """Shape a = nu / 2 of the lowest NLL for G."""
    return np.minimum(np.maximum(1 / np.maximum(growth, TINY), NU_MIN / 2), NU_MAX / 2)


def profile_nll(growth: Array | float, log_scale: Array | float) -> Array:
    """NLL at log lam and the best shape, without the log-determinant of the dispersion."""
    shape = _best_shape(growth)
    return np.asarray(log_scale - np.log(2 * shape) + (shape + 1) * growth)


def likeliest_bound(sample: Sample, variance: Tensor) -> float:
    """Return the bound b that maximises the Gaussian likelihood of dispersions times 1 / (1 + variance / b).

    The temperatures are fitted for each candidate.

    Args:
        sample: Squared distances under the unbounded dispersions.
        variance: Variances (N, K) of the dispersions, in the unit of the bound.

    Returns:
        The bound; inf if none improves the likelihood by more than 10 nats.
    """
    seen, stride = sample.weight.sum(0) > 0, max(1, len(variance) // _BOUND_ROWS)
    weight, square, variance = (values[::stride][:, seen] for values in (sample.weight, sample.mahalanobis, variance))
    total = weight.sum(0).clamp_min(TINY)

    def loss(inverse: float) -> float:
        growth = 1 + inverse * variance  # factor of the squared distances
        temperature = ((weight * square * growth).sum(0) / total).clamp_min(TINY)
        return float((total * temperature.log()).sum() - (weight * growth.log()).sum())

    best = min(_BOUNDS.tolist(), key=lambda bound: loss(1 / bound))
    return best if loss(0.0) - loss(1 / best) > _MIN_BOUND_GAIN else math.inf


def _check_shape(name: str, value: Tensor | None, allowed: list[tuple[int, ...]]) -> None:
    if value is not None and tuple(value.shape) not in allowed:
        expected = " or ".join(str(shape) for shape in allowed)
        raise HaloposeError(f"{name} should have shape {expected}, got {tuple(value.shape)}")
