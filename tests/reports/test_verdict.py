"""The verdict follows from hand-made scores and mentions nothing else."""

from __future__ import annotations

import json
import math
import re
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
    """The same scores with another coverage (K, S) of the 95 % ellipses of a distribution."""
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


def test_calibrated_predictions() -> None:
    printed = verdict(make())
    assert "well calibrated" in printed[0]
    assert "overconfident" not in " ".join(printed)
    assert "underconfident" not in " ".join(printed)


@pytest.mark.parametrize(
    ("curve", "pattern"),
    [
        (LEVELS - 0.11 * LEVELS, r" overconfident.* 95 % .* 85 %"),
        (LEVELS**0.7, r" underconfident.* 95 % .* 96 %"),
        (
            LEVELS + 0.1 * np.sin(2 * np.pi * LEVELS * 0.7),
            r" underconfident .*centre.* overconfident .*tails.* 50 % .* 58 % .* 95 % .* 86 %",
        ),
        (LEVELS - np.where(LEVELS > 0.9, -0.03, 0.1), r" overconfident .*centre.* underconfident .*tails"),
        (LEVELS + 0.08 * (LEVELS == 0.5), r" underconfident.* 50 % .* 58 %"),
        (LEVELS - 0.08 * (LEVELS == 0.7), r" overconfident.* 70 % .* 62 %"),
    ],
)
def test_direction_of_miscalibration(curve: Array, pattern: str) -> None:
    assert re.search(pattern, verdict(make(curve))[0])


def test_deviation_within_noise_is_not_called_miscalibration() -> None:
    printed = verdict(make(LEVELS - 0.03 * LEVELS, keypoints=150))[0]
    assert "no significant miscalibration" in printed
    assert "confident" not in printed


def test_left_and_right_are_pooled() -> None:
    printed = text(make(cells=[[0.95, 0.95], [0.70, 0.95], [0.72, 0.95]]))
    assert re.search(r"overconfident: ankle \(left and right\) on small .* 71 %\)", printed)


def test_underconfident_place_is_named_as_such() -> None:
    printed = text(make(cells=[[0.95, 0.995], [0.95, 0.95], [0.95, 0.95]]))
    assert re.search(r"underconfident: nose on large .* 99.5 %\)", printed)
    assert "overconfident" not in printed


def test_groups_of_few_samples_or_within_noise_are_not_named() -> None:
    assert "ankle" not in text(make(cells=[[0.95, 0.95], [0.1, 0.95], [0.1, 0.95]], count=49))
    assert "ankle" in text(make(cells=[[0.95, 0.95], [0.1, 0.95], [0.1, 0.95]], count=50))
    assert "ankle" not in text(make(cells=[[0.95, 0.95], [0.92, 0.95], [0.92, 0.95]], count=100))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["left_foot", "right_foot"], "foot (left and right)"),
        (["L_Eye", "R_Eye"], "eye (left and right)"),
        (["KneeLeft", "KneeRight"], "knee (left and right)"),
        (["hand.l", "hand.r"], "hand (left and right)"),
        (["left_hand_3", "right_hand_3"], "hand 3 (left and right)"),
        (["left_ankle", "knee"], "left ankle"),
    ],
)
def test_names(names: list[str], expected: str) -> None:
    printed = text(make(names=names, cells=[[0.5, 0.95], [0.5, 0.95]]))
    assert f"overconfident: {expected} on small" in printed


def with_ace(scores: Scores, uncalibrated: float, gaussian: float, student_t: float) -> Scores:
    for distribution, ace in zip(DISTRIBUTIONS, (uncalibrated, gaussian, student_t), strict=True):
        scores = with_distribution(scores, distribution, ace=ace)
    return scores


def test_heavy_tails() -> None:
    scores = with_ace(make(), 0.0318, 0.1029, 0.00081)
    assert re.search("Student-t .* 0.032 to 0.0008.* Gaussian .* 0.103", text(scores))
    for nu in (np.array([50.0]), None, np.array([math.nan])):
        light = replace(scores, calibration=replace(scores.calibration, nu=nu))
        assert "heavy tails" not in text(light)
        assert "Student-t calibration lowers ACE" in text(light)


def test_gaussian_calibration_suffices() -> None:
    printed = text(with_ace(make(), 0.1, 0.002, 0.003))
    assert re.search("Gaussian .* 0.100 to 0.002.* Student-t .* 0.003", printed)
    assert "changes little" in text(with_ace(make(), 0.004, 0.002, 0.003))


def test_error_left_after_calibration() -> None:
    scores = with_distribution(make(), "student_t", ace=0.0005)
    scores = with_cells(scores, "student_t", [[0.95, 0.95], [0.90, 0.95], [0.90, 0.95]])
    assert re.search(r"After Student-t .*overconfident for ankle .* on small .* 90 %\)", text(scores))


def test_ranking_and_pruning() -> None:
    printed = text(make())
    assert re.search(r"strong: AKP 0.940,.* 0.900 .*visibility.* 0.860 .*random.*skill 0.57", printed)
    assert re.search(r"removes 28 % .*lowers .*NLL by 0.41", printed)


def kept(share: float, nll: float = math.nan) -> Scores:
    scores = with_pruned_distribution(make(), "gaussian", nll=nll)
    return replace(scores, pruned=replace(scores.pruned, kept_fraction=share))


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        (replace(make(), akp_skill=-0.01, akp_random=0.941), "no better than random"),
        (replace(make(), akp_visibility=0.95), "score ranks better"),
        (kept(1.0), "removes no keypoints"),
        (kept(0.0), "removes all keypoints"),
        (kept(0.5, nll=5.0), "Gaussian NLL by 0.50"),
        (kept(0.5, nll=4.5), "unchanged"),
        (kept(0.99999), "removes less than 0.1 %"),
    ],
)
def test_odd_rankings_and_prunings(scores: Scores, expected: str) -> None:
    assert expected in text(scores)


@pytest.mark.parametrize("keypoints", [0, 1, 99])
def test_too_few_keypoints_to_judge(keypoints: int) -> None:
    printed = verdict(make(LEVELS * 0.5, keypoints=keypoints))
    assert len(printed) == 1
    assert "Too few" in printed[0]
    assert str(keypoints) in printed[0]
    assert len(verdict(make(LEVELS * 0.5, keypoints=100))) > 1


def test_one_keypoint_at_one_scale_is_not_compared_with_itself() -> None:
    printed = text(make(names=["tip"], cells=[[0.5]]))
    assert "tip" not in printed


def test_scores_read_back_give_the_same_verdict() -> None:
    scores = make(LEVELS * 0.9, cells=[[0.95, 0.95], [0.70, 0.95], [0.72, math.nan]])
    content = json.loads(json.dumps(scores.to_json(), default=np.ndarray.tolist))
    assert verdict(Scores.from_json(content)) == verdict(scores)


def test_an_evaluation_is_judged_as_it_is() -> None:
    """Real scores: residuals 1.3 times as large as stated, heavy tails."""
    scores = real_scores(instances=400)
    held = coverage_at(scores, "uncalibrated", 95)
    assert held is not None
    assert held < 0.93
    printed = verdict(scores)
    assert re.search(f"overconfident: 95 % .* {100 * held:.0f} %", printed[0])
    assert any("calibration lowers ACE" in sentence for sentence in printed)


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
def test_missing_metrics_are_left_out(lost: set[str]) -> None:
    scores = make(LEVELS * 0.9, cells=[[0.95, 0.95], [0.70, 0.95], [0.72, 0.95]])
    for name in sorted(lost):
        scores = LOSSES[name](scores)
    printed = verdict(scores)
    assert printed
    for word in ("nan", "None", "null", "inf "):
        assert word not in " ".join(printed)
    if {"coverage", "one level"} & lost:
        assert "given predictions" not in printed[0]


def test_verdict_without_values_is_stated() -> None:
    scores = make()
    for name in sorted(LOSSES):
        scores = LOSSES[name](scores)
    scores = replace(with_cells(scores, "gaussian", np.full((3, 2), math.nan)), matches={})
    assert len(verdict(scores)) == 1
    assert "No verdict" in verdict(scores)[0]
