"""What the navigator believes of motion and sensors: its states, how they move and what each sensor should say.

In: states of F filters side by side (F, 24). Out: transitions, process noise, expected measurements and Jacobians.

A state is position and velocity in runway axes, then what the sensors' drifting errors are believed to be: IRS
acceleration (3), GNSS position (3), localizer, glide slope, radio altimeter scale, IRS attitude (3), and the part
of vision's error that lasts (3), in units of its own standard deviation, and the angles of the camera's mounting
(3). A tilted IRS also takes part of gravity for acceleration, so that the errors of pitch and roll move the
aircraft.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from halopose.errors import HaloposeError
from halopose.landing.navigation.sensors import (
    ATTITUDE,
    GLIDE_SLOPE,
    GNSS,
    GRAVITY,
    IRS,
    LOCALIZER,
    MOUNTING_ERROR,
    RADIO,
    SIZES,
    VISION_DRIFT,
    GaussMarkov,
    IlsSite,
    Measurement,
    Source,
)
from halopose.types import Array

STATES = 24
POSITION, VELOCITY = slice(0, 3), slice(3, 6)
MOTION = slice(0, 6)
BIAS: dict[Source, slice] = {
    "irs": slice(6, 9),
    "gnss": slice(9, 12),
    "localizer": slice(12, 13),
    "glide_slope": slice(13, 14),
    "radio": slice(14, 15),
    "attitude": slice(15, 18),
    "vision": slice(18, 21),
}
MOUNTING = slice(21, 24)
EYE = np.eye(STATES)
_BIAS_DIAGONAL = slice(6 * (STATES + 1), None, STATES + 1)  # of a raveled (24, 24)
# How wrong the acceleration is by each state: the IRS's bias, and gravity seen through pitch and roll.
PUSH = np.zeros((3, STATES))
PUSH[:, BIAS["irs"]] = np.eye(3)
PUSH[0, 16] = PUSH[1, 17] = -GRAVITY


@dataclass(frozen=True)
class InitialState:
    """Where the filter starts: time, position (3,), velocity (3,) and their covariance (6, 6).

    Biases start at zero with the standard deviations that the settings give them.
    """

    time: float
    position: ArrayLike
    velocity: ArrayLike
    covariance: ArrayLike


@dataclass(frozen=True)
class FusionSettings:
    """What the navigator believes of its sensors, and how it treats what does not fit.

    ``gate``: a measurement is rejected if its NIS lies beyond this quantile of its chi-square law; 1 takes all.
    ``patience``: seconds over which rejections of a source are forgotten; if most of what it said in that time was
    rejected, the navigator acts on it (see ``navigator``). ``probation``: seconds for which a source that was left
    out must fit before it counts again. ``apart``: standard deviations by which the position without one source
    may differ. ``confirm``: seconds that it must differ for. ``hold``: seconds for which a flag outlasts its
    reason. ``lag``: seconds by which a measurement may be late and still count.

    ``max_jump_s``: seconds by which the time stamp of one source may be ahead of the navigator.

    Acceleration is linear between IRS samples; the last one counts for ``irs_hold`` seconds. After that the
    aircraft is taken to fly straight on, pushed by white acceleration of density ``coasting`` in m^2/s^3.
    ``clock``: standard deviation of the images' time stamps against the other sensors', in seconds.
    ``vision_freedom``: degrees of freedom of the factor that vision's variances have in a flight (``scale``); by
    default they are what they are stated to be.
    """

    site: IlsSite = field(default_factory=IlsSite)
    irs_bias: GaussMarkov = IRS.bias
    gnss_bias: GaussMarkov = GNSS.bias
    localizer_bias: GaussMarkov = LOCALIZER.bias
    glide_slope_bias: GaussMarkov = GLIDE_SLOPE.bias
    radio_scale: GaussMarkov = RADIO.bias
    attitude_bias: GaussMarkov = ATTITUDE.bias
    vision_bias: GaussMarkov = VISION_DRIFT
    vision_freedom: float = math.inf
    mounting: GaussMarkov = MOUNTING_ERROR
    irs_rate: float = IRS.rate
    irs_hold: float = 0.1
    coasting: float = 1.0
    clock: float = 0.0
    gate: float = 0.999
    patience: float = 2.0
    probation: float = 10.0
    apart: float = 4.5
    confirm: float = 0.5
    hold: float = 5.0
    lag: float = 0.5
    max_jump_s: float = 10.0

    def __post_init__(self) -> None:
        if not 0 < self.gate <= 1:
            raise HaloposeError(f"the gate should be a probability above 0 and up to 1, got {self.gate}")
        for name in ("patience", "probation", "apart", "max_jump_s"):
            if not getattr(self, name) > 0:
                raise HaloposeError(f"{name} should be above 0, got {getattr(self, name)}")
        for name in ("confirm", "hold", "lag", "clock"):
            if not getattr(self, name) >= 0:
                raise HaloposeError(f"{name} should be 0 seconds or more, got {getattr(self, name)}")
        if not self.vision_freedom > 2:
            raise HaloposeError(f"vision_freedom should be above 2, got {self.vision_freedom}")
        if not (self.irs_rate > 0 and self.irs_hold > 0 and self.coasting > 0):
            raise HaloposeError("irs_rate, irs_hold and coasting should be above 0")
        if self.irs_hold < 1 / self.irs_rate:
            raise HaloposeError(f"irs_hold should last to the next sample, {1 / self.irs_rate} s, got {self.irs_hold}")
        if len(self.mounting.sigma) != 3:
            raise HaloposeError(f"the mounting takes 3 sigmas, got {len(self.mounting.sigma)}")
        for source, bias in zip(BIAS, self.biases, strict=False):
            if len(bias.sigma) != SIZES[source]:
                raise HaloposeError(f"the {source} bias takes {SIZES[source]} sigmas, got {len(bias.sigma)}")

    @property
    def biases(self) -> tuple[GaussMarkov, ...]:
        """Bias models in the order of ``BIAS``, then the mounting."""
        drifting = self.irs_bias, self.gnss_bias, self.localizer_bias, self.glide_slope_bias
        return *drifting, self.radio_scale, self.attitude_bias, self.vision_bias, self.mounting

    @cached_property
    def bias_variance(self) -> Array:
        """Stationary variances (18,) of the bias states."""
        return np.concatenate([np.square(bias.sigma) for bias in self.biases])

    def variance_of(self, source: Source) -> Array:
        """Stationary variances (m,) of the bias states of one source."""
        return self.bias_variance[BIAS[source].start - 6 : BIAS[source].stop - 6]

    @cached_property
    def bias_rate(self) -> Array:
        """Decay per second (18,) of the bias states."""
        return np.concatenate([np.full(len(bias.sigma), 1 / bias.time_constant) for bias in self.biases])


def transition(dt: float, density: ArrayLike, settings: FusionSettings, *, driven: bool = True) -> tuple[Array, Array]:
    """Transition (24, 24) and process noise (24, 24) over ``dt`` seconds.

    ``density`` (3, 3) of the white acceleration noise. The noise is that of the integral, so that a step
    taken in two halves is the same step. Driven by the IRS, its errors enter the motion, held over the step.
    """
    step, noise, spread = EYE.copy(), np.zeros((STATES, STATES)), np.asarray(density) * dt
    step[POSITION, VELOCITY] = dt * np.eye(3)
    if driven:
        step[VELOCITY] -= dt * PUSH
        step[POSITION] -= (0.5 * dt**2) * PUSH
    noise[POSITION, POSITION] = spread * (dt**2 / 3)
    noise[POSITION, VELOCITY] = noise[VELOCITY, POSITION] = spread * (dt / 2)
    noise[VELOCITY, VELOCITY] = spread
    decay = np.exp(-dt * settings.bias_rate)
    step.ravel()[_BIAS_DIAGONAL] = decay
    noise.ravel()[_BIAS_DIAGONAL] = settings.bias_variance * (1 - decay**2)
    return step, noise


def observe(measurement: Measurement, states: Array, site: IlsSite) -> tuple[Array, Array]:
    """What a sensor should say (F, m) in states (F, 24), and the Jacobians (F, m, 24)."""
    source = measurement.source
    jacobian = np.zeros((len(states), SIZES[source], STATES))
    if source == "localizer" or source == "glide_slope":
        angle = site.localizer_angle if source == "localizer" else site.glide_slope_angle
        expected, jacobian[:, 0, POSITION] = angle(states[:, POSITION])
        jacobian[:, 0, BIAS[source]] = 1.0
        return expected[:, None] + states[:, BIAS[source]], jacobian
    if source == "radio":
        scale, height = 1 + states[:, BIAS["radio"]], states[:, 2:3]
        jacobian[:, 0, 2:3], jacobian[:, 0, BIAS["radio"]] = scale, height
        return scale * height, jacobian
    jacobian[:, :, POSITION] = np.eye(3)
    if source == "gnss":
        jacobian[:, :, BIAS["gnss"]] = np.eye(3)
        return states[:, POSITION] + states[:, BIAS["gnss"]], jacobian
    if measurement.sensitivity is not None:
        # Alike about all axes, a camera that is mounted wrong is as good as an aircraft that is turned.
        jacobian[:, :, BIAS["attitude"]] = jacobian[:, :, MOUNTING] = measurement.sensitivity
    if measurement.drift is not None:
        jacobian[:, :, BIAS["vision"]] = measurement.drift
    return (jacobian @ states[..., None])[..., 0], jacobian
