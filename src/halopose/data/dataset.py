"""Annotated images: a YOLO data yaml with label files, or COCO json with an image folder.

In: a path and a split. Out: records in a fixed order, whose image and objects are read when asked for.
Nothing is ever augmented.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from halopose.data.coco import read_ground_truth, read_json
from halopose.data.images import IMAGE_SUFFIXES, read_image
from halopose.errors import HaloposeError
from halopose.evaluation.matching import COCO_SIGMAS
from halopose.poses import Array, GroundTruth

PERSON_AREA_FACTOR = 0.53  # object area over box area, for COCO persons


@dataclass(frozen=True)
class Objects:
    """Annotated objects of one image in original pixels: boxes (M, 4) xyxy, area (M,), as in GroundTruth."""

    boxes: Array
    class_ids: Array
    keypoints: Array
    labelled: Array
    area: Array
    crowd: Array

    def __len__(self) -> int:
        return len(self.boxes)

    def select(self, index: Array) -> Objects:
        """The objects of an index or mask."""
        return Objects(*(getattr(self, column.name)[index] for column in fields(self)))


@dataclass(frozen=True)
class Record:
    """One image: its file, its id, and its objects, normalised by the image's size if ``relative``."""

    path: Path
    image_id: int
    objects: Objects
    relative: bool
    area_factor: float

    def read(self) -> tuple[Array, Objects]:
        """The image (h, w, 3) and its objects in pixels."""
        image = read_image(self.path)
        if not self.relative:
            return image, self.objects
        size = np.array([image.shape[1], image.shape[0]], dtype=float)
        boxes = self.objects.boxes * np.tile(size, 2)
        area = (boxes[:, 2:] - boxes[:, :2]).prod(1) * self.area_factor
        objects = replace(
            self.objects, boxes=boxes, keypoints=self.objects.keypoints * size, area=np.maximum(area, 1.0)
        )
        return image, objects


@dataclass(frozen=True)
class Dataset:
    """Records in a fixed order, with the keypoints they are annotated with."""

    records: tuple[Record, ...]
    names: tuple[str, ...]
    sigmas: Array | None
    area: str

    def __len__(self) -> int:
        return len(self.records)

    def subset(self, image_ids: Array) -> Dataset:
        """Only the given images."""
        wanted = set(image_ids.tolist())
        return replace(self, records=tuple(r for r in self.records if r.image_id in wanted))

    @property
    def image_ids(self) -> Array:
        return np.array([record.image_id for record in self.records], dtype=np.int64)

    @property
    def box_area_factor(self) -> float:
        """Object area over box area: COCO's for the 17 keypoints of a person, 1 where it is unknown."""
        return PERSON_AREA_FACTOR if len(self.names) == len(COCO_SIGMAS) else 1.0

    @classmethod
    def join(cls, parts: Sequence[Dataset]) -> Dataset:
        """Several data sets of the same keypoints as one; an image may appear once."""
        if any(len(part.names) != len(parts[0].names) for part in parts):
            raise HaloposeError("the splits have different numbers of keypoints")
        joined = replace(parts[0], records=tuple(record for part in parts for record in part.records))
        if len(set(joined.image_ids.tolist())) < len(joined):
            raise HaloposeError("an image is in two of the splits: their file names must differ")
        return joined


def load_dataset(
    source: Path | str,
    split: str,
    *,
    images: Path | str | None = None,
    area_factor: float | None = None,
) -> Dataset:
    """A split of a YOLO data yaml, several joined by commas, or COCO json with its image folder."""
    source = Path(source)
    if source.suffix == ".json":
        return _coco(source, images)
    return Dataset.join([_yolo(source, part.strip(), area_factor) for part in split.split(",")])


def _coco(path: Path, images: Path | str | None) -> Dataset:
    truth = read_ground_truth(path)
    if images is None:
        raise HaloposeError(f"{path} needs the folder of its images: give --images")
    content = read_json(path)
    entries = content["images"]
    classes = np.sort([entry["id"] for entry in content["categories"] if entry.get("keypoints")])
    records = []
    order = np.argsort(truth.image_ids, kind="stable")
    bounds = np.searchsorted(truth.image_ids[order], [entry["id"] for entry in entries])
    ends = np.searchsorted(truth.image_ids[order], [entry["id"] for entry in entries], side="right")
    for entry, begin, end in zip(entries, bounds, ends, strict=True):
        name = entry.get("file_name")
        if not isinstance(name, str):
            raise HaloposeError(f"{path}: image {entry['id']} has no file_name")
        objects = _coco_objects(truth, order[begin:end], classes)
        records.append(Record(Path(images) / name, int(entry["id"]), objects, relative=False, area_factor=1.0))
    records.sort(key=lambda record: record.image_id)
    return Dataset(tuple(records), truth.names, truth.sigmas, "annotation")


def _coco_objects(truth: GroundTruth, index: Array, classes: Array) -> Objects:
    boxes = truth.boxes[index]
    return Objects(
        boxes=np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1),
        class_ids=np.searchsorted(classes, truth.class_ids[index]),
        keypoints=truth.keypoints[index],
        labelled=truth.labelled[index],
        area=truth.area[index],
        crowd=truth.crowd[index],
    )


def _yolo(path: Path, split: str, area_factor: float | None) -> Dataset:
    content = _read_yaml(path)
    shape = content.get("kpt_shape")
    whole = isinstance(shape, list) and len(shape) == 2 and all(type(value) is int for value in shape)
    if not isinstance(shape, list) or not whole or shape[0] < 1 or shape[1] not in (2, 3):
        raise HaloposeError(f"{path} has no kpt_shape like [17, 3]: it is not a pose data set")
    if split not in content:
        known = ", ".join(key for key, value in content.items() if isinstance(value, str) and key != "path")
        raise HaloposeError(f"{path} has no split {split!r}: it has {known or 'none'}")
    count, dimensions = int(shape[0]), int(shape[1])
    factor = area_factor if area_factor is not None else PERSON_AREA_FACTOR if count == len(COCO_SIGMAS) else 1.0
    root = (path.parent / str(content.get("path") or ".")).resolve()
    files = _image_files(root, content[split], path)
    records = tuple(
        Record(file, _image_id(file), _read_labels(file, count, dimensions), relative=True, area_factor=factor)
        for file in files
    )
    return Dataset(
        records,
        _names(content, count),
        _sigmas(content.get("kpt_oks_sigmas"), count, path),
        f"{factor:g} x box",
    )


def _sigmas(given: Any, count: int, path: Path) -> Array | None:
    if given is None:
        return None
    numbers = isinstance(given, list) and all(isinstance(value, (int, float)) and value > 0 for value in given)
    if not numbers or len(given) != count:
        raise HaloposeError(f"{path}: kpt_oks_sigmas needs {count} positive numbers, got {given}")
    return np.asarray(given, dtype=float)


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HaloposeError(f"cannot read {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise HaloposeError(f"{path} is not yaml: give a YOLO data yaml or COCO json") from None
    if not isinstance(content, dict):
        raise HaloposeError(f"{path} is not a YOLO data yaml")
    return content


def _names(content: dict[str, Any], count: int) -> tuple[str, ...]:
    named = content.get("kpt_names")
    first = next(iter(named.values()), None) if isinstance(named, dict) else named
    if isinstance(first, list) and len(first) == count:
        return tuple(str(name) for name in first)
    from halopose.data.synthetic import COCO_NAMES

    return tuple(COCO_NAMES) if count == 17 else tuple(f"keypoint_{k}" for k in range(count))


def _image_files(root: Path, entry: Any, path: Path) -> list[Path]:
    files: list[Path] = []
    for item in entry if isinstance(entry, list) else [entry]:
        place = root / str(item)
        if place.is_dir():
            files += [file for file in place.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES]
        elif place.suffix == ".txt" and place.is_file():
            files += [
                (place.parent / line.strip()).resolve() for line in place.read_text().splitlines() if line.strip()
            ]
        else:
            raise HaloposeError(f"{path}: there is no folder {place}")
    if not files:
        raise HaloposeError(f"{path}: no images in {root / str(entry)}")
    return sorted(files)


def _image_id(file: Path) -> int:
    """COCO's number if the name is one, else a hash of the name."""
    if file.stem.isdigit() and len(file.stem) <= 15:
        return int(file.stem)
    return int(hashlib.sha256(file.name.encode()).hexdigest()[:12], 16)


def _read_labels(image: Path, count: int, dimensions: int) -> Objects:
    """The label file beside an image, as YOLO looks for it; a missing or empty one means no objects."""
    parts = list(image.parts)
    for index in reversed(range(len(parts) - 1)):
        if parts[index] == "images":
            parts[index] = "labels"
            break
    file = Path(*parts).with_suffix(".txt")
    try:
        rows = [line.split() for line in file.read_text().splitlines() if line.strip()]
    except FileNotFoundError:
        rows = []
    except (OSError, UnicodeDecodeError) as error:
        raise HaloposeError(f"cannot read labels {file}: {error}") from None
    width = 5 + count * dimensions
    for number, row in enumerate(rows):
        if len(row) != width:
            raise HaloposeError(
                f"{file}, line {number + 1}: {len(row)} numbers, "
                f"but {count} keypoints of {dimensions} need {width}"
            )
    try:
        values = np.array(rows, dtype=float).reshape(-1, width)
    except ValueError:
        raise HaloposeError(f"{file} holds something that is not a number") from None
    if not np.isfinite(values).all():
        raise HaloposeError(f"{file} holds a number that is not finite")
    centre, size = values[:, 1:3], values[:, 3:5]
    keypoints = values[:, 5:].reshape(-1, count, dimensions)
    labelled = keypoints[..., 2] > 0 if dimensions == 3 else (keypoints != 0).any(-1)
    return Objects(
        boxes=np.concatenate([centre - size / 2, centre + size / 2], axis=1),
        class_ids=values[:, 0].astype(np.int64),
        keypoints=keypoints[..., :2],
        labelled=labelled,
        area=np.ones(len(values)),
        crowd=np.zeros(len(values), dtype=bool),
    )
