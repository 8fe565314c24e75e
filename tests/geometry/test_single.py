"""The fast way for one frame against the long way for many."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halopose.geometry.camera import exp_so3
from halopose.geometry.integrity import assess
from halopose.geometry.pnp import solve_position
from halopose.geometry.single import assess_one, solve_one
from tests.helpers.approaches import CAMERA, CORNERS, LENS, sight

SEEDS = st.integers(0, 2**32 - 1)
AXES = np.array([[0.0, 1.0, 0.0], [0.0523, 0.0, 0.9986]])


@given(SEEDS, st.floats(300.0, 6000.0))
@settings(max_examples=60)
def test_positions_are_those_of_the_batch(seed: int, distance: float) -> None:
    seen = sight(distance, 1, np.random.default_rng(seed), high=2.0)
    whole = solve_position(CAMERA, CORNERS, seen.pixels, seen.covariance, seen.rotations)
    found = solve_one(CAMERA, CORNERS, seen.pixels[0], seen.covariance[0], seen.rotation)
    if found is None:  # it may ask for the long way, but not often
        return
    sigma = np.sqrt(np.diagonal(found.covariance))
    np.testing.assert_allclose(found.position, whole.position[0], atol=2e-3 * sigma.max())
    np.testing.assert_allclose(found.covariance, whole.covariance[0, :3, :3], rtol=0.01, atol=1e-3 * sigma.max() ** 2)
    assert found.cost == pytest.approx(whole.cost[0], rel=1e-4, abs=1e-4)


def test_the_fast_way_is_the_usual_one() -> None:
    seen = sight(2000.0, 200, np.random.default_rng(1), high=2.0)
    found = [solve_one(CAMERA, CORNERS, pixels, seen.covariance[0], seen.rotation) for pixels in seen.pixels]
    assert sum(each is None for each in found) <= 2


@given(SEEDS, st.sampled_from([0.0, 0.0, 30.0]), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=60)
def test_assessments_are_those_of_the_batch(
    seed: int, wrong: float, uncertain: bool, together: bool, lens: bool
) -> None:
    rng = np.random.default_rng(seed)
    seen = sight(1200.0, 1, rng)
    pixels = seen.pixels[0].copy()
    pixels[2] += wrong
    attitude = 1e-6 * np.diag([1.0, 2.0, 3.0]) if uncertain else None
    turned = seen.rotation @ exp_so3(1e-3 * rng.normal(size=3) * uncertain)
    shared = rng.normal(0, 0.3, (4, 2, 3)) if together else None
    intrinsics = np.diag([1.0, 1.0, 0.2, 0.2, 1e-4, 0, 0, 0, 0]) if lens else None
    known: dict[str, Any] = {"attitude": attitude, "intrinsics": intrinsics, "axes": AXES}
    fast = assess_one(CAMERA, CORNERS, pixels, seen.covariance[0], turned, shared=shared, **known)
    batch = None if shared is None else shared[None]
    slow = assess(CAMERA, CORNERS, pixels[None], seen.covariance, turned[None], shared=batch, **known)
    assert fast.verdict.tolist() == slow.verdict.tolist()
    assert fast.excluded.tolist() == slow.excluded.tolist()
    sigma = np.sqrt(np.diagonal(slow.solution.covariance[0])[:3].max())
    np.testing.assert_allclose(fast.solution.position, slow.solution.position, atol=0.02 * sigma)
    np.testing.assert_allclose(fast.levels, slow.levels, rtol=0.02)
    np.testing.assert_allclose(fast.statistic, slow.statistic, rtol=0.02, atol=0.02)
    np.testing.assert_allclose(fast.shares, slow.shares, rtol=0.05, atol=0.05)
    spread = np.sqrt(np.einsum("nii->ni", slow.solution.covariance)[0]) + 1e-12
    scale = spread[:, None] * spread
    np.testing.assert_allclose(fast.solution.covariance[0] / scale, slow.solution.covariance[0] / scale, atol=0.03)


def test_what_is_out_of_the_ordinary_goes_the_long_way() -> None:
    seen = sight(1200.0, 1, np.random.default_rng(3), camera=LENS)
    lens = assess_one(LENS, CORNERS, seen.pixels[0], seen.covariance[0], seen.rotation)
    assert lens.trusted.all()
    broken = assess_one(CAMERA, CORNERS, np.full((4, 2), np.nan), seen.covariance[0], seen.rotation)
    assert not broken.trusted.any()
    assert "not finite" in broken.reasons[0]
    assert solve_one(CAMERA, CORNERS, seen.pixels[0], -seen.covariance[0], seen.rotation) is None
