"""A recorded approach as one value: frames, camera, runway and logs, opened and checked before detection starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from halopose.errors import HaloposeError
from halopose.landing.flight import Flight
from halopose.landing.frame_buffer import FrameBuffer
from halopose.landing.landing_settings import UNSURVEYED, LandingSettings
from halopose.landing.navigation.sensors import GNSS, Measurement
from halopose.landing.navigation.terrain import OPERATING_AREA_M, Terrain
from halopose.landing.recordings import replay as replaying
from halopose.landing.recordings.cameras import Lens, read_camera
from halopose.landing.recordings.frames import Frames, open_frames
from halopose.landing.recordings.input_checks import check_inputs
from halopose.landing.recordings.logs import Kind, Log, held, measurements, read_log, read_terrain, too_far
from halopose.landing.recordings.runway_sites import Site, corners_seen_from, other_runways, read_runway
from halopose.prediction.predictor import Predictor
from halopose.prediction.stream_monitor import StreamMonitor
from halopose.types import Array, Progress

log = logging.getLogger(__name__)

_NO_TERRAIN = (
    f"no terrain profile: the radio altimeter is used from {OPERATING_AREA_M:g} m before the threshold on; give "
    "--terrain to use it earlier"
)


@dataclass(frozen=True)
class Recording:
    """A recorded approach.

    Attributes:
        frames: images with time stamps; in log time unless `estimate_offset` is set.
        lens: camera with its mount.
        site: the runway.
        others: corners (4, 3) of the other runways nearby, in the axes of the site; a detection that fits one of them
            as well is not used.
        measured: measurements of all logs in runway axes, in order of time.
        settings: settings with the sensors that have a log.
        terrain: ground under the radio altimeter; None without a profile.
        truth: log of true positions, used for error figures only.
        estimate_offset: whether to estimate the offset between frame time and log time.
    """

    frames: Frames
    lens: Lens
    site: Site
    others: tuple[Array, ...]
    measured: tuple[Measurement, ...]
    settings: LandingSettings
    terrain: Terrain | None = None
    truth: Log | None = None
    estimate_offset: bool = False


def open_recording(
    frames: Path | str,
    camera: Path | str,
    runway: Path | str,
    *,
    logs: Mapping[Kind, Path] | None = None,
    others: Sequence[Path | str] = (),
    terrain: Path | str | None = None,
    truth: Path | str | None = None,
    offset: float | Literal["auto"] = 0.0,
    frame_rate: float | None = None,
    settings: LandingSettings | None = None,
) -> Recording:
    """Open the files of a recorded approach and check them against each other.

    Args:
        frames: video, folder of images, or MCAP file.
        camera: camera calibration, a yaml file of OpenCV or ROS.
        runway: json file with four WGS84 corners, or a runway of the table such as ``KSFO/28R``.
        logs: csv logs by kind: attitude, gnss, ils, radio, irs.
        others: other runways nearby, given like ``runway``; those of the same airport in the table are known.
        terrain: csv profile of the ground under the approach; without it the radio altimeter is used from 300 m before
            the threshold on.
        truth: csv log of true positions, used for error figures only.
        offset: seconds to add to frame time to get log time, or "auto" to estimate them.
        frame_rate: frames per second, if the frames have no time stamps.
        settings: estimator settings; sensors, rate and attitude are taken from the recording.

    Raises:
        HaloposeError: A file is not usable, or the files do not fit together.
    """
    logs = dict(logs or {})
    lens, site = read_camera(camera), read_runway(runway)
    nearby = [*other_runways(site), *(read_runway(other) for other in others)]
    automatic = offset == "auto"
    if automatic and "attitude" not in logs:
        raise HaloposeError("offset auto compares with the attitude: give a log of the attitude")
    opened = open_frames(frames, rate=frame_rate, offset=0.0 if offset == "auto" else offset)
    found = replaying.settings_for(logs, opened.times, settings)
    if not site.surveyed:
        found = replace(found, runway_fault=max(found.runway_fault, UNSURVEYED))
    measured = replaying.read_measurements(logs, site, found)
    ground = None if terrain is None else read_terrain(terrain, site)
    judges = None if truth is None else read_log(truth)
    if not automatic:
        replaying.check_clocks(opened.times, measured)
    far = [] if "gnss" not in logs else [too_far(read_log(logs["gnss"]), site)]
    far += [] if "gnss" not in logs else [held(read_log(logs["gnss"]), site)]
    far += [] if judges is None else [too_far(judges, site)]
    blind = _NO_TERRAIN if "radio" in logs and ground is None else ""
    for words in (site.note, replaying.missing(logs), blind, *far):
        if words:
            log.info("%s", words)
    seen_from = tuple(corners_seen_from(site, other) for other in nearby)
    return Recording(opened, lens, site, seen_from, tuple(measured), found, ground, judges, automatic)


def fly_recording(
    model: Predictor,
    recording: Recording,
    *,
    roi_refinement: bool = False,
    keep_images: bool = False,
    monitor: StreamMonitor | None = None,
    progress: Progress | None = None,
) -> Flight:
    """Detect the runway in all frames, then associate, solve, check and fuse; see `halopose.landing.run.replay`."""
    frames, lens, settings = recording.frames, recording.lens, recording.settings
    images = FrameBuffer(len(frames.times)) if keep_images else None
    times, seen = replaying.detections_in(model, frames, lens, settings.conf, progress, images)
    if monitor is not None:
        monitor.watch(seen, settings.rate)
    found = [lens.rectified(poses) for poses in seen]
    if recording.estimate_offset:
        shift = replaying.estimate_offset(times, found, lens, recording.measured)
        log.info("the clock of the frames is %+.2f s off the clock of the logs", shift)
        times = times + shift
    for words in check_inputs(times, found, lens, recording.site, recording.measured):
        log.info("%s", words)
    detector = replaying.roi_detector(model, frames, lens, seen, settings.conf, progress) if roi_refinement else None
    return replaying.replay(
        times,
        found,
        lens,
        recording.site,
        recording.measured,
        settings,
        truth=_true_positions(recording, times),
        images=images or (),
        others=recording.others,
        roi_detector=detector,
        terrain=recording.terrain,
    )


def _true_positions(recording: Recording, times: Array) -> Array | None:
    """Return true positions (N, 3) at times (N,), NaN outside the log; None without a log."""
    if recording.truth is None:
        return None
    sensors = replace(recording.settings.sensors, gnss=GNSS)  # same format as a GNSS log
    places = measurements(recording.truth, "gnss", recording.site, sensors)
    stamps, values = np.array([m.time for m in places]), np.array([m.value for m in places])
    return np.stack([np.interp(times, stamps, axis, np.nan, np.nan) for axis in values.T], axis=1)
