"""The aircraft's position in every frame: from sighted corners to positions, verdicts and protection levels.

In: ``CornerDetections``, an ``VisionModel``, what is believed of camera, runway and attitude. Out: ``VisionFixes``,
frame by frame, and the measurement that a navigator takes of each.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from halopose.geometry.attitude import step_with_attitude
from halopose.geometry.camera import Camera, Mount, body_pose, pose_difference, rotation_from_angles
from halopose.geometry.integrity import Assessment, Verdict, assess
from halopose.geometry.observations import Observations
from halopose.geometry.propagation import body_covariance
from halopose.landing.association import CornerDetections, Viewpoint
from halopose.landing.landing_settings import LandingSettings
from halopose.landing.navigation.sensors import Measurement, vision
from halopose.landing.requirements import path_axes
from halopose.types import Array

_ANGLE_STEP = 1e-6
_AGAIN = 4  # times at most that a frame is linearised anew
_NEAR = 2e-3  # of the distance: a line of sight from so near is the same
_UNKNOWN = np.radians(10.0)  # standard deviation of an attitude that nobody measures, against a level aircraft


@dataclass(frozen=True)
class VisionFixes:
    """What PnP makes of N corner_detections: the aircraft's position (N, 3) in runway axes with covariance (N, 3, 3).

    The covariance leaves out the bias of the given attitude and the angles of the camera's mounting, which are the
    same in every frame; ``sensitivity`` (N, 3, 3) says how far the position moves with errors of yaw, pitch and
    roll, zero if none were given. NaN where there is none. statistic (N,) is the residuals' chi-square with dof
    (N,) degrees of freedom, trusted (N,) whether the integrity check let the frame pass, mask (N, 4) the corners
    used, excluded (N,) the one left out or -1, reasons (N,) in words what became of each frame; levels (N, 3)
    protection levels in metres in the order of ``requirements.LEVEL_AXES``.
    """

    position: Array
    covariance: Array
    statistic: Array
    dof: Array
    trusted: Array
    excluded: Array
    reasons: tuple[str, ...]
    levels: Array
    sensitivity: Array
    mask: Array | None = None

    @property
    def solved(self) -> Array:
        """Which frames have a position (N,)."""
        return np.asarray(np.isfinite(self.position).all(1))

    def error(self, truth: Array) -> Array:
        """Errors (N, 3) against true positions (N, 3), in the order of ``requirements.LEVEL_AXES``."""
        return np.asarray((self.position - truth) @ path_axes().T)

    @classmethod
    def concatenate(cls, parts: list[VisionFixes]) -> VisionFixes:
        """Fixes of many frames from those of some."""
        names = [name for name in cls.__dataclass_fields__ if name != "reasons"]
        joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        return cls(**joined, reasons=tuple(reason for part in parts for reason in part.reasons))


@dataclass(frozen=True)
class VisionModel:
    """A camera as it is believed to be, the corners (4, 3) that it looks for, and the attitude of its aircraft.

    ``attitudes`` (N, 3) are yaw, pitch and roll by the IRS at the frames, NaN where it is silent; ``others`` are
    corners (4, 3) of runways that might be taken for the one landed on.
    """

    camera: Camera
    mount: Mount
    corners: Array
    attitudes: Array
    settings: LandingSettings
    others: tuple[Array, ...] = field(default=())

    @property
    def constant_variance(self) -> Array:
        """Variances (3,) of yaw, pitch and roll as the camera has them, of the part that is the same in all
        frames."""
        sensor = self.settings.sensors.attitude
        bias = np.zeros(3) if sensor is None else np.square(sensor.bias.sigma)
        return np.asarray(bias + self.settings.camera.mounting**2)

    @property
    def has_attitude(self) -> Array:
        """Which frames (N,) have an attitude."""
        return np.asarray(np.isfinite(self.attitudes).all(1))

    @property
    def uses_given_attitude(self) -> bool:
        """Whether positions are solved for with the attitude of the IRS."""
        return self.settings.attitude == "irs" and self.settings.sensors.attitude is not None

    @cached_property
    def axes(self) -> Array:
        """Turns about the runway axes (N, 3, 3) by yaw, pitch and roll; those of a level aircraft if unknown."""
        return angle_axes(np.nan_to_num(self.attitudes))

    @cached_property
    def rotation(self) -> Array:
        """Runway to camera (N, 3, 3), NaN where it is unknown."""
        rotation = self.mount.rotation @ rotation_from_angles(*np.nan_to_num(self.attitudes).T)
        return np.where(self.has_attitude[:, None, None], rotation, np.nan)

    @cached_property
    def attitude_covariance(self) -> Array:
        """Of the camera's rotation, about the runway axes (N, 3, 3)."""
        sensor = self.settings.sensors.attitude
        noise = np.zeros(3) if sensor is None else np.square(sensor.noise)
        return np.asarray((self.axes * (noise + self.constant_variance)) @ np.swapaxes(self.axes, 1, 2))

    @cached_property
    def intrinsics(self) -> Array | None:
        """Covariance (9, 9) of the camera's parameters; None if they are exact."""
        spread = self.settings.camera.intrinsics(self.camera)
        return spread if spread.any() else None

    def select(self, frames: slice) -> VisionModel:
        """The vision_model at some of the frames."""
        return VisionModel(self.camera, self.mount, self.corners, self.attitudes[frames], self.settings, self.others)

    def viewpoint(self, n: int, position: Array, covariance: Array) -> Viewpoint:
        """Where the runway is to be looked for in frame n, with the aircraft at a position (3,) as uncertain as
        said."""
        known = bool(self.has_attitude[n])
        spread = self.attitude_covariance[n] if known else _UNKNOWN**2 * np.eye(3)
        attitude = np.nan_to_num(self.attitudes[n])
        return Viewpoint(self.camera, self.mount, position, covariance, attitude, spread)

    def linearised_measurement(
        self,
        n: int,
        time: float,
        corner_detections: CornerDetections,
        fixes: VisionFixes,
        expected: Array,
        covariance: Array,
    ) -> Measurement:
        """The measurement of frame n, linear about where the aircraft, expected (3,) with covariance (3, 3), is
        likeliest to be given it, but as far from the threshold as it was expected to be.

        A fix is a needle along the line of sight. Drawn from where a filter is hundreds of metres off, it points
        elsewhere, and two needles that cross make the distance look sure. So the direction is that of both
        together. The distance is the filter's alone: a needle is as long as the square of it, so that what errs
        near would look surer than what errs far, fix after fix, and the filter would come out too near.
        """
        point = expected
        taken = self.measurement(n, time, corner_detections, fixes, point)
        for _ in range(_AGAIN if self.uses_given_attitude else 0):
            carried, drift = (np.zeros((3, 3)) if part is None else part for part in (taken.sensitivity, taken.drift))
            spread = taken.covariance + (carried * self.constant_variance) @ carried.T + drift @ drift.T
            moved = expected + covariance @ np.linalg.solve(covariance + spread, taken.value - expected)
            moved *= np.linalg.norm(expected) / np.linalg.norm(moved)
            if not np.linalg.norm(moved - point) > _NEAR * np.linalg.norm(point):  # also if it is not finite
                break
            point, taken = moved, self.measurement(n, time, corner_detections, fixes, moved)
        return taken

    def measurement(
        self, n: int, time: float, corner_detections: CornerDetections, fixes: VisionFixes, expected: Array
    ) -> Measurement:
        """What a navigator takes of frame n, the only one of its corner_detections and fixes: linear about where it
        expects to be (3,), or the fix itself if that was solved for with the attitude."""
        if not self.uses_given_attitude:
            parts = fixes.position, fixes.covariance, fixes.sensitivity
            return vision([time], *parts, self.settings.persistent_share, self.settings.variance_factor)[0]
        arm = self.mount.lever_arm @ rotation_from_angles(*self.attitudes[n])
        rows = slice(n, n + 1)
        own, shared = self.settings.corner_correlation.parts(
            corner_detections.covariance * self.settings.corner_variance_factor
        )
        observations = Observations(
            self.camera,
            self.corners,
            corner_detections.pixels,
            own,
            self.rotation[rows],
            self.attitude_covariance[rows],
            intrinsics_covariance=self.intrinsics,
            shared=shared,
            mask=fixes.mask,
        )
        position, _, total = step_with_attitude(observations, (expected + arm)[None])
        spread, carried = self.select(rows).aircraft_covariance(total, self.rotation[rows])
        return vision(
            [time], position - arm, spread, carried, self.settings.persistent_share, self.settings.variance_factor
        )[0]

    def aircraft_covariance(self, covariance: Array, rotation: Array) -> tuple[Array, Array]:
        """Position covariances (N, 3, 3) of the aircraft without what is steady, and the sensitivity to it."""
        arm = np.diag([self.settings.camera.lever_arm**2] * 3 + [0.0] * 3)
        total = body_covariance(covariance, rotation, self.mount, arm)
        carried, steady = np.zeros((len(total), 3, 3)), np.zeros(3)
        if self.uses_given_attitude:
            carried = total[:, :3, 3:] @ np.linalg.solve(self.attitude_covariance, self.axes)
            steady = self.constant_variance
        spread = total[:, :3, :3] - (carried * steady) @ np.swapaxes(carried, 1, 2)
        return (spread + np.swapaxes(spread, 1, 2)) / 2, carried


def solve(corner_detections: CornerDetections, vision_model: VisionModel, frames: int | None = None) -> VisionFixes:
    """The aircraft's position in every frame, of an approach of so many ``frames``, by default these.

    Where the attitude is wanted and NaN there is no position.
    """
    found = _assessed(corner_detections, vision_model, frames or len(corner_detections))
    solution = found.solution
    spread, carried = vision_model.aircraft_covariance(solution.covariance, solution.rotation)
    return VisionFixes(
        position=body_pose(solution.rotation, solution.position, vision_model.mount)[1],
        covariance=spread,
        statistic=found.statistic,
        dof=solution.dof,
        trusted=found.trusted,
        excluded=found.excluded,
        reasons=_reasons(corner_detections, vision_model, found),
        levels=found.levels,
        sensitivity=carried,
        mask=found.mask,
    )


def _assessed(corner_detections: CornerDetections, vision_model: VisionModel, frames: int) -> Assessment:
    """What ``geometry`` makes of the corners."""
    settings = vision_model.settings
    observations = Observations(
        vision_model.camera,
        vision_model.corners,
        corner_detections.pixels,
        corner_detections.covariance * settings.corner_variance_factor,
        mask=usable_corners(corner_detections, settings),
    )
    if vision_model.uses_given_attitude:
        own, shared = settings.corner_correlation.parts(observations.covariance)
        observations = replace(
            observations,
            covariance=own,
            R_cam_world=vision_model.rotation,
            attitude_covariance=vision_model.attitude_covariance,
            intrinsics_covariance=vision_model.intrinsics,
            shared=shared,
        )
    return assess(observations, risks=settings.risks(frames), axes=path_axes(), check=settings.integrity)


def usable_corners(corner_detections: CornerDetections, settings: LandingSettings) -> Array:
    """Corners (N, 4) to solve with: those kept by pruning where enough are left, else all of them."""
    every = np.repeat(corner_detections.seen[:, None], 4, axis=1)
    enough = corner_detections.keep.sum(1) >= (3 if settings.attitude == "irs" else 4)
    return np.where(enough[:, None] & settings.prune, corner_detections.keep, every)


def angle_axes(attitudes: Array) -> Array:
    """Turns about the runway axes (N, 3, 3) by changes of yaw, pitch and roll (N, 3), one a column."""
    origin = np.zeros((len(attitudes), 3))
    columns = []
    for axis in np.eye(3) * _ANGLE_STEP:
        low, high = (rotation_from_angles(*(attitudes + sign * axis).T) for sign in (-1, 1))
        columns.append(pose_difference(low, origin, high, origin)[:, 3:] / (2 * _ANGLE_STEP))
    return np.stack(columns, axis=-1)


_WORDS = {
    Verdict.CONSISTENT: "solved",
    Verdict.POINT_EXCLUDED: "solved without a corner that does not fit the others",
    Verdict.INCONSISTENT: "not trusted: the corners do not fit the runway, whichever one is left out",
    Verdict.UNCLEAR: "not trusted: one corner is wrong, and it is not clear which",
}


def _reasons(corner_detections: CornerDetections, vision_model: VisionModel, found: Assessment) -> tuple[str, ...]:
    words = []
    for n, code in enumerate(found.verdict.tolist()):
        if not corner_detections.seen[n]:
            words.append(corner_detections.reason(n))
        elif vision_model.uses_given_attitude and not vision_model.has_attitude[n]:
            words.append("the IRS gave no attitude")
        else:
            words.append(_WORDS.get(Verdict(code)) or found.solution.reasons[n])
    return tuple(words)
