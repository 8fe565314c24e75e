"""Reproducible folds and splits of images that do not depend on the values of their ids."""

from __future__ import annotations

import logging

import numpy as np

from halopose.errors import HaloposeError
from halopose.types import Array

log = logging.getLogger(__name__)


def hashed_order(images: Array) -> Array:
    """Return the distinct image ids (I,) in a pseudo-random order that depends only on the ids."""
    images = np.unique(images)
    with np.errstate(over="ignore"):
        mixed = images.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.asarray(images[np.argsort(mixed ^ (mixed >> np.uint64(32)), kind="stable")])


def image_folds(image_ids: Array, folds: int) -> Array:
    """Return the fold (N,) of each image id; the distinct ids in hashed order are assigned to folds in turn."""
    order = hashed_order(image_ids)
    if len(order) < 2:
        raise HaloposeError("calibration and scoring need different images: give at least two with matches")
    by_id = np.argsort(order)
    return np.asarray(by_id[np.searchsorted(order, image_ids, sorter=by_id)] % folds)


def split_validation(images: Array, share: float) -> tuple[Array, Array]:
    """Split images (I,) into calibration and evaluation images by a hash of their ids.

    Args:
        images: Image ids (I,).
        share: Fraction of the images used for calibration.
    """
    order = hashed_order(images)
    if len(order) < 2:
        raise HaloposeError("give at least two validation images: calibration and evaluation need different ones")
    cut = min(max(1, round(share * len(order))), len(order) - 1)
    return np.sort(order[:cut]), np.sort(order[cut:])


def part_of_images(images: Array, fraction: float) -> Array:
    """Return a reproducible fraction of the images (I,), at least one."""
    if not 0 < fraction <= 1:
        raise HaloposeError(f"the fraction of images must be above 0 and at most 1, got {fraction}")
    order = hashed_order(images)
    return np.sort(order[: max(1, round(fraction * len(order)))])


def check_unseen(images: Array, seen: Array, of: str) -> None:
    """Raise a HaloposeError if most images were used in an earlier fit.

    Different datasets may share a few ids, so this only gives a warning.

    Args:
        images: Image ids (I,).
        seen: Ids of the images used before.
        of: First part of the error message: what was fitted on the images.
    """
    shared = len(np.intersect1d(images, seen))
    if 2 * shared > len(images):
        raise HaloposeError(f"{of}: give other images, or change their ids if only the ids are the same")
    if shared:
        log.warning(
            "%d of %d images have the ids of images used before: leave them out if they are the same images",
            shared,
            len(images),
        )
