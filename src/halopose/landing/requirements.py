"""Navigation requirements: alert limits and integrity risks by operation, and counts of a Stanford diagram.

Limits and risks are those of ICAO for GNSS (Annex 10, volume I, as tabulated in Satellite Navigation 1, 2020, article
2, table 1). Where a range is given, the stricter end is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, radians, sin
from typing import Literal, get_args

import numpy as np

from halopose.errors import HaloposeError
from halopose.types import Array

Operation = Literal["lpv-200", "cat-1", "cat-2", "cat-3"]
LEVEL_AXES = ("along the path", "lateral", "across the path")  # order of the axes and of all levels
GLIDE_ANGLE_RAD = radians(3.0)


@dataclass(frozen=True)
class Requirement:
    """Requirement of an operation.

    Attributes:
        name: name of the operation.
        lateral: lateral alert limit in metres.
        vertical: alert limit across the glide path in metres.
        risk: integrity risk of a whole approach.
        time_to_alert_s: seconds within which an error beyond a limit must be announced.
    """

    name: str
    lateral: float
    vertical: float
    risk: float
    time_to_alert_s: float = 6.0

    def per_frame(self, frames: int) -> float:
        """Return the integrity risk of one frame; errors of frames are treated as independent."""
        return self.risk / max(frames, 1)

    @property
    def limits(self) -> Array:
        """Alert limits (3,) in the order of ``LEVEL_AXES``; infinite along the path."""
        return np.array([np.inf, self.lateral, self.vertical])


REQUIREMENTS: dict[Operation, Requirement] = {
    "lpv-200": Requirement("LPV-200", 40.0, 35.0, 2e-7),
    "cat-1": Requirement("CAT I", 40.0, 10.0, 2e-7),
    "cat-2": Requirement("CAT II", 17.3, 5.3, 2e-9, 2.0),
    "cat-3": Requirement("CAT III", 15.5, 5.2, 2e-9, 2.0),
}


def requirement(name: str) -> Requirement:
    """Return the requirement with a name."""
    if name not in get_args(Operation):
        raise HaloposeError(f"unknown requirement {name!r}: {', '.join(REQUIREMENTS)}")
    return REQUIREMENTS[name]  # type: ignore[index]  # checked one line above


def path_axes(glide: float = GLIDE_ANGLE_RAD) -> Array:
    """Return unit vectors (3, 3) in runway axes, as rows: down the glide path, left, and up across the path.

    Vision's errors of range and height are correlated along the line of sight. Across the path they almost cancel, and
    this direction determines the touchdown point.
    """
    return np.array([[cos(glide), 0.0, -sin(glide)], [0.0, 1.0, 0.0], [sin(glide), 0.0, cos(glide)]])


@dataclass(frozen=True)
class StanfordCounts:
    """Number of positions in each region of a Stanford diagram.

    Attributes:
        available: error <= level <= limit.
        unavailable: level above the limit, and error within the level.
        misleading: error above the level, but within the limit, or the level is above the limit.
        hazardous: error above the limit, and level within the limit.
    """

    available: int
    unavailable: int
    misleading: int
    hazardous: int

    @property
    def total(self) -> int:
        return self.available + self.unavailable + self.misleading + self.hazardous


def count_stanford(error: Array, level: Array, limit: float) -> StanfordCounts:
    """Count unsigned errors (N,) of trusted positions against levels (N,) and one alert limit."""
    error, known = np.abs(error), np.isfinite(error) & ~np.isnan(level)
    error, level = error[known], level[known]
    hazardous = (error > limit) & (level <= limit)
    misleading = (error > level) & ~hazardous
    within = (error <= level) & (level <= limit)
    rest = known.sum() - hazardous.sum() - misleading.sum() - within.sum()
    return StanfordCounts(int(within.sum()), int(rest), int(misleading.sum()), int(hazardous.sum()))
