"""Films: how many frames one has, and an annotated one written beside.

In: a path. Out: its rate and length, or a writer that leaves a whole film or none.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import cv2

from halopose.errors import HaloposeError
from halopose.types import Array


def film_facts(path: Path) -> tuple[float, int]:
    """Frames a second, and how many frames the container says there are; 25 and 0 where it does not say."""
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
        else:
            self._partial.unlink(missing_ok=True)


__all__ = ["FilmWriter", "film_facts"]
