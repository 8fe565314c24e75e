"""Settings of a flight: scenario, sensors, camera errors and estimator, checked on construction."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from halopose.errors import HaloposeError
from halopose.geometry.camera import Camera, Mount, exp_so3
from halopose.geometry.integrity import Risks
from halopose.landing.navigation.fault_priors import VISION_FAULT
from halopose.landing.navigation.sensors import (
    VISION_DRIFT,
    VISION_FLICKER,
    VISION_FLICKER_SHARE,
    VISION_NOISE_SCALE_DOF,
    VISION_PERSISTENT_SHARE,
    VISION_VARIANCE_FACTOR,
    Sensors,
)
from halopose.landing.requirements import Operation, Requirement, requirement
from halopose.landing.world.scenes import Weather, check_weather
from halopose.types import Array

_EDGES = ((0, 1), (2, 3), (0, 3), (1, 2))  # corners of the near end, the far end, the left and the right edge
UNSURVEYED = 1e-3  # probability of an error in runway data without a survey; assumed
TRUTH_RATE = 100.0  # Hz, the rate of the IRS


@dataclass(frozen=True)
class CameraErrors:
    """Standard deviations of the camera's calibration errors, drawn anew for every flight.

    These are assumptions for a calibrated installation, not values of a data sheet: set your own.

    Attributes:
        mounting: angle about every axis in radians, after boresighting.
        lever_arm: offset along every axis in metres.
        focal: relative error of the focal length.
        centre: error of the principal point in pixels.
        clock: common offset of all image time stamps in seconds.
        latency: seconds until the result of an image is available. It is known exactly.
        mounting_fault: probability that the mounting is wrong beyond that, by any angle; in every flight of the camera.
        lens_fault: the same of focal length and principal point.
    """

    mounting: float = 5e-4
    lever_arm: float = 0.02
    focal: float = 1e-3
    centre: float = 0.5
    clock: float = 0.005
    latency: float = 0.1
    mounting_fault: float = 1e-5
    lens_fault: float = 1e-5

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < (1 if name.endswith("_fault") else math.inf):
                raise HaloposeError(f"{name} of the camera should be 0 or more, got {value}")

    def intrinsics(self, camera: Camera) -> Array:
        """Return the covariance (9, 9) of the camera's parameters, in the order of ``INTRINSICS``."""
        sigma = np.zeros(9)
        sigma[:4] = self.focal * camera.fx, self.focal * camera.fy, self.centre, self.centre
        return np.diag(np.square(sigma))

    def turn_variance(self, camera: Camera) -> Array:
        """Variances (3,) of yaw, pitch and roll by the mounting; a principal point that is off turns the camera."""
        centre = np.array([self.centre / camera.fx, self.centre / camera.fy, 0.0])
        return np.asarray(self.mounting**2 + centre**2)

    def believed(self, camera: Camera, mount: Mount, seed: int) -> tuple[Camera, Mount]:
        """Return the camera and mounting that the estimator uses: the true ones plus drawn errors."""
        draw = np.random.default_rng([seed, 78]).standard_normal(9)
        scale = 1 + self.focal * draw[0]
        wrong = replace(
            camera, fx=camera.fx * scale, fy=camera.fy * scale,
            cx=camera.cx + self.centre * draw[1], cy=camera.cy + self.centre * draw[2],
        )  # fmt: skip
        rotation = exp_so3(self.mounting * draw[3:6]) @ mount.rotation
        return wrong, Mount(rotation, mount.lever_arm + self.lever_arm * draw[6:9])

    def offset(self, seed: int) -> float:
        """Return the offset in seconds of a flight's image time stamps."""
        return float(self.clock * np.random.default_rng([seed, 79]).standard_normal())


@dataclass(frozen=True)
class CornerCorrelation:
    """Common causes of the corner errors of one runway, as shares of their variance.

    Measured on separate flights (``research.landing_results --persistence``).

    Attributes:
        size: the runway appears too small or too large: left and right corners move towards each other, and the far end
            moves nearer.
        lift: the far end appears too high or too low.
        dip: the near end appears too high or too low.
    """

    size: float = 0.11
    lift: float = 0.77
    dip: float = 0.41

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < 1:
                raise HaloposeError(f"{name} should be a share from 0 to below 1, got {value}")
        if self.size + self.lift >= 1:
            raise HaloposeError(f"size and lift share the far end: {self.size} and {self.lift} must sum to less than 1")

    def parts(self, covariance: Array) -> tuple[Array, Array]:
        """Split covariances (N, 4, 2, 2) into an independent part and the shift (N, 4, 2, 3) by each common cause."""
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
    """Settings of a flight and its estimator.

    Attributes:
        seed: seed of the scenario and of all noise.
        weather: weather of the scenario.
        rate: images per second.
        attitude: ``irs`` solves for the position with the attitude of the IRS; ``vision`` solves for the whole pose.
        prune: leave out corners that the artifact marks as unreliable, if enough remain.
        conf: lowest score of a detection.
        alarm: false-alarm rate at which out-of-distribution detections are not used; 0 uses all.
        persistent_share: shares of vision's error variance that persist from image to image.
        persistence_s: time constant of the persistent part in seconds.
        variance_factor: variance of fixes relative to the propagated corner covariances.
        flicker_share: share of the rest that lasts for a fraction of a second; it matters above 1 Hz.
        flicker_s: time constant of that part in seconds.
        noise_scale_dof: degrees of freedom of the factor by which the white part differs between flights; inf for none.
        integrity: exclude a corner that does not fit the others, and do not use inconsistent frames.
        false_alarm: probability of a false alarm, as in ``geometry.integrity.Risks``.
        fault_probability: prior probability of a faulty corner, as in ``geometry.integrity.Risks``.
        edge_probability: prior probabilities that both corners of the near end, the far end, the left and the right
            edge are wrong together. Raise the first where pavement lies before the threshold.
        runway_fault: prior probability that the data of the runway are wrong: the integrity of surveyed data (ICAO
            Annex 15 asks for 1e-8 of critical data). ``UNSURVEYED`` is the value for data without a survey.
        requirement: operation whose alert limits and integrity risk apply.
        sensors: sensors on board.
        camera: uncertainty of the camera's calibration.
        corner_correlation: common causes of corner errors.
        corner_variance_factor: variance of corners in flight relative to the heads' covariance; measured 0.95, and not
            set below 1.
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
    flicker_share: float = VISION_FLICKER_SHARE
    flicker_s: float = VISION_FLICKER.time_constant
    noise_scale_dof: float = VISION_NOISE_SCALE_DOF
    integrity: bool = True
    false_alarm: float = 1e-3
    fault_probability: float = 1.2e-3
    edge_probability: tuple[float, float, float, float] = (1e-3, 1e-4, 1e-4, 1e-4)
    runway_fault: float = 1e-8
    requirement: Operation = "lpv-200"
    sensors: Sensors = field(default_factory=Sensors)
    camera: CameraErrors = field(default_factory=CameraErrors)
    corner_correlation: CornerCorrelation = field(default_factory=CornerCorrelation)
    corner_variance_factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.rate <= TRUTH_RATE:
            raise HaloposeError(f"rate should be above 0 and at most {TRUTH_RATE:g} images/s, got {self.rate}")
        if self.seed < 0:
            raise HaloposeError(f"seed should be 0 or more, got {self.seed}")
        check_weather(self.weather)
        if not 0 <= self.conf <= 1:
            raise HaloposeError(f"conf should be between 0 and 1, got {self.conf}")
        if not 0 <= self.alarm <= 1:
            raise HaloposeError(f"alarm should be between 0 and 1, got {self.alarm}")
        if not 0 < self.persistence_s < math.inf:
            raise HaloposeError(f"persistence_s should be above 0 seconds, got {self.persistence_s}")
        if not all(0 <= share < 1 for share in self.persistent_share):
            raise HaloposeError(f"persistent_share takes shares from 0 to below 1, got {self.persistent_share}")
        if not (0 <= self.flicker_share < 1 and 0 < self.flicker_s < math.inf):
            raise HaloposeError(
                f"flicker is a share under 1 and seconds above 0, got {self.flicker_share} and {self.flicker_s}"
            )
        if not all(0 < factor < math.inf for factor in self.variance_factor):
            raise HaloposeError(f"variance_factor takes factors above 0, got {self.variance_factor}")
        if not self.noise_scale_dof > 2:
            raise HaloposeError(f"noise_scale_dof should be above 2, got {self.noise_scale_dof}")
        if len(self.edge_probability) != 4:
            raise HaloposeError(f"edge_probability takes four probabilities, got {self.edge_probability}")
        if not 0 < self.corner_variance_factor < math.inf:
            raise HaloposeError(f"corner_variance_factor should be above 0, got {self.corner_variance_factor}")
        self.risks(1)
        if self.attitude not in ("irs", "vision"):
            raise HaloposeError(f"unknown attitude {self.attitude!r}: irs or vision")
        if self.attitude == "irs" and self.sensors.attitude is None:
            raise HaloposeError("no attitude sensor on board: solve for the whole pose with --attitude vision")

    @property
    def vision_fault(self) -> float:
        """Prior probability that vision is wrong in an approach: detector, camera or runway data."""
        camera = self.camera.mounting_fault + self.camera.lens_fault
        return VISION_FAULT + camera + self.runway_fault

    @property
    def approach_requirement(self) -> Requirement:
        """Alert limits and integrity risk of the approach."""
        return requirement(self.requirement)

    def risks(self, frames: int) -> Risks:
        """Return the risks of each of ``frames`` frames of the approach."""
        return Risks(
            false_alarm=self.false_alarm,
            integrity=self.approach_requirement.per_frame(frames),
            fault_probability=self.fault_probability,
            pairs=tuple(zip(_EDGES, self.edge_probability, strict=True)),
            rotation_fault=self.camera.mounting_fault,
            lens_fault=self.camera.lens_fault,
            model_fault=self.runway_fault,
            # Faults last as long as what lasts of the errors: that many chances of an uncovered one in an approach.
            budget=self.approach_requirement.risk / max(1.0, frames / self.rate / self.persistence_s),
        )
