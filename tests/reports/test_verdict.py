"""The verdict says what hand-made scores say, and says nothing that they do not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halopose.calibration.calibrate import DISTRIBUTIONS
from halopose.evaluation.scores import CoverageCells, ScaleScores, Scores
from halopose.reports.verdict import coverage_at, verdict
from halopose.types import Array
from tests.helpers.evaluations import real_scores, with_distribution, with_pruned_distribution

LEVELS = np.arange(1, 100) / 100
NAMES = ("nose", "left_ankle", "right_ankle")
SCALES = (ScaleScores("small", 0.0, 1024.0, 50), ScaleScores("large", 1024.0, math.inf, 50))


def with_coverage(scores: Scores, distribution: str, curve: Array) -> Scores:
    """The same scores with another joint coverage curve (99,)."""
    curves = scores.distribution(distribution).curves
    return with_distribution(scores, distribution, curves=replace(curves, coverage={**curves.coverage, "joint": curve}))


def with_cells(scores: Scores, distribution: str, cells: Any) -> Scores:
    """The same scores with other shares (K, S) held by the 95 % ellipses of a law."""
    coverage = {
        **scores.cells.coverage,
        distribution: {**scores.cells.coverage[distribution], 95: np.array(cells, dtype=float)},
    }
    return replace(scores, cells=replace(scores.cells, coverage=coverage))


def make(
    curve: Array = LEVELS,
    cells: Sequence[Sequence[float]] | None = None,
    count: int = 1000,
    names: Sequence[str] = NAMES,
    keypoints: int = 100_000,
) -> Scores:
    """Real scores with the coverage curve as given and cells (K, S) at 95 %; all else is calibrated."""
    cells = cells or [[0.95, 0.95]] * len(names)
    shape = (len(names), len(cells[0]))
    scores = replace(
        real_scores(tuple(names)),
        keypoints=keypoints,
        scales=SCALES[: shape[1]],
        akp_random=0.86,
        akp_visibility=0.90,
        akp_skill=0.5714,
        cells=CoverageCells(
            np.full(shape, count),
            {distribution: {level: np.full(shape, 0.95) for level in (50, 90, 95)} for distribution in DISTRIBUTIONS},
        ),
    )
    for distribution in DISTRIBUTIONS:
        scores = with_distribution(scores, distribution, ace=0.001, nll=4.5, akp=0.94)
    scores = replace(
        scores,
        calibration=replace(scores.calibration, nu=np.full(len(names), 4.0)),
        pruned=replace(scores.pruned, kept_fraction=0.72),
    )
    scores = with_pruned_distribution(scores, "gaussian", nll=4.09)
    return with_cells(with_coverage(scores, "uncalibrated", curve), "uncalibrated", cells)


def text(scores: Scores) -> str:
    return " ".join(verdict(scores))


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
def test_direction_of_miscalibration(curve: Array, expected: str) -> None:
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


def with_ace(scores: Scores, uncalibrated: float, gaussian: float, student_t: float) -> Scores:
    for distribution, ace in zip(DISTRIBUTIONS, (uncalibrated, gaussian, student_t), strict=True):
        scores = with_distribution(scores, distribution, ace=ace)
    return scores


def test_heavy_tails() -> None:
    scores = with_ace(make(), 0.0318, 0.1029, 0.00081)
    assert (
        "The residuals have heavy tails: Student-t calibration lowers ACE from .032 to .0008, "
        "Gaussian calibration raises it to .103."
    ) in verdict(scores)
    for nu in (np.array([50.0]), None, np.array([math.nan])):
        light = replace(scores, calibration=replace(scores.calibration, nu=nu))
        assert "heavy tails" not in text(light)
        assert "Student-t calibration lowers ACE" in text(light)


def test_gaussian_calibration_suffices() -> None:
    expected = "Gaussian calibration lowers ACE from .100 to .002; a Student-t does about as well (.003)."
    assert expected in verdict(with_ace(make(), 0.1, 0.002, 0.003))


def test_error_left_after_calibration() -> None:
    scores = with_distribution(make(), "student_t", ace=0.0005)
    scores = with_cells(scores, "student_t", [[0.95, 0.95], [0.90, 0.95], [0.90, 0.95]])
    assert (
        "After Student-t calibration the largest error left is overconfidence for ankles on small objects "
        "(95 % ellipse holds 90 %)."
    ) in verdict(scores)


def test_ranking_and_pruning() -> None:
    said = text(make())
    assert (
        "is strong: AKP .940 against .900 for the visibility score and .860 for a random ranking (skill .57)."
    ) in said
    assert "removes 28 % of keypoints and lowers NLL by .41." in said


def kept(share: float, nll: float = math.nan) -> Scores:
    scores = with_pruned_distribution(make(), "gaussian", nll=nll)
    return replace(scores, pruned=replace(scores.pruned, kept_fraction=share))


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        (replace(make(), akp_skill=-0.01, akp_random=0.941), "no better than chance"),
        (replace(make(), akp_visibility=0.95), "the visibility score ranks better"),
        (kept(1.0), "removes nothing"),
        (kept(0.0), "removes every keypoint"),
        (kept(0.5, nll=5.0), "raises NLL by .50"),
        (kept(0.5, nll=4.5), "leaves NLL as it is"),
        (kept(0.99999), "removes less than 0.1 % of keypoints."),
    ],
)
def test_odd_rankings_and_prunings(scores: Scores, expected: str) -> None:
    assert expected in text(scores)


@pytest.mark.parametrize("keypoints", [0, 1, 99])
def test_too_few_keypoints_to_judge(keypoints: int) -> None:
    said = verdict(make(LEVELS * 0.5, keypoints=keypoints))
    assert said == [f"Too few keypoints to judge: {keypoints} matched, at least 100 are needed."]
    assert len(verdict(make(LEVELS * 0.5, keypoints=100))) > 1


def test_one_keypoint_at_one_scale_is_not_compared_with_itself() -> None:
    said = text(make(names=["tip"], cells=[[0.5]]))
    assert "tip" not in said


def test_scores_read_back_say_the_same() -> None:
    scores = make(LEVELS * 0.9, cells=[[0.95, 0.95], [0.70, 0.95], [0.72, math.nan]])
    content = json.loads(json.dumps(scores.to_json(), default=np.ndarray.tolist))
    assert verdict(Scores.from_json(content)) == verdict(scores)


def test_an_evaluation_is_judged_as_it_is() -> None:
    """Real scores: residuals 1.3 times as large as said, of a law with heavy tails."""
    scores = real_scores(instances=400)
    held = coverage_at(scores, "uncalibrated", 95)
    assert held is not None
    assert held < 0.93
    said = verdict(scores)
    assert said[0].startswith("As given, the predictions are overconfident: a 95 % ellipse holds the truth")
    assert f"{100 * held:.0f} % of the time" in said[0]
    assert any("calibration lowers ACE" in sentence for sentence in said)


def scores_without(distribution: str, metric: str) -> Callable[[Scores], Scores]:
    return lambda scores: with_distribution(scores, distribution, **{metric: math.nan})


LOSSES: dict[str, Callable[[Scores], Scores]] = {
    **{
        f"{distribution}.{metric}": scores_without(distribution, metric)
        for distribution in DISTRIBUTIONS
        for metric in ("ace", "akp", "nll")
    },
    **{
        name: lambda scores, name=name: replace(scores, **{name: math.nan})  # type: ignore[misc]
        for name in ("akp_random", "akp_visibility", "akp_skill")
    },
    "kept": lambda scores: replace(scores, pruned=replace(scores.pruned, kept_fraction=math.nan)),
    "pruned nll": lambda scores: with_pruned_distribution(scores, "gaussian", nll=math.nan),
    "coverage": lambda scores: with_coverage(scores, "uncalibrated", np.full(99, math.nan)),
    "one level": lambda scores: with_coverage(scores, "uncalibrated", np.where(LEVELS == 0.95, math.nan, LEVELS)),
    "nu": lambda scores: replace(scores, calibration=replace(scores.calibration, nu=None)),
    "no nu": lambda scores: replace(scores, calibration=replace(scores.calibration, nu=np.full(3, math.nan))),
    "counts": lambda scores: replace(scores, cells=replace(scores.cells, count=np.zeros((3, 2), dtype=int))),
    "cells": lambda scores: with_cells(scores, "uncalibrated", np.full((3, 2), math.nan)),
    "cell": lambda scores: with_cells(scores, "gaussian", [[math.nan, 0.9], [0.5, math.nan], [0.95, 0.95]]),
}


@settings(max_examples=100)
@given(st.sets(st.sampled_from(sorted(LOSSES))))
def test_whatever_is_missing_is_left_unsaid(lost: set[str]) -> None:
    scores = make(LEVELS * 0.9, cells=[[0.95, 0.95], [0.70, 0.95], [0.72, 0.95]])
    for name in sorted(lost):
        scores = LOSSES[name](scores)
    said = verdict(scores)
    assert said
    for word in ("nan", "None", "null", "inf "):
        assert word not in " ".join(said)
    if {"coverage", "one level"} & lost:
        assert not said[0].startswith("As given")


def test_nothing_left_to_judge_is_said() -> None:
    scores = make()
    for name in sorted(LOSSES):
        scores = LOSSES[name](scores)
    scores = with_cells(scores, "gaussian", np.full((3, 2), math.nan))
    assert verdict(scores) == ["There is nothing to judge: the metrics are empty."]
