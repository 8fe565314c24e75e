"""Four cameras around a walking person whose keypoints in space are known."""

from __future__ import annotations

import numpy as np

from halopose.geometry.camera import Camera, look_at
from halopose.multiview.rig import CalibratedView
from halopose.poses import PoseDistributions
from halopose.types import Array
from tests.helpers.approaches import covariances

LENS = Camera(900.0, 900.0, 479.5, 359.5, 960, 720, (-0.05, 0.1, 5e-4, 5e-4, 0.0))
BODY = np.random.default_rng(7).normal([0.0, 0.0, 1.0], [0.25, 0.25, 0.45], (17, 3))


def rig(count: int = 4) -> list[CalibratedView]:
    """Cameras on a circle of 4 m that look at its middle."""
    views = []
    for n in range(count):
        angle = 2 * np.pi * (n + 0.3) / count
        position = np.array([4 * np.cos(angle), 4 * np.sin(angle), 1.8])
        views.append(CalibratedView(f"cam{n}", LENS, look_at(position, [0.0, 0.0, 1.0]), position))
    return views


def walk(frames: int, shift: Array | None = None, speed: float = 1.5) -> Array:
    """Keypoints (T, 17, 3) of a person who walks back and forth."""
    time = np.arange(frames)[:, None, None] / 30
    way = np.array([0.7, 0.4, 0.0]) * np.sin(speed * time)
    swing = 0.15 * np.sin(2 * np.pi * time + np.arange(17)[:, None]) * np.array([1.0, 0.0, 0.3])
    return BODY + way + swing + (0 if shift is None else shift)


def film(
    view: CalibratedView, persons: list[Array], seed: int, low: float = 2.0, high: float = 8.0
) -> list[PoseDistributions]:
    """Detections of persons (T, 17, 3) in one view, with Gaussian errors as stated and in changing order."""
    rng = np.random.default_rng(seed)
    frames = []
    for n in range(len(persons[0])):
        exact = np.stack([view.project(persons[i][n]) for i in rng.permutation(len(persons))])
        spread = covariances(rng, exact.shape[0] * 17, low, high).reshape(-1, 17, 2, 2)
        seen = exact + (np.linalg.cholesky(spread) @ rng.normal(size=(*exact.shape, 1)))[..., 0]
        boxes = np.concatenate([seen.min(1), seen.max(1)], axis=1)
        frames.append(PoseDistributions(boxes, np.full(len(seen), 0.9), seen, spread, spread))
    return frames
