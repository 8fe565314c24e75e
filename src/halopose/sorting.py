"""Stable sort orders: ties keep the given order."""

from __future__ import annotations

import numpy as np

from halopose.types import Array


def rising_order(values: Array) -> Array:
    """Indices (N,) that sort values in rising order; NaN comes last."""
    return np.argsort(values, kind="stable")


def falling_order(values: Array) -> Array:
    """Indices (N,) that sort values in falling order; NaN comes last."""
    return np.argsort(-values, kind="stable")


def whole_order(numbers: Array) -> Array:
    """Indices (N,) that sort non-negative integers in rising order."""
    if numbers.max(initial=0) <= np.iinfo(np.uint16).max:
        numbers = numbers.astype(np.uint16)  # sorted by counting, much faster than by comparing
    return np.argsort(numbers, kind="stable")
