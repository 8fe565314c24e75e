"""Fitting 17 Student-t distributions to a million residuals, against scipy.optimize.minimize per keypoint."""

from __future__ import annotations

import numpy as np
import torch
from scipy import optimize

from benchmarks.interleave import Comparison, compare
from halopose.calibration.estimation import Sample, student_parameters
from halopose.uncertainty.distributions import StudentT

KEYPOINTS = 17


def _sample(nu: float) -> Sample:
    torch.manual_seed(0)
    factors = torch.eye(2, dtype=torch.float64).expand(1_000_000 // KEYPOINTS, KEYPOINTS, 2, 2)
    dof = torch.full((KEYPOINTS,), nu, dtype=torch.float64)
    return Sample.of(StudentT(1.3 * factors, dof).sample(1)[0], factors)


def compare_student(nu: float, rounds: int = 5) -> tuple[Comparison, float]:
    """Compare with scipy; also returns scipy's largest advantage in mean log-likelihood in nats."""
    sample = _sample(nu)
    columns = [column.copy() for column in sample.mahalanobis.numpy().T]

    def peer() -> list[float]:
        return [float(optimize.minimize(_nll, [1.0, 0.0], args=(column,)).fun) for column in columns]

    ours, tau = student_parameters(sample)
    nlls = [_nll(np.log([n - 2, t]), column) for n, t, column in zip(ours.numpy(), tau.numpy(), columns, strict=True)]
    gap = float(np.max(np.array(nlls) - np.array(peer())))
    return compare(lambda: student_parameters(sample), peer, rounds), gap


def _nll(parameters: np.ndarray, distances: np.ndarray) -> float:
    nu, log_variance = 2 + np.exp(parameters[0]), 2 * parameters[1]
    kernel = np.log1p(distances / (nu * np.exp(log_variance)))
    return float((nu + 2) / 2 * kernel.mean() + log_variance)
