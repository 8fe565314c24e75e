"""The aircraft's position in every frame: from sighted corners to positions, verdicts and protection levels.

In: ``Sightings``, the camera and its mounting, the runway's corners, and the attitude by the IRS. Out:
``VisionFixes``, frame by frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from halopose.geometry.camera import Camera, Mount, aircraft_pose, pose_difference, rotation_from_angles
from halopose.geometry.integrity import Assessment, Verdict, assess
from halopose.geometry.propagation import aircraft_covariance
from halopose.landing.requirements import path_axes
from halopose.landing.settings import LandingSettings
from halopose.landing.sighting import Sightings
from halopose.poses import Array

_ANGLE_STEP = 1e-6


@dataclass(frozen=True)
class VisionFixes:
    """What PnP makes of N sightings: the aircraft's position (N, 3) in runway axes with covariance (N, 3, 3).

    The covariance leaves out the bias of the given attitude, which is the same in every frame; ``sensitivity``
    (N, 3, 3) says how far the position moves with errors of yaw, pitch and roll, zero if none were given. NaN
    where there is none. statistic (N,) is the residuals' chi-square with dof (N,) degrees of freedom, trusted
    (N,) whether the integrity check let the frame pass, excluded (N,) the corner left out or -1, reasons (N,) in
    words what became of each frame; levels (N, 3) protection levels in metres in the order of
    ``requirements.LEVELS``.
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

    @property
    def solved(self) -> Array:
        """Which frames have a position (N,)."""
        return np.asarray(np.isfinite(self.position).all(1))

    def error(self, truth: Array) -> Array:
        """Errors (N, 3) against true positions (N, 3), in the order of ``requirements.LEVELS``."""
        return np.asarray((self.position - truth) @ path_axes().T)


def solve(
    sightings: Sightings,
    camera: Camera,
    mount: Mount,
    corners: Array,
    attitudes: Array,
    settings: LandingSettings,
) -> VisionFixes:
    """The aircraft's position in every frame, from corners (4, 3) and, if wanted, attitudes (N, 3) of the IRS.

    Where the attitude is wanted and NaN there is no position.
    """
    sensor = settings.sensors.attitude
    known: dict[str, Any] = {}
    oriented = np.ones(len(sightings), dtype=bool)
    if settings.attitude == "irs" and sensor is not None:
        oriented = np.asarray(np.isfinite(attitudes).all(1))
        attitudes = np.nan_to_num(attitudes)
        axes = angle_axes(attitudes)
        variance = np.square(sensor.noise) + np.square(sensor.bias.sigma)
        rotation = mount.rotation @ rotation_from_angles(*attitudes.T)
        known = {
            "rotation": np.where(oriented[:, None, None], rotation, np.nan),
            "attitude": (axes * variance) @ np.swapaxes(axes, 1, 2),
        }
    found = assess(
        camera, corners, sightings.pixels, sightings.covariance, **known,
        mask=usable_corners(sightings, settings), risks=settings.risks(len(sightings)), axes=path_axes(),
        check=settings.integrity,
    )  # fmt: skip
    solution = found.solution
    total = aircraft_covariance(solution.covariance, solution.rotation, mount)
    carried, steady = np.zeros((len(sightings), 3, 3)), np.zeros(3)
    if known and sensor is not None:
        carried = total[:, :3, 3:] @ np.linalg.solve(known["attitude"], axes)
        steady = np.square(sensor.bias.sigma)
    spread = total[:, :3, :3] - (carried * steady) @ np.swapaxes(carried, 1, 2)
    return VisionFixes(
        position=aircraft_pose(solution.rotation, solution.position, mount)[1],
        covariance=(spread + np.swapaxes(spread, 1, 2)) / 2,
        statistic=found.statistic,
        dof=solution.dof,
        trusted=found.trusted,
        excluded=found.excluded,
        reasons=_reasons(sightings, oriented, found),
        levels=found.levels,
        sensitivity=carried,
    )


def usable_corners(sightings: Sightings, settings: LandingSettings) -> Array:
    """Corners (N, 4) to solve with: those kept by pruning where enough are left, else all of them."""
    every = np.repeat(sightings.seen[:, None], 4, axis=1)
    enough = sightings.keep.sum(1) >= (3 if settings.attitude == "irs" else 4)
    return np.where(enough[:, None] & settings.prune, sightings.keep, every)


def angle_axes(attitudes: Array) -> Array:
    """Turns about the runway axes (N, 3, 3) by changes of yaw, pitch and roll (N, 3), one a column."""
    origin = np.zeros((len(attitudes), 3))
    columns = []
    for axis in np.eye(3) * _ANGLE_STEP:
        low, high = (rotation_from_angles(*(attitudes + sign * axis).T) for sign in (-1, 1))
        columns.append(pose_difference(low, origin, high, origin)[:, 3:] / (2 * _ANGLE_STEP))
    return np.stack(columns, axis=-1)


_WORDS = {
    Verdict.FITS: "solved",
    Verdict.MENDED: "solved without a corner that does not fit the others",
    Verdict.CONTRADICTION: "not trusted: the corners do not fit the runway, whichever one is left out",
    Verdict.UNCLEAR: "not trusted: one corner is wrong, and it is not clear which",
}


def _reasons(sightings: Sightings, oriented: Array, found: Assessment) -> tuple[str, ...]:
    words = []
    for n, code in enumerate(found.verdict.tolist()):
        if not sightings.seen[n]:
            words.append("no runway detected")
        elif not oriented[n]:
            words.append("the IRS gave no attitude")
        else:
            words.append(_WORDS.get(Verdict(code)) or found.solution.reasons[n])
    return tuple(words)


__all__ = ["VisionFixes", "angle_axes", "solve", "usable_corners"]
