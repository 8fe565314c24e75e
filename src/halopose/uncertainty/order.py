"""Sorting that keeps ties in the order given, and is fast where there are none."""

from __future__ import annotations

import numpy as np

from halopose.types import Array


def rising_order(values: Array) -> Array:
    """Indices (N,) that sort the values; ties keep the order given."""
    order = np.argsort(values)  # not stable, but several times faster
    ordered = values[order]
    return np.argsort(values, kind="stable") if (ordered[1:] == ordered[:-1]).any() else order


def falling_order(confidence: Array) -> Array:
    """Indices (N,) by falling confidence; ties keep the order given."""
    return rising_order(-confidence)
