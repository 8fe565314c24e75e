"""An extended Kalman filter that joins IRS, GNSS, ILS, radio altimeter and vision (paper, appendix on landing).

In: ``Measurement``s, each at its own time with its own covariance, and where the flight begins. Out: a
``FusedTrack`` of states and covariances, with the innovation statistics that tell whether to believe them.

The state (18,) is position and velocity in runway axes, then what the sensors' drifting biases are believed to
be: IRS acceleration (3), GNSS position (3), localizer, glide slope, radio altimeter scale, IRS attitude (3). IRS
acceleration drives the prediction; everything else corrects it. Every image is a measurement of its own: nothing
is smoothed before. The attitude's bias enters through vision, which took the attitude from the IRS.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import chi2

from halopose.errors import HaloposeError
from halopose.geometry.camera import Array
from halopose.landing.navigation.sensors import (
    ATTITUDE,
    GLIDE_SLOPE,
    GNSS,
    IRS,
    LOCALIZER,
    RADIO,
    SIZES,
    GaussMarkov,
    IlsSite,
    Measurement,
    Source,
    Truth,
    in_order,
)

STATES = 18
POSITION, VELOCITY = slice(0, 3), slice(3, 6)
MOTION = slice(0, 6)
BIAS: dict[Source, slice] = {
    "irs": slice(6, 9),
    "gnss": slice(9, 12),
    "localizer": slice(12, 13),
    "glide_slope": slice(13, 14),
    "radio": slice(14, 15),
    "attitude": slice(15, 18),
}
_FIXES: tuple[Source, ...] = ("gnss", "vision")  # sources of a whole position
_WIDEST = np.square([1e4] * 3 + [100.0] * 3)  # variances beyond which recovery does not search, m^2 and m^2/s^2
_EYE = np.eye(STATES)
_SPEED, _PUSH, _SHIFT = np.eye(STATES, k=3), np.eye(STATES, k=3), np.eye(STATES, k=6)
_SPEED[3:], _PUSH[:3], _PUSH[6:], _SHIFT[3:] = 0, 0, 0, 0  # velocity moves position; the IRS bias moves both
_BIAS_DIAGONAL = slice(6 * (STATES + 1), None, STATES + 1)  # of a raveled (18, 18)


@dataclass(frozen=True)
class Initial:
    """Where the filter starts: time, position (3,), velocity (3,) and their covariance (6, 6).

    Biases start at zero with the standard deviations that the settings give them.
    """

    time: float
    position: ArrayLike
    velocity: ArrayLike
    covariance: ArrayLike


@dataclass(frozen=True)
class FusionSettings:
    """What the filter believes of its sensors, and how it treats what does not fit.

    ``gate``: a measurement is rejected if its NIS lies beyond this quantile of its chi-square law; 1 takes all.

    ``patience``: recovery. Once a source has been rejected this many times in a row, its bias estimate is taken
    to be wrong and starts anew. If it still does not fit, and neither GNSS nor vision has been accepted during
    its last ``patience`` rejections, the filter itself is taken to be wrong: position and velocity lose their
    correlations, their standard deviations are doubled until the measurement fits, up to 10 km and 100 m/s, and
    it is used. So no source forces its way in while GNSS or vision contradicts it.

    Acceleration is linear between IRS samples; the last one counts for ``irs_hold`` seconds. After that the
    aircraft is taken to fly straight on, pushed by white acceleration of density ``coasting`` in m^2/s^3.
    """

    site: IlsSite = field(default_factory=IlsSite)
    irs_bias: GaussMarkov = IRS.bias
    gnss_bias: GaussMarkov = GNSS.bias
    localizer_bias: GaussMarkov = LOCALIZER.bias
    glide_slope_bias: GaussMarkov = GLIDE_SLOPE.bias
    radio_scale: GaussMarkov = RADIO.bias
    attitude_bias: GaussMarkov = ATTITUDE.bias
    irs_rate: float = IRS.rate
    irs_hold: float = 0.1
    coasting: float = 1.0
    gate: float = 0.999
    patience: int = 25

    def __post_init__(self) -> None:
        if not 0 < self.gate <= 1:
            raise HaloposeError(f"the gate should be a probability above 0 and up to 1, got {self.gate}")
        if self.patience < 1:
            raise HaloposeError(f"patience should be 1 rejection or more, got {self.patience}")
        if not (self.irs_rate > 0 and self.irs_hold > 0 and self.coasting > 0):
            raise HaloposeError("irs_rate, irs_hold and coasting should be above 0")
        if self.irs_hold < 1 / self.irs_rate:
            raise HaloposeError(
                f"irs_hold should last to the next sample, {1 / self.irs_rate} s, got {self.irs_hold}"
            )
        for source, bias in zip(BIAS, self.biases, strict=True):
            if len(bias.sigma) != SIZES[source]:
                raise HaloposeError(f"the {source} bias takes {SIZES[source]} sigmas, got {len(bias.sigma)}")

    @property
    def biases(self) -> tuple[GaussMarkov, ...]:
        """Bias models in the order of ``BIAS``."""
        drifting = self.irs_bias, self.gnss_bias, self.localizer_bias, self.glide_slope_bias
        return *drifting, self.radio_scale, self.attitude_bias

    @cached_property
    def bias_variance(self) -> Array:
        """Stationary variances (12,) of the bias states."""
        return np.concatenate([np.square(bias.sigma) for bias in self.biases])

    @cached_property
    def bias_rate(self) -> Array:
        """Decay per second (12,) of the bias states."""
        return np.concatenate([np.full(len(bias.sigma), 1 / bias.time_constant) for bias in self.biases])


@dataclass(frozen=True)
class FusedTrack:
    """The filter after each of M measurements. Innovations are NaN for the IRS and beyond a source's size.

    ``accepted`` is also True for IRS samples; ``recovered`` marks what was taken by the rule of
    ``FusionSettings.patience``; ``ignored`` says in one line each what was passed over and why.
    """

    times: Array  # (M,)
    source: NDArray[np.str_]  # (M,)
    states: Array  # (M, 18)
    covariances: Array  # (M, 18, 18)
    innovations: Array  # (M, 3)
    innovation_covariances: Array  # (M, 3, 3)
    nis: Array  # (M,), NaN for the IRS
    accepted: NDArray[np.bool_]  # (M,)
    recovered: NDArray[np.bool_]  # (M,)
    ignored: tuple[str, ...]

    @property
    def positions(self) -> Array:
        """(M, 3)."""
        return self.states[:, POSITION]

    @property
    def position_covariances(self) -> Array:
        """(M, 3, 3)."""
        return self.covariances[:, POSITION, POSITION]

    @property
    def velocities(self) -> Array:
        """(M, 3)."""
        return self.states[:, VELOCITY]

    @property
    def rejected(self) -> dict[str, int]:
        """How often each source was rejected."""
        return dict(Counter(self.source[~self.accepted].tolist()))

    def nis_of(self, source: Source) -> Array:
        """NIS of one source's measurements, accepted or not: chi-square with its size if all is well."""
        return self.nis[self.source == source]


@dataclass(frozen=True)
class Consistency:
    """Statistics that should follow a chi-square law, against that law.

    ``bounds`` should hold ``probability`` of single values, ``inside`` is the share they do hold.
    ``mean_bounds`` should hold the mean if the values are independent: NIS is, from one update to the next;
    NEES is at one instant over many flights, and not along a single flight.
    """

    mean: float
    mean_bounds: tuple[float, float]
    bounds: tuple[float, float]
    inside: float
    count: int

    @property
    def consistent(self) -> bool:
        return self.mean_bounds[0] <= self.mean <= self.mean_bounds[1]


def fuse(
    measurements: Iterable[Measurement], initial: Initial, settings: FusionSettings | None = None
) -> FusedTrack:
    """Run the filter over measurements in order of time; attitudes are no part of the state and are left out.

    Values that are not finite, and those from before the start, are passed over and named in ``ignored``. A wrong
    shape, or a finite covariance that is not positive definite, is refused.
    """
    given = [measurement for measurement in measurements if measurement.source != "attitude"]
    reasons = _reasons_against(given, initial.time)
    usable = in_order(measurement for n, measurement in enumerate(given) if n not in reasons)
    track = _blank(usable, tuple(reasons[n] for n in sorted(reasons)))
    running = _Filter(initial, settings or FusionSettings())
    for n, measurement in enumerate(usable):
        running.predict(measurement.time)
        if measurement.source == "irs":
            running.drive(measurement)
        else:
            running.update(measurement, track, n)
        track.states[n], track.covariances[n] = running.state, running.covariance
    return track


def nees(track: FusedTrack, truth: Truth, dof: int = 6) -> Array:
    """Squared error over covariance (M,): of position and velocity (dof 6) or of position alone (dof 3)."""
    if dof not in (3, 6):
        raise HaloposeError(f"NEES is of position (dof 3) or of position and velocity (dof 6), got {dof}")
    exact = np.concatenate([truth.position(track.times), truth.velocity(track.times)], axis=1)
    error = (exact - track.states[:, MOTION])[:, :dof]
    return np.einsum(
        "mi,mi->m", error, np.linalg.solve(track.covariances[:, :dof, :dof], error[..., None])[..., 0]
    )


def consistency(values: ArrayLike, dof: int, probability: float = 0.95) -> Consistency:
    """Hold values that should be chi-square with ``dof`` degrees of freedom, NIS or NEES, against that law."""
    known = np.asarray(values, dtype=np.float64)
    known = known[~np.isnan(known)]
    if not known.size:
        raise HaloposeError("no values to hold against a chi-square law: was the source ever heard?")
    tails = (1 - probability) / 2, (1 + probability) / 2
    low, high = chi2.ppf(tails, dof)
    mean_low, mean_high = chi2.ppf(tails, dof * known.size) / known.size
    inside = float(np.mean((known >= low) & (known <= high)))
    return Consistency(
        float(known.mean()), (float(mean_low), float(mean_high)), (float(low), float(high)), inside, known.size
    )


def transition(
    dt: float, density: ArrayLike, settings: FusionSettings, *, driven: bool = True
) -> tuple[Array, Array]:
    """Transition (18, 18) and process noise (18, 18) over ``dt`` seconds.

    ``density`` (3, 3) of the white acceleration noise. The noise is that of the integral, so that a step
    taken in two halves is the same step. Driven by the IRS, its bias enters the motion, held over the step.
    """
    step, noise, spread = _EYE + dt * _SPEED, np.zeros((STATES, STATES)), np.asarray(density) * dt
    if driven:
        step -= dt * _PUSH + (0.5 * dt**2) * _SHIFT
    noise[POSITION, POSITION] = spread * (dt**2 / 3)
    noise[POSITION, VELOCITY] = noise[VELOCITY, POSITION] = spread * (dt / 2)
    noise[VELOCITY, VELOCITY] = spread
    decay = np.exp(-dt * settings.bias_rate)
    step.ravel()[_BIAS_DIAGONAL] = decay
    noise.ravel()[_BIAS_DIAGONAL] = settings.bias_variance * (1 - decay**2)
    return step, noise


def observe(source: Source, state: Array, site: IlsSite, sensitivity: Array | None = None) -> tuple[Array, Array]:
    """What a sensor should say (m,) in a state (18,), and its Jacobian (m, 18).

    ``sensitivity`` (3, 3) says how far vision moves with the bias of the attitude it was computed with.
    """
    jacobian = np.zeros((SIZES[source], STATES))
    if source == "localizer" or source == "glide_slope":
        angle = site.localizer_angle if source == "localizer" else site.glide_slope_angle
        expected, jacobian[:, POSITION] = angle(state[None, POSITION])
        jacobian[0, BIAS[source]] = 1.0
        return expected + state[BIAS[source]], jacobian
    if source == "radio":
        scale, height = 1 + state[BIAS["radio"]], state[2]
        jacobian[0, 2], jacobian[0, BIAS["radio"]] = scale[0], height
        return scale * height, jacobian
    jacobian[:, POSITION] = np.eye(3)
    if source == "gnss":
        jacobian[:, BIAS["gnss"]] = np.eye(3)
        return state[POSITION] + state[BIAS["gnss"]], jacobian
    if sensitivity is not None:
        jacobian[:, BIAS["attitude"]] = sensitivity
    return jacobian @ state, jacobian


@dataclass(frozen=True)
class _Innovation:
    """Measured less expected (m,), its covariance (m, m), the Jacobian (m, 18), the gain (18, m) and the NIS."""

    value: Array
    covariance: Array
    jacobian: Array
    gain: Array
    nis: float

    @classmethod
    def of(cls, measurement: Measurement, state: Array, covariance: Array, site: IlsSite) -> _Innovation:
        expected, jacobian = observe(measurement.source, state, site, measurement.sensitivity)
        value = measurement.value - expected
        across = jacobian @ covariance
        spread = across @ jacobian.T + measurement.covariance
        solved = np.asarray(np.linalg.solve(spread, np.column_stack([value, across])), dtype=np.float64)
        return cls(value, spread, jacobian, solved[:, 1:].T, float(value @ solved[:, 0]))


def _correct(state: Array, covariance: Array, innovation: _Innovation, noise: Array) -> tuple[Array, Array]:
    """State and covariance after an update, in Joseph's form, which no rounding of the gain makes indefinite."""
    rest = _EYE - innovation.gain @ innovation.jacobian
    updated = rest @ covariance @ rest.T + innovation.gain @ noise @ innovation.gain.T
    return state + innovation.gain @ innovation.value, (updated + updated.T) / 2


class _Filter:
    """State and covariance on their way through the measurements."""

    def __init__(self, initial: Initial, settings: FusionSettings) -> None:
        self.settings = settings
        self.time = float(initial.time)
        self.state, self.covariance = _start(initial, settings)
        self.acceleration, self.density = np.zeros(3), np.zeros((3, 3))
        self.driven_until = -math.inf
        self.gates = {size: float(chi2.ppf(settings.gate, size)) for size in set(SIZES.values())}
        self.run: Counter[Source] = Counter()  # rejections in a row
        self.unopposed: Counter[Source] = Counter()  # those since GNSS or vision was accepted

    def predict(self, time: float) -> None:
        """Move on to a time, with the IRS as long as its last sample counts and coasting from there."""
        for until, driven in ((min(time, self.driven_until), True), (time, False)):
            dt = until - self.time
            if dt <= 0:
                continue
            density = self.density if driven else self.settings.coasting * np.eye(3)
            step, noise = transition(dt, density, self.settings, driven=driven)
            self.state = step @ self.state
            if driven:
                self.state[POSITION] += 0.5 * dt**2 * self.acceleration
                self.state[VELOCITY] += dt * self.acceleration
            moved = step @ self.covariance @ step.T + noise
            self.covariance = (moved + moved.T) / 2
            self.time = until

    def drive(self, measurement: Measurement) -> None:
        """Take an IRS sample as the acceleration from now on, and as the end of a ramp since the last one."""
        previous, self.acceleration = self.acceleration, np.asarray(measurement.value, dtype=np.float64)
        if self.time <= self.driven_until:
            since = self.time + self.settings.irs_hold - self.driven_until
            self.state[POSITION] += since**2 / 6 * (self.acceleration - previous)
            self.state[VELOCITY] += since / 2 * (self.acceleration - previous)
        self.density = np.asarray(measurement.covariance) / self.settings.irs_rate
        self.driven_until = self.time + self.settings.irs_hold

    def update(self, measurement: Measurement, track: FusedTrack, n: int) -> None:
        """Correct with a measurement if it fits, and note in row n of the track how well it did."""
        source, size = measurement.source, SIZES[measurement.source]
        innovation = _Innovation.of(measurement, self.state, self.covariance, self.settings.site)
        track.innovations[n, :size], track.nis[n] = innovation.value, innovation.nis
        track.innovation_covariances[n, :size, :size] = innovation.covariance
        if innovation.nis > self.gates[size]:
            self.run[source] += 1
            self.unopposed[source] += 1
            recovered = self._recover(measurement) if self.run[source] >= self.settings.patience else None
            if recovered is None:
                track.accepted[n] = False
                return
            innovation, track.recovered[n] = recovered, True
        self.state, self.covariance = _correct(self.state, self.covariance, innovation, measurement.covariance)
        self.run[source] = 0
        if source in _FIXES:
            self.unopposed.clear()

    def _recover(self, measurement: Measurement) -> _Innovation | None:
        """The rule of ``FusionSettings.patience``: the innovation if the measurement may now be used."""
        source, gate = measurement.source, self.gates[SIZES[measurement.source]]
        if source in BIAS:
            states = BIAS[source]
            self.state[states] = 0.0
            _decouple(self.covariance, states, self.settings.bias_variance[states.start - 6 : states.stop - 6])
        innovation = _Innovation.of(measurement, self.state, self.covariance, self.settings.site)
        if innovation.nis <= gate:
            return innovation
        if self.unopposed[source] < self.settings.patience:
            return None
        covariance, variance = self.covariance.copy(), np.diag(self.covariance)[MOTION].copy()
        while innovation.nis > gate:
            if (variance >= _WIDEST).all():
                return None
            variance = np.maximum(variance, np.minimum(4 * variance + 1e-6, _WIDEST))
            _decouple(covariance, MOTION, variance)
            innovation = _Innovation.of(measurement, self.state, covariance, self.settings.site)
        self.covariance = covariance
        return innovation


def _decouple(covariance: Array, states: slice, variance: Array) -> None:
    """Give some states a covariance anew, in place: these variances, and no correlation with anything."""
    covariance[states] = covariance[:, states] = 0.0
    covariance[states, states] = np.diag(variance)


def _start(initial: Initial, settings: FusionSettings) -> tuple[Array, Array]:
    """State (18,) and covariance (18, 18) before the first measurement."""
    parts = [
        np.asarray(part, dtype=np.float64) for part in (initial.position, initial.velocity, initial.covariance)
    ]
    if [part.shape for part in parts] != [(3,), (3,), (6, 6)]:
        raise HaloposeError(
            "a start takes a position (3,), a velocity (3,) and a covariance (6, 6), got "
            + ", ".join(str(part.shape) for part in parts)
        )
    if not (math.isfinite(initial.time) and all(np.isfinite(part).all() for part in parts)):
        raise HaloposeError("a start must be finite: give a time, a position, a velocity and a covariance")
    if not _positive_definite(parts[2]).all():
        raise HaloposeError("the covariance of the start is not symmetric positive definite")
    state, covariance = np.zeros(STATES), np.zeros((STATES, STATES))
    state[POSITION], state[VELOCITY] = parts[0], parts[1]
    covariance[MOTION, MOTION] = parts[2]
    covariance[6:, 6:] = np.diag(settings.bias_variance)
    return state, covariance


def _reasons_against(measurements: list[Measurement], start: float) -> dict[int, str]:
    """Why which measurements are to be passed over; refuses what no sensor should send."""
    rows: dict[Source, list[int]] = {}
    for n, measurement in enumerate(measurements):
        _check_shape(measurement)
        rows.setdefault(measurement.source, []).append(n)
    reasons: dict[int, str] = {}
    for source, mine in rows.items():
        times = np.array([measurements[n].time for n in mine], dtype=np.float64)
        covariances = np.array([measurements[n].covariance for n in mine], dtype=np.float64)
        faults = {
            "its covariance is not finite": ~np.isfinite(covariances).all(axis=(1, 2)),
            "its value is not finite": ~np.isfinite([measurements[n].value for n in mine]).all(axis=1),
            f"before the start at {start:.3f} s": times < start,
            "its time is not finite": ~np.isfinite(times),
        }
        for reason, found in faults.items():
            reasons |= {mine[i]: f"{source} at {times[i]:.3f} s: {reason}" for i in np.flatnonzero(found)}
        sound = np.flatnonzero(~np.any(list(faults.values()), axis=0))
        bad = sound[~_positive_definite(covariances[sound])]
        if bad.size:
            raise HaloposeError(
                f"{source} at {times[bad[0]]:.3f} s: its covariance is not symmetric positive definite"
            )
    return reasons


def _check_shape(measurement: Measurement) -> None:
    size = SIZES.get(measurement.source)
    if size is None:
        raise HaloposeError(f"unknown source {measurement.source!r}: one of {', '.join(SIZES)}")
    shapes = np.shape(measurement.value), np.shape(measurement.covariance)
    if shapes != ((size,), (size, size)):
        raise HaloposeError(
            f"{measurement.source} at {measurement.time:.3f} s should be ({size},) with covariance "
            f"({size}, {size}), got {shapes[0]} and {shapes[1]}"
        )


def _positive_definite(matrices: Array) -> NDArray[np.bool_]:
    """Which of the finite matrices (..., n, n) are symmetric, but for rounding, and positive definite (...)."""
    skew = np.abs(matrices - np.swapaxes(matrices, -1, -2)).max(axis=(-1, -2))
    symmetric = skew <= 1e-9 * np.abs(matrices).max(axis=(-1, -2))
    return np.asarray(symmetric & (np.linalg.eigvalsh(matrices)[..., 0] > 0))


def _blank(measurements: list[Measurement], ignored: tuple[str, ...]) -> FusedTrack:
    count = len(measurements)
    return FusedTrack(
        times=np.array([measurement.time for measurement in measurements], dtype=np.float64),
        source=np.array([measurement.source for measurement in measurements], dtype=np.str_),
        states=np.empty((count, STATES)),
        covariances=np.empty((count, STATES, STATES)),
        innovations=np.full((count, 3), np.nan),
        innovation_covariances=np.full((count, 3, 3), np.nan),
        nis=np.full(count, np.nan),
        accepted=np.ones(count, dtype=bool),
        recovered=np.zeros(count, dtype=bool),
        ignored=ignored,
    )
