"""Simulate the motion of one approach, and the frames that its camera sees.

Velocity and acceleration are exact derivatives of the position: all three are sums of the same waves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import tan

import numpy as np

from halopose.errors import HaloposeError
from halopose.landing.navigation.sensors import GRAVITY
from halopose.landing.world.scenes import (
    AIMING_POINT,
    Scene,
    SceneSettings,
    Weather,
    check_weather,
    sample_world,
)
from halopose.types import Array

_WAVES = 24
_LONGEST, _SHORTEST = 90.0, 3.0  # periods of deviations in seconds
_CORNER, _STIFF = 0.15, 0.4  # rad/s: corner frequencies of the pilot's corrections and of the aircraft's inertia


@dataclass(frozen=True)
class Approach:
    """A flight of T samples.

    Attributes:
        times: times (T,) in seconds.
        positions: positions (T, 3) in runway axes.
        velocities: velocities (T, 3).
        accelerations: accelerations (T, 3).
        attitudes: yaw, pitch, roll (T, 3).
        world: scene with runway, light and camera.
    """

    times: Array
    positions: Array
    velocities: Array
    accelerations: Array
    attitudes: Array
    world: Scene

    def __len__(self) -> int:
        return len(self.times)


def fly(
    seed: int,
    weather: Weather = "clear",
    rate_hz: float = 10.0,
    settings: SceneSettings | None = None,
    *,
    start: float = 6000.0,
    end: float = 300.0,
    lowest: float = 30.0,
    speed: float = 70.0,
    gusts: float = 1.0,
) -> Approach:
    """Simulate an approach from ``start`` to ``end`` metres before the threshold, or down to a height of ``lowest``
    metres.

    The path depends only on the seed: another rate samples the same flight. ``gusts`` scales all deviations.
    """
    check_weather(weather)
    if not (rate_hz > 0 and start > end and speed > 0):
        raise HaloposeError(
            "an approach needs a positive rate and speed, and a start farther from the threshold than its end"
        )
    settings = settings or SceneSettings()
    rng = np.random.default_rng([seed, 20])
    duration = (start - end) / speed
    times = np.arange(0.0, 1.2 * duration, 1 / rate_hz)
    glide = tan(rng.uniform(*settings.glide))
    along = _waves(rng, times, 12.0 * gusts)
    across = _fading(times, duration, _waves(rng, times, 14.0 * gusts))
    upward = _fading(times, duration, _waves(rng, times, 6.0 * gusts))
    position = np.stack([-start + speed * times + along[0], across[0], upward[0]], axis=1)
    velocity = np.stack([speed + along[1], across[1], upward[1]], axis=1)
    acceleration = np.stack([along[2], across[2], upward[2]], axis=1)
    position[:, 2] += glide * (AIMING_POINT - position[:, 0])
    velocity[:, 2] -= glide * velocity[:, 0]
    acceleration[:, 2] -= glide * acceleration[:, 0]
    attitude = _attitude(rng, times, velocity, acceleration, settings, gusts)
    over = (position[:, 0] > -end) | (position[:, 2] < lowest)
    count = int(np.argmax(over)) if over.any() else len(times)
    world = sample_world(seed, weather, settings)
    return Approach(times[:count], position[:count], velocity[:count], acceleration[:count], attitude[:count], world)


def _waves(rng: np.random.Generator, times: Array, spread: float) -> Array:
    """Return a sum of waves (3, T) with the given standard deviation, and its first and second derivative.

    Amplitudes approximate a Dryden spectrum for a heavy aircraft.
    """
    omega = 2 * np.pi / np.geomspace(_LONGEST, _SHORTEST, _WAVES) * rng.uniform(0.95, 1.05, _WAVES)
    amplitude = np.sqrt(omega) / (1 + (omega / _CORNER) ** 2) / (1 + (omega / _STIFF) ** 2)
    amplitude *= spread * np.sqrt(2 / np.sum(amplitude**2))
    angle = omega[:, None] * times + rng.uniform(0, 2 * np.pi, (_WAVES, 1))
    amplitude, omega = amplitude[:, None], omega[:, None]
    terms = (np.sin(angle), omega * np.cos(angle), -(omega**2) * np.sin(angle))
    return np.stack([(amplitude * term).sum(0) for term in terms])


def _fading(times: Array, duration: float, waves: Array) -> Array:
    """Scale waves (3, T) down to a third by the end: near the ground a pilot holds the path more tightly."""
    value, rate, change = waves
    slope = -2 / 3 / duration
    envelope = 1 + slope * times
    return np.stack([envelope * value, envelope * rate + slope * value, envelope * change + 2 * slope * rate])


def _attitude(
    rng: np.random.Generator,
    times: Array,
    velocity: Array,
    acceleration: Array,
    settings: SceneSettings,
    gusts: float,
) -> Array:
    """Return yaw, pitch, roll (T, 3): crab angle for a steady wind, bank angle for lateral acceleration."""
    crab = np.clip(rng.normal(0, settings.crab / 2), -settings.crab, settings.crab)
    nose = rng.uniform(*settings.pitch)
    wobble = [_waves(rng, times, gusts * np.radians(size))[0] for size in (0.4, 0.4, 0.8)]
    track = np.arctan2(-velocity[:, 1], velocity[:, 0])
    climb = np.arctan2(velocity[:, 2], velocity[:, 0])
    pitch = nose + climb - climb.mean() + wobble[1]
    roll = np.arctan2(-acceleration[:, 1], GRAVITY) + wobble[2]
    return np.stack([crab + track + wobble[0], pitch, roll], axis=1)


def frames(approach: Approach) -> Iterator[Scene]:
    """Return one scene per sample, all in the same world."""
    for number, (position, attitude) in enumerate(zip(approach.positions, approach.attitudes, strict=True)):
        yield replace(approach.world, position=position, attitude=attitude, frame=number)
