"""Conformal regions of keypoints: squared radii by keypoint, object scale and probability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from halopose.errors import HaloposeError
from halopose.types import Array

PROBABILITIES = np.array([*(percent / 100 for percent in range(1, 100)), 0.995, 0.999])
CONDITION = "a detection that matches an object, on images like those of calibration"
SLACK = 1e-9  # rounding error of sums of weights


@dataclass(frozen=True)
class Regions:
    """Squared radii at ``PROBABILITIES``, in units of the dispersion before calibration; inf if unknown.

    Attributes:
        keypoint: radii (S, K, P) by object scale, keypoint and probability.
        whole: radii (P,) of the regions of all keypoints of an object together.
        whole_kept: the same (P,) for the kept keypoints.
        images: number of images (S, K) of each keypoint; below ``MIN_IMAGES`` the radii are those of all keypoints
            pooled.
        edges: areas (S - 1,) between the scales, of predicted boxes times ``area_factor``.
        area_factor: object area divided by box area.

    Example:
        >>> from halopose.calibration.conformal import fit_regions
        >>> rng = np.random.default_rng(0)
        >>> distance, image = rng.chisquare(2, (400, 3)), np.arange(400) // 2  # 200 images of two objects
        >>> regions = fit_regions(distance, np.ones((400, 3), dtype=bool), image)
        >>> regions.radius(0.9).shape, bool(3.5 < regions.radius(0.9)[0, 0] < 6.5)  # a chi-square's is 4.6
        ((1, 3), True)
    """

    keypoint: Array
    whole: Array
    whole_kept: Array
    images: Array
    edges: tuple[float, ...] = ()
    area_factor: float = 1.0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Regions):
            return NotImplemented
        names = ("keypoint", "whole", "whole_kept", "images", "edges", "area_factor")
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in names)

    __hash__ = None  # type: ignore[assignment]  # arrays inside may change

    def radius(self, probability: float) -> Array:
        """Return squared radii (S, K) of each keypoint's region."""
        return _finite(self.at(self.keypoint, probability), probability)

    def whole_radius(self, probability: float, kept: bool = False) -> float:
        """Return the squared radius of the regions that contain all keypoints of an object together, or all kept
        ones.
        """
        return float(_finite(self.at(self.whole_kept if kept else self.whole, probability), probability))

    def of_objects(self, probability: float, area: Array) -> Array:
        """Return squared radii (N, K) for objects with predicted boxes of areas (N,)."""
        return np.asarray(self.radius(probability)[self.scale_of(area)])

    def scale_of(self, area: Array) -> Array:
        """Return the scale index (N,) of objects with predicted boxes of areas (N,)."""
        return np.searchsorted(np.asarray(self.edges, dtype=float), area * self.area_factor, side="left")

    @staticmethod
    def at(table: Array, probability: float) -> Array:
        """Return a table's values at the next higher of its probabilities, never less; inf if unknown."""
        if not 0 < probability < 1:
            raise HaloposeError(f"a region's probability lies between 0 and 1, got {probability}")
        place = int(np.searchsorted(PROBABILITIES, probability - SLACK))
        return table[..., place] if place < len(PROBABILITIES) else np.full(table.shape[:-1], np.inf)

    def to_json(self) -> dict[str, Any]:
        """Return json content; infinite values become null."""
        tables = {name: _nulled(getattr(self, name)) for name in ("keypoint", "whole", "whole_kept")}
        rest = {"images": self.images.tolist(), "edges": list(self.edges), "area_factor": self.area_factor}
        return {**tables, **rest}

    @classmethod
    def from_json(cls, content: Any, keypoints: int) -> Regions:
        """Build from ``to_json``.

        Raises:
            ValueError: The content is not valid; KeyError or TypeError likewise.
        """
        edges = tuple(float(edge) for edge in content["edges"])
        shape = (len(edges) + 1, keypoints, len(PROBABILITIES))
        whole, kept = (_table(content[name], shape[2:]) for name in ("whole", "whole_kept"))
        images = np.asarray(content["images"], dtype=np.int64)
        if images.shape != shape[:2] or list(edges) != sorted(edges):
            raise ValueError("images or edges do not fit the table of radii")
        factor = float(content["area_factor"])
        return cls(_table(content["keypoint"], shape), whole, kept, images, edges, factor)


def _finite(radii: Array, probability: float) -> Array:
    if np.isfinite(radii).all():
        return np.asarray(radii)
    raise HaloposeError(
        f"the calibration has too few images for regions of {probability:g}: that takes "
        f"{np.ceil(probability / (1 - probability) - SLACK):.0f} or more in which a detection matches; "
        "ask for less, or calibrate on more"
    )


def _nulled(table: Array) -> Any:
    nothing: Any = None
    return np.where(np.isfinite(table), table.astype(object), nothing).tolist()


def _table(content: Any, shape: tuple[int, ...]) -> Array:
    table = np.array(content, dtype=float)
    table = np.where(np.isnan(table), np.inf, table)
    if table.shape != shape or (table < 0).any() or (np.diff(np.where(np.isinf(table), 1e300, table)) < 0).any():
        raise ValueError(f"expected rising radii of shape {shape}")
    return table
