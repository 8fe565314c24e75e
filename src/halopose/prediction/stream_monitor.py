"""Calibration monitor of a predictor, fed with one p-value per image, or per second of a film."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from halopose.calibration.calibration_monitor import CalibrationMonitor, MonitorState
from halopose.errors import HaloposeError
from halopose.poses import PoseDistributions
from halopose.prediction.predictor import Predictor

DEFAULT_RATE = 25.0  # frames per second of a film without a stated rate

log = logging.getLogger(__name__)


class StreamMonitor:
    """Detect when images no longer resemble the calibration images.

    The test assumes independent images, so only one frame per second of a film is used.

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
        self._film: str | None = None
        self._since = 0  # frames of the film so far
        self._monitor = CalibrationMonitor(alarm, calibration_size=size)

    @property
    def state(self) -> MonitorState:
        """The state after the last image."""
        return self._monitor.state

    def update(self, poses: PoseDistributions, name: str, film: str | None = None, rate: float | None = None) -> bool:
        """Process the poses of the next image.

        Args:
            poses: Poses with ``image_novelty``.
            name: Name of the image in the message.
            film: Name of the film, if the image is a frame of one.
            rate: Frames per second of the film, if known.

        Returns:
            Whether this image raised the alarm.
        """
        if poses.image_novelty is None or self._too_close(film, rate):
            return False
        before = self.state.alarmed
        state = self._monitor.update(float(poses.image_novelty[0]))
        if before or not state.alarmed:
            return False
        log.warning(
            "monitor: from %s on, images are no longer like those of the calibration (evidence %.3g after %d images): "
            "check camera, lens and weather, then recalibrate",
            name, state.evidence, state.count,
        )  # fmt: skip
        return True

    def watch(self, frames: Sequence[PoseDistributions], rate: float) -> MonitorState:
        """Process all frames of a film and return the state.

        Args:
            frames: Poses of each frame.
            rate: Frames per second.
        """
        for number, poses in enumerate(frames):
            self.update(poses, f"frame {number} ({number / rate:.1f} s)", "", rate)
        return self.state

    def _too_close(self, film: str | None, rate: float | None) -> bool:
        """Whether less than a second has passed since the last used frame of the film."""
        if film is None:
            return False
        if film != self._film:
            self._film, self._since = film, 0
        place = self._since
        self._since += 1
        return place % max(round(rate or DEFAULT_RATE), 1) != 0
