"""Example pictures of annotated images: residual lines and NLL, before and after pruning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from halopose.boxes import xyxy_to_xywh
from halopose.data.dataset import Dataset, Objects, Record
from halopose.data.images import distinct_names, write_image
from halopose.drawing import Truth, draw_poses
from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.matching.greedy_matching import true_pairs
from halopose.poses import GroundTruth, PoseDistributions
from halopose.prediction.predictor import Predictor
from halopose.types import Array


def draw_example(model: Predictor, record: Record, **options: Any) -> Array | None:
    """Draw the matched detections of one image, with all keypoints on the left and the kept ones on the right.

    Args:
        model: The predictor.
        record: The annotated image.
        options: Options of ``Predictor.predict``.

    Returns:
        The picture, or None if no detection matches or the image cannot be read.
    """
    try:
        image, objects = record.read()
    except HaloposeError:
        return None
    layout = model.layout
    matched, truth = _match(model.predict(image, **options)[0], objects, layout)
    if not len(matched):
        return None
    drawn: dict[str, Any] = {"truth": truth, "names": layout.names, "limbs": layout.limbs}
    before = draw_poses(image, replace(matched, keep=np.ones_like(matched.keep)), **drawn)
    after = draw_poses(image, matched, show_pruned=False, **drawn)
    return np.concatenate([before, after], axis=1)


def write_examples(model: Predictor, dataset: Dataset, folder: Path, count: int, **options: Any) -> None:
    """Write example pictures of the first images of a dataset.

    Args:
        model: The predictor.
        dataset: Annotated images.
        folder: Folder of the pictures.
        count: Number of images. Images without a matched detection get no picture.
        options: Options of ``Predictor.predict``.
    """
    records = dataset.records[:count]
    if not records:
        return
    names = distinct_names([Path(str(record.path)) for record in records])
    for record, name in zip(records, names, strict=True):
        picture = draw_example(model, record, **options)
        if picture is not None:
            write_image(folder / f"{name}.jpg", picture)


def _match(poses: PoseDistributions, objects: Objects, layout: Keypoints) -> tuple[PoseDistributions, Truth]:
    truth = GroundTruth(
        images=np.zeros(1, dtype=np.int64),
        image_ids=np.zeros(len(objects), dtype=np.int64),
        class_ids=objects.class_ids + 1,
        keypoints=objects.keypoints,
        labelled=objects.labelled,
        boxes=xyxy_to_xywh(objects.boxes),
        area=objects.area,
        crowd=objects.crowd,
        ignore=objects.crowd | ~objects.labelled.any(1),
        layout=layout,
    )
    detections, found = true_pairs(poses, truth)
    return poses[detections], Truth(truth.keypoints[found], truth.labelled[found])
