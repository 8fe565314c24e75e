"""How unlike everything seen a detection is, and an image: distances in feature space and two logistic functions.

In: pooled neck features of a detection and of its image, and its score. Out: p-values, small where
heads and calibration have seen nothing like it: on data like those calibrated on at most a share p falls below p.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halopose.arrays import as_array, at_least, between, converted, joined, library_of, stacked

Area = tuple[float, float, float, float]

COMPONENTS = ("window", "image", "unreliable", "changed")


def pool_windows(windows: Tensor, inside: Tensor) -> Tensor:
    """Mean features (N, C) of windows (N, C, W, W) over their cells on the map, marked in inside (N, W, W)."""
    return windows.flatten(2).sum(2) / inside.flatten(1).sum(1, keepdim=True)


def pool_images(features: Sequence[Tensor], strides: Sequence[int], areas: Sequence[Area]) -> Tensor:
    """Mean features (B, D) of whole images, level after level, where the input is image and not padding.

    features: a map (B, C, H, W) per level; areas: left, top, right and bottom of each image in input pixels.
    """
    means = []
    for number, area in enumerate(areas):
        for maps, stride in zip(features, strides, strict=True):
            left, top, right, bottom = (max(round(side / stride), 0) for side in area)
            part = maps[number, :, top : max(bottom, top + 1), left : max(right, left + 1)]
            means.append(part.mean((1, 2)))
    return torch.cat(means).reshape(len(areas), -1)


@dataclass(frozen=True)
class Evidence:
    """What is known of N detections: level (N,), pooled window (N, C) filled up with zeros, image vector (N, D)
    and score (N,), tensors or arrays. Nothing of it comes from the heads, so that other heads for the same base
    keep their novelty."""

    level: Tensor
    window: Tensor
    image: Tensor
    score: Tensor

    def __len__(self) -> int:
        return len(self.level)

    def __getitem__(self, index: Tensor) -> Evidence:
        return Evidence(*(getattr(self, field.name)[index] for field in fields(self)))

    @classmethod
    def concatenate(cls, parts: Sequence[Evidence]) -> Evidence:
        """Detections of several images."""
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    @property
    def odds(self) -> Tensor:
        """Logarithm of the score's odds (N, 1)."""
        share = between(self.score, 1e-4, 1 - 1e-4)
        odds: Tensor = library_of(share).log(share / (1 - share))
        return odds[:, None]


class Pooling:
    """Takes the windows that heads look at, level by level, and keeps their means."""

    def __init__(self, count: int, widths: Sequence[int], like: Tensor) -> None:
        self.window = like.new_zeros((count, max(widths)))
        self.level = torch.zeros(count, dtype=torch.long, device=like.device)

    def __call__(self, level: int, rows: Tensor, windows: Tensor, inside: Tensor) -> None:
        self.window[rows, : windows.shape[1]] = pool_windows(windows, inside)
        self.level[rows] = level


@dataclass(frozen=True)
class Whitening:
    """Unit vectors less their mean (C,), times the Cholesky factor (C, C) of their inverse covariance."""

    mean: Tensor
    factor: Tensor

    def __call__(self, vectors: Tensor) -> Tensor:
        """(N, C), of mean square 1 where vectors (N, C) are like those fitted on."""
        length = library_of(vectors).sqrt((vectors * vectors).sum(1))[:, None]
        return (vectors / at_least(length, 1e-12) - self.mean) @ self.factor


@dataclass(frozen=True)
class Novelty:
    """Everything fitted, L levels of widths C: tensors, or arrays, which take arrays and give them back.

    windows and images: a whitening per level, images shared by the levels. weights (2, D'): of the logistic
    functions "unreliable" and "changed" over ``inputs``. centre and scale (L, 4): of ``COMPONENTS`` on clean
    detections. image_weights (D + 1,), image_centre and image_scale (2,): the same for a whole image. known (n,
    2): scores and values of calibration detections, by rising value; known_images (m,): rising values of
    calibration images. knots and widening (j,): values, and the factors of covariance from each on.
    """

    windows: tuple[Whitening, ...]
    images: tuple[Whitening, ...]
    odds_centre: Tensor
    odds_scale: Tensor
    weights: Tensor
    centre: Tensor
    scale: Tensor
    image_weights: Tensor
    image_centre: Tensor
    image_scale: Tensor
    known: Tensor
    known_images: Tensor
    knots: Tensor
    widening: Tensor

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of every level."""
        return tuple(len(one.mean) for one in self.windows)

    def components(self, evidence: Evidence, white: Tensor | None = None) -> Tensor:
        """Log distances and log-odds (N, 4), in the order of ``COMPONENTS``, as they come."""
        inputs, window, image = self.inputs(evidence, white)
        odds = inputs @ self.weights.T
        found: Tensor = joined([window[:, None], image[:, None], odds], 1)
        return found

    def inputs(self, evidence: Evidence, white: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """What the logistic functions take (N, D'), and the log distances of window and image (N,).

        white (N, D): the image vectors ``whitened``, where that has been done.
        """
        numbers = range(len(self.windows))
        levels = converted(joined([(evidence.level == number)[:, None] for number in numbers], 1), "float32")
        window = self._whitened_windows(evidence.window, levels)
        image = self.whitened(evidence.image) if white is None else white
        odds = (evidence.odds - self.odds_centre) / self.odds_scale
        # Distances have as many terms as channels: each side is given the weight of a few numbers.
        weight = (8 / image.shape[1]) ** 0.5
        inputs: Tensor = joined([window * weight, image * weight, odds, levels], 1)
        return inputs, _log_distance(window), _log_distance(image)

    def _whitened_windows(self, windows: Tensor, levels: Tensor) -> Tensor:
        """Windows (N, C) whitened as of every level, side by side; zero but for their own of levels (N, L)."""
        parts = []
        for level, (width, whitening) in enumerate(zip(self.widths, self.windows, strict=True)):
            part, own = windows[:, :width], levels[:, level : level + 1]
            # An array is of a few detections, which seldom are of all levels.
            idle = isinstance(own, np.ndarray) and not own.any()
            parts.append(0 * part if idle else whitening(part) * own)
        found: Tensor = joined(parts, 1)
        return found

    def whitened(self, vectors: Tensor) -> Tensor:
        """Image vectors (B, D), level by level of mean square 1 where they are like those fitted on."""
        parts, begin = [], 0
        for one, width in zip(self.images, self.widths, strict=True):
            parts.append(one(vectors[:, begin : begin + width]))
            begin += width
        found: Tensor = joined(parts, 1)
        return found

    def value(self, evidence: Evidence, white: Tensor | None = None) -> Tensor:
        """One number (N,) for each detection, larger for what is more unlike; white as for ``inputs``."""
        unit = (self.components(evidence, white) - self.centre[evidence.level]) / self.scale[evidence.level]
        return combined_distance(unit)

    def image_components(self, vectors: Tensor, white: Tensor | None = None) -> Tensor:
        """Log distance and log-odds of being changed (B, 2) of image vectors (B, D); white as for ``inputs``."""
        white = self.whitened(vectors) if white is None else white
        weight = (8 / white.shape[1]) ** 0.5
        odds = (white * weight) @ self.image_weights[:-1] + self.image_weights[-1]
        found: Tensor = stacked([_log_distance(white), odds])
        return found

    def image_value(self, vectors: Tensor, white: Tensor | None = None) -> Tensor:
        """One number (B,) for each image, larger for what is more unlike; white as for ``inputs``."""
        return combined_distance((self.image_components(vectors, white) - self.image_centre) / self.image_scale)

    def p_value(self, value: Tensor, conf: float) -> Tensor:
        """Conformal p-values (N,) among calibration detections of at least the confidence asked for."""
        return _share_beyond(self.known[:, 1][self.known[:, 0] >= conf], value)

    def image_p_value(self, value: Tensor) -> Tensor:
        """Conformal p-values (B,) among calibration images."""
        return _share_beyond(self.known_images, value)

    def widen(self, value: Tensor) -> Tensor:
        """Factors of covariance (N,), 1 or more and rising with the value (N,)."""
        place = library_of(value).searchsorted(self.knots, value, side="right") - 1
        found: Tensor = library_of(value).where(place >= 0, self.widening[at_least(place, 0)], 1.0)
        return found

    def to(self, device: torch.device) -> Novelty:
        """The same on another device."""
        return Novelty.from_tensors({name: value.to(device) for name, value in self.to_tensors().items()})

    def as_arrays(self) -> Novelty:
        """The same as arrays, which takes less time for a few detections."""

        def change(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(Whitening(change(one.mean), change(one.factor)) for one in value)
            return as_array(value)

        return Novelty(**{field.name: change(getattr(self, field.name)) for field in fields(self)})

    def to_tensors(self) -> dict[str, Tensor]:
        """By name; of a symmetric problem's triangular factors only the triangle."""
        tensors: dict[str, Tensor] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                for level, one in enumerate(value):
                    rows, columns = torch.tril_indices(len(one.mean), len(one.mean))
                    tensors[f"{field.name}.{level}.mean"] = one.mean
                    tensors[f"{field.name}.{level}.factor"] = one.factor[rows, columns]
            else:
                tensors[field.name] = value
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Novelty:
        """What ``to_tensors`` gave; KeyError or ValueError where something is missing or not finite."""
        if any(not torch.isfinite(value).all() for value in tensors.values()):
            raise ValueError("values that are not finite")
        levels = sum(name.startswith("windows.") and name.endswith(".mean") for name in tensors)
        values: dict[str, Any] = {
            name: tuple(_whitening(tensors, f"{name}.{level}") for level in range(levels))
            for name in ("windows", "images")
        }
        values |= {field.name: tensors[field.name].float() for field in fields(cls) if field.name not in values}
        return cls(**values)


def _whitening(tensors: Mapping[str, Tensor], name: str) -> Whitening:
    mean, packed = tensors[f"{name}.mean"].float(), tensors[f"{name}.factor"].float()
    factor = packed.new_zeros((len(mean), len(mean)))
    rows, columns = torch.tril_indices(len(mean), len(mean), device=packed.device)
    factor[rows, columns] = packed
    return Whitening(mean, factor)


def _log_distance(white: Tensor) -> Tensor:
    """Logarithm of 1 + the squared lengths (N,) of vectors (N, C)."""
    found: Tensor = library_of(white).log1p((white * white).sum(1))
    return found


def combined_distance(unit: Tensor) -> Tensor:
    """Standardised components (N, c) as one number: their sum."""
    return unit.sum(1)


def _share_beyond(known: Tensor, value: Tensor) -> Tensor:
    """(1 + how many of the known values (n,), rising, are as large) / (1 + n)."""
    below = library_of(known).searchsorted(known, value, side="left")
    found: Tensor = converted(1 + len(known) - below, "float64") / (1 + len(known))
    return found
