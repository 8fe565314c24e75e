"""Boxes in the forms xyxy (two corners) and xywh (corner and sides, as in COCO)."""

from __future__ import annotations

import numpy as np

from halopose.types import Array

PART_ROOM = 1.6  # sides of an image crop divided by the sides of the box in it
PART_ASPECT = 0.6  # height divided by width of a crop, as of the simulated camera


def xyxy_to_xywh(boxes: Array) -> Array:
    """Convert boxes (..., 4) from two corners to COCO's form."""
    return np.concatenate([boxes[..., :2], boxes[..., 2:] - boxes[..., :2]], axis=-1)


def xywh_to_xyxy(boxes: Array) -> Array:
    """Convert boxes (..., 4) from COCO's form to two corners."""
    return np.concatenate([boxes[..., :2], boxes[..., :2] + boxes[..., 2:]], axis=-1)


def box_area(boxes: Array) -> Array:
    """Return the area (...) of boxes xyxy (..., 4), at least 1 to avoid divisions by zero."""
    sides = boxes[..., 2:] - boxes[..., :2]
    return np.asarray(np.maximum(sides[..., 0] * sides[..., 1], 1.0))


def intersection_over_union(first: Array, second: Array) -> Array:
    """Return the IoU (...) of pairs of boxes xyxy (..., 4); 0 if both are empty."""
    low, high = np.maximum(first[..., :2], second[..., :2]), np.minimum(first[..., 2:], second[..., 2:])
    shared = np.maximum(high - low, 0.0).prod(-1)
    sizes = [np.maximum(boxes[..., 2:] - boxes[..., :2], 0.0).prod(-1) for boxes in (first, second)]
    union = sizes[0] + sizes[1] - shared
    return np.asarray(np.divide(shared, union, out=np.zeros_like(union, dtype=float), where=union > 0))


def part_around(box: Array, width: int, height: int, size: int) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of the image crop around a box.

    Args:
        box: Box xyxy (4,).
        width: Image width.
        height: Image height.
        size: Width of the crop; it is larger if the box needs it.
    """
    centre, extent = (box[:2] + box[2:]) / 2, box[2:] - box[:2]
    wide = max(float(size), PART_ROOM * float(extent[0]), PART_ROOM * float(extent[1]) / PART_ASPECT)
    sides = np.minimum([round(wide), round(wide * PART_ASPECT)], [width, height]).astype(int)
    corner = np.clip(np.rint(centre - sides / 2), 0, np.array([width, height]) - sides).astype(int)
    return int(corner[0]), int(corner[1]), int(corner[0] + sides[0]), int(corner[1] + sides[1])
