"""A whole flight through the navigator, and whether its covariances told the truth.

In: ``Measurement``s in any order, where the flight begins, and perhaps times of interest. Out: a ``FusedTrack``,
and statistics of it that should follow chi-square laws.
"""

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
from halopose.types import Array


@dataclass(frozen=True)
class NavigationOutput:
    """The navigator at N times that were asked for, after everything measured at them."""

    times: Array  # (N,)
    positions: Array  # (N, 3)
    covariances: Array  # (N, 3, 3), if no source lies
    overbounds: Array  # (N, 3, 3), also if GNSS drifts away unnoticed
    levels: Array  # (N, 3), along the glide path, to the side and across it
    flags: tuple[tuple[str, ...], ...]  # (N), in words

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
        )

    @property
    def flagged(self) -> NDArray[np.bool_]:
        """When the navigator says that it is not to be relied upon (N,)."""
        return np.array([bool(words) for words in self.flags], dtype=bool)


@dataclass(frozen=True)
class FusedTrack:
    """The navigator after each of M measurements, those of the IRS aside.

    ``recovered`` marks what the filter started anew around; ``reasons`` (M) say what became of each, ``ignored``
    in one line each what was passed over and why. ``irs_times`` are those of samples that drove the prediction.
    """

    times: Array  # (M,)
    source: NDArray[np.str_]  # (M,)
    states: Array  # (M, 24)
    covariances: Array  # (M, 24, 24)
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
        """(M, 3)."""
        return self.states[:, POSITION]

    @property
    def rejected(self) -> dict[str, int]:
        """How often each source was rejected."""
        return dict(Counter(self.source[~self.accepted].tolist()))

    def times_of(self, source: str) -> Array:
        """When a source was heard, the IRS too."""
        return self.irs_times if source == "irs" else self.times[self.source == source]

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
    measurements: Iterable[Measurement | DeferredMeasurement],
    initial: InitialState,
    settings: FusionSettings | None = None,
    times: ArrayLike = (),
    delay: float = 0.0,
) -> FusedTrack:
    """Run the navigator over measurements in order of time; attitudes are no part of the state and are left out.

    ``times`` (N,) are asked for ``delay`` seconds after they have passed, and stand in ``output``. Values that
    are not finite, and those from before the start, are passed over and named in ``ignored``. A wrong shape, or a
    finite covariance that is not positive definite, is refused.
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
    """Squared error over covariance (M,): of position and velocity (dof 6) or of position alone (dof 3)."""
    if dof not in (3, 6):
        raise HaloposeError(f"NEES is of position (dof 3) or of position and velocity (dof 6), got {dof}")
    exact = np.concatenate([truth.position(track.times), truth.velocity(track.times)], axis=1)
    error = (exact - track.states[:, MOTION])[:, :dof]
    return np.einsum("mi,mi->m", error, np.linalg.solve(track.covariances[:, :dof, :dof], error[..., None])[..., 0])


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
