"""Sigmas from repeated labels and from residuals of a model whose errors are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from halopose.calibration.oks_sigmas import sigmas_from_repeats, sigmas_from_residuals
from halopose.data.coco import Annotated
from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.poses import GroundTruth, PoseDistributions

TRUE = np.array([0.02, 0.05, 0.1])


def annotated(seed: int, count: int = 400) -> tuple[Annotated, np.ndarray]:
    """Labels of objects, one per image, that err by the true sigmas; and the true places."""
    rng = np.random.default_rng(0)
    side = rng.uniform(50, 300, count)
    place = rng.uniform(0.1, 0.9, (count, 3, 2)) * side[:, None, None]
    own = np.random.default_rng(seed)
    points = place + own.normal(size=place.shape) * (TRUE / np.sqrt(2) * side[:, None])[..., None]
    images, no = np.arange(count), np.zeros(count, dtype=bool)
    boxes = np.concatenate([np.zeros((count, 2)), np.tile(side[:, None], (1, 2))], axis=1)
    labelled = np.ones((count, 3), dtype=bool)
    one = np.ones(count, dtype=np.int64)
    layout = Keypoints.of(3)
    truth = GroundTruth(images, images, one, points, labelled, boxes, side**2, no, no, layout)
    return Annotated(truth, images, tuple(f"{n}.png" for n in images), np.array([1])), place


@pytest.mark.parametrize("annotators", [2, 3])
def test_repeated_labels_give_the_true_sigmas(annotators: int) -> None:
    found = sigmas_from_repeats([annotated(seed)[0] for seed in range(1, annotators + 1)])
    assert np.allclose(found.sigmas, TRUE, rtol=0.1)
    assert (np.abs(found.sigmas - TRUE) < 4 * found.error).all()
    assert found.source == "repeats"


def test_residuals_of_a_perfect_model_give_the_noise_of_labels() -> None:
    labels, place = annotated(1)
    count = len(place)
    unit = np.tile(np.eye(2), (count, 3, 1, 1))
    boxes = np.concatenate([labels.truth.boxes[:, :2], labels.truth.boxes[:, 2:]], axis=1)
    poses = PoseDistributions(
        boxes, np.ones(count), place, unit, unit, visibility=np.full((count, 3), 0.9),
        class_ids=np.ones(count, dtype=np.int64), image_ids=labels.truth.image_ids,
    )  # fmt: skip
    assert np.allclose(sigmas_from_residuals(poses, labels.truth).sigmas, TRUE, rtol=0.3)


def test_few_samples_are_shrunk_to_the_other_keypoints() -> None:
    first, second = annotated(1)[0], annotated(2)[0]
    few = first.truth.labelled.copy()
    few[2:, 0] = False
    found = sigmas_from_repeats([replace(first, truth=replace(first.truth, labelled=few)), second])
    assert found.samples.tolist() == [2, 400, 400]
    assert found.sigmas[0] > 0.04


def test_labels_without_repeats_are_refused() -> None:
    with pytest.raises(HaloposeError, match="twice"):
        sigmas_from_repeats([annotated(1)[0]])
