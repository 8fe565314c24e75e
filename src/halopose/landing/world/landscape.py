"""Landscapes and noise as periodic textures, prefiltered against aliasing at grazing angles.

Textures of fields, woods, water and towns are made once per process from fixed seeds, and shared by all scenes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import cv2
import numpy as np

from halopose.types import Array

SIZE = 1024  # texels along each side
LANDSCAPES = 12
_LEVELS = 8


@dataclass(frozen=True)
class Texture:
    """Levels (n, n / 2^l[, c]) of a periodic texture, each half as wide along x; ``texel`` is the texel size in metres.

    Only x is filtered: on an approach the footprint along x is hundreds of times longer than across.
    """

    levels: tuple[Array, ...]
    texel: float


@dataclass(frozen=True)
class Cover:
    """Shares of woods, water and towns in a landscape, its field colours (F, 3) and the rotation (a, b) of its
    parcels.
    """

    woods: float
    water: float
    towns: float
    palette: str
    turn: tuple[int, int]


_PALETTES = {  # linear blue, green, red
    "summer": [(0.028, 0.095, 0.055), (0.035, 0.12, 0.075), (0.05, 0.15, 0.12), (0.07, 0.16, 0.18),
               (0.03, 0.08, 0.05), (0.06, 0.11, 0.13)],
    "harvest": [(0.09, 0.2, 0.27), (0.11, 0.24, 0.31), (0.07, 0.13, 0.17), (0.04, 0.1, 0.08), (0.05, 0.09, 0.12),
                (0.14, 0.26, 0.32)],
    "arid": [(0.13, 0.21, 0.29), (0.16, 0.25, 0.33), (0.11, 0.18, 0.25), (0.10, 0.15, 0.19), (0.08, 0.14, 0.16),
             (0.18, 0.27, 0.35)],
    "winter": [(0.6, 0.58, 0.56), (0.52, 0.5, 0.48), (0.1, 0.12, 0.14), (0.45, 0.44, 0.42), (0.08, 0.1, 0.1),
               (0.62, 0.6, 0.58)],
    "meadow": [(0.03, 0.11, 0.06), (0.04, 0.13, 0.08), (0.035, 0.1, 0.07), (0.05, 0.14, 0.1), (0.03, 0.09, 0.06),
               (0.045, 0.12, 0.09)],
}  # fmt: skip
_COVERS = (
    Cover(0.25, 0.02, 0.08, "summer", (1, 0)),
    Cover(0.15, 0.03, 0.12, "harvest", (2, 1)),
    Cover(0.05, 0.0, 0.06, "arid", (1, 1)),
    Cover(0.3, 0.08, 0.05, "summer", (1, 2)),
    Cover(0.2, 0.02, 0.35, "summer", (1, 0)),
    Cover(0.12, 0.25, 0.1, "meadow", (2, 1)),
    Cover(0.2, 0.02, 0.08, "winter", (1, 1)),
    Cover(0.5, 0.04, 0.03, "meadow", (1, 0)),
    Cover(0.08, 0.01, 0.55, "harvest", (2, 1)),
    Cover(0.02, 0.02, 0.2, "arid", (1, 0)),
    Cover(0.1, 0.01, 0.05, "harvest", (1, 2)),
    Cover(0.2, 0.05, 0.15, "meadow", (1, 1)),
)


def spectral_noise(rng: np.random.Generator, slope: float, size: int = SIZE, low: float = 0.0) -> Array:
    """Return periodic noise (size, size) of unit variance with amplitude frequency ** -slope above ``low``."""
    frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size)[None]) * size
    frequency[0, 0] = np.inf
    amplitude = np.where(frequency > low, frequency**-slope, 0.0)
    phase = rng.standard_normal(amplitude.shape) + 1j * rng.standard_normal(amplitude.shape)
    noise = np.fft.irfft2(amplitude * phase, s=(size, size))
    return (noise / noise.std()).astype(np.float32)


def _texture(base: Array, texel: float) -> Texture:
    levels = [base]
    while len(levels) < _LEVELS:
        last = levels[-1].astype(np.float32)
        halved = (last[:, 0::2] + last[:, 1::2]) / 2
        levels.append(np.rint(halved).astype(np.uint8) if base.dtype == np.uint8 else halved)
    return Texture(tuple(levels), texel)


@lru_cache(maxsize=8)
def noise_texture(texel: float, slope: float, seed: int = 0) -> Texture:
    """Return a noise texture of unit variance with the given spectral slope."""
    return _texture(spectral_noise(np.random.default_rng([seed, 11]), slope, 512), texel)


@lru_cache(maxsize=LANDSCAPES)
def landscape(number: int) -> Texture:
    """Return a landscape as square roots of reflectance times 255 (1024, 1024, 3), 5 m per texel."""
    rng = np.random.default_rng([number, 7])
    cover = _COVERS[number % len(_COVERS)]
    ground = _fields(rng, cover)
    _towns(ground, rng, cover)
    _woods(ground, rng, cover)
    _water(ground, rng, cover)
    ground *= np.exp(0.10 * spectral_noise(rng, 0.7))[..., None]
    return _texture(np.clip(np.sqrt(ground) * 255 + 0.5, 0, 255).astype(np.uint8), 5.0)


def _share(noise: Array, share: float) -> float:
    """Return the level that the given share of the noise exceeds."""
    return float(np.quantile(noise[::4, ::4], 1 - share)) if share > 0 else np.inf


def _soft(noise: Array, level: float, width: float) -> Array:
    return np.clip((noise - level) / width + 0.5, 0, 1)[..., None].astype(np.float32)


def _fields(rng: np.random.Generator, cover: Cover) -> Array:
    """Draw parcels of one colour each with furrows, and lanes between some, slightly bent."""
    palette = np.array(_PALETTES[cover.palette], dtype=np.float32)
    scale = np.hypot(*cover.turn)
    parcels = np.zeros((SIZE, SIZE, 3), np.float32)
    _cut(parcels, (0, 0, SIZE, SIZE), rng, palette, 38 * scale)
    a, b = cover.turn
    row, column = np.mgrid[0:SIZE, 0:SIZE].astype(np.float32)
    bend = [18 * spectral_noise(rng, 2.2, low=1) for _ in range(2)]
    x, y = a * column + b * row + bend[0], -b * column + a * row + bend[1]
    return cv2.remap(parcels, np.mod(x, SIZE), np.mod(y, SIZE), cv2.INTER_LINEAR, borderMode=cv2.BORDER_WRAP)


def _cut(
    parcels: Array, box: tuple[int, int, int, int], rng: np.random.Generator, palette: Array, least: float
) -> None:
    x0, y0, x1, y1 = box
    wide, high = x1 - x0, y1 - y0
    if max(wide, high) > 2.2 * least and (wide * high > (3 * least) ** 2 or rng.random() < 0.75):
        share = rng.uniform(0.35, 0.65)
        if wide * rng.uniform(0.7, 1.4) > high:
            middle = x0 + int(share * wide)
            halves = ((x0, y0, middle, y1), (middle, y0, x1, y1))
        else:
            middle = y0 + int(share * high)
            halves = ((x0, y0, x1, middle), (x0, middle, x1, y1))
        for half in halves:
            _cut(parcels, half, rng, palette, least)
        return
    colour = palette[rng.integers(len(palette))] * np.exp(rng.normal(0, 0.15)) * np.exp(rng.normal(0, 0.05, 3))
    furrows = 1 + rng.uniform(0, 0.12) * np.sin(np.arange(wide) * rng.uniform(0.6, 2.2))
    parcels[y0:y1, x0:x1] = colour.astype(np.float32) * furrows[None, :, None].astype(np.float32)
    edge = rng.random()
    border = (0.02, 0.045, 0.03) if edge < 0.5 else (0.17, 0.19, 0.21) if edge > 0.85 else None
    if border is not None:
        parcels[y0 : y0 + 2, x0:x1] = border
        parcels[y0:y1, x0 : x0 + 2] = border


def _towns(ground: Array, rng: np.random.Generator, cover: Cover) -> None:
    """Draw streets and roofs where a slow noise is high, denser towards the middle."""
    where = spectral_noise(rng, 1.6, low=2)
    level = _share(where, cover.towns)
    if level == np.inf:
        return
    mask = _soft(where, level, 0.25)
    roofs = np.array([(0.12, 0.16, 0.3), (0.1, 0.11, 0.13), (0.3, 0.31, 0.32), (0.14, 0.15, 0.2), (0.4, 0.4, 0.4)])
    garden = np.array((0.1, 0.15, 0.19) if cover.palette == "arid" else (0.05, 0.085, 0.07), np.float32)
    town = np.broadcast_to(garden, ground.shape).copy()
    count = int(SIZE * SIZE * cover.towns * 0.022)
    rows, columns = rng.integers(0, SIZE, (2, count * 4))
    inside = np.flatnonzero(where[rows, columns] > level)[:count]
    kinds, sizes = rng.integers(len(roofs), size=count), rng.integers(1, 4, (count, 2))
    for index, kind, (wide, high) in zip(inside.tolist(), kinds.tolist(), sizes.tolist(), strict=False):
        row, column = rows[index] // 7 * 7 + 2, columns[index] // 5 * 5 + 1
        town[row : row + high, column : column + wide] = roofs[kind] * (0.8 + 0.4 * (index % 7) / 7)
    town[::14] = town[:, ::15] = (0.11, 0.115, 0.12)
    ground += mask * (town - ground)


def _woods(ground: Array, rng: np.random.Generator, cover: Cover) -> None:
    """Draw dark, rough tree cover with a noisy edge."""
    where = spectral_noise(rng, 1.5, low=2) + 0.08 * spectral_noise(rng, 0.5)
    crowns = np.exp(0.35 * spectral_noise(rng, 0.2))[..., None]
    tree = np.array((0.06, 0.07, 0.065) if cover.palette == "winter" else (0.018, 0.045, 0.026), np.float32)
    ground += _soft(where, _share(where, cover.woods), 0.12) * (tree * crowns - ground)


def _water(ground: Array, rng: np.random.Generator, cover: Cover) -> None:
    """Draw lakes where a slow noise is high, and a river along its middle contour."""
    where = spectral_noise(rng, 2.0, low=1)
    water = np.array((0.09, 0.075, 0.045), np.float32)
    ground += _soft(where, _share(where, cover.water), 0.03) * (water - ground)
    if cover.water > 0:
        course = spectral_noise(rng, 2.4, low=0.5)
        ground += _soft(-np.abs(course), -0.02, 0.015) * (water - ground)


def sample(texture: Texture, x: Array, y: Array, fineness: Array) -> Array:
    """Sample a texture (H, W) or planes (3, H, W) at points x, y (H, W) with a footprint of 2 ** fineness metres
    along x.
    """
    column, row = x * np.float32(1 / texture.texel), y * np.float32(1 / texture.texel)
    level = np.clip(fineness - np.float32(np.log2(texture.texel)), 0, len(texture.levels) - 1)
    low, high = level.min(1), level.max(1)
    row -= _whole(row, len(texture.levels[0]))
    planes = texture.levels[0].shape[2:]
    out = np.zeros(planes + x.shape, np.float32)
    for number, pixels in enumerate(texture.levels):
        needed = np.flatnonzero((high > number - 1) & (low < number + 1))
        if not len(needed):
            continue
        rows = slice(int(needed[0]), int(needed[-1]) + 1)
        weight = np.abs(level[rows] - np.float32(number))
        np.subtract(1, weight, out=weight)
        np.maximum(weight, 0, out=weight)
        at = (column[rows] + np.float32(0.5)) * np.float32(0.5**number) - np.float32(0.5)
        at -= _whole(at, pixels.shape[1])
        seen = cv2.remap(pixels, at, row[rows], cv2.INTER_LINEAR, borderMode=cv2.BORDER_WRAP)
        for plane, channel in zip(out if planes else out[None], cv2.split(seen), strict=True):
            plane[rows] += channel * weight
    return out


def _whole(at: Array, period: int) -> Array:
    """Return the multiple of the period at or below each place."""
    turns = at * np.float32(1 / period)
    np.floor(turns, out=turns)
    turns *= np.float32(period)
    return turns
