"""Find images that a calibration was fitted on, so that they are not scored with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from halopose.calibration.calibration_file import CalibrationFile
from halopose.data.coco import SEEN_MARK
from halopose.poses import GroundTruth, PoseDistributions
from halopose.types import Array


def images_seen(content: list[dict[str, Any]], calibrations: Sequence[CalibrationFile]) -> Array:
    """Return ids of images that a calibration was fitted on: marked in the detections, or listed in a file."""
    marked = [entry["image_id"] for entry in content if entry.get(SEEN_MARK)]
    listed = [calibration.image_ids for calibration in calibrations]
    return np.unique(np.concatenate([np.asarray(marked, dtype=np.int64), *listed]))


def only_images(
    predictions: PoseDistributions, truth: GroundTruth, images: Array
) -> tuple[PoseDistributions, GroundTruth]:
    """Return predictions and ground truth of the given images (I,) only."""
    assert predictions.image_ids is not None
    return predictions[np.isin(predictions.image_ids, images)], truth.select_images(images)
