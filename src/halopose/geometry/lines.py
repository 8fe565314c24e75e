"""Straight edges as measurements: a runway's sides and threshold, beside its corners or instead of some of them.

In: where a line was seen in the image, at two stations on it, how surely across it, and its two ends in runway
axes. Out: distances of the stations from where the line should be, with Jacobians by the pose.

A line says nothing along itself, and says nothing wrong there either: where a corner lies on its edge is often
what is least known. The line of two points P and Q is seen in the plane of both and the camera at c, whose normal
is m = (P - c) x (Q - c); with the camera's matrix K and its rotation R it is K^-T R m in the undistorted image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halopose.errors import HaloposeError
from halopose.geometry.camera import Camera, intrinsics_jacobian, normalise, skew, undistort
from halopose.types import Array


@dataclass(frozen=True)
class Lines:
    """L lines in N frames: two stations (N, L, 2, 2) on each, in pixels, and its ends (L, 2, 3) in runway axes.

    ``covariance`` (N, 2 L, 2 L) is that of how far the stations lie off the true line, across it, in pixel^2, in
    the order of lines and then stations. Stations are compared with the line that runs through both ends, so they
    need not lie between them, and the ends need not be seen.
    """

    stations: Array
    covariance: Array
    ends: Array

    def __post_init__(self) -> None:
        frames, count = self.stations.shape[:2]
        shapes = self.stations.shape, self.covariance.shape, self.ends.shape
        if shapes != ((frames, count, 2, 2), (frames, 2 * count, 2 * count), (count, 2, 3)):
            raise HaloposeError(
                "lines take stations (N, L, 2, 2), a covariance (N, 2 L, 2 L) and ends (L, 2, 3), got "
                + ", ".join(map(str, shapes))
            )

    def __len__(self) -> int:
        return len(self.stations)

    def select(self, index: NDArray[np.intp]) -> Lines:
        """Some of the frames."""
        return Lines(self.stations[index], self.covariance[index], self.ends)


def lines_of_corners(pixels: Array, covariance: Array, corners: Array, edges: Sequence[tuple[int, int]]) -> Lines:
    """Lines through pairs of corners (N, K, 2), whose covariance is (N, K, 2, 2), or joint (N, 2 K, 2 K).

    They hold no more than the corners do: use them instead of corners whose places along the edge are not to be
    relied on, never beside the same corners.

    >>> plate = np.array([[0, 1, 0], [0, -1, 0], [5, -1, 0], [5, 1, 0.0]])
    >>> seen = np.array([[[300.0, 250.0], [340.0, 250.0], [325.0, 200.0], [315.0, 200.0]]])
    >>> lines = lines_of_corners(seen, 4.0 * np.ones((1, 4, 1, 1)) * np.eye(2), plate, [(0, 3), (1, 2), (0, 1)])
    >>> lines.stations.shape, lines.covariance[0, 4, 4].round(3).item()
    ((1, 3, 2, 2), 4.0)
    """
    frames, count = pixels.shape[:2]
    joint = covariance
    if covariance.ndim == 4:
        blocks = np.zeros((frames, count, 2, count, 2))
        blocks[:, np.arange(count), :, np.arange(count), :] = np.moveaxis(covariance, 1, 0)
        joint = blocks.reshape(frames, 2 * count, 2 * count)
    stations = pixels[:, np.asarray(edges)]
    along = stations[:, :, 1] - stations[:, :, 0]
    normal = np.stack([-along[..., 1], along[..., 0]], axis=-1) / np.linalg.norm(along, axis=-1, keepdims=True)
    picked = np.zeros((frames, len(edges), 2, count, 2))
    for line, ends in enumerate(edges):
        for station, corner in enumerate(ends):
            picked[:, line, station, corner] = normal[:, line]
    across = picked.reshape(frames, 2 * len(edges), 2 * count)
    return Lines(stations, across @ joint @ np.swapaxes(across, 1, 2), corners[np.asarray(edges)])


def line_residuals(camera: Camera, rotation: Array, position: Array, lines: Lines) -> tuple[Array, Array]:
    """Distances (N, 2 L) of stations from where the lines are expected, in pixels, and their Jacobian.

    The Jacobian (N, 2 L, 6) is that of where the lines are expected, as ``pose_jacobian`` is of points.
    """
    stations = np.concatenate([undistort(camera, lines.stations), np.ones((*lines.stations.shape[:-1], 1))], -1)
    offset = lines.ends - position[:, None, None]
    normal = np.cross(offset[:, :, 0], offset[:, :, 1])  # (N, L, 3) of the planes through lines and camera
    turned = np.linalg.inv(camera.matrix).T @ rotation  # (N, 3, 3)
    line = (turned[:, None] @ normal[..., None])[..., 0]
    by_pose = turned[:, None] @ np.concatenate(
        [np.broadcast_to(skew(lines.ends[:, 1] - lines.ends[:, 0]), (*normal.shape, 3)), skew(normal)], axis=-1
    )
    length = np.linalg.norm(line[..., :2], axis=-1)
    across = line[..., :2] / length[..., None]
    residual = (stations @ line[..., None])[..., 0] / length[..., None]  # (N, L, 2)
    moved = stations @ by_pose - residual[..., None] * (across[..., None, :] @ by_pose[..., :2, :])
    jacobian = -moved / length[..., None, None]
    rows = len(lines), 2 * lines.stations.shape[1]
    return residual.reshape(rows), jacobian.reshape(*rows, 6)


def line_intrinsics_jacobian(camera: Camera, rotation: Array, position: Array, lines: Lines) -> Array:
    """How far across themselves lines move (N, 2 L, 9) with the camera's parameters, at their stations."""
    rays = np.concatenate([normalise(camera, lines.stations), np.ones((*lines.stations.shape[:-1], 1))], -1)
    offset = lines.ends - position[:, None, None]
    normal = np.cross(offset[:, :, 0], offset[:, :, 1])
    line = (np.linalg.inv(camera.matrix).T @ rotation)[:, None] @ normal[..., None]
    across = line[..., :2, 0] / np.linalg.norm(line[..., :2, 0], axis=-1, keepdims=True)
    moved = across[:, :, None, None, :] @ intrinsics_jacobian(camera, rays)
    return moved.reshape(len(lines), -1, 9)
