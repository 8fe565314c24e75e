"""Ground under the radio altimeter along the extended centreline: its height, and where it is known.

A radio altimeter measures the height above the ground below, not above the threshold. It is used only where the ground
is known. The height of known ground has an error that grows with the distance from the threshold, because the radar
beam is wider on the ground at a greater height. Neighbouring samples share this error, so it is a state of the filter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from halopose.errors import HaloposeError
from halopose.types import Array, Mask

LONGEST_GAP_M = 200.0  # between two points of a profile; the ground of a longer gap is not known
OPERATING_AREA_M = 300.0  # level ground before a threshold, for radio altimeters (ICAO Annex 14, 3.8)
_FARTHEST_M = 30e3  # of level ground
_ABOUT = np.linspace(-2.0, 2.0, 9)  # standard deviations of a position along the runway, in which ground must be known


@dataclass(frozen=True, eq=False)
class Terrain:
    """Profile of the ground along the runway axis, through M points.

    Attributes:
        along: distances (M,) from the threshold in the landing direction in metres, ascending; negative before it.
        height: heights (M,) above the threshold in metres.
        sigma: standard deviation of the heights at the threshold in metres.
        growth: increase of that standard deviation per metre before the threshold.
        side: metres from the centreline up to which the profile holds.
        correlation_s: correlation time of the error in seconds: some 100 m of flight.
    """

    along: Array
    height: Array
    sigma: float = 0.3
    growth: float = 1e-3
    side: float = 150.0
    correlation_s: float = 1.5

    def __post_init__(self) -> None:
        points = np.asarray(self.along, dtype=np.float64), np.asarray(self.height, dtype=np.float64)
        if points[0].ndim != 1 or points[0].shape != points[1].shape or len(points[0]) < 2:
            raise HaloposeError(
                f"a terrain profile takes two or more distances and heights, got {points[0].shape}, {points[1].shape}"
            )
        if not (np.isfinite(points).all() and (np.diff(points[0]) > 0).all()):
            raise HaloposeError("a terrain profile takes finite heights at ascending distances")
        if not (self.sigma >= 0 and self.growth >= 0 and self.side > 0 and self.correlation_s > 0):
            raise HaloposeError("a terrain profile takes sigma and growth of 0 or more, side and correlation_s above 0")
        for name, value in zip(("along", "height"), points, strict=True):
            value.flags.writeable = False
            object.__setattr__(self, name, value)

    @classmethod
    def level(cls, before: float = _FARTHEST_M, behind: float = _FARTHEST_M, rise: float = 0.0) -> Terrain:
        """Return ground at the height of the threshold.

        Args:
            before: metres before the threshold from which it is known.
            behind: metres behind the threshold up to which it is known.
            rise: height of that end above the threshold.
        """
        along = np.unique(np.append(np.arange(-before, behind, LONGEST_GAP_M), [0.0, behind]))
        return cls(along, rise * np.clip(along / behind, 0.0, 1.0))

    def known(self, positions: Array, along_sigma: Array) -> Mask:
        """Return whether the ground is known well enough below aircraft.

        It must be known, and straight up to its own error, wherever the aircraft may be: a filter that does not know
        its distance cannot use a profile of hills.

        Args:
            positions: positions (N, 3) in runway axes.
            along_sigma: their standard deviations (N,) along the runway.
        """
        x = positions[:, 0]
        away = along_sigma[:, None] * _ABOUT
        height, slope, sigma = self.at(x)
        expected = height[:, None] + slope[:, None] * away
        straight = np.abs(self.at(x[:, None] + away)[0] - expected).max(1) <= sigma
        near = np.abs(positions[:, 1]) <= self.side
        return np.asarray(straight & near & self._inside(x[:, None] + away).all(1), dtype=bool)

    def _inside(self, along: Array) -> Mask:
        """Return whether distances are between two points of the profile that are near each other."""
        after = np.searchsorted(self.along, along)
        inside = (after > 0) & (after < len(self.along))
        after = np.clip(after, 1, len(self.along) - 1)
        return np.asarray(inside & (self.along[after] - self.along[after - 1] <= LONGEST_GAP_M), dtype=bool)

    def at(self, along: Array) -> tuple[Array, Array, Array]:
        """Return height, slope and standard deviation of the ground at distances of any shape along the runway axis."""
        after = np.clip(np.searchsorted(self.along, along), 1, len(self.along) - 1)
        start, rise = self.along[after - 1], self.height[after] - self.height[after - 1]
        slope = rise / (self.along[after] - start)
        sigma = self.sigma + self.growth * np.maximum(-along, 0.0)
        return self.height[after - 1] + slope * (along - start), slope, sigma


LEVEL = Terrain.level()
