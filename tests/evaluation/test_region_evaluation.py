"""Scores of regions and of the joint distribution, against direct counting and a known truth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from halopose.calibration.calibrate import apply_calibrations, cross_fitted, fit_calibrations
from halopose.data.coco import parse_predictions
from halopose.errors import HaloposeError
from halopose.evaluation.evaluate import evaluate
from halopose.evaluation.region_scores import REGION_LEVELS
from halopose.evaluation.scores import Scores
from halopose.matching.matched_poses import MatchedPoses, match_poses
from halopose.protocol import Protocol
from halopose.types import Array
from halopose.uncertainty.joint_distribution import JointDistribution, whitened_correlation
from tests.helpers.evaluations import partly_labelled, poses, synthetic_poses
from tests.helpers.values import present


def together(instances: int, keypoints: int = 3, seed: int = 0) -> tuple[MatchedPoses, Array]:
    """True positives with correlated keypoints, partly labelled, and their correlation."""
    matched = partly_labelled(poses(instances, keypoints, seed=seed, images=instances))
    loads = np.random.default_rng(seed).normal(size=(2 * keypoints, 2))
    correlation = whitened_correlation((loads @ loads.T + 0.5 * np.eye(2 * keypoints))[None])[0]
    distribution = JointDistribution(np.linalg.cholesky(matched.scale), correlation)
    return replace(matched, residual=distribution.sample(1, np.random.default_rng(seed + 1))[0]), correlation


def test_regions_have_their_coverage_on_other_images() -> None:
    matched, _ = together(1500)
    regions = present(evaluate(matched, None, Protocol(bootstrap=20)).regions)
    for place, level in enumerate(REGION_LEVELS):
        error = np.sqrt(level / 100 * (1 - level / 100) / 1500)
        assert abs(regions.keypoints.held[place] - level / 100) < 4 * error
        assert abs(regions.whole.at(level) - level / 100) < 4 * error
        assert 0.3 * error < regions.keypoints.margin[place] < 4 * error
    assert list(regions.per_keypoint) == list(matched.layout.names)
    assert sum(one.count for one in regions.per_keypoint.values()) == regions.keypoints.count
    assert sum(one.count for one in regions.per_scale.values()) == regions.keypoints.count
    assert list(regions.size) == sorted(regions.size)


def test_scores_count_residuals_inside_regions() -> None:
    matched, _ = together(300)
    fitted = fit_calibrations(*together(300, seed=5)[:1], Protocol())
    distributions = apply_calibrations(matched, fitted, Protocol())
    found = present(evaluate(matched, distributions, Protocol()).regions)
    regions = present(fitted.regions)
    inside = matched.distance <= regions.radius(0.9)[0]
    assert found.keypoints.at(90) == inside[matched.labelled].mean()
    kept = distributions.kept(matched) & matched.labelled
    largest = np.where(kept, matched.distance, 0.0).max(1)[kept.any(1)]
    assert found.whole_kept.at(90) == (largest <= regions.whole_radius(0.9, kept=True)).mean()


def test_the_joint_distribution_gains_the_expected_likelihood() -> None:
    matched, correlation = together(2000)
    joint = present(evaluate(matched, None, Protocol(bootstrap=20)).joint)
    best = JointDistribution(np.linalg.cholesky(matched.scale), correlation).gain(matched.residual, matched.labelled)
    gaussian = joint.distributions["gaussian"]
    assert 0.9 * best.sum() < gaussian.gain * matched.labelled.sum() <= 1.001 * best.sum()
    assert gaussian.nll == pytest.approx(gaussian.independent - gaussian.gain)
    assert gaussian.gain - gaussian.margin > 0
    assert np.abs(joint.correlation - correlation).max() < 0.12
    assert "uncalibrated" not in joint.distributions
    given = replace(matched, correlation=np.broadcast_to(correlation, (len(matched), *correlation.shape)))
    joint = present(evaluate(given).joint)
    assert joint.distributions["uncalibrated"].gain == pytest.approx(best.sum() / matched.labelled.sum())


def test_a_correlation_in_a_file_is_scored_as_given() -> None:
    predictions, truth = synthetic_poses()
    size = 2 * predictions.keypoint_count
    wide = np.broadcast_to(0.7 * np.eye(size) + 0.3, (len(predictions), size, size))
    blocks = whitened_correlation(wide)  # identities on the diagonal
    some = replace(predictions, correlation=blocks)
    entries = some.to_json(correlation=True)
    again = parse_predictions("predictions", entries, truth)
    np.testing.assert_allclose(present(again.correlation), blocks, atol=1e-6)
    joint = present(evaluate(match_poses(again, truth)).joint)
    assert joint.distributions["uncalibrated"].gain < 0  # what was made up does not pay
    entries[1]["correlation"] = (-np.eye(size)).tolist()
    with pytest.raises(HaloposeError, match="detection 1 is not symmetric"):
        parse_predictions("predictions", entries, truth)
    entries[1]["correlation"] = np.where(np.eye(size), 1.0, 0.1).tolist()
    with pytest.raises(HaloposeError, match="contradicts its covariance"):
        parse_predictions("predictions", entries, truth)
    entries[1]["correlation"] = [[1.0]]
    with pytest.raises(HaloposeError, match=f"{size} rows of {size} numbers"):
        parse_predictions("predictions", entries, truth)


def test_json_round_trip() -> None:
    scores = evaluate(together(120)[0], None, Protocol(bootstrap=5))
    again = Scores.from_json(scores.to_json())
    assert present(again.regions) == present(scores.regions)
    assert present(again.joint).distributions == present(scores.joint).distributions
    np.testing.assert_array_equal(present(again.joint).correlation, present(scores.joint).correlation)
    content = scores.to_json()
    content["joint"] = {**content["joint"], "correlation": [[1.0]]}
    with pytest.raises(HaloposeError, match="not the metrics"):
        Scores.from_json(content)


def test_a_pruning_guarantee_holds_on_other_images() -> None:
    protocol = Protocol(area="annotation", threshold_rule="risk:0.1@0.95")
    broken = 0
    for seed in range(20):
        matched = poses(1200, 3, 4, seed=seed, images=400)
        half = matched.image_ids < np.median(matched.image_ids)
        fitted = fit_calibrations(matched.select(np.flatnonzero(half)), protocol)
        rest = matched.select(np.flatnonzero(~half))
        kept = apply_calibrations(rest, fitted, protocol).kept(rest)
        assert kept.mean() > 0.2
        broken += (rest.similarity[kept] < protocol.gamma_ks).mean() > 0.1
    assert broken <= 2
    hopeless = replace(matched, residual=np.full(matched.residual.shape, 1e5))
    with pytest.raises(HaloposeError, match=r"risk:0\.1@0\.95"):
        cross_fitted(hopeless, protocol)


def test_scales_may_have_regions_of_their_own() -> None:
    matched, _ = together(400)
    fitted = fit_calibrations(matched, Protocol(region_scales=True))
    assert present(fitted.regions).keypoint.shape[0] == 3
