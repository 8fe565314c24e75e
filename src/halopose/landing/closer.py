"""Large frames at their own resolution: a second look where the runway is.

In: a model, and frames larger than its input. Out: detections in pixels of the whole frame. A detector sees every
frame at its input's size; of a camera with three times as many pixels it throws eight of nine away. The second
look is a part of the frame, as large as the input, around the runway: where the first look found it, else where it
was in the frame before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from halopose.landing.sighting import runways_in
from halopose.poses import PoseDistributions
from halopose.predictor import UncertainPose
from halopose.types import Array

_LARGER = 1.5  # times the input's width, from which a second look is worth its time
_ROOM = 1.6  # sides of the part over those of the runway's box
_ASPECT = 0.6  # height over width of the part, as the world's camera has it


def look_closer(
    model: UncertainPose, images: Iterable[Array], *, conf: float = 0.25
) -> Iterator[PoseDistributions]:
    """Everything that looks like a runway, image by image; images that are not much larger are looked at once."""
    width, place = model.artifact.imgsz, None
    for image in images:
        whole = runways_in(model, image, conf)
        if image.shape[1] < _LARGER * width:
            yield whole
            continue
        if len(whole):
            place = whole.boxes[int(np.argmax(whole.scores))]
        found = whole if place is None else _second_look(model, image, whole, place, width, conf)
        if len(found):
            place = found.boxes[int(np.argmax(found.scores))]
        yield found


def _second_look(
    model: UncertainPose, image: Array, whole: PoseDistributions, place: Array, width: int, conf: float
) -> PoseDistributions:
    """Detections of the part around a box (4,) in place of those that lie in it, if it has any."""
    left, top, right, bottom = part_around(place, image.shape[1], image.shape[0], width)
    near = runways_in(model, np.ascontiguousarray(image[top:bottom, left:right]), conf)
    if not len(near):
        return whole
    origin = np.array([left, top], dtype=np.float64)
    near = replace(near, keypoints=near.keypoints + origin, boxes=near.boxes + np.tile(origin, 2))
    middle = whole.keypoints.mean(1)
    away = ~((middle >= origin) & (middle < (right, bottom))).all(1)
    both = PoseDistributions.concatenate([near, whole[away]]) if away.any() else near
    return replace(both, image_novelty=whole.image_novelty)


def part_around(box: Array, width: int, height: int, size: int) -> tuple[int, int, int, int]:
    """Left, top, right, bottom of the part around a box (4,) xyxy: ``size`` wide, or as the box needs."""
    centre, extent = (box[:2] + box[2:]) / 2, box[2:] - box[:2]
    wide = max(float(size), _ROOM * float(extent[0]), _ROOM * float(extent[1]) / _ASPECT)
    sides = np.minimum([round(wide), round(wide * _ASPECT)], [width, height]).astype(int)
    corner = np.clip(np.rint(centre - sides / 2), 0, np.array([width, height]) - sides).astype(int)
    return int(corner[0]), int(corner[1]), int(corner[0] + sides[0]), int(corner[1] + sides[1])


__all__ = ["look_closer", "part_around"]
