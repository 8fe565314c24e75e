"""The fit for matches by OKS and by box, on residuals whose scale depends on an input and on a hidden flag."""

import numpy as np
import torch

from halopose.calibration.calibrators import StudentTCalibration
from halopose.calibration.conditional_fit import OCCLUDED_FIRST, ConditionalSample, fit_scale, fit_tails
from halopose.uncertainty.conditional_scale import INPUTS, ConditionalScale

ROWS, KEYPOINTS = 600, 2


def sample(seed: int) -> ConditionalSample:
    """Residuals that grow with the visibility input, and one detection in fifty with keypoints far off."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(ROWS, KEYPOINTS, len(INPUTS)))
    shape = inputs.shape[:2]
    far = rng.random(ROWS) < 0.02
    occluded = rng.random(shape) < 1 / (1 + np.exp(2 * inputs[..., 2]))
    spread = np.exp(-0.4 * inputs[..., 2]) * np.where(occluded, 1.3, 1.0) * np.where(far, 8.0, 1.0)[:, None]
    distance = rng.chisquare(2, shape) * spread**2
    return ConditionalSample(distance, np.ones(shape, bool), inputs, ~far, np.ones(ROWS, bool), occluded, far & False)


def log_scale(scale: ConditionalScale, inputs: np.ndarray) -> np.ndarray:
    return np.asarray(scale.log_scale(torch.from_numpy(inputs)).numpy())


def coverage(calibration: StudentTCalibration, distance: np.ndarray, level: float, mask: np.ndarray) -> float:
    tau, nu = calibration.tau_.numpy(), calibration.nu_.numpy()
    inside = 1 - (1 + distance / (tau**2 * nu)) ** (-nu / 2) <= level
    return float(inside[mask].mean())


def test_the_scale_follows_its_input_and_ellipses_hold_for_both_kinds_of_matches() -> None:
    torch.set_num_threads(1)
    known, fresh = sample(0), sample(1)
    scale = fit_scale(known)
    narrow, wide = (
        np.quantile(log_scale(scale, fresh.inputs)[fresh.inputs[..., 2] * side > 1], 0.5) for side in (1, -1)
    )
    assert wide - narrow > 0.5
    scaled = [each.scaled(log_scale(scale, each.inputs)) for each in (known, fresh)]
    like = StudentTCalibration(KEYPOINTS)
    whole, parts = fit_tails(scaled[0], np.ones((ROWS, KEYPOINTS), bool), like)
    assert parts is None
    by_box = np.ones((ROWS, KEYPOINTS), bool)
    by_oks = np.repeat(fresh.by_oks[:, None], KEYPOINTS, 1)
    assert abs(coverage(whole, scaled[1].distance, 0.95, by_box) - 0.95) < 0.025
    assert abs(coverage(whole, scaled[1].distance, 0.5, by_oks) - 0.5) < 0.06
    assert abs(coverage(whole, scaled[1].distance, 0.8, by_oks & fresh.occluded) - 0.8) < 0.07


def test_kept_and_pruned_keypoints_get_a_distribution_each() -> None:
    known = sample(2)
    keep = known.inputs[..., 2] > -0.5
    like = StudentTCalibration(KEYPOINTS)
    like.moment_tau_ = torch.full((KEYPOINTS,), 3.0, dtype=torch.float64)
    whole, parts = fit_tails(known, keep, like)
    assert parts is not None
    assert (parts.kept.tau_ < parts.pruned.tau_).all()
    assert (parts.kept.nu_ > 2).all()
    assert torch.equal(whole.moment_tau_, like.moment_tau_)


def test_occluded_keypoints_of_all_matches_come_first_if_their_group_has_weight() -> None:
    known, fresh = sample(0), sample(1)
    errors = []
    for weights in ({}, OCCLUDED_FIRST):
        scale = fit_scale(known, known.inputs[..., 2] > -0.5, weights)
        scaled = [each.scaled(log_scale(scale, each.inputs)) for each in (known, fresh)]
        whole, _ = fit_tails(scaled[0], np.ones((ROWS, KEYPOINTS), bool), StudentTCalibration(KEYPOINTS), weights)
        held = [coverage(whole, scaled[1].distance, level, fresh.occluded) - level for level in (0.5, 0.8)]
        errors.append(float(np.abs(held).mean()))
    assert errors[1] < min(errors[0], 0.05)
