"""Effects of a real camera behind a cockpit window: lens, window, sensor and recorder (``Footage``).

Corners of a runway are never covered: a cockpit frame or a line of text that would cover one is skipped.
"""

from __future__ import annotations

import cv2
import numpy as np

from halopose.geometry.camera import Camera
from halopose.landing.world.image_sensor import pixel_rays
from halopose.landing.world.scenes import Scene, labelled_runways, runway_pixels
from halopose.types import Array

_MARGIN = 6  # pixels around a runway that must stay uncovered


def through_lens(light: Array, pinhole: Camera, camera: Camera) -> Array:
    """Distort planes (3, H, W) of a pinhole camera as a camera with lens distortion records them."""
    right, down, _ = pixel_rays(camera)
    u = right * np.float32(pinhole.fx) + np.float32(pinhole.cx)
    v = down * np.float32(pinhole.fy) + np.float32(pinhole.cy)
    return np.stack([cv2.remap(plane, u, v, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE) for plane in light])


def as_recorded(image: Array, scene: Scene) -> Array:
    """Apply window, sensor and recorder to a developed image."""
    footage = scene.footage
    if footage is None:
        return image
    rng = np.random.default_rng([scene.seed, scene.frame, 35])
    kept = _kept(scene)
    seen = _drops(image, footage.drops, rng) if footage.drops else image
    seen = seen.astype(np.float32) / 255
    seen = _glare(seen, footage.glare, rng) if footage.glare else seen
    seen = _cockpit(seen, footage.frame, kept, rng) if footage.frame else seen
    seen = _specks(seen, footage.dust, rng) if footage.dust else seen
    if footage.grey:
        seen = np.repeat(seen @ rng.dirichlet((4.0, 4.0, 4.0)).astype(np.float32)[:, None], 3, axis=2)
    if footage.contrast:
        low, high = np.quantile(seen[::4, ::4], (0.01, 0.99))
        seen = seen + np.float32(footage.contrast) * ((seen - low) / max(high - low, 0.05) - seen)
    seen = np.clip(seen, 0, 1) ** np.float32(footage.tone)
    if footage.scale < 1:
        seen = _rescaled(seen, footage.scale)
    if footage.sharpening:
        seen = seen + np.float32(footage.sharpening) * (seen - cv2.GaussianBlur(seen, (0, 0), 1.2))
    result = np.rint(np.clip(seen, 0, 1) * 255).astype(np.uint8)
    if footage.text:
        result = _texts(result, kept, rng)
    if footage.quality:
        coded = cv2.imencode(".jpg", result, [cv2.IMWRITE_JPEG_QUALITY, footage.quality])[1]
        result = np.asarray(cv2.imdecode(coded, cv2.IMREAD_COLOR))
    return result


def _kept(scene: Scene) -> Array:
    """Return a mask (H, W) of what must not be covered: boxes around the labelled runways."""
    kept = np.zeros((scene.camera.height, scene.camera.width), bool)
    for runway in labelled_runways(scene):
        pixels = runway_pixels(scene, runway)
        low = np.maximum(np.floor(pixels.min(0)).astype(int) - _MARGIN, 0)
        high = np.ceil(pixels.max(0)).astype(int) + _MARGIN + 1
        kept[low[1] : high[1], low[0] : high[0]] = True
    return kept


def _drops(image: Array, count: int, rng: np.random.Generator) -> Array:
    """Add rain drops: small lenses with a wide, blurred and upside-down view."""
    height, width = image.shape[:2]
    v, u = np.mgrid[0:height, 0:width].astype(np.float32)
    share = np.zeros((height, width), np.float32)
    size = width / 640
    for _ in range(count):
        x, y = rng.uniform(0, width), rng.uniform(0, height)
        radius = float(np.exp(rng.normal(np.log(4.5), 0.5))) * size
        tall = float(rng.uniform(1.0, 1.8))
        top, left = max(int(y - tall * radius) - 1, 0), max(int(x - radius) - 1, 0)
        part = slice(top, int(y + tall * radius) + 2), slice(left, int(x + radius) + 2)
        away_u, away_v = u[part] - np.float32(x), v[part] - np.float32(y)
        inside = np.clip((1.0 - np.hypot(away_u, away_v / tall) / radius) * radius, 0, 1)
        share[part] = np.maximum(share[part], inside)
        u[part] -= inside * 6 * away_u
        v[part] -= inside * 6 * away_v
    lensed = cv2.remap(image, u, v, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REFLECT_101)
    lensed = cv2.GaussianBlur(lensed, (0, 0), 0.8 * size + 0.2)
    strength = share[..., None] * np.float32(rng.uniform(0.35, 0.95))
    return np.rint(image + (lensed.astype(np.float32) - image) * strength).astype(np.uint8)


def _glare(image: Array, strength: float, rng: np.random.Generator) -> Array:
    """Add a veil over the window, stronger towards one side, with faint reflections of the cockpit."""
    height, width = image.shape[:2]
    x, y = np.meshgrid(np.linspace(-1, 1, width, dtype=np.float32), np.linspace(-1, 1, height, dtype=np.float32))
    angle, reach = rng.uniform(0, 2 * np.pi), rng.uniform(0.5, 2.5)
    veil = np.exp(-((x - np.cos(angle)) ** 2 + (y - np.sin(angle)) ** 2) / np.float32(reach))
    veil = np.float32(strength) * (np.float32(0.35) + veil)
    for _ in range(int(rng.integers(0, 5))):
        across, along, size = rng.uniform(-1, 1), rng.uniform(-1, 1), rng.uniform(0.02, 0.4, 2)
        shape = ((x - across) / size[0]) ** 2 + ((y - along) / size[1]) ** 2
        veil += np.float32(strength * rng.uniform(0.1, 0.6)) * np.exp(-(shape**2))
    colour = np.float32(1) + rng.normal(0, 0.08, 3).astype(np.float32)
    return np.asarray(image + veil[..., None] * colour * (1 - image))


def _cockpit(image: Array, kind: int, kept: Array, rng: np.random.Generator) -> Array:
    """Add pillars, glareshield or wiper as dark, blurred shapes; nothing if a runway would be covered."""
    height, width = image.shape[:2]
    cover = np.zeros((height, width), np.uint8)

    def polygon(points: Array) -> None:
        cv2.fillPoly(cover, [np.rint(points * (width, height) * 16).astype(np.int32)], 255, cv2.LINE_AA, 4)

    if kind in (1, 2, 4):  # a pillar, or two
        for side in (0, 1) if rng.random() < 0.4 else (int(rng.integers(2)),):
            top, bottom = sorted(rng.uniform(-0.15, 0.4, 2))
            bend = (top + bottom) / 2 - rng.uniform(0, 0.1)
            edge = np.array([(-0.1, -0.1), (top, -0.1), (bend, 0.55), (bottom, 1.1), (-0.1, 1.1)])
            if side:
                edge[:, 0] = 1 - edge[:, 0]
            polygon(edge)
    if kind in (2, 3):  # the glareshield
        x = np.linspace(-0.1, 1.1, 24)
        line = rng.uniform(0.72, 0.98) + rng.uniform(-0.15, 0.15) * (x - 0.5) ** 2 + rng.normal(0, 0.05) * (x - 0.5)
        polygon(np.concatenate([np.column_stack([x, line]), [(1.1, 1.2), (-0.1, 1.2)]]))
    if kind == 4 or rng.random() < 0.2:  # a wiper
        start = np.array([rng.uniform(-0.1, 1.1), rng.choice([-0.05, 1.05])])
        end, thick = rng.uniform(0.1, 0.9, 2), rng.uniform(0.004, 0.015)
        normal = np.array([end[1] - start[1], start[0] - end[0]]) / np.linalg.norm(end - start) * thick
        polygon(np.array([start - normal, start + normal, end + normal / 2, end - normal / 2]))
    blur = float(rng.uniform(0.5, 5.0)) * width / 640
    share = cv2.GaussianBlur(cover, (0, 0), blur).astype(np.float32)[..., None] / 255
    if (share[kept] > 0.02).any():
        return image
    shine = np.exp(-(((np.linspace(0, 1, height) - rng.uniform(0, 1)) / rng.uniform(0.1, 0.6)) ** 2))
    dark = rng.uniform(0.01, 0.25) * (1 + rng.uniform(0, 1.5) * shine)[:, None, None]
    colour = (dark * np.exp(rng.normal(0, 0.15, 3))).astype(np.float32)
    return np.asarray(image + (colour - image) * share)


def _specks(image: Array, count: int, rng: np.random.Generator) -> Array:
    """Add dust on the sensor: small, soft, darker or brighter, in the same place in all frames."""
    height, width = image.shape[:2]
    dots = np.zeros((height, width), np.float32)
    for _ in range(count):
        centre = int(rng.integers(width)), int(rng.integers(height))
        cv2.circle(dots, centre, max(round(rng.uniform(0.5, 3.0) * width / 640), 1), float(rng.normal(0, 0.3)), -1)
    return np.asarray(image * (1 + cv2.GaussianBlur(dots, (0, 0), 0.8 * width / 640 + 0.3))[..., None])


def _rescaled(image: Array, scale: float) -> Array:
    """Downscale and enlarge an image; pixel centres do not move."""
    height, width = image.shape[:2]
    small = cv2.resize(image, (round(width * scale), round(height * scale)), interpolation=cv2.INTER_AREA)
    return np.asarray(cv2.resize(small, (width, height), interpolation=cv2.INTER_LINEAR))


def _texts(image: Array, kept: Array, rng: np.random.Generator) -> Array:
    """Add a line of date, time or place in a corner of the image, unless a runway is there."""
    height, width = image.shape[:2]
    shown = f"20{rng.integers(10, 27):02d}-{rng.integers(1, 13):02d} {rng.integers(24):02d}:{rng.integers(60):02d}"
    size = float(rng.uniform(0.3, 0.6)) * width / 640 + 0.05
    place = int(rng.uniform(0.01, 0.75) * width), int(rng.choice([0.06, 0.95]) * height)
    lettered = image.copy()
    bright = int(rng.choice([255, 230, 20]))
    cv2.putText(lettered, shown, place, cv2.FONT_HERSHEY_SIMPLEX, size, (bright,) * 3, 1, cv2.LINE_AA)
    return image if (lettered != image)[kept].any() else lettered
