"""Pruning against brute force over every possible threshold, and scalarisations against numpy.linalg."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halopose.calibration.thresholds import guaranteed_threshold, select_threshold
from halopose.errors import HaloposeError
from halopose.types import Array
from halopose.uncertainty.pruning import (
    Scalarisation,
    ThresholdRule,
    keep_mask,
    localization_confidence,
    risk_guarantee,
    scalarise,
)

SEEDS = st.integers(0, 2**32 - 1)
RULES: tuple[ThresholdRule, ...] = get_args(ThresholdRule)
SCALARISATIONS: tuple[Scalarisation, ...] = get_args(Scalarisation)


def merit(rule: str, kept: Array, correct: Array) -> float:
    """One point of the ROC, by definition."""
    true, false = int((kept & correct).sum()), int((kept & ~correct).sum())
    positives, negatives = int(correct.sum()), int((~correct).sum())
    if rule == "youden":
        return true / positives - false / negatives
    if rule == "distance":
        return -float(np.hypot(false / negatives, 1 - true / positives))
    return 2 * true / (positives + true + false)


def brute_force(rule: str, confidence: Array, correct: Array, among: Array) -> float:
    """The lowest of the best thresholds among all that tell the keypoints of ``among`` apart."""
    candidates = np.unique(confidence[among])
    merits = [merit(rule, among & (confidence >= threshold), correct) for threshold in candidates]
    return float(candidates[np.argmax(merits)])


@st.composite
def judged(draw: st.DrawFn) -> tuple[Array, Array, Array]:
    """Confidences (n,), which are correct, and which another rule keeps; few distinct confidences make ties."""
    n = draw(st.integers(1, 40))
    values = draw(st.sampled_from([st.integers(-3, 0).map(float), st.floats(-1e6, 0, width=32)]))
    confidence = draw(st.lists(values, min_size=n, max_size=n))
    correct, among = (draw(st.lists(st.booleans(), min_size=n, max_size=n)) for _ in range(2))
    return np.array(confidence), np.array(correct), np.array(among)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=150)
@given(judged())
def test_threshold_equals_brute_force(rule: ThresholdRule, data: tuple[Array, Array, Array]) -> None:
    confidence, correct, _ = data
    chosen = select_threshold(confidence, correct, rule)
    if correct.all() or not correct.any():
        assert chosen == -np.inf
    else:
        assert chosen == brute_force(rule, confidence, correct, np.ones(len(correct), dtype=bool))


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=150)
@given(judged())
def test_threshold_beside_another_rule_equals_brute_force(
    rule: ThresholdRule, data: tuple[Array, Array, Array]
) -> None:
    """The merit is that of both rules together, over all keypoints, also those the other rule prunes."""
    confidence, correct, among = data
    chosen = select_threshold(confidence, correct, rule, among=among)
    left = correct[among]
    if left.all() or not left.any():  # also where nothing is left
        assert chosen == -np.inf
    else:
        assert chosen == brute_force(rule, confidence, correct, among)
        together = merit(rule, among & (confidence >= chosen), correct)
        assert together >= merit(rule, among, correct)


@pytest.mark.parametrize("rule", RULES)
@given(judged())
def test_a_rule_that_keeps_everything_changes_nothing(rule: ThresholdRule, data: tuple[Array, Array, Array]) -> None:
    confidence, correct, _ = data
    everything = np.ones(len(correct), dtype=bool)
    assert select_threshold(confidence, correct, rule, among=everything) == select_threshold(confidence, correct, rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("correct", [True, False])
def test_data_of_one_kind_keep_everything(rule: ThresholdRule, correct: bool) -> None:
    confidence = np.array([-3.0, -1.0, -1e300])
    threshold = select_threshold(confidence, np.full(3, correct), rule)
    assert threshold == -np.inf
    assert keep_mask(confidence, threshold).all()
    assert select_threshold(np.zeros(0), np.zeros(0, dtype=bool), rule) == -np.inf


def test_a_perfect_confidence_separates_perfectly() -> None:
    confidence, correct = np.array([-1.0, -2, -3, -4]), np.array([True, True, False, False])
    for rule in RULES:
        assert select_threshold(confidence, correct, rule) == -2


@given(SEEDS)
def test_scalarisations_equal_numpy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(5, 7, 2, 2)) * 10 ** rng.uniform(-3, 3, (5, 7, 1, 1))
    covariance = root @ np.swapaxes(root, -1, -2)
    largest = np.linalg.eigvalsh(covariance)[..., -1]
    np.testing.assert_allclose(scalarise(covariance), np.trace(covariance, axis1=-2, axis2=-1), rtol=1e-12)
    np.testing.assert_allclose(scalarise(covariance, "eigenvalue"), largest, rtol=1e-12)
    # The root of the determinant is as exact as the determinant beside the squared size.
    determinant = scalarise(covariance, "determinant")
    assert (np.abs(determinant**2 - np.linalg.det(covariance)) <= 1e-14 * largest**2).all()
    area, sigmas = rng.uniform(1, 1e5, 5), rng.uniform(0.02, 0.2, 7)
    for phi in SCALARISATIONS:
        own = localization_confidence(covariance, area, 2 * sigmas, phi)
        for i, k in np.ndindex(5, 7):
            expected = -scalarise(covariance[i, k], phi) / (area[i] * (2 * sigmas[k]) ** 2)
            assert own[i, k] == pytest.approx(expected, rel=1e-12)


def test_nearly_singular_matrices_have_a_determinant() -> None:
    assert scalarise(np.array([[1.0, 1 + 1e-15], [1 + 1e-15, 1.0]]), "determinant") == 0


def test_unknown_names_are_refused() -> None:
    with pytest.raises(HaloposeError, match="trace, determinant or eigenvalue"):
        scalarise(np.eye(2), "area")  # type: ignore[arg-type]
    with pytest.raises(HaloposeError, match="youden, distance or f1"):
        select_threshold(np.array([-1.0, -2]), np.array([True, False]), "roc")


@given(SEEDS)
def test_keep_mask_is_its_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    confidence, visibility = -rng.integers(0, 5, (6, 3)).astype(float), rng.integers(0, 5, (6, 3)) / 4
    threshold = float(-rng.integers(0, 5))
    kept = keep_mask(confidence, threshold, visibility, 0.5)
    for i, k in np.ndindex(6, 3):
        assert kept[i, k] == (confidence[i, k] >= threshold and visibility[i, k] >= 0.5)
    assert kept.dtype == bool
    # By rows, as folds have them, and without a visibility score or a threshold for it.
    thresholds, seen = -rng.integers(0, 5, (6, 1)).astype(float), rng.integers(0, 5, (6, 1)) / 4
    by_row = keep_mask(confidence, thresholds, visibility, seen)
    for i in range(6):
        alone = keep_mask(confidence[i], float(thresholds[i, 0]), visibility[i], float(seen[i, 0]))
        assert np.array_equal(by_row[i], alone)
    for left_out in ((), (visibility, None), (None, 0.5)):
        assert np.array_equal(keep_mask(confidence, threshold, *left_out), confidence >= threshold)


def test_a_risk_rule_is_parsed_or_refused() -> None:
    assert risk_guarantee("youden") is None
    assert risk_guarantee("risk:0.05@0.95") == (0.05, 0.95)
    for rule in ("risk", "risk:2@0.9", "risk:0.1@0.2", "risk:0.1.1@0.9", "roc"):
        with pytest.raises(HaloposeError, match=r"risk:0\.05@0\.95"):
            risk_guarantee(rule)


def test_a_risk_rule_keeps_as_much_as_it_can() -> None:
    """Two kinds of keypoints, one of them wrong half of the time: a guarantee is possible only for the other."""
    rng = np.random.default_rng(0)
    confidence = np.where(rng.random(4000) < 0.5, -1.0, -2.0) - 1e-6 * rng.random(4000)
    correct = rng.random(4000) > np.where(confidence > -1.5, 0.01, 0.5)
    images = np.arange(4000) // 10
    threshold = guaranteed_threshold(confidence, correct, images, 0.05, 0.95)
    kept = confidence >= threshold
    assert kept[confidence > -1.5].all()
    assert 0.5 < kept.mean() < 0.58
    assert (~correct[kept]).mean() < 0.05
    # More certainty keeps less; what is always right is kept whole; what never is, not at all.
    assert guaranteed_threshold(confidence, correct, images, 0.05, 0.999) >= threshold
    assert guaranteed_threshold(confidence, np.ones(4000, dtype=bool), images, 0.05, 0.95) == confidence.min()
    assert guaranteed_threshold(confidence, np.zeros(4000, dtype=bool), images, 0.05, 0.95) == np.inf
    assert guaranteed_threshold(confidence, correct, np.zeros(4000), 0.05, 0.95) == np.inf


def test_correlated_errors_within_images_cost_keypoints() -> None:
    rng = np.random.default_rng(1)
    confidence = -rng.random(4000)
    apart = rng.random(4000) > -confidence * 0.1
    images = np.arange(4000) // 20
    bad = rng.random(200)[images]
    joined = bad > -confidence * 0.1  # as many are wrong, but whole images of them
    kept = [
        (confidence >= guaranteed_threshold(confidence, correct, images, 0.04, 0.95)).mean()
        for correct in (apart, joined)
    ]
    assert kept[1] < kept[0]
