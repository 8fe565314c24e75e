"""OKS to the last bit and matches to the last index against pycocotools, on data full of edge cases."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from halopose.boxes import xywh_to_xyxy
from halopose.errors import HaloposeError
from halopose.keypoints import COCO_SIGMAS, Keypoints
from halopose.matching import greedy_matching
from halopose.matching.greedy_matching import (
    OKS_THRESHOLDS,
    candidate_pairs,
    greedy_match,
    keypoint_similarity,
    object_keypoint_similarity,
    true_pairs,
    true_pairs_by_box,
)
from halopose.matching.matched_poses import match_poses
from halopose.poses import GroundTruth, PoseDistributions
from halopose.protocol import Protocol
from halopose.types import Array

SEEDS = st.integers(0, 2**32 - 1)
CATEGORIES = (1, 4, 7)
IMAGES = np.array([3, 8, 9, 40, 41, 77])


def random_truth(rng: np.random.Generator, objects: int, keypoints: int = 17) -> GroundTruth:
    """Objects in random image order: crowds, objects without labels, and exact duplicates among them."""
    centre = rng.uniform(0, 400, (objects, 1, 2))
    size = np.exp(rng.uniform(np.log(15), np.log(250), (objects, 1, 1)))
    points = centre + size * rng.uniform(-0.5, 0.5, (objects, keypoints, 2))
    labelled = rng.random((objects, keypoints)) < rng.choice([0.05, 0.5, 1.0], (objects, 1))
    labelled[rng.random(objects) < 0.15] = False
    low, high = points.min(1), points.max(1)
    truth = {
        "image_ids": rng.choice(IMAGES, objects),
        "class_ids": rng.choice(CATEGORIES[:2], objects),
        "keypoints": np.round(points, rng.integers(0, 3)),
        "labelled": labelled,
        "boxes": np.concatenate([low, high - low], axis=1),
        "area": (high - low).prod(1) * rng.uniform(0.3, 0.8, objects),
        "crowd": rng.random(objects) < 0.15,
    }
    source, twin = rng.permutation(objects)[: objects // 3 * 2].reshape(2, -1)
    for name in ("image_ids", "class_ids", "keypoints", "labelled", "boxes", "area"):
        truth[name][twin] = truth[name][source]
    return GroundTruth(
        images=IMAGES,
        **truth,
        ignore=truth["crowd"] | ~truth["labelled"].any(1),
        layout=Keypoints.of(
            keypoints,
            names=[f"k{i}" for i in range(keypoints)],
            sigmas=COCO_SIGMAS if keypoints == 17 else rng.uniform(0.02, 0.12, keypoints),
        ),
    )


def random_predictions(rng: np.random.Generator, truth: GroundTruth, count: int) -> PoseDistributions:
    """Disturbed objects, some exact and some twice, with tied scores; one category has no objects at all."""
    source = rng.integers(0, len(truth), count)
    noise = rng.normal(size=(count, truth.keypoint_count, 2)) * np.sqrt(truth.area[source])[:, None, None]
    noise *= rng.choice([0, 0.01, 0.05, 0.15], (count, 1, 1))
    points = truth.keypoints[source] + noise
    twin = rng.random(count) < 0.1
    points[twin] = points[0]
    image_ids = np.where(rng.random(count) < 0.9, truth.image_ids[source], rng.choice(IMAGES, count))
    return predictions_of(
        points,
        scores=np.round(rng.random(count), 1),
        image_ids=image_ids,
        class_ids=np.where(rng.random(count) < 0.9, truth.class_ids[source], rng.choice(CATEGORIES, count)),
    )


def predictions_of(
    points: Array,
    scores: Sequence[float] | Array,
    image_ids: Sequence[int] | Array,
    class_ids: Sequence[int] | Array,
) -> PoseDistributions:
    covariance = np.tile(np.eye(2), (*points.shape[:2], 1, 1))
    return PoseDistributions(
        boxes=np.concatenate([points.min(1), points.max(1)], axis=1),
        scores=np.asarray(scores, dtype=float),
        keypoints=points,
        covariance=covariance,
        scale=covariance,
        image_ids=np.asarray(image_ids),
        class_ids=np.asarray(class_ids),
    )


def pycocotools_evaluation(predictions: PoseDistributions, truth: GroundTruth) -> Any:
    """COCOeval, evaluated, on the same data; annotation i has the id i + 1, and so has detection i."""
    assert predictions.image_ids is not None
    assert predictions.class_ids is not None
    flags = np.where(truth.labelled, 2, 0)[..., None]
    triples = np.concatenate([truth.keypoints, flags], axis=2).reshape(len(truth), -1)
    visible = np.ones((*predictions.keypoints.shape[:2], 1))
    found = np.concatenate([predictions.keypoints, visible], axis=2).reshape(len(predictions), -1)
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {
            "images": [{"id": int(i)} for i in truth.images],
            "categories": [{"id": c, "keypoints": list(truth.layout.names)} for c in CATEGORIES],
            "annotations": [
                {
                    "id": i + 1,
                    "image_id": int(truth.image_ids[i]),
                    "category_id": int(truth.class_ids[i]),
                    "keypoints": triples[i].tolist(),
                    "num_keypoints": int(truth.labelled[i].sum()),
                    "area": float(truth.area[i]),
                    "bbox": truth.boxes[i].tolist(),
                    "iscrowd": int(truth.crowd[i]),
                }
                for i in range(len(truth))
            ],
        }
        coco.createIndex()
        results = coco.loadRes(
            [
                {
                    "image_id": int(predictions.image_ids[i]),
                    "category_id": int(predictions.class_ids[i]),
                    "keypoints": found[i].tolist(),
                    "score": float(predictions.scores[i]),
                }
                for i in range(len(predictions))
            ]
        )
        evaluation = COCOeval(coco, results, "keypoints")
        evaluation.params.kpt_oks_sigmas = np.array(truth.layout.sigmas)
        evaluation.evaluate()
    return evaluation


def pycocotools_matches(evaluation: Any, area_range: list[float], detections: int) -> Array:
    taken = np.full((len(OKS_THRESHOLDS), detections), -1)
    for entry in evaluation.evalImgs:
        if entry is not None and entry["aRng"] == area_range:
            for column, identity in enumerate(entry["dtIds"]):
                taken[:, identity - 1] = entry["dtMatches"][:, column] - 1
    return taken


@pytest.mark.parametrize("keypoints", [17, 5, 1])
@settings(max_examples=25)
@given(seed=SEEDS)
def test_equal_to_pycocotools(keypoints: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth = random_truth(rng, int(rng.integers(4, 45)), keypoints)
    predictions = random_predictions(rng, truth, int(rng.integers(1, 400)))
    evaluation = pycocotools_evaluation(predictions, truth)
    assert predictions.image_ids is not None
    assert predictions.class_ids is not None
    pairs = candidate_pairs(predictions, truth)

    own = dict.fromkeys(evaluation.ious, 0)
    for image, category, rank, slot, oks in zip(
        predictions.image_ids[pairs.detection],
        predictions.class_ids[pairs.detection],
        pairs.rank,
        pairs.slot,
        pairs.similarity,
        strict=True,
    ):
        assert evaluation.ious[image, category][rank, slot] == oks  # to the last bit
        own[image, category] += 1
    assert own == {key: np.size(value) for key, value in evaluation.ious.items()}

    for area_range in evaluation.params.areaRng:
        outside = (truth.area < area_range[0]) | (truth.area > area_range[1])
        taken = greedy_match(pairs, len(predictions), truth.ignore | outside, truth.crowd)
        np.testing.assert_array_equal(
            taken, pycocotools_matches(evaluation, area_range, len(predictions)), err_msg=str(area_range)
        )


def test_the_random_data_hold_what_they_should() -> None:
    """The random data of the parity test contain the edge cases."""
    rng = np.random.default_rng(0)
    truth = random_truth(rng, 40)
    predictions = random_predictions(rng, truth, 399)
    pairs = candidate_pairs(predictions, truth)
    assert truth.crowd.any()
    assert (~truth.labelled.any(1)).any()
    assert (~truth.crowd & truth.ignore).any()
    assert pairs.rank.max() == 19
    assert predictions.image_ids is not None
    assert predictions.class_ids is not None
    groups = np.stack([predictions.image_ids, predictions.class_ids, predictions.scores * 10], 1)
    assert len(np.unique(groups, axis=0)) < len(groups)
    assert np.unique(truth.keypoints, axis=0).shape[0] < len(truth)
    taken = greedy_match(pairs, len(predictions), truth.ignore, truth.crowd)
    assert truth.ignore[taken[taken >= 0]].any()
    assert (~truth.ignore[taken[taken >= 0]]).any()
    assert (taken[0] != taken[-1]).any()


@settings(max_examples=20)
@given(SEEDS)
def test_order_of_images_does_not_matter(seed: int) -> None:
    """Detections of other images may come in between: only the order within an image counts."""
    rng = np.random.default_rng(seed)
    truth = random_truth(rng, 20)
    predictions = random_predictions(rng, truth, 120)
    assert predictions.image_ids is not None
    place = rng.permutation(len(IMAGES))
    order = np.argsort(place[np.searchsorted(IMAGES, predictions.image_ids)], kind="stable")
    taken = [
        greedy_match(candidate_pairs(p, truth), len(p), truth.ignore, truth.crowd)
        for p in (predictions, predictions[order])
    ]
    np.testing.assert_array_equal(taken[0][:, order], taken[1])


def one_object(count: int = 1, **changes: Array) -> GroundTruth:
    """``count`` equal objects in image 3."""
    base = random_truth(np.random.default_rng(0), 1)
    values = {
        "image_ids": np.full(count, 3),
        "class_ids": np.ones(count, dtype=int),
        "keypoints": np.tile(np.arange(34.0).reshape(17, 2), (count, 1, 1)),
        "labelled": np.ones((count, 17), dtype=bool),
        "boxes": np.tile([0.0, 0, 34, 34], (count, 1)),
        "area": np.full(count, 900.0),
        "crowd": np.zeros(count, dtype=bool),
        "ignore": np.zeros(count, dtype=bool),
    }
    return GroundTruth(images=IMAGES, **(values | changes), layout=base.layout)


def taken_by(truth: GroundTruth, predictions: PoseDistributions) -> list[int]:
    pairs = candidate_pairs(predictions, truth)
    taken: list[int] = greedy_match(pairs, len(predictions), truth.ignore, truth.crowd, np.array([0.5]))[0].tolist()
    return taken


def copies(truth: GroundTruth, scores: Sequence[float] | Array, image: int = 3) -> PoseDistributions:
    points = np.repeat(truth.keypoints[:1], len(scores), axis=0)
    return predictions_of(points, scores, [image] * len(scores), [1] * len(scores))


def test_the_better_score_chooses_first_and_ties_take_the_later_object() -> None:
    truth = one_object(2)
    assert taken_by(truth, copies(truth, [0.2, 0.9, 0.5])) == [-1, 1, 0]
    assert taken_by(truth, copies(truth, [0.5, 0.5, 0.5])) == [1, 0, -1]


def test_only_crowds_are_shared_and_ignored_ones_come_last() -> None:
    crowd = one_object(2, crowd=np.array([True, False]), ignore=np.array([True, False]))
    assert taken_by(crowd, copies(crowd, [0.9, 0.8, 0.7])) == [1, 0, 0]
    ignored = one_object(2, ignore=np.array([False, True]))
    assert taken_by(ignored, copies(ignored, [0.9, 0.8, 0.7])) == [0, 1, -1]


def test_detections_past_the_cap_have_no_pairs() -> None:
    truth = one_object(30)
    predictions = copies(truth, np.linspace(1, 0, 25))
    assert candidate_pairs(predictions, truth).rank.max() == 19
    assert sorted(set(candidate_pairs(predictions, truth, 3).detection.tolist())) == [0, 1, 2]
    assert taken_by(truth, predictions)[20:] == [-1] * 5


@settings(max_examples=25)
@given(SEEDS, st.sampled_from([0.01, 0.3, 0.5, 0.9]))
def test_only_pairs_below_the_least_similarity_are_left_out(seed: int, least: float) -> None:
    rng = np.random.default_rng(seed)
    truth = random_truth(rng, int(rng.integers(4, 30)))
    predictions = random_predictions(rng, truth, int(rng.integers(1, 150)))
    every, near = candidate_pairs(predictions, truth), candidate_pairs(predictions, truth, least=least)
    found = {(d, g): oks for d, g, oks in zip(near.detection, near.object, near.similarity, strict=True)}
    for d, g, oks in zip(every.detection, every.object, every.similarity, strict=True):
        assert found[d, g] == oks if (d, g) in found else oks < least


@pytest.mark.parametrize("least", [0.0, 0.5])
def test_pairs_do_not_depend_on_blocks(least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    truth = random_truth(rng, 30)
    predictions = random_predictions(rng, truth, 150)
    whole = candidate_pairs(predictions, truth, least=least)
    monkeypatch.setattr(greedy_matching, "_BLOCK", 7)
    np.testing.assert_equal(vars(candidate_pairs(predictions, truth, least=least)), vars(whole))


def test_far_objects_have_no_pairs_unless_unlabelled() -> None:
    truth = one_object(2, labelled=np.array([[True] * 17, [False] * 17]))
    far = replace(copies(truth, [0.9]), keypoints=copies(truth, [0.9]).keypoints + 1e4)
    assert candidate_pairs(far, truth, least=0.5).object.tolist() == [1]
    lost = replace(far, keypoints=np.full_like(far.keypoints, np.nan))
    assert len(candidate_pairs(lost, truth, least=0.5).object) == 2


def test_nothing_to_match() -> None:
    truth = one_object()
    elsewhere = copies(truth, [0.9], image=8)
    assert taken_by(truth, elsewhere) == [-1]
    assert greedy_match(candidate_pairs(elsewhere[:0], truth), 0, truth.ignore, truth.crowd).shape == (10, 0)


def test_a_detection_of_an_unknown_image_matches_nothing() -> None:
    """Image 5 is not in the ground truth, which lists 3 and 8: it must not be taken for either."""
    truth = one_object(image_ids=np.array([8]))
    with contextlib.suppress(HaloposeError):  # refusing it is as good
        assert taken_by(truth, copies(truth, [0.9], image=5)) == [-1]


@settings(max_examples=25)
@given(SEEDS, st.sampled_from([0.5, 0.75]), st.sampled_from([3, 20]))
def test_true_pairs_are_matches_with_objects_that_count(seed: int, threshold: float, most: int) -> None:
    """By the plain loop of the definition: best score first, each object once, ignored ones do not count."""
    rng = np.random.default_rng(seed)
    truth = random_truth(rng, int(rng.integers(4, 30)))
    predictions = random_predictions(rng, truth, int(rng.integers(1, 150)))
    detections, objects = true_pairs(predictions, truth, threshold, most)
    expected = dict(plain_pairs(predictions, truth, threshold, most))
    assert dict(zip(detections.tolist(), objects.tolist(), strict=True)) == expected
    assert (np.diff(detections) > 0).all()


def plain_pairs(
    predictions: PoseDistributions, truth: GroundTruth, threshold: float, most: int
) -> Iterator[tuple[int, int]]:
    """True positives, one detection at a time."""
    assert predictions.image_ids is not None
    assert predictions.class_ids is not None
    groups = np.stack([predictions.image_ids, predictions.class_ids], 1)
    for image, category in np.unique(groups, axis=0):
        mine = np.flatnonzero((groups == [image, category]).all(1))
        there = np.flatnonzero((truth.image_ids == image) & (truth.class_ids == category))
        free = set(there.tolist())
        for d in mine[np.argsort(-predictions.scores[mine], kind="stable")][:most].tolist():
            for counts in (True, False):  # an ignored object only where no other is left
                oks = {
                    g: float(object_keypoint_similarity(predictions, truth, np.array([d]), np.array([g]))[0])
                    for g in free
                    if truth.ignore[g] != counts
                }
                found = [g for g in sorted(oks) if oks[g] >= threshold]
                if found:
                    best = max(found, key=lambda g: (oks[g], g))
                    if not truth.crowd[best]:
                        free.remove(best)
                    if counts:
                        yield d, best
                    break


def test_no_objects_no_true_pairs() -> None:
    truth = one_object(0)
    detections, objects = true_pairs(copies(one_object(), [0.9]), truth)
    assert len(detections) == len(objects) == 0


@given(SEEDS)
def test_keypoint_similarity_is_eq_20(seed: int) -> None:
    rng = np.random.default_rng(seed)
    residual, area = rng.normal(size=(4, 17, 2)) * 20, rng.uniform(10, 1e5, 4)
    own = keypoint_similarity(residual, area, 2 * COCO_SIGMAS)
    for i, k in np.ndindex(4, 17):
        r, kappa = residual[i, k], 2 * COCO_SIGMAS[k]
        assert own[i, k] == pytest.approx(np.exp(-(r @ r) / (2 * area[i] * kappa**2)), rel=1e-12, abs=1e-300)


# --- matching by box ----------------------------------------------------------------------------------------------


def plain_iou(first: Array, second: Array) -> float:
    """IoU of two boxes given by two corners."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    shared = max(width, 0) * max(height, 0)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (first, second)]
    return float(shared / (sum(areas) - shared)) if sum(areas) > shared else 0.0


@settings(max_examples=25)
@given(SEEDS)
def test_matches_by_box_equal_those_of_the_plain_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth = random_truth(rng, int(rng.integers(4, 30)))
    predictions = random_predictions(rng, truth, int(rng.integers(1, 150)))
    assert predictions.image_ids is not None
    assert predictions.class_ids is not None
    expected = {}
    taken: set[int] = set()
    groups = np.stack([predictions.image_ids, predictions.class_ids], 1)
    corners = np.concatenate([truth.boxes[:, :2], truth.boxes[:, :2] + truth.boxes[:, 2:]], axis=1)
    for image, category in np.unique(groups, axis=0):
        mine = np.flatnonzero((groups == [image, category]).all(1) & (predictions.scores >= 0.4))
        there = np.flatnonzero((truth.image_ids == image) & (truth.class_ids == category))
        for d in mine[np.argsort(-predictions.scores[mine], kind="stable")][:20].tolist():
            for counts in (True, False):
                free = [g for g in there.tolist() if g not in taken and truth.ignore[g] != counts]
                overlap = {g: plain_iou(predictions.boxes[d], corners[g]) for g in free}
                found = [g for g in free if overlap[g] >= 0.3]
                if found:
                    best = max(found, key=lambda g: (overlap[g], g))
                    taken |= set() if truth.crowd[best] else {best}
                    if counts:
                        expected[d] = best
                    break
    detections, objects = true_pairs_by_box(predictions, truth, 0.3, 0.4)
    assert dict(zip(detections.tolist(), objects.tolist(), strict=True)) == expected


def test_keypoints_play_no_part_in_a_match_by_box() -> None:
    truth = one_object()
    found = copies(truth, [0.9])
    far = replace(found, keypoints=found.keypoints + 1e4, boxes=xywh_to_xyxy(truth.boxes))
    assert len(true_pairs(far, truth)[0]) == 0
    assert true_pairs_by_box(far, truth)[0].tolist() == [0]
    assert len(true_pairs_by_box(replace(far, scores=np.array([0.2])), truth)[0]) == 0
    assert len(match_poses(far, truth, Protocol(match="box"))) == 1
