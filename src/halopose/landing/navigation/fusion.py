"""Run a whole flight through the navigator, and test whether its covariances were consistent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import chi2

from halopose.errors import HaloposeError
from halopose.landing.navigation.motion_model import (
    MOTION,
    POSITION,
    STATES,
    FusionSettings,
    InitialState,
)
from halopose.landing.navigation.navigator import (
    NavigationState,
    Navigator,
    check_measurement,
    reason_against,
    run,
)
from halopose.landing.navigation.sensors import DeferredMeasurement, Measurement, Source, TrueTrajectory, in_order
from halopose.landing.requirements import Requirement
from halopose.types import Array


@dataclass(frozen=True)
class NavigationOutput:
    """State of the navigator at N requested times, after everything measured until then."""

    times: Array  # (N,)
    positions: Array  # (N, 3)
    covariances: Array  # (N, 3, 3), if no source lies
    overbounds: Array  # (N, 3, 3), also if GNSS drifts away unnoticed
    levels: Array  # (N, 3), along the glide path, to the side and across it
    flags: tuple[tuple[str, ...], ...]  # (N), in words, exclusions too
    alerts: tuple[tuple[str, ...], ...]  # (N), in words, for which the position is not to be used

    @classmethod
    def of(cls, states: list[NavigationState]) -> NavigationOutput:
        count = len(states)
        return cls(
            np.array([state.time for state in states]),
            np.array([state.position for state in states]).reshape(count, 3),
            np.array([state.covariance[:3, :3] for state in states]).reshape(count, 3, 3),
            np.array([state.overbound for state in states]).reshape(count, 3, 3),
            np.array([state.levels for state in states]).reshape(count, 3),
            tuple(state.flags for state in states),
            tuple(state.alerts for state in states),
        )

    @property
    def flagged(self) -> NDArray[np.bool_]:
        """Frames (N,) at which the navigator reports something, an exclusion too."""
        return np.array([bool(words) for words in self.flags], dtype=bool)

    @property
    def alerted(self) -> NDArray[np.bool_]:
        """When the position is not to be used (N,), whatever the levels are."""
        return np.array([bool(words) for words in self.alerts], dtype=bool)

    def valid(self, requirement: Requirement) -> NDArray[np.bool_]:
        """When the position may be used for an operation (N,): no alert, and levels within its alert limits."""
        return np.asarray((self.levels <= requirement.limits).all(1) & ~self.alerted)


@dataclass(frozen=True)
class FusedTrack:
    """The navigator after each of M measurements, except those of the IRS.

    Attributes:
        times: times (M,) in seconds.
        source: source of each measurement (M).
        states: states (M, 30).
        covariances: covariances (M, 30, 30).
        levels: protection levels (M, 3) in metres.
        nis: normalised innovation squared (M,).
        accepted: whether the filter used the measurement (M,).
        recovered: whether the filter restarted around the measurement (M,).
        flagged: whether the position was flagged as unreliable (M,).
        reasons: what happened to each measurement (M), in words.
        ignored: one line per ignored measurement, with the reason.
        irs_times: times of the IRS samples that were used in the propagation.
        output: states at the requested times.
    """

    times: Array  # (M,)
    source: NDArray[np.str_]  # (M,)
    states: Array  # (M, 30)
    covariances: Array  # (M, 30, 30)
    levels: Array  # (M, 3)
    nis: Array  # (M,)
    accepted: NDArray[np.bool_]  # (M,)
    recovered: NDArray[np.bool_]  # (M,)
    flagged: NDArray[np.bool_]  # (M,)
    reasons: tuple[str, ...]
    ignored: tuple[str, ...]
    irs_times: Array
    output: NavigationOutput

    @property
    def positions(self) -> Array:
        """Positions (M, 3)."""
        return self.states[:, POSITION]

    @property
    def rejected(self) -> dict[str, int]:
        """Number of rejected measurements by source."""
        return dict(Counter(self.source[~self.accepted].tolist()))

    def times_of(self, source: str) -> Array:
        """Return the times of a source's measurements, also for the IRS."""
        return self.irs_times if source == "irs" else self.times[self.source == source]

    def nis_of(self, source: Source) -> Array:
        """Return the NIS of a source's measurements, accepted or not; chi-square distributed if the filter is
        consistent.
        """
        return self.nis[self.source == source]


@dataclass(frozen=True)
class Consistency:
    """Comparison of chi-square distributed statistics with their distribution.

    Attributes:
        mean: mean of the values.
        mean_bounds: bounds of the mean at ``probability`` for independent values. NIS is independent from one update to
            the next. NEES is independent across flights at one time, but not along one flight.
        bounds: bounds of single values at ``probability``.
        inside: share of values inside ``bounds``.
        count: number of values.
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
    measurements: Iterable[Measurement | DeferredMeasurement],
    initial: InitialState,
    settings: FusionSettings | None = None,
    times: ArrayLike = (),
    delay: float = 0.0,
) -> FusedTrack:
    """Run the navigator over measurements in order of time.

    Measurements that are not finite, or from before the start, are skipped and named in ``ignored``.

    Args:
        measurements: measurements in any order. Attitudes are not part of the state and are ignored.
        initial: initial state.
        settings: settings of the navigator.
        times: requested times (N,), for ``output``.
        delay: seconds after a requested time at which its state is read.

    Raises:
        HaloposeError: A measurement has a wrong shape, or a covariance that is not positive definite.
    """
    navigator = Navigator(initial, settings)
    usable: list[Measurement | DeferredMeasurement] = []
    ignored = []
    for measurement in measurements:
        if isinstance(measurement, Measurement):
            check_measurement(measurement)
        why = reason_against(measurement, float(initial.time))
        if why:
            ignored.append(f"{measurement.source} at {measurement.time:.3f} s: {why}")
        elif measurement.source != "attitude":
            usable.append(measurement)
    rows, output, driven = [], [], []
    for state, asked in run(navigator, in_order(usable), np.asarray(times, dtype=np.float64), delay):
        if asked:
            output.append(state)
        elif state.step is not None and state.step.source == "irs":
            driven.append(state.step.time)
        elif state.step is not None and state.step.innovation is not None:
            rows.append(state)
        elif state.step is not None:
            ignored.append(f"{state.step.source} at {state.step.time:.3f} s: {state.step.reason}")
    return _track(rows, tuple(ignored), np.array(driven), NavigationOutput.of(output))


def _track(
    rows: list[NavigationState], ignored: tuple[str, ...], driven: Array, output: NavigationOutput
) -> FusedTrack:
    steps = [row.step for row in rows if row.step is not None]
    return FusedTrack(
        times=np.array([step.time for step in steps], dtype=np.float64),
        source=np.array([step.source for step in steps], dtype=np.str_),
        states=np.array([row.filters.states[0] for row in rows]).reshape(-1, STATES),
        covariances=np.array([row.filters.covariances[0] for row in rows]).reshape(-1, STATES, STATES),
        levels=np.array([row.levels for row in rows]).reshape(-1, 3),
        nis=np.array([step.nis for step in steps], dtype=np.float64),
        accepted=np.array([step.accepted for step in steps], dtype=bool),
        recovered=np.array([step.restarted for step in steps], dtype=bool),
        flagged=np.array([row.flagged for row in rows], dtype=bool),
        reasons=tuple(step.reason for step in steps),
        ignored=ignored,
        irs_times=driven,
        output=output,
    )


def nees(track: FusedTrack, truth: TrueTrajectory, dof: int = 6) -> Array:
    """Return the normalised estimation error squared (M,): of position and velocity (dof 6) or of position only
    (dof 3).
    """
    if dof not in (3, 6):
        raise HaloposeError(f"NEES takes dof 3 (position) or dof 6 (position and velocity), got {dof}")
    exact = np.concatenate([truth.position(track.times), truth.velocity(track.times)], axis=1)
    error = (exact - track.states[:, MOTION])[:, :dof]
    return np.einsum("mi,mi->m", error, np.linalg.solve(track.covariances[:, :dof, :dof], error[..., None])[..., 0])


def consistency(values: ArrayLike, dof: int, probability: float = 0.95) -> Consistency:
    """Compare NIS or NEES values with the chi-square distribution with ``dof`` degrees of freedom."""
    known = np.asarray(values, dtype=np.float64)
    known = known[~np.isnan(known)]
    if not known.size:
        raise HaloposeError(
            "no values to compare with a chi-square distribution: check that the source has measurements"
        )
    tails = (1 - probability) / 2, (1 + probability) / 2
    low, high = chi2.ppf(tails, dof)
    mean_low, mean_high = chi2.ppf(tails, dof * known.size) / known.size
    inside = float(np.mean((known >= low) & (known <= high)))
    return Consistency(
        float(known.mean()), (float(mean_low), float(mean_high)), (float(low), float(high)), inside, known.size
    )
