"""Average precision against pycocotools, and properties of AKP."""

import contextlib
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools.cocoeval import COCOeval, Params

from halopose.evaluation.metrics import (
    average_keypoint_precision,
    average_precision,
    falling_order,
    grade,
    keypoint_precisions,
    random_keypoint_precision,
    skill,
)
from halopose.evaluation.metrics.akp import KS_THRESHOLDS, _needed
from halopose.types import Array

SEEDS = st.integers(0, 2**32 - 1)


def through_pycocotools(confidence: Array, correct: Array, positives: int) -> float:
    """COCOeval.accumulate on one image whose detections are the samples."""
    evaluation = COCOeval(iouType="keypoints")
    parameters = Params(iouType="keypoints")
    parameters.imgIds, parameters.catIds = [1], [1]
    parameters.iouThrs, parameters.areaRng, parameters.maxDets = np.array([0.5]), [[0, 1e10]], [10**9]
    evaluation.params = evaluation._paramsEval = parameters
    evaluation.evalImgs = [
        {
            "dtScores": list(confidence),
            "dtMatches": np.asarray(correct, dtype=float)[None],
            "dtIgnore": np.zeros((1, len(correct))),
            "gtIgnore": np.zeros(positives),
        }
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation.accumulate()
    precision = evaluation.eval["precision"]
    return float("nan") if (precision == -1).all() else float(precision.mean())


def random_case(rng: np.random.Generator, n: int) -> tuple[Array, Array]:
    """Confidences with or without ties, and correctness from none to all."""
    confidence = rng.integers(0, max(n // 3, 1), n).astype(float) if rng.random() < 0.5 else rng.random(n)
    return confidence, rng.random(n) < rng.choice([0.0, 0.02, 0.3, 0.7, 0.98, 1.0])


@settings(max_examples=100)
@given(SEEDS)
def test_average_precision_equals_pycocotools(seed: int) -> None:
    """Thirty cases per example: empty, small and large, with and without objects that are never found."""
    rng = np.random.default_rng(seed)
    for n in [0, 1, 2, *rng.integers(3, 60, 22), *rng.integers(60, 500, 5)]:
        confidence, correct = random_case(rng, n)
        missing = int(rng.choice([0, 0, 1, 5, n]))
        positives = int(correct.sum()) + missing
        expected = through_pycocotools(confidence, correct, positives)
        given_positives = positives if missing else None
        own = average_precision(confidence, correct, positives=given_positives)
        assert own == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_average_precision_equals_pycocotools_at_scale() -> None:
    rng = np.random.default_rng(0)
    for n, rate in [(20_000, 0.5), (20_000, 0.999), (12_345, 0.01)]:
        confidence, correct = rng.integers(0, 5000, n) / 5000, rng.random(n) < rate
        expected = through_pycocotools(confidence, correct, int(correct.sum()))
        assert average_precision(confidence, correct) == pytest.approx(expected, abs=1e-12)


def test_hits_needed_for_each_recall_round_as_floats_do() -> None:
    recalls = np.linspace(0, 1, 101)
    for positives in [*range(1, 700), 9_999, 10_000, 123_457, 1_000_003]:
        reached = np.arange(1, positives + 1) / positives
        assert np.array_equal(_needed(positives), np.searchsorted(reached, recalls) + 1)


@given(SEEDS, st.integers(1, 60))
def test_weights_are_copies(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    confidence, correct = random_case(rng, n)
    similarity = rng.random(n)
    weight = rng.integers(0, 5, n)
    copies = np.arange(n).repeat(weight)
    found = int((weight * correct).sum())
    for positives in (None, found + 7):
        copied = average_precision(confidence[copies], correct[copies], positives=positives)
        weighted = average_precision(confidence, correct, weight, positives)
        assert weighted == pytest.approx(copied, abs=1e-12, nan_ok=True)
        # A tie keeps the order given, so the copies' exact numbers are those of the weighted.
        assert weighted == copied or np.isnan(weighted)
    copied = average_keypoint_precision(confidence[copies], similarity[copies])
    weighted = average_keypoint_precision(confidence, similarity, weight)
    assert weighted == copied or (np.isnan(weighted) and np.isnan(copied))


@given(SEEDS, st.integers(1, 80))
def test_akp_is_the_mean_over_thresholds(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    confidence, similarity = rng.random(n), rng.random(n)
    similarity[: n // 3] = rng.choice(KS_THRESHOLDS, n // 3)  # on a threshold counts as correct
    hits = similarity >= KS_THRESHOLDS[:, None]
    each = [through_pycocotools(confidence, hit, int(hit.sum())) for hit in hits]
    expected = np.nan_to_num(each).mean()
    assert average_keypoint_precision(confidence, similarity) == pytest.approx(expected, abs=1e-12)
    order = np.argsort(-confidence)
    presorted = average_keypoint_precision(confidence[order], similarity[order], presorted=True)
    assert presorted == average_keypoint_precision(confidence, similarity)


@given(SEEDS, st.integers(1, 80))
def test_perfect_ranking_scores_one_and_no_other_more(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    similarity = rng.random(n)
    similarity[0] = 1.0
    assert average_keypoint_precision(similarity, similarity) == pytest.approx(1, abs=1e-12)
    assert average_keypoint_precision(rng.random(n), similarity) <= 1 + 1e-12
    backwards = average_keypoint_precision(-similarity, similarity)
    assert backwards <= average_keypoint_precision(rng.random(n), similarity) + 1e-12


@given(SEEDS)
def test_monotone_transforms_of_the_confidence_do_not_matter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    confidence, similarity = rng.integers(-20, 20, 100) / 4, rng.random(100)
    akp = average_keypoint_precision(confidence, similarity)
    for transform in (np.exp, np.arctan, lambda c: 3 * c - 1e3, lambda c: c**3):
        assert average_keypoint_precision(transform(confidence), similarity) == akp


@given(SEEDS, st.integers(1, 80))
def test_ties_share_their_ranks_whatever_the_order(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    confidence, similarity = rng.integers(0, 4, n) / 4, rng.random(n)
    akp = average_keypoint_precision(confidence, similarity)
    order = rng.permutation(n)
    assert average_keypoint_precision(confidence[order], similarity[order]) == pytest.approx(akp, abs=1e-12)
    # Written out: the m-th correct keypoint of a tie comes at rank m n / h of the tie.
    each = []
    for threshold in KS_THRESHOLDS:
        points, passed, found = [], 0.0, 0
        for value in np.unique(confidence)[::-1]:
            correct = similarity[confidence == value] >= threshold
            points += [
                (found + m, (found + m) / (passed + m * len(correct) / correct.sum()))
                for m in range(1, correct.sum() + 1)
            ]
            passed, found = passed + len(correct), found + int(correct.sum())
        recalls = np.linspace(0, 1, 101)
        best = [max((p for m, p in points if m / found >= recall), default=0) for recall in recalls if found]
        each.append(np.mean(best or [0]))
    assert akp == pytest.approx(np.mean(each), abs=1e-12)


@given(SEEDS, st.integers(1, 80))
def test_a_constant_confidence_scores_the_share_of_correct_keypoints(seed: int, n: int) -> None:
    similarity = np.random.default_rng(seed).random(n)
    share = np.mean([(similarity >= t).mean() for t in KS_THRESHOLDS])
    assert average_keypoint_precision(np.zeros(n), similarity) == pytest.approx(share, abs=1e-12)


@given(SEEDS, st.integers(0, 60))
def test_falling_order_keeps_ties_in_order(seed: int, n: int) -> None:
    confidence, _ = random_case(np.random.default_rng(seed), n)
    assert falling_order(confidence).tolist() == sorted(range(n), key=lambda i: -confidence[i])


@given(SEEDS, st.lists(st.integers(0, 200), min_size=1, max_size=6), st.sampled_from([0.05, 0.5, 0.95, 1.0]))
def test_rankings_at_once_equal_each_ranking_alone(seed: int, sizes: list[int], share: float) -> None:
    """The computation from misses equals that from the hits of single rankings, bit for bit."""
    rng = np.random.default_rng(seed)
    parts = [np.where(rng.random(size) < share, rng.uniform(0.45, 1, size), 0.0) for size in sizes]
    together = keypoint_precisions(grade(np.concatenate(parts)), np.array(sizes))
    ones = [np.ones(size, dtype=int) for size in sizes]
    alone = [average_keypoint_precision(part, part, one, presorted=True) for part, one in zip(parts, ones, strict=True)]
    np.testing.assert_array_equal(together, alone)


def test_edges() -> None:
    nothing = np.zeros(0)
    assert np.isnan(average_keypoint_precision(nothing, nothing))
    assert np.isnan(average_keypoint_precision(np.ones(2), np.ones(2), np.zeros(2, dtype=int)))
    assert average_keypoint_precision(np.ones(3), np.zeros(3)) == 0
    # Half of the thresholds are out of reach.
    assert average_keypoint_precision(np.ones(3), np.full(3, 0.72)) == pytest.approx(0.5)
    assert np.isnan(average_precision(np.ones(3), np.zeros(3, dtype=bool)))
    assert average_precision(np.ones(3), np.zeros(3, dtype=bool), positives=2) == 0


def test_random_precision_is_the_mean_of_shuffles() -> None:
    rng = np.random.default_rng(0)
    similarity = rng.beta(4, 1, 3000)
    shuffles = [average_keypoint_precision(rng.random(3000), similarity) for _ in range(200)]
    own = random_keypoint_precision(similarity)
    assert own == pytest.approx(np.mean(shuffles), abs=4 * np.std(shuffles) / np.sqrt(10))
    assert own == random_keypoint_precision(similarity)
    assert own != random_keypoint_precision(similarity, seed=1)
    # With many keypoints precision is the share of correct ones at every recall.
    share = np.mean([(similarity >= t).mean() for t in KS_THRESHOLDS])
    assert own == pytest.approx(share, abs=0.02)
    ones = np.ones(3000, dtype=int)
    assert random_keypoint_precision(similarity, ones) == own
    doubled = random_keypoint_precision(similarity, 2 * ones, rounds=50)
    assert doubled == pytest.approx(np.mean(shuffles), abs=0.02)


def test_random_precision_does_not_depend_on_the_order_of_samples() -> None:
    rng = np.random.default_rng(0)
    similarity, weight = rng.random(500), rng.integers(0, 4, 500)
    order = rng.permutation(500)
    assert random_keypoint_precision(similarity) == random_keypoint_precision(similarity[order])
    assert random_keypoint_precision(similarity, weight) == random_keypoint_precision(similarity[order], weight[order])


def test_skill_runs_from_random_to_perfect() -> None:
    assert skill(0.6, 0.6) == 0
    assert skill(1.0, 0.6) == 1
    assert skill(0.8, 0.6) == pytest.approx(0.5)
    assert skill(0.5, 0.6) < 0
    assert np.isnan(skill(1.0, 1.0))
