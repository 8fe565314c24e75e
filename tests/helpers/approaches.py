"""Cameras on a three-degree approach, and noisy detections of the runway corners."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from halopose.geometry.camera import Camera, look_at, project_points

CAMERA = Camera(1200.0, 1200.0, 319.5, 191.5, 640, 384)
LENS = Camera(1200.0, 1190.0, 321.0, 190.0, 640, 384, (-0.12, 0.05, 1e-3, -8e-4, -0.01))
RECTANGLE_EDGES = ((0, 3), (1, 2), (0, 1))  # left side, right side and near end


def rectangle(length: float, width: float, *, heights: ArrayLike = 0.0, displaced: float = 0.0) -> np.ndarray:
    """Near-left, near-right, far-right and far-left corner (4, 3), x along the length and y to the left."""
    half = width / 2
    corners = np.array([[-displaced, half, 0.0], [-displaced, -half, 0.0], [length, -half, 0.0], [length, half, 0.0]])
    corners[:, 2] = heights
    return corners


CORNERS = rectangle(2500.0, 45.0)


@dataclass(frozen=True)
class NoisyFrames:
    """One pose, its exact pixels (K, 2), and N noisy frames of them with equal covariances."""

    rotation: np.ndarray
    position: np.ndarray
    exact: np.ndarray
    pixels: np.ndarray
    covariance: np.ndarray

    @property
    def rotations(self) -> np.ndarray:
        return np.broadcast_to(self.rotation, (len(self.pixels), 3, 3))


def covariances(rng: np.random.Generator, count: int, low: float, high: float) -> np.ndarray:
    """Random ellipses (K, 2, 2) with standard deviations between low and high along their axes."""
    angle = rng.uniform(0, np.pi, count)
    turn = np.stack([np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)], -1).reshape(count, 2, 2)
    factor = turn * rng.uniform(low, high, (count, 1, 2))
    return factor @ factor.swapaxes(1, 2)


def sight(
    distance: float,
    frames: int,
    rng: np.random.Generator,
    low: float = 0.3,
    high: float = 1.0,
    camera: Camera = CAMERA,
    points: np.ndarray = CORNERS,
) -> NoisyFrames:
    """Noisy frames from a camera on a three-degree glide path, a little beside the centre line."""
    position = np.array([-distance, 0.006 * distance, distance * np.tan(np.deg2rad(3))])
    rotation = look_at(position, [min(300.0, 0.3 * distance), 0.0, 0.0], 0.02)
    exact = project_points(camera, rotation, position, points)
    each = covariances(rng, len(points), low, high)
    noise = (np.linalg.cholesky(each) @ rng.normal(size=(frames, len(points), 2, 1)))[..., 0]
    return NoisyFrames(rotation, position, exact, exact + noise, np.broadcast_to(each, (frames, len(points), 2, 2)))
