"""Large frames at their own resolution: a second look where the runway is.

In: a model, and frames larger than its input. Out: detections in pixels of the whole frame. A detector sees every
frame at its input's size; of a camera with three times as many pixels it throws eight of nine away. The second
look is a part of the frame, as large as the input, around the runway: where the first look found it or a filter
expects it, else where it was in the frame before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from halopose.boxes import part_around
from halopose.landing.association import Viewpoint, detect_in_image
from halopose.poses import PoseDistributions
from halopose.prediction.predictor import Predictor
from halopose.types import Array

_LARGER = 1.5  # times the input's width, from which a second look is worth its time
_SIGMAS = 2.0  # by which a box holds more than the corners where a filter expects them


def refine_with_roi(model: Predictor, images: Iterable[Array], *, conf: float = 0.25) -> Iterator[PoseDistributions]:
    """Everything that looks like a runway, image by image; images that are not much larger are looked at once."""
    closer = RoiRefiner(model, conf)
    for image in images:
        yield closer.look(image, detect_in_image(model, image, conf))


class RoiRefiner:
    """Second looks at frames, one after the other."""

    def __init__(self, model: Predictor, conf: float) -> None:
        self.model, self.conf = model, conf
        self.scenario: Array | None = None  # the runway's box in the frame before

    def look(self, image: Array, whole: PoseDistributions, expected: Array | None = None) -> PoseDistributions:
        """Detections of the whole image, those of a part in place of the ones in it.

        expected: the box (4,) where the runway should be, by a filter; None if nobody knows.
        """
        if image.shape[1] < _LARGER * self.model.imgsz:
            return whole
        self.scenario = _place(whole, expected, self.scenario)
        found = whole if self.scenario is None else self._part(image, whole, self.scenario)
        self.scenario = _place(found, expected, self.scenario)
        return found

    def _part(self, image: Array, whole: PoseDistributions, place: Array) -> PoseDistributions:
        """Detections of the part around a box (4,) in place of those that lie in it, if it has any."""
        size = self.model.imgsz
        left, top, right, bottom = part_around(place, image.shape[1], image.shape[0], size)
        near = detect_in_image(self.model, np.ascontiguousarray(image[top:bottom, left:right]), self.conf)
        if not len(near):
            return whole
        origin = np.array([left, top], dtype=np.float64)
        near = replace(near, keypoints=near.keypoints + origin, boxes=near.boxes + np.tile(origin, 2))
        middle = whole.keypoints.mean(1)
        away = ~((middle >= origin) & (middle < (right, bottom))).all(1)
        both = PoseDistributions.concatenate([near, whole[away]]) if away.any() else near
        return replace(both, image_novelty=whole.image_novelty)


def _place(found: PoseDistributions, expected: Array | None, before: Array | None) -> Array | None:
    """The box (4,) of the likeliest detection where it is expected; else the one expected, or that before."""
    if expected is not None:
        middle = found.keypoints.mean(1)
        found = found[((middle >= expected[:2]) & (middle <= expected[2:])).all(1)]
    if len(found):
        return np.asarray(found.boxes[int(np.argmax(found.scores))])
    return before if expected is None else expected


def expected_box(view: Viewpoint, corners: Array) -> Array | None:
    """The box (4,) that should hold corners (4, 3), as seen from where a filter believes to be; None if unseen."""
    pixels, spread = view.expect(corners)
    wide = _SIGMAS * np.sqrt(np.diag(spread)).reshape(4, 2)
    at = pixels.reshape(4, 2)
    box = np.concatenate([(at - wide).min(0), (at + wide).max(0)])
    size = np.array([view.camera.width, view.camera.height])
    if not np.isfinite(box).all() or (box[:2] > size).any() or (box[2:] < 0).any():
        return None
    return np.clip(box, 0, np.tile(size, 2))


class RoiDetector:
    """Second looks at the frames of a recording, each when a filter comes to it and says where to look.

    first: detections in each frame looked at as a whole; images: all of them, from the first on, of which one is
    held at a time. rectify: moves detections to where the filter's camera would have seen them, bend: its pixels
    (N, 2) to those of the images. A frame that the filter comes to again is not looked at again.
    """

    def __init__(
        self,
        closer: RoiRefiner,
        first: Sequence[PoseDistributions],
        images: Iterable[Array],
        rectify: Callable[[PoseDistributions], PoseDistributions],
        bend: Callable[[Array], Array],
    ) -> None:
        self.closer, self.first, self.images = closer, first, enumerate(images)
        self.rectify, self.bend = rectify, bend
        self.seen: dict[int, PoseDistributions] = {}

    def at(self, n: int, expected: Array | None) -> PoseDistributions:
        """Everything in frame n that looks like a runway, which should be in a box (4,), if anybody knows."""
        if n not in self.seen:
            image = next((image for number, image in self.images if number == n), None)
            box = None if expected is None else self._bent(expected)
            found = self.first[n] if image is None else self.closer.look(image, self.first[n], box)
            self.seen[n] = self.rectify(found)
        return self.seen[n]

    def _bent(self, box: Array) -> Array:
        left, top, right, bottom = box
        ends = self.bend(np.array([[left, top], [right, top], [right, bottom], [left, bottom]]))
        return np.concatenate([ends.min(0), ends.max(0)])
