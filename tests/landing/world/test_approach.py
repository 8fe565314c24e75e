"""Approaches: derivatives against finite differences, the same flight at any rate, one world for all frames."""

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halopose.errors import HaloposeError
from halopose.landing.navigation.sensors import GRAVITY
from halopose.landing.world.approach import fly, frames
from halopose.landing.world.scenes import corners_in_image

SEEDS = st.integers(0, 2**62)


@settings(max_examples=25, deadline=None)
@given(SEEDS)
def test_position_velocity_and_acceleration_belong_together(seed: int) -> None:
    flight = fly(seed, "clear", rate_hz=100)
    for value, rate in ((flight.positions, flight.velocities), (flight.velocities, flight.accelerations)):
        central = (value[2:] - value[:-2]) / (flight.times[2:] - flight.times[:-2])[:, None]
        np.testing.assert_allclose(central, rate[1:-1], atol=2e-3)


@settings(max_examples=10, deadline=None)
@given(SEEDS)
def test_the_rate_only_samples_the_flight(seed: int) -> None:
    slow, fast = fly(seed, rate_hz=5), fly(seed, rate_hz=20)
    for name in ("times", "positions", "velocities", "accelerations"):
        np.testing.assert_allclose(getattr(fast, name)[::4][: len(slow)], getattr(slow, name), atol=1e-9)


@settings(max_examples=25, deadline=None)
@given(SEEDS)
def test_a_flight_is_an_approach(seed: int) -> None:
    flight = fly(seed, rate_hz=10)
    assert abs(flight.positions[0, 0] + 6000) < 60
    assert -700 < flight.positions[-1, 0] <= -300
    assert flight.positions[-1, 2] >= 30
    assert (np.diff(flight.positions[:, 0]) > 0).all()
    path = np.degrees(np.arctan2(flight.positions[:, 2], 300 - flight.positions[:, 0]))
    assert 2.2 < path.mean() < 3.8
    assert np.abs(flight.accelerations).max() < 0.3 * GRAVITY
    assert np.degrees(np.abs(flight.attitudes[:, 2])).max() < 15


def test_no_gusts_is_a_straight_line() -> None:
    flight = fly(1, rate_hz=10, gusts=0.0)
    np.testing.assert_allclose(flight.accelerations, 0, atol=1e-12)
    np.testing.assert_allclose(flight.positions[:, 1], 0, atol=1e-12)


def test_frames_are_of_one_world() -> None:
    flight = fly(4, "haze", rate_hz=1)
    scenes = list(frames(flight))
    assert len(scenes) == len(flight)
    for number, scene in enumerate(scenes):
        assert (scene.seed, scene.runway, scene.sun, scene.visibility) == (
            flight.world.seed,
            flight.world.runway,
            flight.world.sun,
            flight.world.visibility,
        )
        assert scene.frame == number
        np.testing.assert_array_equal(scene.position, flight.positions[number])
    widths = [np.ptp(corners_in_image(scene)[0][:2, 0]) for scene in scenes]
    assert widths[-1] > 8 * widths[0]  # the runway grows as it comes nearer


def test_mistakes_are_named() -> None:
    with pytest.raises(HaloposeError, match="positive rate"):
        fly(0, rate_hz=0)
    with pytest.raises(HaloposeError, match="unknown weather"):
        fly(0, cast(Any, "storm"))
