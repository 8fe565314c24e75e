"""What calibration fits: squared Mahalanobis distances with weights, and how they are read fast."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from halopose.arrays import as_array
from halopose.errors import HaloposeError
from halopose.types import Array
from halopose.uncertainty.distributions import Gaussian

_CHUNK = 8192  # rows that stay in the cache during a pass
_WIDTH = 1024  # numbers side by side
_SIZE = 128 * _WIDTH  # numbers that stay in the cache during a pass
_LARGEST_FACTOR = 1e18  # of 2^4 that are multiplied, and one over the least, so that their product stays finite
_LEAST_RATIO = 1e-3  # on average, of distances to lam: below it lam + m loses digits of m
TINY = 1e-300

Block = tuple[Array, Array | None]  # distances and weights


@dataclass(frozen=True)
class Sample:
    """Squared Mahalanobis distances (N, K) under the uncalibrated dispersion, and their weights (N, K)."""

    mahalanobis: Tensor
    weight: Tensor

    @classmethod
    def of(
        cls,
        residual: Tensor,
        scale_tril: Tensor,
        labelled: Tensor | None = None,
        sample_weight: Tensor | None = None,
    ) -> Sample:
        """Measure residuals (N, K, 2) under factors (N, K, 2, 2); weights are (N,) or (N, K)."""
        if residual.shape[-1] != 2 or scale_tril.shape != (*residual.shape, 2) or residual.ndim != 3:
            raise HaloposeError(
                "calibration takes residuals (N, K, 2) and factors (N, K, 2, 2), "
                f"got {tuple(residual.shape)} and {tuple(scale_tril.shape)}"
            )
        rows, keypoints = residual.shape[:2]
        _check_shape("labelled", labelled, [(rows, keypoints)])
        _check_shape("sample weights", sample_weight, [(rows,), (rows, keypoints)])
        weight = torch.ones((rows, keypoints), dtype=torch.float64, device=residual.device)
        if sample_weight is not None:
            if not bool((torch.isfinite(sample_weight) & (sample_weight >= 0)).all()):
                raise HaloposeError("sample weights must be finite and not negative")
            weight = weight * (sample_weight[:, None] if sample_weight.ndim == 1 else sample_weight)
        return cls._of_labelled(Gaussian(scale_tril.double()).mahalanobis(residual.double()), labelled, weight)

    @classmethod
    def of_distances(cls, mahalanobis: Tensor, labelled: Tensor) -> Sample:
        """Squared distances (N, K) of labelled keypoints (N, K), each of weight 1."""
        return cls._of_labelled(mahalanobis, labelled, torch.ones_like(mahalanobis))

    @classmethod
    def _of_labelled(cls, mahalanobis: Tensor, labelled: Tensor | None, weight: Tensor) -> Sample:
        if labelled is not None:
            weight = weight * labelled
            mahalanobis = torch.where(labelled, mahalanobis, 0.0)
        if not bool(torch.isfinite(mahalanobis).all()):
            raise HaloposeError("residuals or dispersions are not finite; remove those detections first")
        return cls(mahalanobis, weight)

    @cached_property
    def even(self) -> bool:
        """Whether all weights are 1."""
        return bool((self.weight == 1).all())

    @cached_property
    def plain(self) -> bool:
        """Whether all weights are 1, or 0 at a distance of 0: then sums need no weights."""
        return self.even or bool(((self.weight == 1) | ((self.weight == 0) & (self.mahalanobis == 0))).all())

    @cached_property
    def largest(self) -> Tensor:
        """The largest squared distance (K,)."""
        return self.mahalanobis.amax(0)

    def multiplies(self, scale: Array) -> bool:
        """Whether logarithms of scale (..., K) + distances can be of products of sixteen, unweighed.

        These must stay finite, and distances must not be lost beside the scale.
        """
        if not self.plain:
            return False
        largest, mean = as_array(self.largest), as_array(self.mean)
        finite = (scale > 1 / _LARGEST_FACTOR) & (scale + largest < _LARGEST_FACTOR)
        return bool((finite & (mean > _LEAST_RATIO * scale)).all())

    @cached_property
    def total(self) -> Tensor:
        """Sum of the weights (K,)."""
        if self.even:
            rows, keypoints = self.weight.shape
            return self.weight.new_full((keypoints,), max(rows, TINY))
        return self.weight.sum(0).clamp_min(TINY)

    @cached_property
    def mean(self) -> Tensor:
        """Mean (K,) of the squared distances."""
        rows = self.mahalanobis if self.plain else self.weight * self.mahalanobis
        return (rows.sum(0) / self.total).clamp_min(TINY)

    @cached_property
    def lowest(self) -> Array:
        """log lam (K,) below which the NLL can only fall as lam grows."""
        distance, weight = as_array(self.mahalanobis), as_array(self.weight)
        least = distance.min(0)
        if not self.plain or (least <= 0).any():
            least = np.full_like(least, np.inf)
            for begin in range(0, len(distance), _CHUNK):
                rows = distance[begin : begin + _CHUNK]
                positive = rows > 0 if self.plain else (rows > 0) & (weight[begin : begin + _CHUNK] > 0)
                least = np.minimum(least, np.where(positive, rows, np.inf).min(0))
        return np.log(np.minimum(np.maximum(least, TINY), 1.0)) - 7

    def thinned(self, stride: int) -> Sample:
        """Every so many-th row. What tells how sums may be made, the mean and the largest, remain those of all."""
        if stride == 1:
            return self
        thin = Sample(self.mahalanobis[::stride].contiguous(), self.weight[::stride])
        vars(thin).update(even=self.even, plain=self.plain, mean=self.mean, largest=self.largest)
        return thin

    def at(self, rows: Tensor) -> Sample:
        """Some of the rows."""
        part = Sample(self.mahalanobis.index_select(0, rows), self.weight.index_select(0, rows))
        vars(part).update({name: True for name in ("even", "plain") if getattr(self, name)})
        return part

    def columns(self, keypoints: Array) -> Sample:
        """Some of the keypoints."""
        if len(keypoints) == self.mahalanobis.shape[1]:
            return self
        distance = _taken(self.mahalanobis, keypoints)
        # Nobody reads plain weights, whose total is known.
        weight = distance.new_ones(()).expand_as(distance) if self.plain else _taken(self.weight, keypoints)
        part = Sample(distance, weight)
        known = {name: getattr(self, name)[keypoints] for name in ("largest", "total", "mean")}
        vars(part).update(even=self.even, plain=self.plain, **known)
        return part

    @cached_property
    def wide(self) -> list[Block]:
        """Distances, and weights unless all are 1: several rows side by side (n, several * K), and the rest.

        Numpy takes long to start anew for every row of some keypoints.
        """
        distance = as_array(self.mahalanobis)
        weight = None if self.plain else as_array(self.weight)
        several = max(1, _WIDTH // distance.shape[1])
        whole = len(distance) // several * several
        bounds = [(0, whole, several), (whole, len(distance), 1)]
        return [
            (_wide(distance[begin:end], times), None if weight is None else _wide(weight[begin:end], times))
            for begin, end, times in bounds
            if begin < end
        ]

    @cached_property
    def blocks(self) -> list[Block]:
        """What is wide in blocks that stay in the cache."""
        return [
            (distance[begin : begin + height], None if weight is None else weight[begin : begin + height])
            for distance, weight in self.wide
            for height in [max(1, _SIZE // distance.shape[1])]
            for begin in range(0, len(distance), height)
        ]

    def pooled(self) -> Sample:
        """All keypoints as one (N * K, 1)."""
        return Sample(self.mahalanobis.reshape(-1, 1), self.weight.reshape(-1, 1))

    @property
    def effective(self) -> Tensor:
        """Kish's effective sample size of each keypoint (K,)."""
        total = self.weight.sum(0)
        return torch.where(total > 0, total.square() / self.weight.square().sum(0).clamp_min(TINY), 0.0)


def _taken(values: Tensor, columns: Array) -> Tensor:
    """Some columns of values (N, K), which numpy takes in a fifth of torch's time."""
    return torch.from_numpy(np.take(as_array(values), columns, 1)).to(values.device)


def _wide(rows: Array, several: int) -> Array:
    """Rows (n, K) side by side, (n / several, several * K)."""
    return rows.reshape(len(rows) // several, several * rows.shape[1])


def _check_shape(name: str, value: Tensor | None, allowed: list[tuple[int, ...]]) -> None:
    if value is not None and tuple(value.shape) not in allowed:
        expected = " or ".join(str(shape) for shape in allowed)
        raise HaloposeError(f"{name} should have shape {expected}, got {tuple(value.shape)}")
