"""Maximum-likelihood temperatures and tails from squared Mahalanobis distances (paper, equations 12 and 18).

In: distances (N, K) and weights, as a ``Sample``. Out: tau (K,) of a Gaussian, nu and tau (K,) of a Student-t.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from halopose.arrays import as_array
from halopose.errors import HaloposeError
from halopose.side_by_side import between_pieces, dealt_out
from halopose.types import Array
from halopose.uncertainty.distributions import Gaussian

NU_MIN = 2 + 1e-9
NU_MAX = 1e7
_STRIDES = (8, 1)  # thinned data give the pass over all of it a good start
_THINNEST = 256
_GRID = 24
_GRID_ROWS = 512
_REACH = 0.8  # in log lam; so far the profile can be extrapolated
_MORE_STEPS = 2  # that are taken on the extrapolated profile, for nothing
_CLOSE = 3e-4  # a correction so small leaves its cube
_GAIN = 1e-11  # nats that may be left
_THIN_GAIN = 0.05  # the same of thinned data, over the number of rows: chance moves them by more than that
_MAX_PASSES = 100
_CHUNK = 8192  # rows that stay in the cache during a pass
_WIDTH, _HEIGHT = 1024, 128  # numbers side by side, and rows of them, that stay in the cache during a pass
_FEWEST_BLOCKS = 8  # that a thread is started for: to start it takes as long as one or two
_ORDERS = 6  # derivatives of the profile that a pass gives
_FOLDS = 4  # times that rows are multiplied in pairs before their logarithm is taken
_LARGEST_FACTOR = 1e18  # of 2^4 that are multiplied, so that their product stays finite
_LEAST_RATIO = 1e-3  # on average, of distances to lam: below it 1 + ratio loses digits of the ratio
_TINY = 1e-300
_BOUNDS = np.geomspace(0.1, 1e3, 81)  # among which one is sought: likelihoods are flat there
_BOUND_ROWS = 50_000  # as many tell
_WORTH = 10.0  # nats that a bound must bring
# Derivatives of E[log(1 + m / lam)] by log lam, as sums of E[u], E[u^2], ...: of p(u) it is -u (1 - u) p'(u).
_DERIVATIVES = np.array(
    [
        [-1, 0, 0, 0, 0, 0],
        [1, -1, 0, 0, 0, 0],
        [-1, 3, -2, 0, 0, 0],
        [1, -7, 12, -6, 0, 0],
        [-1, 15, -50, 60, -24, 0],
        [1, -31, 180, -390, 360, -120],
    ],
    dtype=float,
)

_COUNTS = np.arange(1, _ORDERS + 1)[:, None]
_SHIFTS = np.arange(4)[:, None] + np.arange(_ORDERS + 1)  # which derivatives a series of the first four takes

_Block = tuple[Array, Array | None]  # distances and weights


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
        return bool(ones.all()) or bool((ones | ((self.weight == 0) & (self.mahalanobis == 0))).all())

    @cached_property
    def largest(self) -> Tensor:
        """The largest squared distance (K,)."""
        return self.mahalanobis.amax(0)

    def multiplies(self, inverse: Array) -> bool:
        """Whether logarithms of 1 + distances times ``inverse`` (..., K) can be of products of sixteen, unweighed.

        These must stay finite, and not so near 1 that rounding shows.
        """
        if not self.plain:
            return False
        largest, mean = (as_array(values) * inverse for values in (self.largest, self.mean))
        return bool(((largest < _LARGEST_FACTOR) & (mean > _LEAST_RATIO)).all())

    @cached_property
    def total(self) -> Tensor:
        """Sum of the weights (K,)."""
        return self.weight.sum(0).clamp_min(_TINY)

    @cached_property
    def mean(self) -> Tensor:
        """Mean (K,) of the squared distances."""
        rows = self.mahalanobis if self.plain else self.weight * self.mahalanobis
        return (rows.sum(0) / self.total).clamp_min(_TINY)

    def thinned(self, stride: int) -> Sample:
        """Every so many-th row."""
        if stride == 1:
            return self
        thin = Sample(self.mahalanobis[::stride].contiguous(), self.weight[::stride])
        vars(thin)["plain"] = self.plain
        return thin

    def at(self, rows: Tensor) -> Sample:
        """Some of the rows."""
        part = Sample(self.mahalanobis.index_select(0, rows), self.weight.index_select(0, rows))
        if self.plain:
            vars(part)["plain"] = True
        return part

    def columns(self, keypoints: Array) -> Sample:
        """Some of the keypoints."""
        distance = _taken(self.mahalanobis, keypoints)
        # Nobody reads plain weights, whose total is known.
        weight = distance.new_ones(()).expand_as(distance) if self.plain else _taken(self.weight, keypoints)
        part = Sample(distance, weight)
        known = {name: getattr(self, name)[keypoints] for name in ("largest", "total", "mean")}
        vars(part).update(plain=self.plain, **known)
        return part

    def blocks(self) -> list[_Block]:
        """Distances, and weights unless all are 1, in blocks (n, several times K) that stay in the cache.

        Several rows lie side by side: numpy takes long to start anew for every row of some keypoints.
        """
        distance = as_array(self.mahalanobis)
        weight = None if self.plain else as_array(self.weight)
        several = max(1, _WIDTH // distance.shape[1])
        size, whole = several * _HEIGHT, len(distance) // several * several
        bounds = [(begin, min(begin + size, whole), several) for begin in range(0, whole, size)]
        if whole < len(distance):
            bounds.append((whole, len(distance), 1))
        return [
            (_wide(distance[begin:end], times), None if weight is None else _wide(weight[begin:end], times))
            for begin, end, times in bounds
        ]

    def pooled(self) -> Sample:
        """All keypoints as one (N * K, 1)."""
        return Sample(self.mahalanobis.reshape(-1, 1), self.weight.reshape(-1, 1))

    @property
    def effective(self) -> Tensor:
        """Kish's effective sample size of each keypoint (K,)."""
        total = self.weight.sum(0)
        return torch.where(total > 0, total.square() / self.weight.square().sum(0).clamp_min(_TINY), 0.0)


def _taken(values: Tensor, columns: Array) -> Tensor:
    """Some columns of values (N, K), which numpy takes in a fifth of torch's time."""
    return torch.from_numpy(np.take(as_array(values), columns, 1)).to(values.device)


def _wide(rows: Array, several: int) -> Array:
    """Rows (n, K) side by side, (n / several, several * K)."""
    return rows.reshape(len(rows) // several, several * rows.shape[1])


def _check_shape(name: str, value: Tensor | None, allowed: list[tuple[int, ...]]) -> None:
    if value is not None and tuple(value.shape) not in allowed:
        expected = " or ".join(str(shape) for shape in allowed)
        raise HaloposeError(f"{name} should have shape {expected}, got {tuple(value.shape)}")


def gaussian_temperature(sample: Sample) -> Tensor:
    """tau (K,) that minimises the weighted Gaussian NLL (eq. 12): tau^2 = sum(w m) / (2 sum w)."""
    moment = (sample.weight * sample.mahalanobis).sum(0) / (2 * sample.weight.sum(0))
    return moment.clamp_min(torch.finfo(moment.dtype).tiny).sqrt()


def likeliest_bound(sample: Sample, variance: Tensor) -> float:
    """The bound b for which dispersions times 1 / (1 + variance / b) are the likeliest Gaussians, inf for none.

    variance (N, K): of the dispersions, in the unit of the bound. Each b has temperatures of its own.
    """
    seen, stride = sample.weight.sum(0) > 0, max(1, len(variance) // _BOUND_ROWS)
    weight, square, variance = (
        values[::stride][:, seen] for values in (sample.weight, sample.mahalanobis, variance)
    )
    total = weight.sum(0).clamp_min(_TINY)

    def loss(inverse: float) -> float:
        growth = 1 + inverse * variance  # of squared distances
        temperature = ((weight * square * growth).sum(0) / total).clamp_min(_TINY)
        return float((total * temperature.log()).sum() - (weight * growth.log()).sum())

    best = min(_BOUNDS.tolist(), key=lambda bound: loss(1 / bound))
    return best if loss(0.0) - loss(1 / best) > _WORTH else math.inf


def student_parameters(sample: Sample) -> tuple[Tensor, Tensor]:
    """nu and tau (K,) that minimise the weighted Student-t NLL (eq. 18), nu within [NU_MIN, NU_MAX].

    In two dimensions the squared distance m follows a Lomax law with shape a = nu / 2 and scale
    lam = nu tau^2. For a given lam the best shape is 1 / E[log(1 + m / lam)], which leaves one smooth
    unknown per keypoint for a safeguarded search by Halley's steps. A grid over thinned data finds the valley,
    thinned data lead down into it, and from there one pass over all of the data tells the profile around so well
    that the last steps need no other. The Gaussian limit, nu = NU_MAX, has a closed form and wins where it is
    better.
    """
    with between_pieces(), np.errstate(all="ignore"):  # what overflows is not taken
        return _student_parameters(sample)


def _student_parameters(sample: Sample) -> tuple[Tensor, Tensor]:
    """What is about a number a keypoint is in numpy: steps on so few cost it less than torch."""
    mean = sample.mean
    limit, lower = np.log(as_array(mean) * (NU_MAX / 2)), _lower_bound(sample)
    log_scale, at_end = _best_on_grid(sample.thinned(max(1, len(sample.mahalanobis) // _GRID_ROWS)), limit)
    # No valley, and none beyond where m spreads no more than an exponential law.
    light = at_end.copy()
    if light.any():
        light[at_end] = _spread(sample.columns(np.flatnonzero(at_end))) <= 2
    growth = log_scale  # the last stride is 1
    for stride in _STRIDES:
        if stride == 1 or len(sample.mahalanobis) // stride >= _THINNEST:
            thin = sample.thinned(stride)
            gain = 0.0 if stride == 1 else _THIN_GAIN / len(thin.mahalanobis)
            log_scale, growth = _minimise_profile(thin, log_scale, lower, limit, light, gain)
    gaussian = _nll(growth, log_scale) >= np.log(as_array(mean) / 2) + 1
    nu = np.where(gaussian, NU_MAX, 2 * _shape(growth))
    tau = np.sqrt(np.exp(np.where(gaussian, limit, log_scale)) / nu)
    return torch.from_numpy(nu).to(mean.device), torch.from_numpy(tau).to(mean.device)


def _spread(sample: Sample) -> Array:
    """Mean (K,) of the squares of the squared distances over that of their mean (K,)."""
    mean, squares = as_array(sample.mean), np.zeros(sample.mahalanobis.shape[1])
    for distance, weight in sample.blocks():
        share = distance / np.tile(mean, distance.shape[1] // len(mean))
        squares += _dots(share, share, weight).reshape(-1, len(mean)).sum(0)
    return squares / as_array(sample.total)


def _lower_bound(sample: Sample) -> Array:
    """log lam (K,) below which the NLL can only fall as lam grows."""
    least = sample.mahalanobis.amin(0)
    if not sample.plain or bool((least <= 0).any()):
        least = torch.full_like(least, torch.inf)
        for rows, weights in zip(sample.mahalanobis.split(_CHUNK), sample.weight.split(_CHUNK), strict=True):
            positive = rows > 0 if sample.plain else (rows > 0) & (weights > 0)
            least = torch.minimum(least, torch.where(positive, rows, torch.inf).amin(0))
    return np.log(as_array(least.clamp(_TINY, 1.0))) - 7


def _best_on_grid(sample: Sample, limit: Array) -> tuple[Array, Array]:
    """log lam (K,) of the lowest NLL on a grid up to all but Gaussian tails, and whether that is its end."""
    lower = _lower_bound(sample)
    upper = np.maximum(limit - math.log(NU_MAX / 100), lower)
    grid = np.linspace(lower, upper, _GRID)
    inverse = np.exp(-grid)
    ratio = np.tile(as_array(sample.mahalanobis), _GRID) * inverse.reshape(-1)  # (n, GRID * K)
    if sample.multiplies(inverse):
        growth = _log_of_products(ratio + 1)
    else:
        growth = (np.log1p(ratio) * np.tile(as_array(sample.weight), _GRID)).sum(0)
    best = _nll(growth.reshape(grid.shape) / as_array(sample.total), grid).argmin(0)
    return np.take_along_axis(grid, best[None], 0)[0], best == _GRID - 1


def _shape(growth: Array) -> Array:
    """The best a for G."""
    return np.clip(1 / np.maximum(growth, _TINY), NU_MIN / 2, NU_MAX / 2)


def _nll(growth: Array, log_scale: Array) -> Array:
    """log lam - log 2a + (a + 1) G at the best a: the NLL less the constant of the dispersion."""
    shape = _shape(growth)
    return log_scale - np.log(2 * shape) + (shape + 1) * growth


@dataclass(frozen=True)
class _Profile:
    """The NLL over log lam at the best a, around a point: G = E[log(1 + m / lam)] there (K,), and its
    derivatives by log lam, the first three or all (ORDERS, K)."""

    growth: Array
    derivatives: Array

    @classmethod
    def at(cls, sample: Sample, log_scale: Array) -> _Profile:
        """One pass over the data: means of log(1 + m / lam) and of powers of u = m / (lam + m)."""
        inverse = np.exp(-log_scale)
        work = partial(_sums_of_blocks, inverse=inverse, short=sample.multiplies(inverse))
        totals = np.sum(dealt_out(work, sample.blocks(), _FEWEST_BLOCKS), 0)
        growth, *powers = totals / as_array(sample.total)
        return cls(growth, _DERIVATIVES @ np.stack(powers))

    @cached_property
    def shape(self) -> Array:
        return _shape(self.growth)

    @cached_property
    def free(self) -> Array:
        """Where a is not at an end of its range, and so follows lam: da / d log lam = -a^2 dG / d log lam."""
        return 1 / np.maximum(self.growth, _TINY) == self.shape

    @cached_property
    def slope(self) -> Array:
        """d NLL / d log lam."""
        return 1 + (self.shape + 1) * self.derivatives[0]

    @cached_property
    def curvature(self) -> Array:
        """d^2 NLL / d (log lam)^2."""
        first, second = self.derivatives[:2]
        return (self.shape + 1) * second - np.where(self.free, np.square(self.shape * first), 0.0)

    @cached_property
    def change(self) -> Array:
        """d^3 NLL / d (log lam)^3; 0, which makes Halley's step Newton's, where a is not free."""
        first, second, third = self.derivatives[:3] * self.shape
        return np.where(self.free, third + self.derivatives[2] - 3 * first * second + 2 * first**3, 0.0)

    @property
    def step(self) -> Array:
        """Halley's step in log lam for heavy tails; near the Gaussian, where it suits better, in 1 / lam."""
        in_log = _halley(self.slope, self.curvature, self.change)
        # The same derivatives by 1 / lam, times powers of it.
        bent = self.curvature + self.slope
        shrink = 1 + _halley(-self.slope, bent, -(self.change + 3 * self.curvature + 2 * self.slope))
        in_inverse = np.where(bent > 0, -np.log(np.maximum(shrink, _TINY)), np.inf)
        return np.where(self.shape > 5, in_inverse, in_log)

    def shifted(self, step: Array) -> _Profile:
        """The profile, and three derivatives, a step in log lam away, without another pass over the data.

        G is analytic within pi of any log lam, so that a series of six terms leaves next to nothing of ``_REACH``.
        """
        known = np.concatenate([self.growth[None], self.derivatives, np.zeros((3, len(step)))])
        terms = np.multiply.accumulate(np.concatenate([np.ones((1, len(step))), step / _COUNTS]))
        moved = (known[_SHIFTS] * terms).sum(1)
        return _Profile(moved[0], moved[1:])


def _sums_of_blocks(blocks: Sequence[_Block], inverse: Array, short: bool) -> list[Array]:
    """Sums (ORDERS + 1, K) over each of some blocks, by 1 / lam (K,)."""
    room, found = np.empty(3 * max(distance.size for distance, _ in blocks)), []
    wide = np.tile(inverse, blocks[0][0].shape[1] // len(inverse))
    with np.errstate(all="ignore"):  # what overflows is not taken
        for distance, weight in blocks:
            own = room[: 3 * distance.size].reshape(3, *distance.shape)
            sums = _block_sums(distance, weight, wide[: distance.shape[1]], short, own)
            found.append(sums.reshape(_ORDERS + 1, -1, len(inverse)).sum(1))
    return found


def _block_sums(distance: Array, weight: Array | None, inverse: Array, short: bool, room: Array) -> Array:
    """Sums (ORDERS + 1, C) of log(1 + m / lam) and of powers of u over the rows (n, C) of a block.

    inverse: 1 / lam (C,). short: whether logarithms may be of products. room (3, n, C). Products of
    powers are summed without being written down.
    """
    share, square, cube = room
    ratio, more = np.multiply(distance, inverse, out=share), np.add(share, 1, out=square)
    logs = None if short else np.log1p(ratio, out=cube)
    growth = None if logs is None else _dots(logs, weight)
    np.divide(ratio, more, out=share)
    if growth is None:
        growth = _log_of_products(more)
    np.multiply(share, share, out=square)
    np.multiply(share, square, out=cube)
    sums = [growth, *(_dots(power, weight) for power in room)]
    sums += [_dots(one, other, weight) for one, other in ((square, square), (square, cube), (cube, cube))]
    return np.stack(sums)


def _dots(*factors: Array | None) -> Array:
    """Sums (C,) of the products of those (n, C) that there are."""
    given = [each for each in factors if each is not None]
    return given[0].sum(0) if len(given) == 1 else np.einsum(",".join(["nc"] * len(given)) + "->c", *given)


def _log_of_products(factors: Array) -> Array:
    """Sums (...) of the logarithms of factors (n, ...), most of them of products of sixteen, made in their place.

    A logarithm costs as much as ten multiplications.
    """
    whole = len(factors) >> _FOLDS << _FOLDS
    rest, left = np.log(factors[whole:]).sum(0), factors[:whole]
    for _ in range(_FOLDS):
        half = len(left) // 2
        left = np.multiply(left[:half], left[half:], out=left[:half])
    return rest + np.log(left, out=left).sum(0)


def _halley(first: Array, second: Array, third: Array) -> Array:
    """The step to where a first derivative is zero; Newton's where Halley's is no use, inf without either.

    It leaves the cube of an error, where Newton's leaves the square.
    """
    newton = np.where(second > 0, -first / second, np.inf)
    bent = 1 - first * third / (2 * np.square(second))
    return np.where((bent > 0.5) & (bent < 2), newton / bent, newton)


def _minimise_profile(
    sample: Sample, start: Array, lower: Array, limit: Array, light: Array, gain: float
) -> tuple[Array, Array]:
    """log lam (K,) where the profile's slope is zero, and G there: Halley's steps inside a closing bracket.

    Keypoints with light tails stay where they are. gain: nats that may be left, if more than usual. A step that
    is short enough goes on where the profile can be extrapolated. What that leaves of the slope is about
    (a + 1) E[u] step^6 / 720, with (a + 1) E[u] = 1 where the slope is zero; its square over twice the curvature
    are the nats that another pass would gain. Once most keypoints have settled, passes are over the others alone.
    """
    upper, enough = limit, max(gain, _GAIN)
    current = np.minimum(np.maximum(start, lower), upper)
    for _ in range(_MAX_PASSES):
        profile = _Profile.at(sample, current)
        slope, curvature = profile.slope, profile.curvature
        lower = np.where(slope < 0, current, lower)
        upper = np.where(slope > 0, current, upper)
        aim = current + profile.step
        inside = (aim > lower) & (aim < upper)
        step = np.where(inside, aim, (lower + upper) / 2) - current
        step = np.where(light | (slope == 0), 0.0, step)
        near = inside & (curvature > 0) & (np.abs(step) <= _REACH) & (step != 0)
        for _ in range(_MORE_STEPS):
            correction = profile.shifted(step).step
            more = step + correction
            ahead = near & (current + more > lower) & (current + more < upper) & (np.abs(more) <= _REACH)
            step = np.where(ahead, more, step)
            near &= ahead | (np.abs(correction) <= _CLOSE)  # else it does not settle within reach of this pass
            if not (ahead & (np.abs(correction) > _CLOSE)).any():
                break
        current = current + step
        left = np.where(near, np.square(step**6 / 720) / (2 * curvature), np.abs(slope * step))
        unsettled = np.flatnonzero(left > enough)
        if 2 * len(unsettled) < len(current):
            growth = profile.shifted(step).growth
            if len(unsettled):
                ends = lower[unsettled], upper[unsettled], light[unsettled]
                part = sample.columns(unsettled)
                found = _minimise_profile(part, current[unsettled], *ends, gain)
                current[unsettled], growth[unsettled] = found
            return current, growth
    return current, _Profile.at(sample, current).growth


__all__ = ["NU_MAX", "NU_MIN", "Sample", "gaussian_temperature", "likeliest_bound", "student_parameters"]
