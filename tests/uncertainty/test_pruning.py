"""Pruning against brute force over every possible threshold, and scalarisations against numpy.linalg."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halopose.errors import HaloposeError
from halopose.uncertainty.pruning import (
    keep_mask,
    localization_confidence,
    reliability_curve,
    scalarise,
    select_threshold,
    select_thresholds,
)

SEEDS = st.integers(0, 2**32 - 1)
RULES = ["youden", "distance", "f1"]
CLOSE = {"rtol": 1e-12, "atol": 0}


def merit(rule, confidence, correct, weight, threshold):
    """One point of the ROC, by definition."""
    kept = confidence >= threshold
    true, false = weight[kept & correct].sum(), weight[kept & ~correct].sum()
    positives, negatives = weight[correct].sum(), weight[~correct].sum()
    if rule == "youden":
        return true / positives - false / negatives
    if rule == "distance":
        return -np.hypot(false / negatives, 1 - true / positives)
    return 2 * true / (positives + true + false)


def brute_force(rule, confidence, correct, weight):
    """The lowest of the best thresholds among all confidences that occur."""
    candidates = np.unique(confidence)
    merits = np.array([merit(rule, confidence, correct, weight, c) for c in candidates])
    return candidates[np.argmax(merits)]


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=150)
@given(data=st.data(), n=st.integers(1, 40))
def test_threshold_equals_brute_force(rule, data, n):
    # Few distinct confidences make ties; whole weights make exact sums, whatever the order of addition.
    values = data.draw(st.sampled_from([st.integers(-3, 0).map(float), st.floats(-1e6, 0, width=32)]))
    confidence = np.array(data.draw(st.lists(values, min_size=n, max_size=n)))
    correct = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    weight = np.array(data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)), dtype=float)
    for w in (None, weight):
        mass = np.ones(n) if w is None else w
        chosen = select_threshold(confidence, correct, rule, w)
        if mass[correct].sum() == 0 or mass[~correct].sum() == 0:
            assert chosen == -np.inf
        else:
            assert chosen == brute_force(rule, confidence, correct, mass)


@pytest.mark.parametrize("rule", RULES)
@given(SEEDS)
def test_threshold_weights_are_copies(rule, seed):
    rng = np.random.default_rng(seed)
    confidence, correct = -rng.integers(0, 9, 30).astype(float), rng.random(30) < 0.6
    weight = rng.integers(0, 4, 30)
    weight[:2] = 1
    correct[:2] = [True, False]
    copied = select_threshold(confidence.repeat(weight), correct.repeat(weight), rule)
    weighted = select_threshold(confidence, correct, rule, weight)
    everyone = np.arange(30).repeat(weight)
    assert set(everyone[confidence[everyone] >= copied]) == set(everyone[confidence[everyone] >= weighted])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("correct", [True, False])
def test_data_of_one_kind_keep_everything(rule, correct):
    confidence = np.array([-3.0, -1.0, -1e300])
    threshold = select_threshold(confidence, np.full(3, correct), rule)
    assert threshold == -np.inf
    assert keep_mask(confidence, threshold).all()
    assert select_threshold(np.zeros(0), np.zeros(0, dtype=bool), rule) == -np.inf


def test_a_perfect_confidence_separates_perfectly():
    confidence, correct = np.array([-1.0, -2, -3, -4]), np.array([True, True, False, False])
    for rule in RULES:
        assert select_threshold(confidence, correct, rule) == -2


@given(SEEDS)
def test_thresholds_per_keypoint_are_those_of_each_alone(seed):
    rng = np.random.default_rng(seed)
    confidence, correct = -rng.exponential(1, (40, 4)), rng.random((40, 4)) < 0.7
    labelled = rng.random((40, 4)) < 0.8
    correct[:, 3] = True
    labelled[:, 2] = False
    for rule in RULES:
        thresholds = select_thresholds(confidence, correct, labelled, rule)
        assert thresholds.shape == (4,)
        for k in range(2):
            seen = labelled[:, k]
            assert thresholds[k] == select_threshold(confidence[seen, k], correct[seen, k], rule)
        assert (thresholds[2:] == -np.inf).all()
        kept = keep_mask(confidence, thresholds)
        assert kept[:, 2:].all()
        assert np.array_equal(kept[:, 0], confidence[:, 0] >= thresholds[0])


@given(SEEDS)
def test_scalarisations_equal_numpy(seed):
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(5, 7, 2, 2)) * 10 ** rng.uniform(-3, 3, (5, 7, 1, 1))
    covariance = root @ np.swapaxes(root, -1, -2)
    largest = np.linalg.eigvalsh(covariance)[..., -1]
    np.testing.assert_allclose(scalarise(covariance), np.trace(covariance, axis1=-2, axis2=-1), **CLOSE)
    np.testing.assert_allclose(scalarise(covariance, "eigenvalue"), largest, **CLOSE)
    # The root of the determinant is as exact as the determinant beside the squared size.
    determinant = scalarise(covariance, "determinant")
    assert (np.abs(determinant**2 - np.linalg.det(covariance)) <= 1e-14 * largest**2).all()
    area, sigmas = rng.uniform(1, 1e5, 5), rng.uniform(0.02, 0.2, 7)
    for phi in ("trace", "determinant", "eigenvalue"):
        ours = localization_confidence(covariance, area, sigmas, phi)
        for i, k in np.ndindex(5, 7):
            expected = -scalarise(covariance[i, k], phi) / (area[i] * (2 * sigmas[k]) ** 2)
            assert ours[i, k] == pytest.approx(expected, rel=1e-12)


def test_nearly_singular_matrices_have_a_determinant():
    assert scalarise(np.array([[1.0, 1 + 1e-15], [1 + 1e-15, 1.0]]), "determinant") == 0


def test_unknown_names_are_refused():
    with pytest.raises(HaloposeError, match="'area': trace, determinant or eigenvalue"):
        scalarise(np.eye(2), "area")
    with pytest.raises(HaloposeError, match="'roc': youden, distance or f1"):
        select_threshold(np.array([-1.0, -2]), np.array([True, False]), "roc")


@given(SEEDS)
def test_keep_mask_is_its_definition(seed):
    rng = np.random.default_rng(seed)
    confidence, visibility = -rng.integers(0, 5, (6, 3)).astype(float), rng.integers(0, 5, (6, 3)) / 4
    threshold = float(-rng.integers(0, 5))
    kept = keep_mask(confidence, threshold, visibility, 0.5)
    for i, k in np.ndindex(6, 3):
        assert kept[i, k] == (confidence[i, k] >= threshold and visibility[i, k] >= 0.5)
    assert np.array_equal(keep_mask(confidence, threshold), confidence >= threshold)
    assert kept.dtype == bool


@given(SEEDS, st.integers(1, 300), st.sampled_from([1, 2, 11, 101, 1000]))
def test_reliability_curve_equals_brute_force(seed, n, points):
    rng = np.random.default_rng(seed)
    confidence, correct = -rng.random(n), rng.random(n) < 0.7
    curve = reliability_curve(confidence, correct, points)
    assert len(curve.kept) <= min(points, n)
    if points > 1:
        assert curve.kept[-1] == 1
        assert curve.reliability[-1] == pytest.approx(correct.mean(), rel=1e-12)
    assert np.round(curve.kept[0] * n) == 1
    assert (np.diff(curve.kept) > 0).all()
    for share, reliability, threshold in zip(curve.kept, curve.reliability, curve.threshold, strict=True):
        kept = confidence >= threshold
        assert kept.mean() == pytest.approx(share, rel=1e-12)
        assert correct[kept].mean() == pytest.approx(reliability, rel=1e-12)
    if points >= n:
        assert len(curve.kept) == n
