"""Detect a slow GNSS drift, and bound its effect before it can be detected.

Hypotheses are drifts along each axis that began at one of several times. A drift enters a Kalman filter linearly
(Willsky and Jones, 1976; Friedland, 1969): per m/s it shifts the state by ``shift``, and the innovations by the
measurement's error minus the shift of the prediction. The rate that fits the innovations best is ``evidence /
information``. Without a drift, evidence / sqrt(information) is standard normal. All sources and the IRS contribute.

A drift that cannot be detected yet must still be bounded. ``spread`` is the mean over no drift and all hypotheses,
weighted by prior (``SHARE``, ``RATE``) and likelihood (multiple-model estimation: Magill, 1965). The prior is
deliberately pessimistic, so ``spread`` is reported beside the covariance and not in it. GNSS makes the same difference
between URE for accuracy and URA for integrity.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from halopose.landing.navigation.motion_model import POSITION, STATES
from halopose.types import Array

EVERY = 5.0  # seconds between hypothetical starts of a drift
LONGEST = 60.0  # seconds for which a hypothesis is kept, and longer if it is significant
CHANCE = 2.0  # standard deviations below which an old hypothesis is dropped
# Far above real drift rates. Chosen on 60 flights of ``research.navigation_faults`` as the smallest values with which
# a drift of RATE, the slowest of the campaign, is never beyond five sigma for 5 s without a flag.
SHARE = 0.25  # of flights in which GNSS drifts along an axis, for the overbound
RATE = 0.2  # m/s, standard deviation of such a drift
_CERTAIN = 100.0  # largest logarithm of a Bayes factor, against overflow
SURE = 5.0  # detection threshold in standard deviations; the largest of all hypotheses often reaches 3 without a drift


@dataclass(frozen=True)
class GnssDriftMonitor:
    """H hypotheses of a GNSS drift.

    Attributes:
        since: start of each drift (H,) in seconds.
        axis: axis of each drift (H,).
        shift: shift (H, 30) of the state per m/s of drift.
        evidence: evidence (H,) for the rate.
        information: information (H,) about the rate.
    """

    since: Array
    axis: Array
    shift: Array
    evidence: Array
    information: Array

    @classmethod
    def none(cls) -> GnssDriftMonitor:
        """Return a monitor without hypotheses."""
        empty = np.zeros(0)
        return cls(empty, np.zeros(0, dtype=np.int64), np.zeros((0, STATES)), empty, empty)

    def at(self, time: float) -> GnssDriftMonitor:
        """Add hypotheses that start now if one is due, and drop old ones that are not significant."""
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
        """Update with an innovation (m,), its covariance (m, m), Jacobian (m, 30) and gain (30, m)."""
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
        """Significance (H,) of each drift in standard deviations."""
        return np.asarray(self.evidence / np.sqrt(np.maximum(self.information, 1e-12)))

    @property
    def sure(self) -> bool:
        """Whether a drift is detected."""
        return bool((np.abs(self.distance) > SURE).any())

    @property
    def spread(self) -> Array:
        """Return the covariance (3, 3) to add to the position: per axis the mean over no drift and all hypotheses.

        With prior variance RATE^2, the posterior rate of a hypothesis has the variance 1 / (information + 1 / RATE^2);
        its mean is that variance times the evidence.
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
