"""Regions with a guarantee that needs no law: conformal radii, fitted on images that nothing else was fitted on.

In: squared Mahalanobis distances (M, K) of labelled keypoints under a dispersion fixed beforehand, and their
images. Out: ``Regions``, squared radii by keypoint and probability, and of all keypoints of an object together.

Keypoints of one image depend on each other, so images are the samples. With n images the scores of an image share
the weight 1 / (n + 1), the last share lies at infinity, and the radius is the quantile of what results
(hierarchical conformal prediction). Then a keypoint taken at random from a new image lies in its region with at
least the stated probability, on average over calibrations, whatever its distribution, if the new image is like
those of calibration and the detection matches an object. The distance is under the dispersion before calibration:
temperatures and degrees of freedom, which were fitted on the same images, are not in it, and every law of a
keypoint has the same region.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from halopose.calibration.missing_keypoints import rising_places
from halopose.errors import HaloposeError
from halopose.sorting import rising_order, whole_order
from halopose.types import Array

PROBABILITIES = np.array([*(percent / 100 for percent in range(1, 100)), 0.995, 0.999])
CONDITION = "a detection that matches an object, on images like those of calibration"
MIN_IMAGES = 50  # a keypoint on fewer takes the radii of all keypoints together
_SLACK = 1e-9  # of sums of weights that are equal to a probability but for rounding


@dataclass(frozen=True)
class Regions:
    """Squared radii at ``PROBABILITIES``, in units of the dispersion before calibration; inf where none is known.

    keypoint (S, K, P) by object scale; whole (P,): all keypoints of an object together, whole_kept (P,): those
    that pruning keeps. images (S, K): how many images a keypoint was seen on; those under ``MIN_IMAGES`` have the
    radii of all keypoints together. edges (S - 1,): areas that part the scales, of predicted boxes times
    ``area_factor``.

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
        """Squared radii (S, K) of each keypoint's region."""
        return _finite(self.at(self.keypoint, probability), probability)

    def whole_radius(self, probability: float, kept: bool = False) -> float:
        """The squared radius of the regions that hold all keypoints of an object together, or those kept."""
        return float(_finite(self.at(self.whole_kept if kept else self.whole, probability), probability))

    def of_objects(self, probability: float, area: Array) -> Array:
        """Squared radii (N, K) for objects with predicted boxes of these areas (N,)."""
        return np.asarray(self.radius(probability)[self.scale_of(area)])

    def scale_of(self, area: Array) -> Array:
        """Which scale (N,) objects with predicted boxes of these areas (N,) are of."""
        return np.searchsorted(np.asarray(self.edges, dtype=float), area * self.area_factor, side="left")

    @staticmethod
    def at(table: Array, probability: float) -> Array:
        """A table's values at the next higher of its probabilities, so never less; inf where unknown."""
        if not 0 < probability < 1:
            raise HaloposeError(f"a region's probability lies between 0 and 1, got {probability}")
        place = int(np.searchsorted(PROBABILITIES, probability - _SLACK))
        return table[..., place] if place < len(PROBABILITIES) else np.full(table.shape[:-1], np.inf)

    def to_json(self) -> dict[str, Any]:
        """Plain json content; what is infinite becomes null."""
        tables = {name: _nulled(getattr(self, name)) for name in ("keypoint", "whole", "whole_kept")}
        rest = {"images": self.images.tolist(), "edges": list(self.edges), "area_factor": self.area_factor}
        return {**tables, **rest}

    @classmethod
    def from_json(cls, content: Any, keypoints: int) -> Regions:
        """The inverse of ``to_json``; a ValueError, KeyError or TypeError if the content is not that."""
        edges = tuple(float(edge) for edge in content["edges"])
        shape = (len(edges) + 1, keypoints, len(PROBABILITIES))
        whole, kept = (_table(content[name], shape[2:]) for name in ("whole", "whole_kept"))
        images = np.asarray(content["images"], dtype=np.int64)
        if images.shape != shape[:2] or list(edges) != sorted(edges):
            raise ValueError("images or edges do not fit the table of radii")
        factor = float(content["area_factor"])
        return cls(_table(content["keypoint"], shape), whole, kept, images, edges, factor)


def fit_regions(
    distance: Array,
    labelled: Array,
    image_ids: Array,
    *,
    keep: Array | None = None,
    area: Array | None = None,
    edges: tuple[float, ...] = (),
    area_factor: float = 1.0,
    places: Array | None = None,
) -> Regions:
    """Radii from squared distances (M, K) of labelled keypoints (M, K) on images (M,).

    keep (M, K): what pruning keeps. area (M,): of the predicted boxes, for radii of their own between ``edges`` of
    area times ``area_factor``. places (n,): of the labelled ones by rising distance, if they are known already.
    """
    scale = None
    if edges:
        if area is None:
            raise HaloposeError("regions by object scale need the objects' areas")
        scale = np.searchsorted(np.asarray(edges), area * area_factor, side="left")
    places = rising_places(distance, labelled) if places is None else places
    keypoints = labelled.shape[1]
    row, keypoint = np.divmod(places, keypoints)
    image = np.unique(image_ids, return_inverse=True)[1]
    scores, images, kept = (
        distance.reshape(-1).take(places),
        image.take(row),
        labelled if keep is None else labelled & keep,
    )
    everything = _rising_quantiles(scores, images)[0] if edges else None
    tables, counts = [], []
    for number in range(len(edges) + 1):
        chosen = slice(None) if scale is None else np.flatnonzero(scale.take(row) == number)
        part = scores[chosen], images[chosen], keypoint[chosen]
        radii, seen = _by_keypoint(*part, keypoints, everything)
        tables.append(radii)
        counts.append(seen)
    whole, whole_kept = (_quantiles(*whole_distance(distance, mask, image))[0] for mask in (labelled, kept))
    return Regions(np.array(tables), whole, whole_kept, np.array(counts), edges, area_factor)


def _by_keypoint(
    scores: Array, image: Array, keypoint: Array, keypoints: int, everything: Array | None
) -> tuple[Array, Array]:
    """Radii (K, P) from rising scores (n,) of keypoints (n,) on images (n,), and how many images (K,) each was on.

    everything: radii (P,) of more data, for where there are too few.
    """
    pooled = _rising_quantiles(scores, image)[0]
    pooled = pooled if everything is None else np.where(np.isfinite(pooled), pooled, everything)
    order = whole_order(keypoint)
    bounds = np.cumsum(np.bincount(keypoint, minlength=keypoints))[:-1]
    parts = zip(np.split(scores.take(order), bounds), np.split(image.take(order), bounds), strict=True)
    found = [_rising_quantiles(*part) for part in parts]
    own, images = np.array([radii for radii, _ in found]), np.array([seen for _, seen in found])
    enough = (images >= MIN_IMAGES)[:, None] & np.isfinite(own)
    # Where one takes over from the other a region of more probability must not be the smaller one.
    return np.maximum.accumulate(np.where(enough, own, pooled), axis=1), images


def whole_distance(distance: Array, chosen: Array, image_ids: Array) -> tuple[Array, Array]:
    """The largest squared distance of each object's chosen keypoints (O,), and its image (O,); none, no object."""
    known = chosen.any(1)
    columns = np.ascontiguousarray(np.where(chosen, distance, -np.inf).T)  # rows as short as these take long
    return columns.max(0, initial=-np.inf)[known], image_ids[known]


def hierarchical_quantiles(scores: Array, image_ids: Array, probabilities: Array = PROBABILITIES) -> Array:
    """Conformal quantiles (P,) of scores (n,), images (n,) counting alike; inf where images are too few."""
    return _quantiles(scores, np.unique(image_ids, return_inverse=True)[1], probabilities)[0]


def _quantiles(scores: Array, image: Array, probabilities: Array = PROBABILITIES) -> tuple[Array, int]:
    """``hierarchical_quantiles`` (P,) by the number of the image (n,), and on how many images there are scores."""
    order = rising_order(scores)
    return _rising_quantiles(scores.take(order), image.take(order), probabilities)


def _rising_quantiles(scores: Array, image: Array, probabilities: Array = PROBABILITIES) -> tuple[Array, int]:
    """``_quantiles`` of scores (n,) that rise already."""
    count = np.bincount(image)
    images = int(np.count_nonzero(count))
    with np.errstate(divide="ignore"):
        weight = 1 / (count * (images + 1))
    place = np.searchsorted(np.cumsum(weight.take(image)), np.asarray(probabilities) - _SLACK)
    return np.append(scores, np.inf)[place], images


def _finite(radii: Array, probability: float) -> Array:
    if np.isfinite(radii).all():
        return np.asarray(radii)
    raise HaloposeError(
        f"the calibration has too few images for regions of {probability:g}: that takes "
        f"{np.ceil(probability / (1 - probability) - _SLACK):.0f} or more in which a detection matches; "
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
