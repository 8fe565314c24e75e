"""Load a dataset from a YOLO data yaml or from COCO json with its images."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import numpy as np

from halopose.boxes import xywh_to_xyxy
from halopose.data.coco import read_annotated
from halopose.data.dataset import Dataset, Objects, Record
from halopose.data.storage.address import Place, to_place
from halopose.data.storage.archive import Stored, find_archives, is_archive, read_samples
from halopose.data.suffixes import IMAGE_SUFFIXES
from halopose.data.yolo import read_yolo
from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.plugins import convert_coco, dataset_reader
from halopose.poses import GroundTruth
from halopose.types import Array

log = logging.getLogger(__name__)


def load_dataset(
    source: Path | str, split: str, *, images: Path | str | None = None, otherwise: Keypoints | None = None
) -> Dataset:
    """Load a dataset. Plug-ins may read further formats.

    Args:
        source: YOLO data yaml or COCO json, as a path or address.
        split: Split of the yaml, or several joined by commas.
        images: Folder or tar archives (``{00..99}.tar``) with the images of COCO json.
        otherwise: Keypoints of the model, for what the data does not state.
    """
    place = to_place(source)
    reader = dataset_reader(place) if isinstance(place, Path) else None
    if reader is not None and isinstance(place, Path):
        return reader.read(place)
    if place.suffix == ".json":
        return _coco(place, images, otherwise)
    return Dataset.join([read_yolo(place, part.strip(), otherwise) for part in split.split(",")])


def load_train_val(
    source: Path | str,
    train: str,
    val: str,
    *,
    images: Path | str | None = None,
    val_images: Path | str | None = None,
    otherwise: Keypoints | None = None,
) -> tuple[Dataset, Dataset]:
    """Load training and validation data.

    Args:
        source: YOLO data yaml, COCO json, or annotations that a plug-in reads.
        train: Training split of the yaml.
        val: Validation split of the yaml; with annotation files, the validation annotations.
        images: Folder or tar archives with the training images of COCO json.
        val_images: The same for the validation images; default: ``images``.
        otherwise: Keypoints of the model, for what the data does not state.
    """
    reader = dataset_reader(Path(source))
    if reader is not None:
        if not Path(val).exists():
            raise HaloposeError(f"{reader.name} data: give the validation annotations too, --val FILE or FOLDER")
        return load_dataset(source, ""), load_dataset(val, "")
    if Path(source).suffix == ".json":
        if not val.endswith(".json"):
            raise HaloposeError("with COCO json give the validation annotations too: --val other.json")
        return (
            load_dataset(source, "", images=images, otherwise=otherwise),
            load_dataset(val, "", images=val_images or images, otherwise=otherwise),
        )
    return load_dataset(source, train, otherwise=otherwise), load_dataset(source, val, otherwise=otherwise)


def exclude_images(dataset: Dataset, used: Array, model: str, advice: str = "give other images") -> Dataset:
    """Return the dataset without images that were used to make a model. Log how many are skipped.

    Args:
        dataset: The dataset.
        used: (I,) ids of the images that were used.
        model: Name of the model in messages, such as "the artifact".
        advice: What the error message recommends if no image is left.
    """
    left = np.setdiff1d(dataset.image_ids, used)
    if len(left) < len(dataset):
        log.info("%d of %d images were used to make %s and are skipped", len(dataset) - len(left), len(dataset), model)
    if not len(left):
        raise HaloposeError(f"every image was used to make {model}: {advice}")
    return dataset.subset(left)


def _coco(path: Place, images: Path | str | None, otherwise: Keypoints | None) -> Dataset:
    found = read_annotated(path, otherwise=otherwise, convert=convert_coco)
    if images is None:
        raise HaloposeError(f"{path} needs the folder of its images: give --images")
    where = _finder(to_place(images))
    truth = found.truth
    order = np.argsort(truth.image_ids, kind="stable")
    objects = _coco_objects(truth, order, found.classes)
    begins, ends = (np.searchsorted(truth.image_ids[order], found.images, side) for side in ("left", "right"))
    records = []
    for number in np.argsort(found.images).tolist():
        identity, name = int(found.images[number]), found.names[number]
        if name is None:
            raise HaloposeError(f"{path}: image {identity} has no file_name")
        own = slice(begins[number], ends[number])  # views: a million images hold their objects once
        records.append(Record(where(name), identity, objects.select(own), relative=False, area_factor=1.0))
    return Dataset(tuple(records), truth.layout, "annotation")


def _finder(images: Place) -> Callable[[str], Stored]:
    """Return a function from the name of an image to its location in a folder or in archives."""
    if not is_archive(images):
        return lambda name: images / name
    members = [image for shard in find_archives(images) for image, _ in read_samples(shard, IMAGE_SUFFIXES, False)]
    known = {image.name: image for image in members} | {image.file: image for image in members}

    def find(name: str) -> Stored:
        member = known.get(name) or known.get(PurePosixPath(name).name)
        if member is None:
            raise HaloposeError(f"{images} has no image {name}: give the archives that hold it")
        return member

    return find


def _coco_objects(truth: GroundTruth, index: Array, classes: Array) -> Objects:
    return Objects(
        boxes=xywh_to_xyxy(truth.boxes[index]),
        class_ids=np.searchsorted(classes, truth.class_ids[index]),
        keypoints=truth.keypoints[index],
        labelled=truth.labelled[index],
        area=truth.area[index],
        crowd=truth.crowd[index],
        occluded=None if truth.occluded is None else truth.occluded[index],
    )
