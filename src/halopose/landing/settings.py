"""What to fly, how to look at it and what to believe.

In: a user's choices. Out: ``LandingSettings``, checked before anything flies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from halopose.errors import HaloposeError
from halopose.geometry.integrity import Risks
from halopose.landing.navigation.sensors import Sensors
from halopose.landing.requirements import Operation, Requirement, requirement
from halopose.landing.world.scenes import Weather, check_weather

TRUTH_RATE = 100.0  # Hz, that of the IRS


@dataclass(frozen=True)
class LandingSettings:
    """What to fly, how to look at it and what to believe.

    rate: images a second. attitude: ``irs`` solves for the position alone with the attitude of the IRS, ``vision``
    for the whole pose. prune: leave out corners that the artifact calls unreliable, as long as enough are left.
    conf: lowest score of a detection.
    persistence: integral over time of the correlation of the detector's errors. integrity: let inconsistent frames
    not pass, and leave out a corner that does not fit the others; false_alarm and fault_probability as in
    ``geometry.integrity.Risks``. requirement: whose alert limits and integrity risk apply.
    """

    seed: int = 0
    weather: Weather = "clear"
    rate: float = 2.0
    attitude: Literal["irs", "vision"] = "irs"
    prune: bool = True
    conf: float = 0.7
    persistence: float = 10.0
    integrity: bool = True
    false_alarm: float = 1e-3
    fault_probability: float = 1e-3
    requirement: Operation = "lpv-200"
    sensors: Sensors = field(default_factory=Sensors)

    def __post_init__(self) -> None:
        if not 0 < self.rate <= TRUTH_RATE:
            raise HaloposeError(f"the rate of images must be above 0 and up to {TRUTH_RATE:g}, got {self.rate}")
        if self.seed < 0:
            raise HaloposeError(f"a seed is 0 or more, got {self.seed}")
        check_weather(self.weather)
        if not 0 <= self.conf <= 1:
            raise HaloposeError(f"conf must lie between 0 and 1, got {self.conf}")
        if not 0 <= self.persistence < float("inf"):
            raise HaloposeError(f"persistence is a number of seconds, 0 or more, got {self.persistence}")
        self.risks(1)
        if self.attitude not in ("irs", "vision"):
            raise HaloposeError(f"unknown attitude {self.attitude!r}: irs or vision")
        if self.attitude == "irs" and self.sensors.attitude is None:
            raise HaloposeError("no attitude on board: solve for the whole pose with --attitude vision")

    @property
    def required(self) -> Requirement:
        """Alert limits and risk of the approach."""
        return requirement(self.requirement)

    def risks(self, frames: int) -> Risks:
        """Risks of each of so many frames of the approach."""
        return Risks(
            false_alarm=self.false_alarm,
            integrity=self.required.per_frame(frames),
            fault_probability=self.fault_probability,
        )

    @property
    def repetition(self) -> float:
        """How many frames say as much as one independent one: (1 + rho) / (1 - rho) of errors that decay as rho.

        A frame's covariance tells how far it is off, not that the next frame is off the same way. The filter takes
        its measurements as independent, so it gets covariances larger by this factor.
        """
        if not self.persistence:
            return 1.0
        rho = math.exp(-1 / (self.rate * self.persistence))
        return (1 + rho) / (1 - rho)


__all__ = ["TRUTH_RATE", "LandingSettings"]
