"""Reliability of what is kept, against brute force at every threshold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halopose.evaluation.metrics import reliability_curve


@given(st.integers(0, 2**32 - 1), st.integers(1, 300), st.sampled_from([1, 2, 11, 101, 1000]))
def test_reliability_curve_equals_brute_force(seed: int, n: int, points: int) -> None:
    rng = np.random.default_rng(seed)
    confidence, correct = -rng.random(n), rng.random(n) < 0.7
    curve = reliability_curve(confidence, correct, points)
    order = np.argsort(-confidence)
    again = reliability_curve(confidence[order], correct[order], points, presorted=True)
    np.testing.assert_equal(vars(again), vars(curve))
    assert len(curve.kept) <= min(points, n)
    if points > 1:
        assert curve.kept[-1] == 1
        assert curve.reliability[-1] == pytest.approx(correct.mean(), rel=1e-12)
    assert np.round(curve.kept[0] * n) == 1
    assert (np.diff(curve.kept) > 0).all()
    for share, reliability, threshold in zip(curve.kept, curve.reliability, curve.threshold, strict=True):
        kept = confidence >= threshold
        assert kept.mean() == pytest.approx(share, rel=1e-12)
        assert correct[kept].mean() == pytest.approx(reliability, rel=1e-12)
    if points >= n:
        assert len(curve.kept) == n
