"""The Student-t's likelihood over its scale, at the best degrees of freedom, as one pass over the data tells it.

In two dimensions the squared distance m follows a Lomax law with shape a = nu / 2 and scale lam = nu tau^2; with
u = m / (lam + m) all derivatives by log lam are means of powers of u.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from halopose.arrays import as_array
from halopose.calibration.estimation.sample import TINY, Block, Sample
from halopose.parallel import map_chunks
from halopose.types import Array

NU_MIN = 2 + 1e-9
NU_MAX = 1e7
_FEWEST_BLOCKS = 8  # that a thread is started for: to start it takes as long as one or two
_ORDERS = 6  # powers of u whose means a pass gives
_FOLDS = 4  # times that rows are multiplied in pairs before their logarithm is taken
_NEAR_GAUSSIAN = 5.0  # shapes beyond are
_NARROWEST = 1e-30  # largest u, whose sixth power can still be divided by
# Derivatives of E[log(1 + m / lam)] by log lam, as sums of E[u], E[u^2], ...: of p(u) it is -u (1 - u) p'(u).
_DERIVATIVES = np.array([[-1, 0, 0], [1, -1, 0], [-1, 3, -2]], dtype=float)
_NODES = (1 - np.cos(np.pi * (np.arange(_ORDERS + 1) + 0.5) / (_ORDERS + 1))) / 2  # Chebyshev's, of 0 to 1
_WAVES = np.cos(np.arange(_ORDERS - 2, _ORDERS + 1)[:, None] * np.arccos(1 - 2 * _NODES))  # the last three of T_k
_OF_MOMENTS = np.linalg.inv(np.vander(_NODES, increasing=True).T)  # weights of the nodes by 1, E[x], E[x^2], ...


def best_shape(growth: Array) -> Array:
    """The best a for G."""
    return np.minimum(np.maximum(1 / np.maximum(growth, TINY), NU_MIN / 2), NU_MAX / 2)


def profile_nll(growth: Array, log_scale: Array) -> Array:
    """log lam - log 2a + (a + 1) G at the best a: the NLL less the constant of the dispersion."""
    shape = best_shape(growth)
    return log_scale - np.log(2 * shape) + (shape + 1) * growth


@dataclass(frozen=True)
class Profile:
    """The NLL over log lam at the best a, at a point: G = E[log(1 + m / lam)] there (K,), and its first three
    derivatives by log lam (3, K), from the means of u, u^2 and u^3 (3, K), u = m / (lam + m)."""

    growth: Array
    powers: Array

    @cached_property
    def derivatives(self) -> Array:
        return _DERIVATIVES @ self.powers

    @cached_property
    def shape(self) -> Array:
        return best_shape(self.growth)

    @cached_property
    def free(self) -> Array:
        """Where a is not at an end of its range, and so follows lam: da / d log lam = -a^2 dG / d log lam."""
        return 1 / np.maximum(self.growth, TINY) == self.shape

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
        in_inverse = np.where(bent > 0, -np.log(np.maximum(shrink, TINY)), np.inf)
        return np.where(self.shape > _NEAR_GAUSSIAN, in_inverse, self.correction)

    @property
    def correction(self) -> Array:
        """Halley's step in log lam, which suits all tails where it is short."""
        return _halley(self.slope, self.curvature, self.change)


@dataclass(frozen=True)
class Pass:
    """What one pass over the data tells of the profile around log lam (K,): G there (K,), the means of the first
    powers of u = m / (lam + m) (ORDERS, K), and the largest u (K,)."""

    growth: Array
    powers: Array
    widest: Array

    @classmethod
    def at(cls, sample: Sample, log_scale: Array) -> Pass:
        scale, total, largest = np.exp(log_scale), as_array(sample.total), as_array(sample.largest)
        short = sample.multiplies(scale)
        work = partial(_sums_of_blocks, scale=scale, short=short)
        sums = np.sum(map_chunks(work, sample.blocks, _FEWEST_BLOCKS), 0)
        if short:
            sums[0] -= len(sample.mahalanobis) * log_scale
        sums /= total
        return cls(sums[0], sums[1:], np.maximum(largest / (scale + largest), _NARROWEST))

    @property
    def here(self) -> Profile:
        return Profile(self.growth, self.powers[:3])

    @cached_property
    def nodes(self) -> tuple[Array, Array]:
        """Values of u (ORDERS + 1, K) and weights of as many, which have the moments of the data's."""
        shares = self.powers / np.multiply.accumulate(np.broadcast_to(self.widest, self.powers.shape))
        moments = np.concatenate([np.ones((1, len(self.widest))), shares])
        return _NODES[:, None] * self.widest, _OF_MOMENTS @ moments

    def shifted(self, step: Array) -> Profile:
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
        return Profile(self.growth + means[0], means[1:])

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


def _sums_of_blocks(blocks: Sequence[Block], scale: Array, short: bool) -> list[Array]:
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
    sums = [log_of_products(whole), share.sum(0)]
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
    growth = dots(np.log1p(ratio, out=cube), weight)
    np.divide(ratio, np.add(ratio, 1, out=square), out=share)
    np.multiply(share, share, out=square)
    np.multiply(share, square, out=cube)
    return [growth, dots(share, weight), *_sums_of_powers(square, cube, weight)]


def _sums_of_powers(square: Array, cube: Array, weight: Array | None) -> list[Array]:
    """Sums (C,) of u^2 to u^6 from u^2 and u^3 (n, C): products are summed without being written down."""
    pairs = ((square, square), (square, cube), (cube, cube))
    return [dots(square, weight), dots(cube, weight), *(dots(one, other, weight) for one, other in pairs)]


def dots(*factors: Array | None) -> Array:
    """Sums (C,) of the products of those (n, C) that there are."""
    given = [each for each in factors if each is not None]
    return given[0].sum(0) if len(given) == 1 else np.einsum(",".join(["nc"] * len(given)) + "->c", *given)


def log_of_products(factors: Array) -> Array:
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
