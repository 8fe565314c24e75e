"""Regions, joint distribution and alarms on the page: rows have the scores, pictures the strong correlations."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import numpy as np

from halopose.evaluation.region_scores import REGION_LEVELS, FlaggedShare, NoveltyScores
from halopose.evaluation.scores import Scores
from halopose.keypoints import COCO_LIMBS, COCO_NAMES
from halopose.reports.html import number
from halopose.reports.region_report import (
    alarm_rows,
    held_rows,
    joint_rows,
    missing_guarantees,
    region_rows,
    region_sizes,
    skeletons,
)
from halopose.reports.score_report import render_report, rounded
from halopose.reports.score_text import to_text
from halopose.uncertainty.regions import CONDITION
from tests.helpers.evaluations import real_scores
from tests.helpers.html_pages import parsed
from tests.helpers.values import present

NOVELTY = NoveltyScores(
    confidence=0.25,
    detections=FlaggedShare((0.012, 0.048, 0.092), (0.004, 0.008, float("nan")), 1234),
    images=FlaggedShare((0.01, 0.06, 0.11), (0.005, 0.01, 0.012), 400),
    held_kept=(0.94, 0.941, 0.942),
    held_flagged=(float("nan"), 0.7, 0.8),
)


def test_rows_name_the_scored_regions() -> None:
    scores = real_scores(bootstrap=3)
    rows = region_rows(scores)
    regions = present(scores.regions)
    name, cells, count = rows[0]
    assert (name, count) == ("All keypoints", f"{regions.keypoints.count:,}")
    assert [text for text, _ in cells] == [number(100 * held, 1) for held in regions.keypoints.held]
    assert all(margin.startswith("± ") for text, margin in cells if text != "–")
    assert [row[0] for row in rows[-2:]] == ["nose", "left eye"]
    assert len(region_sizes(scores)) == len(REGION_LEVELS)
    assert [row[0] for row in joint_rows(scores)] == ["Gaussian", "Student-t"]


def test_only_strong_correlations_are_drawn() -> None:
    scores = real_scores()
    matrix = np.eye(4)
    matrix[0, 2] = matrix[2, 0] = -0.5
    matrix[1, 3] = matrix[3, 1] = 0.1
    along_x, along_y = skeletons(replace(scores, joint=replace(present(scores.joint), correlation=matrix)))
    assert [round(link.value, 2) for link in along_x.links] == [-0.5]
    assert along_y.links == ()


def test_skeletons_are_drawn_upright() -> None:
    scores = real_scores(names=COCO_NAMES, instances=60)
    for picture in skeletons(replace(scores, limbs=COCO_LIMBS)):
        place = {name: (x, y) for x, y, name in picture.points}
        assert place["nose"][1] < place["left hip"][1] < place["left ankle"][1] < picture.height
        assert place["right wrist"][0] < place["left wrist"][0]  # they face the viewer
        assert len(picture.bones) == len(COCO_LIMBS)


def test_alarms_are_on_the_page_where_the_artifact_has_novelty() -> None:
    scores = replace(real_scores(), novelty=NOVELTY)
    (name, cells, count), (images, _, of_images) = alarm_rows(scores)
    assert (name, images, count, of_images) == ("Detections, confidence ≥ 0.25", "Images", "1,234", "400")
    assert cells == [("1.2", "± 0.4"), ("4.8", "± 0.8"), ("9.2", "")]
    assert held_rows(scores) == [
        ("Not flagged", ["94.0", "94.1", "94.2"]),
        ("Flagged", ["–", "70.0", "80.0"]),
    ]
    shown = render_report(scores)
    parsed(shown)
    assert shown.count("± 0.8") == 1
    assert "Out-of-distribution alarms" in shown
    [line] = [line for line in to_text(scores).splitlines() if "alarms" in line]
    assert re.findall(r"[\d.]+(?=\N{NO-BREAK SPACE}%)", line) == ["4.8", "0.8", "6.0", "1.0"]
    again = Scores.from_json(json.loads(json.dumps(rounded(scores.to_json())))).novelty
    np.testing.assert_equal(present(again).to_json(), NOVELTY.to_json())


def test_report_without_novelty_omits_it() -> None:
    scores = real_scores()
    assert not any((alarm_rows(scores), held_rows(scores), "novelty" in scores.to_json()))
    for text in (render_report(scores), to_text(scores)):
        assert "out-of-distribution" not in text.lower()


def test_without_regions_there_is_no_section() -> None:
    scores = replace(real_scores(), regions=None, joint=None, matches={})
    assert not any((region_rows(scores), region_sizes(scores), joint_rows(scores), skeletons(scores)))
    page = render_report(scores)
    assert "Conformal regions" not in page
    assert CONDITION in render_report(real_scores())


def test_levels_without_a_guarantee_have_no_figure() -> None:
    scores = real_scores(bootstrap=3)
    regions = present(scores.regions)
    missing = [level for level, held in zip(REGION_LEVELS, regions.whole.held, strict=True) if math.isnan(held)]
    assert missing == [99]
    assert f"at 99 % from {scores.images} images" in missing_guarantees(scores)
    assert "No guarantee is possible" in render_report(scores)
    enough = replace(regions, keypoints=replace(regions.keypoints, held=(0.9,) * 4), whole=regions.keypoints)
    known = replace(enough, whole=enough.keypoints)
    assert missing_guarantees(replace(scores, regions=known)) == ""
