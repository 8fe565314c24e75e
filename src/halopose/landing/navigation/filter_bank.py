"""Bank of parallel Kalman filters: one uses every source, each other one leaves out the sources of a fault hypothesis.

The first filter gives the navigator's position. Another filter gives the position without the sources of one fault
hypothesis (``fault_priors``), so a fault of these does not affect it (solution separation). After an exclusion every
filter continues from the one that left out the excluded sources as well. A filter that explains the data without the
exclusion is a rival explanation: it keeps using the excluded sources, so that the levels cover it. A `FilterBank` is
immutable, so earlier ones can be kept. Covariances are propagated lazily, when they are needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np
from scipy.special import chdtri

from halopose.landing.navigation.fault_priors import Hypothesis
from halopose.landing.navigation.gnss_drift import GnssDriftMonitor
from halopose.landing.navigation.motion_model import (
    FLICKER,
    MOTION,
    POSITION,
    PUSH,
    STATES,
    UNINFORMED,
    VELOCITY,
    FusionSettings,
    InitialState,
    observe,
    transition,
)
from halopose.landing.navigation.noise_scale import NoiseScale
from halopose.landing.navigation.sensors import SIZES, Measurement, MemberMeasurements, Source
from halopose.types import Array, Mask

ALL: Hypothesis = frozenset()  # leaves out nothing
_IRS: Hypothesis = frozenset({"irs"})
_WIDEST = np.square([1e4] * 3 + [100.0] * 3)  # largest process noise that `widened` tries, m^2 and m^2/s^2


@dataclass(frozen=True)
class FilterBank:
    """F filters at one time.

    Attributes:
        settings: settings of the navigator.
        time: time of the states in seconds.
        states: states (F, 30).
        settled: covariances (F, 30, 30) at the time ``settled_at``.
        settled_at: time of ``settled`` in seconds.
        without: sources that each filter leaves out (F); none for the first.
        sources: sources that were heard.
        excluded: sources that all filters except the rivals leave out.
        rivals: numbers of the filters that explain the data without the exclusion.
        acceleration: acceleration (3,) of the last IRS sample.
        density: noise density (3, 3) of that acceleration.
        driven_until: time until which that sample is used.
        gnss_drift: hypotheses of a slow GNSS drift, tested with the innovations of the first filter.
        noise_scale: variance of vision in this flight relative to the stated one.
        seen_at: time of the last vision fix in seconds.
    """

    settings: FusionSettings
    time: float
    states: Array
    settled: Array
    settled_at: float
    without: tuple[Hypothesis, ...] = (ALL,)
    sources: tuple[Source, ...] = ()
    excluded: Hypothesis = ALL
    rivals: tuple[int, ...] = ()
    acceleration: Array | None = None
    density: Array | None = None
    driven_until: float = -math.inf
    gnss_drift: GnssDriftMonitor = field(default_factory=GnssDriftMonitor.none)
    noise_scale: NoiseScale = field(default_factory=lambda: NoiseScale.believed(math.inf))
    seen_at: float = -math.inf

    @classmethod
    def start(cls, initial: InitialState, settings: FusionSettings) -> FilterBank:
        """Return one filter, before the first measurement."""
        state, covariance = np.zeros(STATES), np.zeros((STATES, STATES))
        state[POSITION], state[VELOCITY] = np.asarray(initial.position), np.asarray(initial.velocity)
        covariance[MOTION, MOTION] = np.asarray(initial.covariance)
        covariance[6:, 6:] = np.diag(settings.bias_variance)
        scale = NoiseScale.believed(settings.vision_freedom)
        bank = cls(settings, float(initial.time), state[None], covariance[None], float(initial.time), noise_scale=scale)
        if initial.source is None:
            return bank
        bank = bank.knowing(initial.source)
        settled = bank.settled.copy()
        settled[1:, MOTION, MOTION] = np.diag(np.square(UNINFORMED))
        return replace(bank, settled=settled)

    def knowing(self, source: Source) -> FilterBank:
        """Return the bank with filters for the fault hypotheses that include this source, from now on."""
        if source in self.sources:
            return self
        sources = (*self.sources, source)
        new = [each for each in self.settings.priors.covered(sources) if source in each]
        parents = [self.slot(each - {source}) for each in new]
        states, settled = self.states, self.covariances
        return replace(
            self,
            states=np.concatenate([states, states[parents]]),
            settled=np.concatenate([settled, settled[parents]]),
            settled_at=self.time,
            without=(*self.without, *new),
            sources=sources,
        )

    def slot(self, hypothesis: Hypothesis) -> int:
        """Number of the filter that leaves out these sources; the first one if there is none."""
        return self.without.index(hypothesis) if hypothesis in self.without else 0

    def uses(self, source: Source) -> Mask:
        """Which filters (F,) use a source."""
        return np.array(
            [
                source not in each and (source not in self.excluded or n in self.rivals)
                for n, each in enumerate(self.without)
            ]
        )

    @cached_property
    def priors(self) -> Array:
        """Probabilities (F,) of the hypotheses; after an exclusion, given what was excluded."""
        of, excluded = self.settings.priors.of, self.excluded
        given = of(excluded)
        found = []
        for n, each in enumerate(self.without):
            if n in self.rivals:
                found.append(of(each) / given)
            elif each <= excluded:
                found.append(1.0)
            else:
                both = each | excluded
                found.append(of(both) / given if both in self.settings.priors.common else of(each - excluded))
        return np.minimum(np.array(found), 1.0)

    @cached_property
    def covariances(self) -> Array:
        """Covariances (F, 30, 30) at the current time."""
        return self._spread_over(self.time - self.settled_at)

    def _spread_over(self, dt: float) -> Array:
        if dt <= 0:
            return self.settled
        driven, coasting = self._steps(dt)
        moved = driven[0] @ self.settled @ driven[0].T + driven[1]
        if _IRS in self.without or not self._driven:
            alone = self.without.index(_IRS) if self._driven else slice(None)
            moved[alone] = coasting[0] @ self.settled[alone] @ coasting[0].T + coasting[1]
        return np.asarray((moved + np.swapaxes(moved, 1, 2)) / 2)

    def _steps(self, dt: float) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        density = 0.0 if self.density is None else float(self.density[0, 0])
        same = self.density is None or np.array_equal(self.density, density * np.eye(3))
        if same:
            return _cached(round(dt, 9), density, self.settings), _coasted(round(dt, 9), self.settings)
        driven = transition(dt, self.density, self.settings)  # type: ignore[arg-type]
        return driven, _coasted(round(dt, 9), self.settings)

    @property
    def _driven(self) -> bool:
        return self.settled_at < self.driven_until

    def moved(self, time: float) -> FilterBank:
        """Propagate to a later time: by the IRS while its last sample is valid, then by coasting."""
        bank = self
        if bank.time < bank.driven_until < time:
            bank = bank._moved(bank.driven_until)
            bank = replace(bank, settled=bank.covariances, settled_at=bank.time)
        return bank._moved(time) if time > bank.time else bank

    def _moved(self, time: float) -> FilterBank:
        dt, count = time - self.time, len(self.states)
        states = np.concatenate(
            [self.states, self.gnss_drift.shift]
        )  # shifts propagate like states, without acceleration
        pushed = np.zeros((len(states), 3))
        if self.time < self.driven_until and self.acceleration is not None:
            pushed -= states @ PUSH.T
            pushed[:count] += self.acceleration
            if _IRS in self.without:
                pushed[self.without.index(_IRS)] = 0.0
        states[:, POSITION] += dt * states[:, VELOCITY] + 0.5 * dt**2 * pushed
        states[:, VELOCITY] += dt * pushed
        states[:, 6:] *= _decay(round(dt, 9), self.settings)
        drift = replace(self.gnss_drift, shift=states[count:])
        return replace(self, time=time, states=states[:count], gnss_drift=drift)

    def driven(self, measurement: Measurement) -> FilterBank:
        """Use an IRS sample as the acceleration from now on, and as the end of a linear segment since the last
        sample.
        """
        bank = self.knowing("irs")
        value = np.asarray(measurement.value, dtype=np.float64)
        states = bank.states
        if bank.time <= bank.driven_until and bank.acceleration is not None:
            since, slope = bank.time + self.settings.irs_hold - bank.driven_until, value - bank.acceleration
            states = states.copy()
            others = np.array([each != _IRS for each in bank.without])[:, None]
            states[:, POSITION] += others * (since**2 / 6 * slope)
            states[:, VELOCITY] += others * (since / 2 * slope)
        density = np.asarray(measurement.covariance) / self.settings.irs_rate
        until = bank.time + self.settings.irs_hold
        if bank._driven and bank.density is not None and np.array_equal(density, bank.density):
            return replace(bank, states=states, acceleration=value, driven_until=until)
        return replace(
            bank, states=states, settled=bank.covariances, settled_at=bank.time,
            acceleration=value, density=density, driven_until=until,
        )  # fmt: skip

    def corrected(self, innovation: Innovation, chosen: Mask) -> FilterBank:
        """Update the chosen filters (F,) in Joseph's form, whose result stays positive semi-definite under rounding."""
        gain = innovation.gain * chosen[:, None, None]
        kept = np.eye(gain.shape[1]) - gain @ innovation.jacobian
        updated = kept @ self.covariances @ np.swapaxes(kept, 1, 2)
        updated += gain @ innovation.noise @ np.swapaxes(gain, 1, 2)
        states = self.states + (gain @ innovation.value[..., None])[..., 0]
        settled = (updated + np.swapaxes(updated, 1, 2)) / 2
        return replace(self, states=states, settled=settled, settled_at=self.time)

    def suspecting(self, source: Source, innovation: Innovation) -> FilterBank:
        """Update the hypotheses of a GNSS drift with the innovation of the first filter."""
        drift = self.gnss_drift.at(self.time) if source == "gnss" else self.gnss_drift
        first = innovation.value[0], innovation.covariance[0], innovation.jacobian[0], innovation.gain[0]
        return replace(self, gnss_drift=drift.corrected(self.time, source == "gnss", *first))

    def joined(self, given: MemberMeasurements) -> tuple[Measurement, Mask]:
        """One measurement with a leading axis of F, and which filters (F,) measured something."""
        known = [each for each in given.members if each is not None]
        rows = [each if each is not None else known[0] for each in given.members]
        parts = {
            name: None if getattr(known[0], name) is None else np.stack([getattr(each, name) for each in rows])
            for name in ("value", "covariance", "sensitivity", "drift", "flicker", "focal")
        }
        measured = np.array([each is not None for each in given.members])
        return replace(known[0], **parts), measured  # type: ignore[arg-type]

    def scaled(self, measurement: Measurement) -> Measurement:
        """Return a measurement with the factor of this flight on the part of its error that does not persist."""
        factor = self.noise_scale.value
        if measurement.source != "vision" or factor == 1.0:
            return measurement
        flicker = None if measurement.flicker is None else math.sqrt(factor) * measurement.flicker
        return replace(measurement, covariance=factor * np.asarray(measurement.covariance), flicker=flicker)

    def learnt(self, source: Source, innovation: Innovation) -> FilterBank:
        """Update the estimate of vision's variance with the innovation of the first filter."""
        if source != "vision":
            return self
        flicker, seconds = innovation.jacobian[0][:, FLICKER], self.settings.vision_flicker.time_constant
        fresh = 1 - math.exp(-2 * (self.time - self.seen_at) / seconds)
        noise = innovation.noise[0] + fresh * flicker @ flicker.T
        scale = self.noise_scale.after(innovation.value[0], innovation.covariance[0], noise)
        return replace(self, noise_scale=scale, seen_at=self.time)

    def renewed(self, states: slice, chosen: Mask, value: float | None, variance: Array) -> FilterBank:
        """Reset some states of the chosen filters (F,) to these values and variances, without correlation to
        other states.
        """
        means, covariances = self.states.copy(), self.covariances.copy()
        for n in np.flatnonzero(chosen):
            if value is not None:
                means[n, states] = value
            covariances[n, states] = covariances[n, :, states] = 0.0
            covariances[n, states, states] = np.diag(variance)
        return replace(
            self, states=means, settled=covariances, settled_at=self.time, gnss_drift=GnssDriftMonitor.none()
        )

    def excluding(self, hypothesis: Hypothesis, peaceful: Mask) -> FilterBank:
        """Leave out the sources of a hypothesis.

        Each filter goes on from the one that also left these out; where there is none, from the one that left out
        these alone. A filter that explains the data as well (``peaceful`` (F,)) stays as a rival.
        """
        index, rivals = [], []
        for n, each in enumerate(self.without):
            both = each | hypothesis
            if both in self.without:
                index.append(self.without.index(both))
            elif peaceful[n] and n not in self.rivals:
                index.append(n)
                rivals.append(n)
            else:
                index.append(self.slot(hypothesis))
        return replace(
            self,
            states=self.states[index],
            settled=self.covariances[index],
            settled_at=self.time,
            gnss_drift=GnssDriftMonitor.none(),
            excluded=self.excluded | hypothesis,
            rivals=tuple(rivals),
        )

    def readmitting(self, source: Source) -> FilterBank:
        """With a source in use again, and without rival explanations."""
        return replace(self.without_rivals(self.rivals), excluded=self.excluded - {source})

    def without_rivals(self, refuted: tuple[int, ...]) -> FilterBank:
        """With some rival explanations refuted: their filters go on from the first."""
        if not refuted:
            return self
        index = [0 if n in refuted else n for n in range(len(self.without))]
        kept = tuple(n for n in self.rivals if n not in refuted)
        settled = self.covariances[index]
        return replace(self, states=self.states[index], settled=settled, settled_at=self.time, rivals=kept)

    def widened(self, measurement: Measurement) -> FilterBank | None:
        """Enlarge the uncertainty of motion in all filters until a measurement fits; None if no size helps."""
        bank, gate, everyone = self, self.gate(measurement), np.ones(len(self.without), dtype=bool)
        variance = np.diagonal(self.covariances[0])[MOTION].copy()
        while (Innovation.of(measurement, bank).nis > gate).any():
            if (variance >= _WIDEST).all():
                return None
            variance = np.maximum(variance, np.minimum(4 * variance + 1e-6, _WIDEST))
            bank = self.renewed(MOTION, everyone, None, variance)
        return bank

    def gate(self, measurement: Measurement) -> float:
        """Return the NIS above which a measurement is rejected."""
        return _gate(SIZES[measurement.source], self.settings.gate)


@dataclass(frozen=True)
class Innovation:
    """Innovations of F filters.

    Attributes:
        value: measured minus expected value (F, m).
        covariance: covariances (F, m, m).
        jacobian: Jacobians (F, m, 30).
        noise: covariance of the measurement (F, m, m).
        gain: Kalman gains (F, 30, m).
        nis: normalised innovation squared (F,).
    """

    value: Array
    covariance: Array
    jacobian: Array
    noise: Array
    gain: Array
    nis: Array

    @classmethod
    def of(cls, measurement: Measurement, bank: FilterBank) -> Innovation:
        expected, jacobian = observe(measurement, bank.states, bank.settings)
        size = SIZES[measurement.source]
        noise = np.broadcast_to(np.asarray(measurement.covariance), (len(bank.states), size, size))
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
