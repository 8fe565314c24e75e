"""Boxes: corners (..., 4) x1 y1 x2 y2, and COCO's corner with sides, x y w h."""

from __future__ import annotations

import numpy as np

from halopose.types import Array


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


__all__ = ["box_area", "xywh_to_xyxy", "xyxy_to_xywh"]
