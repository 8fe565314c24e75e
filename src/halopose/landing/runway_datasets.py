"""Read runway data sets of other projects as four corners per runway.

Formats: the csv metadata of LARD (``image``, ``x_A`` ... ``y_D``, separated by semicolons), folders of images with
LabelMe json files as in BARS, and COCO instances whose runways are polygons of four points. Corners are sorted: the
near ones are lower in the image, left and right are those of the image.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import Any
from zlib import crc32

import numpy as np

from halopose.data.dataset import Dataset, Objects, Record
from halopose.data.files import read_json
from halopose.data.suffixes import IMAGE_SUFFIXES
from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.types import Array

CORNER_NAMES = ("near_left", "near_right", "far_right", "far_left")
OKS_SIGMAS = (0.1,) * 4  # an error of 0.2 times the size of the runway in the image gives a similarity of exp(-1/2)
SMALLEST_BOX = 6.0  # pixels: a distant runway is thinner than a detector can resolve
RUNWAY = "runway"  # label in LabelMe and COCO files
LAYOUT = Keypoints.of(4, names=CORNER_NAMES, sigmas=OKS_SIGMAS)
_LARD = [f"{axis}_{corner}" for corner in "ABCD" for axis in "xy"]
FARTHEST = 1e6  # pixels: a corner beyond is invalid


def corners_in_order(points: Array) -> Array:
    """Sort four corners (4, 2) to near left, near right, far right, far left."""
    down = np.argsort(-points[:, 1], kind="stable")
    near, far = points[down[:2]], points[down[2:]]
    near, far = near[np.argsort(near[:, 0])], far[np.argsort(far[:, 0])]
    return np.stack([near[0], near[1], far[1], far[0]])


def box_of(corners: Array, width: int, height: int) -> Array:
    """Return the box (4,) xyxy of corners (4, 2), at least SMALLEST_BOX wide and high, clipped to the image."""
    low, high = corners.min(0), corners.max(0)
    grow = np.maximum(SMALLEST_BOX - (high - low), 0) / 2
    size = np.array([width, height], dtype=float)
    return np.concatenate([np.clip(low - grow, 0, size), np.clip(high + grow, 0, size)])


def is_runways(source: Path) -> bool:
    """Return whether a path is a csv file, or a folder in which a json file has an image beside it."""
    if source.suffix.lower() == ".csv":
        return True
    # Unlike Path.is_dir, false for names that no file can have.
    return os.path.isdir(source) and any(_images_beside(path) for path in source.glob("*.json"))


def read_runways(source: Path) -> Dataset:
    """Read a csv file of LARD, or a folder of images with LabelMe files as in BARS."""
    return read_lard(source) if source.suffix.lower() == ".csv" else read_labelme(source)


def read_lard(path: Path) -> Dataset:
    """Read a csv file of LARD. Paths are relative to it; runways that are cut off are skipped."""
    rows = _rows(path)
    missing = [name for name in ("image", "width", "height", *_LARD) if name not in rows[0]]
    if missing:
        raise HaloposeError(
            f"{path} has no column {missing[0]}: LARD's metadata has image, width, height and x_A to y_D, "
            "separated by semicolons"
        )
    records = []
    for number, row in enumerate(rows, start=2):
        file = path.parent / PureWindowsPath(row["image"]).as_posix()
        try:
            width, height = int(float(row["width"])), int(float(row["height"]))
            corners = np.array([float(row[name]) for name in _LARD]).reshape(4, 2)
        except (ValueError, OverflowError):
            raise HaloposeError(f"{path}, line {number}: a size or corner is not a finite number") from None
        records.append(_record(file, row["image"], [corners], width, height))
    return _dataset(path, records)


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file, delimiter=";"))
    except OSError as error:
        raise HaloposeError(f"cannot read {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, csv.Error):
        raise HaloposeError(f"{path} is not a csv file: give the metadata of LARD") from None
    if not rows or any(None in row or None in row.values() for row in rows):
        raise HaloposeError(f"{path} has no rows, or rows of different lengths: give a csv file of LARD")
    return rows


def read_labelme(folder: Path) -> Dataset:
    """Read a folder of images with LabelMe files, whose polygons labelled "runway" have four points."""
    records = []
    for path in sorted(folder.glob("*.json")):
        content = read_json(path)
        shapes = content.get("shapes") if isinstance(content, dict) else None
        if not isinstance(shapes, list) or not all(isinstance(shape, dict) for shape in shapes):
            raise HaloposeError(f"{path} is not a LabelMe file: it has no list of shapes")
        runways = [_polygon(path, shape) for shape in shapes if shape.get("label") == RUNWAY]
        try:
            size = int(float(content["imageWidth"])), int(float(content["imageHeight"]))  # refuses 10**400
        except (KeyError, TypeError, ValueError, OverflowError):
            raise HaloposeError(f"{path} needs imageWidth and imageHeight as numbers of pixels") from None
        records.append(_record(_image_beside(path), path.stem, [each for each in runways if each is not None], *size))
    return _dataset(folder, records)


def _images_beside(path: Path) -> list[Path]:
    return [path.with_suffix(suffix) for suffix in sorted(IMAGE_SUFFIXES) if path.with_suffix(suffix).is_file()]


def _image_beside(path: Path) -> Path:
    found = _images_beside(path)
    if not found:
        raise HaloposeError(f"no image beside {path}")
    return found[0]


def _polygon(path: Path, shape: dict[str, Any]) -> Array | None:
    """Return the four corners of a polygon; None if the image border cuts the runway to another shape."""
    try:
        points = np.asarray(shape["points"], dtype=np.float64)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise HaloposeError(f"{path}: a shape has no points") from None
    return points if points.shape == (4, 2) and np.isfinite(points).all() else None


def polygons_as_keypoints(categories: list[Any]) -> tuple[list[Any], Callable[[Any], Any]] | None:
    """Convert COCO instances to COCO keypoints: runways with a polygon of four points; others become crowds.

    Returns:
        The new categories, and a function that converts an annotation; None for other categories.
    """
    known = [entry for entry in categories if isinstance(entry, dict)]
    if any(entry.get("keypoints") for entry in known):
        return None
    runway = [entry.get("id") for entry in known if entry.get("name") == RUNWAY]
    if not runway:
        return None
    category = {"id": runway[0], "name": RUNWAY, "keypoints": list(CORNER_NAMES), "sigmas": list(OKS_SIGMAS)}
    return [category], partial(_polygon_as_keypoints, runway[0])


def _polygon_as_keypoints(runway: Any, entry: Any) -> Any:
    if not isinstance(entry, dict) or entry.get("category_id") != runway:
        return entry
    parts = entry.get("segmentation")
    flat = parts[0] if isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], list) else []
    whole = len(flat) == 8 and all(type(value) in (int, float) and abs(value) < FARTHEST for value in flat)
    corners = corners_in_order(np.asarray(flat, dtype=np.float64).reshape(4, 2)) if whole else np.zeros((4, 2))
    visible = np.full((4, 1), 2 if whole else 0)
    told: dict[str, Any] = {"keypoints": np.concatenate([corners, visible], axis=1).ravel().tolist()}
    told["num_keypoints"], told["iscrowd"] = (4, 0) if whole else (0, 1)
    if whole:
        low, high = corners.min(0), corners.max(0)
        told["bbox"] = [*low.tolist(), *(high - low).tolist()]
        told["area"] = float(np.maximum(high - low, 1.0).prod())
    return {**entry, **told}


def _record(path: Path, name: str, runways: Sequence[Array], width: int, height: int) -> Record:
    inside = [corners_in_order(each) for each in runways if _within(each, width, height)]
    boxes = np.array([box_of(each, width, height) for each in inside]).reshape(-1, 4)
    count = len(inside)
    objects = Objects(
        boxes=boxes,
        class_ids=np.zeros(count, dtype=np.int64),
        keypoints=np.array(inside).reshape(-1, 4, 2),
        labelled=np.ones((count, 4), dtype=bool),
        area=(boxes[:, 2:] - boxes[:, :2]).prod(1),
        crowd=np.zeros(count, dtype=bool),
    )
    return Record(path, crc32(name.replace("\\", "/").encode()), objects, relative=False, area_factor=1.0)


def _within(corners: Array, width: int, height: int) -> bool:
    return bool(((corners >= 0) & (corners <= (width, height))).all())


def _dataset(source: Path, records: Iterable[Record]) -> Dataset:
    ordered = sorted(records, key=lambda record: record.image_id)
    ids = [record.image_id for record in ordered]
    if len(set(ids)) < len(ids):
        raise HaloposeError(f"{source} has an image twice: keep one entry per image")
    if not any(len(record.objects) for record in ordered):
        raise HaloposeError(f"{source} has no complete runway in any image: give images with four visible corners")
    return Dataset(tuple(ordered), LAYOUT, "box")
