"""The verdict says what hand-made metrics say, and says nothing that they do not."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halopose.reports.verdict import verdict

LEVELS = np.arange(1, 100) / 100
NAMES = ["nose", "left_ankle", "right_ankle"]


def make(
    coverage: Any = LEVELS,
    cells: list[list[float]] | None = None,
    count: int = 1000,
    names: list[str] | None = None,
    keypoints: int = 100_000,
) -> dict[str, Any]:
    """Metrics with the coverage curve (99,) as given and cells (K, S) at 95 %; all else is calibrated."""
    names = names or NAMES
    cells = cells or [[0.95, 0.95]] * len(names)
    calibrated = [[0.95] * len(row) for row in cells]
    block = {"ace": 0.001, "nll": 4.5, "akp": 0.94}
    return {
        "keypoints": keypoints,
        "keypoint_names": names,
        "scales": [{"name": name} for name in ("small", "large")[: len(cells[0])]],
        "uncalibrated": block,
        "gaussian": block,
        "student_t": block,
        "calibration": {"nu": [4.0] * len(names)},
        "akp_random": 0.86,
        "akp_visibility": 0.90,
        "akp_skill": 0.5714,
        "pruned": {"kept_fraction": 0.72, "gaussian": {"nll": 4.09}},
        "cells": {
            "count": [[count] * len(row) for row in cells],
            "uncalibrated": {"95": cells},
            "gaussian": {"95": calibrated},
            "student_t": {"95": calibrated},
        },
        "curves": {"uncalibrated": {"coverage": {"joint": list(coverage)}}},
    }


def text(metrics: dict[str, Any]) -> str:
    return " ".join(verdict(metrics))


def test_calibrated_predictions_are_praised_and_nobody_is_blamed() -> None:
    said = verdict(make())
    assert said[0] == (
        "As given, the predictions are well calibrated: every region holds what it promises to within 1 %."
    )
    assert "overconfident" not in " ".join(said)
    assert "underconfident" not in " ".join(said)


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        (LEVELS - 0.11 * LEVELS, "overconfident: a 95 % ellipse holds the truth 85 % of the time"),
        (LEVELS**0.7, "underconfident: a 95 % ellipse holds the truth 96 % of the time"),
        (
            LEVELS + 0.1 * np.sin(2 * np.pi * LEVELS * 0.7),
            "too cautious in the centre and too confident in the tails: "
            "a 50 % ellipse holds the truth 58 % of the time, a 95 % ellipse 86 %",
        ),
        (
            LEVELS - np.where(LEVELS > 0.9, -0.03, 0.1),
            "too confident in the centre and too cautious in the tails",
        ),
        (LEVELS + 0.08 * (LEVELS == 0.5), "underconfident: a 50 % ellipse holds the truth 58 %"),
        (LEVELS - 0.08 * (LEVELS == 0.7), "overconfident: a 70 % ellipse holds the truth 62 %"),
    ],
)
def test_direction_of_miscalibration(curve: Any, expected: str) -> None:
    assert expected in verdict(make(curve))[0]


def test_deviation_within_chance_is_not_called_miscalibration() -> None:
    said = verdict(make(LEVELS - 0.03 * LEVELS, keypoints=150))[0]
    assert "no miscalibration" in said
    assert "confident" not in said


def test_left_and_right_are_pooled_into_a_plural() -> None:
    said = text(make(cells=[[0.95, 0.95], [0.70, 0.95], [0.72, 0.95]]))
    assert "Most overconfident for ankles on small objects (95 % ellipse holds 71 %)." in said


def test_underconfident_place_is_named_as_such() -> None:
    said = text(make(cells=[[0.95, 0.995], [0.95, 0.95], [0.95, 0.95]]))
    assert "Most underconfident for nose on large objects (95 % ellipse holds 99.5 %)." in said
    assert "overconfident" not in said


def test_places_of_few_samples_and_chance_are_not_named() -> None:
    assert "ankles" not in text(make(cells=[[0.95, 0.95], [0.1, 0.95], [0.1, 0.95]], count=49))
    assert "ankles" in text(make(cells=[[0.95, 0.95], [0.1, 0.95], [0.1, 0.95]], count=50))
    assert "ankles" not in text(make(cells=[[0.95, 0.95], [0.92, 0.95], [0.92, 0.95]], count=100))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["left_foot", "right_foot"], "feet"),
        (["L_Eye", "R_Eye"], "eyes"),
        (["KneeLeft", "KneeRight"], "knees"),
        (["hand.l", "hand.r"], "hands"),
        (["left_hand_3", "right_hand_3"], "left and right hand 3"),
        (["left_ankle", "knee"], "left ankle"),
        (["left_body", "right_body"], "bodies"),
    ],
)
def test_names(names: list[str], expected: str) -> None:
    said = text(make(names=names, cells=[[0.5, 0.95], [0.5, 0.95]]))
    assert f"Most overconfident for {expected} on small objects" in said


def test_heavy_tails() -> None:
    metrics = make()
    metrics["uncalibrated"] = {"ace": 0.0318}
    metrics["gaussian"] = {"ace": 0.1029}
    metrics["student_t"] = {"ace": 0.00081}
    assert (
        "The residuals have heavy tails: Student-t calibration lowers ACE from .032 to .0008, "
        "Gaussian calibration raises it to .103."
    ) in verdict(metrics)
    metrics["calibration"]["nu"] = [50.0]
    assert "heavy tails" not in text(metrics)


def test_gaussian_calibration_suffices() -> None:
    metrics = make()
    metrics["uncalibrated"] = {"ace": 0.1}
    metrics["gaussian"] = {"ace": 0.002}
    metrics["student_t"] = {"ace": 0.003}
    expected = "Gaussian calibration lowers ACE from .100 to .002; a Student-t does about as well (.003)."
    assert expected in verdict(metrics)


def test_error_left_after_calibration() -> None:
    metrics = make()
    metrics["student_t"] = {"ace": 0.0005}
    metrics["cells"]["student_t"] = {"95": [[0.95, 0.95], [0.90, 0.95], [0.90, 0.95]]}
    assert (
        "After Student-t calibration the largest error left is overconfidence for ankles on small objects "
        "(95 % ellipse holds 90 %)."
    ) in verdict(metrics)


def test_ranking_and_pruning() -> None:
    said = text(make())
    assert (
        "is strong: AKP .940 against .900 for the visibility score and .860 for a random ranking (skill .57)."
    ) in said
    assert "removes 28 % of keypoints and lowers NLL by .41." in said


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"akp_skill": -0.01, "akp_random": 0.941}, "no better than chance"),
        ({"akp_visibility": 0.95}, "the visibility score ranks better"),
        ({"pruned": {"kept_fraction": 1.0, "threshold": None}}, "removes nothing"),
        ({"pruned": {"kept_fraction": 0.0}}, "removes every keypoint"),
        ({"pruned": {"kept_fraction": 0.5, "gaussian": {"nll": 5.0}}}, "raises NLL by .50"),
        ({"pruned": {"kept_fraction": 0.99999}}, "removes less than 0.1 % of keypoints."),
    ],
)
def test_odd_rankings_and_prunings(changes: dict[str, Any], expected: str) -> None:
    assert expected in text({**make(), **changes})


@pytest.mark.parametrize("keypoints", [0, 1, 99, None])
def test_too_few_keypoints_to_judge(keypoints: int | None) -> None:
    said = verdict({**make(LEVELS * 0.5), "keypoints": keypoints})
    assert len(said) == 1
    assert said[0].startswith("Too few keypoints to judge")


def test_one_keypoint_at_one_scale_is_not_compared_with_itself() -> None:
    said = text(make(names=["tip"], cells=[[0.5]]))
    assert "tip" not in said


def test_arrays_and_lists_read_the_same() -> None:
    plain = make(LEVELS * 0.9, cells=[[0.95, 0.95], [0.70, 0.95], [0.72, math.nan]])
    arrays = copy.deepcopy(plain)
    arrays["curves"]["uncalibrated"]["coverage"]["joint"] = LEVELS * 0.9
    for regime in ("uncalibrated", "gaussian", "student_t"):
        arrays["cells"][regime]["95"] = np.array(arrays["cells"][regime]["95"])
    arrays["cells"]["count"] = np.array(arrays["cells"]["count"])
    assert verdict(arrays) == verdict(plain)


PATHS = [
    ("uncalibrated",),
    ("gaussian", "ace"),
    ("student_t", "ace"),
    ("gaussian", "akp"),
    ("gaussian", "nll"),
    ("akp_random",),
    ("akp_visibility",),
    ("akp_skill",),
    ("pruned",),
    ("pruned", "kept_fraction"),
    ("cells",),
    ("cells", "count"),
    ("cells", "uncalibrated", "95"),
    ("curves",),
    ("curves", "uncalibrated"),
    ("calibration",),
    ("scales",),
    ("keypoint_names",),
]


@settings(max_examples=60, deadline=None)
@given(st.sets(st.sampled_from(PATHS)), st.sampled_from([None, math.nan, [], "odd"]))
def test_whatever_is_missing_is_left_unsaid(paths: set[tuple[str, ...]], value: Any) -> None:
    metrics = copy.deepcopy(make(LEVELS * 0.9, cells=[[0.95, 0.95], [0.70, 0.95], [0.72, 0.95]]))
    for path in sorted(paths, key=len, reverse=True):
        place = metrics
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
    said = verdict(metrics)
    assert said
    for word in ("nan", "None", "null", "odd "):
        assert word not in " ".join(said)
