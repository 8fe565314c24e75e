"""The paper's sections 3 and 4 written out again, without the package, against ``--preset paper``.

Equations: 4 and 8 to 10 (training objective), 12 (temperature), 15 and 18 (Student-t likelihood), 17 (its covariance),
19 (confidence), 20 (similarity), 21 (Youden threshold), 24 (AKP), 25 and 27 (coverage and ACE), 28 and 29 (variance
calibration), 44 to 49 (marginal coverage).
"""

from dataclasses import replace

import numpy as np
import torch
from scipy import optimize, special, stats

from halopose.calibration.calibrate import apply_calibrations, fit_calibrations
from halopose.calibration.calibrators import GaussianCalibration, StudentTCalibration
from halopose.evaluation.evaluate import evaluate
from halopose.fitting.head_training import importance_weights, weighted_nll
from halopose.fitting.presets import PRESETS
from halopose.matching.matched_poses import MatchedPoses
from tests.helpers.evaluations import poses

LEVELS = np.arange(1, 100) / 100


def student_nll(parameters: np.ndarray, squared: np.ndarray, weight: np.ndarray | None = None) -> float:
    """Eq. 15 without the log-determinant of the dispersion, in two dimensions."""
    tau, nu = np.exp(parameters[0]), 2 + np.exp(parameters[1])
    value = special.gammaln(nu / 2) - special.gammaln(nu / 2 + 1) + np.log(nu * np.pi) + 2 * np.log(tau)
    return float(np.average(value + (nu + 2) / 2 * np.log(1 + squared / (nu * tau**2)), weights=weight))


def average_keypoint_precision(confidence: np.ndarray, similarity: np.ndarray) -> float:
    """Eq. 24 by its definition: at each recall the highest precision of any shorter or longer list that reaches it."""
    ranked = similarity[np.argsort(-confidence)]
    values = []
    for threshold in np.arange(0.5, 1.0, 0.05):
        found = np.cumsum(ranked >= threshold - 1e-12)
        precision, recall = found / np.arange(1, len(found) + 1), found / max(found[-1], 1)
        reached = [precision[recall >= level - 1e-12] for level in np.arange(101) / 100]
        values.append(np.mean([best.max() if found[-1] else 0.0 for best in reached]))
    return float(np.mean(values))


def assigned_cells(cells: int, keypoints: int) -> tuple[np.ndarray, ...]:
    """Residuals, dispersions, labels, confidences and areas of label-assigned cells."""
    rng = np.random.default_rng(11)
    factors = np.tril(rng.normal(size=(cells, keypoints, 2, 2)))
    factors[..., (0, 1), (0, 1)] = np.exp(0.5 * rng.normal(size=(cells, keypoints, 2)))
    white = rng.standard_t(5, size=(cells, keypoints, 2))
    labelled = rng.random((cells, keypoints)) < 0.8
    return (factors @ white[..., None])[..., 0], factors, labelled, rng.random(cells), 10 ** rng.uniform(2, 5, cells)


def test_the_training_objective_is_the_paper_written_out() -> None:
    """Eq. 10 and its gradient with respect to the dispersion, in a loop."""
    residual, factors, labelled, score, area = assigned_cells(40, 3)
    train = PRESETS["paper"].train
    total, mass = 0.0, 0.0
    gradient = np.zeros_like(factors)
    for i in range(40):
        weight = score[i] ** 1.0 / area[i]
        for k in np.flatnonzero(labelled[i]):
            sigma = factors[i, k] @ factors[i, k].T
            r = residual[i, k]
            inverse = np.linalg.inv(sigma)
            total += weight * (r @ inverse @ r / 2 + np.log(np.linalg.det(sigma)) / 2 + np.log(2 * np.pi))
            mass += weight
            # Appendix A: dL/dSigma = (Sigma^-1 - Sigma^-1 r r^T Sigma^-1) / 2, and dSigma = dL L^T + L dL^T.
            gradient[i, k] = weight * (inverse - inverse @ np.outer(r, r) @ inverse) @ factors[i, k]
    tensors = (torch.from_numpy(value) for value in (residual, factors, labelled, score, area))
    residual_, factors_, labelled_, score_, area_ = tensors
    factors_.requires_grad_()
    weights = importance_weights(score_, area_, train.alpha, train.scale_weight)
    assert train.dof is None
    value, weight_sum = weighted_nll(factors_, residual_, labelled_, weights, train.dof)
    loss = value / weight_sum
    loss.backward()
    np.testing.assert_allclose(loss.item(), total / mass, rtol=1e-10)
    found = factors_.grad
    assert found is not None
    np.testing.assert_allclose(np.tril(found.numpy()), np.tril(gradient / mass), rtol=1e-8, atol=1e-12)


def test_calibration_on_assigned_cells_is_the_paper_written_out() -> None:
    """Eqs. 12 and 18 with the importance weights of training, and no shrinkage."""
    paper = PRESETS["paper"]
    residual, factors, labelled, score, area = assigned_cells(3000, 2)
    weight = score / area
    data = (torch.from_numpy(value) for value in (residual, factors, labelled, weight))
    known = tuple(data)
    gaussian = GaussianCalibration(2, min_samples=paper.min_samples).fit(*known)
    student = StudentTCalibration(2, min_samples=paper.min_samples, covariance=paper.covariance).fit(*known)
    inverse = np.linalg.inv(factors @ np.swapaxes(factors, -1, -2))
    squared = np.einsum("nki,nkij,nkj->nk", residual, inverse, residual)
    for k in range(2):
        m, w = squared[labelled[:, k], k], weight[labelled[:, k]]
        np.testing.assert_allclose(gaussian.tau_[k].item() ** 2, (w * m).sum() / (2 * w.sum()), rtol=1e-9)
        best = optimize.minimize(student_nll, [0.0, 1.0], (m, w), method="Nelder-Mead").fun
        own = np.array([np.log(student.tau_[k].item()), np.log(student.nu_[k].item() - 2)])
        assert student_nll(own, m, w) <= best + 1e-7


def heavy_tailed(instances: int, seed: int) -> MatchedPoses:
    """Gaussian predictions whose residuals have a Student-t of 5 degrees of freedom."""
    matched = poses(instances, 3, None, seed=seed, flaw=1.4)
    stretch = np.sqrt(5 / np.random.default_rng(seed).chisquare(5, matched.labelled.shape))
    return replace(matched, residual=matched.residual * stretch[..., None])


def test_preset_paper_is_the_paper_written_out() -> None:
    protocol = replace(PRESETS["paper"].protocol, area="annotation", visibility=False)
    known, fresh = heavy_tailed(500, 3), heavy_tailed(400, 4)
    found = fit_calibrations(known, protocol)
    scores = evaluate(fresh, apply_calibrations(fresh, found, protocol), protocol)

    squared = np.einsum("mki,mkij,mkj->mk", known.residual, np.linalg.inv(known.covariance), known.residual)
    tau = np.sqrt(squared.mean(0) / 2)
    fits = [optimize.minimize(student_nll, [0.0, 2.0], (column,), method="Nelder-Mead") for column in squared.T]
    np.testing.assert_allclose(found.gaussian.tau_.numpy(), tau, rtol=1e-6)
    for k, fit in enumerate(fits):
        own = np.array([np.log(found.student.tau_[k].item()), np.log(found.student.nu_[k].item() - 2)])
        assert student_nll(own, squared[:, k]) <= fit.fun + 1e-7

    kappa = 2 * np.asarray(known.layout.sigmas)
    trace = np.einsum("mkii->mk", known.covariance) * tau**2
    confidence = (-trace / (known.area[:, None] * kappa**2)).ravel()
    similarity = np.exp(-np.square(known.residual).sum(-1) / (2 * known.area[:, None] * kappa**2)).ravel()
    correct = similarity >= 0.5
    candidates = np.sort(confidence)
    youden = [(confidence[correct] >= c).mean() - (confidence[~correct] >= c).mean() for c in candidates]
    assert abs(found.threshold - candidates[int(np.argmax(youden))]) < 1e-9

    squared = np.einsum("mki,mkij,mkj->mk", fresh.residual, np.linalg.inv(fresh.covariance), fresh.residual)
    inside = 1 - np.exp(-squared / tau**2 / 2)
    ace = np.mean([abs((inside <= level).mean() - level) for level in LEVELS])
    assert abs(scores.gaussian.ace - ace) < 1e-9
    nu, scale = found.student.nu_.numpy(), found.student.tau_.numpy()
    heavy = 1 - (1 + squared / (nu * scale**2)) ** (-nu / 2)
    ace = np.mean([abs((heavy <= level).mean() - level) for level in LEVELS])
    assert abs(scores.student_t.ace - ace) < 1e-9

    def ence(variance: np.ndarray) -> float:
        order = np.argsort(variance.ravel())
        halves = np.square(fresh.residual).sum(-1).ravel() / 2
        bins = [
            (variance.ravel()[part].mean() ** 0.5, halves[part].mean() ** 0.5) for part in np.array_split(order, 20)
        ]
        return float(np.mean([abs(rmse - rmv) / rmv for rmv, rmse in bins]))

    half_trace = np.einsum("mkii->mk", fresh.covariance) / 2
    assert abs(scores.gaussian.ence - ence(half_trace * tau**2)) < 1e-9
    assert abs(scores.student_t.ence - ence(half_trace * scale**2 * nu / (nu - 2))) < 1e-9
    assert scores.student_t.ence != scores.gaussian.ence

    # Ranking and marginals on the images that were not fitted on.
    ranks = (-np.einsum("mkii->mk", fresh.covariance) * tau**2 / (fresh.area[:, None] * kappa**2)).ravel()
    alike = np.exp(-np.square(fresh.residual).sum(-1) / (2 * fresh.area[:, None] * kappa**2)).ravel()
    assert abs(scores.gaussian.akp - average_keypoint_precision(ranks, alike)) < 1e-9
    for axis, name in enumerate(("ace_x", "ace_y")):
        standard = fresh.residual[..., axis] / np.sqrt(fresh.covariance[..., axis, axis])
        central = 2 * stats.norm.cdf(np.abs(standard) / tau) - 1
        ace = np.mean([abs((central <= level).mean() - level) for level in LEVELS])
        assert abs(getattr(scores.gaussian, name) - ace) < 1e-9
        central = 2 * stats.t.cdf(np.abs(standard) / scale, nu) - 1
        ace = np.mean([abs((central <= level).mean() - level) for level in LEVELS])
        assert abs(getattr(scores.student_t, name) - ace) < 1e-9
