"""Slow lies: what a GNSS that drifts away would have done to the filter, and whether it looks as if it did.

In: the innovations of a filter. Out: ``Ramps``, for drifts along each axis from each of some instants on how far
they would have carried the state, how fast they would have to be, and how sure that is.

A drift enters a Kalman filter linearly (Willsky and Jones, 1976; Friedland, 1969): per metre a second it moves the
state by ``shift`` and the innovations by what the measurement is off less what the filter expects of it. The rate
that fits the innovations best is ``evidence / information``; without a drift it is evidence / sqrt(information)
standard deviations of one, whatever the rate. All sources and the IRS have their say in it: they know how far the
aircraft has come since the drift began better than where it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from halopose.geometry.camera import Array
from halopose.landing.navigation.model import POSITION, STATES

EVERY = 5.0  # seconds between the instants from which on there might be a drift
LONGEST = 60.0  # seconds for which one is looked for, and longer if it looks like one
CHANCE = 2.0  # standard deviations up to which a drift is taken for chance
SURE = 5.0  # standard deviations from which there is one: so many are looked for that the largest is often 3


@dataclass(frozen=True)
class Ramps:
    """Drifts that GNSS might have, by the second and the axis (H,) from and along which.

    shift (H, 24): how far the state is off, evidence and information (H,): of the rate in m/s.
    """

    since: Array
    axis: Array
    shift: Array
    evidence: Array
    information: Array

    @classmethod
    def none(cls) -> Ramps:
        """Nothing is suspected yet."""
        empty = np.zeros(0)
        return cls(empty, np.zeros(0, dtype=np.int64), np.zeros((0, STATES)), empty, empty)

    def at(self, time: float) -> Ramps:
        """With drifts that begin now if it is time for new ones, and without those of long ago that were none."""
        if len(self.since) and time < self.since[-1] + EVERY:
            return self
        kept = (self.since > time - LONGEST) | (np.abs(self.distance) > CHANCE)
        new = np.zeros(3)
        return Ramps(
            np.append(self.since[kept], np.full(3, time)),
            np.append(self.axis[kept], np.arange(3)),
            np.append(self.shift[kept], np.zeros((3, STATES)), axis=0),
            np.append(self.evidence[kept], new),
            np.append(self.information[kept], new),
        )

    def corrected(
        self, time: float, gnss: bool, value: Array, covariance: Array, jacobian: Array, gain: Array
    ) -> Ramps:
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
        """What to add to a covariance of the position (3, 3): of each axis the likeliest drift, beyond chance."""
        total, distance = np.zeros((3, 3)), self.distance
        for axis in range(3):
            rows = np.flatnonzero(self.axis == axis)
            if len(rows):
                best = int(rows[np.argmax(np.abs(distance[rows]))])
                share = 1 - (CHANCE / max(abs(float(distance[best])), CHANCE)) ** 2
                away = self.shift[best, POSITION] * (self.evidence[best] / max(self.information[best], 1e-12))
                total += share * np.outer(away, away)
        return total


__all__ = ["CHANCE", "EVERY", "LONGEST", "Ramps"]
