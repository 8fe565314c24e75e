"""Out-of-distribution model of detections and images: distances in feature space and two logistic functions.

Input: pooled neck features of a detection and of its image, and its score. Output: conformal p-values. On data
exchangeable with the calibration data, at most a share p of the detections has a p-value of at most p.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

Area = tuple[float, float, float, float]

COMPONENTS = ("window", "image", "unreliable", "changed")


def pool_windows(windows: Tensor, inside: Tensor) -> Tensor:
    """Average windows (N, C, W, W) over their cells inside the map, which ``inside`` (N, W, W) marks: (N, C)."""
    return windows.flatten(2).sum(2) / inside.flatten(1).sum(1, keepdim=True)


def pool_images(features: Sequence[Tensor], strides: Sequence[int], areas: Sequence[Area]) -> Tensor:
    """Average the features of whole images, without the padding of the input.

    Args:
        features: Feature maps (B, C, H, W), one for each level.
        strides: Pixels per cell of each level.
        areas: Left, top, right and bottom of each image in input pixels.

    Returns:
        Mean features (B, D) of all levels, concatenated.
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
    """Input of the out-of-distribution model for N detections; independent of the heads.

    Attributes:
        level: Level (N,) of each detection.
        window: Pooled window (N, C), padded with zeros.
        image: Pooled features (N, D) of the image.
        score: Score (N,).
    """

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
        """Concatenate the detections of several images."""
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    @property
    def odds(self) -> Tensor:
        """Log-odds (N, 1) of the score."""
        share = self.score.clamp(1e-4, 1 - 1e-4)
        return torch.log(share / (1 - share))[:, None]


class Pooling:
    """Collects the mean of every window that the heads read; passed to ``ProbabilisticHeads.sparse`` as ``visit``."""

    def __init__(self, count: int, widths: Sequence[int], like: Tensor) -> None:
        self.window = like.new_zeros((count, max(widths)))
        self.level = torch.zeros(count, dtype=torch.long, device=like.device)

    def __call__(self, level: int, rows: Tensor, windows: Tensor, inside: Tensor) -> None:
        self.window[rows, : windows.shape[1]] = pool_windows(windows, inside)
        self.level[rows] = level


@dataclass(frozen=True)
class Whitening:
    """Whitening of unit vectors: subtract the mean (C,), multiply by the Cholesky factor (C, C) of the precision."""

    mean: Tensor
    factor: Tensor

    def __call__(self, vectors: Tensor) -> Tensor:
        """Whiten vectors (N, C); the mean square is 1 on the training data."""
        length = torch.sqrt((vectors * vectors).sum(1))[:, None]
        return (vectors / length.clamp_min(1e-12) - self.mean) @ self.factor


@dataclass(frozen=True)
class Novelty:
    """Fitted out-of-distribution model of a base model with L levels.

    Attributes:
        windows: Whitening of the windows of each level.
        images: Whitening of each level's part of the image features.
        odds_centre: Mean of the log-odds of the score.
        odds_scale: Standard deviation of the log-odds of the score.
        weights: Weights (2, D') of the logistic functions "unreliable" and "changed" over ``inputs``.
        centre: Mean (L, 4) of ``COMPONENTS`` on clean detections.
        scale: Standard deviation (L, 4) of ``COMPONENTS`` on clean detections.
        image_weights: Weights and bias (D + 1,) of the logistic function for a whole image.
        image_centre: Mean (2,) of the components of an image.
        image_scale: Standard deviation (2,) of the components of an image.
        known: Scores and values (n, 2) of the calibration detections, by increasing value.
        known_images: Increasing values (m,) of the calibration images.
        knots: Increasing values (j,) from which the covariance is enlarged.
        widening: Factor of the covariance (j,) from each knot on.
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
        """Channels of each level."""
        return tuple(len(one.mean) for one in self.windows)

    def components(self, evidence: Evidence, white: Tensor | None = None) -> Tensor:
        """Compute log distances and log-odds (N, 4), in the order of ``COMPONENTS``, not standardised."""
        inputs, window, image = self.inputs(evidence, white)
        odds = inputs @ self.weights.T
        return torch.cat([window[:, None], image[:, None], odds], 1)

    def inputs(self, evidence: Evidence, white: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the inputs of the logistic functions.

        Args:
            evidence: N detections.
            white: Image features (N, D) after ``whitened``; computed if not given.

        Returns:
            Inputs (N, D'), and the log distances (N,) of window and image.
        """
        numbers = range(len(self.windows))
        levels = torch.cat([(evidence.level == number)[:, None] for number in numbers], 1).float()
        window = self._whitened_windows(evidence.window, levels)
        image = self.whitened(evidence.image) if white is None else white
        odds = (evidence.odds - self.odds_centre) / self.odds_scale
        # A distance sums over all channels: scale each part to the weight of a few numbers.
        weight = (8 / image.shape[1]) ** 0.5
        inputs = torch.cat([window * weight, image * weight, odds, levels], 1)
        return inputs, _log_distance(window), _log_distance(image)

    def _whitened_windows(self, windows: Tensor, levels: Tensor) -> Tensor:
        """Whitened windows, one block of columns for each level; zero except in the block of the detection's level.

        Args:
            windows: Pooled windows (N, C).
            levels: One-hot level (N, L).
        """
        parts = []
        for level, (width, whitening) in enumerate(zip(self.widths, self.windows, strict=True)):
            parts.append(whitening(windows[:, :width]) * levels[:, level : level + 1])
        return torch.cat(parts, 1)

    def whitened(self, vectors: Tensor) -> Tensor:
        """Whiten image features (B, D) level by level."""
        parts, begin = [], 0
        for one, width in zip(self.images, self.widths, strict=True):
            parts.append(one(vectors[:, begin : begin + width]))
            begin += width
        return torch.cat(parts, 1)

    def value(self, evidence: Evidence, white: Tensor | None = None) -> Tensor:
        """Score detections (N,): larger means further out of distribution. ``white`` is that of ``inputs``."""
        unit = (self.components(evidence, white) - self.centre[evidence.level]) / self.scale[evidence.level]
        return combined_distance(unit)

    def image_components(self, vectors: Tensor, white: Tensor | None = None) -> Tensor:
        """Compute log distance and log-odds of a corruption (B, 2) from image features (B, D)."""
        white = self.whitened(vectors) if white is None else white
        weight = (8 / white.shape[1]) ** 0.5
        odds = (white * weight) @ self.image_weights[:-1] + self.image_weights[-1]
        return torch.stack([_log_distance(white), odds], -1)

    def image_value(self, vectors: Tensor, white: Tensor | None = None) -> Tensor:
        """Score images (B,): larger means further out of distribution. ``white`` is that of ``inputs``."""
        return combined_distance((self.image_components(vectors, white) - self.image_centre) / self.image_scale)

    def p_value(self, value: Tensor, conf: float) -> Tensor:
        """Compute conformal p-values (N,) among the calibration detections with a score of at least ``conf``."""
        return _share_beyond(self.known[:, 1][self.known[:, 0] >= conf], value)

    def image_p_value(self, value: Tensor) -> Tensor:
        """Compute conformal p-values (B,) among the calibration images."""
        return _share_beyond(self.known_images, value)

    def widen(self, value: Tensor) -> Tensor:
        """Compute factors (N,) of the covariance, at least 1 and increasing with the value (N,)."""
        place = torch.searchsorted(self.knots, value, side="right") - 1
        return torch.where(place >= 0, self.widening[place.clamp_min(0)], 1.0)

    def to(self, device: torch.device) -> Novelty:
        """Copy the model to another device."""
        return Novelty.from_tensors({name: value.to(device) for name, value in self.to_tensors().items()})

    def to_tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name; of triangular factors only the triangle."""
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
        """Restore the model from ``to_tensors``.

        Raises:
            KeyError: A tensor is missing.
            ValueError: A value is not finite.
        """
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
    """Logarithm of 1 + the squared length (N,) of vectors (N, C)."""
    return torch.log1p((white * white).sum(1))


def combined_distance(unit: Tensor) -> Tensor:
    """Combine standardised components (N, c) into one number (N,): their sum."""
    return unit.sum(1)


def _share_beyond(known: Tensor, value: Tensor) -> Tensor:
    """Conformal p-value: (1 + number of known values at least as large) / (1 + n), of increasing known values (n,)."""
    below = torch.searchsorted(known, value, side="left")
    return (1 + len(known) - below).double() / (1 + len(known))
