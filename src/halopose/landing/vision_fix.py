"""Compute the aircraft's position from runway corners, with integrity checks and protection levels."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from halopose.geometry.attitude import step_with_attitude
from halopose.geometry.camera import Camera, Mount, body_pose, rotation_from_angles
from halopose.geometry.integrity import Assessment, Verdict, assess
from halopose.geometry.observations import Observations
from halopose.geometry.propagation import body_covariance
from halopose.landing.association import CornerDetections, Viewpoint
from halopose.landing.landing_settings import LandingSettings
from halopose.landing.navigation.sensors import Measurement, vision
from halopose.landing.requirements import path_axes
from halopose.types import Array

_FOCAL_STEP = 1e-2  # relative
_AGAIN = 4  # largest number of relinearisations of a frame
_NEAR = 2e-3  # relative change of the position at which relinearisation stops
_UNKNOWN = np.radians(10.0)  # standard deviation of an unknown attitude about level flight


@dataclass(frozen=True)
class VisionFixes:
    """Positions of the aircraft from N frames, solved by PnP.

    Errors of the given attitude's bias and of the mounting angles are the same in all frames. ``covariance`` does not
    contain them; ``sensitivity`` is the derivative of the position by them.

    Attributes:
        position: positions (N, 3) in runway axes; NaN without a solution.
        covariance: covariances (N, 3, 3).
        statistic: chi-square of the residuals (N,).
        dof: its degrees of freedom (N,).
        trusted: whether the frame passed the integrity check (N,).
        excluded: index of the excluded corner (N,), or -1.
        reasons: result of each frame (N), in words.
        levels: protection levels (N, 3) in metres, in the order of ``requirements.LEVEL_AXES``.
        sensitivity: derivatives (N, 3, 3) of the position by yaw, pitch and roll; zero without a given attitude.
        mask: corners in use (N, 4).
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
        """Whether frames (N,) have a position."""
        return np.asarray(np.isfinite(self.position).all(1))

    def error(self, truth: Array) -> Array:
        """Return errors (N, 3) against true positions (N, 3), in the order of ``requirements.LEVEL_AXES``."""
        return np.asarray((self.position - truth) @ path_axes().T)

    def select(self, frames: slice) -> VisionFixes:
        """Return the fixes of some of the frames."""
        names = [name for name in self.__dataclass_fields__ if getattr(self, name) is not None]
        return replace(self, **{name: getattr(self, name)[frames] for name in names})

    @classmethod
    def concatenate(cls, parts: list[VisionFixes]) -> VisionFixes:
        """Concatenate the fixes of several groups of frames."""
        names = [name for name in cls.__dataclass_fields__ if name != "reasons"]
        joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        return cls(**joined, reasons=tuple(reason for part in parts for reason in part.reasons))


@dataclass(frozen=True)
class VisionModel:
    """Assumed camera, runway and attitudes, from which positions are computed.

    Attributes:
        camera: assumed camera.
        mount: assumed mounting.
        corners: corners (4, 3) of the runway to land on.
        attitudes: yaw, pitch and roll (N, 3) by the IRS at the frames; NaN if not available.
        settings: settings of the estimator.
        others: corners (4, 3) of the other runways nearby.
        known_angles: ``axes``, ``rotation`` and ``attitude_covariance``, where they were computed before.
    """

    camera: Camera
    mount: Mount
    corners: Array
    attitudes: Array
    settings: LandingSettings
    others: tuple[Array, ...] = field(default=())
    known_angles: tuple[Array, Array, Array] | None = None

    @property
    def constant_variance(self) -> Array:
        """Variances (3,) of yaw, pitch and roll of the camera, of the part that is constant over all frames."""
        sensor = self.settings.sensors.attitude
        bias = np.zeros(3) if sensor is None else np.square(sensor.bias.sigma)
        return np.asarray(bias + self.settings.camera.turn_variance(self.camera))

    @property
    def has_attitude(self) -> Array:
        """Whether frames (N,) have an attitude."""
        return np.asarray(np.isfinite(self.attitudes).all(1))

    @property
    def uses_given_attitude(self) -> bool:
        """Whether positions are solved with the attitude of the IRS."""
        return self.settings.attitude == "irs" and self.settings.sensors.attitude is not None

    @cached_property
    def axes(self) -> Array:
        """Rotation vectors (N, 3, 3) about the runway axes by yaw, pitch and roll; of a level aircraft if unknown."""
        if self.known_angles is not None:
            return self.known_angles[0]
        return angle_axes(np.nan_to_num(self.attitudes))

    @cached_property
    def rotation(self) -> Array:
        """Rotations (N, 3, 3) from runway to camera; NaN if unknown."""
        if self.known_angles is not None:
            return self.known_angles[1]
        rotation = self.mount.rotation @ rotation_from_angles(*np.nan_to_num(self.attitudes).T)
        return np.where(self.has_attitude[:, None, None], rotation, np.nan)

    @cached_property
    def attitude_covariance(self) -> Array:
        """Covariance (N, 3, 3) of the camera's rotation about the runway axes."""
        if self.known_angles is not None:
            return self.known_angles[2]
        sensor = self.settings.sensors.attitude
        noise = np.zeros(3) if sensor is None else np.square(sensor.noise)
        return np.asarray((self.axes * (noise + self.constant_variance)) @ np.swapaxes(self.axes, 1, 2))

    @cached_property
    def intrinsics(self) -> Array | None:
        """Covariance (9, 9) of the camera's parameters; None if they are exact."""
        spread = self.settings.camera.intrinsics(self.camera)
        return spread if spread.any() else None

    def select(self, frames: slice) -> VisionModel:
        """Return the model of some of the frames."""
        known = self.axes[frames], self.rotation[frames], self.attitude_covariance[frames]
        return replace(self, attitudes=self.attitudes[frames], known_angles=known)

    def viewpoint(self, n: int, position: Array, covariance: Array) -> Viewpoint:
        """Return the estimated pose at frame n, for a position (3,) of the aircraft with its covariance (3, 3)."""
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
        """Return the measurement of frame n, linearised at the most likely position given it and the prediction.

        A fix is elongated along the line of sight. If it is linearised at a prediction hundreds of metres off, it has
        the wrong direction, and two fixes with crossing directions make the distance look certain. So the direction is
        that of the posterior. The distance is that of the prediction: the length of the ellipsoid grows with the square
        of the distance, so fixes that err near would look more certain than fixes that err far, and the filter would be
        biased near.

        Args:
            n: index of the frame.
            time: its time in seconds.
            corner_detections: corners of this frame only.
            fixes: fix of this frame only.
            expected: predicted position (3,).
            covariance: its covariance (3, 3).
        """
        point = expected
        taken = self.measurement(n, time, corner_detections, fixes, point)
        for _ in range(_AGAIN if self.uses_given_attitude else 0):
            spread = taken.covariance
            if taken.sensitivity is not None:
                spread = spread + (taken.sensitivity * self.constant_variance) @ taken.sensitivity.T
            for part in (taken.drift, taken.flicker):
                spread = spread if part is None else spread + part @ part.T
            moved = expected + covariance @ np.linalg.solve(covariance + spread, taken.value - expected)
            moved *= np.linalg.norm(expected) / np.linalg.norm(moved)
            if not np.linalg.norm(moved - point) > _NEAR * np.linalg.norm(point):  # true also for NaN
                break
            point, taken = moved, self.measurement(n, time, corner_detections, fixes, moved)
        return taken

    def measurement(
        self, n: int, time: float, corner_detections: CornerDetections, fixes: VisionFixes, expected: Array
    ) -> Measurement:
        """Return the measurement of frame n, linearised at ``expected`` (3,), or the fix itself without a given
        attitude.
        """
        shares = self.settings.persistent_share, self.settings.variance_factor, self.settings.flicker_share
        if not self.uses_given_attitude:
            parts = fixes.position, fixes.covariance, fixes.sensitivity
            return vision([time], *parts, *shares)[0]
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
            shared=shared,
            mask=fixes.mask,
        )
        position, _, total = step_with_attitude(observations, (expected + arm)[None])
        spread, carried = self.select(rows).aircraft_covariance(total, self.rotation[rows])
        taken = vision([time], position - arm, spread, carried, *shares)[0]
        if not self.settings.camera.focal:
            return taken
        longer = replace(self.camera, fx=self.camera.fx * (1 + _FOCAL_STEP), fy=self.camera.fy * (1 + _FOCAL_STEP))
        moved = step_with_attitude(replace(observations, camera=longer), (expected + arm)[None])[0]
        # If the focal length is longer than believed, the position is off by the opposite of what believing it moves.
        return replace(taken, focal=(position - moved)[0] / _FOCAL_STEP)

    def aircraft_covariance(self, covariance: Array, rotation: Array) -> tuple[Array, Array]:
        """Return covariances (N, 3, 3) of the aircraft's position without the constant part, and the sensitivity to
        that
        part.
        """
        arm = np.diag([self.settings.camera.lever_arm**2] * 3 + [0.0] * 3)
        total = body_covariance(covariance, rotation, self.mount, arm)
        carried, steady = np.zeros((len(total), 3, 3)), np.zeros(3)
        if self.uses_given_attitude:
            carried = total[:, :3, 3:] @ np.linalg.solve(self.attitude_covariance, self.axes)
            steady = self.constant_variance
        spread = total[:, :3, :3] - (carried * steady) @ np.swapaxes(carried, 1, 2)
        return (spread + np.swapaxes(spread, 1, 2)) / 2, carried


def solve(corner_detections: CornerDetections, vision_model: VisionModel, frames: int | None = None) -> VisionFixes:
    """Compute the aircraft's position in every frame.

    Frames without an attitude have no position if the attitude is given.

    Args:
        corner_detections: corners of the runway.
        vision_model: assumed camera, runway and attitudes.
        frames: number of frames of the whole approach, over which the risk is divided; default: these frames.
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
    """Solve PnP and check the integrity of each frame."""
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
    """Return the corners (N, 4) to solve with: those that pruning keeps if enough remain, else all."""
    every = np.repeat(corner_detections.seen[:, None], 4, axis=1)
    enough = corner_detections.keep.sum(1) >= (3 if settings.attitude == "irs" else 4)
    return np.where(enough[:, None] & settings.prune, corner_detections.keep, every)


def angle_axes(attitudes: Array) -> Array:
    """Return the rotation vectors (N, 3, 3) about the runway axes by changes of yaw, pitch and roll (N, 3), as
    columns.

    The angles are about axes of forward-right-down frames: yaw about the vertical one, pitch about the right one after
    yaw, roll about the nose.
    """
    nose = rotation_from_angles(*attitudes.T)[:, 0]
    yaw = attitudes[:, 0]
    zero = np.zeros_like(yaw)
    down, right = np.stack([zero, zero, zero - 1], 1), np.stack([-np.sin(yaw), -np.cos(yaw), zero], 1)
    return np.stack([down, right, nose], axis=-1)


_WORDS = {
    Verdict.CONSISTENT: "solved",
    Verdict.POINT_EXCLUDED: "solved without a corner that does not fit the others",
    Verdict.INCONSISTENT: "not trusted: the corners do not fit the runway, even without any single one",
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
