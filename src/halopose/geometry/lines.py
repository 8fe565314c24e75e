"""Straight edges as measurements, in addition to corners or instead of some of them.

A line is measured at two stations in the image. The residuals are the distances of the stations from the predicted
line. A line constrains the pose only across itself. This helps where the position of a corner along its edge is
uncertain.

The line through two points P and Q lies in the plane of both points and the camera at c. The normal of this plane is
m = (P - c) x (Q - c). With the camera matrix K and the rotation R, the line in the undistorted image is K^-T R m.
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
    """L lines in N frames.

    Stations are compared with the infinite line through both ends. They need not lie between the ends, and the ends
    need not be visible.

    Attributes:
        stations: Two pixels on each line (N, L, 2, 2).
        covariance: Covariance (N, 2 L, 2 L) of the distances of stations from the true line in pixel^2; ordered by
            line, then station.
        ends: Ends of the lines (L, 2, 3) in world axes.
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
        """Return the frames of an index."""
        return Lines(self.stations[index], self.covariance[index], self.ends)


def lines_of_corners(pixels: Array, covariance: Array, corners: Array, edges: Sequence[tuple[int, int]]) -> Lines:
    """Return lines through pairs of corners.

    The lines contain no information beyond that of the corners. Use them instead of corners whose position along the
    edge is not reliable. Do not use a line together with its corners.

    Args:
        pixels: Corners in the image (N, K, 2).
        covariance: Their covariances in pixel^2, (N, K, 2, 2) or joint (N, 2 K, 2 K).
        corners: Corners in world axes (K, 3).
        edges: Pairs of corner indices.

    Example:
        >>> plate = np.array([[0, 1, 0], [0, -1, 0], [5, -1, 0], [5, 1, 0.0]])
        >>> seen = np.array([[[300.0, 250.0], [340.0, 250.0], [325.0, 200.0], [315.0, 200.0]]])
        >>> spread = 4.0 * np.ones((1, 4, 1, 1)) * np.eye(2)
        >>> lines = lines_of_corners(seen, spread, plate, [(0, 3), (1, 2), (0, 1)])
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
    """Return distances of stations from the predicted lines, and the Jacobian of the prediction.

    Args:
        camera: The camera.
        rotation: Rotations (N, 3, 3), world to camera.
        position: Positions of the camera (N, 3).
        lines: Measured lines.

    Returns:
        Distances in pixels (N, 2 L), and the Jacobian of the predicted lines by the pose (N, 2 L, 6), with the sign
        convention of ``pose_jacobian``.
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
    """Return the Jacobian (N, 2 L, 9) of the predicted lines at their stations by the camera's parameters."""
    rays = np.concatenate([normalise(camera, lines.stations), np.ones((*lines.stations.shape[:-1], 1))], -1)
    offset = lines.ends - position[:, None, None]
    normal = np.cross(offset[:, :, 0], offset[:, :, 1])
    line = (np.linalg.inv(camera.matrix).T @ rotation)[:, None] @ normal[..., None]
    across = line[..., :2, 0] / np.linalg.norm(line[..., :2, 0], axis=-1, keepdims=True)
    moved = across[:, :, None, None, :] @ intrinsics_jacobian(camera, rays)
    return moved.reshape(len(lines), -1, 9)
