"""The protocol on data from known distributions: calibration repairs errors, shards join, pruning selects."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from halopose.calibration.calibrate import DISTRIBUTIONS, DistributionSet, cross_fitted
from halopose.errors import HaloposeError
from halopose.evaluation.evaluate import evaluate
from halopose.evaluation.scores import METRICS, RANKINGS, DistributionCurves, Scores
from halopose.matching.matched_poses import MatchedPoses, match_poses
from halopose.protocol import Protocol
from halopose.types import Array
from halopose.uncertainty.pruning import localization_confidence
from tests.helpers.evaluations import (
    as_given,
    json_text,
    partly_labelled,
    poses,
    synthetic_poses,
    with_informative_visibility,
)

# --- the right distribution passes, calibration repairs the others ---------------------------------------------------


@pytest.mark.parametrize("nu", [None, 5], ids=["gaussian", "student-t"])
def test_data_drawn_from_the_model_are_calibrated(nu: float | None) -> None:
    truthful = poses(50_000, 4, nu, seed=1)
    scores = evaluate(truthful, as_given(truthful)).uncalibrated
    assert scores.count == 200_000
    for axis in ("", "_x", "_y"):
        assert scores.metric(f"ace{axis}") <= 0.003
        assert scores.metric(f"ence{axis}") <= 0.02


def test_calibration_mends_a_scale_error() -> None:
    scores = evaluate(poses(8000, 4, None, seed=2, flaw=1.4))
    assert scores.given_family == "gaussian"
    assert scores.uncalibrated.ace > 0.1
    assert scores.uncalibrated.ence > 0.3
    for distribution in (scores.gaussian, scores.student_t):
        assert distribution.ace < 0.006
        assert distribution.ence < 0.04
    np.testing.assert_allclose(scores.calibration.tau, 1.4, rtol=0.03)
    heavy = evaluate(poses(8000, 4, 3, seed=2, flaw=1.4))
    assert heavy.given_family == "student-t"
    assert heavy.student_t.ace < 0.006 < heavy.gaussian.ace
    assert heavy.calibration.nu is not None
    np.testing.assert_allclose(heavy.calibration.nu, 3, rtol=0.2)
    assert heavy.calibration.tau_t is not None
    np.testing.assert_allclose(heavy.calibration.tau_t, 1.4, rtol=0.05)


# --- shards -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nu", [None, 4])
def test_shards_merge_to_the_whole(nu: float | None, tmp_path: Path) -> None:
    matched = partly_labelled(poses(240, 3, nu, seed=6, flaw=1.2))
    protocol = Protocol(bootstrap=5)
    whole = json_text(evaluate(matched, protocol=protocol), tmp_path)
    rng = np.random.default_rng(0)
    for _ in range(3):
        shard = rng.integers(0, 4, 10_000)[matched.image_ids]
        parts = [matched.select(np.flatnonzero(shard == s)) for s in rng.permutation(4)]
        merged = MatchedPoses.concatenate(parts)
        assert json_text(evaluate(merged, protocol=protocol), tmp_path) == whole


def test_shards_of_predictions_merge_to_the_whole(tmp_path: Path) -> None:
    predictions, truth = synthetic_poses()
    assert predictions.image_ids is not None
    whole = json_text(evaluate(match_poses(predictions, truth)), tmp_path)
    parts = [match_poses(predictions[predictions.image_ids % 3 == s], truth) for s in (2, 0, 1)]
    assert json_text(evaluate(MatchedPoses.concatenate(parts)), tmp_path) == whole


# --- pruning ----------------------------------------------------------------------------------------------


def plots(curves: DistributionCurves) -> list[Any]:
    """Plot data that exist with and without pruning."""
    return [
        curves.coverage,
        {axis: vars(points) for axis, points in curves.variance.items()},
        curves.moments_empirical,
        curves.moments_predicted,
    ]


def numbers(scores: Any) -> dict[str, Any]:
    """Scores of a distribution without plot data, comparable with NaN."""
    groups = {
        name: {member: vars(one) for member, one in getattr(scores, name).items()}
        for name in ("per_keypoint", "per_scale")
    }
    return {**{name: value for name, value in vars(scores).items() if name != "curves"}, **groups}


@pytest.mark.parametrize("visibility", [False, True])
@pytest.mark.parametrize("nu", [None, 4])
def test_pruning_alters_nothing_but_the_selection(nu: float | None, visibility: bool) -> None:
    matched = with_informative_visibility(partly_labelled(poses(300, 3, nu, seed=9)))
    protocol = Protocol(bootstrap=5, visibility=visibility)
    distributions = cross_fitted(matched, protocol)
    scores = evaluate(matched, distributions, protocol)
    gaussian = distributions.distributions["gaussian"].covariance.numpy()
    area = matched.confidence_area(protocol)
    kept = localization_confidence(gaussian, area, matched.layout.kappa) >= distributions.threshold[:, None]
    assert (distributions.visibility_threshold is not None) == visibility
    if distributions.visibility_threshold is not None:
        assert matched.visibility is not None
        kept &= matched.visibility >= distributions.visibility_threshold[:, None]
    share = kept[matched.labelled].mean()
    assert 0.05 < share < 0.95
    assert scores.pruned.kept_fraction == pytest.approx(share, rel=1e-12)
    # Pruned metrics and their intervals are those of the kept keypoints under the same distributions ...
    selected = evaluate(replace(matched, labelled=matched.labelled & kept), distributions, protocol)
    # ... and the metrics of everything do not know of the threshold.
    nothing = replace(distributions, threshold=np.full(len(matched), -np.inf), visibility_threshold=None)
    unpruned = evaluate(matched, nothing, protocol)
    assert unpruned.pruned.kept_fraction == 1
    for name in DISTRIBUTIONS:
        np.testing.assert_equal(numbers(scores.pruned.distribution(name)), numbers(selected.distribution(name)))
        np.testing.assert_equal(numbers(scores.distribution(name)), numbers(unpruned.distribution(name)))
        np.testing.assert_equal(numbers(unpruned.pruned.distribution(name)), numbers(unpruned.distribution(name)))
        np.testing.assert_equal(plots(scores.distribution(name).curves), plots(unpruned.distribution(name).curves))
        np.testing.assert_equal(
            plots(scores.pruned.distribution(name).curves), plots(selected.distribution(name).curves)
        )


def test_pruning_raises_reliability() -> None:
    matched = poses(3000, 3, 4, seed=10)
    scores = evaluate(matched)
    curve = scores.pruning_curve
    correct = matched.similarity >= 0.5
    assert curve.kept[-1] == 1
    assert curve.reliability[-1] == pytest.approx(correct.mean(), rel=1e-12)
    assert curve.reliability[50] > correct.mean() + 0.1
    assert curve.nll[-1] == pytest.approx(scores.gaussian.nll, rel=1e-12)


def rules_by_hand(matched: MatchedPoses, distributions: DistributionSet) -> dict[str, Array]:
    """Labelled keypoints (n,) that each pruning rule keeps."""
    confident = (distributions.confidence >= distributions.threshold[:, None])[matched.labelled]
    assert matched.visibility is not None
    assert distributions.visibility_threshold is not None
    visible = (matched.visibility >= distributions.visibility_threshold[:, None])[matched.labelled]
    return {
        "nothing pruned": np.ones_like(confident),
        "localization confidence": confident,
        "visibility score": visible,
        "both": confident & visible,
    }


def test_pruning_methods_are_compared() -> None:
    matched = with_informative_visibility(partly_labelled(poses(600, 3, 4, seed=20)))
    protocol = Protocol(visibility=True)
    distributions = cross_fitted(matched, protocol)
    scores = evaluate(matched, distributions, protocol)
    masks = rules_by_hand(matched, distributions)
    correct = matched.similarity[matched.labelled] >= protocol.gamma_ks
    assert [rule.name for rule in scores.pruned.rules] == list(masks)
    for rule in scores.pruned.rules:
        mask = masks[rule.name]
        assert rule.kept_fraction == pytest.approx(mask.mean(), rel=1e-12), rule.name
        assert rule.reliability == pytest.approx(correct[mask].mean(), rel=1e-12), rule.name
    assert scores.pruned.kept_fraction == scores.pruned.rules[-1].kept_fraction
    assert scores.pruned.gaussian.count == masks["both"].sum()
    assert distributions.visibility_threshold is not None
    assert scores.pruned.visibility_threshold == pytest.approx(distributions.visibility_threshold.mean())
    # Data in which the visibility score knows more: both together are the most reliable.
    reliability = {rule.name: rule.reliability for rule in scores.pruned.rules}
    assert reliability["both"] > max(reliability["localization confidence"], reliability["nothing pruned"]) + 0.02


def test_without_a_visibility_threshold_confidence_prunes_alone() -> None:
    matched = with_informative_visibility(partly_labelled(poses(300, 3, 4, seed=20)))
    for protocol, data in (
        (Protocol(), matched),
        (Protocol(visibility=True), replace(matched, visibility=None)),
    ):
        pruned = evaluate(data, protocol=protocol).pruned
        assert [rule.name for rule in pruned.rules] == ["nothing pruned", "localization confidence"]
        assert pruned.visibility_threshold is None
        assert pruned.kept_fraction == pruned.rules[1].kept_fraction < 1


def test_the_visibility_threshold_is_the_mean_of_the_folds_that_have_one() -> None:
    matched = poses(40, 3)
    threshold = np.where(np.arange(40) < 10, -np.inf, np.arange(40) / 100)
    distributions = replace(as_given(matched), visibility_threshold=threshold)
    assert evaluate(matched, distributions).pruned.visibility_threshold == pytest.approx(threshold[10:].mean())


def test_everything_pruned_is_still_an_answer() -> None:
    """A threshold chosen elsewhere may prune all keypoints."""
    matched = poses(30, 3)
    pruned = evaluate(matched, as_given(matched, threshold=np.inf), Protocol(bootstrap=3)).pruned
    assert pruned.kept_fraction == 0
    assert all(np.isnan(pruned.gaussian.metric(name)) for name in METRICS)
    assert np.isnan(list(pruned.gaussian.interval.values())).all()
    assert np.isnan(pruned.rules[1].reliability)


# --- bootstrap --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bootstrapped() -> tuple[MatchedPoses, Scores]:
    matched = partly_labelled(poses(900, 3, 4, seed=11, flaw=1.5))
    return matched, evaluate(matched, protocol=Protocol(bootstrap=40, seed=3))


def test_bootstrap_intervals_hold_the_point_estimate(bootstrapped: tuple[MatchedPoses, Scores]) -> None:
    _, scores = bootstrapped
    for distribution in (scores.uncalibrated, scores.pruned.uncalibrated):
        for name in METRICS:
            low, high = distribution.interval[name]
            assert low < distribution.metric(name) < high, name
    for regime in DISTRIBUTIONS:
        for name in ("nll", "akp"):
            low, high = scores.distribution(regime).interval[name]
            assert low < scores.distribution(regime).metric(name) < high, (regime, name)
    for name in RANKINGS:
        low, high = scores.interval[name]
        assert low < getattr(scores, name) < high, name


def test_bootstrap_is_reproducible_and_leaves_the_estimates_alone(
    bootstrapped: tuple[MatchedPoses, Scores], tmp_path: Path
) -> None:
    matched, scores = bootstrapped
    again = evaluate(matched, protocol=Protocol(bootstrap=40, seed=3))
    assert json_text(again, tmp_path) == json_text(scores, tmp_path)
    other = evaluate(matched, protocol=Protocol(bootstrap=40, seed=4))
    assert other.gaussian.interval != scores.gaussian.interval
    plain = evaluate(matched, protocol=Protocol(seed=3))
    for name in METRICS:
        assert plain.gaussian.metric(name) == scores.gaussian.metric(name)
    assert not plain.gaussian.interval
    assert not plain.interval


def test_bootstrap_reports_progress() -> None:
    seen: list[tuple[int, int]] = []
    matched = poses(30, 3)
    evaluate(matched, protocol=Protocol(bootstrap=4), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_bootstrap_resamples_images_not_keypoints() -> None:
    """Errors are equal within an image, so that intervals over images are wider."""
    matched = poses(600, 4, seed=12, images=60)
    shared = np.exp(np.random.default_rng(0).normal(0, 0.6, matched.image_ids.max() + 1))[matched.image_ids]
    clustered = replace(matched, residual=matched.residual * shared[:, None, None])
    shuffled = np.random.default_rng(1).permutation(shared)
    scattered = replace(matched, residual=matched.residual * shuffled[:, None, None])
    widths = []
    for data in (clustered, scattered):
        low, high = evaluate(data, as_given(data), Protocol(bootstrap=60)).uncalibrated.interval["nll"]
        widths.append(high - low)
    assert widths[0] > 1.3 * widths[1]


# --- the whole result -------------------------------------------------------------------------------------


def test_cells_and_blocks_add_up() -> None:
    predictions, truth = synthetic_poses()
    matched = match_poses(predictions, truth)
    scores = evaluate(matched)
    assert scores.keypoints == matched.labelled.sum() == scores.cells.count.sum()
    assert scores.matched_instances == len(matched) == sum(scale.instances for scale in scores.scales)
    assert scores.images == len(np.unique(matched.image_ids))
    for regime in DISTRIBUTIONS:
        distribution = scores.distribution(regime)
        for groups in (distribution.per_keypoint, distribution.per_scale):
            assert sum(group.count for group in groups.values()) == scores.keypoints
            pooled = sum(group.count * group.nll for group in groups.values() if group.count)
            assert pooled / scores.keypoints == pytest.approx(distribution.nll, rel=1e-9)
        counts, half = scores.cells.count, np.nan_to_num(scores.cells.coverage[regime][50])
        covered = (counts * half).sum() / counts.sum()
        assert covered == pytest.approx(distribution.curves.coverage["joint"][49], rel=1e-9)
    assert list(scores.gaussian.per_keypoint) == list(scores.keypoint_names) == list(truth.layout.names)
    assert list(scores.gaussian.per_scale) == [scale.name for scale in scores.scales]


@pytest.mark.parametrize("area", ["annotation", "box"])
def test_area_of_the_confidence(area: Literal["annotation", "box"]) -> None:
    matched = poses(300, 3, seed=15)
    protocol = Protocol(area=area)
    scores = evaluate(matched, as_given(matched), protocol)
    used = matched.area if area == "annotation" else 0.53 * matched.box_area
    confidence = localization_confidence(matched.covariance, used, matched.layout.kappa)
    assert scores.pruning_curve.threshold[0] == pytest.approx(confidence.max(), rel=1e-9)


@pytest.mark.parametrize("empty", ["instances", "labels"])
def test_nothing_matched_is_an_error(empty: str) -> None:
    matched = poses(20, 3)
    if empty == "instances":
        matched = matched.select(np.zeros(0, dtype=int))
    else:
        matched = replace(matched, labelled=np.zeros((20, 3), dtype=bool))
    with pytest.raises(HaloposeError, match=r"no detection .* OKS 0\.5"):
        evaluate(matched)


def test_one_image_cannot_be_cross_fitted() -> None:
    with pytest.raises(HaloposeError, match="at least two"):
        evaluate(poses(20, 3, images=1))
