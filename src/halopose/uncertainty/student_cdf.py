"""The distribution function of Student's t, of many values under few degrees of freedom.

In: degrees of freedom (...) and values (..., V). Out: probabilities (..., V), to thirteen digits those of scipy.

With w = t / sqrt(nu + t^2) the tail beyond t is (1 - w^2)^(nu / 2) times a function of w that is analytic beyond
-1: over [0, 1] a polynomial of degree 24 leaves nothing of it. That takes a few hundred calls of scipy's for all
values, where folds and keypoints have a law each and thousands of residuals.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.polynomial import chebyshev
from scipy import special

from halopose.types import Array

_DEGREE = 24
_LARGEST = 20.0  # degrees of freedom up to which that degree is enough
_FEWEST = 200  # values for each kind of degrees of freedom that are worth a polynomial
_FURTHEST = 1e150  # whose square is finite
_STRIDE = 16  # of what is looked at to learn the kinds


def student_cdf(dof: Array, value: Array) -> Array:
    """Probability (..., V) of less than each value under degrees of freedom (...)."""
    kinds = np.unique(dof.reshape(-1)[::_STRIDE])
    if not kinds.size or kinds[-1] > _LARGEST or dof.size < _FEWEST * kinds.size:
        return np.asarray(special.stdtr(dof[..., None], value))
    number = np.minimum(np.searchsorted(kinds, dof), len(kinds) - 1)
    if not np.array_equal(kinds.take(number), dof):
        return np.asarray(special.stdtr(dof[..., None], value))
    columns = np.moveaxis(value, -1, 0)  # every number a keypoint serves all of its values
    size = np.minimum(np.abs(columns), _FURTHEST)
    total = dof + np.square(size)
    place = 2 * size / np.sqrt(total) - 1
    tail = np.zeros_like(place)
    for coefficient in _coefficients(tuple(kinds.tolist()))[::-1]:
        np.multiply(tail, place, out=tail)
        np.add(tail, coefficient.take(number), out=tail)
    tail *= (dof / total) ** (dof / 2)
    return np.moveaxis(np.where(columns > 0, 1 - tail, tail), 0, -1)


@lru_cache(maxsize=8)  # blocks of one law after the other
def _coefficients(kinds: tuple[float, ...]) -> Array:
    """Of powers of 2 w - 1 (DEGREE + 1, n), by degrees of freedom (n,)."""
    dof = np.array(kinds)
    share = (1 + _NODES[:, None]) / 2  # w
    inside = (1 - share) * (1 + share)
    values = special.stdtr(dof, -share * np.sqrt(dof / inside)) / inside ** (dof / 2)
    return np.asarray(_POWERS @ (_SERIES @ values))  # one after the other: their product would round


_NODES = chebyshev.chebpts1(_DEGREE + 1)
_SERIES = np.linalg.inv(chebyshev.chebvander(_NODES, _DEGREE))  # Chebyshev's coefficients of values at nodes
_POWERS = np.zeros_like(_SERIES)  # coefficients of powers of Chebyshev's, whole numbers
for _order in range(_DEGREE + 1):
    _POWERS[: _order + 1, _order] = chebyshev.cheb2poly(np.eye(_DEGREE + 1)[_order])

__all__ = ["student_cdf"]
