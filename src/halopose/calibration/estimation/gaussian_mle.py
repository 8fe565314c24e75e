"""The likeliest temperatures of a Gaussian (paper, eq. 12), and the likeliest bound on its dispersions."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from halopose.calibration.estimation.sample import TINY, Sample

_BOUNDS = np.geomspace(0.1, 1e3, 81)  # among which one is sought: likelihoods are flat there
_BOUND_ROWS = 50_000  # as many tell
_WORTH = 10.0  # nats that a bound must bring


def gaussian_temperature(sample: Sample) -> Tensor:
    """tau (K,) that minimises the weighted Gaussian NLL (eq. 12): tau^2 = sum(w m) / (2 sum w)."""
    moment = (sample.weight * sample.mahalanobis).sum(0) / (2 * sample.weight.sum(0))
    return moment.clamp_min(torch.finfo(moment.dtype).tiny).sqrt()


def likeliest_bound(sample: Sample, variance: Tensor) -> float:
    """The bound b for which dispersions times 1 / (1 + variance / b) are the likeliest Gaussians, inf for none.

    variance (N, K): of the dispersions, in the unit of the bound. Each b has temperatures of its own.
    """
    seen, stride = sample.weight.sum(0) > 0, max(1, len(variance) // _BOUND_ROWS)
    weight, square, variance = (values[::stride][:, seen] for values in (sample.weight, sample.mahalanobis, variance))
    total = weight.sum(0).clamp_min(TINY)

    def loss(inverse: float) -> float:
        growth = 1 + inverse * variance  # of squared distances
        temperature = ((weight * square * growth).sum(0) / total).clamp_min(TINY)
        return float((total * temperature.log()).sum() - (weight * growth.log()).sum())

    best = min(_BOUNDS.tolist(), key=lambda bound: loss(1 / bound))
    return best if loss(0.0) - loss(1 / best) > _WORTH else math.inf
