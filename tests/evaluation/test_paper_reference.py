"""The paper's section 3.2 to 4.2 written out again, without the package, against ``--preset paper`` calibration.

Equations: 12 (temperature), 15 and 18 (Student-t likelihood), 17 (its covariance), 19 (confidence), 20 (similarity),
21 (Youden threshold), 25 and 27 (coverage and ACE), 28 and 29 (variance calibration).
"""

from dataclasses import replace

import numpy as np
from scipy import optimize, special

from halopose.calibration.calibrate import apply_calibrations, fit_calibrations
from halopose.evaluation.evaluate import evaluate
from halopose.fitting.presets import PRESETS
from halopose.matching.matched_poses import MatchedPoses
from tests.helpers.evaluations import poses

LEVELS = np.arange(1, 100) / 100


def student_nll(parameters: np.ndarray, squared: np.ndarray) -> float:
    """Eq. 15 without the log-determinant of the dispersion, in two dimensions."""
    tau, nu = np.exp(parameters[0]), 2 + np.exp(parameters[1])
    value = special.gammaln(nu / 2) - special.gammaln(nu / 2 + 1) + np.log(nu * np.pi) + 2 * np.log(tau)
    return float(np.mean(value + (nu + 2) / 2 * np.log(1 + squared / (nu * tau**2))))


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
