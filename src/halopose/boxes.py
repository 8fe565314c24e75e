"""Boxes: corners (..., 4) x1 y1 x2 y2, and COCO's corner with sides, x y w h."""

from __future__ import annotations

import numpy as np

from halopose.types import Array

PART_ROOM = 1.6  # sides of the part of an image over those of the box in it
PART_ASPECT = 0.6  # height over width of the part, as the synthetic world's camera has it


def xyxy_to_xywh(boxes: Array) -> Array:
    """COCO's form of boxes given by two corners."""
    return np.concatenate([boxes[..., :2], boxes[..., 2:] - boxes[..., :2]], axis=-1)


def xywh_to_xyxy(boxes: Array) -> Array:
    """Two corners of boxes in COCO's form."""
    return np.concatenate([boxes[..., :2], boxes[..., :2] + boxes[..., 2:]], axis=-1)


def box_area(boxes: Array) -> Array:
    """Area (...) of boxes given by two corners (..., 4); at least one pixel, so that it may divide."""
    sides = boxes[..., 2:] - boxes[..., :2]
    return np.asarray(np.maximum(sides[..., 0] * sides[..., 1], 1.0))


def intersection_over_union(first: Array, second: Array) -> Array:
    """IoU (...) of boxes given by two corners (..., 4), pair by pair; 0 where both are empty."""
    low, high = np.maximum(first[..., :2], second[..., :2]), np.minimum(first[..., 2:], second[..., 2:])
    shared = np.maximum(high - low, 0.0).prod(-1)
    sizes = [np.maximum(boxes[..., 2:] - boxes[..., :2], 0.0).prod(-1) for boxes in (first, second)]
    union = sizes[0] + sizes[1] - shared
    return np.asarray(np.divide(shared, union, out=np.zeros_like(union, dtype=float), where=union > 0))


def part_around(box: Array, width: int, height: int, size: int) -> tuple[int, int, int, int]:
    """Left, top, right, bottom of the part around a box (4,) xyxy: ``size`` wide, or as the box needs."""
    centre, extent = (box[:2] + box[2:]) / 2, box[2:] - box[:2]
    wide = max(float(size), PART_ROOM * float(extent[0]), PART_ROOM * float(extent[1]) / PART_ASPECT)
    sides = np.minimum([round(wide), round(wide * PART_ASPECT)], [width, height]).astype(int)
    corner = np.clip(np.rint(centre - sides / 2), 0, np.array([width, height]) - sides).astype(int)
    return int(corner[0]), int(corner[1]), int(corner[0] + sides[0]), int(corner[1] + sides[1])
