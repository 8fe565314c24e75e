"""Whitened residuals as lengths and directions, and conversion of lengths between circular Student-t distributions."""

from __future__ import annotations

import math

import numpy as np

from halopose.errors import HaloposeError
from halopose.types import Array

_TINY = 1e-300


def whiten(residual: Array, scale_tril: Array) -> Array:
    """L^-1 r (..., 2), by forward substitution."""
    first = residual[..., 0] / scale_tril[..., 0, 0]
    second = (residual[..., 1] - scale_tril[..., 1, 0] * first) / scale_tril[..., 1, 1]
    return np.stack([first, second], axis=-1)


def factors(matrices: Array) -> Array:
    """Return lower triangular L (..., 2, 2) with L L' = matrices (..., 2, 2); zero for zero matrices (known
    keypoints).
    """
    try:
        return np.linalg.cholesky(matrices)
    except np.linalg.LinAlgError:
        known = (matrices == 0).all((-2, -1), keepdims=True)
    try:
        return np.where(known, 0.0, np.linalg.cholesky(np.where(known, np.eye(2), matrices)))
    except np.linalg.LinAlgError:
        raise HaloposeError("covariances are positive definite, or zero where a place is known") from None


def squares(vectors: Array) -> Array:
    """Return squared lengths (...) of vectors (..., 2); faster than a sum over the short axis."""
    return np.asarray(np.square(vectors[..., 0]) + np.square(vectors[..., 1]))


def directions(residual: Array, scale_tril: Array, labelled: Array) -> tuple[Array, Array]:
    """Return lengths (M, K) of whitened residuals and their directions (M, K, 2), zero without a label."""
    white = whiten(residual, scale_tril)
    length = np.hypot(white[..., 0], white[..., 1])
    known = labelled & (length > 0)
    return length, np.where(known[..., None], white / np.maximum(length, _TINY)[..., None], 0.0)


def stretched(vectors: Array, before: Array | float, after: Array | float) -> Array:
    """Stretch vectors (..., K, 2) of a circular t with ``before`` degrees of freedom to one with ``after``."""
    squared = squares(vectors)
    wanted = squared_length(log_survival(squared, before), after)
    return np.asarray(vectors * np.sqrt(wanted / np.maximum(squared, _TINY))[..., None])


def log_survival(squared: Array, dof: Array | float) -> Array:
    """Return the log-probability of a longer vector under a circular t, or a Gaussian if dof is infinite."""
    if isinstance(dof, float):
        return -squared / 2 if math.isinf(dof) else -dof / 2 * np.log1p(squared / dof)
    with np.errstate(invalid="ignore"):
        return np.where(np.isinf(dof), -squared / 2, -dof / 2 * np.log1p(squared / dof))


def squared_length(log_survival: Array, dof: Array | float) -> Array:
    """Inverse of ``log_survival``."""
    with np.errstate(invalid="ignore", over="ignore"):
        if isinstance(dof, float):
            return -2 * log_survival if math.isinf(dof) else dof * np.expm1(-2 / dof * log_survival)
        return np.where(np.isinf(dof), -2 * log_survival, dof * np.expm1(-2 / dof * log_survival))
