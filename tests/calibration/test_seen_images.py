"""Images used by a calibration are found and excluded from predictions and ground truth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from halopose.calibration.calibration_file import CalibrationFile
from halopose.calibration.calibrators import GaussianCalibration
from halopose.calibration.seen_images import images_seen, only_images
from halopose.data.coco import SEEN_MARK
from halopose.matching.matched_poses import match_poses
from tests.helpers.evaluations import synthetic_poses


def file_of(*images: int) -> CalibrationFile:
    return CalibrationFile(GaussianCalibration(1), ("tip",), -np.inf, np.array(images, dtype=np.int64))


def test_seen_is_what_is_marked_or_listed() -> None:
    content: list[dict[str, Any]] = [
        {"image_id": 9, SEEN_MARK: True},
        {"image_id": 4, SEEN_MARK: True},
        {"image_id": 9, SEEN_MARK: True},
        {"image_id": 1},
        {"image_id": 2, SEEN_MARK: False},
    ]
    assert images_seen(content, []).tolist() == [4, 9]
    assert images_seen(content, [file_of(7, 4), file_of(3)]).tolist() == [3, 4, 7, 9]
    assert images_seen([], [file_of()]).tolist() == []
    assert images_seen([], []).dtype == np.int64


@pytest.mark.parametrize("seed", range(3))
def test_only_images_leaves_the_others_out_of_both(seed: int) -> None:
    predictions, truth = synthetic_poses()
    chosen = np.random.default_rng(seed).choice(truth.images, 25, replace=False)
    some, objects = only_images(predictions, truth, chosen)
    assert some.image_ids is not None
    assert predictions.image_ids is not None
    np.testing.assert_array_equal(objects.images, np.sort(chosen))
    assert len(some) == np.isin(predictions.image_ids, chosen).sum() < len(predictions)
    assert len(objects) == np.isin(truth.image_ids, chosen).sum() < len(truth)
    assert set(some.image_ids) <= set(chosen)
    assert set(objects.image_ids) <= set(chosen)
    # Images are independent: true positives are those of the whole, in the images chosen.
    whole, part = match_poses(predictions, truth), match_poses(some, objects)
    expected = whole.select(np.flatnonzero(np.isin(whole.image_ids, chosen)))
    np.testing.assert_equal(vars(replace(part, objects=expected.objects)), vars(expected))
