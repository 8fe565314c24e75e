"""Dispersion from scores: recovers a known distribution, is monotone, and is calibrated on other images."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from halopose.calibration.dispersion_features import feature_columns, object_size, parse_features
from halopose.calibration.dispersion_model import (
    SCORE_FEATURES,
    DispersionModel,
    cross_fitted_dispersions,
    match_predicted,
)
from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.poses import GroundTruth, PoseDistributions
from halopose.protocol import Protocol
from halopose.types import Array

KEYPOINTS = 5
LAYOUT = Keypoints.of(KEYPOINTS, sigmas=[0.2] * KEYPOINTS, limbs=[(0, 1), (1, 2), (2, 3)])


def scored_poses(count: int = 600, seed: int = 0) -> tuple[PoseDistributions, GroundTruth, Array]:
    """Objects, one per image, whose deviation (N, K) falls with the keypoint score and rises with the size."""
    rng = np.random.default_rng(seed)
    side = np.exp(rng.uniform(3, 6, count))
    score = rng.uniform(0.02, 0.98, (count, KEYPOINTS))
    deviation = 0.08 * side[:, None] * (1 - score) ** 0.7
    place = rng.uniform(0, 1, (count, KEYPOINTS, 2)) * side[:, None, None]
    found = place + rng.normal(size=place.shape) * deviation[..., None]
    boxes = np.concatenate([np.zeros((count, 2)), np.tile(side[:, None], (1, 2))], axis=1)
    unit = np.tile(np.eye(2), (count, KEYPOINTS, 1, 1))
    images, one = np.arange(count), np.ones(count, dtype=np.int64)
    poses = PoseDistributions(
        boxes, rng.uniform(0.3, 1, count), found, unit, unit, visibility=score, class_ids=one, image_ids=images
    )
    no = np.zeros(count, dtype=bool)
    labelled = np.ones((count, KEYPOINTS), dtype=bool)
    truth = GroundTruth(images, images, one, place, labelled, boxes, side**2, no, no, LAYOUT)
    return poses, truth, deviation


def test_the_true_deviation_is_found_from_scores() -> None:
    poses, truth, _ = scored_poses()
    model = DispersionModel.fit(poses, truth, Protocol(), ["score", "visibility", "size"])
    other, _, wanted = scored_poses(seed=1)
    stated = np.sqrt(np.linalg.det(model.apply(other).scale)) ** 0.5
    assert other.visibility is not None
    middle = (other.visibility > 0.1) & (other.visibility < 0.9)
    ratio = np.log(stated / wanted)[middle]
    assert abs(np.median(ratio)) < 0.3
    assert ratio.std() < 0.2 < np.log(wanted / object_size(other)[:, None])[middle].std()


def test_a_higher_score_never_widens() -> None:
    poses, truth, _ = scored_poses(200)
    model = DispersionModel.fit(poses, truth, Protocol(), ["visibility"])
    scores = np.linspace(0, 1, len(poses))[:, None] * np.ones((1, KEYPOINTS))
    same = replace(poses, boxes=np.tile(poses.boxes[:1], (len(poses), 1)), visibility=scores)
    size = np.linalg.det(model.apply(same).scale)
    assert (np.diff(size, axis=0) <= 1e-12).all()
    assert (size[0] > size[-1]).all()


def test_each_image_is_predicted_from_others() -> None:
    poses, truth, _ = scored_poses(60)
    crossed = cross_fitted_dispersions(poses, truth, Protocol())
    moved = replace(truth, keypoints=truth.keypoints + np.where(np.arange(60) == 7, 9.0, 0.0)[:, None, None])
    again = cross_fitted_dispersions(poses, moved, Protocol())
    assert np.allclose(crossed.scale[7], again.scale[7])
    assert not np.allclose(crossed.scale, again.scale)


def test_json_and_back_gives_the_same_covariances() -> None:
    poses, truth, _ = scored_poses(80)
    model = DispersionModel.fit(poses, truth, Protocol())
    assert np.array_equal(DispersionModel.from_json(model.to_json()).apply(poses).scale, model.apply(poses).scale)
    for name, value in {
        "weights": [1.0],
        "features": ["hair"],
        "base": "moon",
        "shape": [[[0, 0], [0, 0]]] * 5,
    }.items():
        with pytest.raises(ValueError, match=r".+"):
            DispersionModel.from_json(model.to_json() | {name: value})


def test_a_stated_base_keeps_its_directions() -> None:
    poses, truth, deviation = scored_poses(300)
    long = np.array([[4.0, 1.0], [1.0, 2.0]]) * np.square(deviation / object_size(poses)[:, None])[..., None, None]
    stated = replace(poses, covariance=long, scale=long)
    model = DispersionModel.fit(stated, truth, Protocol(), ["size"], "stated")
    ratio = model.apply(stated).scale / long
    assert np.allclose(ratio, ratio[..., :1, :1])
    small, large = np.quantile(object_size(poses), [0.1, 0.9])
    by_size = ratio[object_size(poses) > large].mean() / ratio[object_size(poses) < small].mean()
    assert by_size > 20  # the stated deviations lack the factor of the size


def test_keypoints_that_were_not_predicted_teach_nothing() -> None:
    poses, truth, _ = scored_poses(100)
    points, scores = poses.keypoints.copy(), poses.visibility.copy()  # type: ignore[union-attr]
    points[:50, 2], scores[:50, 2] = 0, 0
    gone = replace(poses, keypoints=points, visibility=scores)
    lenient = Protocol(oks_threshold=0.1)
    assert not match_predicted(gone, truth, lenient).labelled[:50, 2].any()
    assert np.isfinite(DispersionModel.fit(gone, truth, lenient).apply(gone).scale).all()


@pytest.mark.parametrize("count", [1, 2])
def test_few_keypoints_without_limbs_have_all_features(count: int) -> None:
    poses, _, _ = scored_poses(10)
    fewer = PoseDistributions(
        poses.boxes, poses.scores, poses.keypoints[:, :count], poses.covariance[:, :count], poses.scale[:, :count]
    )
    columns = feature_columns(fewer, Keypoints.of(count), SCORE_FEATURES)
    assert all(values.shape == (10, count) and np.isfinite(values).all() for values in columns.values())


def test_unknown_features_are_named() -> None:
    assert parse_features("visibility, score") == ("score", "visibility")
    with pytest.raises(HaloposeError, match="hair"):
        parse_features("score,hair")
