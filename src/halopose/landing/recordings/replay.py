"""Fuse detections of a recorded approach with its logs, in the same filter as a simulated approach."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from halopose.errors import HaloposeError
from halopose.geometry.camera import camera_pose, normalise, rotation_from_angles, to_camera
from halopose.geometry.observations import Observations
from halopose.geometry.pnp import solve_pose
from halopose.landing.association import detect_runways
from halopose.landing.flight import Flight, Scenario, fuse_vision, fusion_settings_for
from halopose.landing.frame_buffer import FrameBuffer
from halopose.landing.landing_settings import TRUTH_RATE, LandingSettings
from halopose.landing.navigation.motion_model import InitialState
from halopose.landing.navigation.sensors import IlsSite, Measurement, in_order
from halopose.landing.navigation.terrain import OPERATING_AREA_M, Terrain
from halopose.landing.recordings.cameras import Lens
from halopose.landing.recordings.frames import Frames
from halopose.landing.recordings.logs import KINDS, Kind, attitudes_at, measurements, read_log
from halopose.landing.recordings.runway_sites import Site
from halopose.landing.roi_refinement import RoiDetector, RoiRefiner
from halopose.landing.vision_fix import VisionModel
from halopose.poses import PoseDistributions
from halopose.prediction.predictor import Predictor
from halopose.types import Array, Mask, Progress

_START_SIGMA = np.array([30.0, 30.0, 20.0, 15.0, 8.0, 5.0])  # m and m/s, about the estimated start
# source of a log, if different from its kind
_SOURCES: dict[Kind, tuple[str, ...]] = {"ils": ("localizer", "glide_slope")}
_OFFSETS = np.arange(-2.0, 2.0 + 1e-9, 0.02)  # seconds, range of the search
_SPAN, _NEAR, _CLEARLY = (
    1.5,
    0.5,
    2.5,
)  # seconds per line, seconds around the best, and required ratio of roughness


def settings_for(
    logs: Mapping[Kind, Path], times: Array, settings: LandingSettings | None = None, **choices: Any
) -> LandingSettings:
    """Settings with the sensors that have a log; without attitudes the whole pose is solved for.

    Args:
        logs: csv logs by kind.
        times: times of the frames (N,) in seconds.
        settings: settings to start from.
        choices: fields of `LandingSettings` to change.
    """
    settings = replace(settings or LandingSettings(), **choices)
    sensors = settings.sensors
    for kind in KINDS:
        if kind not in logs:
            sensors = replace(sensors, **dict.fromkeys(_SOURCES.get(kind, (kind,))))
    step = float(np.median(np.diff(times))) if len(times) > 1 else 1.0
    rate = min(1 / step if step > 0 else 1.0, TRUTH_RATE)
    return replace(settings, rate=rate, attitude="irs" if "attitude" in logs else "vision", sensors=sensors)


def missing(logs: Mapping[Kind, Path]) -> str:
    """Return one line about missing logs and their consequences; empty if there are all."""
    without = [kind for kind in KINDS if kind not in logs]
    if not without:
        return ""
    words = f"no log of {', '.join(without)}"
    if "attitude" in without:
        words += ": the whole pose is solved for"
    return words + ("; vision alone" if not set(logs) - {"attitude"} else "")


def read_measurements(logs: Mapping[Kind, Path], site: Site, settings: LandingSettings) -> list[Measurement]:
    """Return the measurements of all logs in order of time."""
    found: list[Measurement] = []
    for kind, path in sorted(logs.items(), key=lambda item: item[0] != "gnss"):  # attitudes need positions
        positions = [each for each in found if each.source == "gnss"]
        found += measurements(read_log(path), kind, site, settings.sensors, positions)
    return in_order(found)


def detections_in(
    model: Predictor,
    frames: Frames,
    lens: Lens,
    conf: float,
    progress: Progress | None = None,
    buffer: FrameBuffer | None = None,
) -> tuple[Array, list[PoseDistributions]]:
    """Detect runways in all frames; return the times (N,) of the frames and the detections.

    Args:
        model: runway detector.
        frames: frames of the recording.
        lens: camera with its mount.
        conf: lowest score of a detection.
        progress: called with the name, number and count of finished steps.
        buffer: receives the rectified images for the animation.
    """
    times: list[float] = []

    def shown() -> Iterator[Array]:
        for number, (time, image) in enumerate(frames.images()):
            _check_size(frames.path, image, lens)
            times.append(time)
            if buffer is not None:
                buffer.add(lens.rectified_image(image) if buffer.wants_next() else image)
            yield image
            if progress:
                progress("looking", number + 1, len(frames.times))

    found = detect_runways(model, shown(), conf=conf)
    return np.array(times), found


def roi_detector(
    model: Predictor,
    frames: Frames,
    lens: Lens,
    first: Sequence[PoseDistributions],
    conf: float,
    progress: Progress | None = None,
) -> RoiDetector:
    """Return a detector that refines frames at full resolution when the filter reaches them.

    Args:
        model: runway detector.
        frames: frames of the recording.
        lens: camera with its mount.
        first: detections in each whole frame.
        conf: lowest score of a detection.
        progress: called with the name, number and count of finished steps.
    """

    def shown() -> Iterator[Array]:
        for number, (_, image) in enumerate(frames.images()):
            yield image
            if progress:
                progress("refining", number + 1, len(first))

    return RoiDetector(RoiRefiner(model, conf), first, shown(), lens.rectified, lens.bent)


def _check_size(path: Path, image: Array, lens: Lens) -> None:
    size, wanted = (image.shape[1], image.shape[0]), (lens.camera.width, lens.camera.height)
    if size != wanted:
        raise HaloposeError(
            f"{path}: frames of {size[0]} by {size[1]}, a calibration of {wanted[0]} by {wanted[1]}: calibrate at "
            "the size of the frames, or resize them"
        )


def replay(
    times: Array,
    detections: Sequence[PoseDistributions],
    lens: Lens,
    site: Site,
    measured: Sequence[Measurement],
    settings: LandingSettings,
    *,
    start: InitialState | None = None,
    truth: Array | None = None,
    images: Sequence[Array] = (),
    others: tuple[Array, ...] = (),
    roi_detector: RoiDetector | None = None,
    terrain: Terrain | None = None,
) -> Flight:
    """Associate, solve, check and fuse rectified detections.

    Args:
        times: times of the frames (N,).
        detections: rectified detections of the frames (N).
        lens: camera with its mount.
        site: the runway.
        measured: measurements of all logs.
        settings: estimator settings.
        start: initial state; default: estimated from the logs.
        truth: true positions (N, 3) for error figures.
        images: images for the animation.
        others: corners (4, 3) of the other runways nearby.
        roi_detector: detects again where the filter expects the runway.
        terrain: ground under the radio altimeter; default: known from 300 m before the threshold on.
    """
    if not len(times):
        raise HaloposeError("the recording has no frames")
    attitudes = attitudes_at(measured, times)
    _check_times(times, measured, attitudes, settings)
    vision_model = VisionModel(lens.camera, lens.mount, site.corners, attitudes, settings, others)
    start = start or start_from(measured, times, detections, vision_model)
    _check_view(vision_model, measured, times)
    ground = terrain or ground_near(site)
    fusion = fusion_settings_for(settings, IlsSite.of_runway(site.far_end), lens.camera, ground)
    known = np.full((len(times), 3), np.nan) if truth is None else truth
    stamps = np.maximum(times, start.time)
    scenario = Scenario(
        site.designator, site.length, site.width, site.corners, lens.camera, lens.mount, "as recorded"
    )  # fmt: skip
    return Flight(
        scenario=scenario,
        frame_times=times,
        attitude=attitudes,
        images=images,
        settings=settings,
        **fuse_vision(vision_model, stamps, times, detections, measured, fusion, start, known, roi_detector),
    )


def ground_near(site: Site) -> Terrain:
    """Return the ground of a runway without a terrain profile: its surface, and level ground before the threshold."""
    return Terrain.level(OPERATING_AREA_M, site.far_end, float(site.corners[2:, 2].mean()))


def start_from(
    measured: Sequence[Measurement],
    times: Array,
    detections: Sequence[PoseDistributions],
    vision_model: VisionModel,
) -> InitialState:
    """Estimate the initial state: a line through the first GNSS fixes, else the first vision fix."""
    first = float(min([times[0], *(each.time for each in measured[:1])]))
    fixes = [each for each in measured if each.source == "gnss"][:20]
    spread = np.diag(_START_SIGMA**2)
    if len(fixes) > 1 and fixes[-1].time > fixes[0].time:
        position, velocity = _line(np.array([f.time for f in fixes]), np.array([f.value for f in fixes]), first)
        return InitialState(first, position, velocity, spread, source="gnss")
    for time, poses in zip(times.tolist(), detections, strict=True):
        if not len(poses):
            continue
        best = slice(int(np.argmax(poses.scores)), int(np.argmax(poses.scores)) + 1)
        found = solve_pose(
            Observations(vision_model.camera, vision_model.corners, poses.mean[best], poses.covariance[best])
        )
        if found.converged[0]:
            wide = spread.copy()
            wide[:3, :3] += 9 * found.covariance[0, :3, :3]
            down = found.position[0] / np.linalg.norm(found.position[0])
            velocity = -70.0 * down  # m/s towards the threshold, uncertain by _START_SIGMA
            start = found.position[0] + velocity * (first - time)
            return InitialState(first, start, velocity, wide, source="vision")
    raise HaloposeError(
        "no GNSS and no runway in any frame, so there is no initial position: give --gnss, or lower --conf"
    )


def _line(times: Array, values: Array, at: float) -> tuple[Array, Array]:
    """Fit position (3,) and velocity (3,) at a time to values (N, 3), by medians: robust against a quarter of
    outliers.
    """
    one, other = np.triu_indices(len(times), 1)
    apart = times[other] - times[one]
    slopes = (values[other] - values[one])[apart > 0] / apart[apart > 0][:, None]
    velocity = np.median(slopes, axis=0)
    return np.median(values - velocity * (times - at)[:, None], axis=0), velocity


def _check_times(times: Array, measured: Sequence[Measurement], attitudes: Array, settings: LandingSettings) -> None:
    if (np.diff(times) < 0).any():
        raise HaloposeError("time stamps of the frames are out of order: sort the frames")
    check_clocks(times, measured)
    if settings.attitude == "irs" and not np.isfinite(attitudes).any():
        raise HaloposeError("no attitude at any frame: give --offset, or leave out --attitude to solve for the pose")


def check_clocks(times: Array, measured: Sequence[Measurement]) -> None:
    """Raise an error for each log that does not overlap the frames in time."""
    spans = {}
    for kind in KINDS:
        stamps = [each.time for each in measured if each.source in _SOURCES.get(kind, (kind,))]
        if stamps:
            spans[kind] = min(stamps), max(stamps)
    apart = [kind for kind, (first, last) in spans.items() if first > times[-1] or last < times[0]]
    if not apart:
        return
    film = f"frames from {times[0]:.1f} to {times[-1]:.1f} s"
    first, last = spans[apart[0]]
    if len(apart) == len(spans):
        first, last = min(span[0] for span in spans.values()), max(span[1] for span in spans.values())
        raise HaloposeError(
            f"{film}, logs from {first:.1f} to {last:.1f} s: give --offset, seconds to add to the frames' times"
        )
    raise HaloposeError(
        f"{film}, the log of {apart[0]} from {first:.1f} to {last:.1f} s: put it on the clock of the others, or "
        f"leave out --{apart[0]}"
    )


def _check_view(vision_model: VisionModel, measured: Sequence[Measurement], times: Array) -> None:
    """Raise an error if the runway is behind the camera wherever GNSS and attitude are known."""
    fixes = [each for each in measured if each.source == "gnss"]
    if not fixes or not vision_model.has_attitude.any():
        return
    stamps, places = np.array([each.time for each in fixes]), np.array([each.value for each in fixes])
    position = np.stack([np.interp(times, stamps, axis) for axis in places.T], axis=1)[vision_model.has_attitude]
    rotation, seen_from = camera_pose(
        rotation_from_angles(*vision_model.attitudes[vision_model.has_attitude].T), position, vision_model.mount
    )
    if (to_camera(rotation, seen_from, vision_model.corners)[..., 2] <= 0).all():
        raise HaloposeError(
            "the runway is behind the camera in every frame: check heading, mounting and which end is landed on"
        )


def estimate_offset(
    times: Array, detections: Sequence[PoseDistributions], lens: Lens, measured: Sequence[Measurement]
) -> float:
    """Estimate the seconds to add to frame time to get log time.

    Each offset up to 2 s is tried: the direction of the best detection is rotated back by the attitude at that offset.
    A wrong offset leaves the rotations of the aircraft in the directions. The offset with the smoothest directions
    wins.

    Raises:
        HaloposeError: No offset is clearly smoother than the others.
    """
    seen = [n for n, poses in enumerate(detections) if len(poses)]
    if len(seen) < 10:
        raise HaloposeError(f"estimating the offset takes ten frames with the runway, got {len(seen)}: give --offset")
    middle = np.array([detections[n].mean[int(np.argmax(detections[n].scores))].mean(0) for n in seen])
    rays = np.concatenate([normalise(lens.camera, middle), np.ones((len(seen), 1))], axis=1)
    turns = [each for each in measured if each.source == "attitude"]
    rough = np.array([_roughness(times[seen], rays, attitudes_at(turns, times[seen] + o), lens) for o in _OFFSETS])
    if not np.isfinite(rough).any():
        raise HaloposeError("too few frames with both runway and attitude within 2 s: give --offset")
    best = int(np.argmin(rough))
    others = rough[np.abs(_OFFSETS - _OFFSETS[best]) > _NEAR]
    if best in (0, len(_OFFSETS) - 1) or not others.min() > _CLEARLY * rough[best]:
        raise HaloposeError(
            "no offset within 2 s fits the turns of the aircraft clearly better than the others: give --offset"
        )
    return float(np.round(_OFFSETS[best], 2))


def _roughness(times: Array, rays: Array, angles: Array, lens: Lens) -> float:
    """Return the deviation of directions (N, 3), rotated back by angles (N, 3), from straight lines over seconds.

    It is the mean of the lower nine tenths of the squares. Over shorter times corner noise would hide the rotations.
    """
    body = lens.mount.rotation @ rotation_from_angles(*np.nan_to_num(angles).T)
    level = (np.swapaxes(body, 1, 2) @ rays[..., None])[..., 0]
    slopes = level[:, 1:] / level[:, :1]
    known: Mask = np.asarray(np.isfinite(angles).all(axis=-1), dtype=bool)
    step = max(round(_SPAN / max(float(np.median(np.diff(times))), 1e-3)), 1)
    before, at, after = slice(None, -2 * step), slice(step, -step), slice(2 * step, None)
    apart = times[after] - times[before]
    usual = float(np.median(apart)) if apart.size else _SPAN
    used = known[before] & known[at] & known[after] & (apart > 0) & (apart < 2 * usual)
    if used.sum() < 8:
        return float("inf")
    share = ((times[at] - times[before]) / np.where(apart > 0, apart, 1.0))[:, None]
    off = slopes[at] - (1 - share) * slopes[before] - share * slopes[after]
    squares = np.sort(np.square(off[used]).sum(1))
    return float(squares[: int(0.9 * len(squares))].mean())
