"""Simulate navigation sensors: GNSS, ILS, radio altimeter and IRS, with noise, drifting bias, outages and faults.

Vision is not simulated here: ``vision`` converts fixes of the camera to measurements. Every sensor has its own random
numbers for the whole flight, so removing a sensor, an outage or a fault does not change the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.interpolate import CubicHermiteSpline
from scipy.signal import lfilter

from halopose.errors import HaloposeError
from halopose.landing.navigation.terrain import LEVEL, Terrain
from halopose.types import Array

Source = Literal["irs", "gnss", "localizer", "glide_slope", "radio", "attitude", "vision"]
FaultKind = Literal["step", "ramp", "stuck", "noise"]

SIZES: dict[Source, int] = {
    "irs": 3,
    "gnss": 3,
    "localizer": 1,
    "glide_slope": 1,
    "radio": 1,
    "attitude": 3,
    "vision": 3,
}
GRAVITY = 9.80665
RADIO_CEILING = 762.0  # 2,500 ft: a radio altimeter gives no value above


@dataclass(frozen=True)
class Measurement:
    """One measurement, with m = ``SIZES[source]`` values.

    Attributes:
        time: time in seconds.
        source: the sensor. irs: acceleration in runway axes. gnss and vision: position of the aircraft. localizer and
            glide_slope: angle left of the centreline and above the glide path. radio: height. attitude: yaw, pitch,
                roll.
        value: values (m,).
        covariance: covariance (m, m) of the noise.
        sensitivity: derivative (3, 3) of a vision fix by the bias of the attitude that it was computed with.
        drift: derivative (3, 3) of a vision fix by the persistent part of its own error, in standard deviations.
        flicker: the same by the part of its error that lasts for a fraction of a second.
        focal: derivative (3,) of a vision fix by the relative error of the focal length.
    """

    time: float
    source: Source
    value: Array
    covariance: Array
    sensitivity: Array | None = None
    drift: Array | None = None
    flicker: Array | None = None
    focal: Array | None = None


@dataclass(frozen=True)
class MemberMeasurements:
    """What one image says to each filter of a bank, which may believe in different positions.

    Attributes:
        members: one measurement per filter, None if nothing was measured for it.
        unexplained: for each filter whether the image shows the runway where the filter does not expect it. Such a
            measurement is rejected, whatever its innovation is.
    """

    members: tuple[Measurement | None, ...]
    unexplained: tuple[bool, ...]


@dataclass(frozen=True)
class DeferredMeasurement:
    """A measurement that depends on the estimated position, computed when the filter reaches its time.

    Attributes:
        time: time in seconds.
        source: the sensor.
        measure: function of the ``NavigationState`` at that time that returns one measurement for all filters, one for
            each, or None. It is called again if a late measurement changes that state.
        latency: seconds until the measurement arrives.
    """

    time: float
    source: Source
    measure: Callable[[Any], Measurement | MemberMeasurements | None]
    latency: float = 0.0


@dataclass(frozen=True)
class TrueTrajectory:
    """True flight in runway axes: times (T,), the rest (T, 3); attitudes are yaw, pitch, roll."""

    times: Array
    positions: Array
    velocities: Array
    accelerations: Array
    attitudes: Array

    def __post_init__(self) -> None:
        for field in fields(self):
            value = np.asarray(getattr(self, field.name), dtype=np.float64)
            object.__setattr__(self, field.name, value)
            expected = (self.times.size,) if field.name == "times" else (self.times.size, 3)
            if value.shape != expected:
                raise HaloposeError(f"{field.name} of a true flight should be {expected}, got {value.shape}")
            if not np.isfinite(value).all():
                raise HaloposeError(f"{field.name} of a true flight must be finite")
        if self.times.size < 2 or not (np.diff(self.times) > 0).all():
            raise HaloposeError("a true flight needs two or more times, each later than the one before")

    def position(self, times: Array) -> Array:
        """Return positions (N, 3) at times (N,): cubic interpolation of positions and velocities."""
        return CubicHermiteSpline(self.times, self.positions, self.velocities)(times)

    def velocity(self, times: Array) -> Array:
        """Return velocities (N, 3) at times (N,): cubic interpolation of velocities and accelerations."""
        return CubicHermiteSpline(self.times, self.velocities, self.accelerations)(times)

    def acceleration(self, times: Array) -> Array:
        """Return accelerations (N, 3) at times (N,), linear between samples."""
        return np.stack([np.interp(times, self.times, axis) for axis in self.accelerations.T], axis=1)

    def attitude(self, times: Array) -> Array:
        """Return yaw, pitch, roll (N, 3) at times (N,), linear between samples along the shorter arc."""
        angles = np.unwrap(self.attitudes, axis=0)
        return np.stack([np.interp(times, self.times, axis) for axis in angles.T], axis=1)


Given = TypeVar("Given", Measurement, Measurement | DeferredMeasurement)


@dataclass(frozen=True)
class GaussMarkov:
    """First-order Gauss-Markov process: standard deviation per axis, and time constant in seconds.

    An infinite time constant is a constant bias, drawn once.
    """

    sigma: tuple[float, ...]
    time_constant: float = math.inf

    def __post_init__(self) -> None:
        if not (all(math.isfinite(s) and s >= 0 for s in self.sigma) and self.time_constant > 0):
            raise HaloposeError("a drifting bias takes finite sigmas of 0 or more and a time constant above 0")

    def sample(self, count: int, interval: float, rng: np.random.Generator) -> Array:
        """Draw a stationary path (count, m) in steps of ``interval`` seconds."""
        memory = math.exp(-interval / self.time_constant)
        drive = rng.standard_normal((count, len(self.sigma))) * self.sigma
        drive[1:] *= math.sqrt(1 - memory**2)
        return np.asarray(lfilter([1.0], [1.0, -memory], drive, axis=0))


@dataclass(frozen=True)
class Fault:
    """Fault of a sensor from ``start`` to ``end``; the stated covariance does not change.

    Attributes:
        start: first second of the fault.
        end: last second of the fault.
        kind: step: ``size`` is added. ramp: ``size`` per second since ``start`` is added. stuck: the last value before
            ``start`` repeats. noise: the white noise is ``size`` times as large.
        size: one size for all axes, or one per axis.
    """

    start: float
    end: float
    kind: FaultKind
    size: float | tuple[float, ...] = 0.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(FaultKind):
            raise HaloposeError(f"unknown fault {self.kind!r}: step, ramp, stuck or noise")
        _check_interval("a fault", self.start, self.end)


@dataclass(frozen=True)
class Sensor:
    """Model of a sensor.

    Attributes:
        rate: rate in Hz.
        noise: standard deviation of the white noise of one sample, per axis.
        bias: drifting bias.
        outages: intervals (start, end) in seconds without measurements.
        faults: faults, applied in this order.
    """

    rate: float
    noise: tuple[float, ...]
    bias: GaussMarkov
    outages: tuple[tuple[float, float], ...] = ()
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise HaloposeError(f"a sensor's rate should be above 0 Hz, got {self.rate}")
        if not all(math.isfinite(sigma) and sigma > 0 for sigma in self.noise):
            raise HaloposeError(f"a sensor's noise should be above 0 on every axis, got {self.noise}")
        if len(self.bias.sigma) != len(self.noise):
            raise HaloposeError(f"a sensor's noise has {len(self.noise)} axes, its bias {len(self.bias.sigma)}")
        for outage in self.outages:
            _check_interval("an outage", *outage)
        for fault in self.faults:
            if np.size(fault.size) not in (1, len(self.noise)):
                raise HaloposeError(f"a fault has {np.size(fault.size)} sizes, its sensor {len(self.noise)} axes")

    @property
    def covariance(self) -> Array:
        """Covariance (m, m) of the white noise."""
        return np.diag(np.square(self.noise))


def _check_interval(name: str, start: float, end: float) -> None:
    if not start < end:
        raise HaloposeError(f"{name} should end after it starts, got {start} to {end}")


# Metres, m/s^2 and radians. ARINC 704 allows an IRS 0.4 degrees of heading and 0.1 degrees of pitch and roll, both two
# sigma. Gravity measured through its tilt adds to the accelerometers' bias.
GNSS = Sensor(5.0, (0.8, 0.8, 1.2), GaussMarkov((1.0, 1.0, 1.5), 120.0))
LOCALIZER = Sensor(10.0, (4e-4,), GaussMarkov((5e-4,), 600.0))
GLIDE_SLOPE = Sensor(10.0, (6e-4,), GaussMarkov((8e-4,), 600.0))
RADIO = Sensor(25.0, (0.3,), GaussMarkov((0.01,), 600.0))  # its bias is a scale error, a share of the height
IRS = Sensor(100.0, (0.03, 0.03, 0.03), GaussMarkov((0.003, 0.003, 0.003), 300.0))
ATTITUDE = Sensor(100.0, (2e-4, 2e-4, 2e-4), GaussMarkov((3.5e-3, 9e-4, 9e-4), 600.0))
# Error model of vision: the persistent part in its own standard deviations, the variance of fixes relative to the
# propagated corner covariances, and the persistent shares along the runway, of the rest to the side, and of the rest
# upward. The white part has a factor per flight with an inverse gamma distribution (``noise_scale``). Maximum
# likelihood on 40 separate flights (research.landing_results --persistence).
VISION_DRIFT = GaussMarkov((1.0, 1.0, 1.0), 22.0)
VISION_VARIANCE_FACTOR = (1.13, 1.10, 0.91)
VISION_PERSISTENT_SHARE = (0.62, 0.47, 0.60)
VISION_NOISE_SCALE_DOF = 26.0
# The rest of vision's error is not white between frames of one second (research.detector_errors).
VISION_FLICKER = GaussMarkov((1.0, 1.0, 1.0), 0.35)
VISION_FLICKER_SHARE = 0.6
MOUNTING_ERROR = GaussMarkov((5e-4, 5e-4, 5e-4))  # angles of the camera's mounting, constant within a flight


@dataclass(frozen=True)
class Sensors:
    """Sensors on board; None removes one. Change one with ``dataclasses.replace(GNSS, outages=...)``."""

    gnss: Sensor | None = GNSS
    localizer: Sensor | None = LOCALIZER
    glide_slope: Sensor | None = GLIDE_SLOPE
    radio: Sensor | None = RADIO
    irs: Sensor | None = IRS
    attitude: Sensor | None = ATTITUDE

    def __post_init__(self) -> None:
        for source, sensor in self.on_board():
            if len(sensor.noise) != SIZES[source]:
                raise HaloposeError(f"{source} measures {SIZES[source]} values, its noise has {len(sensor.noise)}")

    def on_board(self) -> list[tuple[Source, Sensor]]:
        """Yield the sensors that are not None, with their names."""
        named = [(source, getattr(self, source)) for source in SIZES if source != "vision"]
        return [(source, sensor) for source, sensor in named if sensor is not None]


@dataclass(frozen=True)
class IlsSite:
    """ILS antennas in runway axes: localizer beyond the far end, glide slope abeam the aiming point; path angle."""

    localizer: tuple[float, float, float] = (3300.0, 0.0, 0.0)
    glide_slope: tuple[float, float, float] = (300.0, -120.0, 0.0)
    glide_angle: float = math.radians(3.0)

    @classmethod
    def of_runway(cls, length: float, glide_angle: float = math.radians(3.0), aiming_point: float = 300.0) -> IlsSite:
        """Return a typical site: localizer 300 m beyond the end, glide-slope mast 120 m right of the aiming point."""
        return cls((length + 300.0, 0.0, 0.0), (aiming_point, -120.0, 0.0), glide_angle)

    def localizer_angle(self, positions: Array) -> tuple[Array, Array]:
        """Return the angle (N,) from the centreline at the antenna, positive left, and its gradient (N, 3)."""
        along, left, _ = (positions - np.asarray(self.localizer)).T
        square = along**2 + left**2
        return np.arctan2(left, -along), np.stack([left, -along, 0 * along], axis=1) / square[:, None]

    def glide_slope_angle(self, positions: Array) -> tuple[Array, Array]:
        """Return the elevation (N,) seen from the antenna minus the path angle, and its gradient (N, 3).

        Surfaces of equal angle are cones about the mast, so the path flares slightly abeam the mast, as a real one
        does.
        """
        along, across, up = (positions - np.asarray(self.glide_slope)).T
        level = np.hypot(along, across)
        square = level**2 + up**2
        slope = -up / (square * level)
        gradient = np.stack([slope * along, slope * across, level / square], axis=1)
        return np.arctan2(up, level) - self.glide_angle, gradient


def simulate(
    truth: TrueTrajectory, sensors: Sensors, seed: int, site: IlsSite | None = None, terrain: Terrain = LEVEL
) -> list[Measurement]:
    """Simulate all measurements of a flight, in order of time.

    Args:
        truth: true trajectory in runway axes.
        sensors: sensors on board.
        seed: seed of noise and biases.
        site: antennas of the ILS; default: ``IlsSite()``.
        terrain: profile of the ground under the radio altimeter, with the error that it states.
    """
    measured: list[Measurement] = []
    for source, sensor in sensors.on_board():
        tilt = _tilt(truth, sensors.attitude or ATTITUDE, seed) if source == "irs" else None
        ground = None
        if source == "radio":
            ground = _ground(terrain, truth, sensor, np.random.default_rng([seed, 90]))
        measured += _sense(truth, source, sensor, _numbers(seed, source), site or IlsSite(), tilt, ground)
    return in_order(measured)


def _numbers(seed: int, source: Source) -> np.random.Generator:
    return np.random.default_rng([seed, list(SIZES).index(source)])


def _tilt(truth: TrueTrajectory, attitude: Sensor, seed: int) -> tuple[Array, Array]:
    """Return times (N,) and the gravity error (N, 3) of the measured acceleration due to errors of pitch and roll."""
    times = _times(truth, attitude.rate)
    bias = attitude.bias.sample(times.size, 1 / attitude.rate, _numbers(seed, "attitude"))
    return times, -GRAVITY * np.stack([bias[:, 1], bias[:, 2], 0 * times], axis=1)


def _ground(terrain: Terrain, truth: TrueTrajectory, radio: Sensor, rng: np.random.Generator) -> Array:
    """Return the true height (N,) of the ground below the aircraft at the samples of the radio altimeter."""
    times = _times(truth, radio.rate)
    positions = truth.position(times)
    height, _, sigma = terrain.at(positions[:, 0])
    wrong = GaussMarkov((1.0,), terrain.correlation_s).sample(times.size, 1 / radio.rate, rng)[:, 0]
    return height + sigma * wrong


def _times(truth: TrueTrajectory, rate: float) -> Array:
    """Return the times (N,) of a sensor's samples, from the first to the last instant of the flight."""
    count = math.floor((truth.times[-1] - truth.times[0]) * rate * (1 + 1e-12)) + 1
    return np.minimum(truth.times[0] + np.arange(count) / rate, truth.times[-1])


def vision(
    times: ArrayLike,
    positions: ArrayLike,
    covariances: ArrayLike,
    sensitivities: ArrayLike | None = None,
    persistent_share: tuple[float, float, float] = (0.0, 0.0, 0.0),
    variance_factor: tuple[float, float, float] = (1.0, 1.0, 1.0),
    flicker_share: float = 0.0,
) -> list[Measurement]:
    """Convert position fixes to measurements. Frames without a position may hold NaN; the filter skips them and reports
    it.

    Args:
        times: times (N,) in seconds.
        positions: positions (N, 3) of the aircraft, each from one image.
        covariances: covariances (N, 3, 3).
        sensitivities: derivatives (N, 3, 3) by the bias of the attitude, if the attitude is from the IRS.
        persistent_share: share of the variance that persists from image to image: along the runway, of the rest to the
            side, and of the rest upward. The filter tracks it as ``VISION_DRIFT``.
        variance_factor: variance relative to the stated one, in the same order.
        flicker_share: share of the rest that lasts for a fraction of a second. The filter tracks it as
            ``VISION_FLICKER``: at 1 Hz it is white, at 10 Hz it is not.
    """
    t, p, c = (np.asarray(value, dtype=np.float64) for value in (times, positions, covariances))
    s = None if sensitivities is None else np.asarray(sensitivities, dtype=np.float64)
    if t.ndim != 1 or p.shape != (t.size, 3) or c.shape != (t.size, 3, 3) or (s is not None and s.shape != c.shape):
        raise HaloposeError(
            "vision takes times (N,), positions (N, 3), covariances and sensitivities (N, 3, 3), "
            f"got {t.shape}, {p.shape}, {c.shape}" + ("" if s is None else f" and {s.shape}")
        )
    share, size = np.asarray(persistent_share), np.asarray(variance_factor)
    if share.shape != (3,) or not ((share >= 0) & (share < 1)).all():
        raise HaloposeError(f"persistent_share takes three shares, each 0 or more and under 1, got {persistent_share}")
    if size.shape != (3,) or not (np.isfinite(size) & (size > 0)).all():
        raise HaloposeError(f"variance_factor takes three factors above 0, got {variance_factor}")
    known = np.isfinite(c).all(axis=(1, 2), keepdims=True)
    factor = np.linalg.cholesky(np.where(known, c, np.eye(3)))
    if not 0 <= flicker_share < 1:
        raise HaloposeError(f"flicker_share must be 0 or more and under 1, got {flicker_share}")
    fresh = size * (1 - share) * (1 - flicker_share)
    white = np.where(known, (factor * fresh) @ np.swapaxes(factor, 1, 2), np.nan) if (fresh != 1).any() else c
    drift, flicker = factor * np.sqrt(size * share), factor * np.sqrt(size * (1 - share) * flicker_share)
    return [
        Measurement(
            float(t[n]), "vision", p[n], white[n], None if s is None else s[n], drift[n],
            flicker[n] if flicker_share else None,
        )
        for n in range(t.size)
    ]  # fmt: skip


def in_order(measurements: Iterable[Given]) -> list[Given]:
    """Sort measurements by arrival, and at equal times by the order of ``SIZES``."""
    rank = {source: n for n, source in enumerate(SIZES)}
    return sorted(measurements, key=lambda given: (given.time + getattr(given, "latency", 0.0), rank[given.source]))


def _sense(
    truth: TrueTrajectory,
    source: Source,
    sensor: Sensor,
    rng: np.random.Generator,
    site: IlsSite,
    tilt: tuple[Array, Array] | None = None,
    ground: Array | None = None,
) -> list[Measurement]:
    times = _times(truth, sensor.rate)
    exact, sensitivity, usable = _exact(truth, source, times, site, ground)
    bias = sensor.bias.sample(times.size, 1 / sensor.rate, rng)
    if tilt is not None:
        bias = bias + np.stack([np.interp(times, tilt[0], axis) for axis in tilt[1].T], axis=1)
    noise = rng.standard_normal(exact.shape) * sensor.noise
    values = _with_faults(times, exact + sensitivity * bias, noise, sensor.faults)
    for start, end in sensor.outages:
        usable &= ~_within(times, start, end)
    covariance = sensor.covariance
    return [Measurement(float(times[n]), source, values[n], covariance) for n in np.flatnonzero(usable)]


def _exact(
    truth: TrueTrajectory, source: Source, times: Array, site: IlsSite, ground: Array | None = None
) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Return error-free values (N, m), the effect of a unit bias on them (N, 1), and where there is a signal (N,)."""
    one, always = np.ones((times.size, 1)), np.ones(times.size, dtype=bool)
    if source in ("irs", "attitude"):
        return (truth.acceleration if source == "irs" else truth.attitude)(times), one, always
    positions = truth.position(times)
    if source == "localizer":
        return site.localizer_angle(positions)[0][:, None], one, positions[:, 0] < site.localizer[0]
    if source == "glide_slope":  # beyond the threshold the path meets the ground
        return site.glide_slope_angle(positions)[0][:, None], one, positions[:, 0] < 0
    if source == "radio":
        height = positions[:, 2:] if ground is None else positions[:, 2:] - ground[:, None]
        return height, height, height[:, 0] < RADIO_CEILING
    return positions, one, always


def _with_faults(times: Array, values: Array, noise: Array, faults: tuple[Fault, ...]) -> Array:
    """Add noise and faults to values (N, m), faults in the given order."""
    for fault in faults:
        if fault.kind == "noise":
            noise = np.where(_within(times, fault.start, fault.end)[:, None], np.multiply(fault.size, noise), noise)
    measured = values + noise
    for fault in faults:
        during = np.flatnonzero(_within(times, fault.start, fault.end))
        if not during.size:
            continue
        if fault.kind == "step":
            measured[during] += fault.size
        elif fault.kind == "ramp":
            measured[during] += (times[during] - fault.start)[:, None] * np.asarray(fault.size)
        elif fault.kind == "stuck":
            measured[during] = measured[max(during[0] - 1, 0)]
    return measured


def _within(times: Array, start: float, end: float) -> NDArray[np.bool_]:
    return (times >= start) & (times < end)
