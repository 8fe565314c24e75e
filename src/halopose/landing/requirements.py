"""What an approach demands of a position: alert limits and risks by name, and a count of who kept them.

In: errors and protection levels of frames, or a name. Out: a ``Requirement``, or a ``Stanford`` count.

Limits and risks are ICAO's for GNSS (Annex 10, volume I, as tabulated in Satellite Navigation 1, 2020, article 2,
table 1); where a range is given the stricter end is taken.
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
    """Alert limits in metres, lateral and across the glide path, and the integrity risk of a whole approach."""

    name: str
    lateral: float
    vertical: float
    risk: float

    def per_frame(self, frames: int) -> float:
        """Risk of one of so many frames. No credit is taken for their errors being alike."""
        return self.risk / max(frames, 1)

    @property
    def limits(self) -> Array:
        """Alert limits (3,) in the order of ``LEVEL_AXES``; along the path there is none."""
        return np.array([np.inf, self.lateral, self.vertical])


REQUIREMENTS: dict[Operation, Requirement] = {
    "lpv-200": Requirement("LPV-200", 40.0, 35.0, 2e-7),
    "cat-1": Requirement("CAT I", 40.0, 10.0, 2e-7),
    "cat-2": Requirement("CAT II", 17.3, 5.3, 2e-9),
    "cat-3": Requirement("CAT III", 15.5, 5.2, 2e-9),
}


def requirement(name: str) -> Requirement:
    """The requirement of that name."""
    if name not in get_args(Operation):
        raise HaloposeError(f"unknown requirement {name!r}: {', '.join(REQUIREMENTS)}")
    return REQUIREMENTS[name]  # type: ignore[index]  # checked one line above


def path_axes(glide: float = GLIDE_ANGLE_RAD) -> Array:
    """Unit vectors (3, 3) in runway axes, one a row: down the glide path, left, and up across the path.

    Range and height are wrong together: what is too far is too high, along the line of sight. Across the path
    that cancels almost wholly, and it is what decides where the wheels touch.
    """
    return np.array([[cos(glide), 0.0, -sin(glide)], [0.0, 1.0, 0.0], [sin(glide), 0.0, cos(glide)]])


@dataclass(frozen=True)
class StanfordCounts:
    """How many positions were what, by error, protection level and alert limit (a Stanford diagram's regions).

    available: error within level within limit. unavailable: the level is beyond the limit, and says so.
    misleading: the error is beyond the level, but not the limit, or the level is beyond the limit anyway.
    hazardous: the error is beyond the limit, and the level is not.
    """

    available: int
    unavailable: int
    misleading: int
    hazardous: int

    @property
    def total(self) -> int:
        return self.available + self.unavailable + self.misleading + self.hazardous


def count_stanford(error: Array, level: Array, limit: float) -> StanfordCounts:
    """Count errors (N,) of trusted positions, without their signs, against levels (N,) and one alert limit."""
    error, known = np.abs(error), np.isfinite(error) & ~np.isnan(level)
    error, level = error[known], level[known]
    hazardous = (error > limit) & (level <= limit)
    misleading = (error > level) & ~hazardous
    within = (error <= level) & (level <= limit)
    rest = known.sum() - hazardous.sum() - misleading.sum() - within.sum()
    return StanfordCounts(int(within.sum()), int(rest), int(misleading.sum()), int(hazardous.sum()))
