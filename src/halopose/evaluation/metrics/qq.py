"""Quantile-quantile points: is the shape right, out into the tails? (paper, appendix D.2)

In: a statistic (N,) that should follow a reference law, and the law's quantile function.
Out: theoretical and empirical quantiles at a few hundred of the N plotting positions (n - 1/2) / N.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from halopose.types import Array


def qq_points(statistic: Array, quantile: Callable[[Array], Array], points: int = 200) -> tuple[Array, Array]:
    """(theoretical, empirical), at most ``points`` each, the extremes always among them.

    Half of the points are spread evenly over the ranks, half pile up towards both ends, where tails show.
    """
    return np.asarray(quantile(qq_positions(len(statistic), points))), qq_values(statistic, points)


def qq_positions(count: int, points: int = 200) -> Array:
    """Probabilities of the theoretical quantiles of ``qq_points``, the same for all samples of that size."""
    return np.asarray((_ranks(count, points) + 0.5) / count)


def qq_values(statistic: Array, points: int = 200, *, presorted: bool = False) -> Array:
    """The empirical quantiles of ``qq_points``; ``presorted`` samples rise already."""
    ordered = statistic if presorted else np.sort(statistic)
    return ordered[_ranks(len(statistic), points)]


@lru_cache(maxsize=256)
def _ranks(count: int, points: int) -> Array:
    """Which of so many sorted values are shown."""
    if count <= points:
        return np.arange(count)
    even = np.linspace(0, 1, max(points - points // 2, 1))
    angle = np.linspace(0, np.pi, points // 2)
    ends = (1 - np.cos(np.pi * (1 - np.cos(angle)) / 2)) / 2
    chosen = np.concatenate([[0.0, 1.0], even, ends])[: max(points, 2)]
    return np.unique(np.round(chosen * (count - 1)).astype(np.int64))
