"""Slow lies: what a GNSS that drifts away would have done to the filter, and whether it looks as if it did.

In: the innovations of a filter. Out: ``GnssDriftMonitor``, for drifts along each axis from each of some instants on
how far they would have carried the state, how fast they would have to be, and how sure that is.

A drift enters a Kalman filter linearly (Willsky and Jones, 1976; Friedland, 1969): per metre a second it moves the
state by ``shift`` and the innovations by what the measurement is off less what the filter expects of it. The rate
that fits the innovations best is ``evidence / information``; without a drift it is evidence / sqrt(information)
standard deviations of one, whatever the rate. All sources and the IRS have their say in it: they know how far the
aircraft has come since the drift began better than where it is.

A drift that the others could not have noticed yet has to be in what is relied upon all the same. ``spread`` is
the mean over no drift and every one that might be, each as likely as it is taken to be before the flight
(``SHARE``, ``RATE``) and is by the innovations (multiple-model estimation: Magill, 1965). As such drifts are taken
for far likelier than they are, it stands beside the covariance and not in it: satellites have one accuracy for
errors as they are and another for integrity in the same way (URE and URA).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from halopose.landing.navigation.motion_model import POSITION, STATES
from halopose.types import Array

EVERY = 5.0  # seconds between the instants from which on there might be a drift
LONGEST = 60.0  # seconds for which one is looked for, and longer if it looks like one
CHANCE = 2.0  # standard deviations up to which one of long ago is taken for chance and forgotten
# Far more than any GNSS drifts: chosen on flights of ``research.navigation_faults``, 60 seeds, as the least
# with which a drift of RATE, the slowest of the campaign, is never for 5 s beyond five sigma without a flag.
SHARE = 0.25  # of flights in which GNSS drifts along an axis, for the overbound
RATE = 0.2  # m/s, standard deviation of such a drift
_CERTAIN = 100.0  # logarithm of a Bayes factor beyond which more is the same
SURE = 5.0  # standard deviations from which there is one: so many are looked for that the largest is often 3


@dataclass(frozen=True)
class GnssDriftMonitor:
    """Drifts that GNSS might have, by the second and the axis (H,) from and along which.

    shift (H, 24): how far the state is off, evidence and information (H,): of the rate in m/s.
    """

    since: Array
    axis: Array
    shift: Array
    evidence: Array
    information: Array

    @classmethod
    def none(cls) -> GnssDriftMonitor:
        """Nothing is suspected yet."""
        empty = np.zeros(0)
        return cls(empty, np.zeros(0, dtype=np.int64), np.zeros((0, STATES)), empty, empty)

    def at(self, time: float) -> GnssDriftMonitor:
        """With drifts that begin now if it is time for new ones, and without those of long ago that were none."""
        if len(self.since) and time < self.since[-1] + EVERY:
            return self
        kept = (self.since > time - LONGEST) | (np.abs(self.distance) > CHANCE)
        new = np.zeros(3)
        return GnssDriftMonitor(
            np.append(self.since[kept], np.full(3, time)),
            np.append(self.axis[kept], np.arange(3)),
            np.append(self.shift[kept], np.zeros((3, STATES)), axis=0),
            np.append(self.evidence[kept], new),
            np.append(self.information[kept], new),
        )

    def corrected(
        self, time: float, gnss: bool, value: Array, covariance: Array, jacobian: Array, gain: Array
    ) -> GnssDriftMonitor:
        """After an update by an innovation (m,) with covariance (m, m), Jacobian (m, 24) and gain (24, m)."""
        seen = -self.shift @ jacobian.T
        if gnss:
            seen[np.arange(len(seen)), self.axis] += time - self.since
        weighed = np.linalg.solve(covariance, seen.T).T
        return replace(
            self,
            shift=self.shift + seen @ gain.T,
            evidence=self.evidence + weighed @ value,
            information=self.information + (weighed * seen).sum(1),
        )

    @property
    def distance(self) -> Array:
        """Standard deviations (H,) by which each drift is other than none."""
        return np.asarray(self.evidence / np.sqrt(np.maximum(self.information, 1e-12)))

    @property
    def sure(self) -> bool:
        """Whether GNSS drifts."""
        return bool((np.abs(self.distance) > SURE).any())

    @property
    def spread(self) -> Array:
        """What to add to a covariance of the position (3, 3): of each axis the mean over no drift and all drifts.

        With a rate of variance RATE^2 before, a drift is by its Bayes factor likelier than none, and its rate has
        the variance 1 / (information + 1 / RATE^2) about a mean of that times the evidence.
        """
        variance = 1 / (self.information + 1 / RATE**2)
        odds = 0.5 * (variance * self.evidence**2 + np.log(variance / RATE**2))
        square = np.square(variance * self.evidence) + variance
        total = np.zeros((3, 3))
        for axis in range(3):
            rows = self.axis == axis
            share = SHARE * EVERY / LONGEST * np.exp(np.minimum(odds[rows], _CERTAIN))
            share /= share.sum() + 1 - SHARE
            moved = self.shift[rows, POSITION]
            total += (share * square[rows] * moved.T) @ moved
        return total
