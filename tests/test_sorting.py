"""Sort orders against the stable sort of Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halopose.sorting import falling_order, rising_order, whole_order

VALUES = st.lists(st.integers(-4, 4).map(float), max_size=60) | st.lists(st.floats(-1e9, 1e9), max_size=60)


@given(VALUES)
def test_orders_are_stable(values: list[float]) -> None:
    everyone = range(len(values))
    array = np.array(values, dtype=float)
    assert rising_order(array).tolist() == sorted(everyone, key=lambda i: values[i])
    assert falling_order(array).tolist() == sorted(everyone, key=lambda i: -values[i])


@pytest.mark.parametrize("most", [4, 16, 20, 40])
def test_whole_numbers_keep_ties_in_order(most: int) -> None:
    numbers = np.random.default_rng(1).integers(0, 2**most, 5000)
    np.testing.assert_array_equal(whole_order(numbers), np.argsort(numbers, kind="stable"))
