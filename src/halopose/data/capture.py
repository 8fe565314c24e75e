"""Frames of films, cameras and streams, read with OpenCV."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from halopose.data.image_header import check_pixels
from halopose.errors import HaloposeError
from halopose.types import Array

log = logging.getLogger(__name__)

COMPLETE_FILM = 0.95  # share of the stated frames; containers state their number roughly
MAX_RATE = 1000  # frames per second
MAX_FRAMES = 1_000_000  # eleven hours at 25 frames per second


@dataclass(frozen=True, eq=False)
class Frame:
    """A frame of a film, a camera or a stream.

    Attributes:
        number: Number in the source, counted from 0.
        pixels: BGR uint8 array (h, w, 3).
        rate: Frames per second of the sequence that it is taken from; None if unknown.
        length: Number of frames in that sequence; 0 if unknown.
    """

    number: int
    pixels: Array
    rate: float | None
    length: int


def frames_of(source: str | int, stride: int = 1) -> Iterator[Frame]:
    """Iterate over the frames of a film, a camera or a stream.

    Args:
        source: Path of a film, number of a camera, or address of a stream.
        stride: Use every n-th frame.

    Yields:
        The frames; ``rate`` and ``length`` do not count those that the stride leaves out.

    Raises:
        HaloposeError: It cannot be opened, or has no readable frame.
    """
    what = f"camera {source}" if isinstance(source, int) else f"video {source}"
    with quiet_opencv():
        capture = _opened(source, what)
        check_pixels(capture.get(cv2.CAP_PROP_FRAME_WIDTH), capture.get(cv2.CAP_PROP_FRAME_HEIGHT), what)
        rate, expected = capture.get(cv2.CAP_PROP_FPS), capture.get(cv2.CAP_PROP_FRAME_COUNT)
    known_rate = rate / stride if 0 < rate <= MAX_RATE else None
    length = -(-int(expected) // stride) if 0 < expected <= MAX_FRAMES else 0
    try:
        number = 0
        while capture.grab():
            if number % stride == 0:
                read, frame = capture.retrieve()
                if not read:
                    break
                yield Frame(number, np.asarray(frame), known_rate, length)
            number += 1
    finally:
        capture.release()
    if not number:
        raise HaloposeError(f"{what} has no readable frame")
    is_file = isinstance(source, str) and "://" not in source
    if is_file and number < COMPLETE_FILM * expected < 2**31:
        log.warning("%s ends after %d of %d frames: it may be damaged", what, number, expected)


@contextmanager
def quiet_opencv() -> Iterator[None]:
    """Suppress terminal messages of OpenCV and FFmpeg; this package reports failures itself."""
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")  # FFmpeg reads it when a capture is opened
    logging_of = cv2.utils.logging
    level = logging_of.getLogLevel()
    logging_of.setLogLevel(logging_of.LOG_LEVEL_SILENT)
    try:
        yield
    finally:
        logging_of.setLogLevel(level)


def _opened(source: str | int, what: str) -> cv2.VideoCapture:
    """Open a source. A missing camera is found before OpenCV tries all of its drivers."""
    if isinstance(source, int) and sys.platform.startswith("linux") and not Path(f"/dev/video{source}").exists():
        found = sorted(int(path.name[5:]) for path in Path("/dev").glob("video*") if path.name[5:].isdigit())
        raise HaloposeError(f"there is no camera {source}: found {', '.join(map(str, found)) or 'none'}")
    capture = cv2.VideoCapture(source)
    if not capture.isOpened():
        raise HaloposeError(f"cannot open {what}: check the path or address")
    return capture
