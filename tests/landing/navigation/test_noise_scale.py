"""The factor of the vision variance: estimated from innovations, and applied to vision only."""

import math
from dataclasses import replace

import numpy as np
import pytest

from halopose.errors import HaloposeError
from halopose.landing.navigation.filter_bank import FilterBank
from halopose.landing.navigation.motion_model import FusionSettings, InitialState
from halopose.landing.navigation.navigator import Navigator
from halopose.landing.navigation.noise_scale import LARGEST, SMALLEST, NoiseScale
from halopose.landing.navigation.sensors import Measurement

START = InitialState(0.0, [-900.0, 0.0, 60.0], [70.0, 0.0, -3.5], 1e-4 * np.eye(6))


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.8])
@pytest.mark.parametrize("other", [0.0, 1.0, 10.0])
def test_the_factor_is_found_whatever_else_is_in_the_innovation(factor: float, other: float) -> None:
    """Innovations are drawn with the true factor and weighed with the one believed by then."""
    rng = np.random.default_rng(1)
    noise = np.diag([4.0, 1.0, 2.0]) + 0.5
    scale = NoiseScale.believed(24.0)
    for _ in range(6000 if other == 10.0 else 1500):
        drawn = np.linalg.cholesky(factor * noise + other * np.eye(3)) @ rng.standard_normal(3)
        believed = scale.value * noise
        scale = scale.after(drawn, believed + other * np.eye(3), believed)
    assert scale.value == pytest.approx(factor, rel=0.1)


def test_factors_of_the_distribution_make_innovations_as_large_as_expected() -> None:
    """Over flights with factors from the prior distribution, NIS has its expected value from the first fix on."""
    rng = np.random.default_rng(2)
    nis = np.zeros((4000, 12))
    for row in nis:
        factor, scale = 12.0 / rng.gamma(12.0), NoiseScale.believed(24.0)
        for n in range(len(row)):
            drawn = math.sqrt(factor) * rng.standard_normal(3)
            row[n] = drawn @ drawn / scale.value
            scale = scale.after(drawn, scale.value * np.eye(3), scale.value * np.eye(3))
    np.testing.assert_allclose(nis.mean(0) / 3, 1.0, atol=0.05)
    assert nis.mean() / 3 == pytest.approx(1.0, abs=0.015)


def test_a_fix_with_an_uncertain_prediction_is_uninformative() -> None:
    before = NoiseScale.believed(24.0)
    after = before.after(np.full(3, 900.0), 1e6 * np.eye(3), np.eye(3))
    assert after.value == pytest.approx(before.value, rel=1e-5)
    assert after.freedom == pytest.approx(before.freedom, rel=1e-5)


def test_nothing_is_got_used_to_that_no_flight_had() -> None:
    far = near = NoiseScale.believed(24.0)
    for _ in range(200):
        far = far.after(np.full(3, 4 * math.sqrt(far.value)), far.value * np.eye(3), far.value * np.eye(3))
        near = near.after(np.zeros(3), near.value * np.eye(3), near.value * np.eye(3))
    assert far.value == LARGEST
    assert near.value == SMALLEST
    exact = NoiseScale.believed(math.inf)
    assert exact.after(np.full(3, 9.0), np.eye(3), np.eye(3)) == exact


def test_only_the_white_part_of_vision_is_scaled() -> None:
    bank = replace(FilterBank.start(START, FusionSettings(vision_freedom=24.0)), noise_scale=NoiseScale(24.0, 33.0))
    fix = Measurement(1.0, "vision", np.zeros(3), 4 * np.eye(3), drift=np.eye(3))
    scaled = bank.scaled(fix)
    np.testing.assert_allclose(scaled.covariance, 6 * np.eye(3))
    np.testing.assert_array_equal(scaled.drift, fix.drift)
    gnss = replace(fix, source="gnss")
    assert bank.scaled(gnss) is gnss


def test_a_navigator_learns_from_vision_alone_and_only_if_it_is_to() -> None:
    rng = np.random.default_rng(3)
    states = {}
    for freedom in (24.0, math.inf):
        navigator = Navigator(START, FusionSettings(vision_freedom=freedom))
        for n in range(60):
            place = np.array([-900.0 + 7 * n, 0.0, 60.0 - 0.35 * n])
            navigator.update(Measurement(0.1 * n, "gnss", place, 1e-4 * np.eye(3)))
            off = math.sqrt(1.8) * rng.standard_normal(3)
            states[freedom] = navigator.update(Measurement(0.1 * n, "vision", place + 2 * off, 4 * np.eye(3)))
    assert states[24.0].filters.noise_scale.value == pytest.approx(1.7, abs=0.3)
    assert states[math.inf].filters.noise_scale.value == 1.0
    with pytest.raises(HaloposeError, match="vision_freedom"):
        FusionSettings(vision_freedom=1.0)
