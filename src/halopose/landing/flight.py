"""Fly one approach: simulate, detect, associate, solve, check and fuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from halopose.geometry.camera import Camera, Mount
from halopose.landing.association import (
    NO_RUNWAY,
    NOT_WHERE_EXPECTED,
    OUT_OF_DISTRIBUTION,
    Association,
    CornerDetections,
    Viewpoint,
    associate,
    detect_runways,
    fits,
    in_distribution_only,
)
from halopose.landing.frame_buffer import FrameBuffer
from halopose.landing.landing_settings import TRUTH_RATE, LandingSettings
from halopose.landing.navigation.fault_priors import FaultPriors
from halopose.landing.navigation.fusion import FusedTrack, fuse
from halopose.landing.navigation.motion_model import POSITION, FusionSettings, InitialState
from halopose.landing.navigation.navigator import NavigationState
from halopose.landing.navigation.sensors import (
    DeferredMeasurement,
    GaussMarkov,
    IlsSite,
    Measurement,
    MemberMeasurements,
    TrueTrajectory,
    simulate,
)
from halopose.landing.navigation.terrain import LEVEL, Terrain
from halopose.landing.roi_refinement import RoiDetector, expected_box
from halopose.landing.vision_fix import VisionFixes, VisionModel, solve
from halopose.landing.world.approach import Approach, fly
from halopose.landing.world.render import render_scene
from halopose.landing.world.scenes import Scene
from halopose.poses import PoseDistributions
from halopose.prediction.predictor import Predictor
from halopose.prediction.stream_monitor import StreamMonitor
from halopose.types import Array

Progress = Callable[[str, int, int], None]

_START_SIGMA = np.array([30.0, 30.0, 20.0, 3.0, 3.0, 2.0])  # m and m/s, before the first measurement
_SHARED = 5e-3  # of the distance: filters nearer than this to the first one see the same
_CANDIDATES = 3  # detections that may be an unexpected runway
_FARTHEST = 15e3  # metres before the threshold from which a runway is seen at most
_APART = 0.011  # largest time in seconds between an image and its attitude: one sample of the IRS


@dataclass(frozen=True)
class Scenario:
    """Place of a flight.

    Attributes:
        designator: designator of the runway.
        length: its length in metres.
        width: its width in metres.
        corners: its corners (4, 3) in runway axes.
        camera: the camera.
        mount: its mounting.
        air: weather in words.
    """

    designator: str
    length: float
    width: float
    corners: Array
    camera: Camera
    mount: Mount
    air: str

    @classmethod
    def of_world(cls, world: Scene) -> Scenario:
        """Return the place of a simulated scene."""
        runway, air = (
            world.runway,
            f"{world.weather}, visibility {world.visibility / 1000:.3g}\N{NO-BREAK SPACE}km",
        )
        size = runway.designator, runway.length, runway.width
        return cls(*size, runway.corners(), world.camera, world.mount, air)


@dataclass(frozen=True)
class Flight:
    """A whole approach of N camera frames: detections, vision fixes and the fused track.

    Attributes:
        scenario: runway, camera and weather.
        frame_times: times of the frames (N,) in seconds.
        position: true positions (N, 3); NaN if unknown.
        attitude: true or logged attitudes (N, 3); NaN if unknown.
        corner_detections: corners of the runway.
        vision_fixes: positions by vision.
        track: fused track of all sensors.
        fused: fused positions (N, 3), including the fix of the frame.
        fused_covariance: their covariances (N, 3, 3).
        nees: normalised estimation error squared (N,) of the fused positions.
        images: camera images, possibly a `FrameBuffer` or empty.
        settings: settings of the flight.
        stamps: times of the frames (N,) by the camera's clock, as in ``track``.
    """

    scenario: Scenario
    frame_times: Array
    position: Array
    attitude: Array
    corner_detections: CornerDetections
    vision_fixes: VisionFixes
    track: FusedTrack
    fused: Array
    fused_covariance: Array
    nees: Array
    images: Sequence[Array]
    settings: LandingSettings
    stamps: Array

    @property
    def reference(self) -> Array:
        """Positions (N, 3) of the aircraft: true ones where known, else fused ones."""
        return np.where(np.isfinite(self.position), self.position, self.fused)

    @property
    def frames_with_images(self) -> list[int]:
        """Indices of the frames with an image."""
        return self.images.kept if isinstance(self.images, FrameBuffer) else list(range(len(self.images)))

    @property
    def has_truth(self) -> bool:
        """Whether the true position of any frame is known."""
        return bool(np.isfinite(self.position).any())


@dataclass(frozen=True)
class SimulatedFlight(Flight):
    """A simulated flight with its approach and true trajectory."""

    approach: Approach
    truth: TrueTrajectory


def land(
    model: Predictor,
    settings: LandingSettings,
    progress: Progress | None = None,
    monitor: StreamMonitor | None = None,
) -> SimulatedFlight:
    """Simulate the approach of a seed with the camera and all sensors on board.

    Args:
        model: runway detector.
        settings: settings of the flight.
        progress: called with the name, number and count of finished steps.
        monitor: calibration monitor that watches the frames.
    """
    images: list[Array] = []
    found = detect_in_flight(model, settings, progress, images)
    if monitor is not None:
        monitor.watch(found, settings.rate)
    approach = fly(settings.seed, settings.weather, TRUTH_RATE)
    truth = true_trajectory(approach)
    return navigate(approach, truth, frame_times(truth, settings), found, settings, tuple(images))


def detect_in_flight(
    model: Predictor,
    settings: LandingSettings,
    progress: Progress | None = None,
    images: list[Array] | None = None,
) -> list[PoseDistributions]:
    """Detect runways frame by frame.

    Args:
        model: runway detector.
        settings: settings of the flight.
        progress: called with the name, number and count of finished steps.
        images: list that receives the images.
    """
    approach = fly(settings.seed, settings.weather, TRUTH_RATE)
    truth = true_trajectory(approach)
    # Detect while rendering: a model of another object is refused at the first image.
    drawn = rendered_images(approach, truth, frame_times(truth, settings), progress)
    if images is None:
        return detect_runways(model, drawn, conf=settings.conf)
    return detect_runways(model, _kept(drawn, images), conf=settings.conf)


def _kept(drawn: Iterator[Array], images: list[Array]) -> Iterator[Array]:
    for image in drawn:
        images.append(image)
        yield image


def frame_times(truth: TrueTrajectory, settings: LandingSettings) -> Array:
    """Return the times (N,) of the camera frames."""
    return np.arange(0.0, truth.times[-1], 1 / settings.rate)


def true_trajectory(approach: Approach) -> TrueTrajectory:
    """Return the true trajectory of an approach for the sensors."""
    return TrueTrajectory(
        approach.times, approach.positions, approach.velocities, approach.accelerations, approach.attitudes
    )


def navigate(
    approach: Approach,
    truth: TrueTrajectory,
    times: Array,
    detections: Sequence[PoseDistributions],
    settings: LandingSettings,
    images: tuple[Array, ...] = (),
) -> SimulatedFlight:
    """Associate, solve, check and fuse detections at the frame times (N,)."""
    fusion, measured = simulate_sensors(approach, truth, settings)
    vision_model = vision_model_of(approach, measured, times, settings)
    stamps = np.maximum(times + settings.camera.offset(settings.seed), truth.times[0])
    start = draw_initial_state(truth, settings.seed)
    fused = fuse_vision(vision_model, stamps, times, detections, measured, fusion, start, truth.position(times))
    return SimulatedFlight(
        scenario=Scenario.of_world(approach.world),
        approach=approach,
        truth=truth,
        frame_times=times,
        attitude=truth.attitude(times),
        images=images,
        settings=settings,
        **fused,
    )


def fuse_vision(
    vision_model: VisionModel,
    stamps: Array,
    times: Array,
    detections: Sequence[PoseDistributions],
    measured: Sequence[Measurement],
    fusion: FusionSettings,
    start: InitialState,
    position: Array,
    roi_detector: RoiDetector | None = None,
) -> dict[str, Any]:
    """Fuse detections with measurements of the other sensors, and return most fields of a `Flight`.

    Args:
        vision_model: assumed camera, runway and attitudes.
        stamps: times of the images (N,) by the camera's clock.
        times: times of the images (N,) by the sensors' clock.
        detections: detections in each image (N).
        measured: measurements of the other sensors.
        fusion: settings of the filter.
        start: initial state.
        position: true positions (N, 3) for error figures; NaN if unknown.
        roi_detector: detects again where the filter expects the runway.
    """
    camera = VisionSensor(vision_model, stamps, detections, roi_detector)
    latency = vision_model.settings.camera.latency
    track = fuse([*measured, *camera.deferred(latency)], start, fusion, times, latency)
    output = track.output
    error = output.positions - position
    return {
        "stamps": stamps,
        "position": position,
        "corner_detections": camera.seen(),
        "vision_fixes": VisionFixes.concatenate(camera.vision_fixes),
        "track": track,
        "fused": output.positions,
        "fused_covariance": output.covariances,
        "nees": (error * np.linalg.solve(output.covariances, error[..., None])[..., 0]).sum(1),
    }


class VisionSensor:
    """The camera as a sensor: finds the runway where the filter expects it, and returns a measurement.

    The latest result of each frame is in ``corner_detections`` and ``vision_fixes``.
    """

    def __init__(
        self,
        vision_model: VisionModel,
        times: Array,
        detections: Sequence[PoseDistributions],
        roi_detector: RoiDetector | None = None,
    ) -> None:
        self.vision_model, self.times, self.roi_detector = vision_model, times, roi_detector
        self.detections = [in_distribution_only(poses, vision_model.settings.alarm) for poses in detections]
        self.found = [len(poses) > 0 for poses in detections]
        self.student = bool(detections) and detections[0].dof is not None
        nothing = CornerDetections.empty(len(times), student=self.student)
        unsolved = solve(nothing, vision_model)
        self.corner_detections = [nothing.select(slice(n, n + 1)) for n in range(len(times))]
        self.vision_fixes = [unsolved.select(slice(n, n + 1)) for n in range(len(times))]
        self._solutions: dict[int | None, tuple[CornerDetections, VisionFixes]] = {}  # of one frame, by detection

    def deferred(self, latency: float) -> list[DeferredMeasurement]:
        """Return a deferred measurement for each frame, at its time stamp."""
        return [
            DeferredMeasurement(float(time), "vision", partial(self.measure, n), latency)
            for n, time in enumerate(self.times.tolist())
        ]

    def measure(self, n: int, state: NavigationState) -> MemberMeasurements | None:
        """Return the measurement of frame n for each filter, given where that filter believes the aircraft to be.

        Filters near the first one share its association. If a filter does not expect the runway where it was detected,
        its measurement is marked as unexplained.
        """
        view = self.vision_model.viewpoint(n, state.position, state.overbound)
        if self.roi_detector is not None:
            looked = self.roi_detector.at(n, expected_box(view, self.vision_model.corners))
            self.detections[n], self.found[n] = (
                in_distribution_only(looked, self.vision_model.settings.alarm),
                len(looked) > 0,
            )
        found = associate(self.detections[n], view, self.vision_model.corners, self.vision_model.others)
        if found.reason == NO_RUNWAY and self.found[n]:
            found = replace(found, reason=OUT_OF_DISTRIBUTION)
        self._solutions.clear()
        self.corner_detections[n], self.vision_fixes[n] = self._alone(n, found)
        if not len(self.detections[n]):
            return None
        elsewhere: list[Measurement] = []  # solved once, when the first filter needs it
        bank = state.filters
        first = self._measured(n, view, found, elsewhere)
        uses, places = bank.uses("vision"), bank.states[:, POSITION]
        near = np.linalg.norm(places - places[0], axis=1) < _SHARED * np.linalg.norm(places[0])
        parts = [first]
        for member in range(1, len(places)):
            if not uses[member] or (near[member] and not first[1]):
                parts.append(first)
                continue
            view = self.vision_model.viewpoint(n, places[member], bank.covariances[member, POSITION, POSITION])
            chosen = associate(self.detections[n], view, self.vision_model.corners, self.vision_model.others)
            parts.append(self._measured(n, view, chosen, elsewhere))
        return MemberMeasurements(tuple(part[0] for part in parts), tuple(part[1] for part in parts))

    def _measured(
        self, n: int, view: Viewpoint, found: Association, elsewhere: list[Measurement]
    ) -> tuple[Measurement | None, bool]:
        """Return the measurement of frame n for a filter, and whether its runway is not where the filter expects it."""
        if found.index is not None:
            seen, fix = self._alone(n, found)
            if not fix.trusted[0]:
                return None, False
            believed = view.position, view.covariance
            return self.vision_model.linearised_measurement(n, self.times[n], seen, fix, *believed), False
        if found.reason != NOT_WHERE_EXPECTED:
            return None, False
        known = np.zeros(len(self.detections[n]), dtype=bool)
        for other in self.vision_model.others:
            known |= fits(self.detections[n], view, other)
        if known.all():
            return None, False
        if not elsewhere:
            elsewhere += self._unexpected(n)
        return (elsewhere[0], True) if elsewhere else (None, False)

    def _unexpected(self, n: int) -> list[Measurement]:
        """Return the measurement of the most confident detection of frame n that fits the runway's shape, if any."""
        model = self.vision_model
        for index in np.argsort(-self.detections[n].scores)[:_CANDIDATES].tolist():
            seen, fix = self._alone(n, Association(index))
            if not fix.trusted[0]:
                continue
            along, _, up = fix.position[0]
            if -_FARTHEST < along < model.corners[:, 0].max() and up > 0:
                return [model.measurement(n, self.times[n], seen, fix, fix.position[0])]
        return []

    def _alone(self, n: int, found: Association) -> tuple[CornerDetections, VisionFixes]:
        """Return one detection of frame n, and the fix from it alone."""
        if found.index not in self._solutions:
            seen = CornerDetections.of_frame(self.detections[n], found, student=self.student)
            fixes = solve(seen, self.vision_model.select(slice(n, n + 1)), len(self.times))
            self._solutions[found.index] = seen, fixes
        return self._solutions[found.index]

    def seen(self) -> CornerDetections:
        """Return the corners of all frames."""
        return CornerDetections.concatenate(self.corner_detections)


def vision_model_of(
    approach: Approach, measured: Sequence[Measurement], times: Array, settings: LandingSettings
) -> VisionModel:
    """Return the assumed camera, runway and attitudes at times (N,), with the errors of the settings."""
    world = approach.world
    camera, mount = settings.camera.believed(world.camera, world.mount, settings.seed)
    others = () if world.parallel is None else (world.parallel.corners(),)
    return VisionModel(camera, mount, world.runway.corners(), logged_attitudes(measured, times), settings, others)


def simulate_sensors(
    approach: Approach, truth: TrueTrajectory, settings: LandingSettings
) -> tuple[FusionSettings, list[Measurement]]:
    """Simulate all sensors except the camera, and return them with the settings of the filter."""
    site = IlsSite.of_runway(approach.world.runway.length)
    return fusion_settings_for(settings, site, approach.world.camera), simulate(
        truth, settings.sensors, settings.seed, site
    )


def fusion_settings_for(
    settings: LandingSettings, site: IlsSite, view: Camera, terrain: Terrain = LEVEL
) -> FusionSettings:
    """Return settings of a filter that knows the sensors on board, the camera, the ILS and the ground."""
    sensors, camera = settings.sensors, settings.camera
    known: dict[str, Any] = {
        "radio_scale" if source == "radio" else f"{source}_bias": sensor.bias for source, sensor in sensors.on_board()
    }
    if sensors.irs is not None:
        known["irs_rate"] = sensors.irs.rate
        known["irs_hold"] = max(FusionSettings.irs_hold, 2 / sensors.irs.rate)
    known["vision_bias"] = GaussMarkov((1.0, 1.0, 1.0), settings.persistence_s)
    known["vision_freedom"] = settings.noise_scale_dof
    known["vision_flicker"] = GaussMarkov((1.0, 1.0, 1.0), settings.flicker_s)
    known["mounting"] = GaussMarkov(tuple(np.sqrt(camera.turn_variance(view)).tolist()))
    required = settings.approach_requirement
    return FusionSettings(
        site=site,
        terrain=terrain,
        clock=camera.clock,
        focal=camera.focal,
        lag=max(FusionSettings.lag, 2 * camera.latency),
        integrity_risk=required.risk,
        patience=required.time_to_alert_s / 3,
        priors=FaultPriors().with_single("vision", settings.vision_fault),
        **known,
    )


def draw_initial_state(truth: TrueTrajectory, seed: int) -> InitialState:
    """Draw the initial state of the filter, with an error according to its covariance."""
    error = np.random.default_rng([seed, 77]).standard_normal(6) * _START_SIGMA
    position, velocity = truth.positions[0] + error[:3], truth.velocities[0] + error[3:]
    return InitialState(float(truth.times[0]), position, velocity, np.diag(_START_SIGMA**2))


def given_attitudes(flight: SimulatedFlight) -> Array:
    """Return the yaw, pitch and roll (N, 3) that vision used at the frames of a flight; NaN if not available."""
    _, measured = simulate_sensors(flight.approach, flight.truth, flight.settings)
    return logged_attitudes(measured, flight.frame_times)


def logged_attitudes(measured: Sequence[Measurement], times: Array) -> Array:
    """Return yaw, pitch and roll (N, 3) by the IRS at the frames; NaN if not available."""
    given = [m for m in measured if m.source == "attitude"]
    if not given:
        return np.full((len(times), 3), np.nan)
    apart = np.abs(np.array([m.time for m in given]) - times[:, None])
    nearest = np.stack([given[i].value for i in apart.argmin(1)])
    return np.where((apart.min(1) <= _APART)[:, None], nearest, np.nan)


def rendered_images(
    approach: Approach, truth: TrueTrajectory, times: Array, progress: Progress | None
) -> Iterator[Array]:
    """Yield the camera images at the times."""
    for number, time in enumerate(times):
        moment = np.array([time])
        scene = replace(
            approach.world, position=truth.position(moment)[0], attitude=truth.attitude(moment)[0], frame=number
        )
        yield render_scene(scene)
        if progress:
            progress("looking", number + 1, len(times))
