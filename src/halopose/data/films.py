"""Films: how many frames one has, an annotated one written beside, and predictions frame by frame.

In: a path, or parsed predictions. Out: rate and length, a writer that leaves a whole film or none, frames in
order.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import TracebackType
from typing import Any

import cv2
import numpy as np

from halopose.data.files import check_regular
from halopose.errors import HaloposeError
from halopose.poses import PoseDistributions
from halopose.types import Array

_FRAME = re.compile(r"(.*)_([0-9]{6,9})$")
MOST_FRAMES = 1_000_000  # eleven hours at 25 a second


def film_facts(path: Path) -> tuple[float, int]:
    """Frames a second, and how many frames the container says there are; 25 and 0 where it does not say."""
    if path.exists():
        check_regular(path)  # opening a pipe would wait for ever
    capture = cv2.VideoCapture(str(path))
    try:
        rate, count = capture.get(cv2.CAP_PROP_FPS), capture.get(cv2.CAP_PROP_FRAME_COUNT)
    finally:
        capture.release()
    return (rate if 0 < rate <= 1000 else 25.0, int(count) if 0 < count < 2**31 else 0)


class FilmWriter:
    """An mp4 film; frames of another size than the first are refused. Whole or not there."""

    def __init__(self, path: Path, rate: float) -> None:
        self.path, self._rate = path, rate
        self._partial = path.with_name(f".{path.stem}.partial{path.suffix}")
        self._writer: cv2.VideoWriter | None = None
        self._shape: tuple[int, ...] = ()

    def write(self, frame: Array) -> None:
        """Append a frame (h, w, 3), BGR."""
        if self._writer is None:
            self._shape = frame.shape
            self._partial.parent.mkdir(parents=True, exist_ok=True)
            code = cv2.VideoWriter.fourcc(*"mp4v")
            self._writer = cv2.VideoWriter(str(self._partial), code, self._rate, (frame.shape[1], frame.shape[0]))
            if not self._writer.isOpened():
                raise HaloposeError(f"cannot write the film {self.path}: choose another --output")
        if frame.shape != self._shape:
            raise HaloposeError(f"{self.path.stem} changes its size from {self._shape} to {frame.shape}: split it")
        self._writer.write(frame)

    def __enter__(self) -> FilmWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is None:
            return
        self._writer.release()
        if kind is None:
            self._partial.replace(self.path)
        elif self._partial.is_file():  # a folder there is somebody else's
            self._partial.unlink()


def by_film(
    path: Path | str, content: list[dict[str, Any]], poses: PoseDistributions
) -> dict[str, list[PoseDistributions]]:
    """Frames of every film by its name, from the ``file_name`` of each detection, such as ``clip_000012``.

    Films are in the order in which they appear first.
    """
    if not content:
        raise HaloposeError(f"{path} holds no detection")
    names = [_FRAME.match(str(entry.get("file_name", ""))) for entry in content]
    if not all(names):
        raise HaloposeError(f"{path}: a detection has no file_name of a film's frame, such as clip_000012")
    film = np.array([match[1] for match in names if match])
    frame = np.array([int(match[2]) for match in names if match])
    if frame.max(initial=0) > MOST_FRAMES:
        raise HaloposeError(f"{path}: frame {frame.max()} is beyond what a film has, up to {MOST_FRAMES}")
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
