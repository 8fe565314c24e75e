"""Properties of real footage that plain scenes lack: other cameras, cockpits, rain, worn airports."""

from __future__ import annotations

from dataclasses import dataclass
from math import atan, radians, tan

import numpy as np

from halopose.geometry.camera import Camera, normalise

SIZES = (
    (640, 384),
    (320, 192),
    (480, 288),
    (800, 480),
    (960, 576),
)  # all 5:3, so that they fit into one batch
_SHARES = (0.4, 0.2, 0.15, 0.15, 0.1)
PAVED = 0.25  # share of runways with pavement before the threshold: 52 of 210 ends in the table of real runways
_PLAIN_FOCAL = 1194.3  # pixels, of the plain world's 640 px and 30 degrees


@dataclass(frozen=True)
class Footage:
    """Effects added to a scene; 0 disables an effect.

    Attributes:
        wear: share of worn paint.
        shoulder: metres of paved shoulder; 0 keeps the runway's own.
        lightness: lightness of the shoulder; 1 is as light as concrete.
        slope: slope of the runway, by which the horizon tilts.
        roads: number of roads.
        buildings: number of buildings.
        frame: kind of cockpit frame, 1 to 4.
        glare: strength of window glare, at full scale.
        drops: number of rain drops.
        dust: number of dust specks.
        grey: whether the sensor is monochrome.
        contrast: strength of contrast stretching.
        tone: exponent of the tone curve; 1 is linear.
        sharpening: strength of sharpening.
        scale: size of the recording relative to the image.
        quality: JPEG quality of the recording; 0 is lossless.
        text: whether the recorder adds a line of text.
    """

    wear: float = 0.0
    shoulder: float = 0.0
    lightness: float = 0.0
    slope: float = 0.0
    roads: int = 0
    buildings: int = 0
    frame: int = 0
    glare: float = 0.0
    drops: int = 0
    dust: int = 0
    grey: bool = False
    contrast: float = 0.0
    tone: float = 1.0
    sharpening: float = 0.0
    scale: float = 1.0
    quality: int = 0
    text: bool = False


@dataclass(frozen=True)
class FootageRanges:
    """A camera and the ranges of scenes that suit it, as in ``SceneSettings``."""

    camera: Camera
    farthest: float
    tilt_spread: float
    localizer: float = radians(1.2)
    crab: float = radians(10.0)
    roll_spread: float = radians(3.5)
    glide: tuple[float, float] = (radians(2.3), radians(4.2))


def footage_ranges(seed: int) -> FootageRanges:
    """Draw a camera with a field of view from 9 degrees (a crop of a large image) to 70 degrees, with suitable
    distances.
    """
    rng = np.random.default_rng([seed, 30])
    width, height = SIZES[int(rng.choice(len(SIZES), p=_SHARES))]
    fov = radians(float(np.exp(rng.uniform(np.log(9.0), np.log(70.0)))))
    plain = Camera.from_fov(width, height, fov)
    # Barrel distortion grows with the field of view; it moves the image corner by up to 12.5 %.
    corner = tan(fov / 2) ** 2 * (1 + (height / width) ** 2)
    bent = float(rng.uniform(-0.12, 0.02)) if rng.random() < 0.6 else 0.0
    k1 = bent / corner * min(fov / radians(50), 1.0)
    shift = rng.normal(0, 0.01, 2) * width
    stretch = float(np.exp(rng.normal(0, 0.01)))
    camera = Camera(
        plain.fx, plain.fy * stretch, plain.cx + float(shift[0]), plain.cy + float(shift[1]), width, height,
        (k1, 0.0, 0.0, 0.0, 0.0),
    )  # fmt: skip
    vertical = 2 * atan(tan(fov / 2) * height / width)
    farthest = 6000.0 * plain.fx * 640 / width / _PLAIN_FOCAL
    return FootageRanges(camera, max(min(farthest, 6000.0), 900.0), vertical / 9)


def sample_footage(seed: int) -> Footage:
    """Draw the effects of a scene; each effect is absent in about half of the scenes."""
    rng = np.random.default_rng([seed, 31])

    def sometimes(share: float, low: float, high: float) -> float:
        drawn = float(rng.uniform(low, high))
        return drawn if rng.random() < share else 0.0

    return Footage(
        wear=sometimes(0.6, 0.1, 0.85),
        shoulder=sometimes(0.5, 3.0, 25.0),
        lightness=sometimes(0.7, 0.2, 1.0),
        slope=float(np.clip(rng.normal(0, 0.006), -0.015, 0.015)),
        roads=int(sometimes(0.8, 1, 9)),
        buildings=int(sometimes(0.8, 5, 250)),
        frame=int(sometimes(0.55, 1, 5)),
        glare=sometimes(0.35, 0.03, 0.3),
        drops=int(sometimes(0.2, 10, 160)),
        dust=int(sometimes(0.4, 1, 12)),
        grey=bool(rng.random() < 0.3),
        contrast=sometimes(0.6, 0.3, 1.0),
        tone=float(np.exp(rng.normal(0, 0.28))) if rng.random() < 0.7 else 1.0,
        sharpening=sometimes(0.5, 0.2, 1.5),
        scale=float(rng.uniform(0.5, 1.0)) if rng.random() < 0.4 else 1.0,
        quality=int(sometimes(0.6, 12, 80)),
        text=bool(rng.random() < 0.25),
    )


def sample_pavement(seed: int, share: float) -> tuple[tuple[float, float], bool]:
    """Draw metres of pavement before the threshold, left and right, and whether labels begin there.

    Labels of real frames often begin where pavement and side stripes begin, not at the threshold bars; tables of
    runways use that end too. Where a taxiway enters, one side may be shorter.

    Args:
        seed: seed of the scene.
        share: share of runways with such pavement.
    """
    rng = np.random.default_rng([seed, 32])
    displaced, counted, oblique = rng.random(3) < (share, 0.7, 0.4)
    metres = float(np.exp(rng.uniform(np.log(60.0), np.log(350.0))))
    shorter = metres * float(rng.uniform(0.1, 1.0)) if oblique else metres
    if not displaced:
        return (0.0, 0.0), False
    return ((metres, shorter) if rng.random() < 0.5 else (shorter, metres)), bool(counted)


def pinhole_for(camera: Camera) -> Camera:
    """Return a camera without distortion, with the same focal length, that covers the view of the given one."""
    u = np.linspace(-0.5, camera.width - 0.5, 65)
    v = np.linspace(-0.5, camera.height - 0.5, 65)
    border = np.concatenate([np.stack([u, np.full(65, end)], 1) for end in (v[0], v[-1])]
                            + [np.stack([np.full(65, end), v], 1) for end in (u[0], u[-1])])  # fmt: skip
    seen = normalise(camera, border)
    low, high = seen.min(0), seen.max(0)
    width, height = (int(np.ceil(f * span)) + 3 for f, span in zip((camera.fx, camera.fy), high - low, strict=True))
    return Camera(camera.fx, camera.fy, 1 - camera.fx * float(low[0]), 1 - camera.fy * float(low[1]), width, height)
