"""The bound of dispersions against one that data were drawn with."""

import math

import numpy as np
import pytest
import torch
from scipy import optimize

from halopose.uncertainty.estimation import Sample, likeliest_bound


def drawn(seed: int, bound: float, rows: int = 4000) -> tuple[Sample, torch.Tensor]:
    """Distances under dispersions of variances (N, 3), where true ones are bounded; the last is unseen."""
    rng = np.random.default_rng(seed)
    variance = np.exp(rng.normal(0, 1.5, (rows, 3)))
    true = np.array([0.5, 2.0, 1.0]) / (1 + variance / bound)  # over what is stated
    labelled = rng.random((rows, 3)) < np.array([0.9, 0.5, 0.0])
    distance = np.where(labelled, true * rng.chisquare(2, (rows, 3)), 0.0)
    return Sample.of_distances(torch.from_numpy(distance), torch.from_numpy(labelled)), torch.from_numpy(variance)


@pytest.mark.parametrize("bound", [0.5, 5.0, 15.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_bound_is_found_again(bound: float, seed: int) -> None:
    assert likeliest_bound(*drawn(seed, bound)) == pytest.approx(bound, rel=0.35)


def test_it_is_the_likeliest() -> None:
    """Against the likelihood of both, bound and temperatures, by a general optimiser."""
    sample, variance = drawn(7, 3.0)
    seen, square, spread = (
        sample.weight.numpy()[:, :2] > 0,
        sample.mahalanobis.numpy()[:, :2],
        variance.numpy()[:, :2],
    )

    def loss(logarithms: np.ndarray) -> float:
        scale = np.exp(logarithms[:2]) / (1 + spread / np.exp(logarithms[2]))
        return float((np.log(scale) + square / scale / 2)[seen].sum())

    best = optimize.minimize(loss, np.zeros(3), method="Nelder-Mead", options={"maxiter": 4000, "xatol": 1e-4})
    assert likeliest_bound(sample, variance) == pytest.approx(float(np.exp(best.x[2])), rel=0.07)


def test_right_dispersions_get_none() -> None:
    assert likeliest_bound(*drawn(1, math.inf)) == math.inf
