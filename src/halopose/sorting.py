"""Sorting that keeps ties in the order given.

numpy sorts numbers of 16 bits by counting them, ten times as fast as by comparing. So longer ones are sorted by 16
of their bits, then by the 16 bits above; what is then still out of order, a pair in thousands, is put right by
comparing.
"""

from __future__ import annotations

import numpy as np

from halopose.types import Array

_FEW = 1000  # values that are compared sooner than counted
_DIGIT = 16  # bits
_SIGN = np.int64(-(2**63))
_LOWEST, _HIGHEST = 0x000F_FFFF_FFFF_FFFF, 0xFFF0_0000_0000_0000  # keys of minus and plus infinity


def rising_order(values: Array) -> Array:
    """Indices (N,) that sort the values; ties keep the order given, what is not a number comes last."""
    if len(values) < _FEW or values.dtype != np.float64:
        return np.argsort(values, kind="stable")
    bits = (values + 0.0).view(np.int64)  # there is no minus zero left, which would come before zero
    key = (bits ^ ((bits >> 63) | _SIGN)).view(np.uint64)  # rises as the value does
    low, high = int(key.min()), int(key.max())
    if low < _LOWEST or high > _HIGHEST:
        return np.argsort(values, kind="stable")
    key -= np.uint64(low)
    key >>= np.uint64(max((high - low).bit_length() - 2 * _DIGIT, 0))
    order = np.argsort(key.astype(np.uint16), kind="stable")
    upper = (key >> np.uint64(_DIGIT)).astype(np.uint16)
    order = order.take(np.argsort(upper.take(order), kind="stable"))
    ordered = values.take(order)
    return _settled(values, key, order) if (ordered[1:] < ordered[:-1]).any() else order


def _settled(values: Array, key: Array, order: Array) -> Array:
    """An order by rising keys (N,) made one by rising values (N,), which differ where keys are equal."""
    ordered = key.take(order)
    same = np.concatenate([[False], ordered[1:] == ordered[:-1], [False]])
    place = np.flatnonzero(same[1:] | same[:-1])
    shared = order.take(place)
    order[place] = shared.take(np.lexsort((values.take(shared), ordered.take(place))))
    return order


def falling_order(confidence: Array) -> Array:
    """Indices (N,) by falling confidence; ties keep the order given."""
    return rising_order(-confidence)


def whole_order(numbers: Array) -> Array:
    """Indices (N,) that sort whole numbers, none of them negative; ties keep the order given."""
    order = np.argsort(numbers.astype(np.uint16), kind="stable")
    for shift in range(_DIGIT, int(numbers.max(initial=0)).bit_length(), _DIGIT):
        order = order.take(np.argsort((numbers >> shift).astype(np.uint16).take(order), kind="stable"))
    return order
