"""Buffer of camera images for the animation: evenly spaced and compressed, so that long recordings fit into memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import overload

import cv2
import numpy as np

from halopose.types import Array

MOST = 200  # images of an animation
_QUALITY = 95  # JPEG quality


class FrameBuffer(Sequence[Array]):
    """Images of at most ``most`` frames, evenly spaced. As a sequence it has all frames; images that were not kept are
    empty.

    Example:
        >>> import numpy as np
        >>> frames = FrameBuffer(expected=5, most=3)
        >>> for _ in range(5):
        ...     frames.add(np.zeros((4, 6, 3), np.uint8))
        >>> len(frames), frames.kept, frames[2].shape, frames[3].shape
        (5, [0, 2, 4], (4, 6, 3), (0, 0, 3))
    """

    def __init__(self, expected: int, most: int = MOST) -> None:
        self._step = max(math.ceil(expected / most), 1)
        self._most = most
        self._coded: dict[int, Array] = {}
        self._count = 0

    def wants_next(self) -> bool:
        """Return whether the next image will be kept."""
        return self._count % self._step == 0

    def add(self, image: Array) -> None:
        """Add the image (h, w, 3) of the next frame, uint8 BGR."""
        if self.wants_next() and len(self._coded) == self._most:  # more frames than expected: keep every other one
            self._step *= 2
            self._coded = {n: coded for n, coded in self._coded.items() if n % self._step == 0}
        if self.wants_next():
            self._coded[self._count] = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])[1]
        self._count += 1

    @property
    def kept(self) -> list[int]:
        """Indices of the frames with an image."""
        return list(self._coded)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Array: ...

    @overload
    def __getitem__(self, index: slice) -> list[Array]: ...

    def __getitem__(self, index: int | slice) -> Array | list[Array]:
        if isinstance(index, slice):
            return [self[n] for n in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        coded = self._coded.get(index % len(self))
        return np.zeros((0, 0, 3), np.uint8) if coded is None else np.asarray(cv2.imdecode(coded, cv2.IMREAD_COLOR))
