"""Estimate the image motion that a moving camera causes between successive frames."""

from __future__ import annotations

import cv2
import numpy as np

from halopose.tracking.motion import Warp
from halopose.types import Array

_WIDTH = 480  # frames are reduced to this width in pixels
_CORNERS = 300
_FEWEST = 12  # smallest number of matched corners


class CameraMotion:
    """Tracks background corners and fits shift, rotation and zoom to them, with outlier rejection."""

    def __init__(self) -> None:
        self._before: Array | None = None

    def update(self, image: Array, boxes: Array) -> Warp | None:
        """Warp from the previous frame to this image.

        Args:
            image: BGR image (h, w, 3).
            boxes: Boxes (N, 4) of moving objects, whose corners are ignored.

        Returns:
            The warp, or None if there are too few corners.
        """
        scale = min(1.0, _WIDTH / image.shape[1])
        small = cv2.resize(cv2.cvtColor(image, cv2.COLOR_BGR2GRAY), None, fx=scale, fy=scale)
        before, self._before = self._before, small
        if before is None or before.shape != small.shape:
            return None
        free = np.full(small.shape, 255, np.uint8)
        for left, top, right, bottom in np.clip(boxes * scale, 0, 2**15).round().astype(int):
            free[top : bottom + 1, left : right + 1] = 0
        corners = cv2.goodFeaturesToTrack(before, _CORNERS, 0.01, 7, mask=free)
        if corners is None or len(corners) < _FEWEST:
            return None
        moved, found, _ = cv2.calcOpticalFlowPyrLK(before, small, corners, corners.copy())
        good = found.ravel() == 1
        if good.sum() < _FEWEST:
            return None
        source, target = corners.reshape(-1, 2)[good], moved.reshape(-1, 2)[good]
        matrix, inside = cv2.estimateAffinePartial2D(source, target, ransacReprojThreshold=1.0)
        if matrix is None or inside.sum() < _FEWEST:
            return None
        return Warp(np.asarray(matrix[:, :2], dtype=np.float64), np.asarray(matrix[:, 2] / scale, dtype=np.float64))
