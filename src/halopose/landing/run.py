"""Run a whole approach from Python: `simulate` one, or `replay` a recording.

Example:
    >>> from pathlib import Path
    >>> from halopose.landing.outputs import LandingOutputs
    >>> from halopose.landing.run import simulate
    >>> from halopose.landing.landing_settings import LandingSettings
    >>> from halopose.landing.shipped_detectors import load_detector
    >>> landing = simulate(load_detector(), LandingSettings(seed=3, weather="dusk"))  # doctest: +SKIP
    >>> LandingOutputs(Path("landing"), animation=False).write(landing)  # doctest: +SKIP
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halopose.landing import flight as flying
from halopose.landing.association import NO_RUNWAY, NOT_WHERE_EXPECTED, OUT_OF_DISTRIBUTION
from halopose.landing.landing_settings import LandingSettings
from halopose.landing.outputs import Landing
from halopose.landing.recordings.record_flight import record
from halopose.landing.recordings.recording import Recording, fly_recording
from halopose.landing.summary import summarise
from halopose.prediction.predictor import Predictor
from halopose.prediction.stream_monitor import StreamMonitor
from halopose.types import Progress


def simulate(
    model: Predictor,
    settings: LandingSettings,
    *,
    record_to: Path | None = None,
    monitor: float | None = None,
    progress: Progress | None = None,
) -> Landing:
    """Simulate an approach with camera images and all sensors on board.

    Args:
        model: runway detector, for example from `load_detector`.
        settings: flight, sensors and estimator settings.
        record_to: folder to record the flight to, for `open_recording`.
        monitor: false-alarm probability of the calibration monitor over the whole flight; None: no monitor.
        progress: called with the name, number and count of finished steps.
    """
    watch = None if monitor is None else StreamMonitor(model, monitor)
    flight = flying.land(model, settings, progress, watch)
    if record_to is not None:
        record(flight, record_to)
    return Landing(flight, {**summarise(flight), **_monitored(watch)})


def replay(
    model: Predictor,
    recording: Recording,
    *,
    roi_refinement: bool = False,
    keep_images: bool = False,
    monitor: float | None = None,
    progress: Progress | None = None,
) -> Landing:
    """Detect the runway in the frames of a recording and fuse it with the logged sensors.

    Args:
        model: runway detector, for example from `load_detector(footage=True)`.
        recording: frames, camera, runway and logs, from `open_recording`.
        roi_refinement: detect again in a full-resolution crop, for frames larger than the model input.
        keep_images: keep camera images for the animation.
        monitor: false-alarm probability of the calibration monitor over the whole flight; None: no monitor.
        progress: called with the name, number and count of finished steps.
    """
    watch = None if monitor is None else StreamMonitor(model, monitor)
    flight = fly_recording(
        model, recording, roi_refinement=roi_refinement, keep_images=keep_images, monitor=watch, progress=progress
    )
    summary = {**summarise(flight), **_monitored(watch)}
    return Landing(flight, summary, recording.site, _advice(summary))


def _monitored(watch: StreamMonitor | None) -> dict[str, str]:
    """Return the entry of the calibration monitor in the summary."""
    return {} if watch is None else {"monitor": str(watch.state)}


def _advice(summary: dict[str, Any]) -> tuple[str, ...]:
    """Return what to do if most detections of a recording were not used."""
    lost = summary["frames_not_used_because"]
    detected = summary["frames"] - lost.get(NO_RUNWAY, 0)
    lines = []
    if 2 * lost.get(OUT_OF_DISTRIBUTION, 0) > summary["frames"]:
        lines.append("most detections are out of distribution for this artifact: use them with --alarm 0 --widen")
    if 2 * lost.get(NOT_WHERE_EXPECTED, 0) > detected:
        lines.append(
            "most detections are not where the runway should be: check the units of the logs (degrees or radians, "
            "metres or feet), --offset, the mount of the camera, and --runway"
        )
    return tuple(lines)
