"""Films: frame rate and length, writing of annotated films, and predictions frame by frame."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import cv2
import numpy as np

from halopose.data.capture import MAX_FRAMES, MAX_RATE, quiet_opencv
from halopose.data.files import check_regular
from halopose.errors import HaloposeError
from halopose.poses import PoseDistributions
from halopose.types import Array

FRAMES_TO_MEASURE = 10  # of a camera, before its annotated film is opened
_FRAME = re.compile(r"(.*)_([0-9]{6,9})$")


def film_facts(path: Path) -> tuple[float, int]:
    """Read the header of a film.

    Returns:
        Frames per second, 25 if unknown, and number of frames, 0 if unknown or more than `MAX_FRAMES`.
    """
    if path.exists():
        check_regular(path)  # opening a named pipe would wait for ever
    with quiet_opencv():
        capture = cv2.VideoCapture(str(path))
    try:
        rate, count = capture.get(cv2.CAP_PROP_FPS), capture.get(cv2.CAP_PROP_FRAME_COUNT)
    finally:
        capture.release()
    return (rate if 0 < rate <= MAX_RATE else 25.0, int(count) if 0 < count <= MAX_FRAMES else 0)


class FilmWriter:
    """Writes an mp4 film completely or not at all. All frames must have the size of the first.

    Args:
        path: The film.
        rate: Frames per second.

    Raises:
        HaloposeError: On leaving the context, if the film on the disk lacks frames, as on a full disk.
    """

    def __init__(self, path: Path, rate: float) -> None:
        self.path, self._rate, self._count = path, rate, 0
        self._partial = path.with_name(f".{path.stem}.partial{path.suffix}")
        self._writer: cv2.VideoWriter | None = None
        self._shape: tuple[int, ...] = ()

    def write(self, frame: Array) -> None:
        """Append a BGR frame (h, w, 3)."""
        if self._writer is None:
            self._open(frame)
        if frame.shape != self._shape or self._writer is None:
            raise HaloposeError(f"{self.path.stem} changes its size from {self._shape} to {frame.shape}: split it")
        self._writer.write(frame)
        self._count += 1

    def _open(self, frame: Array) -> None:
        self._shape = frame.shape
        try:
            self._partial.parent.mkdir(parents=True, exist_ok=True)
            if self._partial.is_symlink() or self._partial.is_file():  # OpenCV would follow a link
                self._partial.unlink()
        except OSError as error:
            raise HaloposeError(f"cannot write the film {self.path}: {error.strerror or error}") from None
        code = cv2.VideoWriter.fourcc(*"mp4v")
        self._writer = cv2.VideoWriter(str(self._partial), code, self._rate, (frame.shape[1], frame.shape[0]))
        if not self._writer.isOpened():
            raise HaloposeError(f"cannot write the film {self.path}: choose another --output")

    def __enter__(self) -> FilmWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is None:
            return
        self._writer.release()
        if kind is None and self._is_complete():
            self._partial.replace(self.path)
            return
        if self._partial.is_file():  # a folder there belongs to somebody else
            self._partial.unlink()
        if kind is None:
            raise HaloposeError(f"cannot write the film {self.path}: the disk may be full, free some space")

    def _is_complete(self) -> bool:
        """Return whether the film can be read to its end. OpenCV does not report errors of writing."""
        capture = cv2.VideoCapture(str(self._partial))
        try:
            count = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
            if count < self._count:
                return False
            capture.set(cv2.CAP_PROP_POS_FRAMES, count - 1)
            return bool(capture.read()[0])
        finally:
            capture.release()


class AnnotatedFilm:
    """Annotated film, opened with its first frames.

    Args:
        path: The film; None writes nothing.
        measured: Measure the frame rate, as that of a camera, whose stated rate may be faster than the model.
    """

    def __init__(self, path: Path | None, measured: bool) -> None:
        self._path, self._measured = path, measured
        self._writer: FilmWriter | None = None
        self._first: list[tuple[float, Array]] = []
        self._rate: float | None = None

    def write(self, picture: Array, rate: float | None) -> None:
        """Append a frame of a film of a stated frame rate."""
        if self._path is None:
            return
        if self._writer is not None:
            self._writer.write(picture)
            return
        self._rate = rate
        self._first.append((time.monotonic(), picture))
        if not self._measured or len(self._first) >= FRAMES_TO_MEASURE:
            self._open(self._path)

    def _open(self, path: Path) -> None:
        rate = self._rate or 25.0
        if self._measured and len(self._first) > 1:
            pace = (self._first[-1][0] - self._first[0][0]) / (len(self._first) - 1)
            rate = min(rate, max(1.0, 1 / pace)) if pace > 0 else rate
        self._writer = FilmWriter(path, rate)
        for _, picture in self._first:
            self._writer.write(picture)
        self._first = []

    def __enter__(self) -> AnnotatedFilm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._first and self._path is not None:
            self._open(self._path)
        if self._writer is not None:
            self._writer.__exit__(kind, value, trace)


def frame_rate(path: Path | str, content: list[dict[str, Any]]) -> float | None:
    """Return the frames per second that the detections of a film state; None if they state nothing."""
    rate = next((entry["frame_rate"] for entry in content if "frame_rate" in entry), None)
    if rate is None:
        return None
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate <= 10000:
        raise HaloposeError(f"{path}: frame_rate should be a number of frames per second up to 10000, got {rate!r}")
    return float(rate)


def by_film(
    path: Path | str, content: list[dict[str, Any]], poses: PoseDistributions
) -> dict[str, list[PoseDistributions]]:
    """Group detections by film and frame.

    Args:
        path: Name of the predictions in messages.
        content: Detections with a ``file_name`` such as ``clip_000012``.
        poses: The same detections.

    Returns:
        The frames of each film by its name, in the order of first appearance.
    """
    if not content:
        raise HaloposeError(f"{path} holds no detection")
    names = [_FRAME.match(str(entry.get("file_name", ""))) for entry in content]
    if not all(names):
        raise HaloposeError(f"{path}: a detection has no file_name of a film's frame, such as clip_000012")
    film = np.array([match[1] for match in names if match])
    frame = np.array([int(match[2]) for match in names if match])
    if frame.max(initial=0) > MAX_FRAMES:
        raise HaloposeError(f"{path}: frame {frame.max()} is larger than {MAX_FRAMES}, the most frames of a film")
    result = {}
    for name in dict.fromkeys(film.tolist()):
        rows = np.flatnonzero(film == name)
        rows = rows[np.argsort(frame[rows], kind="stable")]
        numbers, starts = np.unique(frame[rows], return_index=True)
        frames = [poses[rows[:0]]] * (int(numbers[-1]) + 1)
        for number, part in zip(numbers.tolist(), np.split(rows, starts[1:]), strict=True):
            frames[number] = poses[part]
        result[name] = frames
    return result
