"""Generic image corruptions, and data sets of corrupted copies.

A corruption has a kind and a severity from 1 to 5. It changes pixel values, but not the positions of objects. The
out-of-distribution model is fitted on the kinds in ``FITTED``. The kinds in ``HELD_OUT`` are for testing. Neither
contains weather effects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import cv2
import numpy as np

from halopose.data.dataset import Dataset, Record
from halopose.errors import HaloposeError
from halopose.types import Array

SEVERITIES = (1, 2, 3, 4, 5)
FITTED = ("contrast", "blur", "noise", "gamma", "resolution")
HELD_OUT = ("motion", "compression", "occlusion", "colour")
COPY = 10**15  # image ids of copies: above every id that a file's name can give


def corrupt(image: Array, kind: str, severity: int, seed: int = 0) -> Array:
    """Return a corrupted copy of an image; the same arguments always give the same pixels.

    Args:
        image: Image (h, w, 3), uint8.
        kind: Kind of corruption.
        severity: Severity from 1 to 5.
        seed: Seed of the random parts.

    Example:
        >>> grey = np.full((4, 4, 3), 100, dtype=np.uint8)
        >>> int(corrupt(grey, "gamma", 5).mean()) == 100
        False
    """
    if kind not in _KINDS or severity not in SEVERITIES:
        known = ", ".join(_KINDS)
        raise HaloposeError(
            f"unknown corruption {kind!r} of severity {severity}: choose from {known}, severity 1 to {len(SEVERITIES)}"
        )
    generator = np.random.default_rng([seed, list(_KINDS).index(kind), severity])
    return _KINDS[kind](image, severity - 1, generator)


def _bytes(values: Array) -> Array:
    return np.asarray(np.clip(np.rint(values), 0, 255), dtype=np.uint8)


def _contrast(image: Array, level: int, generator: np.random.Generator) -> Array:
    share = (0.75, 0.55, 0.4, 0.25, 0.15)[level]
    mean = image.mean((0, 1), keepdims=True)
    return _bytes(mean + share * (image - mean))


def _blur(image: Array, level: int, generator: np.random.Generator) -> Array:
    sigma = (0.8, 1.4, 2.2, 3.2, 4.5)[level] * _scale(image)
    return cv2.GaussianBlur(image, (0, 0), sigma)


def _noise(image: Array, level: int, generator: np.random.Generator) -> Array:
    sigma = (6, 12, 20, 32, 48)[level]
    return _bytes(image + sigma * generator.standard_normal(image.shape, dtype=np.float32))


def _gamma(image: Array, level: int, generator: np.random.Generator) -> Array:
    power = (1.4, 1.8, 2.3, 3.0, 4.0)[level]
    power = power if generator.random() < 0.5 else 1 / power
    return cv2.LUT(image, _bytes(255 * (np.arange(256) / 255) ** power))


def _resolution(image: Array, level: int, generator: np.random.Generator) -> Array:
    share = (0.7, 0.5, 0.36, 0.26, 0.18)[level]
    height, width = image.shape[:2]
    small = cv2.resize(image, (max(int(width * share), 1), max(int(height * share), 1)), interpolation=cv2.INTER_AREA)
    return cv2.resize(small, (width, height), interpolation=cv2.INTER_LINEAR)


def _motion(image: Array, level: int, generator: np.random.Generator) -> Array:
    length = max(3, int(np.rint((5, 9, 14, 20, 28)[level] * _scale(image))))
    kernel = np.zeros((length, length), np.float32)
    kernel[length // 2] = 1
    turn = cv2.getRotationMatrix2D(((length - 1) / 2, (length - 1) / 2), generator.uniform(0, 180), 1)
    line = cv2.warpAffine(kernel, turn, (length, length))
    return cv2.filter2D(image, -1, line / line.sum(), borderType=cv2.BORDER_REFLECT)


def _compression(image: Array, level: int, generator: np.random.Generator) -> Array:
    quality = (25, 15, 10, 6, 3)[level]
    _, packed = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, quality])
    return np.asarray(cv2.imdecode(packed, cv2.IMREAD_COLOR))


def _occlusion(image: Array, level: int, generator: np.random.Generator) -> Array:
    """Cover a share of the image with grey blocks."""
    share, result = (0.05, 0.1, 0.18, 0.28, 0.4)[level], image.copy()
    height, width = image.shape[:2]
    side = max(int(np.sqrt(height * width) / 12), 1)
    for _ in range(int(np.rint(-np.log1p(-share) * height * width / side**2))):
        top, left = int(generator.integers(height)) - side // 2, int(generator.integers(width)) - side // 2
        result[max(top, 0) : top + side, max(left, 0) : left + side] = generator.integers(60, 200)
    return result


def _colour(image: Array, level: int, generator: np.random.Generator) -> Array:
    """Add a colour cast: one channel is amplified and one is attenuated."""
    gain = (1.15, 1.3, 1.5, 1.8, 2.2)[level]
    gains = np.ones(3, np.float32)
    strong, weak = generator.permutation(3)[:2]
    gains[strong], gains[weak] = gain, 1 / gain
    return _bytes(image * gains)


def _scale(image: Array) -> float:
    """Return the factor for lengths in pixels, which are defined for images of 640 pixels."""
    return max(image.shape[:2]) / 640


_KINDS: dict[str, Callable[[Array, int, np.random.Generator], Array]] = {
    "contrast": _contrast,
    "blur": _blur,
    "noise": _noise,
    "gamma": _gamma,
    "resolution": _resolution,
    "motion": _motion,
    "compression": _compression,
    "occlusion": _occlusion,
    "colour": _colour,
}


@dataclass(frozen=True)
class CorruptedRecord(Record):
    """A record whose image is corrupted when it is read.

    Attributes:
        kind: Kind of corruption.
        severity: Severity from 1 to 5.
    """

    kind: str = ""
    severity: int = 1

    def _labels(self) -> str:
        return f"{super()._labels()} {self.kind} {self.severity}"

    def pixels(self, encoded: bytes | None = None) -> Array:
        return corrupt(super().pixels(encoded), self.kind, self.severity, self.image_id)


def corrupted(dataset: Dataset, kind: str, severity: int) -> Dataset:
    """Return the data set with every image corrupted and the same image ids."""
    records = tuple(CorruptedRecord(**vars(record), kind=kind, severity=severity) for record in dataset.records)
    return replace(dataset, records=records)


def with_copies(dataset: Dataset, kinds: Sequence[str] = FITTED) -> Dataset:
    """Return the data set with a copy by every kind after each image; all severities are equally frequent."""
    records: list[Record] = []
    for number, record in enumerate(dataset.records):
        records.append(record)
        for place, kind in enumerate(kinds):
            severity = SEVERITIES[(number + place) % len(SEVERITIES)]
            copy = replace(record, image_id=record.image_id + (place + 1) * COPY)
            records.append(CorruptedRecord(**vars(copy), kind=kind, severity=severity))
    return replace(dataset, records=tuple(records))
