"""Resampled metrics equal metrics of copied images, also if some images have no match."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from halopose.calibration.calibrate import DISTRIBUTIONS, DistributionSet, apply_calibrations, fit_calibrations
from halopose.calibration.calibrators import Calibrations
from halopose.errors import HaloposeError
from halopose.evaluation import metrics
from halopose.evaluation.bootstrap import Difference, PairedMetrics, resample_images
from halopose.evaluation.evaluate import evaluate
from halopose.evaluation.resampling import ResampledMetrics
from halopose.evaluation.scores import AXES, METRICS
from halopose.matching.matched_poses import MatchedPoses
from halopose.protocol import Protocol
from halopose.types import Array
from tests.helpers.evaluations import partly_labelled, poses, with_informative_visibility

PROTOCOL = Protocol()
EDGES = np.array([1024.0, 9216.0])
DRAWS = 5
RANDOM = ("akp_random", "akp_skill")  # each draw has a different order


def true_positives(images: Array, seed: int, nu: float | None = None) -> MatchedPoses:
    """Three instances of four keypoints per image, correctly described up to a factor."""
    matched = with_informative_visibility(partly_labelled(poses(3 * len(images), 4, nu, seed, flaw=1.2), seed, 0.8))
    return replace(matched, image_ids=np.repeat(images, 3))


def fitted(protocol: Protocol = PROTOCOL, nu: float | None = None) -> Calibrations:
    return fit_calibrations(true_positives(np.arange(30), seed=1, nu=nu), protocol)


def measured(matched: MatchedPoses, images: Array | None = None, protocol: Protocol = PROTOCOL) -> ResampledMetrics:
    distributions = apply_calibrations(matched, fitted(protocol), protocol)
    return ResampledMetrics.of(matched, distributions, protocol, EDGES, images)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("visibility", [False, True])
@pytest.mark.parametrize("nu", [None, 4])
def test_draws_are_copies_of_the_drawn_images(seed: int, visibility: bool, nu: float | None) -> None:
    """Images 10, 11 and 40 have no match, so that draws with them have fewer keypoints."""
    images = np.arange(10, 41)
    protocol = Protocol(visibility=visibility)
    matched = true_positives(images[2:-1], seed=seed, nu=nu)
    calibrations = fitted(protocol, nu)
    assert (calibrations.visibility_threshold is not None) == visibility
    distributions = apply_calibrations(matched, calibrations, protocol)
    one = ResampledMetrics.of(matched, distributions, protocol, EDGES, images)
    assert one.image_count == len(images)
    draws = list(one.draws(DRAWS, seed, scales=True))
    sizes = set()
    for draw, pick in zip(draws, resample_images(len(images), DRAWS, seed), strict=True):
        rows = np.concatenate([np.flatnonzero(matched.image_ids == images[drawn]) for drawn in pick])
        sizes.add(len(rows))
        copied = matched.select(rows)
        distributions = apply_calibrations(copied, calibrations, protocol)
        expected = ResampledMetrics.of(copied, distributions, protocol, EDGES).scores(scales=True)
        assert set(draw) == set(expected)
        for name in set(draw) - set(RANDOM):
            assert draw[name] == pytest.approx(expected[name], rel=1e-9, nan_ok=True), name
    assert len(sizes) > 1


def test_the_random_ranking_of_a_draw_is_one_of_copies() -> None:
    one = measured(true_positives(np.arange(20), seed=0))
    for number, (draw, pick) in enumerate(zip(one.draws(DRAWS), resample_images(20, DRAWS), strict=True)):
        copies = (pick[:, None] == one.image).sum(0)
        ordered = np.lexsort((copies, metrics.grade(one.similarity)))  # so that the given order does not matter
        order = ordered[np.random.default_rng(number).permutation(len(one.image))]
        ranked = np.repeat(one.similarity[order], copies[order])
        chance = metrics.average_keypoint_precision(np.arange(len(ranked)), ranked, presorted=True)
        assert draw["akp_random"] == pytest.approx(chance, rel=1e-12)
        assert draw["akp_skill"] == pytest.approx((draw["gaussian.akp"] - chance) / (1 - chance), rel=1e-12)


def test_scores_equal_those_of_the_evaluation() -> None:
    matched = true_positives(np.arange(40), seed=0)
    distributions = apply_calibrations(matched, fitted(), PROTOCOL)
    found = ResampledMetrics.of(matched, distributions, PROTOCOL, EDGES).scores(scales=True)
    scores = evaluate(matched, distributions, PROTOCOL)
    for distribution in DISTRIBUTIONS:
        for name in METRICS:
            assert found[f"{distribution}.{name}"] == pytest.approx(
                scores.distribution(distribution).metric(name), rel=1e-12
            )
            assert found[f"pruned.{distribution}.{name}"] == pytest.approx(
                scores.pruned.distribution(distribution).metric(name), rel=1e-12
            )
    for name in ("akp_random", "akp_visibility", "akp_skill"):
        assert found[name] == pytest.approx(getattr(scores, name), rel=1e-12)
    assert found["kept_fraction"] == pytest.approx(scores.pruned.kept_fraction, rel=1e-12)
    by_scale = [summary.ace for summary in scores.gaussian.per_scale.values()]
    assert [found[f"scale.{number}.ace"] for number in range(3)] == pytest.approx(by_scale, rel=1e-12)
    assert found["scale.spread"] == pytest.approx(np.std(by_scale), rel=1e-12)


def test_plot_data_equal_those_of_the_evaluation() -> None:
    matched = true_positives(np.arange(40), seed=0)
    distributions = apply_calibrations(matched, fitted(), PROTOCOL)
    one, scores = (
        ResampledMetrics.of(matched, distributions, PROTOCOL, EDGES),
        evaluate(matched, distributions, PROTOCOL),
    )
    for axis in AXES:
        for distribution in DISTRIBUTIONS:
            np.testing.assert_array_equal(
                one.coverage[distribution][axis], scores.distribution(distribution).curves.coverage[axis]
            )
        points = scores.gaussian.curves.variance[axis]
        np.testing.assert_array_equal(one.variance[axis]["predicted"], points.expected)
        np.testing.assert_array_equal(one.variance[axis]["empirical"], points.empirical)


def test_a_draw_without_keypoints_has_no_metrics() -> None:
    """One of many images has all the matches, so that most draws of two images have none."""
    matched = true_positives(np.array([5]), seed=0)
    one = measured(matched, images=np.arange(12))
    draws = list(one.draws(6))
    empty = [5 not in pick for pick in resample_images(12, 6)]
    assert any(empty)
    assert not all(empty)
    for draw, nothing in zip(draws, empty, strict=True):
        for name in ("gaussian.ace", "gaussian.nll", "gaussian.akp", "akp_visibility", "kept_fraction"):
            assert np.isnan(draw[name]) == nothing, name


def test_without_a_visibility_score_all_are_visible() -> None:
    matched = replace(true_positives(np.arange(10), seed=0), visibility=None)
    one = measured(matched)
    assert (one.visibility == 1).all()
    assert len(one.visibility) == matched.labelled.sum()


def test_distributions_to_compare_may_be_fewer() -> None:
    matched = true_positives(np.arange(10), seed=0)
    distributions: DistributionSet = apply_calibrations(matched, fitted(), PROTOCOL)
    del distributions.distributions["uncalibrated"]
    found = ResampledMetrics.of(matched, distributions, PROTOCOL, EDGES).scores()
    assert "gaussian.ace" in found
    assert not any("uncalibrated" in name for name in found)


def test_nothing_to_measure_is_refused() -> None:
    matched = true_positives(np.arange(10), seed=0)
    with pytest.raises(HaloposeError, match="no detection matches"):
        measured(replace(matched, labelled=np.zeros_like(matched.labelled)))


# --- paired -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model(PairedMetrics):
    estimate: dict[str, float]
    draws: dict[str, Array]

    @classmethod
    def of(cls, measured: ResampledMetrics) -> Model:
        draws = list(measured.draws(6))
        return cls(measured.scores(), {name: np.array([draw[name] for draw in draws]) for name in draws[0]})


def test_models_that_match_in_different_images_are_paired() -> None:
    """Residuals that differ on two images only: differences have much smaller margins than the metrics."""
    images = np.arange(60)
    matched = true_positives(images, seed=0)
    fewer = matched.select(np.flatnonzero(~np.isin(matched.image_ids, [3, 50])))
    one, other = (Model.of(measured(part, images)) for part in (matched, fewer))
    assert one.minus(other, "gaussian.nll").margin < 0.3 * one.margin("gaussian.nll")
    assert one.minus(one, "gaussian.nll") == Difference(0.0, 0.0)
    unpaired = Model.of(measured(fewer))
    assert one.minus(other, "gaussian.nll").margin < one.minus(unpaired, "gaussian.nll").margin
