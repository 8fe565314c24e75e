"""Estimate the variance of vision in one flight relative to the stated one.

Flights differ more than chance allows: corner errors in one flight are constantly below the stated sigma, in the next
above it. The factor of the part that does not persist is constant within a flight, and has an inverse gamma prior with
``freedom`` degrees of freedom (measured by ``research.vision_distribution``). Each fix contributes by Fisher scoring of
the innovation's likelihood in the logarithm of the factor. Only what is new since the last fix counts, so that twice as
many fixes of errors that last do not say twice as much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from halopose.types import Array

# Range of the measured flights. An error beyond it is a fault, to which the filter must not adapt.
SMALLEST, LARGEST = 0.4, 2.5


@dataclass(frozen=True)
class NoiseScale:
    """Distribution of the factor after some fixes: degrees of freedom, and the sum of squares relative to the stated
    variance.
    """

    freedom: float
    square: float

    @classmethod
    def believed(cls, freedom: float) -> NoiseScale:
        """Return the prior; with infinite degrees of freedom the stated variances are exact.

        Example:
            >>> NoiseScale.believed(30.0).value, NoiseScale.believed(math.inf).value
            (1.0714285714285714, 1.0)
        """
        return cls(freedom, freedom)

    @property
    def value(self) -> float:
        """Mean of the factor."""
        if math.isinf(self.freedom):
            return 1.0
        return min(max(self.square / (self.freedom - 2), SMALLEST), LARGEST)

    def after(self, value: Array, covariance: Array, noise: Array) -> NoiseScale:
        """Update with an innovation (m,) and its covariance (m, m), of which ``noise`` (m, m) is new, with the factor.

        The derivative of the log-likelihood by the factor's logarithm is half of x' S^-1 R S^-1 x - tr(S^-1 R); its
        information is half of tr((S^-1 R)^2). A fix with an uncertain prediction therefore says little about its own
        noise.
        """
        if math.isinf(self.freedom):
            return self
        share = np.linalg.solve(covariance, noise)
        weighed = np.linalg.solve(covariance, value)
        worth = float(np.trace(share @ share))
        slope = float(weighed @ noise @ weighed - np.trace(share))
        return NoiseScale(self.freedom + worth, self.square + self.value * (worth + slope))
