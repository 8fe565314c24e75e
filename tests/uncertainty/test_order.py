"""Orders against sorting in plain Python, which keeps ties in place."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from halopose.evaluation.metrics import falling_order, rising_order

VALUES = st.lists(st.integers(-4, 4).map(float), max_size=60) | st.lists(st.floats(-1e9, 1e9), max_size=60)


@given(VALUES)
def test_orders_are_stable(values: list[float]) -> None:
    everyone = range(len(values))
    array = np.array(values, dtype=float)
    assert rising_order(array).tolist() == sorted(everyone, key=lambda i: values[i])
    assert falling_order(array).tolist() == sorted(everyone, key=lambda i: -values[i])
