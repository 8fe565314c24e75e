"""Keypoints of any tool as one table, and its conversion to and from COCO results and COCO ground truth."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from halopose.errors import HaloposeError
from halopose.types import Array

LARGEST_COORDINATE = 1e7  # pixels; a file with more is damaged


@dataclass(frozen=True, eq=False)
class PoseTable:
    """N poses of K keypoints.

    Attributes:
        names: Names of the keypoints.
        keypoints: Positions (N, K, 2) in pixels; NaN where a keypoint is missing.
        scores: Keypoint scores (N, K); 0 where a keypoint is missing.
        frames: Frame or image number (N,).
        tracks: Number (N,) of the individual; -1 where it is not known.
        individuals: Names of the individuals, by number.
        images: File name of each frame that has one.
        boxes: Boxes (N, 4), x1 y1 x2 y2, or None.
        pose_scores: Detection scores (N,), or None.
        limbs: Pairs of keypoints.
        covariance: Covariances (N, K, 2, 2), or None.
        size: Width and height of the images in pixels, where the file states them.
    """

    names: tuple[str, ...]
    keypoints: Array
    scores: Array
    frames: Array
    tracks: Array
    individuals: tuple[str, ...] = ()
    images: dict[int, str] = field(default_factory=dict)
    boxes: Array | None = None
    pose_scores: Array | None = None
    limbs: tuple[tuple[int, int], ...] = ()
    covariance: Array | None = None
    size: tuple[int, int] | None = None

    @property
    def missing(self) -> Array:
        """Keypoints (N, K) without a position."""
        return np.asarray(~np.isfinite(self.keypoints).all(-1))

    def checked(self, path: object) -> PoseTable:
        """Validate the table and return it; ``path`` is used in messages."""
        count, keypoints = len(self.frames), len(self.names)
        if not count:
            raise HaloposeError(f"{path} holds no poses: nothing to do")
        if not keypoints or len(set(self.names)) < keypoints:
            raise HaloposeError(f"{path}: keypoint names are missing or not unique: correct them")
        if self.keypoints.shape != (count, keypoints, 2) or self.scores.shape != (count, keypoints):
            raise HaloposeError(f"{path}: poses have different numbers of keypoints")
        there = np.asarray(~self.missing)
        if np.isinf(self.keypoints).any() or (np.abs(self.keypoints[there]) > LARGEST_COORDINATE).any():
            raise HaloposeError(f"{path}: a coordinate is infinite or above {LARGEST_COORDINATE:.0f} px")
        if not np.isfinite(self.scores[there]).all():
            raise HaloposeError(f"{path}: a keypoint has a position and no score")
        if not there.any():
            raise HaloposeError(f"{path}: every keypoint is missing")
        return self

    def to_entries(self) -> list[dict[str, Any]]:
        """Return COCO results: missing keypoints are 0, 0, 0; missing boxes are the extent of the other keypoints."""
        there = np.asarray(~self.missing)
        entries = []
        boxes = self._boxes()
        for row in np.flatnonzero(there.any(1)).tolist():
            triples = np.concatenate([self.keypoints[row], self.scores[row][:, None]], axis=1)
            triples[~there[row]] = 0
            low, high = boxes[row, :2], boxes[row, 2:]
            mean = float(np.clip(self.scores[row][there[row]].mean(), 0, 1))
            frame = int(self.frames[row])
            entry: dict[str, Any] = {
                "image_id": frame,
                "category_id": 1,
                "bbox": [*low.tolist(), *(high - low).tolist()],
                "score": mean if self.pose_scores is None else float(self.pose_scores[row]),
                "keypoints": triples.ravel().tolist(),
            }
            if self.covariance is not None:
                matrix = self.covariance[row]
                entry["covariance"] = np.stack([matrix[:, 0, 0], matrix[:, 0, 1], matrix[:, 1, 1]], axis=1).tolist()
            if self.tracks[row] >= 0:
                entry["track_id"] = int(self.tracks[row])
            if frame in self.images:
                entry["file_name"] = self.images[frame]
            entries.append(entry)
        return entries

    def to_truth(self) -> dict[str, Any]:
        """Return COCO ground truth of a table of labels; every keypoint with a position is visible."""
        there = np.asarray(~self.missing)
        boxes = self._boxes()
        annotations: list[dict[str, Any]] = []
        for row in np.flatnonzero(there.any(1)).tolist():
            triples = np.concatenate([self.keypoints[row], np.full((len(self.names), 1), 2.0)], axis=1)
            triples[~there[row]] = 0
            sides = np.maximum(boxes[row, 2:] - boxes[row, :2], 1.0)
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": int(self.frames[row]),
                    "category_id": 1,
                    "bbox": [*boxes[row, :2].tolist(), *sides.tolist()],
                    "area": float(sides.prod()),
                    "iscrowd": 0,
                    "num_keypoints": int(there[row].sum()),
                    "keypoints": triples.ravel().tolist(),
                }
            )
        category: dict[str, Any] = {"id": 1, "name": "object", "keypoints": list(self.names)}
        if self.limbs:
            category["skeleton"] = [[a + 1, b + 1] for a, b in self.limbs]
        frames = np.unique(self.frames).tolist()
        images = [{"id": frame, "file_name": self.images.get(frame, str(frame))} for frame in frames]
        return {"images": images, "annotations": annotations, "categories": [category]}

    @classmethod
    def from_entries(cls, entries: Sequence[dict[str, Any]], names: Sequence[str], like: PoseTable | None) -> PoseTable:
        """Make a table from validated COCO results; names of individuals and images come from ``like``."""
        triples = np.array([entry["keypoints"] for entry in entries], dtype=float).reshape(len(entries), -1, 3)
        missing = (triples == 0).all(-1)
        covariance = None
        if all("covariance" in entry for entry in entries):
            values = np.array([entry["covariance"] for entry in entries], dtype=float)
            covariance = values[..., [0, 1, 1, 2]].reshape(*values.shape[:2], 2, 2)
        boxes = np.array([entry["bbox"] for entry in entries], dtype=float) if "bbox" in entries[0] else None
        named = {int(entry["image_id"]): str(entry["file_name"]) for entry in entries if "file_name" in entry}
        return cls(
            names=tuple(names),
            keypoints=np.where(missing[..., None], np.nan, triples[..., :2]),
            scores=np.where(missing, 0.0, triples[..., 2]),
            frames=np.array([entry["image_id"] for entry in entries], dtype=np.int64),
            tracks=np.array([entry.get("track_id", -1) for entry in entries], dtype=np.int64),
            individuals=() if like is None else like.individuals,
            images=named if like is None else dict(like.images),
            boxes=None if boxes is None else np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1),
            pose_scores=np.array([entry["score"] for entry in entries], dtype=float),
            covariance=covariance,
            size=None if like is None else like.size,
        )

    def _boxes(self) -> Array:
        if self.boxes is not None:
            return self.boxes
        empty = np.asarray(self.missing.all(1))[:, None, None]
        points = np.where(empty, 0.0, self.keypoints)
        return np.concatenate([np.nanmin(points, axis=1), np.nanmax(points, axis=1)], axis=1)


def number_images(names: Sequence[str]) -> tuple[Array, dict[int, str]]:
    """Number (N,) of each row by its image's name, and the name of each number.

    The number is the last one in the name, as in ``img0012.png``, if images then have different numbers; else images
    are counted in order of appearance.

    Example:
        >>> number_images(["img07.png", "img12.png", "img07.png"])[0].tolist()
        [7, 12, 7]
    """
    distinct = list(dict.fromkeys(names))
    found = [re.findall(r"\d+", PurePosixPath(name.replace("\\", "/")).stem) for name in distinct]
    numbers = [int(each[-1]) if each and len(each[-1]) < 16 else -1 for each in found]
    if -1 in numbers or len(set(numbers)) < len(numbers):
        numbers = list(range(len(distinct)))
    by_name = dict(zip(distinct, numbers, strict=True))
    return np.array([by_name[name] for name in names], dtype=np.int64), {n: name for name, n in by_name.items()}
