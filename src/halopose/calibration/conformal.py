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

import numpy as np

from halopose.errors import HaloposeError
from halopose.sorting import rising_order, whole_order
from halopose.types import Array
from halopose.uncertainty.missing_keypoints import rising_places
from halopose.uncertainty.regions import PROBABILITIES, SLACK, Regions

MIN_IMAGES = 50  # a keypoint on fewer takes the radii of all keypoints together


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
    place = np.searchsorted(np.cumsum(weight.take(image)), np.asarray(probabilities) - SLACK)
    return np.append(scores, np.inf)[place], images
