"""How far off vision is in this flight: the variance of its fixes over what is believed of all flights.

In: the innovations of the filter with every source. Out: a ``NoiseScale``, whose ``value`` multiplies the variances.

Flights differ more than chance allows: in one the corners are off by less than the heads state all the way down,
in the next by more. The factor, of what does not last, is drawn once for a flight from an inverse gamma law with
``freedom`` degrees of freedom (``research.vision_distribution`` measures it). A fix adds what its white part tells:
Fisher's scoring of the innovation's likelihood in the logarithm of the factor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from halopose.types import Array

# Beyond these no flight was among those measured: what is farther off is a fault, and not to be got used to.
SMALLEST, LARGEST = 0.4, 2.5


@dataclass(frozen=True)
class NoiseScale:
    """The factor's law after some fixes: degrees of freedom, and the sum of squares over what is believed."""

    freedom: float
    square: float

    @classmethod
    def believed(cls, freedom: float) -> NoiseScale:
        """Before the first fix; infinitely many degrees of freedom take variances as they are stated.

        >>> NoiseScale.believed(30.0).value, NoiseScale.believed(math.inf).value
        (1.0714285714285714, 1.0)
        """
        return cls(freedom, freedom)

    @property
    def value(self) -> float:
        """The factor's mean."""
        if math.isinf(self.freedom):
            return 1.0
        return min(max(self.square / (self.freedom - 2), SMALLEST), LARGEST)

    def after(self, value: Array, covariance: Array, noise: Array) -> NoiseScale:
        """After an innovation (m,) with covariance (m, m), of which ``noise`` (m, m) is white and has the factor.

        The likelihood's derivative by the factor's logarithm is half of x' S^-1 R S^-1 x - tr(S^-1 R), its
        information half of tr((S^-1 R)^2): a fix that the filter expects badly says little about its own noise.
        """
        if math.isinf(self.freedom):
            return self
        share = np.linalg.solve(covariance, noise)
        weighed = np.linalg.solve(covariance, value)
        worth = float(np.trace(share @ share))
        slope = float(weighed @ noise @ weighed - np.trace(share))
        return NoiseScale(self.freedom + worth, self.square + self.value * (worth + slope))
