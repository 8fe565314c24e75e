"""Image sensor: converts linear radiance (3, H, W) to an image (H, W, 3), uint8 BGR."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import cv2
import numpy as np

from halopose.geometry.camera import Camera, normalise
from halopose.landing.world.scenes import Scene
from halopose.types import Array

_MIDDLE_GREY, _LARGEST_GAIN = 0.22, 350.0
_POOL = 1 << 21  # number of normal samples in the pool for noise


@lru_cache(maxsize=4)
def pixel_rays(camera: Camera) -> tuple[Array, Array, Array]:
    """Return right and down (H, W) of every pixel's ray at depth 1, and its length."""
    row, column = np.mgrid[0 : camera.height, 0 : camera.width]
    plain = normalise(camera, np.stack([column, row], axis=-1).astype(float)).astype(np.float32)
    return plain[..., 0].copy(), plain[..., 1].copy(), np.sqrt(1 + (plain**2).sum(-1))


def colour_planes(colour: Sequence[float] | Array) -> Array:
    """Reshape a colour (3,) for broadcasting over planes."""
    return np.asarray(colour, np.float32).reshape(3, 1, 1)


def develop(light: Array, scene: Scene) -> Array:
    """Convert linear radiance (3, H, W) to an image (H, W, 3) uint8: exposure, lens, motion, and noise.

    The image is the square root of the light, in which photon noise has constant variance.
    """
    sensor = scene.sensor
    middle = float(light[:, light.shape[1] // 3 :: 8, ::8].mean())  # exposure metering on the ground
    gain = min(_MIDDLE_GREY / max(middle, 1e-9), _LARGEST_GAIN) * sensor.exposure
    image = light * colour_planes(np.array(sensor.white_balance) * gain)
    np.minimum(image, 30, out=image)
    if scene.weather in ("dusk", "night", "fog"):
        _add_glare(image)
    spread = [float(np.hypot(sensor.blur, shift / np.sqrt(12))) for shift in sensor.motion]
    falloff = _falloff(scene.camera, sensor.vignette)
    grain = _noise(scene, image.size).reshape(image.shape)
    planes = []
    for plane, noise in zip(image, grain, strict=True):
        seen = cv2.GaussianBlur(plane, (7, 7), spread[0], sigmaY=spread[1]) if max(spread) > 0.05 else plane
        seen *= falloff
        np.sqrt(seen, out=seen)
        seen += np.float32(sensor.noise) * noise
        planes.append(cv2.convertScaleAbs(np.maximum(seen, 0, out=seen), alpha=255))
    return cv2.merge(planes)


def _add_glare(image: Array) -> None:
    """Add a wide, faint halo around pixels brighter than white, blurred at half the size."""
    for plane in image:
        bright = cv2.resize(np.maximum(plane - 1, 0), None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA)
        halo = cv2.GaussianBlur(bright, (0, 0), 2)
        plane += np.float32(0.05) * cv2.resize(halo, plane.shape[::-1], interpolation=cv2.INTER_LINEAR)


def _noise(scene: Scene, size: int) -> Array:
    """Return normal noise (size,), a segment of a fixed pool chosen by the frame."""
    pool = _noise_pool(max(_POOL, 2 * size))
    start = int(np.random.default_rng([scene.seed, scene.frame, 8]).integers(len(pool) - size))
    return pool[start : start + size]


def _falloff(camera: Camera, loss: float) -> Array:
    right, down, _ = pixel_rays(camera)
    square = right * right + down * down
    return 1 - np.float32(loss) * square / square.max()


@lru_cache(maxsize=2)
def _noise_pool(size: int) -> Array:
    return np.random.default_rng(9).standard_normal(size, dtype=np.float32)
