"""The calibration monitor of a predictor: one p-value of an image, or of a frame of a film in every second."""

from __future__ import annotations

import logging

from halopose.calibration.calibration_monitor import CalibrationMonitor, MonitorState
from halopose.errors import HaloposeError
from halopose.poses import PoseDistributions
from halopose.prediction.predictor import Predictor

log = logging.getLogger(__name__)


class StreamMonitor:
    """Watch whether images still look like those of the calibration.

    Frames of a film resemble each other, which the test does not allow: of a film, one frame in a second counts.

    Args:
        model: The predictor; it needs an out-of-distribution model.
        alarm: False-alarm probability over all images together.

    Raises:
        HaloposeError: The predictor has no out-of-distribution model.
    """

    def __init__(self, model: Predictor, alarm: float) -> None:
        size = model.novelty_size
        if size is None:
            raise HaloposeError(
                "this artifact has no out-of-distribution model, which --monitor needs: add one with `halopose novelty`"
            )
        self._monitor = CalibrationMonitor(alarm, calibration_size=size)

    @property
    def state(self) -> MonitorState:
        """The state after the last image."""
        return self._monitor.state

    def update(self, poses: PoseDistributions, name: str, frame: int = 0, rate: float | None = None) -> MonitorState:
        """Take the poses of the next image.

        Args:
            poses: Poses with ``image_novelty``.
            name: Name of the image in the message.
            frame: Number of the frame in a film, from 0.
            rate: Frames per second of the film; None for single images.
        """
        if poses.image_novelty is None or (rate is not None and frame % max(round(rate), 1)):
            return self.state
        before = self.state.alarmed
        state = self._monitor.update(float(poses.image_novelty[0]))
        if state.alarmed and not before:
            log.warning(
                "monitor: from %s on, images are no longer like those of the calibration (evidence %.3g after %d "
                "images): check camera, lens and weather, then recalibrate",
                name, state.evidence, state.count,
            )  # fmt: skip
        return state
