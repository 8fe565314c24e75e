"""Kalman filters side by side: one with every source, and one without each source that has been heard.

In: a time, an IRS sample or a measurement. Out: a new ``FilterBank``; none is ever changed, so that old ones can be
kept.

The first filter is the navigator's position. The others are what it would have been without one source: if that
source lies, its filter is the one that does not know. Covariances move on only when they are asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np
from scipy.special import chdtri

from halopose.landing.navigation.gnss_drift import GnssDriftMonitor
from halopose.landing.navigation.motion_model import (
    EYE,
    MOTION,
    POSITION,
    PUSH,
    STATES,
    VELOCITY,
    FusionSettings,
    InitialState,
    observe,
    transition,
)
from halopose.landing.navigation.noise_scale import NoiseScale
from halopose.landing.navigation.sensors import SIZES, Measurement, Source
from halopose.types import Array, Mask

_WIDEST = np.square([1e4] * 3 + [100.0] * 3)  # variances beyond which nothing is searched for, m^2 and m^2/s^2


@dataclass(frozen=True)
class FilterBank:
    """F filters at a time: states (F, 24), covariances (F, 24, 24) as they were ``settled`` seconds earlier or at
    it.

    ``without`` (F) names the source that each leaves out, None for the first. ``acceleration`` (3,), its noise
    ``density`` (3, 3) and ``driven_until`` are of the last IRS sample. ``ramps``: what slow lies would have done
    to the first filter. ``scale``: what its innovations say of the variance of vision in this flight.
    """

    settings: FusionSettings
    time: float
    states: Array
    settled: Array
    settled_at: float
    without: tuple[Source | None, ...] = (None,)
    acceleration: Array | None = None
    density: Array | None = None
    driven_until: float = -math.inf
    gnss_drift: GnssDriftMonitor = field(default_factory=GnssDriftMonitor.none)
    noise_scale: NoiseScale = field(default_factory=lambda: NoiseScale.believed(math.inf))

    @classmethod
    def start(cls, initial: InitialState, settings: FusionSettings) -> FilterBank:
        """One filter before the first measurement."""
        state, covariance = np.zeros(STATES), np.zeros((STATES, STATES))
        state[POSITION], state[VELOCITY] = np.asarray(initial.position), np.asarray(initial.velocity)
        covariance[MOTION, MOTION] = np.asarray(initial.covariance)
        covariance[6:, 6:] = np.diag(settings.bias_variance)
        scale = NoiseScale.believed(settings.vision_freedom)
        return cls(settings, float(initial.time), state[None], covariance[None], float(initial.time), noise_scale=scale)

    def knowing(self, source: Source) -> FilterBank:
        """With a filter that leaves out this source, from now on."""
        if source in self.without:
            return self
        return replace(
            self,
            states=np.concatenate([self.states, self.states[:1]]),
            settled=np.concatenate([self.covariances, self.covariances[:1]]),
            settled_at=self.time,
            without=(*self.without, source),
        )

    @cached_property
    def covariances(self) -> Array:
        """(F, 24, 24), now."""
        return self._spread_over(self.time - self.settled_at)

    def _spread_over(self, dt: float) -> Array:
        if dt <= 0:
            return self.settled
        driven, coasting = self._steps(dt)
        moved = driven[0] @ self.settled @ driven[0].T + driven[1]
        if "irs" in self.without or not self._driven:
            alone = self.without.index("irs") if self._driven else slice(None)
            moved[alone] = coasting[0] @ self.settled[alone] @ coasting[0].T + coasting[1]
        return np.asarray((moved + np.swapaxes(moved, 1, 2)) / 2)

    def _steps(self, dt: float) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        density = 0.0 if self.density is None else float(self.density[0, 0])
        same = self.density is None or np.array_equal(self.density, density * np.eye(3))
        if same:
            return _cached(round(dt, 9), density, self.settings), _coasted(round(dt, 9), self.settings)
        return transition(dt, self.density, self.settings), _coasted(round(dt, 9), self.settings)  # type: ignore[arg-type]

    @property
    def _driven(self) -> bool:
        return self.settled_at < self.driven_until

    def moved(self, time: float) -> FilterBank:
        """Later, with the IRS as long as its last sample counts and coasting from there."""
        bank = self
        if bank.time < bank.driven_until < time:
            bank = bank._moved(bank.driven_until)
            bank = replace(bank, settled=bank.covariances, settled_at=bank.time)
        return bank._moved(time) if time > bank.time else bank

    def _moved(self, time: float) -> FilterBank:
        dt, count = time - self.time, len(self.states)
        states = np.concatenate(
            [self.states, self.gnss_drift.shift]
        )  # shifts move as states do, but nothing pushes them
        pushed = np.zeros((len(states), 3))
        if self.time < self.driven_until and self.acceleration is not None:
            pushed -= states @ PUSH.T
            pushed[:count] += self.acceleration
            if "irs" in self.without:
                pushed[self.without.index("irs")] = 0.0
        states[:, POSITION] += dt * states[:, VELOCITY] + 0.5 * dt**2 * pushed
        states[:, VELOCITY] += dt * pushed
        states[:, 6:] *= _decay(round(dt, 9), self.settings)
        ramps = replace(self.gnss_drift, shift=states[count:])
        return replace(self, time=time, states=states[:count], gnss_drift=ramps)

    def driven(self, measurement: Measurement) -> FilterBank:
        """With an IRS sample as the acceleration from now on, and as the end of a ramp since the last one."""
        bank = self.knowing("irs") if "irs" not in self.without else self
        value = np.asarray(measurement.value, dtype=np.float64)
        states = bank.states
        if bank.time <= bank.driven_until and bank.acceleration is not None:
            since, ramp = bank.time + self.settings.irs_hold - bank.driven_until, value - bank.acceleration
            states = states.copy()
            others = np.array([name != "irs" for name in bank.without])[:, None]
            states[:, POSITION] += others * (since**2 / 6 * ramp)
            states[:, VELOCITY] += others * (since / 2 * ramp)
        density = np.asarray(measurement.covariance) / self.settings.irs_rate
        until = bank.time + self.settings.irs_hold
        if bank._driven and bank.density is not None and np.array_equal(density, bank.density):
            return replace(bank, states=states, acceleration=value, driven_until=until)
        return replace(
            bank, states=states, settled=bank.covariances, settled_at=bank.time,
            acceleration=value, density=density, driven_until=until,
        )  # fmt: skip

    def corrected(self, innovation: Innovation, chosen: Mask) -> FilterBank:
        """After an update of the chosen filters (F,), in Joseph's form, which no rounding makes indefinite."""
        gain = innovation.gain * chosen[:, None, None]
        rest = EYE - gain @ innovation.jacobian
        updated = rest @ self.covariances @ np.swapaxes(rest, 1, 2)
        updated += gain @ innovation.noise @ np.swapaxes(gain, 1, 2)
        states = self.states + (gain @ innovation.value[..., None])[..., 0]
        settled = (updated + np.swapaxes(updated, 1, 2)) / 2
        return replace(self, states=states, settled=settled, settled_at=self.time)

    def suspecting(self, source: Source, innovation: Innovation) -> FilterBank:
        """With the drifts of GNSS that the first filter's innovation, by which it is corrected, speaks for."""
        ramps = self.gnss_drift.at(self.time) if source == "gnss" else self.gnss_drift
        first = innovation.value[0], innovation.covariance[0], innovation.jacobian[0], innovation.gain[0]
        return replace(self, gnss_drift=ramps.corrected(self.time, source == "gnss", *first))

    def scaled(self, measurement: Measurement) -> Measurement:
        """A measurement whose white part is as uncertain as it has been in this flight."""
        factor = self.noise_scale.value
        if measurement.source != "vision" or factor == 1.0:
            return measurement
        return replace(measurement, covariance=factor * np.asarray(measurement.covariance))

    def learnt(self, source: Source, innovation: Innovation) -> FilterBank:
        """With what the first filter's innovation, by which it is corrected, says of the variance of vision."""
        if source != "vision":
            return self
        first = innovation.value[0], innovation.covariance[0], innovation.noise
        return replace(self, noise_scale=self.noise_scale.after(*first))

    def renewed(self, states: slice, chosen: Mask, value: float | None, variance: Array) -> FilterBank:
        """With some states of the chosen filters (F,) anew: these variances, and no correlation with anything."""
        means, covariances = self.states.copy(), self.covariances.copy()
        for n in np.flatnonzero(chosen):
            if value is not None:
                means[n, states] = value
            covariances[n, states] = covariances[n, :, states] = 0.0
            covariances[n, states, states] = np.diag(variance)
        return replace(
            self, states=means, settled=covariances, settled_at=self.time, gnss_drift=GnssDriftMonitor.none()
        )

    def led_by(self, member: int) -> FilterBank:
        """With the state of one member in all filters: what it leaves out is left out of all."""
        index = np.full(len(self.without), member)
        settled = self.covariances[index]
        return replace(
            self,
            states=self.states[index],
            settled=settled,
            settled_at=self.time,
            gnss_drift=GnssDriftMonitor.none(),
        )

    def widened(self, measurement: Measurement) -> FilterBank | None:
        """With all filters so unsure of their motion that a measurement fits; None if nothing helps."""
        bank, gate, everyone = self, self.gate(measurement), np.ones(len(self.without), dtype=bool)
        variance = np.diagonal(self.covariances[0])[MOTION].copy()
        while (Innovation.of(measurement, bank).nis > gate).any():
            if (variance >= _WIDEST).all():
                return None
            variance = np.maximum(variance, np.minimum(4 * variance + 1e-6, _WIDEST))
            bank = self.renewed(MOTION, everyone, None, variance)
        return bank

    def gate(self, measurement: Measurement) -> float:
        """NIS beyond which a measurement is rejected."""
        return _gate(SIZES[measurement.source], self.settings.gate)


@dataclass(frozen=True)
class Innovation:
    """Measured less expected (F, m), its covariance (F, m, m), the Jacobian (F, m, 24), the gain and the NIS
    (F,)."""

    value: Array
    covariance: Array
    jacobian: Array
    noise: Array
    gain: Array
    nis: Array

    @classmethod
    def of(cls, measurement: Measurement, bank: FilterBank) -> Innovation:
        expected, jacobian = observe(measurement, bank.states, bank.settings.site)
        noise = np.asarray(measurement.covariance)
        if measurement.source == "vision" and bank.settings.clock:
            speed = bank.states[0, VELOCITY]
            noise = noise + bank.settings.clock**2 * np.outer(speed, speed)
        value = measurement.value - expected
        across = bank.covariances @ np.swapaxes(jacobian, 1, 2)
        spread = jacobian @ across + noise
        inverse = 1 / spread if spread.shape[1] == 1 else np.linalg.inv(spread)
        gain = across @ inverse
        nis = np.einsum("fi,fij,fj->f", value, inverse, value)
        return cls(value, spread, jacobian, noise, gain, nis)


@lru_cache(maxsize=4096)
def _cached(dt: float, density: float, settings: FusionSettings) -> tuple[Array, Array]:
    return transition(dt, density * np.eye(3), settings)


@lru_cache(maxsize=4096)
def _coasted(dt: float, settings: FusionSettings) -> tuple[Array, Array]:
    return transition(dt, settings.coasting * np.eye(3), settings, driven=False)


@lru_cache(maxsize=4096)
def _decay(dt: float, settings: FusionSettings) -> Array:
    return np.exp(-dt * settings.bias_rate)


@lru_cache(maxsize=64)
def _gate(size: int, probability: float) -> float:
    return float(chdtri(size, 1 - probability)) if probability < 1 else math.inf
