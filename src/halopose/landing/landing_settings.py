"""What to fly, how to look at it and what to believe.

In: a user's choices. Out: ``LandingSettings``, checked before anything flies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from halopose.errors import HaloposeError
from halopose.geometry.camera import Camera, Mount, exp_so3
from halopose.geometry.integrity import Risks
from halopose.landing.navigation.sensors import (
    VISION_DRIFT,
    VISION_NOISE_SCALE_DOF,
    VISION_PERSISTENT_SHARE,
    VISION_VARIANCE_FACTOR,
    Sensors,
)
from halopose.landing.requirements import Operation, Requirement, requirement
from halopose.landing.world.scenes import Weather, check_weather
from halopose.types import Array

TRUTH_RATE = 100.0  # Hz, that of the IRS


@dataclass(frozen=True)
class CameraErrors:
    """Standard deviations of what is believed of the camera, drawn anew for every flight.

    mounting: angles in radians, about every axis, what a boresight leaves; lever_arm: metres, along every axis, as
    taken from drawings; focal: share of the focal length; centre: pixels of the principal point, both what a
    chessboard leaves after a change of temperature; clock: seconds by which the time stamps of all images are off,
    within a quarter of a frame at 50 Hz. latency: seconds after which an image's result is there; that is known.
    These are assumptions for a calibrated installation, not anybody's data sheet: set your own.
    """

    mounting: float = 5e-4
    lever_arm: float = 0.02
    focal: float = 1e-3
    centre: float = 0.5
    clock: float = 0.005
    latency: float = 0.1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise HaloposeError(f"{name} of the camera should be 0 or more, got {value}")

    def intrinsics(self, camera: Camera) -> Array:
        """Covariance (9, 9) of the camera's parameters, in the order of ``INTRINSICS``."""
        sigma = np.zeros(9)
        sigma[:4] = self.focal * camera.fx, self.focal * camera.fy, self.centre, self.centre
        return np.diag(np.square(sigma))

    def believed(self, camera: Camera, mount: Mount, seed: int) -> tuple[Camera, Mount]:
        """What a flight takes for its camera and mounting: the true ones, off by as much as said."""
        draw = np.random.default_rng([seed, 78]).standard_normal(9)
        scale = 1 + self.focal * draw[0]
        wrong = replace(
            camera, fx=camera.fx * scale, fy=camera.fy * scale,
            cx=camera.cx + self.centre * draw[1], cy=camera.cy + self.centre * draw[2],
        )  # fmt: skip
        rotation = exp_so3(self.mounting * draw[3:6]) @ mount.rotation
        return wrong, Mount(rotation, mount.lever_arm + self.lever_arm * draw[6:9])

    def offset(self, seed: int) -> float:
        """Seconds by which a flight's images are stamped late."""
        return float(self.clock * np.random.default_rng([seed, 79]).standard_normal())


@dataclass(frozen=True)
class CornerCorrelation:
    """How the corners of one runway err together: shares of their variance that have one cause.

    size: the runway is seen too small or too large, so that left and right corners err towards each other while
    the far end comes nearer; lift: its far end is seen too high or too low; dip: its near end. Measured on flights
    of their own (``research.landing_results --persistence``).
    """

    size: float = 0.11
    lift: float = 0.77
    dip: float = 0.41

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < 1:
                raise HaloposeError(f"{name} is a share, 0 or more and under 1, got {value}")
        if self.size + self.lift >= 1:
            raise HaloposeError(f"size and lift share the far end: {self.size} and {self.lift} leave nothing of it")

    def parts(self, covariance: Array) -> tuple[Array, Array]:
        """What corners (N, 4, 2, 2) have of their own, and how far they move with each cause (N, 4, 2, 3)."""
        loads = np.zeros((4, 2, 3))
        loads[:, 0, 0] = math.sqrt(self.size) * np.array([1.0, -1.0, -1.0, 1.0])
        loads[2:, 1, 0] = math.sqrt(self.size)
        loads[2:, 1, 1], loads[:2, 1, 2] = math.sqrt(self.lift), math.sqrt(self.dip)
        known = np.isfinite(covariance).all(axis=(2, 3), keepdims=True)
        factor = np.linalg.cholesky(np.where(known, covariance, np.eye(2)))
        own = factor @ (np.eye(2) - loads @ np.swapaxes(loads, 1, 2)) @ np.swapaxes(factor, 2, 3)
        return np.where(known, own, np.nan), np.where(known, factor @ loads, 0.0)


@dataclass(frozen=True)
class LandingSettings:
    """What to fly, how to look at it and what to believe.

    rate: images a second. attitude: ``irs`` solves for the position alone with the attitude of the IRS, ``vision``
    for the whole pose. prune: leave out corners that the artifact calls unreliable, as long as enough are left.
    conf: lowest score of a detection. alarm: a detection this unlike the data is not used, which on usual data
    happens to that share of them; 0 for never. lasting, persistence: shares of the variance of vision's error that
    lasts, and for how many seconds, until 1/e of it is left. total: the variance of fixes over what corners make
    of it; freedom: degrees of freedom of the factor by which the rest differs from flight to flight, inf for none.
    camera: how well the camera is known. joint: how corners err together; excess: the variance of corners in
    flight over what the heads state, measured .95 and not believed below 1. integrity: let inconsistent frames not
    pass, and leave out a corner that does not fit the others; false_alarm and fault_probability as in
    ``geometry.integrity.Risks``. requirement: whose alert limits and integrity risk apply.
    """

    seed: int = 0
    weather: Weather = "clear"
    rate: float = 2.0
    attitude: Literal["irs", "vision"] = "irs"
    prune: bool = True
    conf: float = 0.7
    alarm: float = 0.05
    persistent_share: tuple[float, float, float] = VISION_PERSISTENT_SHARE
    persistence_s: float = VISION_DRIFT.time_constant
    variance_factor: tuple[float, float, float] = VISION_VARIANCE_FACTOR
    noise_scale_dof: float = VISION_NOISE_SCALE_DOF
    integrity: bool = True
    false_alarm: float = 1e-3
    fault_probability: float = 1.2e-3
    requirement: Operation = "lpv-200"
    sensors: Sensors = field(default_factory=Sensors)
    camera: CameraErrors = field(default_factory=CameraErrors)
    corner_correlation: CornerCorrelation = field(default_factory=CornerCorrelation)
    corner_variance_factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.rate <= TRUTH_RATE:
            raise HaloposeError(f"the rate of images must be above 0 and up to {TRUTH_RATE:g}, got {self.rate}")
        if self.seed < 0:
            raise HaloposeError(f"a seed is 0 or more, got {self.seed}")
        check_weather(self.weather)
        if not 0 <= self.conf <= 1:
            raise HaloposeError(f"conf must lie between 0 and 1, got {self.conf}")
        if not 0 <= self.alarm <= 1:
            raise HaloposeError(f"an alarm rate lies between 0 and 1, got {self.alarm}")
        if not 0 < self.persistence_s < math.inf:
            raise HaloposeError(f"persistence is a number of seconds above 0, got {self.persistence_s}")
        if not all(0 <= share < 1 for share in self.persistent_share):
            raise HaloposeError(f"lasting takes shares of 0 or more and under 1, got {self.persistent_share}")
        if not all(0 < factor < math.inf for factor in self.variance_factor):
            raise HaloposeError(f"total takes factors above 0, got {self.variance_factor}")
        if not self.noise_scale_dof > 2:
            raise HaloposeError(f"freedom should be above 2, got {self.noise_scale_dof}")
        if not 0 < self.corner_variance_factor < math.inf:
            raise HaloposeError(f"excess is a factor above 0, got {self.corner_variance_factor}")
        self.risks(1)
        if self.attitude not in ("irs", "vision"):
            raise HaloposeError(f"unknown attitude {self.attitude!r}: irs or vision")
        if self.attitude == "irs" and self.sensors.attitude is None:
            raise HaloposeError("no attitude on board: solve for the whole pose with --attitude vision")

    @property
    def approach_requirement(self) -> Requirement:
        """Alert limits and risk of the approach."""
        return requirement(self.requirement)

    def risks(self, frames: int) -> Risks:
        """Risks of each of so many frames of the approach."""
        return Risks(
            false_alarm=self.false_alarm,
            integrity=self.approach_requirement.per_frame(frames),
            fault_probability=self.fault_probability,
        )
