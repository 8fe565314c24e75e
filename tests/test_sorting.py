"""Orders against sorting in plain Python, which keeps ties in place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halopose.sorting import falling_order, rising_order, whole_order
from halopose.types import Array

VALUES = st.lists(st.integers(-4, 4).map(float), max_size=60) | st.lists(st.floats(-1e9, 1e9), max_size=60)


@given(VALUES)
def test_orders_are_stable(values: list[float]) -> None:
    everyone = range(len(values))
    array = np.array(values, dtype=float)
    assert rising_order(array).tolist() == sorted(everyone, key=lambda i: values[i])
    assert falling_order(array).tolist() == sorted(everyone, key=lambda i: -values[i])


def many(kind: str, rng: np.random.Generator, count: int = 5000) -> Array:
    """Values that are hard to tell apart by some of their bits, or that are no plain numbers."""
    normal = rng.normal(size=count)
    some = rng.random(count) < 0.1
    kinds = {
        "plain": normal,
        "positive": np.exp(normal),
        "ties": np.round(normal, 1),
        "zeros of both signs": np.where(some, -0.0, 0.0),
        "all alike": np.full(count, 3.0),
        "close together": 1 + 1e-14 * normal,
        "close together but for two": np.append(1 + 1e-14 * normal, [1e300, -1e300]),
        "tiny": 1e-310 * rng.random(count),
        "infinite": np.where(some, np.inf, np.where(rng.random(count) < 0.1, -np.inf, normal)),
        "no numbers": np.where(some, np.nan, normal),
        "single precision": normal.astype(np.float32),
    }
    return kinds[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "positive",
        "ties",
        "zeros of both signs",
        "all alike",
        "close together",
        "close together but for two",
        "tiny",
        "infinite",
        "no numbers",
        "single precision",
    ],
)
def test_counting_sorts_as_comparing_does(kind: str) -> None:
    values = many(kind, np.random.default_rng(0))
    np.testing.assert_array_equal(rising_order(values), np.argsort(values, kind="stable"))
    np.testing.assert_array_equal(falling_order(values), np.argsort(-values, kind="stable"))


@pytest.mark.parametrize("most", [4, 16, 20, 40])
def test_whole_numbers_keep_ties_in_order(most: int) -> None:
    numbers = np.random.default_rng(1).integers(0, 2**most, 5000)
    np.testing.assert_array_equal(whole_order(numbers), np.argsort(numbers, kind="stable"))
