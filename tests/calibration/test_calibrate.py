"""Calibration is never fitted on the images it is applied to, given parts are used, thresholds are optimal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halopose.calibration.calibrate import (
    FEW_OBJECTS,
    DistributionSet,
    apply_calibrations,
    cross_fitted,
    fit_calibrations,
    fit_gaussian,
    fit_offset,
    fit_student,
    limit_narrowing,
    stated_distribution,
    warn_of_few,
)
from halopose.data.splits import image_folds
from halopose.evaluation.evaluate import evaluate
from halopose.matching.matched_poses import MatchedPoses
from halopose.protocol import Protocol
from halopose.types import Array
from halopose.uncertainty.distributions import Bivariate, StudentT
from tests.helpers.evaluations import partly_labelled, poses, with_informative_visibility


def dof_of(distribution: Bivariate) -> torch.Tensor:
    assert isinstance(distribution, StudentT)
    return distribution.dof


@pytest.mark.parametrize("visibility", [False, True])
@pytest.mark.parametrize("nu", [None, 4])
@pytest.mark.parametrize("folds", [2, 5])
def test_cross_fitting_never_uses_an_images_own_data(nu: float | None, folds: int, visibility: bool) -> None:
    matched = with_informative_visibility(partly_labelled(poses(300, 3, nu, seed=7)))
    protocol = Protocol(folds=folds, visibility=visibility)
    before = cross_fitted(matched, protocol)
    fold = image_folds(matched.image_ids, folds)
    for image in np.unique(matched.image_ids)[::17]:
        mine = matched.image_ids == image
        wild = np.where(mine[:, None, None], 1e3 * matched.residual + 50, matched.residual)
        after = cross_fitted(replace(matched, residual=wild), protocol)
        same = fold == fold[mine][0]
        for name in ("gaussian", "student_t"):
            assert torch.equal(before.distributions[name].scale_tril[same], after.distributions[name].scale_tril[same])
            assert torch.equal(before.distributions[name].covariance[same], after.distributions[name].covariance[same])
            moved = before.distributions[name].scale_tril[~same] != after.distributions[name].scale_tril[~same]
            assert moved.any()  # the others do learn from it
        assert torch.equal(
            dof_of(before.distributions["student_t"])[same], dof_of(after.distributions["student_t"])[same]
        )
        np.testing.assert_array_equal(before.confidence[same], after.confidence[same])
        np.testing.assert_array_equal(before.threshold[same], after.threshold[same])
        if visibility:
            np.testing.assert_array_equal(visible(before)[same], visible(after)[same])


def visible(distributions: DistributionSet) -> Array:
    assert distributions.visibility_threshold is not None
    return distributions.visibility_threshold


def test_each_fold_is_calibrated_on_the_others() -> None:
    matched = with_informative_visibility(poses(300, 3, seed=8, flaw=1.3))
    protocol = Protocol(folds=3, visibility=True)
    distributions = cross_fitted(matched, protocol)
    fold = image_folds(matched.image_ids, 3)
    for number in range(3):
        mine, rest = fold == number, matched.select(np.flatnonzero(fold != number))
        fitted = fit_calibrations(rest, protocol)
        moments = np.einsum("nki,nkij,nkj->k", rest.residual, np.linalg.inv(rest.covariance), rest.residual)
        expected = (moments / (2 * len(rest)))[:, None, None] * matched.covariance[mine]
        np.testing.assert_allclose(
            distributions.distributions["gaussian"].covariance[mine], expected, rtol=1e-9, atol=1e-9
        )
        assert (dof_of(distributions.distributions["student_t"])[mine] == fitted.student.nu_).all()
        assert (distributions.threshold[mine] == fitted.threshold).all()
        assert (visible(distributions)[mine] == fitted.visibility_threshold).all()


def test_calibrations_fitted_elsewhere() -> None:
    train, test = poses(4000, 3, seed=13, flaw=1.3), poses(3000, 3, seed=14, flaw=1.3)
    fitted = fit_calibrations(train, Protocol())
    distributions = cross_fitted(
        test, Protocol(), gaussian=fitted.gaussian, student=fitted.student, threshold=fitted.threshold
    )
    tau = fitted.gaussian.tau_.numpy()[:, None, None]
    np.testing.assert_allclose(distributions.distributions["gaussian"].covariance, tau**2 * test.covariance, rtol=1e-9)
    assert (dof_of(distributions.distributions["student_t"]) == fitted.student.nu_).all()
    assert (distributions.threshold == fitted.threshold).all()
    assert distributions.source == "given: gaussian, student, threshold"
    scores = evaluate(test, distributions)
    assert scores.gaussian.ace < 0.015 < scores.uncalibrated.ace
    applied = apply_calibrations(test, fitted, Protocol())
    for name, distribution in applied.distributions.items():
        assert torch.equal(distribution.scale_tril, distributions.distributions[name].scale_tril)
        assert torch.equal(distribution.covariance, distributions.distributions[name].covariance)


def test_calibrations_not_given_are_cross_fitted() -> None:
    matched = partly_labelled(poses(300, 3, seed=16, flaw=1.3))
    gaussian = fit_gaussian(poses(500, 3, seed=17))
    own, mixed = cross_fitted(matched, Protocol()), cross_fitted(matched, Protocol(), gaussian=gaussian)
    assert torch.equal(own.distributions["student_t"].scale_tril, mixed.distributions["student_t"].scale_tril)
    tau = gaussian.tau_.numpy()[:, None, None]
    np.testing.assert_allclose(mixed.distributions["gaussian"].covariance, tau**2 * matched.covariance, rtol=1e-9)
    assert not np.array_equal(own.threshold, mixed.threshold)
    assert own.source.startswith("5 folds of images")
    assert mixed.source == f"given: gaussian; {own.source}"


@pytest.mark.parametrize("nu", [None, 4])
def test_the_distribution_as_given_is_that_of_the_predictions(nu: float | None) -> None:
    matched = poses(50, 3, nu)
    distribution = stated_distribution(matched)
    np.testing.assert_allclose(distribution.scale, matched.scale, rtol=1e-9)
    np.testing.assert_allclose(distribution.covariance, matched.covariance, rtol=1e-9)
    assert isinstance(distribution, StudentT) == (nu is not None)
    other = replace(matched, covariance=3 * matched.covariance)
    if nu is not None:  # the covariance stated, or that of the paper, nu / (nu - 2) times the scale
        np.testing.assert_allclose(stated_distribution(other).covariance, 3 * matched.covariance, rtol=1e-9)
        np.testing.assert_allclose(stated_distribution(other, "paper").covariance, 2 * matched.scale, rtol=1e-9)


def test_covariance_of_a_student_is_moment_or_paper() -> None:
    matched = poses(2000, 2, 4, seed=18)
    moment, paper = fit_student(matched), fit_student(matched, "paper")
    assert torch.equal(moment.nu_, paper.nu_)
    distributions = {
        name: cross_fitted(matched, Protocol(), gaussian=None, student=student).distributions["student_t"]
        for name, student in (("moment", moment), ("paper", paper))
    }
    scale = distributions["paper"].scale
    factor = (paper.nu_ / (paper.nu_ - 2))[:, None, None]
    torch.testing.assert_close(distributions["paper"].covariance, factor * scale)
    torch.testing.assert_close(
        distributions["moment"].covariance,
        (moment.moment_tau_**2)[:, None, None] * torch.from_numpy(matched.scale),
    )


# --- thresholds -------------------------------------------------------------------------------------------


def merit(kept: Array, correct: Array) -> float:
    """Youden's J of a selection, by definition."""
    return float(kept[correct].mean() - kept[~correct].mean())


def brute_force(score: Array, correct: Array, among: Array) -> float:
    """The lowest of the best thresholds on a score, together with another rule."""
    candidates = np.unique(score[among])
    return float(candidates[np.argmax([merit(among & (score >= c), correct) for c in candidates])])


@pytest.mark.parametrize("seed", [21, 27, 31, 33])
def test_thresholds_are_the_best_of_all(seed: int) -> None:
    matched = with_informative_visibility(partly_labelled(poses(60, 2, seed=seed, flaw=1.2)), noise=2.0)
    protocol = Protocol(area="annotation", visibility=True)
    fitted = fit_calibrations(matched, protocol)
    correct = matched.similarity[matched.labelled] >= protocol.gamma_ks
    distribution = fitted.gaussian(stated_distribution(matched).scale_tril)
    confidence = matched.confidence(distribution.covariance.numpy(), protocol)[matched.labelled]
    assert fitted.threshold == brute_force(confidence, correct, np.ones(len(correct), dtype=bool))
    assert matched.visibility is not None
    confident = confidence >= fitted.threshold
    seen = matched.visibility[matched.labelled]
    assert fitted.visibility_threshold == brute_force(seen, correct, confident)
    assert fitted.visibility_threshold is not None
    both = confident & (seen >= fitted.visibility_threshold)
    assert merit(both, correct) > merit(confident, correct)
    alone = brute_force(seen, correct, np.ones(len(correct), dtype=bool))
    assert fitted.visibility_threshold != alone  # so that it matters beside what it is chosen
    distributions = apply_calibrations(matched, fitted, protocol)
    np.testing.assert_array_equal(distributions.kept(matched)[matched.labelled], both)


def test_visibility_is_looked_at_only_where_asked() -> None:
    matched = with_informative_visibility(partly_labelled(poses(300, 3, seed=19)))
    asked, not_asked = fit_calibrations(matched, Protocol(visibility=True)), fit_calibrations(matched, Protocol())
    assert asked.visibility_threshold is not None
    assert not_asked.visibility_threshold is None
    assert asked.threshold == not_asked.threshold
    distributions = cross_fitted(matched, Protocol())
    assert distributions.visibility_threshold is None
    np.testing.assert_array_equal(
        distributions.kept(matched), distributions.confidence >= distributions.threshold[:, None]
    )


def backwards(matched: MatchedPoses) -> Array:
    assert matched.visibility is not None
    return 1 - matched.visibility


@pytest.mark.parametrize(
    "silent",
    [
        lambda matched: None,
        lambda matched: np.ones(matched.labelled.shape),
        lambda matched: np.full(matched.labelled.shape, 0.3),
        backwards,
    ],
    ids=["none", "ones", "constant", "backwards"],
)
def test_an_uninformative_visibility_score_has_no_threshold(silent: Any) -> None:
    """Its own lowest value would do nothing here, but prune on other data."""
    matched = with_informative_visibility(partly_labelled(poses(300, 3, seed=19)))
    matched = replace(matched, visibility=silent(matched))
    assert fit_calibrations(matched, Protocol(visibility=True)).visibility_threshold is None
    assert cross_fitted(matched, Protocol(visibility=True)).visibility_threshold is None


def test_visibility_threshold_is_cross_fitted_beside_given_calibrations() -> None:
    """Calibrations from files hold no visibility threshold: it is cross-fitted like whatever else is missing."""
    matched = with_informative_visibility(partly_labelled(poses(300, 3, seed=21)))
    fitted = fit_calibrations(with_informative_visibility(poses(300, 3, seed=22)), Protocol())
    given: dict[str, Any] = {
        "gaussian": fitted.gaussian,
        "student": fitted.student,
        "threshold": fitted.threshold,
    }
    distributions = cross_fitted(matched, Protocol(visibility=True), **given)
    fold = image_folds(matched.image_ids, 5)
    for number in range(5):
        rest = matched.select(np.flatnonzero(fold != number))
        expected = fit_calibrations(rest, Protocol(visibility=True), **given).visibility_threshold
        assert (visible(distributions)[fold == number] == expected).all()
    assert (distributions.threshold == fitted.threshold).all()
    plain = cross_fitted(matched, Protocol(), **given)
    assert plain.visibility_threshold is None
    np.testing.assert_array_equal(plain.confidence, distributions.confidence)


def test_folds_of_which_some_have_a_visibility_threshold() -> None:
    """In the others nothing is pruned by it."""
    matched = with_informative_visibility(partly_labelled(poses(90, 3, seed=23)))
    fold = image_folds(matched.image_ids, 2)
    assert matched.visibility is not None
    # Fold 0 is scored with what fold 1 says, and that is nothing.
    matched = replace(matched, visibility=np.where((fold == 1)[:, None], 0.5, matched.visibility))
    distributions = cross_fitted(matched, Protocol(folds=2, visibility=True))
    assert (visible(distributions)[fold == 0] == -np.inf).all()
    assert np.isfinite(visible(distributions)[fold == 1]).all()
    unseen = (distributions.confidence >= distributions.threshold[:, None])[fold == 0]
    np.testing.assert_array_equal(distributions.kept(matched)[fold == 0], unseen)


def test_a_bias_is_found_where_there_is_one_and_taken_out() -> None:
    """Residuals of two keypoints are moved by shares of the object's size; the third has none to find."""
    matched = poses(400, 3, None, seed=3)
    true = np.array([[0.3, -0.2], [-0.25, 0.35], [0.0, 0.0]])
    moved = matched.moved(-true)
    found = fit_offset(moved).numpy()
    spread = (matched.residual / np.sqrt(matched.box_area)[:, None, None]).std(0) / 20
    assert (np.abs(found - true) < 5 * spread).all()
    assert (found[2] == 0).all()
    back = moved.moved(found)
    left, before = (np.abs(each.residual.mean(0)[:2]) for each in (back, moved))
    assert (left < 0.3 * before).all()
    narrow, wide = (fit_gaussian(each).tau_[:2] for each in (back, moved))
    assert (narrow < wide).all()
    assert moved.moved(None) is moved


def test_a_bias_of_a_few_objects_is_none() -> None:
    matched = poses(400, 3, None, seed=3)
    moved = replace(matched, residual=matched.residual + 50.0).select(np.arange(7))
    assert (fit_offset(moved) == 0).all()


def test_an_error_in_pixels_of_small_objects_does_not_move_large_ones() -> None:
    """Errors of a pixel at any size: what is taken out must leave the dispersions no wider than they were."""
    matched = poses(2000, 3, None, seed=5)
    area = np.geomspace(20.0, 2000.0, len(matched)) ** 2
    unit = np.tile(np.eye(2), (*matched.labelled.shape, 1, 1))
    noise = np.random.default_rng(5).standard_normal(matched.residual.shape)
    moved = replace(
        matched,
        box_area=area,
        scale=unit,
        covariance=unit,
        residual=noise + np.array([0.5, 0.0]),
        labelled=np.ones_like(matched.labelled),
    )
    found = fit_offset(moved).numpy()
    before, after = (np.square(each.residual).sum() for each in (moved, moved.moved(found)))
    assert after < before
    plain = (moved.residual / np.sqrt(area)[:, None, None]).mean(0)
    assert np.square(moved.moved(plain).residual).sum() > before


@given(seed=st.integers(0, 10**6), turn=st.floats(0.0, 3.0))
def test_no_offset_makes_its_own_data_less_likely(seed: int, turn: float) -> None:
    """Distances under the dispersions never grow, with strong correlation and biases of one coordinate alone."""
    matched = poses(60, 3, None, seed=seed % 1000)
    generator = np.random.default_rng(seed)
    bias = generator.normal(0.0, 0.05, (3, 2)) * generator.integers(0, 2, (3, 2))
    moved = matched.moved(-turn * bias)
    back = moved.moved(fit_offset(moved).numpy())
    assert back.distance[matched.labelled].sum() <= moved.distance[matched.labelled].sum() * (1 + 1e-12)


def test_a_calibration_on_few_objects_is_reported_with_the_number_needed(caplog: pytest.LogCaptureFixture) -> None:
    def warn(*labelled: int) -> str:
        caplog.clear()
        matched = poses(200, 2, names=("nose", "hip"))
        warn_of_few(replace(matched, labelled=np.arange(200)[:, None] < np.array(labelled)), 100)
        return caplog.text

    assert not warn(FEW_OBJECTS, 200)
    line = warn(10, 200)
    assert "10 of nose (1 of 2" in line
    assert "about 500 images" in line
    assert "images that show it" in warn(0, 200)


def test_few_frames_widen_fully_and_narrow_little(caplog: pytest.LogCaptureFixture) -> None:
    protocol = Protocol(split_student=True)
    frames, many = poses(40, 3, None, seed=2), poses(400, 3, None, seed=2)
    fitted = fit_calibrations(frames, protocol)
    wider, narrower = (replace(fitted, gaussian=fitted.gaussian.widened(torch.full((3,), each))) for each in (2.0, 0.5))
    assert limit_narrowing(fitted, narrower, frames, protocol) is fitted
    assert not caplog.messages
    held = limit_narrowing(fitted, wider, frames, protocol)
    share = torch.from_numpy(frames.labelled.sum(0) / 400)
    torch.testing.assert_close(held.gaussian.tau_, fitted.gaussian.tau_ * 2 ** (1 - share))
    ratio = held.gaussian.tau_ / fitted.gaussian.tau_
    torch.testing.assert_close(held.student.moment_tau_, fitted.student.moment_tau_ * ratio)
    torch.testing.assert_close(held.student.nu_, fitted.student.nu_)
    assert "400 objects" in caplog.text
    whole = replace(many, labelled=np.ones_like(many.labelled))
    plenty = fit_calibrations(whole, protocol)
    before = replace(plenty, gaussian=plenty.gaussian.widened(torch.full((3,), 2.0)))
    assert limit_narrowing(plenty, before, whole, protocol) is plenty
