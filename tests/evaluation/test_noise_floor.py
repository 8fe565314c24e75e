"""Noise floors: the range covers errors of calibrated models, with clusters; a miscalibrated one lies above."""

from dataclasses import replace

import numpy as np
import pytest

from halopose.evaluation.conditional_coverage import score_matches
from halopose.evaluation.keypoint_statistics import KeypointStatistics
from halopose.evaluation.match_scores import MatchScores
from halopose.evaluation.noise_floor import floors_of
from halopose.protocol import Protocol
from tests.helpers.evaluations import as_given, poses


def measured(seed: int, flaw: float = 1.0, copies: int = 1) -> MatchScores:
    """Scores of poses of a known distribution; copies of each keypoint are clusters that err alike."""
    matched = poses(150, 3, 5, seed=seed, flaw=flaw, images=60)
    if copies > 1:
        matched = matched.select(np.repeat(np.arange(len(matched)), copies))
    return score_matches(matched, as_given(matched), Protocol())


@pytest.mark.parametrize("copies", [1, 4])
def test_a_calibrated_model_is_compatible_and_an_overconfident_one_is_not(copies: int) -> None:
    scores = [measured(seed, copies=copies) for seed in range(12)]
    for metric in ("ace", "ence"):
        assert np.mean([one.distributions["student_t"].compatible(metric) for one in scores]) > 0.8
    wrong = measured(0, flaw=1.5, copies=copies).distributions["student_t"]
    assert not wrong.compatible("ace")
    assert not wrong.compatible("ence")


def test_the_expected_ace_is_the_mean_of_simulations() -> None:
    found = [measured(seed).distributions["student_t"] for seed in range(40)]
    assert np.mean([one.floors["ace"].expected for one in found]) == pytest.approx(
        np.mean([one.ace for one in found]), rel=0.2
    )


def test_groups_are_made_by_attributes_of_the_objects() -> None:
    matched = poses(120, 3, 5, seed=1)
    occluded = np.asarray(matched.visibility) < 0.3
    # Occluded keypoints err twice as far as stated.
    matched = replace(matched, occluded=occluded, residual=matched.residual * np.where(occluded, 2.0, 1.0)[..., None])
    scores = score_matches(matched, as_given(matched), Protocol())
    flag = {group.name: group for group in scores.groups if group.kind == "visibility flag"}
    assert flag["occluded"].count == occluded.sum()
    one = flag["occluded"].distributions["student_t"]
    assert not one.floor.compatible(one.ace)
    assert one.coverage[95] < flag["visible"].distributions["student_t"].coverage[95]
    assert {group.kind for group in scores.groups} == {"visibility flag", "object size", "stated sigma", "keypoint"}


def test_few_images_have_no_floor() -> None:
    matched = poses(9, 3, images=4)
    statistics = KeypointStatistics.of(as_given(matched).distributions["gaussian"], matched, Protocol())
    image = np.unique(matched.image_ids, return_inverse=True)[1].repeat(3)
    assert floors_of(statistics, image, image.max() + 1)["ace"].high == np.inf
