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
_LEAST_STRIDE = 8  # thinned data give the pass over all of it a good start
_THINNEST = 256  # rows
_NEAR = 0.12  # in log lam; standard error of thinned data from where that pass settles
_NEAR_ENOUGH = 0.165  # that of the grid from where it mostly does, and less is not worth a step in between
_MANY_MOMENTS = 4.0  # shapes beyond have a fourth moment, hence the second tells them well
_MOST_SPREAD = 3.0  # E[m^2] / E[m]^2 of that shape
_GRID = 24
_GRID_ROWS = 768
_MARKS = np.linspace(0, 1, _GRID)[:, None]  # of the grid, from its lower to its upper end
_REACH = 1.0  # in log lam; so far the profile can be extrapolated
_MORE_STEPS = 4  # that are taken on the extrapolated profile, for nothing
_CLOSE = 0.25  # of the correction whose cube, about what it leaves, costs the nats that may be left; the last one
_CLOSE_AT_MOST = 0.1  # in log lam
_GAIN = 1e-11  # nats that may be left
_THIN_GAIN = 0.05  # the same of thinned data, over the number of rows: chance moves them by more than that
_MAX_PASSES = 100
_CHUNK = 8192  # rows that stay in the cache during a pass
_WIDTH = 1024  # numbers side by side
_SIZE = 128 * _WIDTH  # numbers that stay in the cache during a pass
_FEWEST_BLOCKS = 8  # that a thread is started for: to start it takes as long as one or two
_ORDERS = 6  # powers of u whose means a pass gives
_FOLDS = 4  # times that rows are multiplied in pairs before their logarithm is taken
_LARGEST_FACTOR = 1e18  # of 2^4 that are multiplied, and one over the least, so that their product stays finite
_LEAST_RATIO = 1e-3  # on average, of distances to lam: below it lam + m loses digits of m
_NEAR_GAUSSIAN = 5.0  # shapes beyond are
_NARROWEST = 1e-30  # largest u, whose sixth power can still be divided by
_TINY = 1e-300
_BOUNDS = np.geomspace(0.1, 1e3, 81)  # among which one is sought: likelihoods are flat there
_BOUND_ROWS = 50_000  # as many tell
_WORTH = 10.0  # nats that a bound must bring
# Derivatives of E[log(1 + m / lam)] by log lam, as sums of E[u], E[u^2], ...: of p(u) it is -u (1 - u) p'(u).
_DERIVATIVES = np.array([[-1, 0, 0], [1, -1, 0], [-1, 3, -2]], dtype=float)
_NODES = (1 - np.cos(np.pi * (np.arange(_ORDERS + 1) + 0.5) / (_ORDERS + 1))) / 2  # Chebyshev's, of 0 to 1
_WAVES = np.cos(np.arange(_ORDERS - 2, _ORDERS + 1)[:, None] * np.arccos(1 - 2 * _NODES))  # the last three of T_k
_OF_MOMENTS = np.linalg.inv(np.vander(_NODES, increasing=True).T)  # weights of the nodes by 1, E[x], E[x^2], ...

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
    def even(self) -> bool:
        """Whether all weights are 1."""
        return bool((self.weight == 1).all())

    @cached_property
    def plain(self) -> bool:
        """Whether all weights are 1, or 0 at a distance of 0: then sums need no weights."""
        return self.even or bool(((self.weight == 1) | ((self.weight == 0) & (self.mahalanobis == 0))).all())

    @cached_property
    def largest(self) -> Tensor:
        """The largest squared distance (K,)."""
        return self.mahalanobis.amax(0)

    def multiplies(self, scale: Array) -> bool:
        """Whether logarithms of scale (..., K) + distances can be of products of sixteen, unweighed.

        These must stay finite, and distances must not be lost beside the scale.
        """
        if not self.plain:
            return False
        largest, mean = as_array(self.largest), as_array(self.mean)
        finite = (scale > 1 / _LARGEST_FACTOR) & (scale + largest < _LARGEST_FACTOR)
        return bool((finite & (mean > _LEAST_RATIO * scale)).all())

    @cached_property
    def total(self) -> Tensor:
        """Sum of the weights (K,)."""
        if self.even:
            rows, keypoints = self.weight.shape
            return self.weight.new_full((keypoints,), max(rows, _TINY))
        return self.weight.sum(0).clamp_min(_TINY)

    @cached_property
    def mean(self) -> Tensor:
        """Mean (K,) of the squared distances."""
        rows = self.mahalanobis if self.plain else self.weight * self.mahalanobis
        return (rows.sum(0) / self.total).clamp_min(_TINY)

    @cached_property
    def lowest(self) -> Array:
        """log lam (K,) below which the NLL can only fall as lam grows."""
        distance, weight = as_array(self.mahalanobis), as_array(self.weight)
        least = distance.min(0)
        if not self.plain or (least <= 0).any():
            least = np.full_like(least, np.inf)
            for begin in range(0, len(distance), _CHUNK):
                rows = distance[begin : begin + _CHUNK]
                positive = rows > 0 if self.plain else (rows > 0) & (weight[begin : begin + _CHUNK] > 0)
                least = np.minimum(least, np.where(positive, rows, np.inf).min(0))
        return np.log(np.minimum(np.maximum(least, _TINY), 1.0)) - 7

    def thinned(self, stride: int) -> Sample:
        """Every so many-th row. What tells how sums may be made, the mean and the largest, remain those of all."""
        if stride == 1:
            return self
        thin = Sample(self.mahalanobis[::stride].contiguous(), self.weight[::stride])
        vars(thin).update(even=self.even, plain=self.plain, mean=self.mean, largest=self.largest)
        return thin

    def at(self, rows: Tensor) -> Sample:
        """Some of the rows."""
        part = Sample(self.mahalanobis.index_select(0, rows), self.weight.index_select(0, rows))
        vars(part).update({name: True for name in ("even", "plain") if getattr(self, name)})
        return part

    def columns(self, keypoints: Array) -> Sample:
        """Some of the keypoints."""
        if len(keypoints) == self.mahalanobis.shape[1]:
            return self
        distance = _taken(self.mahalanobis, keypoints)
        # Nobody reads plain weights, whose total is known.
        weight = distance.new_ones(()).expand_as(distance) if self.plain else _taken(self.weight, keypoints)
        part = Sample(distance, weight)
        known = {name: getattr(self, name)[keypoints] for name in ("largest", "total", "mean")}
        vars(part).update(even=self.even, plain=self.plain, **known)
        return part

    @cached_property
    def wide(self) -> list[_Block]:
        """Distances, and weights unless all are 1: several rows side by side (n, several * K), and the rest.

        Numpy takes long to start anew for every row of some keypoints.
        """
        distance = as_array(self.mahalanobis)
        weight = None if self.plain else as_array(self.weight)
        several = max(1, _WIDTH // distance.shape[1])
        whole = len(distance) // several * several
        bounds = [(0, whole, several), (whole, len(distance), 1)]
        return [
            (_wide(distance[begin:end], times), None if weight is None else _wide(weight[begin:end], times))
            for begin, end, times in bounds
            if begin < end
        ]

    @cached_property
    def blocks(self) -> list[_Block]:
        """What is wide in blocks that stay in the cache."""
        return [
            (distance[begin : begin + height], None if weight is None else weight[begin : begin + height])
            for distance, weight in self.wide
            for height in [max(1, _SIZE // distance.shape[1])]
            for begin in range(0, len(distance), height)
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
    unknown per keypoint for a safeguarded search by Halley's steps. A grid over thinned data finds the valley;
    where it is flat more of the data, or near the Gaussian their spread, lead down into it. From there one
    pass over all of the data tells the profile around so well that the last steps need no other. The Gaussian
    limit, nu = NU_MAX, has a closed form and wins where it is better.
    """
    with between_pieces(), np.errstate(all="ignore"):  # what overflows is not taken
        return _student_parameters(sample)


def _student_parameters(sample: Sample) -> tuple[Tensor, Tensor]:
    """What is about a number a keypoint is in numpy: steps on so few cost it less than torch."""
    mean = sample.mean
    limit = np.log(as_array(mean) * (NU_MAX / 2))
    grid = sample.thinned(max(1, len(sample.mahalanobis) // _GRID_ROWS))
    log_scale, growth, at_end = _best_on_grid(grid, limit)
    shape = _shape(growth)
    spread = _spread_where(sample, shape > _MANY_MOMENTS)
    known = (spread > 2) & (spread < _MOST_SPREAD)
    log_scale = np.where(known, np.log(as_array(mean) * spread / (spread - 2)), log_scale)
    light = at_end & (spread <= 2)  # no valley on the grid, and none beyond
    log_scale = _led(sample, log_scale, limit, shape, ~(known | light))
    log_scale, growth = _minimise_profile(sample, log_scale, light, _GAIN, *_anywhere(limit))
    gaussian = _nll(growth, log_scale) >= np.log(as_array(mean) / 2) + 1
    nu = np.where(gaussian, NU_MAX, 2 * _shape(growth))
    tau = np.sqrt(np.exp(np.where(gaussian, limit, log_scale)) / nu)
    return torch.from_numpy(nu).to(mean.device), torch.from_numpy(tau).to(mean.device)


def _anywhere(limit: Array) -> tuple[Array, Array]:
    """The bracket (K,), (K,) of log lam before anything is known of it."""
    return np.full_like(limit, -np.inf), limit


def _led(sample: Sample, log_scale: Array, limit: Array, shape: Array, which: Array) -> Array:
    """log lam (K,), of keypoints ``which`` (K,) from thinned data, with as many rows as most shapes a (K,) need.

    The variance of log lam is (a + 2) (a + 1)^2 / a over the number of rows.
    """
    columns, rows = np.flatnonzero(which), len(sample.mahalanobis)
    if not len(columns) or rows < _LEAST_STRIDE * _THINNEST:
        return log_scale
    usual = float(np.sort(shape[columns])[len(columns) // 2])
    variance = (usual + 2) * (usual + 1) ** 2 / usual  # times the number of rows
    if variance / _GRID_ROWS <= _NEAR_ENOUGH**2:
        return log_scale
    thin = sample.thinned(max(_LEAST_STRIDE, int(rows / max(variance / _NEAR**2, _THINNEST)))).columns(columns)
    found = log_scale.copy()
    gain = _THIN_GAIN / len(thin.mahalanobis)
    light = np.zeros(len(columns), dtype=bool)
    found[columns], _ = _minimise_profile(thin, log_scale[columns], light, gain, *_anywhere(limit[columns]))
    return found


def _spread_where(sample: Sample, which: Array) -> Array:
    """E[m^2] / E[m]^2 (K,) of some keypoints (K,), nan of others; of a Lomax law it is 2 (a - 1) / (a - 2)."""
    spread, columns = np.full(len(which), np.nan), np.flatnonzero(which)
    if 2 * len(columns) > len(which):  # to take so many costs more than to look at all
        spread[columns] = _spread(sample)[columns]
    elif len(columns):
        spread[columns] = _spread(sample.columns(columns))
    return spread


def _spread(sample: Sample) -> Array:
    """Mean (K,) of the squares of the squared distances over the square of their mean."""
    mean, squares = as_array(sample.mean), np.zeros(sample.mahalanobis.shape[1])
    for distance, weight in sample.wide:
        squares += _dots(distance, distance, weight).reshape(-1, len(mean)).sum(0)
    return squares / as_array(sample.total) / mean / mean


def _best_on_grid(sample: Sample, limit: Array) -> tuple[Array, Array, Array]:
    """log lam (K,) of the lowest NLL on a grid up to all but Gaussian tails, G there, and if it is its end."""
    lower = sample.lowest
    upper = np.maximum(limit - math.log(NU_MAX / 100), lower)
    grid = lower + _MARKS * (upper - lower)
    scale = np.exp(grid)
    distance = np.tile(as_array(sample.mahalanobis).astype(np.float64, copy=False), _GRID)  # (n, GRID * K)
    if sample.multiplies(scale):
        distance += scale.reshape(-1)
        growth = _log_of_products(distance).reshape(grid.shape) - len(distance) * grid
    else:
        distance /= scale.reshape(-1)
        growth = _dots(np.log1p(distance), np.tile(as_array(sample.weight), _GRID)).reshape(grid.shape)
    growth /= as_array(sample.total)
    nll, columns = _nll(growth, grid), np.arange(grid.shape[1])
    best = nll.argmin(0)
    middle = np.minimum(np.maximum(best, 1), _GRID - 2)
    before, here, after = nll[middle - 1, columns], nll[middle, columns], nll[middle + 1, columns]
    # Where the lowest has neighbours on both sides a parabola through the three has its minimum between these.
    aside = np.where(middle == best, (before - after) / (2 * np.maximum(before - 2 * here + after, _TINY)), 0.0)
    return grid[best, columns] + aside * (grid[1] - grid[0]), growth[best, columns], best == _GRID - 1


def _shape(growth: Array) -> Array:
    """The best a for G."""
    return np.minimum(np.maximum(1 / np.maximum(growth, _TINY), NU_MIN / 2), NU_MAX / 2)


def _nll(growth: Array, log_scale: Array) -> Array:
    """log lam - log 2a + (a + 1) G at the best a: the NLL less the constant of the dispersion."""
    shape = _shape(growth)
    return log_scale - np.log(2 * shape) + (shape + 1) * growth


@dataclass(frozen=True)
class _Profile:
    """The NLL over log lam at the best a, at a point: G = E[log(1 + m / lam)] there (K,), and its first three
    derivatives by log lam (3, K), from the means of u, u^2 and u^3 (3, K), u = m / (lam + m)."""

    growth: Array
    powers: Array

    @cached_property
    def derivatives(self) -> Array:
        return _DERIVATIVES @ self.powers

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
        first, second, _ = self.derivatives
        return (self.shape + 1) * second - np.where(self.free, np.square(self.shape * first), 0.0)

    @cached_property
    def change(self) -> Array:
        """d^3 NLL / d (log lam)^3; 0, which makes Halley's step Newton's, where a is not free."""
        first, second, third = self.derivatives * self.shape
        return np.where(self.free, third + self.derivatives[2] - 3 * first * second + 2 * first**3, 0.0)

    @property
    def step(self) -> Array:
        """Halley's step in log lam for heavy tails; near the Gaussian, where it suits better, in 1 / lam."""
        if not (self.shape > _NEAR_GAUSSIAN).any():
            return self.correction
        # The same derivatives by 1 / lam, times powers of it.
        bent = self.curvature + self.slope
        shrink = 1 + _halley(-self.slope, bent, -(self.change + 3 * self.curvature + 2 * self.slope))
        in_inverse = np.where(bent > 0, -np.log(np.maximum(shrink, _TINY)), np.inf)
        return np.where(self.shape > _NEAR_GAUSSIAN, in_inverse, self.correction)

    @property
    def correction(self) -> Array:
        """Halley's step in log lam, which suits all tails where it is short."""
        return _halley(self.slope, self.curvature, self.change)


@dataclass(frozen=True)
class _Pass:
    """What one pass over the data tells of the profile around log lam (K,): G there (K,), the means of the first
    powers of u = m / (lam + m) (ORDERS, K), and the largest u (K,)."""

    growth: Array
    powers: Array
    widest: Array

    @classmethod
    def at(cls, sample: Sample, log_scale: Array) -> _Pass:
        scale, total, largest = np.exp(log_scale), as_array(sample.total), as_array(sample.largest)
        short = sample.multiplies(scale)
        work = partial(_sums_of_blocks, scale=scale, short=short)
        sums = np.sum(dealt_out(work, sample.blocks, _FEWEST_BLOCKS), 0)
        if short:
            sums[0] -= len(sample.mahalanobis) * log_scale
        sums /= total
        return cls(sums[0], sums[1:], np.maximum(largest / (scale + largest), _NARROWEST))

    @property
    def here(self) -> _Profile:
        return _Profile(self.growth, self.powers[:3])

    @cached_property
    def nodes(self) -> tuple[Array, Array]:
        """Values of u (ORDERS + 1, K) and weights of as many, which have the moments of the data's."""
        shares = self.powers / np.multiply.accumulate(np.broadcast_to(self.widest, self.powers.shape))
        moments = np.concatenate([np.ones((1, len(self.widest))), shares])
        return _NODES[:, None] * self.widest, _OF_MOMENTS @ moments

    def shifted(self, step: Array) -> _Profile:
        """The profile a step in log lam away, without another pass over the data.

        It takes the mean of functions of u that are analytic on all of [0, 1], hence all but polynomials, and
        polynomials have the mean that they have at the nodes.
        """
        nodes, weights = self.nodes
        shrink = np.exp(-step)
        more = 1 + nodes * (shrink - 1)
        share = nodes * shrink / more
        square = share * share
        means = (np.stack([np.log(more), share, square, square * share]) * weights).sum(1)
        return _Profile(self.growth + means[0], means[1:])

    def error(self, step: Array) -> Array:
        """About what ``shifted`` leaves of E[u] (K,): how well polynomials do between 0 and the largest u.

        With w = 1 + widest (exp(-step) - 1) and q = (sqrt(w) - 1) / (sqrt(w) + 1) the logarithm that a step adds
        to that of G is 2 sum_k q^k / k (1 - T_k) with Chebyshev's polynomials T_k of 1 - 2 u / widest. Nodes know
        the means of T_k for k <= ORDERS; the next, and those that nodes take them for, are taken to be no larger
        than the last three.
        """
        root = np.sqrt(1 + self.widest * np.expm1(-step))
        ratio = np.abs(root - 1) / (root + 1)
        slope = self.widest * np.exp(-step) / (root * np.square(root + 1))
        return 4 * np.abs(_WAVES @ self.nodes[1]).max(0) * slope * ratio**_ORDERS / (1 - ratio)


def _sums_of_blocks(blocks: Sequence[_Block], scale: Array, short: bool) -> list[Array]:
    """Sums (ORDERS + 1, K) over each of some blocks, by lam (K,)."""
    room, wide, found = np.empty(3 * max(distance.size for distance, _ in blocks)), np.empty((0, 0)), []
    with np.errstate(all="ignore"):  # what overflows is not taken
        for distance, weight in blocks:
            rows, columns = distance.shape
            if wide.shape[1] != columns or len(wide) < rows:
                wide = np.tile(scale, (rows, columns // len(scale)))
            own = wide[:rows], room[: 3 * distance.size].reshape(3, rows, columns)
            sums = _short_sums(distance, *own) if short else _block_sums(distance, weight, *own)
            found.append(np.concatenate(sums).reshape(_ORDERS + 1, -1, len(scale)).sum(1))
    return found


def _short_sums(distance: Array, scale: Array, room: Array) -> list[Array]:
    """ORDERS + 1 sums (C,) of log(lam + m) and of powers of u over the rows (n, C) of a block, all of weight 1.

    scale: lam (n, C), written out as numpy adds equal shapes faster. room (3, n, C). Powers beyond the first take
    half the digits and half the time: only what the profile bends by depends on them.
    """
    whole, share, _ = room
    np.divide(distance, np.add(distance, scale, out=whole), out=share)
    sums = [_log_of_products(whole), share.sum(0)]
    single, square, cube, *_ = room.view(np.float32).reshape(6, *distance.shape)  # cubes lie where shares did
    np.copyto(single, share, casting="same_kind")
    np.multiply(single, single, out=square)
    np.multiply(single, square, out=cube)
    return sums + _sums_of_powers(square, cube, None)


def _block_sums(distance: Array, weight: Array | None, scale: Array, room: Array) -> list[Array]:
    """ORDERS + 1 sums (C,) of log(1 + m / lam) and of powers of u over the rows (n, C) of a block, weighed.

    scale: lam (n, C). room (3, n, C).
    """
    share, square, cube = room
    ratio = np.divide(distance, scale, out=share)
    growth = _dots(np.log1p(ratio, out=cube), weight)
    np.divide(ratio, np.add(ratio, 1, out=square), out=share)
    np.multiply(share, share, out=square)
    np.multiply(share, square, out=cube)
    return [growth, _dots(share, weight), *_sums_of_powers(square, cube, weight)]


def _sums_of_powers(square: Array, cube: Array, weight: Array | None) -> list[Array]:
    """Sums (C,) of u^2 to u^6 from u^2 and u^3 (n, C): products are summed without being written down."""
    pairs = ((square, square), (square, cube), (cube, cube))
    return [_dots(square, weight), _dots(cube, weight), *(_dots(one, other, weight) for one, other in pairs)]


def _dots(*factors: Array | None) -> Array:
    """Sums (C,) of the products of those (n, C) that there are."""
    given = [each for each in factors if each is not None]
    return given[0].sum(0) if len(given) == 1 else np.einsum(",".join(["nc"] * len(given)) + "->c", *given)


def _log_of_products(factors: Array) -> Array:
    """Sums (...) of the logarithms of factors (n, ...), most of them of products of sixteen, made in their place.

    A logarithm costs as much as several multiplications.
    """
    for _ in range(_FOLDS):
        half = (len(factors) + 1) // 2  # of an odd number one stays alone
        pairs = len(factors) - half
        np.multiply(factors[:pairs], factors[half:], out=factors[:pairs])
        factors = factors[:half]
    return np.log(factors, out=factors).sum(0)


def _halley(first: Array, second: Array, third: Array) -> Array:
    """The step to where a first derivative is zero; Newton's where Halley's is no use, inf without either.

    It leaves the cube of an error, where Newton's leaves the square.
    """
    newton = np.where(second > 0, -first / second, np.inf)
    bent = 1 - first * third / (2 * np.square(second))
    return np.where((bent > 0.5) & (bent < 2), newton / bent, newton)


def _minimise_profile(
    sample: Sample,
    start: Array,
    light: Array,
    gain: float,
    lower: Array,
    upper: Array,
    passes: int = _MAX_PASSES,
) -> tuple[Array, Array]:
    """log lam (K,) where the profile's slope is zero, and G there: Halley's steps inside a closing bracket.

    Keypoints with light tails stay where they are. gain: nats that may be left. lower, upper: the bracket, whose
    lower end is not looked for before it is needed. A step that is short enough goes on where the profile can be
    extrapolated. The square of what may be left of the slope there over twice the curvature are the nats that
    another pass would gain. Once most keypoints have settled, passes are over the others alone.
    """
    current = np.minimum(np.maximum(start, lower), upper)
    seen = _Pass.at(sample, current)
    if not passes:
        return current, seen.growth
    profile = seen.here
    slope, curvature = profile.slope, profile.curvature
    lower = np.where(slope < 0, current, lower)
    upper = np.where(slope > 0, current, upper)
    aim = current + profile.step
    inside, still = (aim > lower) & (aim < upper), light | (slope == 0)
    if not (inside | still).all():
        lower = _raised(lower, sample, upper)
    step = np.where(still, 0.0, np.where(inside, aim, (lower + upper) / 2) - current)
    near = inside & (curvature > 0) & (np.abs(step) <= _REACH) & ~still
    close = np.minimum(_CLOSE * (2 * gain / np.abs(curvature)) ** (1 / 6), _CLOSE_AT_MOST)
    for _ in range(_MORE_STEPS):
        correction = seen.shifted(step).correction
        more = step + correction
        ahead = near & (current + more > lower) & (current + more < upper) & (np.abs(more) <= _REACH)
        step = np.where(ahead, more, step)
        if not (ahead & (np.abs(correction) > close)).any():
            break
    end = seen.shifted(step)
    slope_left = np.abs(end.slope) + (end.shape + 1) * seen.error(step)
    left = np.where(near, np.square(slope_left) / (2 * np.maximum(end.curvature, _TINY)), np.abs(slope * step))
    # What is not worth a step that is too long to be extrapolated stays where G is known.
    current = current + np.where(near | (left > gain), step, 0.0)
    growth, unsettled = np.where(near, end.growth, seen.growth), np.flatnonzero(left > gain)
    if len(unsettled):
        if 2 * len(unsettled) >= len(current):
            unsettled = np.arange(len(current))
        part, low, high = sample.columns(unsettled), lower[unsettled], upper[unsettled]
        low = _raised(low, part, high)
        current[unsettled], growth[unsettled] = _minimise_profile(
            part, current[unsettled], light[unsettled], gain, low, high, passes - 1
        )
    return current, growth


def _raised(lower: Array, sample: Sample, upper: Array) -> Array:
    """The lower end (K,) of a bracket with what the least distance tells of it."""
    return np.minimum(np.maximum(lower, sample.lowest), upper)


__all__ = ["NU_MAX", "NU_MIN", "Sample", "gaussian_temperature", "likeliest_bound", "student_parameters"]
