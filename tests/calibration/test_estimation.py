"""Student-t fits against a global optimiser, and the bound of dispersions on data drawn with a known bound."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import optimize

from halopose.calibration.estimation import NU_MAX, NU_MIN, Sample, likeliest_bound, student_parameters
from halopose.types import Array
from tests.helpers.samples import column

SEEDS = st.integers(0, 2**32 - 1)


def nll(distance: Array, weight: Array, nu: float, tau: float) -> float:
    """Weighted Student-t NLL, less what does not depend on nu and tau."""
    growth = np.average(np.log1p(distance / (nu * tau**2)), weights=weight)
    return float((nu + 2) / 2 * growth + 2 * np.log(tau))


def best_nll(distance: Array, weight: Array) -> float:
    """Global minimum: a grid of the Lomax scale with the best nu each, then scipy from several starts."""

    def objective(parameters: Array) -> float:
        nu = np.clip(2 + np.exp(np.clip(parameters[0], -40, 40)), NU_MIN, NU_MAX)
        return nll(distance, weight, nu, np.exp(parameters[1]))

    mean = np.average(distance, weights=weight)
    grid = np.linspace(np.log(distance[distance > 0].min()) - 8, np.log(mean * NU_MAX), 150)
    growth = np.array([np.average(np.log1p(distance * np.exp(-s)), weights=weight) for s in grid])
    nu = np.clip(2 / growth, NU_MIN, NU_MAX)
    tau = np.sqrt(np.exp(grid) / nu)
    values = (nu + 2) / 2 * growth + 2 * np.log(tau)
    best = int(np.argmin(values))
    middle = np.log(mean / 2) / 2
    starts = [(np.log(nu[best] - 2), np.log(tau[best])), (-1.0, middle), (2.0, middle)]
    options = {"xatol": 1e-7, "fatol": 1e-11, "maxiter": 500}
    polished = (optimize.minimize(objective, x, method="Nelder-Mead", options=options).fun for x in starts)
    return min(*polished, values[best])


def assert_optimal(distance: Array, weight: Array | None = None) -> None:
    weight = np.ones(len(distance)) if weight is None else weight
    nu, tau = (float(value) for value in student_parameters(column(distance, weight)))
    assert NU_MIN <= nu <= NU_MAX
    assert nll(distance, weight, nu, tau) <= best_nll(distance, weight) + 1e-6, (nu, tau)


UGLY: dict[str, Callable[..., Array]] = {
    "exponential": lambda rng, n: rng.exponential(2, n),
    "uniform": lambda rng, n: rng.uniform(0, 3, n),
    "heavy": lambda rng, n: 2 * rng.f(2, rng.uniform(0.3, 3), n),
    "student": lambda rng, n: 2 * rng.f(2, rng.uniform(2.1, 60), n),
    "outliers": lambda rng, n: np.where(rng.random(n) < 0.05, 1e4, 1.0) * rng.exponential(2, n),
    "one outlier": lambda rng, n: np.r_[rng.exponential(2, n - 1), 1e8],
    "constant": lambda rng, n: 1.7 + 1e-3 * rng.random(n),
    "gamma": lambda rng, n: rng.gamma(rng.uniform(0.2, 4), 2, n),
    "lognormal": lambda rng, n: np.exp(rng.normal(0, rng.uniform(0.5, 6), n)),
    "two sizes": lambda rng, n: np.where(rng.random(n) < rng.uniform(0, 0.5), 1e-6, 2) * rng.gamma(1, 1, n),
}


@pytest.mark.parametrize("kind", UGLY)
@settings(max_examples=30)
@given(SEEDS, st.sampled_from([3, 10, 100, 700, 3000]), st.integers(-12, 12), st.booleans())
@example(158365728, 3000, 0, True)  # of two sizes: the profile has an edge where nu leaves 2
def test_student_t_is_never_worse_than_a_global_optimiser(
    kind: str, seed: int, n: int, log_size: int, weighted: bool
) -> None:
    rng = np.random.default_rng(seed)
    distance = UGLY[kind](rng, n) * 10.0**log_size
    assert_optimal(distance, rng.random(n) ** 3 + 1e-6 if weighted else None)


@settings(max_examples=25)
@given(SEEDS, st.sampled_from([20_000, 60_000]))
def test_student_t_is_optimal_on_data_large_enough_to_thin(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    kind = list(UGLY)[seed % len(UGLY)]
    assert_optimal(np.sort(UGLY[kind](rng, n)) if seed % 2 else UGLY[kind](rng, n))


@settings(max_examples=25)
@given(SEEDS, st.sampled_from([50, 500, 3000, 20_000]), st.sampled_from(["all", "labelled", "weighted"]))
@example(4879, 500, "all")  # a start across the edge where nu leaves 2
def test_a_keypoint_is_fitted_as_well_among_others(seed: int, n: int, rows: str) -> None:
    """Those that settle early, that start from their spread, or that have no valley are treated apart."""
    rng = np.random.default_rng(seed)
    kinds = rng.integers(len(UGLY), size=3)
    distance = np.stack([list(UGLY.values())[kind](rng, n) for kind in kinds], 1)
    chance = rng.random((n, 3))
    weight = {"all": np.ones((n, 3)), "labelled": np.where(chance < 0.8, 1.0, 0.0), "weighted": chance}[rows]
    distance = np.where(weight > 0, distance, 0.0)
    together = student_parameters(Sample(torch.from_numpy(distance), torch.from_numpy(weight)))
    for keypoint in range(3):
        own, share = distance[:, keypoint], weight[:, keypoint]
        alone = student_parameters(column(own, share))
        found, reference = (
            nll(own, share, float(nu), float(tau))
            for nu, tau in ((values[keypoint] for values in together), (value[0] for value in alone))
        )
        assert found == pytest.approx(reference, abs=1e-9)


@pytest.mark.parametrize("excess", [-1e-3, -1e-6, 0, 1e-8, 1e-7, 1e-6, 3e-6, 1e-5, 1e-4, 1e-3, 1e-2])
def test_student_t_is_optimal_on_both_sides_of_the_gaussian(excess: float) -> None:
    """The spread E[m^2] / E[m]^2 just above and below 2 (exponential distribution), where nu leaves its bound."""
    base = -2 * np.log1p(-(np.arange(4000) + 0.5) / 4000)

    def gap(power: float) -> float:
        return np.mean(base ** (2 * power)) / np.mean(base**power) ** 2 / 2 - 1 - excess

    assert_optimal(base ** optimize.brentq(gap, 0.5, 2, xtol=1e-15))


@pytest.mark.parametrize(("share", "ratio"), [(0.3, 1e-9), (0.45, 1e-2), (0.45, 1e-6), (0.49, 1e-9)])
def test_student_t_finds_heavy_tails_behind_a_small_spread(share: float, ratio: float) -> None:
    """Many near-perfect keypoints: the spread is below an exponential's, yet a heavy tail fits best."""
    assert_optimal(np.array([ratio, 1.0]), np.array([share, 1 - share]))


def test_student_t_finds_the_better_of_two_minima() -> None:
    """Three sizes far apart give the likelihood a valley for nu = 2 and another for nu = 9."""
    assert_optimal(np.array([1e-6, 3e-4, 7.5, 870.0]), np.array([0.33, 0.41, 0.97, 0.0018]))


@settings(max_examples=60)
@given(SEEDS)
def test_student_t_is_optimal_on_a_handful_of_atoms(seed: int) -> None:
    rng = np.random.default_rng(seed)
    k = rng.integers(2, 7)
    assert_optimal(10 ** rng.uniform(*(-9, 2) if seed % 2 else (-2, 1), k), rng.random(k) ** 2 + 1e-3)


@pytest.mark.parametrize("zeros", [0.0, 0.3, 0.6, 1.0])
def test_exact_hits_give_finite_parameters(zeros: float) -> None:
    distance = np.where(np.arange(1000) < 1000 * zeros, 0.0, np.random.default_rng(0).exponential(2, 1000))
    nu, tau = student_parameters(column(distance))
    assert torch.isfinite(nu).all()
    assert torch.isfinite(tau).all()
    assert tau > 0
    if 0 < zeros < 0.5:
        assert_optimal(distance)


# --- weights and masks ------------------------------------------------------------------------------------


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
