"""One flight down the glide path: motion as arrays over time, and the frames that its camera sees.

In: a seed, a weather and a rate. Out: an ``Approach`` whose position is the integral of its velocity and whose
velocity is that of its acceleration, exactly: all three are one sum of waves and its derivatives.
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
    Array,
    Scene,
    SceneSettings,
    Weather,
    check_weather,
    sample_world,
)

_WAVES = 24
_LONGEST, _SHORTEST = 90.0, 3.0  # periods of deviations in seconds
_CORNER, _STIFF = 0.15, 0.4  # rad / s: above the first a pilot corrects less, above the second the mass resists


@dataclass(frozen=True)
class Approach:
    """A flight of T samples: times (T,), positions, velocities, accelerations (T, 3) in runway axes, attitudes
    (T, 3) as yaw, pitch, roll; world is the scene it flies in, with its runway, light and camera.
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
    """An approach from ``start`` to ``end`` metres before the threshold, or until ``lowest`` metres of height.

    The path depends on the seed alone: another rate samples the same flight. gusts scales all deviations.
    """
    check_weather(weather)
    if not (rate_hz > 0 and start > end and speed > 0):
        raise HaloposeError("an approach needs a positive rate and speed, and a start farther out than its end")
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
    """Sum of waves (3, T) of the given standard deviation, with its first and second derivative.

    Amplitudes fall as those of a heavy aircraft in gusts of a Dryden-like spectrum do.
    """
    omega = 2 * np.pi / np.geomspace(_LONGEST, _SHORTEST, _WAVES) * rng.uniform(0.95, 1.05, _WAVES)
    amplitude = np.sqrt(omega) / (1 + (omega / _CORNER) ** 2) / (1 + (omega / _STIFF) ** 2)
    amplitude *= spread * np.sqrt(2 / np.sum(amplitude**2))
    angle = omega[:, None] * times + rng.uniform(0, 2 * np.pi, (_WAVES, 1))
    amplitude, omega = amplitude[:, None], omega[:, None]
    terms = (np.sin(angle), omega * np.cos(angle), -(omega**2) * np.sin(angle))
    return np.stack([(amplitude * term).sum(0) for term in terms])


def _fading(times: Array, duration: float, waves: Array) -> Array:
    """Waves (3, T) that shrink to a third by the end, as a pilot holds the path tighter near the ground."""
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
    """Yaw, pitch, roll (T, 3): crabbed into a steady wind, banked into sideways acceleration."""
    crab = np.clip(rng.normal(0, settings.crab / 2), -settings.crab, settings.crab)
    nose = rng.uniform(*settings.pitch)
    wobble = [_waves(rng, times, gusts * np.radians(size))[0] for size in (0.4, 0.4, 0.8)]
    track = np.arctan2(-velocity[:, 1], velocity[:, 0])
    climb = np.arctan2(velocity[:, 2], velocity[:, 0])
    pitch = nose + climb - climb.mean() + wobble[1]
    roll = np.arctan2(-acceleration[:, 1], GRAVITY) + wobble[2]
    return np.stack([crab + track + wobble[0], pitch, roll], axis=1)


def frames(approach: Approach) -> Iterator[Scene]:
    """Scenes of one world, one per sample."""
    for number, (position, attitude) in enumerate(zip(approach.positions, approach.attitudes, strict=True)):
        yield replace(approach.world, position=position, attitude=attitude, frame=number)
