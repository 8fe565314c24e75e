"""One approach from camera to fused position: fly, look, detect, solve, check, fuse.

In: a seed, a weather, the sensors on board and a model of the runway's corners. Out: a ``Flight`` with everything
that happened, frame by frame, beside the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from halopose.landing.fixes import VisionFixes, solve
from halopose.landing.navigation.fusion import MOTION, FusedTrack, FusionSettings, Initial, fuse
from halopose.landing.navigation.sensors import IlsSite, Measurement, Truth, simulate, vision
from halopose.landing.settings import TRUTH_RATE, LandingSettings
from halopose.landing.sighting import Sightings, expected_corners, sight
from halopose.landing.world.approach import Approach, fly
from halopose.landing.world.render import render
from halopose.poses import Array
from halopose.predictor import UncertainPose

Progress = Callable[[str, int, int], None]

_START_SIGMA = np.array([30.0, 30.0, 20.0, 3.0, 3.0, 2.0])  # m and m/s, before the first measurement
_APART = 0.011  # seconds between an image and its attitude: one sample of the IRS


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
