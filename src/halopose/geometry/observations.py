"""What N images show of K known points: the common input of all solvers."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, replace

import numpy as np

from halopose.errors import HaloposeError
from halopose.geometry.camera import Camera
from halopose.geometry.lines import Lines
from halopose.types import Array, Mask


@dataclass(frozen=True)
class Observations:
    """Points seen in N images, and what is known of the camera's rotation and intrinsics.

    Attributes:
        camera: The camera of all images.
        points: (K, 3) or (N, K, 3), in world axes. All must be finite, masked ones included.
        pixels: (N, K, 2).
        covariance: In pixel^2; (N, K, 2, 2), or (N, 2 K, 2 K) in the order u1, v1, u2, ... for correlated points.
        R_cam_world: Given rotations (N, 3, 3), world to camera; None if they are unknown.
        attitude_covariance: In rad^2; (3, 3) or (N, 3, 3) of the given rotations about the world axes. None: exact.
        intrinsics_covariance: (9, 9) of the camera's parameters in the order of ``INTRINSICS``. None: exact.
        shared: (N, K, 2, M), the shift of the points in pixels by each of M standard normal causes that they share.
            ``covariance`` is then only the independent part.
        lines: Straight edges that are measured in addition to the points, independent of them.
        mask: (N, K), true for the points to use. None: all.
        nu: (K,) or (N, K) degrees of freedom of Student-t residuals with ``covariance`` as scale. None: Gaussian.
    """

    camera: Camera
    points: Array
    pixels: Array
    covariance: Array
    R_cam_world: Array | None = None
    attitude_covariance: Array | None = None
    _: KW_ONLY
    intrinsics_covariance: Array | None = None
    shared: Array | None = None
    lines: Lines | None = None
    mask: Mask | None = None
    nu: Array | None = None

    def __post_init__(self) -> None:
        if self.pixels.ndim != 3:
            raise HaloposeError(f"pixels should have shape (N, K, 2), got {self.pixels.shape}")
        frames, count = self.pixels.shape[:2]
        joint = (frames, 2 * count, 2 * count)
        expected: list[tuple[str, Array | None, tuple[tuple[int, ...], ...]]] = [
            ("pixels", self.pixels, ((frames, count, 2),)),
            ("points", self.points, ((count, 3), (frames, count, 3))),
            ("covariances", self.covariance, ((frames, count, 2, 2), joint)),
            ("the mask", self.mask, ((frames, count),)),
            ("nu", self.nu, ((count,), (frames, count))),
            ("rotations", self.R_cam_world, ((frames, 3, 3),)),
            ("attitude covariances", self.attitude_covariance, ((3, 3), (frames, 3, 3))),
        ]
        for name, array, shapes in expected:
            if array is not None and np.shape(array) not in shapes:
                raise HaloposeError(f"{name} should have shape {' or '.join(map(str, shapes))}, got {np.shape(array)}")
        if not math.isfinite(self.points.sum()):
            raise HaloposeError("the points must be finite, including those that are masked out")

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def used(self) -> Mask:
        """Points in use (N, K)."""
        return np.ones(self.pixels.shape[:2], dtype=bool) if self.mask is None else self.mask

    @property
    def independent_covariance(self) -> Array:
        """Covariance (N, K, 2, 2) of each point alone; correlations between points are left out."""
        return self.covariance if self.covariance.ndim == 4 else diagonal_blocks(self.covariance)

    def select(self, frames: Array) -> Observations:
        """Return the frames of an index, in its order."""

        def of(array: Array | None) -> Array | None:
            return None if array is None else array[frames]

        attitude = self.attitude_covariance
        return replace(
            self,
            points=self.points if self.points.ndim == 2 else self.points[frames],
            pixels=self.pixels[frames],
            covariance=self.covariance[frames],
            R_cam_world=of(self.R_cam_world),
            attitude_covariance=attitude if attitude is None or attitude.ndim == 2 else attitude[frames],
            shared=of(self.shared),
            lines=None if self.lines is None else self.lines.select(frames),
            mask=of(self.mask),
            nu=self.nu if self.nu is None or self.nu.ndim == 1 else self.nu[frames],
        )


def diagonal_blocks(covariance: Array) -> Array:
    """Return the covariance of each point (N, K, 2, 2) from joint covariances (N, 2 K, 2 K)."""
    count = covariance.shape[1] // 2
    blocks = covariance.reshape(len(covariance), count, 2, count, 2)
    return np.moveaxis(blocks[:, np.arange(count), :, np.arange(count)], 0, 1)


def block_diagonal(covariance: Array, kept: Mask) -> Array:
    """Return joint covariances (N, 2 K, 2 K) with ones on the diagonal where coordinates are masked out.

    Args:
        covariance: (N, K, 2, 2) or (N, 2 K, 2 K).
        kept: Coordinates in use (N, 2 K).
    """
    frames, count = len(covariance), kept.shape[1] // 2
    result = covariance
    if covariance.ndim == 4:
        result = np.zeros((frames, count, 2, count, 2))
        result[:, np.arange(count), :, np.arange(count), :] = np.moveaxis(covariance, 1, 0)
    result = np.where(kept[:, :, None] & kept[:, None, :], result.reshape(frames, 2 * count, 2 * count), 0.0)
    result[:, np.arange(2 * count), np.arange(2 * count)] += ~kept
    return result
