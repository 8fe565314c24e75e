"""Proper scores of predicted distributions, sharpness and PIT histograms.

A proper score is best in expectation for the true distribution; all of these are losses, in pixels or nats.

Reference:
    Gneiting and Raftery, Strictly proper scoring rules, prediction, and estimation, 2007. Jordan, Krueger and Lerch,
    Evaluating probabilistic forecasts with scoringRules, 2019 (closed forms of the CRPS).
"""

from __future__ import annotations

import numpy as np
from scipy import special

from halopose.types import Array

PIT_BINS = 20
_DIRECTIONS = 32


def crps_gaussian(standardized: Array, scale: Array) -> Array:
    """CRPS (..., n) of residuals divided by their scale (..., n) under a normal distribution."""
    z = np.asarray(standardized)
    value = z * (2 * special.ndtr(z) - 1) + np.sqrt(2 / np.pi) * np.exp(-z * z / 2) - 1 / np.sqrt(np.pi)
    return np.asarray(scale * value)


def crps_student(standardized: Array, scale: Array, dof: Array) -> Array:
    """CRPS (..., n) under a Student-t.

    Args:
        standardized: (..., n) residuals divided by their scale.
        scale: (..., n) scales.
        dof: (n,) degrees of freedom, above 1.
    """
    z, nu = np.asarray(standardized), np.asarray(dof, dtype=float)
    large = nu > 1e5  # the Gaussian limit, where the beta functions overflow
    nu = np.minimum(nu, 1e5)
    whole = special.betaln(0.5, nu / 2)
    density = np.exp(-whole - (nu + 1) / 2 * np.log1p(z * z / nu)) / np.sqrt(nu)
    value = z * (2 * special.stdtr(nu, z) - 1) + 2 * density * (nu + z * z) / (nu - 1)
    value = value - 2 * np.sqrt(nu) / (nu - 1) * np.exp(special.betaln(0.5, nu - 0.5) - 2 * whole)
    return np.where(large, crps_gaussian(z, scale), scale * value) if large.any() else scale * value


def energy_score(residual: Array, factors: Array, dof: Array | None) -> Array:
    """Energy score E|X - r| - E|X - X'| / 2 (n,) of residuals (n, 2), in pixels.

    X has the Cholesky factor (n, 2, 2) and, for a Student-t, dof (n,) degrees of freedom. A length in the plane is
    pi / 2 times its mean projection, so the score is pi / 2 times the mean CRPS along all directions.

    Args:
        residual: Residuals r (n, 2) in pixels.
        factors: Cholesky factors (n, 2, 2) of the scale matrices of X.
        dof: Degrees of freedom (n,) of a Student-t; None for a Gaussian.
    """
    angle = (np.arange(_DIRECTIONS) + 0.5) * np.pi / _DIRECTIONS
    directions = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    scale = np.hypot(directions @ factors[..., 0].T, directions @ factors[..., 1].T)
    standardized = directions @ residual.T / scale
    crps = crps_gaussian(standardized, scale) if dof is None else crps_student(standardized, scale, dof)
    return np.asarray(np.pi / 2 * crps.mean(0))


def pit_histogram(probability: Array, bins: int = PIT_BINS) -> Array:
    """Shares (bins,) of probability integral transforms (n,) in equal bins; all 1 / bins if calibrated."""
    if not len(probability):
        return np.full(bins, np.nan)
    count = np.histogram(np.clip(probability, 0, 1), bins=bins, range=(0.0, 1.0))[0]
    return np.asarray(count / len(probability))
