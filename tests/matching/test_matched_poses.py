"""True positives: equal to pycocotools, joined from shards without loss, and never from incompatible ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.matching.matched_poses import MatchedPoses, match_poses
from halopose.protocol import Protocol
from tests.helpers.evaluations import partly_labelled, poses
from tests.matching.test_greedy_matching import (
    copies,
    one_object,
    pycocotools_evaluation,
    pycocotools_matches,
    random_predictions,
    random_truth,
)


def test_match_poses_keeps_true_positives_only() -> None:
    rng = np.random.default_rng(1)
    truth = random_truth(rng, 40)
    predictions = random_predictions(rng, truth, 300)
    taken = pycocotools_matches(pycocotools_evaluation(predictions, truth), [0, 1e10], 300)[0]
    detections = np.flatnonzero((taken >= 0) & ~truth.ignore[np.maximum(taken, 0)])
    matched = match_poses(predictions, truth)
    order = np.lexsort((taken[detections], truth.image_ids[taken[detections]]))
    detections = detections[order]
    objects = taken[detections]
    assert len(matched) == len(detections) > 5
    assert matched.layout == truth.layout
    assert predictions.image_ids is not None
    np.testing.assert_array_equal(matched.objects, objects)
    np.testing.assert_array_equal(matched.image_ids, predictions.image_ids[detections])
    residual = truth.keypoints[objects] - predictions.keypoints[detections]
    np.testing.assert_array_equal(matched.residual, residual)
    np.testing.assert_array_equal(matched.labelled, truth.labelled[objects])
    np.testing.assert_array_equal(matched.area, truth.area[objects])


def test_nothing_to_match() -> None:
    truth = one_object()
    assert len(match_poses(copies(truth, [0.9], image=8), truth)) == 0


def test_different_keypoint_counts_are_refused() -> None:
    rng = np.random.default_rng(0)
    five = random_truth(rng, 4, 5)
    with pytest.raises(HaloposeError, match=r"5 keypoints.* 17"):
        match_poses(random_predictions(rng, five, 3), random_truth(rng, 4))


def test_similarity_is_eq_20() -> None:
    matched = poses(30, 3)
    for i, k in np.ndindex(30, 3):
        kappa = 2 * matched.layout.sigmas[k]
        distance = matched.residual[i, k] @ matched.residual[i, k]
        expected = np.exp(-distance / (2 * matched.area[i] * kappa**2))
        assert matched.similarity[i, k] == pytest.approx(expected, rel=1e-12, abs=1e-300)


def test_similarity_is_of_the_keypoint_wherever_the_mean_is() -> None:
    matched = poses(60, 3, 4)
    moved = matched.moved(np.array([[0.05, 0.0], [0.0, -0.1], [0.0, 0.0]])).moved(np.full((3, 2), 0.02))
    assert not np.allclose(moved.residual[:, :2], matched.residual[:, :2], atol=0.1)
    np.testing.assert_allclose(moved.similarity, matched.similarity, rtol=1e-9, atol=1e-12)
    half = moved.image_ids <= moved.image_ids[30]
    parts = [moved.select(np.flatnonzero(part)) for part in (half, ~half)]
    np.testing.assert_allclose(MatchedPoses.concatenate(parts).similarity, matched.similarity, atol=1e-12)
    with pytest.raises(HaloposeError, match="differ in keypoints"):
        MatchedPoses.concatenate([parts[0], matched.select(np.flatnonzero(~half))])


def test_similarity_of_predictions_with_an_offset_is_that_without() -> None:
    rng = np.random.default_rng(1)
    truth = random_truth(rng, 40)
    predictions = random_predictions(rng, truth, 300)
    offset = rng.normal(0, 5, predictions.keypoints.shape)
    without, matched = match_poses(predictions, truth), match_poses(replace(predictions, offset=offset), truth)
    assert not np.allclose(matched.residual, without.residual, atol=0.1)
    np.testing.assert_allclose(matched.similarity, without.similarity, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("area", ["annotation", "box"])
def test_area_of_the_confidence(area: Literal["annotation", "box"]) -> None:
    matched = poses(30, 3)
    confidence = matched.confidence(matched.covariance, Protocol(area=area))
    used = matched.area if area == "annotation" else 0.53 * matched.box_area
    for i, k in np.ndindex(30, 3):
        expected = -np.trace(matched.covariance[i, k]) / (used[i] * (2 * matched.layout.sigmas[k]) ** 2)
        assert confidence[i, k] == pytest.approx(expected, rel=1e-12)


def test_shards_in_any_order_join_to_the_whole() -> None:
    matched = partly_labelled(poses(60, 3, 4, seed=6))
    rng = np.random.default_rng(0)
    shard = rng.integers(0, 4, 10_000)[matched.image_ids]
    parts = [matched.select(np.flatnonzero(shard == s)) for s in rng.permutation(4)]
    joined = MatchedPoses.concatenate(parts)
    np.testing.assert_equal(vars(joined), vars(matched))


def test_overlapping_shards_are_refused() -> None:
    matched = poses(30, 3)
    image = matched.image_ids[10]
    first = matched.select(np.flatnonzero(matched.image_ids <= image))
    second = matched.select(np.flatnonzero(matched.image_ids >= image))
    with pytest.raises(HaloposeError, match=f"contain image {image}"):
        MatchedPoses.concatenate([first, second])
    with pytest.raises(HaloposeError, match="at least one"):
        MatchedPoses.concatenate([])


@pytest.mark.parametrize(
    "change",
    [
        {"dof": None},
        {"visibility": None},
        {"layout": Keypoints.of(3, names=("a", "b", "c"), sigmas=np.linspace(0.05, 0.1, 3), area_factor=0.53)},
        {"layout": Keypoints.of(3, names=("k0", "k1", "k2"), sigmas=np.full(3, 0.5), area_factor=0.53)},
        {"layout": Keypoints.of(3, names=("k0", "k1", "k2"), sigmas=np.linspace(0.05, 0.1, 3))},
    ],
    ids=["no dof", "no visibility", "names", "sigmas", "area factor"],
)
def test_shards_of_different_kinds_are_refused(change: dict[str, Any]) -> None:
    """Whatever the first shard says would silently be taken for all of them."""
    matched = poses(30, 3, 4)
    half = matched.image_ids <= matched.image_ids[15]
    first, second = (matched.select(np.flatnonzero(part)) for part in (half, ~half))
    assert len(MatchedPoses.concatenate([first, second])) == 30
    with pytest.raises(HaloposeError, match="differ in keypoints"):
        MatchedPoses.concatenate([first, replace(second, **change)])
