"""State, motion model and measurement models of the navigator.

A state (30,) holds position and velocity in runway axes, then the sensors' drifting errors: IRS acceleration (3), GNSS
position (3), localizer, glide slope, radio altimeter scale, IRS attitude (3), the persistent part of vision's error (3)
in units of its standard deviation, and the angles of the camera's mounting (3). Then come the constants of a flight,
clock offset (1) and relative error of the focal length (1) of the camera, the part of vision's error that lasts for a
fraction of a second (3), and the error of the terrain profile (1) in units of its standard deviation. A tilted IRS
measures part of gravity as acceleration, so errors of pitch and roll also move the aircraft. An error of the principal
point acts like an angle of the mounting, and is in its variance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from halopose.errors import HaloposeError
from halopose.geometry.integrity import check_risk
from halopose.landing.navigation.fault_priors import FaultPriors
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
    VISION_FLICKER,
    GaussMarkov,
    IlsSite,
    Measurement,
    Source,
)
from halopose.landing.navigation.terrain import LEVEL, Terrain
from halopose.types import Array

STATES = 30
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
MOUNTING, CLOCK, FOCAL, FLICKER, GROUND = slice(21, 24), slice(24, 25), slice(25, 26), slice(26, 29), slice(29, 30)
EYE = np.eye(STATES)
_BIAS_DIAGONAL = slice(6 * (STATES + 1), None, STATES + 1)  # diagonal of a raveled (30, 30)
UNINFORMED = np.array([2000.0, 1000.0, 300.0, 60.0, 30.0, 15.0])  # m and m/s, without the source of the start
# Derivative of the acceleration error by the state: IRS bias, and gravity through pitch and roll.
PUSH = np.zeros((3, STATES))
PUSH[:, BIAS["irs"]] = np.eye(3)
PUSH[0, 16] = PUSH[1, 17] = -GRAVITY


@dataclass(frozen=True)
class InitialState:
    """Initial state of the filter: time, position (3,), velocity (3,) and their covariance (6, 6).

    Biases start at zero with the standard deviations of the settings.

    Attributes:
        time: seconds.
        position: in runway axes (3,).
        velocity: in runway axes (3,).
        covariance: of position and velocity (6, 6).
        source: the sensor that the start was taken from. Filters without it start with ``UNINFORMED`` standard
            deviations instead.
    """

    time: float
    position: ArrayLike
    velocity: ArrayLike
    covariance: ArrayLike
    source: Source | None = None


@dataclass(frozen=True)
class FusionSettings:
    """Sensor models of the navigator, and its rules for measurements that do not fit.

    Acceleration is linear between IRS samples. After the last one the aircraft is assumed to fly straight on.

    Attributes:
        site: antennas of the ILS.
        terrain: ground under the radio altimeter, which is not used where the ground is not known.
        irs_bias: drifting bias of the acceleration.
        gnss_bias: drifting bias of the GNSS position.
        localizer_bias: drifting bias of the localizer.
        glide_slope_bias: drifting bias of the glide slope.
        radio_scale: scale error of the radio altimeter.
        attitude_bias: drifting bias of the IRS attitude.
        vision_bias: persistent part of vision's error.
        vision_freedom: degrees of freedom of the factor by which vision's variance differs between flights
            (``noise_scale``); infinite if the stated variances are exact.
        mounting: angles of the camera's mounting.
        irs_rate: rate of the IRS in Hz.
        irs_hold: seconds for which the last IRS sample is used.
        coasting: density in m^2/s^3 of the white acceleration without an IRS.
        vision_flicker: part of vision's error that lasts for a fraction of a second.
        clock: standard deviation in seconds of the constant offset of the images' time stamps.
        focal: standard deviation of the relative error of the focal length, which is constant too.
        integrity_risk: probability of an error beyond a level in an approach.
        exposure_s: duration of an approach in seconds, each of which counts as independent.
        priors: probabilities of faulty sensors in an approach.
        gate: a measurement is rejected if its NIS is above this quantile of its chi-square distribution; 1 accepts all.
        patience: seconds over which rejections of a source are forgotten. The navigator acts on a source if most of its
            measurements in that time were rejected (see ``navigator``).
        probation: seconds for which an excluded source must fit before it is used again.
        apart: standard deviations by which the position without one source may differ. With vision at 1.3 times its
            stated error, as in the worst measured flight, this is 4.6: about one false alert in 1,000 approaches.
        confirm: seconds for which it must differ.
        hold: seconds for which a flag outlasts its reason.
        stale: seconds after which a source that sends nothing is reported.
        lag: seconds by which a measurement may be late and still be used.
        max_jump_s: seconds by which the time stamp of one source may be ahead of the navigator.
    """

    site: IlsSite = field(default_factory=IlsSite)
    terrain: Terrain = LEVEL
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
    vision_flicker: GaussMarkov = VISION_FLICKER
    clock: float = 0.0
    focal: float = 0.0
    integrity_risk: float = 2e-7
    exposure_s: float = 150.0
    priors: FaultPriors = field(default_factory=FaultPriors)
    gate: float = 0.999
    patience: float = 2.0
    probation: float = 10.0
    apart: float = 6.0
    confirm: float = 0.5
    hold: float = 5.0
    stale: float = 2.0
    lag: float = 0.5
    max_jump_s: float = 10.0

    def __post_init__(self) -> None:
        if not 0 < self.gate <= 1:
            raise HaloposeError(f"the gate should be a probability above 0 and up to 1, got {self.gate}")
        for name in ("patience", "probation", "apart", "stale", "max_jump_s", "exposure_s"):
            if not getattr(self, name) > 0:
                raise HaloposeError(f"{name} should be above 0, got {getattr(self, name)}")
        check_risk("integrity_risk", self.integrity_risk)
        for name in ("confirm", "hold", "lag", "clock", "focal"):
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
        """Bias models in the order of ``BIAS``, then mounting, clock, focal length, flicker and ground."""
        drifting = self.irs_bias, self.gnss_bias, self.localizer_bias, self.glide_slope_bias
        ground = GaussMarkov((1.0,), self.terrain.correlation_s)
        return *drifting, self.radio_scale, self.attitude_bias, self.vision_bias, *self._camera, ground

    @property
    def _camera(self) -> tuple[GaussMarkov, ...]:
        return self.mounting, GaussMarkov((self.clock,)), GaussMarkov((self.focal,)), self.vision_flicker

    @cached_property
    def bias_variance(self) -> Array:
        """Stationary variances (24,) of the bias states."""
        return np.concatenate([np.square(bias.sigma) for bias in self.biases])

    def variance_of(self, source: Source) -> Array:
        """Stationary variances (m,) of the bias states of one source."""
        return self.bias_variance[BIAS[source].start - 6 : BIAS[source].stop - 6]

    @cached_property
    def bias_rate(self) -> Array:
        """Decay rates (24,) of the bias states in 1/s."""
        return np.concatenate([np.full(len(bias.sigma), 1 / bias.time_constant) for bias in self.biases])


def transition(dt: float, density: ArrayLike, settings: FusionSettings, *, driven: bool = True) -> tuple[Array, Array]:
    """Return the transition (30, 30) and process noise (30, 30) of a time step.

    The noise is integrated, so two half steps equal one step.

    Args:
        dt: time step in seconds.
        density: density (3, 3) of the white acceleration noise.
        settings: settings of the navigator.
        driven: whether the IRS gives the acceleration, so that its errors enter the motion.
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


def observe(measurement: Measurement, states: Array, settings: FusionSettings) -> tuple[Array, Array]:
    """Return the expected measurement (F, m) of a sensor in states (F, 30), and its Jacobians (F, m, 30)."""
    source = measurement.source
    jacobian = np.zeros((len(states), SIZES[source], STATES))
    if source == "localizer" or source == "glide_slope":
        site = settings.site
        angle = site.localizer_angle if source == "localizer" else site.glide_slope_angle
        expected, jacobian[:, 0, POSITION] = angle(states[:, POSITION])
        jacobian[:, 0, BIAS[source]] = 1.0
        return expected[:, None] + states[:, BIAS[source]], jacobian
    if source == "radio":
        ground, slope, sigma = settings.terrain.at(states[:, 0])
        wrong = states[:, GROUND.start]  # in standard deviations, which grow before the threshold
        slope = slope - settings.terrain.growth * (states[:, 0] < 0) * wrong
        scale, height = 1 + states[:, BIAS["radio"].start], states[:, 2] - ground - sigma * wrong
        jacobian[:, 0, 0], jacobian[:, 0, 2] = -scale * slope, scale
        jacobian[:, 0, BIAS["radio"].start], jacobian[:, 0, GROUND.start] = height, -scale * sigma
        return (scale * height)[:, None], jacobian
    jacobian[:, :, POSITION] = np.eye(3)
    if source == "gnss":
        jacobian[:, :, BIAS["gnss"]] = np.eye(3)
        return states[:, POSITION] + states[:, BIAS["gnss"]], jacobian
    if measurement.sensitivity is not None:
        # The prior is isotropic, so a mounting error acts like an attitude error of the aircraft.
        jacobian[:, :, BIAS["attitude"]] = jacobian[:, :, MOUNTING] = measurement.sensitivity
    if measurement.drift is not None:
        jacobian[:, :, BIAS["vision"]] = measurement.drift
    if measurement.flicker is not None:
        jacobian[:, :, FLICKER] = measurement.flicker
    if measurement.focal is not None:
        jacobian[:, :, FOCAL] = measurement.focal[..., None]
    expected = (jacobian @ states[..., None])[..., 0]
    if source == "vision":  # an image that is stamped late shows where the aircraft was before
        late, velocity = states[:, CLOCK], states[:, VELOCITY]
        expected = expected - late * velocity
        jacobian[:, :, CLOCK] = -velocity[..., None]
        jacobian[:, :, VELOCITY] -= late[..., None] * np.eye(3)
    return expected, jacobian
