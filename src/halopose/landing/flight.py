"""One approach from camera to fused position: fly, look, detect, solve, check, fuse.

In: a seed, a weather, the sensors on board and a model of the runway's corners. Out: a ``Flight`` with everything
that happened, frame by frame, beside the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from halopose.errors import HaloposeError
from halopose.geometry.camera import (
    Camera,
    Mount,
    aircraft_pose,
    pose_difference,
    rotation_from_angles,
)
from halopose.geometry.integrity import check_risk, exclude, protection_levels
from halopose.geometry.pnp import Failure
from halopose.geometry.propagation import aircraft_covariance
from halopose.landing.navigation.fusion import MOTION, FusedTrack, FusionSettings, Initial, fuse
from halopose.landing.navigation.sensors import IlsSite, Measurement, Sensors, Truth, simulate, vision
from halopose.landing.sighting import Sightings, expected_corners, sight
from halopose.landing.world.approach import Approach, fly
from halopose.landing.world.render import render
from halopose.landing.world.scenes import Weather, check_weather
from halopose.predictor import UncertainPose
from halopose.types import Array

Progress = Callable[[str, int, int], None]

TRUTH_RATE = 100.0  # Hz, that of the IRS
_START_SIGMA = np.array([30.0, 30.0, 20.0, 3.0, 3.0, 2.0])  # m and m/s, before the first measurement
_ANGLE_STEP = 1e-6
_APART = 0.011  # seconds between an image and its attitude: one sample of the IRS


@dataclass(frozen=True)
class VisionFixes:
    """What PnP makes of N sightings: the aircraft's position (N, 3) in runway axes with covariance (N, 3, 3).

    The covariance leaves out the bias of the given attitude, which is the same in every frame; ``sensitivity``
    (N, 3, 3) says how far the position moves with errors of yaw, pitch and roll, zero if none were given. NaN
    where there is none. statistic (N,) is the residuals' chi-square with dof (N,) degrees of freedom, trusted
    (N,) whether the integrity check let the frame pass, excluded (N,) the corner left out or -1, reasons (N,) in
    words what became of each frame; levels (N, 2) horizontal and vertical protection levels in metres.
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


@dataclass(frozen=True)
class Flight:
    """A whole approach: its N camera frames, what vision made of them, and the track fused from all sensors.

    frame_times (N,), positions and attitudes of truth at them (N, 3); fused (N, 3) and fused_covariance
    (N, 3, 3) are the filter's position at the frames, nees (N,) its squared error over its covariance. A fix is
    part of the fused position of its own frame.
    """

    approach: Approach
    truth: Truth
    frame_times: Array
    position: Array
    attitude: Array
    sightings: Sightings
    fixes: VisionFixes
    track: FusedTrack
    fused: Array
    fused_covariance: Array
    nees: Array
    images: tuple[Array, ...]
    settings: LandingSettings


@dataclass(frozen=True)
class LandingSettings:
    """What to fly, how to look at it and what to believe.

    rate: images a second. attitude: ``irs`` solves for the position alone with the attitude of the IRS, ``vision``
    for the whole pose. prune: leave out corners that the artifact calls unreliable, as long as enough are left.
    conf: lowest score of a detection.
    persistence: integral over time of the correlation of the detector's errors. integrity: let inconsistent frames
    not pass, and leave out a corner that does not fit the others; false_alarm, integrity_risk and
    fault_probability as in ``landing.integrity``.
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
    integrity_risk: float = 1e-7
    fault_probability: float = 1e-3
    sensors: Sensors = field(default_factory=Sensors)

    def __post_init__(self) -> None:
        if not 0 < self.rate <= TRUTH_RATE:
            raise HaloposeError(f"the rate of images must be above 0 and up to {TRUTH_RATE:g}, got {self.rate}")
        if self.seed < 0:
            raise HaloposeError(f"a seed is 0 or more, got {self.seed}")
        check_weather(self.weather)
        if not 0 <= self.conf <= 1:
            raise HaloposeError(f"conf must lie between 0 and 1, got {self.conf}")
        if not 0 <= self.persistence < np.inf:
            raise HaloposeError(f"persistence is a number of seconds, 0 or more, got {self.persistence}")
        for name in ("false_alarm", "integrity_risk", "fault_probability"):
            check_risk(name, getattr(self, name))
        if self.attitude not in ("irs", "vision"):
            raise HaloposeError(f"unknown attitude {self.attitude!r}: irs or vision")
        if self.attitude == "irs" and self.sensors.attitude is None:
            raise HaloposeError("no attitude on board: solve for the whole pose with --attitude vision")

    @property
    def repetition(self) -> float:
        """How many frames say as much as one independent one: (1 + rho) / (1 - rho) of errors that decay as rho.

        A frame's covariance tells how far it is off, not that the next frame is off the same way. The filter takes
        its measurements as independent, so it gets covariances larger by this factor.
        """
        if not self.persistence:
            return 1.0
        rho = float(np.exp(-1 / (self.rate * self.persistence)))
        return (1 + rho) / (1 - rho)


def land(model: UncertainPose, settings: LandingSettings, progress: Progress | None = None) -> Flight:
    """Fly the approach of a seed with the camera and all sensors on board."""
    approach = fly(settings.seed, settings.weather, TRUTH_RATE)
    truth = truth_of(approach)
    times = np.arange(0.0, truth.times[-1], 1 / settings.rate)
    expected, oriented = _by_the_others(approach, truth, times, settings)
    images: list[Array] = []
    # Looked at as they are drawn: a model of something else shows at the first one.
    drawn = _images(approach, truth, times, images, progress)
    sightings = sight(model, drawn, expected, conf=settings.conf, oriented=oriented)
    return conclude(approach, truth, times, sightings, settings, tuple(images))


def truth_of(approach: Approach) -> Truth:
    """The true flight of an approach, as the sensors take it."""
    return Truth(
        approach.times, approach.positions, approach.velocities, approach.accelerations, approach.attitudes
    )


def conclude(
    approach: Approach,
    truth: Truth,
    times: Array,
    sightings: Sightings,
    settings: LandingSettings,
    images: tuple[Array, ...] = (),
) -> Flight:
    """Solve, check and fuse what has been sighted at the frame times (N,)."""
    world = approach.world
    fusion, measured = _measured(approach, truth, settings)
    start = _start(truth, settings.seed)
    attitudes = _attitudes_of(measured, times)
    fixes = solve(sightings, world.camera, world.mount, world.runway.corners(), attitudes, settings)
    seen = vision(times, fixes.position, fixes.covariance * settings.repetition, fixes.sensitivity)
    trusted = [fix for fix, good in zip(seen, fixes.trusted, strict=True) if good]
    track = fuse([*measured, *trusted], start, fusion)
    fused, spread = at(track, times, start, fusion.coasting)
    position = truth.position(times)
    error = fused - position
    return Flight(
        approach=approach,
        truth=truth,
        frame_times=times,
        position=position,
        attitude=truth.attitude(times),
        sightings=sightings,
        fixes=fixes,
        track=track,
        fused=fused,
        fused_covariance=spread,
        nees=(error * np.linalg.solve(spread, error[..., None])[..., 0]).sum(1),
        images=images,
        settings=settings,
    )


def _measured(
    approach: Approach, truth: Truth, settings: LandingSettings
) -> tuple[FusionSettings, list[Measurement]]:
    """What the sensors other than the camera say, and a filter that knows them and the runway's ILS."""
    site, sensors = IlsSite.of_runway(approach.world.runway.length), settings.sensors
    known: dict[str, Any] = {
        "radio_scale" if source == "radio" else f"{source}_bias": sensor.bias
        for source, sensor in sensors.on_board()
    }
    if sensors.irs is not None:
        known["irs_rate"] = sensors.irs.rate
    return FusionSettings(site=site, **known), simulate(truth, sensors, settings.seed, site)


def _by_the_others(
    approach: Approach, truth: Truth, times: Array, settings: LandingSettings
) -> tuple[Array, Array]:
    """Where the corners should appear (N, 4, 2) by all sensors but the camera, and if they know the attitude (N,).

    Without an attitude they are those of a level aircraft on the runway's heading: right in shape, not in place.
    """
    world = approach.world
    fusion, measured = _measured(approach, truth, settings)
    start = _start(truth, settings.seed)
    prior, _ = at(fuse(measured, start, fusion), times, start, fusion.coasting)
    attitudes = _attitudes_of(measured, times)
    level = np.nan_to_num(attitudes)
    expected = expected_corners(world.camera, world.mount, prior, level, world.runway.corners())
    return expected, np.asarray(np.isfinite(attitudes).all(1))


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
    seen = camera, corners, sightings.pixels, sightings.covariance
    alarm = settings.false_alarm if settings.integrity else 0.0
    checked = exclude(*seen, **known, mask=usable_corners(sightings, settings), false_alarm=alarm)
    shielded = protection_levels(
        *seen,
        **known,
        mask=checked.mask,
        integrity_risk=settings.integrity_risk,
        fault_probability=settings.fault_probability,
        false_alarm=settings.false_alarm,
    )
    solution = checked.solution
    total = aircraft_covariance(solution.covariance, solution.rotation, mount)
    carried, steady = np.zeros((len(sightings), 3, 3)), np.zeros(3)
    if known and sensor is not None:
        carried = total[:, :3, 3:] @ np.linalg.solve(known["attitude"], axes)
        steady = np.square(sensor.bias.sigma)
    spread = total[:, :3, :3] - (carried * steady) @ np.swapaxes(carried, 1, 2)
    trusted = solution.converged & ((checked.consistent & ~shielded.alarmed) | (not settings.integrity))
    return VisionFixes(
        position=aircraft_pose(solution.rotation, solution.position, mount)[1],
        covariance=(spread + np.swapaxes(spread, 1, 2)) / 2,
        statistic=np.where(solution.converged, solution.cost, np.nan),
        dof=solution.dof,
        trusted=trusted,
        excluded=checked.excluded,
        reasons=_reasons(sightings, oriented, solution.failure, trusted),
        levels=np.stack([shielded.horizontal, shielded.vertical], axis=1),
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


def at(track: FusedTrack, times: Array, start: Initial, coasting: float) -> tuple[Array, Array]:
    """Fused positions (N, 3) and their covariances (N, 3, 3) at times (N,), flown straight on from the last state.

    That is the start before the first measurement; ``coasting`` as in ``FusionSettings``.
    """
    stamps = np.concatenate([[start.time], track.times])
    index = np.searchsorted(stamps, times + 1e-9, side="right") - 1
    first = np.concatenate([np.asarray(start.position), np.asarray(start.velocity)])
    state = np.concatenate([first[None], track.states[:, MOTION]])[index]
    spread = np.concatenate([np.asarray(start.covariance)[None], track.covariances[:, MOTION, MOTION]])[index]
    ahead = np.maximum(times - stamps[index], 0.0)[:, None]
    step = np.concatenate([np.broadcast_to(np.eye(3), (len(times), 3, 3)), ahead[..., None] * np.eye(3)], axis=2)
    push = coasting / 3 * ahead[..., None] ** 3 * np.eye(3)
    return state[:, :3] + ahead * state[:, 3:], step @ spread @ np.swapaxes(step, 1, 2) + push


def _start(truth: Truth, seed: int) -> Initial:
    """Where the filter believes to begin: off by as much as it says."""
    error = np.random.default_rng([seed, 77]).standard_normal(6) * _START_SIGMA
    position, velocity = truth.positions[0] + error[:3], truth.velocities[0] + error[3:]
    return Initial(float(truth.times[0]), position, velocity, np.diag(_START_SIGMA**2))


def given_attitudes(flight: Flight) -> Array:
    """Yaw, pitch and roll (N, 3) that vision was given at the frames of a flight, NaN where there were none."""
    _, measured = _measured(flight.approach, flight.truth, flight.settings)
    return _attitudes_of(measured, flight.frame_times)


def _attitudes_of(measured: Sequence[Measurement], times: Array) -> Array:
    """What the IRS says of yaw, pitch and roll (N, 3) at the frames, NaN where it is silent."""
    given = [m for m in measured if m.source == "attitude"]
    if not given:
        return np.full((len(times), 3), np.nan)
    apart = np.abs(np.array([m.time for m in given]) - times[:, None])
    nearest = np.stack([given[i].value for i in apart.argmin(1)])
    return np.where((apart.min(1) <= _APART)[:, None], nearest, np.nan)


def _images(
    approach: Approach, truth: Truth, times: Array, kept: list[Array], progress: Progress | None
) -> Iterator[Array]:
    """What the camera sees at the times, one image after the other, all of them kept too."""
    for number, time in enumerate(times):
        moment = np.array([time])
        scene = replace(
            approach.world, position=truth.position(moment)[0], attitude=truth.attitude(moment)[0], frame=number
        )
        kept.append(render(scene))
        yield kept[-1]
        if progress:
            progress("looking", number + 1, len(times))


def _reasons(sightings: Sightings, oriented: Array, failure: Array, trusted: Array) -> tuple[str, ...]:
    words = []
    for seen, turned, code, good in zip(sightings.seen, oriented, failure, trusted, strict=True):
        solved = "solved" if good else "not trusted: the corners do not fit together"
        failed = Failure(code).reason if turned else "the IRS gave no attitude"
        words.append("no runway detected" if not seen else failed if code else solved)
    return tuple(words)
