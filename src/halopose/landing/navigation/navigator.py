"""Online navigation: takes one measurement, returns one state with protection levels and flags.

Filters without the sources of each fault hypothesis, a source or a pair, run beside the filter with every source
(``filter_bank``, ``fault_priors``). If a hypothesis is true, its filter is not affected. So the position error is at
most the distance to that filter plus that filter's own error. ``NavigationState.levels`` is this bound, with the
integrity risk shared among the hypotheses. A flag is raised if

- most measurements of a source over ``patience`` seconds were rejected,
- the position without some sources is more than ``apart`` standard deviations away for ``confirm`` seconds,
- a GNSS drift is detected (``gnss_drift``),
- a source is excluded, or has stopped (``stale``), or the filter has restarted.

The rule for a source that does not fit:

1. If there is exactly one source without which all others agree, that source is excluded, until it has fitted for
   ``probation`` seconds to a filter that is certain enough to tell. An excluded IRS stays excluded. The rest continues
   with levels of its own. Filters that explain the data without the exclusion continue as rivals, which the levels
   cover.
2. If there are several such sources or none, it is not clear which source is right. The flag is the only consequence.
3. The filter itself is considered wrong only if no other source that observes the disputed axis has lately been
   accepted, and either this source never was, or there is no source without which the others agree. Then the
   uncertainty of the motion is enlarged until the measurement fits. Repeated measurements alone never achieve that.

Each filter associates vision where it believes the aircraft to be. A confident detection where a filter does not expect
the runway counts as a rejection: the camera monitors the filter.

A measurement that is late by at most ``lag`` is inserted at its time, and later measurements are processed again. An
older one is ignored, with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from scipy.special import ndtri

from halopose.errors import HaloposeError
from halopose.landing.navigation.fault_priors import Hypothesis
from halopose.landing.navigation.filter_bank import FilterBank, Innovation
from halopose.landing.navigation.motion_model import (
    BIAS,
    FLICKER,
    MOTION,
    POSITION,
    VELOCITY,
    FusionSettings,
    InitialState,
)
from halopose.landing.navigation.noise_scale import NoiseScale
from halopose.landing.navigation.sensors import (
    SIZES,
    DeferredMeasurement,
    Measurement,
    MemberMeasurements,
    Source,
)
from halopose.landing.requirements import Requirement, path_axes
from halopose.types import Array, Mask

_AXES = path_axes()
_SEES: dict[Source, tuple[int, ...]] = {
    "gnss": (0, 1, 2),
    "localizer": (1,),
    "glide_slope": (2,),
    "radio": (2,),
    "vision": (0, 1, 2),
}
_RANK = {source: n for n, source in enumerate(SIZES)}
_COLUMN = {source: n for n, source in enumerate(_SEES)}
_SIMULTANEOUS = 1e-9  # seconds
_MEMBERS = 22  # filters at most: all sources, without each of six, without each pair
_MOST = 0.7  # share of rejections, forgotten over patience, from which a source does not fit: three in a row at 1 Hz
_LEAST = 0.6  # of a share is remembered from one time to the next, so that it takes three times to pass
_STRAINED = 5.0  # standard deviations of its mean NIS from which a filter is not at peace with a source
_BLIND = 25.0  # variances of a source's own error from which a filter is too unsure to tell whether it fits
_SLIGHT = 0.25  # of its standard deviation: a position is not called apart for less than this counts


@dataclass(frozen=True)
class Step:
    """What happened to one measurement.

    IRS samples, attitudes and ignored measurements have no innovation; their NIS and gate are NaN.

    Attributes:
        time: time of the measurement.
        source: its source.
        accepted: whether the filter used it.
        reason: why it was rejected or ignored, in words.
        innovation: innovation (m,).
        covariance: covariance (m, m) of the innovation.
        nis: normalised innovation squared.
        gate: largest NIS that is accepted.
        restarted: whether the filter restarted around it.
    """

    time: float
    source: Source
    accepted: bool
    reason: str
    innovation: Array | None = None
    covariance: Array | None = None
    nis: float = math.nan
    gate: float = math.nan
    restarted: bool = False


@dataclass(frozen=True)
class NavigationState:
    """Position of the aircraft with its uncertainty, integrity bounds and flags.

    Use ``covariance`` for accuracy and in other filters: it holds if no source is faulty. Use ``overbound``, which
    includes undetectable GNSS drifts, and ``levels``, which hold under every fault hypothesis, for integrity.
    ``flags`` are all words, ``alerts`` those for which the position must not be used.
    """

    filters: FilterBank
    flags: tuple[str, ...] = ()
    alerts: tuple[str, ...] = ()
    excluded_sources: tuple[Source, ...] = ()
    step: Step | None = None

    @property
    def time(self) -> float:
        return self.filters.time

    @property
    def position(self) -> Array:
        """Position (3,) in runway axes."""
        return self.filters.states[0, POSITION]

    @property
    def velocity(self) -> Array:
        """Velocity (3,) in runway axes."""
        return self.filters.states[0, VELOCITY]

    @cached_property
    def covariance(self) -> Array:
        """Covariance (6, 6) of position and velocity."""
        return self.filters.covariances[0, MOTION, MOTION]

    @cached_property
    def overbound(self) -> Array:
        """Covariance (3, 3) of the position, including GNSS drifts that cannot be detected yet."""
        return np.asarray(self.covariance[POSITION, POSITION] + self.filters.gnss_drift.spread)

    @property
    def flagged(self) -> bool:
        """Whether the navigator reports something, an exclusion too."""
        return bool(self.flags)

    @cached_property
    def levels(self) -> Array:
        """Protection levels (3,) in metres along the glide path, to the side and across the path.

        Each hypothesis gets an equal share of the risk. With its prior p and the share r it needs the distance to its
        filter plus Qinv(r / (2 p)) of that filter's standard deviation. Infinite if the faults that no hypothesis
        covers use up the risk.
        """
        bank, settings = self.filters, self.filters.settings
        risk = settings.integrity_risk - settings.priors.unmonitored(bank.sources)
        if risk <= 0:
            return np.full(3, np.inf)
        sigma, away = _spread(bank)
        share = risk / len(_AXES) / settings.exposure_s / len(sigma)
        quantile = -ndtri(np.minimum(share / bank.priors, 1.0) / 2)
        return np.asarray((away + quantile[:, None] * sigma).max(0))

    def valid(self, requirement: Requirement) -> bool:
        """Whether the position may be used for an operation: no alert, and levels within its alert limits."""
        return not self.alerts and bool((self.levels <= requirement.limits).all())


def _spread(bank: FilterBank) -> tuple[Array, Array]:
    """Return standard deviations (F, 3) of every filter's position along the path axes, and its distance to the
    first.
    """
    variance = np.einsum("ai,fij,aj->fa", _AXES, bank.covariances[:, POSITION, POSITION], _AXES)
    away = np.abs((bank.states[:, POSITION] - bank.states[0, POSITION]) @ _AXES.T)
    return np.sqrt(variance), away


def _never() -> Array:
    return np.full((_MEMBERS, len(_COLUMN)), -math.inf)


def _nothing() -> Array:
    return np.zeros((_MEMBERS, len(_COLUMN)))


@dataclass(frozen=True)
class _Moment:
    """Memory of the navigator, by filter and source: arrays of shape (22, 5).

    Attributes:
        filters: the filter bank.
        rejected: share of recent rejections, forgotten over ``patience``.
        strain: recent mean NIS minus its expectation, in standard deviations of such a mean.
        tried: time of the last measurement.
        heard: time of the last accepted measurement.
        probation: time since which an excluded source has fitted.
        apart: time (22,) since which the position without a source differs.
        flags: flags in words, and until when they hold.
        arrived: time of the last measurement of each source, and seconds between it and the one before.
    """

    filters: FilterBank
    rejected: Array = field(default_factory=_nothing)
    strain: Array = field(default_factory=_nothing)
    tried: Array = field(default_factory=_never)
    heard: Array = field(default_factory=_never)
    probation: dict[Source, float] = field(default_factory=dict)
    apart: Array = field(default_factory=lambda: np.full(_MEMBERS, math.inf))
    flags: dict[str, float] = field(default_factory=dict)
    arrived: dict[Source, tuple[float, float]] = field(default_factory=dict)

    def hearing(self, source: Source, time: float) -> _Moment:
        """Note that a source has sent something, used or not."""
        before = self.arrived.get(source, (time, 0.0))[0]
        return replace(self, arrived={**self.arrived, source: (time, time - before)})

    @property
    def stale(self) -> list[Source]:
        """Sources that have stopped: silent for ``stale`` seconds, and three times as long as before."""
        now, least = self.filters.time, self.filters.settings.stale
        over = self.filters.states[0, 0] > 0  # behind the threshold there is no glide slope
        return [
            source
            for source, (last, gap) in self.arrived.items()
            if now - last > max(least, 3 * gap) and not (source == "glide_slope" and over)
        ]

    def flagged(self, *words: str) -> _Moment:
        if not words:
            return self
        return replace(self, flags=self.flags | dict.fromkeys(words, self.filters.time + self.filters.settings.hold))

    def calmed(self, *sources: Source) -> _Moment:
        """Forget the rejections of some sources."""
        rejected, strain = self.rejected.copy(), self.strain.copy()
        columns = [_COLUMN[source] for source in sources]
        rejected[:, columns], strain[:, columns] = 0, 0
        return replace(self, rejected=rejected, strain=strain)


class Navigator:
    """Filter for measurements as they arrive: call ``update``, read ``state``, or predict with ``at``.

    Example:
        >>> start = InitialState(0.0, [-900.0, 0.0, 60.0], [70.0, 0.0, -3.5], np.eye(6))
        >>> navigator = Navigator(start)
        >>> fix = Measurement(1.0, "gnss", np.array([-830.0, 0.5, 56.0]), np.eye(3))
        >>> state = navigator.update(fix)
        >>> state.step.accepted, state.flagged, (state.levels > 1).all().item()
        (True, False, True)
    """

    def __init__(self, initial: InitialState, settings: FusionSettings | None = None) -> None:
        check_start(initial)
        self._now = _Moment(FilterBank.start(initial, settings or FusionSettings()))
        self._past: list[
            tuple[Measurement | DeferredMeasurement, _Moment]
        ] = []  # measurements within the lag, each with the state before it
        self._start = float(initial.time)
        self._sources: set[Source] = set()
        self._jumps: dict[Source, float] = {}  # last rejected time stamp of each source

    def reset(self, initial: InitialState) -> None:
        """Start again from a new initial state, and forget everything."""
        self.__init__(initial, self.settings)  # type: ignore[misc]

    @property
    def settings(self) -> FusionSettings:
        return self._now.filters.settings

    @property
    def state(self) -> NavigationState:
        """State after the last measurement."""
        return _stated(self._now)

    def at(self, time: float) -> NavigationState:
        """Return the state at a time: predicted without further measurements, or within the lag as it was before later
        ones.
        """
        later = [before for measurement, before in self._past if measurement.time > time]
        moment = later[0] if later else self._now
        return _stated(replace(moment, filters=moment.filters.moved(time)))

    def update(self, measurement: Measurement | DeferredMeasurement) -> NavigationState:
        """Process a measurement and return the new state, whose ``step`` tells what happened to it."""
        if isinstance(measurement, Measurement):
            check_measurement(measurement)
        now = self._now.filters.time
        why = reason_against(measurement, self._start)
        if not why and measurement.time < now - self.settings.lag:
            why = f"late by {now - measurement.time:.3f} s, more than {self.settings.lag} s"
        if not why:
            why = self._reason_against_jump(measurement)
        if why or measurement.source == "attitude":
            words = why or "attitudes are not part of the state"
            return _stated(self._now, Step(measurement.time, measurement.source, False, words))
        later = next(
            (n for n, (past, _) in enumerate(self._past) if _place(past) > _place(measurement)), len(self._past)
        )
        moment = self._past[later][1] if later < len(self._past) else self._now
        repeated, first = [], None
        for given in (measurement, *(past for past, _ in self._past[later:])):
            repeated.append((given, moment))
            moment, step = _after(moment, given)
            first = first or step
        # Stored only now: if a measurement raises an error, everything taken before it stays.
        self._past[later:], self._now = repeated, moment
        while self._past[0][0].time < self._now.filters.time - self.settings.lag:
            del self._past[0]
        return _stated(self._now, first)

    def _reason_against_jump(self, measurement: Measurement | DeferredMeasurement) -> str:
        """Return why a time stamp far ahead of the filter is refused; empty if it is accepted.

        A jump is accepted if no other source was heard, or if two sources agree on it.
        """
        source, ahead, limit = measurement.source, measurement.time - self._now.filters.time, self.settings.max_jump_s
        if ahead <= limit:
            self._sources.add(source)
            self._jumps.pop(source, None)
            return ""
        self._jumps[source] = measurement.time
        agreeing = (t for name, t in self._jumps.items() if name != source and abs(t - measurement.time) <= limit)
        if self._sources <= {source} or any(agreeing):
            self._sources.add(source)
            self._jumps.clear()
            return ""
        return f"its time stamp jumps {ahead:.3f} s ahead of all other sources"


def _place(measurement: Measurement | DeferredMeasurement) -> tuple[float, int]:
    """Return the sort key of a measurement, independent of the order of arrival."""
    return measurement.time, _RANK[measurement.source]


def _stated(moment: _Moment, step: Step | None = None) -> NavigationState:
    words = tuple(text for text, until in moment.flags.items() if until >= moment.filters.time)
    gone = tuple(f"{_name(source)} excluded" for source in moment.probation)
    silent = tuple(f"{_name(source)} stopped" for source in moment.stale)
    return NavigationState(moment.filters, (*gone, *silent, *words), words, tuple(moment.probation), step)


def _name(source: Source) -> str:
    names = {"irs": "IRS", "gnss": "GNSS", "glide_slope": "glide slope", "radio": "radio altimeter"}
    return names.get(str(source), str(source))


def _names(hypothesis: Hypothesis) -> str:
    return " and ".join(_name(source) for source in SIZES if source in hypothesis)


def _after(moment: _Moment, given: Measurement | DeferredMeasurement) -> tuple[_Moment, Step]:
    """Return the memory after a measurement that is not older than it."""
    bank, source = moment.filters.moved(given.time), given.source
    moment = moment.hearing(source, given.time)
    if source == "irs" and isinstance(given, Measurement):
        gone = "irs" in moment.probation
        bank = bank if gone else bank.driven(given)
        step = Step(given.time, source, not gone, "excluded" if gone else "drives the prediction")
        return replace(moment, filters=bank), step
    moment = replace(moment, filters=bank.knowing(source))
    taken = given.measure(_stated(moment)) if isinstance(given, DeferredMeasurement) else given
    measured = np.ones(len(moment.filters.without), dtype=bool)
    refused = ~measured
    if isinstance(taken, MemberMeasurements):
        for each in taken.members:
            if each is not None:
                check_measurement(each)
        refused = np.array(taken.unexplained)
        measurement, measured = moment.filters.joined(taken) if any(taken.members) else (None, ~measured)
    else:
        measurement = taken
        if source == "radio":
            bank = moment.filters
            along_sigma = np.sqrt(bank.covariances[:, 0, 0])
            measured = bank.settings.terrain.known(bank.states[:, POSITION], along_sigma)
    if measurement is None:
        return moment, Step(given.time, source, False, "nothing was measured")
    if measurement is not given and not isinstance(taken, MemberMeasurements):
        check_measurement(measurement)
    measurement = moment.filters.scaled(measurement)
    innovation = Innovation.of(measurement, moment.filters)
    gate = moment.filters.gate(measurement)
    step = _step(measurement, innovation, gate, False, "beyond the gate")
    if source in moment.probation:
        moment, step = _on_probation(moment, measurement, innovation, gate, step)
    uses = moment.filters.uses(source) & measured
    accepted = uses & ~refused & (innovation.nis <= gate)
    excess = np.where(refused, gate, np.minimum(innovation.nis, gate))
    moment = _counted(moment, source, uses, accepted, excess)
    bank = moment.filters.suspecting(source, innovation).learnt(source, innovation) if accepted[0] else moment.filters
    moment = replace(moment, filters=bank.corrected(innovation, accepted))
    if source in moment.probation:
        return _watched(moment), step
    if not measured[0]:
        why = "the ground is not known here" if source == "radio" else "nothing was measured"
        return _watched(moment), Step(given.time, source, False, why)
    if refused[0]:
        step = replace(step, reason="the runway is seen where it is not expected")
    elif accepted[0]:
        step = replace(step, accepted=True, reason="fits")
    if uses[0] and _restless(moment)[0, _COLUMN[source]]:
        moment, step = _act(moment, measurement, innovation, step)
    return _watched(moment), step


def _step(measurement: Measurement, innovation: Innovation, gate: float, accepted: bool, reason: str) -> Step:
    return Step(
        measurement.time, measurement.source, accepted, reason,
        innovation.value[0], innovation.covariance[0], float(innovation.nis[0]), gate,
    )  # fmt: skip


def _on_probation(
    moment: _Moment, measurement: Measurement, innovation: Innovation, gate: float, step: Step
) -> tuple[_Moment, Step]:
    """Check an excluded source, and use it again from the next time once it has fitted for ``probation`` seconds.

    A fit is no evidence while the other sources are much less certain.
    """
    source, now, probation = measurement.source, measurement.time, dict(moment.probation)
    bias = innovation.jacobian[0][:, BIAS[source]]
    own = innovation.noise[0] + (bias * moment.filters.settings.variance_of(source)) @ bias.T
    unsure = np.diagonal(innovation.covariance[0]) > (1 + _BLIND) * np.diagonal(own)
    bank = moment.filters
    if innovation.nis[0] > gate or unsure.any():
        probation[source] = math.inf
    elif now - min(probation[source], now) >= moment.filters.settings.probation:
        del probation[source]
        bank = bank.readmitting(source)
    else:
        probation[source] = min(probation[source], now)
    return replace(moment, filters=bank, probation=probation), replace(step, reason="excluded")


def _counted(moment: _Moment, source: Source, uses: Mask, accepted: Mask, nis: Array) -> _Moment:
    """Update the shares of rejections and the strains."""
    column, now, size = _COLUMN[source], moment.filters.time, len(uses)
    share, strain, tried, heard = (
        array.copy() for array in (moment.rejected, moment.strain, moment.tried, moment.heard)
    )
    kept = np.exp(-(now - tried[:size, column]) / moment.filters.settings.patience)
    kept = np.clip(kept, _LEAST, 1.0)  # limit the weight of one rejection after a long silence
    share[:size, column] = kept * share[:size, column] + (1 - kept) * (uses & ~accepted)
    excess = uses * (nis / SIZES[source] - 1) / np.sqrt(2 / SIZES[source])
    # This scale gives unit variance at any rate: a geometrically weighted sum of independent terms.
    strain[:size, column] = kept * strain[:size, column] + np.sqrt(1 - kept**2) * excess
    tried[:size, column] = now
    heard[:size, column] = np.where(accepted, now, heard[:size, column])
    return replace(moment, rejected=share, strain=strain, tried=tried, heard=heard)


def _restless(moment: _Moment) -> Mask:
    """Return which filters (22, 5) do not fit which source."""
    return np.asarray(moment.rejected > _MOST)


def _act(moment: _Moment, measurement: Measurement, innovation: Innovation, step: Step) -> tuple[_Moment, Step]:
    """Apply the rule for a source that does not fit (see the module docstring)."""
    source, bank = measurement.source, moment.filters
    words = f"{_name(source)} contradicts the others"
    moment = moment.flagged(words)
    noisy = np.asarray(np.logical_or(_restless(moment), moment.strain > _STRAINED).any(axis=1), dtype=bool)
    # A pair is never excluded: filters without two sources know too little to tell two liars from two witnesses.
    culprits = [
        each for n, each in enumerate(bank.without) if len(each) == 1 and not each & bank.excluded and not noisy[n]
    ]
    first = not np.isfinite(moment.heard[0, _COLUMN[source]])
    if (first or not culprits) and not _opposed(moment, source, innovation):
        return _started_anew(moment, measurement, step)
    if len(culprits) != 1:
        return moment, replace(step, reason=f"{words}; it is not clear which source is right")
    restless = _restless(moment)[: len(bank.without)].any(axis=1)  # strain alone refutes no explanation
    rivals: Mask = np.asarray(~np.asarray(restless), dtype=bool)
    moment = _left_out(moment, culprits[0], rivals)
    return moment, replace(step, reason=f"{words}; {_names(culprits[0])} excluded")


def _started_anew(moment: _Moment, measurement: Measurement, step: Step) -> tuple[_Moment, Step]:
    """Enlarge the uncertainty of motion in all filters until a source fits, also in the filter that does not use it."""
    users = moment.filters.uses(measurement.source)
    wide = moment.filters.widened(measurement)
    if wide is None:
        return moment, replace(step, reason="outside the gate at any uncertainty")
    bank = wide.corrected(Innovation.of(measurement, wide), users)
    moment = _counted(replace(moment, filters=bank), measurement.source, users, users, np.ones(len(users)))
    step = replace(step, accepted=True, restarted=True, reason="the filter restarts around it")
    return moment.flagged("restarted").calmed(*_COLUMN), step


def _opposed(moment: _Moment, source: Source, innovation: Innovation) -> bool:
    """Return whether another source that observes the disputed axis has lately been accepted."""
    shift = np.abs(innovation.gain[0, POSITION] @ innovation.value[0])
    sigma = np.sqrt(np.diagonal(moment.filters.covariances[0])[POSITION])
    axis = int(np.argmax(shift / sigma))
    since = moment.filters.time - moment.filters.settings.patience
    others = [name for name, axes in _SEES.items() if name != source and axis in axes]
    return any(moment.heard[0, _COLUMN[name]] >= since for name in others)


def _left_out(moment: _Moment, hypothesis: Hypothesis, peaceful: Mask) -> _Moment:
    """Exclude the sources of a hypothesis."""
    bank = moment.filters.excluding(hypothesis, peaceful)
    rest = np.array([n not in bank.rivals for n in range(len(bank.without))])
    for source in hypothesis:
        bank = bank.renewed(BIAS[source], rest, 0.0, bank.settings.variance_of(source))
    if "vision" in hypothesis:
        bank = bank.renewed(FLICKER, rest, 0.0, np.square(bank.settings.vision_flicker.sigma))
        bank = replace(bank, noise_scale=NoiseScale.believed(bank.settings.vision_freedom))
    if "irs" in hypothesis:
        bank = replace(bank, driven_until=-math.inf, acceleration=None)
    probation = moment.probation | dict.fromkeys(hypothesis, math.inf)
    return replace(moment, filters=bank, probation=probation).calmed(*_COLUMN)


def _watched(moment: _Moment) -> _Moment:
    """Add flags for positions that differ, and remove refuted rivals and expired flags."""
    refuted = tuple(n for n in moment.filters.rivals if _restless(moment)[n].any())
    moment = replace(moment, filters=moment.filters.without_rivals(refuted))
    bank, now = moment.filters, moment.filters.time
    sigma, away = _spread(bank)
    slight = np.square(_SLIGHT * sigma[0])
    limit = bank.settings.apart * np.sqrt(np.maximum(sigma**2 - sigma[0] ** 2, slight))
    out = (away > limit).any(1)
    since = moment.apart.copy()
    since[: len(out)] = np.where(out, np.minimum(since[: len(out)], now), math.inf)
    words = [  # the levels cover pairs, whose distance says nothing about which source is wrong
        f"the position without {_names(bank.without[n])} differs"
        for n in np.flatnonzero(now - since[: len(out)] >= bank.settings.confirm)
        if len(bank.without[n]) == 1 and not bank.without[n] & bank.excluded and n not in bank.rivals
    ]
    if bank.gnss_drift.sure:
        words.append("GNSS drift detected")
    flags = {text: until for text, until in moment.flags.items() if until >= now}
    return replace(moment, apart=since, flags=flags).flagged(*words)


# --- checks of inputs ---------------------------------------------------------------------------------------


def check_start(initial: InitialState) -> None:
    """Raise an error for an invalid initial state."""
    parts = [np.asarray(part, dtype=np.float64) for part in (initial.position, initial.velocity, initial.covariance)]
    if [part.shape for part in parts] != [(3,), (3,), (6, 6)]:
        raise HaloposeError(
            "an initial state takes a position (3,), a velocity (3,) and a covariance (6, 6), got "
            + ", ".join(str(part.shape) for part in parts)
        )
    if not (math.isfinite(initial.time) and all(np.isfinite(part).all() for part in parts)):
        raise HaloposeError("the initial state is not finite: give a finite time, position, velocity and covariance")
    if not _positive_definite(parts[2]):
        raise HaloposeError("the covariance of the initial state is not symmetric positive definite")


def check_measurement(measurement: Measurement) -> None:
    """Raise an error for a measurement of a wrong shape, or with a finite covariance that is not positive definite."""
    size = SIZES.get(measurement.source)
    if size is None:
        raise HaloposeError(f"unknown source {measurement.source!r}: one of {', '.join(SIZES)}")
    shapes = np.shape(measurement.value), np.shape(measurement.covariance)
    if shapes != ((size,), (size, size)):
        raise HaloposeError(
            f"{measurement.source} at {measurement.time:.3f} s should be ({size},) with covariance "
            f"({size}, {size}), got {shapes[0]} and {shapes[1]}"
        )
    covariance = np.asarray(measurement.covariance, dtype=np.float64)
    if np.isfinite(covariance).all() and not _positive_definite(covariance):
        raise HaloposeError(
            f"{measurement.source} at {measurement.time:.3f} s: its covariance is not symmetric positive definite"
        )


def reason_against(measurement: Measurement | DeferredMeasurement, start: float) -> str:
    """Return why a measurement is ignored; empty if it can be used."""
    if not math.isfinite(measurement.time):
        return "its time is not finite"
    if measurement.time < start:
        return f"before the start at {start:.3f} s"
    if isinstance(measurement, DeferredMeasurement):
        return ""
    if not np.isfinite(measurement.value).all():
        return "its value is not finite"
    return "" if np.isfinite(measurement.covariance).all() else "its covariance is not finite"


def _positive_definite(matrix: Array) -> bool:
    """Return whether a finite matrix (n, n) is symmetric up to rounding and positive definite."""
    if matrix.shape == (1, 1):
        return bool(matrix[0, 0] > 0)
    if np.count_nonzero(matrix) == len(matrix) and (np.diagonal(matrix) > 0).all():
        return True
    symmetric = np.abs(matrix - matrix.T).max() <= 1e-9 * np.abs(matrix).max()
    return bool(symmetric and np.linalg.eigvalsh(matrix)[0] > 0)


def run(
    navigator: Navigator, measurements: list[Measurement | DeferredMeasurement], times: Array, delay: float = 0.0
) -> Iterator[tuple[NavigationState, bool]]:
    """Process measurements in order of arrival, and yield a state after each and at each requested time (N,).

    States at requested times are yielded with True. A time is requested after everything that arrived up to ``delay``
    seconds after it.
    """
    asked = list(times)
    for measurement in measurements:
        clock = measurement.time + getattr(measurement, "latency", 0.0)
        while asked and asked[0] + delay < clock - _SIMULTANEOUS:
            yield navigator.at(float(asked.pop(0))), True
        yield navigator.update(measurement), False
    for time in asked:
        yield navigator.at(float(time)), True
