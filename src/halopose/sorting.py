"""Stable sort orders: ties keep the given order."""

from __future__ import annotations

import numpy as np

from halopose.types import Array


def rising_order(values: Array) -> Array:
    """Return the indices (N,) that sort values in ascending order; NaN comes last."""
    order = np.argsort(values)  # several times faster than a stable sort, and equal to it if no values are
    ordered = values.take(order)
    return order if np.all(ordered[1:] > ordered[:-1]) else np.argsort(values, kind="stable")


def falling_order(values: Array) -> Array:
    """Return the indices (N,) that sort values in descending order; NaN comes last."""
    return rising_order(-values)


def whole_order(numbers: Array) -> Array:
    """Return the indices (N,) that sort non-negative integers in ascending order."""
    if numbers.max(initial=0) <= np.iinfo(np.uint16).max:
        numbers = numbers.astype(np.uint16)  # NumPy uses a faster radix sort for 16-bit integers
    return np.argsort(numbers, kind="stable")
