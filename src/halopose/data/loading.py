"""A data set from whatever describes it: a YOLO data yaml, or COCO json with an image folder.

In: a path and a split. Out: a ``Dataset``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from halopose.boxes import xywh_to_xyxy
from halopose.data.coco import parse_ground_truth
from halopose.data.dataset import Dataset, Objects, Record
from halopose.data.files import read_json
from halopose.data.runways import is_runways, polygons_as_keypoints, read_runways
from halopose.data.yolo import read_yolo
from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.poses import GroundTruth
from halopose.types import Array


def load_dataset(
    source: Path | str, split: str, *, images: Path | str | None = None, otherwise: Keypoints | None = None
) -> Dataset:
    """A split of a YOLO data yaml, several joined by commas, or COCO json with its image folder.

    Runways may also be a csv file of LARD, or a folder of images with LabelMe files as BARS has them. otherwise:
    keypoints of the model, for what the data do not state.
    """
    source = Path(source)
    if is_runways(source):
        return read_runways(source)
    if source.suffix == ".json":
        return _coco(source, images, otherwise)
    return Dataset.join([read_yolo(source, part.strip(), otherwise) for part in split.split(",")])


def _coco(path: Path, images: Path | str | None, otherwise: Keypoints | None) -> Dataset:
    content = read_json(path)
    if isinstance(content, dict):
        content = polygons_as_keypoints(content)
    truth = parse_ground_truth(path, content, otherwise=otherwise)
    if images is None:
        raise HaloposeError(f"{path} needs the folder of its images: give --images")
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
    return Dataset(tuple(records), truth.layout, "annotation")


def _coco_objects(truth: GroundTruth, index: Array, classes: Array) -> Objects:
    return Objects(
        boxes=xywh_to_xyxy(truth.boxes[index]),
        class_ids=np.searchsorted(classes, truth.class_ids[index]),
        keypoints=truth.keypoints[index],
        labelled=truth.labelled[index],
        area=truth.area[index],
        crowd=truth.crowd[index],
    )


__all__ = ["load_dataset"]
