"""AUROC against scikit-learn, AURC and AUGRC against sums over all shares kept."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from halopose.evaluation.metrics.selective import auroc, risk_areas, selective_scores


@pytest.mark.parametrize("levels", [5, 10_000])
def test_auroc_is_that_of_scikit_learn(levels: int) -> None:
    rng = np.random.default_rng(levels)
    confidence = rng.integers(0, levels, 500) / levels
    correct = rng.random(500) < 0.3 + 0.6 * confidence
    assert auroc(confidence, correct) == pytest.approx(roc_auc_score(correct, confidence))
    weight = rng.integers(0, 3, 500)
    expected = roc_auc_score(np.repeat(correct, weight), np.repeat(confidence, weight))
    assert auroc(confidence, correct, weight) == pytest.approx(expected)


def test_risk_areas_are_means_over_the_shares_kept() -> None:
    rng = np.random.default_rng(0)
    confidence = rng.random(2000)
    correct = rng.random(2000) < 0.2 + 0.8 * confidence
    order = np.argsort(-confidence)
    errors, kept = np.cumsum(~correct[order]), np.arange(1, 2001)
    found = risk_areas(confidence, correct)
    assert found == pytest.approx(((errors / kept).mean(), (errors / 2000).mean()), abs=2e-3)


def test_ties_do_not_depend_on_the_order_of_the_file() -> None:
    correct = np.array([True] * 5 + [False] * 5)
    constant = np.ones(10)
    assert auroc(constant, correct) == 0.5
    assert risk_areas(constant, correct) == pytest.approx(risk_areas(constant, correct[::-1]))
    assert risk_areas(constant, correct) == pytest.approx((0.5, 0.25))


def test_intervals_come_from_resampled_images() -> None:
    rng = np.random.default_rng(2)
    confidence, image = rng.random(300), np.arange(300) // 3
    scores = selective_scores(confidence, rng.random(300) < confidence, image, 100, draws=50)
    assert 0.01 < scores.auroc.margin < 0.15
    assert np.isfinite([scores.aurc.margin, scores.augrc.margin]).all()
    assert np.isnan(selective_scores(confidence, confidence > 0.5, image, 100).auroc.margin)
