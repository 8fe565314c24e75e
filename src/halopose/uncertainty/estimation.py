"""Maximum-likelihood temperatures and tails from squared Mahalanobis distances (paper, equations 12 and 18).

In: distances (N, K) and weights, as a ``Sample``. Out: tau (K,) of a Gaussian, nu and tau (K,) of a Student-t.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from halopose.errors import HaloposeError
from halopose.uncertainty.distributions import Gaussian

NU_MIN = 2 + 1e-9
NU_MAX = 1e7
_STRIDES = (64, 8, 1)  # thinned data give the pass over all of it a good start
_THINNEST = 256
_GRID = 24
_GRID_ROWS = 512
_SMALL_STEP = 1e-3  # in log lam; so far the profile can be extrapolated
_STEP_GAIN = 1e-8  # nats that the last step may still gain; what it leaves is far less
_OTHER_GAIN = 1e-11  # the same for a bisection, which converges more slowly
_THIN_GAIN = 0.01  # the same of thinned data, over the number of rows: chance moves them by more than that
_MAX_PASSES = 100
_CHUNK = 2048  # rows that stay in the cache during a pass
_FOLDS = 4  # times that rows are multiplied in pairs before their logarithm is taken
_LARGEST_FACTOR = 1e18  # of 2^4 that are multiplied, so that their product stays finite
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
        return cls._of_labelled(Gaussian(scale_tril.double()).mahalanobis(residual.double()), labelled, weight)

    @classmethod
    def of_distances(cls, mahalanobis: Tensor, labelled: Tensor) -> Sample:
        """Squared distances (N, K) of labelled keypoints (N, K), each of weight 1."""
        return cls._of_labelled(mahalanobis, labelled, torch.ones_like(mahalanobis))

    @classmethod
    def _of_labelled(cls, mahalanobis: Tensor, labelled: Tensor | None, weight: Tensor) -> Sample:
        if labelled is not None:
            weight = weight * labelled
            mahalanobis = torch.where(labelled, mahalanobis, 0.0)
        if not bool(torch.isfinite(mahalanobis).all()):
            raise HaloposeError("residuals or dispersions are not finite; remove those detections first")
        return cls(mahalanobis, weight)

    @cached_property
    def plain(self) -> bool:
        """Whether all weights are 1, or 0 at a distance of 0: then sums need no weights."""
        ones = self.weight == 1
        return bool((ones | ((self.weight == 0) & (self.mahalanobis == 0))).all())

    @cached_property
    def largest(self) -> Tensor:
        """The largest squared distance (K,)."""
        return self.mahalanobis.amax(0)

    @cached_property
    def total(self) -> Tensor:
        """Sum of the weights (K,)."""
        return self.weight.sum(0).clamp_min(_TINY)

    def thinned(self, stride: int) -> Sample:
        """Every so many-th row."""
        if stride == 1:
            return self
        thin = Sample(self.mahalanobis[::stride].contiguous(), self.weight[::stride].contiguous())
        vars(thin)["plain"] = self.plain
        return thin

    def at(self, rows: Tensor) -> Sample:
        """Some of the rows."""
        part = Sample(self.mahalanobis[rows], self.weight[rows])
        if self.plain:
            vars(part)["plain"] = True
        return part

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
    unknown per keypoint for a safeguarded search by Halley's steps. A grid over thinned data finds the valley,
    thinned data lead down into it, so that passes over all of the data are few. The Gaussian limit, nu = NU_MAX,
    has a closed form and wins where it is better.
    """
    with _one_thread():
        return _student_parameters(sample)


@contextmanager
def _one_thread() -> Iterator[None]:
    """No sharing out of arrays that fit a cache: threads wait for each other longer than they work on these."""
    threads = torch.get_num_threads()
    if threads > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads > 1:
            torch.set_num_threads(threads)


def _student_parameters(sample: Sample) -> tuple[Tensor, Tensor]:
    mean, spread = _moments(sample)
    limit, lower = (mean * NU_MAX / 2).log(), _lower_bound(sample)
    log_scale, at_end = _best_on_grid(sample.thinned(max(1, len(sample.mahalanobis) // _GRID_ROWS)), limit)
    light = at_end & (spread <= 2)  # no valley, and none beyond: m spreads no more than an exponential law
    profile = None
    for stride in _STRIDES:
        if stride == 1 or len(sample.mahalanobis) // stride >= _THINNEST:
            thin = sample.thinned(stride)
            gain = 0.0 if stride == 1 else _THIN_GAIN / len(thin.mahalanobis)
            log_scale, profile = _minimise_profile(thin, log_scale, lower, limit, light, gain)
    assert profile is not None  # the last stride is 1
    gaussian = profile.nll(log_scale) >= (mean / 2).log() + 1
    nu = torch.where(gaussian, NU_MAX, 2 * profile.shape)
    return nu, (torch.where(gaussian, limit, log_scale).exp() / nu).sqrt()


def _moments(sample: Sample) -> tuple[Tensor, Tensor]:
    """Mean (K,) of the squared distances, and the mean of their squares over that of the mean."""
    rows = sample.mahalanobis if sample.plain else sample.weight * sample.mahalanobis
    mean = (rows.sum(0) / sample.total).clamp_min(_TINY)
    squares = torch.zeros_like(mean)
    for part, weighted in zip(sample.mahalanobis.split(_CHUNK), rows.split(_CHUNK), strict=True):
        share = part / mean
        squares += (share.square_() if sample.plain else share * (weighted / mean)).sum(0)
    return mean, squares / sample.total


def _lower_bound(sample: Sample) -> Tensor:
    """log lam (K,) below which the NLL can only fall as lam grows."""
    least = torch.full(sample.mahalanobis.shape[1:], torch.inf, dtype=torch.float64, device=sample.weight.device)
    for rows, weights in zip(sample.mahalanobis.split(_CHUNK), sample.weight.split(_CHUNK), strict=True):
        positive = rows > 0 if sample.plain else (rows > 0) & (weights > 0)
        least = torch.minimum(least, torch.where(positive, rows, torch.inf).amin(0))
    return least.clamp(_TINY, 1.0).log() - 7


def _best_on_grid(sample: Sample, limit: Tensor) -> tuple[Tensor, Tensor]:
    """log lam (K,) of the lowest NLL on a grid up to all but Gaussian tails, and whether that is its end."""
    lower = _lower_bound(sample)
    upper = torch.maximum(limit - math.log(NU_MAX / 100), lower)
    share = torch.linspace(0, 1, _GRID, dtype=torch.float64, device=lower.device)
    grid = (lower + share[:, None] * (upper - lower)).flatten()  # (GRID * K,): every point is a column
    wide = Sample(sample.mahalanobis.repeat(1, _GRID), sample.weight.repeat(1, _GRID))
    vars(wide)["plain"] = sample.plain
    profile = _Profile.at(wide, grid)
    best = profile.nll(grid).unflatten(0, (_GRID, -1)).argmin(0)
    return grid.unflatten(0, (_GRID, -1)).gather(0, best[None])[0], best == _GRID - 1


@dataclass(frozen=True)
class _Profile:
    """NLL = log lam - log 2a + (a + 1) G at the best a, with G = E[log(1 + m / lam)], all (K,)."""

    growth: Tensor  # G
    first: Tensor  # dG / d log lam
    second: Tensor
    third: Tensor

    @classmethod
    def at(cls, sample: Sample, log_scale: Tensor) -> _Profile:
        """One pass over the data, which takes as long as reading it and three more operations an entry."""
        totals = torch.zeros((4, *log_scale.shape), dtype=torch.float64, device=log_scale.device)
        inverse = torch.exp(-log_scale)
        small = bool((sample.largest * inverse < _LARGEST_FACTOR).all())
        for rows, weights in zip(sample.mahalanobis.split(_CHUNK), sample.weight.split(_CHUNK), strict=True):
            ratio = rows * inverse
            more = ratio + 1
            if sample.plain:
                growth = _log_product(ratio, more) if small and len(rows) == _CHUNK else torch.log1p(ratio)
                weighted = share = ratio.div_(more)
            else:
                growth = torch.log1p(ratio).mul_(weights)
                share = ratio.div_(more)
                weighted = weights * share
            square = torch.mul(weighted, share, out=more)
            totals[0] += growth.sum(0)
            totals[1] += weighted.sum(0)
            totals[2] += square.sum(0)
            totals[3] += square.mul_(share).sum(0)
        growth, share, square, cube = totals / sample.total
        return cls(growth, -share, share - square, 3 * square - share - 2 * cube)

    @cached_property
    def shape(self) -> Tensor:
        return (1 / self.growth.clamp_min(_TINY)).clamp(NU_MIN / 2, NU_MAX / 2)

    def nll(self, log_scale: Tensor) -> Tensor:
        """NLL less the constant of the dispersion, at the log lam that the profile was taken at."""
        return log_scale - (2 * self.shape).log() + (self.shape + 1) * self.growth

    @cached_property
    def slope(self) -> Tensor:
        """d NLL / d log lam."""
        return 1 + (self.shape + 1) * self.first

    @cached_property
    def curvature(self) -> Tensor:
        """d^2 NLL / d (log lam)^2; where a is free it follows lam, da / d log lam = -a^2 dG / d log lam."""
        free = (1 / self.growth.clamp_min(_TINY)) == self.shape
        return (self.shape + 1) * self.second - torch.where(free, (self.shape * self.first).square(), 0.0)

    @property
    def change(self) -> Tensor:
        """d^3 NLL / d (log lam)^3; 0, which makes Halley's step Newton's, where a is not free."""
        free = (1 / self.growth.clamp_min(_TINY)) == self.shape
        first, second, third = (value * self.shape for value in (self.first, self.second, self.third))
        return torch.where(free, third + self.third - 3 * first * second + 2 * first**3, 0.0)

    @property
    def step(self) -> Tensor:
        """Halley's step in log lam for heavy tails; near the Gaussian, where it suits better, in 1 / lam.

        It leaves the cube of an error, where Newton's leaves the square, for one more sum in a pass over the data.
        """
        in_log = _halley(self.slope, self.curvature, self.change)
        # The same derivatives by 1 / lam, times powers of it.
        bent = self.curvature + self.slope
        shrink = 1 + _halley(-self.slope, bent, -(self.change + 3 * self.curvature + 2 * self.slope))
        in_inverse = torch.where(bent > 0, -shrink.clamp_min(_TINY).log(), torch.inf)
        return torch.where(self.shape > 5, in_inverse, in_log)

    def shifted(self, step: Tensor) -> _Profile:
        """The profile a small step in log lam away, without another pass over the data."""
        growth = self.growth + step * self.first + step.square() / 2 * self.second + step**3 / 6 * self.third
        return _Profile(growth, self.first, self.second, self.third)


def _log_product(ratio: Tensor, more: Tensor) -> Tensor:
    """Logs (n / 16, K) of products of 1 + ratio (n, K): a logarithm costs as much as ten multiplications.

    (1 + a)(1 + b) - 1 = a + b (1 + a) has no difference of large numbers in it. more: 1 + ratio.
    """
    for _ in range(_FOLDS):
        half = len(ratio) // 2
        ratio = torch.addcmul(ratio[:half], ratio[half:], more[:half])
        more = ratio + 1
    return ratio.log1p_()


def _halley(first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    """The step to where a first derivative is zero; Newton's where Halley's is no use, inf without either."""
    newton = torch.where(second > 0, -first / second, torch.inf)
    bent = 1 - first * third / (2 * second.square())
    return torch.where((bent > 0.5) & (bent < 2), newton / bent, newton)


def _minimise_profile(
    sample: Sample, start: Tensor, lower: Tensor, limit: Tensor, light: Tensor, gain: float
) -> tuple[Tensor, _Profile]:
    """log lam (K,) where the profile's slope is zero: Halley's steps inside a closing bracket.

    Keypoints with light tails stay where they are. gain: nats that may be left, if more than usual.
    """
    upper = limit
    current = torch.minimum(torch.maximum(start, lower), upper)
    for _ in range(_MAX_PASSES):
        profile = _Profile.at(sample, current)
        slope, curvature = profile.slope, profile.curvature
        lower = torch.where(slope < 0, current, lower)
        upper = torch.where(slope > 0, current, upper)
        aim = current + profile.step
        inside = (aim > lower) & (aim < upper)
        step = torch.where(inside, aim, (lower + upper) / 2) - current
        step = torch.where(light | (slope == 0), 0.0, step)
        current = current + step
        # Such a step cubes the error, so the gain still promised before it may be larger than after.
        tolerance = torch.where(inside & (curvature > 0), _STEP_GAIN, _OTHER_GAIN)
        promised = slope.abs() * torch.maximum(step.abs(), torch.expm1(-step).abs())
        if bool((promised <= tolerance.clamp_min(gain)).all()):
            if bool((step.abs() <= _SMALL_STEP).all()):
                return current, profile.shifted(step)
            break
    return current, _Profile.at(sample, current)


__all__ = ["NU_MAX", "NU_MIN", "Sample", "gaussian_temperature", "student_parameters"]
