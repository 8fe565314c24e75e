"""Region-of-interest refinement: detect the runway again in a full-resolution crop.

A detector scales every frame to its input size. A camera with three times the width loses eight of nine pixels. The
crop has the input size and lies around the detection in the whole frame, or where the filter expects the runway, or
where it was in the previous frame.
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

_LARGER = 1.5  # frame width over input width above which refinement pays off
_SIGMAS = 2.0  # factor by which an expected box is enlarged


def refine_with_roi(model: Predictor, images: Iterable[Array], *, conf: float = 0.25) -> Iterator[PoseDistributions]:
    """Detect runways image by image; images that are not much larger than the input are processed once."""
    refiner = RoiRefiner(model, conf)
    for image in images:
        yield refiner.refine(image, detect_in_image(model, image, conf))


class RoiRefiner:
    """Refines the detections of consecutive frames."""

    def __init__(self, model: Predictor, conf: float) -> None:
        self.model, self.conf = model, conf
        self.scenario: Array | None = None  # box of the runway in the previous frame

    def refine(self, image: Array, whole: PoseDistributions, expected: Array | None = None) -> PoseDistributions:
        """Return the detections of a frame; those in the crop replace the ones of the whole frame there.

        Args:
            image: frame (H, W, 3).
            whole: detections in the whole frame.
            expected: box (4,) where the filter expects the runway; None if unknown.
        """
        if image.shape[1] < _LARGER * self.model.imgsz:
            return whole
        self.scenario = _place(whole, expected, self.scenario)
        found = whole if self.scenario is None else self._part(image, whole, self.scenario)
        self.scenario = _place(found, expected, self.scenario)
        return found

    def _part(self, image: Array, whole: PoseDistributions, place: Array) -> PoseDistributions:
        """Detect in the crop around a box (4,), and replace the detections there if any is found."""
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
    """Return the box (4,) of the best detection where the runway is expected; else the expected or the previous box."""
    if expected is not None:
        middle = found.keypoints.mean(1)
        found = found[((middle >= expected[:2]) & (middle <= expected[2:])).all(1)]
    if len(found):
        return np.asarray(found.boxes[int(np.argmax(found.scores))])
    return before if expected is None else expected


def expected_box(view: Viewpoint, corners: Array) -> Array | None:
    """Return the box (4,) of corners (4, 3) as seen from the estimated position; None if not visible."""
    pixels, spread = view.expect(corners)
    wide = _SIGMAS * np.sqrt(np.diag(spread)).reshape(4, 2)
    at = pixels.reshape(4, 2)
    box = np.concatenate([(at - wide).min(0), (at + wide).max(0)])
    size = np.array([view.camera.width, view.camera.height])
    if not np.isfinite(box).all() or (box[:2] > size).any() or (box[2:] < 0).any():
        return None
    return np.clip(box, 0, np.tile(size, 2))


class RoiDetector:
    """Refines frames of a recording when the filter reaches them and says where to look. Each frame is refined once.

    Args:
        first: detections in each whole frame.
        images: all images in order; one is held at a time.
        rectify: moves detections from the image to the pinhole camera of the filter.
        bend: moves pixels (N, 2) of the pinhole camera to the image.
    """

    def __init__(
        self,
        refiner: RoiRefiner,
        first: Sequence[PoseDistributions],
        images: Iterable[Array],
        rectify: Callable[[PoseDistributions], PoseDistributions],
        bend: Callable[[Array], Array],
    ) -> None:
        self.refiner, self.first, self.images = refiner, first, enumerate(images)
        self.rectify, self.bend = rectify, bend
        self.seen: dict[int, PoseDistributions] = {}

    def at(self, n: int, expected: Array | None) -> PoseDistributions:
        """Detect runways in frame n, expected in a box (4,) or anywhere if None."""
        if n not in self.seen:
            image = next((image for number, image in self.images if number == n), None)
            box = None if expected is None else self._bent(expected)
            found = self.first[n] if image is None else self.refiner.refine(image, self.first[n], box)
            self.seen[n] = self.rectify(found)
        return self.seen[n]

    def _bent(self, box: Array) -> Array:
        left, top, right, bottom = box
        ends = self.bend(np.array([[left, top], [right, top], [right, bottom], [left, bottom]]))
        return np.concatenate([ends.min(0), ends.max(0)])
