"""Corners and edges of a runway in runway axes."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from halopose.types import Array

# Left side, right side and threshold, each by the indices of the corners at its ends.
RUNWAY_EDGES = ((0, 3), (1, 2), (0, 1))


def runway_corners(length: float, width: float, *, heights: ArrayLike = 0.0, displaced: float = 0.0) -> Array:
    """Return the near-left, near-right, far-right and far-left corner (4, 3) in runway axes.

    Args:
        length: length in metres.
        width: width in metres.
        heights: metres above the landing threshold, one for all corners or one for each. Example: a runway of 2,500 m
            that rises by 0.1 % has (0, 0, 2.5, 2.5).
        displaced: metres of pavement before the landing threshold. Set it where the pavement is not marked as unusable.
    """
    half = width / 2
    corners = np.array([[-displaced, half, 0.0], [-displaced, -half, 0.0], [length, -half, 0.0], [length, half, 0.0]])
    corners[:, 2] = heights
    return corners
