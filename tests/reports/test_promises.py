"""Regions and the joint law on the page: rows say what was scored, and the picture draws what is strong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from halopose.evaluation.promise_scores import REGION_LEVELS
from halopose.keypoints import COCO_LIMBS, COCO_NAMES
from halopose.reports.promises import joint_rows, region_rows, sizes, skeletons
from halopose.reports.scores import render
from halopose.uncertainty.conformal import CONDITION
from tests.helpers.evaluations import real_scores
from tests.helpers.values import present


def test_rows_say_what_was_scored() -> None:
    scores = real_scores(bootstrap=3)
    rows = region_rows(scores)
    regions = present(scores.regions)
    name, cells, count = rows[0]
    assert (name, count) == ("All keypoints", f"{regions.keypoints.count:,}")
    assert [text for text, _ in cells] == [f"{100 * held:.1f}" for held in regions.keypoints.held]
    assert all(margin.startswith("± ") for _, margin in cells)
    assert [row[0] for row in rows[-2:]] == ["nose", "left eye"]
    assert len(sizes(scores)) == len(REGION_LEVELS)
    assert [row[0] for row in joint_rows(scores)] == ["Gaussian", "Student-t"]


def test_only_strong_correlations_are_drawn() -> None:
    scores = real_scores()
    matrix = np.eye(4)
    matrix[0, 2] = matrix[2, 0] = -0.5
    matrix[1, 3] = matrix[3, 1] = 0.1
    along_x, along_y = skeletons(replace(scores, joint=replace(present(scores.joint), correlation=matrix)))
    assert [round(link.value, 2) for link in along_x.links] == [-0.5]
    assert along_y.links == ()


def test_persons_stand_on_their_feet() -> None:
    scores = real_scores(names=COCO_NAMES, instances=60)
    for picture in skeletons(replace(scores, limbs=COCO_LIMBS)):
        place = {name: (x, y) for x, y, name in picture.points}
        assert place["nose"][1] < place["left hip"][1] < place["left ankle"][1] < picture.height
        assert place["right wrist"][0] < place["left wrist"][0]  # they face the viewer
        assert len(picture.bones) == len(COCO_LIMBS)


def test_without_regions_there_is_no_section() -> None:
    scores = replace(real_scores(), regions=None, joint=None)
    assert not any((region_rows(scores), sizes(scores), joint_rows(scores), skeletons(scores)))
    page = render(scores)
    assert "Regions with a guarantee" not in page
    assert CONDITION in render(real_scores())
