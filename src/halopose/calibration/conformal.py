"""Conformal regions: radii with a coverage guarantee for any distribution.

Keypoints of one image are dependent, so images are the samples. With n images the scores of an image share the weight
1 / (n + 1), and the last share lies at infinity. The radius is a quantile of this distribution (hierarchical conformal
prediction). A random keypoint of a new image is then in its region with at least the stated probability, on average
over calibrations. Conditions: the new image is exchangeable with those of calibration, and the detection matches an
object.
Distances are taken under the dispersion before calibration, so values fitted on the same images do not enter.
"""

from __future__ import annotations

import numpy as np

from halopose.errors import HaloposeError
from halopose.sorting import rising_order, whole_order
from halopose.types import Array
from halopose.uncertainty.missing_keypoints import rising_places
from halopose.uncertainty.regions import PROBABILITIES, SLACK, Regions

MIN_IMAGES = 50  # a keypoint on fewer images takes the radii of all keypoints pooled


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
    """Fit radii on squared distances of labelled keypoints.

    Args:
        distance: squared distances (M, K).
        labelled: which keypoints (M, K) are labelled.
        image_ids: images (M,).
        keep: which keypoints (M, K) pruning keeps.
        area: areas (M,) of the predicted boxes, for separate radii by object scale.
        edges: areas between the scales.
        area_factor: object area divided by box area.
        places: places (n,) of the labelled keypoints by rising distance, if known.
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
    """Return radii (K, P) from rising scores (n,) of keypoints (n,) on images (n,), and the number of images (K,) of
    each.

    ``everything`` (P,) are radii of more data, used where images are few.
    """
    pooled = _rising_quantiles(scores, image)[0]
    pooled = pooled if everything is None else np.where(np.isfinite(pooled), pooled, everything)
    order = whole_order(keypoint)
    bounds = np.cumsum(np.bincount(keypoint, minlength=keypoints))[:-1]
    parts = zip(np.split(scores.take(order), bounds), np.split(image.take(order), bounds), strict=True)
    found = [_rising_quantiles(*part) for part in parts]
    own, images = np.array([radii for radii, _ in found]), np.array([seen for _, seen in found])
    enough = (images >= MIN_IMAGES)[:, None] & np.isfinite(own)
    # A region of higher probability must not be smaller where the two sets of radii meet.
    return np.maximum.accumulate(np.where(enough, own, pooled), axis=1), images


def whole_distance(distance: Array, chosen: Array, image_ids: Array) -> tuple[Array, Array]:
    """Return the largest squared distance of each object's chosen keypoints (O,), and its image (O,), for objects that
    have any.
    """
    known = chosen.any(1)
    columns = np.ascontiguousarray(np.where(chosen, distance, -np.inf).T)  # reductions over short rows are slow
    return columns.max(0, initial=-np.inf)[known], image_ids[known]


def hierarchical_quantiles(scores: Array, image_ids: Array, probabilities: Array = PROBABILITIES) -> Array:
    """Return conformal quantiles (P,) of scores (n,) with equal weight for images (n,); inf if images are too few."""
    return _quantiles(scores, np.unique(image_ids, return_inverse=True)[1], probabilities)[0]


def _quantiles(scores: Array, image: Array, probabilities: Array = PROBABILITIES) -> tuple[Array, int]:
    """Return ``hierarchical_quantiles`` (P,) by the number of the image (n,), and the number of images with scores."""
    order = rising_order(scores)
    return _rising_quantiles(scores.take(order), image.take(order), probabilities)


def _rising_quantiles(scores: Array, image: Array, probabilities: Array = PROBABILITIES) -> tuple[Array, int]:
    """Return ``_quantiles`` of sorted scores (n,)."""
    count = np.bincount(image)
    images = int(np.count_nonzero(count))
    with np.errstate(divide="ignore"):
        weight = 1 / (count * (images + 1))
    place = np.searchsorted(np.cumsum(weight.take(image)), np.asarray(probabilities) - SLACK)
    return np.append(scores, np.inf)[place], images
