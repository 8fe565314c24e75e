"""Calibrations against closed forms, known truths and a global optimiser; weights, masks and shrinkage."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from halopose.errors import HaloposeError
from halopose.types import Array
from halopose.uncertainty import estimation
from halopose.uncertainty.calibration import (
    NU_MAX,
    NU_MIN,
    Calibrations,
    GaussianCalibration,
    Sample,
    StudentTCalibration,
    gaussian_temperature,
    mean_nll,
    student_parameters,
)
from halopose.uncertainty.distributions import Gaussian, StudentT, scale_tril_from_raw

SEEDS = st.integers(0, 2**32 - 1)
CALIBRATIONS = [GaussianCalibration, StudentTCalibration]


def double(values: Any) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values), dtype=torch.float64)


def column(distances: Any, weight: Any = None) -> Sample:
    weight = np.ones(len(distances)) if weight is None else weight
    return Sample(double(distances)[:, None], double(weight)[:, None])


def random_data(rng: np.random.Generator, n: int, k: int, nu: Any = 4.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Residuals and factors whose dispersion is off by a factor per keypoint."""
    factors = torch.eye(2).double() * double(np.exp(rng.normal(size=(n, k))))[..., None, None]
    factors[..., 1, 0] = double(rng.normal(size=(n, k)))
    flaw = double(np.linspace(0.5, 2, k))[:, None, None]
    law = StudentT(factors * flaw, torch.full((k,), nu, dtype=torch.float64))
    return law.sample(1, torch.Generator().manual_seed(int(rng.integers(2**31))))[0], factors


def learned(calibration: Any) -> dict[str, Array]:
    return {name: value.numpy() for name, value in calibration.state_dict().items()}


def assert_same(first: Any, second: Any, rtol: float = 0.0) -> None:
    for name, value in learned(first).items():
        np.testing.assert_allclose(value, learned(second)[name], rtol=rtol, err_msg=name)


# --- Gaussian ---------------------------------------------------------------------------------------------


@given(SEEDS)
def test_gaussian_temperature_is_the_closed_form_and_the_minimum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    residual, factors = random_data(rng, 60, 3)
    weight = double(rng.random(60) + 0.01)
    tau = GaussianCalibration(3).fit(residual, factors, sample_weight=weight).tau_
    covariance = (factors @ factors.mT).numpy()
    r, w = residual.numpy(), weight.numpy()
    for k in range(3):
        distance = np.einsum("ni,nij,nj->n", r[:, k], np.linalg.inv(covariance[:, k]), r[:, k])
        closed = np.sqrt((w * distance).sum() / (2 * w.sum()))
        if (w.sum() ** 2 / (w**2).sum()) >= 50:
            assert float(tau[k]) == pytest.approx(closed, rel=1e-10)
        assert float(gaussian_temperature(column(distance, w))) == pytest.approx(closed, rel=1e-12)

        def nll(t: float, k: int = k) -> float:
            return mean_nll(Gaussian(factors[:, k] * t), residual[:, k], weight)

        assert nll(closed) <= min(nll(closed * 0.999), nll(closed * 1.001))


# --- Student-t --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nu", [2.5, 4.0, 30.0])
def test_student_t_recovers_the_truth(nu: float) -> None:
    rng = np.random.default_rng(7)
    n, tau = 200_000, 1.7
    factors = torch.eye(2).double() * double(np.exp(rng.normal(size=(n, 1))))[..., None, None]
    factors[..., 1, 0] = double(rng.normal(size=(n, 1)))
    law = StudentT(factors * tau, double([nu]))
    residual = law.sample(1, torch.Generator().manual_seed(0))[0]
    weight = double(rng.uniform(0.2, 2, n))
    fitted = StudentTCalibration(1).fit(residual, factors, sample_weight=weight)
    assert float(fitted.nu_) == pytest.approx(nu, rel=0.05)
    assert float(fitted.tau_) == pytest.approx(tau, rel=0.01)


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


@pytest.mark.parametrize("weighted", [False, True])
def test_student_t_is_the_same_whatever_the_number_of_threads(
    weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimation, "_FEWEST_BLOCKS", 1)
    rng = np.random.default_rng(3)
    distance = torch.from_numpy(2 * rng.f(2, [2.5, 4, 9, 30, 200], (150_001, 5)))
    weight = torch.from_numpy(rng.random((150_001, 5))) if weighted else torch.ones_like(distance)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            found.append(torch.stack(student_parameters(Sample(distance, weight))))
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("excess", [-1e-3, -1e-6, 0, 1e-8, 1e-7, 1e-6, 3e-6, 1e-5, 1e-4, 1e-3, 1e-2])
def test_student_t_is_optimal_on_both_sides_of_the_gaussian(excess: float) -> None:
    """The spread E[m^2] / E[m]^2 just above and below an exponential law's 2, where nu leaves its bound."""
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


@pytest.mark.parametrize("calibration", CALIBRATIONS)
@settings(max_examples=20)
@given(seed=SEEDS)
def test_whole_weights_are_copies(calibration: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    residual, factors = random_data(rng, 300, 2)
    counts = torch.from_numpy(rng.integers(0, 4, 300))
    # Kish's size is not the number of copies, so keep the shrinkage out of it.
    weighted = calibration(2, min_samples=1).fit(residual, factors, sample_weight=counts.double())
    copied = calibration(2, min_samples=1).fit(
        residual.repeat_interleave(counts, 0), factors.repeat_interleave(counts, 0)
    )
    np.testing.assert_allclose(weighted.tau_, copied.tau_, rtol=1e-6)
    if calibration is StudentTCalibration:
        np.testing.assert_allclose(weighted.nu_, copied.nu_, rtol=1e-5)
        np.testing.assert_allclose(weighted.moment_tau_, copied.moment_tau_, rtol=1e-12)
    else:
        np.testing.assert_allclose(weighted.tau_, copied.tau_, rtol=1e-12)


@pytest.mark.parametrize("calibration", CALIBRATIONS)
@pytest.mark.parametrize("rubbish", [float("nan"), float("inf"), 1e300, -7.0])
def test_unlabelled_keypoints_have_no_influence(calibration: type[Any], rubbish: float) -> None:
    rng = np.random.default_rng(0)
    residual, factors = random_data(rng, 400, 3)
    labelled = torch.from_numpy(rng.random((400, 3)) < 0.6)
    clean = calibration(3).fit(residual, factors, labelled)
    dirty = torch.where(labelled[..., None], residual, rubbish)
    assert_same(clean, calibration(3).fit(dirty, factors, labelled))
    if np.isnan(rubbish):
        broken = torch.where(labelled[..., None, None], factors, rubbish)
        assert_same(clean, calibration(3).fit(residual, broken, labelled))
    for k in range(3):
        mask = labelled[:, k]
        alone = calibration(1).fit(residual[mask][:, [k]], factors[mask][:, [k]])
        assert float(alone.tau_) == pytest.approx(float(clean.tau_[k]), rel=1e-6)


def test_weights_may_be_per_keypoint_and_scale_freely() -> None:
    rng = np.random.default_rng(0)
    residual, factors = random_data(rng, 300, 2)
    weight = double(rng.random((300, 2)))
    both = GaussianCalibration(2).fit(residual, factors, sample_weight=weight)
    for k in range(2):
        alone = GaussianCalibration(2).fit(residual, factors, sample_weight=weight[:, k])
        assert float(alone.tau_[k]) == float(both.tau_[k])
    assert_same(both, GaussianCalibration(2).fit(residual, factors, sample_weight=weight * 1e-6), rtol=1e-12)


def test_distances_are_as_good_as_residuals() -> None:
    generator = torch.Generator().manual_seed(0)
    residual = torch.randn(50, 3, 2, dtype=torch.float64, generator=generator)
    factors = torch.diag_embed(torch.rand(50, 3, 2, dtype=torch.float64, generator=generator) + 0.1)
    labelled = torch.rand(50, 3, generator=generator) < 0.6
    ours = Sample.of_distances(Gaussian(factors).mahalanobis(residual), labelled)
    expected = Sample.of(residual, factors, labelled)
    assert torch.equal(ours.mahalanobis, expected.mahalanobis)
    assert torch.equal(ours.weight, expected.weight)


def test_effective_samples_are_kishs() -> None:
    weight = np.array([1.0, 1, 1, 0, 5])
    assert float(column(np.ones(5), weight).effective) == pytest.approx(8**2 / 28)
    assert float(column(np.ones(5), np.zeros(5)).effective) == 0


# --- shrinkage --------------------------------------------------------------------------------------------


def few_samples(count: int) -> tuple[torch.Tensor, ...]:
    """Keypoint 0 has ``count`` samples, keypoint 1 plenty; each on its own, together, and shrunk."""
    residual, factors = random_data(np.random.default_rng(5), 500, 2)
    labelled = torch.ones(500, 2, dtype=torch.bool)
    labelled[count:, 0] = False
    return residual, factors, labelled


@pytest.mark.parametrize("calibration", CALIBRATIONS)
@pytest.mark.parametrize("count", [1, 5, 20, 49, 50, 51, 200])
def test_shrinkage_lies_between_own_and_pooled(calibration: type[Any], count: int) -> None:
    residual, factors, labelled = few_samples(count)
    shrunk = calibration(2).fit(residual, factors, labelled)
    own = calibration(2, min_samples=1).fit(residual, factors, labelled)
    mask = labelled.flatten()
    pooled = calibration(1).fit(residual.reshape(-1, 1, 2)[mask], factors.reshape(-1, 1, 2, 2)[mask])
    names = [name for name in learned(own) if name != "effective_samples_"]
    assert float(shrunk.effective_samples_[0]) == count
    for name in names:
        offset = 2 if name == "nu_" else 0
        alone, together, value = (learned(c)[name][0] for c in (own, pooled, shrunk))
        if count >= 50:
            assert value == alone
        else:
            share = count / 50
            expected = share * np.log(alone - offset) + (1 - share) * np.log(together - offset)
            assert np.log(value - offset) == pytest.approx(expected, rel=1e-5, abs=1e-5)
            low, high = sorted([alone, together])
            assert low * (1 - 1e-6) <= value <= high * (1 + 1e-6)
        assert learned(shrunk)[name][1] == learned(own)[name][1]


@pytest.mark.parametrize("calibration", CALIBRATIONS)
def test_a_keypoint_without_samples_takes_the_pooled_values_and_warns(
    calibration: type[Any], caplog: pytest.LogCaptureFixture
) -> None:
    residual, factors, labelled = few_samples(0)
    with caplog.at_level("WARNING", "halopose"):
        fitted = calibration(2).fit(residual, factors, labelled)
    assert "no samples for keypoints [0]" in caplog.text
    for name, value in learned(fitted).items():
        if name != "effective_samples_":
            assert value[0] == pytest.approx(value[1], rel=1e-6), name


@pytest.mark.parametrize("calibration", CALIBRATIONS)
def test_full_data_do_not_warn(calibration: type[Any]) -> None:
    residual, factors = random_data(np.random.default_rng(0), 100, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibration(2).fit(residual, factors)


# --- errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calibration", CALIBRATIONS)
def test_no_samples_at_all_is_an_error(calibration: type[Any]) -> None:
    residual, factors = random_data(np.random.default_rng(0), 10, 2)
    for empty in (
        {"labelled": torch.zeros(10, 2, dtype=torch.bool)},
        {"sample_weight": torch.zeros(10)},
    ):
        with pytest.raises(HaloposeError, match="no labelled keypoint"):
            calibration(2).fit(residual, factors, **empty)
    with pytest.raises(HaloposeError, match="no labelled keypoint"):
        calibration(2).fit(residual[:0], factors[:0])


@pytest.mark.parametrize(
    ("residual", "factors", "said"),
    [
        ((5, 2), (5, 2, 2), [r"\(N, K, 2\)", r"\(5, 2\)", r"\(5, 2, 2\)"]),
        ((5, 3, 3), (5, 3, 2, 2), [r"\(N, K, 2\)", r"\(5, 3, 3\)"]),
        ((5, 3, 2), (5, 2, 2, 2), [r"\(N, K, 2, 2\)", r"\(5, 2, 2, 2\)"]),
        ((5, 3, 2), (4, 3, 2, 2), [r"\(N, K, 2, 2\)", r"\(4, 3, 2, 2\)"]),
        ((5, 4, 2), (5, 4, 2, 2), ["3 keypoints", "the data 4"]),
    ],
)
def test_wrong_shapes_name_expected_and_received(
    residual: tuple[Any, ...], factors: tuple[int, ...], said: list[str]
) -> None:
    with pytest.raises(HaloposeError) as caught:
        GaussianCalibration(3).fit(torch.ones(residual), torch.ones(factors))
    for pattern in said:
        assert caught.match(pattern)


@pytest.mark.parametrize(
    "wrong",
    [
        {"labelled": torch.ones(4, 3, dtype=torch.bool)},
        {"labelled": torch.ones(5, dtype=torch.bool)},
        {"labelled": torch.ones(3, dtype=torch.bool)},
        {"sample_weight": torch.ones(3)},
        {"sample_weight": torch.ones(4)},
        {"sample_weight": torch.ones(1)},
        {"sample_weight": torch.ones(5, 2)},
        {"sample_weight": torch.ones(1, 3)},
    ],
    ids=lambda wrong: "-".join(f"{name}{tuple(value.shape)}" for name, value in wrong.items()),
)
def test_wrong_shapes_of_labels_and_weights_name_expected_and_received(wrong: dict[str, Any]) -> None:
    residual, factors = random_data(np.random.default_rng(0), 5, 3)
    (received,) = (str(tuple(value.shape)) for value in wrong.values())
    with pytest.raises(HaloposeError) as caught:
        GaussianCalibration(3).fit(residual, factors, **wrong)
    assert received in str(caught.value)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_impossible_weights_are_refused(weight: float) -> None:
    residual, factors = random_data(np.random.default_rng(0), 5, 3)
    with pytest.raises(HaloposeError, match="finite and not negative"):
        GaussianCalibration(3).fit(residual, factors, sample_weight=torch.tensor([1, 1, weight, 1, 1]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_labelled_rubbish_is_refused(value: float) -> None:
    residual, factors = random_data(np.random.default_rng(0), 5, 3)
    residual[2, 1, 0] = value
    with pytest.raises(HaloposeError, match="not finite"):
        GaussianCalibration(3).fit(residual, factors)


# --- as a module ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calibration", CALIBRATIONS)
def test_state_dict_round_trip(calibration: type[Any]) -> None:
    residual, factors = random_data(np.random.default_rng(0), 200, 3)
    fitted = calibration(3).fit(residual, factors)
    restored = calibration(3)
    restored.load_state_dict(fitted.state_dict())
    assert_same(fitted, restored)
    for law, again in [(fitted(factors), restored(factors))]:
        assert torch.equal(law.log_prob(residual), again.log_prob(residual))
        assert torch.equal(law.covariance, again.covariance)
    with pytest.raises(RuntimeError):
        calibration(4).load_state_dict(fitted.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_forward_scales_the_factors_and_keeps_the_dtype(dtype: torch.dtype) -> None:
    residual, factors = random_data(np.random.default_rng(0), 200, 3)
    gaussian = GaussianCalibration(3).fit(residual, factors)
    student = StudentTCalibration(3).fit(residual, factors)
    given_factors = factors.to(dtype)
    for fitted in (gaussian, student):
        law = fitted(given_factors)
        assert law.scale_tril.dtype == law.covariance.dtype == dtype
        assert law.log_prob(residual.to(dtype)).dtype == dtype
        expected = fitted.tau_.to(dtype)[:, None, None] ** 2 * (given_factors @ given_factors.mT)
        torch.testing.assert_close(law.scale, expected)
    assert student(given_factors).dof.dtype == dtype
    # Any leading shape, as in a detection head.
    assert gaussian(given_factors.reshape(4, 50, 3, 2, 2)).scale.shape == (4, 50, 3, 2, 2)


def test_both_covariances_of_student_t() -> None:
    residual, factors = random_data(np.random.default_rng(0), 5000, 3, nu=3.0)
    moment = StudentTCalibration(3).fit(residual, factors)
    paper = StudentTCalibration(3, covariance="paper").fit(residual, factors)
    assert_same(moment, paper)
    gaussian = GaussianCalibration(3).fit(residual, factors)
    scale = factors @ factors.mT
    torch.testing.assert_close(moment(factors).covariance, gaussian(factors).covariance, rtol=1e-12, atol=0)
    factor = (paper.nu_ / (paper.nu_ - 2) * paper.tau_**2)[:, None, None]
    torch.testing.assert_close(paper(factors).covariance, factor * scale, rtol=1e-12, atol=1e-12)
    for name in ("log_prob", "marginal_cdf"):
        assert torch.equal(getattr(moment(factors), name)(residual), getattr(paper(factors), name)(residual))


@given(SEEDS)
def test_mean_nll_is_the_weighted_mean(seed: int) -> None:
    rng = np.random.default_rng(seed)
    residual, factors = random_data(rng, 20, 2)
    weight = rng.integers(0, 3, (20, 2)) + np.eye(20, 2)
    law = Gaussian(factors)
    each = -law.log_prob(residual).numpy()
    assert mean_nll(law, residual) == pytest.approx(each.mean(), rel=1e-12)
    weighted = np.average(each, weights=weight)
    assert mean_nll(law, residual, double(weight)) == pytest.approx(weighted, rel=1e-12)


# --- both together ----------------------------------------------------------------------------------------


def test_before_anything_is_fitted_nothing_is_scaled_or_pruned() -> None:
    factors = scale_tril_from_raw(double(np.random.default_rng(0).normal(size=(5, 3, 3))))
    none = Calibrations.none(3)
    assert (none.threshold, none.visibility_threshold) == (-np.inf, None)
    for family in ("gaussian", "student-t"):
        torch.testing.assert_close(
            none.law(factors, family, torch.ones(5, 3) > 0).covariance, factors @ factors.mT
        )


def test_each_family_has_its_own_law() -> None:
    residual, factors = random_data(np.random.default_rng(0), 300, 3)
    gaussian, student = (kind(3).fit(residual, factors) for kind in CALIBRATIONS)
    both = Calibrations(gaussian, student, threshold=-0.5, visibility_threshold=0.25)
    law, heavy = (both.law(factors, family, torch.ones(300, 3) > 0) for family in ("gaussian", "student-t"))
    assert isinstance(law, Gaussian)
    assert isinstance(heavy, StudentT)
    torch.testing.assert_close(law.covariance, gaussian(factors).covariance)
    torch.testing.assert_close(heavy.scale, student(factors).scale)
    assert torch.equal(heavy.dof, student.nu_)


@pytest.mark.parametrize("calibration", [GaussianCalibration, StudentTCalibration])
def test_arrays_and_flags_of_coco_are_as_good_as_tensors(calibration: type[Any]) -> None:
    rng = np.random.default_rng(0)
    factors = scale_tril_from_raw(rng.normal(size=(90, 2, 3)))
    residual, flags, weight = rng.normal(size=(90, 2, 2)), rng.integers(0, 3, (90, 2)), rng.random(90)
    tensors = map(torch.from_numpy, (residual, factors, flags > 0, weight))
    expected = calibration(2).fit(*tensors).state_dict()
    for labelled in (flags, flags.astype(np.float32), torch.from_numpy(flags), flags > 0):
        found = calibration(2).fit(residual, factors, labelled, weight).state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"labelled": np.full((9, 2), 0.5)}, "0, 1 and 2 as in COCO"),
        ({"labelled": np.full((9, 2), np.nan)}, "0, 1 and 2 as in COCO"),
        ({"labelled": [["yes", "no"]] * 9}, "labelled should be a tensor or an array"),
        ({"residual": np.full((9, 2, 2), "a")}, "residuals should be a tensor or an array"),
    ],
)
def test_what_is_no_array_of_numbers_is_one_line(wrong: dict[str, Any], words: str) -> None:
    data = {"residual": np.zeros((9, 2, 2)), "scale_tril": np.tile(np.eye(2), (9, 2, 1, 1))}
    with pytest.raises(HaloposeError, match=words):
        GaussianCalibration(2).fit(**(data | wrong))
