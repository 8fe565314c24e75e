"""Calibrations against closed forms, known truths and a global optimiser; weights, masks and shrinkage."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halopose.calibration.calibrators import NEAR_TWO, Calibrations, GaussianCalibration, StudentTCalibration
from halopose.calibration.estimation import Sample, gaussian_temperature
from halopose.errors import HaloposeError
from halopose.types import Array
from halopose.uncertainty.distributions import Gaussian, StudentT, scale_tril_from_raw
from tests.helpers.samples import column, double

SEEDS = st.integers(0, 2**32 - 1)
CALIBRATIONS = [GaussianCalibration, StudentTCalibration]


def random_data(rng: np.random.Generator, n: int, k: int, nu: Any = 4.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Residuals and factors whose dispersion is off by a factor per keypoint."""
    factors = torch.eye(2).double() * double(np.exp(rng.normal(size=(n, k))))[..., None, None]
    factors[..., 1, 0] = double(rng.normal(size=(n, k)))
    flaw = double(np.linspace(0.5, 2, k))[:, None, None]
    distribution = StudentT(factors * flaw, torch.full((k,), nu, dtype=torch.float64))
    return distribution.sample(1, torch.Generator().manual_seed(int(rng.integers(2**31))))[0], factors


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
            return -float((weight * Gaussian(factors[:, k] * t).log_prob(residual[:, k])).sum())

        assert nll(closed) <= min(nll(closed * 0.999), nll(closed * 1.001))


# --- Student-t --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nu", [2.5, 4.0, 30.0])
def test_student_t_recovers_the_truth(nu: float) -> None:
    rng = np.random.default_rng(7)
    n, tau = 200_000, 1.7
    factors = torch.eye(2).double() * double(np.exp(rng.normal(size=(n, 1))))[..., None, None]
    factors[..., 1, 0] = double(rng.normal(size=(n, 1)))
    distribution = StudentT(factors * tau, double([nu]))
    residual = distribution.sample(1, torch.Generator().manual_seed(0))[0]
    weight = double(rng.uniform(0.2, 2, n))
    fitted = StudentTCalibration(1).fit(residual, factors, sample_weight=weight)
    assert float(fitted.nu_) == pytest.approx(nu, rel=0.05)
    assert float(fitted.tau_) == pytest.approx(tau, rel=0.01)


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


def test_distances_give_the_same_fit_as_residuals() -> None:
    generator = torch.Generator().manual_seed(0)
    residual = torch.randn(50, 3, 2, dtype=torch.float64, generator=generator)
    factors = torch.diag_embed(torch.rand(50, 3, 2, dtype=torch.float64, generator=generator) + 0.1)
    labelled = torch.rand(50, 3, generator=generator) < 0.6
    actual = Sample.of_distances(Gaussian(factors).mahalanobis(residual), labelled)
    expected = Sample.of(residual, factors, labelled)
    assert torch.equal(actual.mahalanobis, expected.mahalanobis)
    assert torch.equal(actual.weight, expected.weight)


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
    kind = {} if calibration is GaussianCalibration else {"covariance": "moment"}
    shrunk = calibration(2, **kind).fit(residual, factors, labelled)
    own = calibration(2, min_samples=1, **kind).fit(residual, factors, labelled)
    mask = labelled.flatten()
    pooled = calibration(1, **kind).fit(residual.reshape(-1, 1, 2)[mask], factors.reshape(-1, 1, 2, 2)[mask])
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
    assert "keypoints [0]" in caplog.text
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
    ("residual", "factors", "printed"),
    [
        ((5, 2), (5, 2, 2), [r"\(N, K, 2\)", r"\(5, 2\)", r"\(5, 2, 2\)"]),
        ((5, 3, 3), (5, 3, 2, 2), [r"\(N, K, 2\)", r"\(5, 3, 3\)"]),
        ((5, 3, 2), (5, 2, 2, 2), [r"\(N, K, 2, 2\)", r"\(5, 2, 2, 2\)"]),
        ((5, 3, 2), (4, 3, 2, 2), [r"\(N, K, 2, 2\)", r"\(4, 3, 2, 2\)"]),
        ((5, 4, 2), (5, 4, 2, 2), ["3 keypoints", "the data 4"]),
    ],
)
def test_wrong_shapes_name_expected_and_received(
    residual: tuple[Any, ...], factors: tuple[int, ...], printed: list[str]
) -> None:
    with pytest.raises(HaloposeError) as caught:
        GaussianCalibration(3).fit(torch.ones(residual), torch.ones(factors))
    for pattern in printed:
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
    for distribution, again in [(fitted(factors), restored(factors))]:
        assert torch.equal(distribution.log_prob(residual), again.log_prob(residual))
        assert torch.equal(distribution.covariance, again.covariance)
    with pytest.raises(RuntimeError):
        calibration(4).load_state_dict(fitted.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_forward_scales_the_factors_and_keeps_the_dtype(dtype: torch.dtype) -> None:
    residual, factors = random_data(np.random.default_rng(0), 200, 3)
    gaussian = GaussianCalibration(3).fit(residual, factors)
    student = StudentTCalibration(3).fit(residual, factors)
    given_factors = factors.to(dtype)
    for fitted in (gaussian, student):
        distribution = fitted(given_factors)
        assert distribution.scale_tril.dtype == distribution.covariance.dtype == dtype
        assert distribution.log_prob(residual.to(dtype)).dtype == dtype
        expected = fitted.tau_.to(dtype)[:, None, None] ** 2 * (given_factors @ given_factors.mT)
        torch.testing.assert_close(distribution.scale, expected)
    assert student(given_factors).dof.dtype == dtype
    # Any leading shape, as in a detection head.
    assert gaussian(given_factors.reshape(4, 50, 3, 2, 2)).scale.shape == (4, 50, 3, 2, 2)


@pytest.mark.parametrize("calibration", CALIBRATIONS)
def test_without_shrinkage_a_keypoint_without_samples_takes_the_pooled_values(calibration: type[Any]) -> None:
    residual, factors = random_data(np.random.default_rng(2), 400, 2, nu=5.0)
    labelled = torch.ones(400, 2, dtype=torch.bool)
    labelled[:, 1] = False
    fitted = calibration(2, min_samples=0).fit(residual, factors, labelled)
    for name, values in learned(fitted).items():
        if name != "effective_samples_":
            assert values[1] == pytest.approx(values[0], rel=1e-6), name


def test_both_covariances_of_student_t() -> None:
    residual, factors = random_data(np.random.default_rng(0), 5000, 3, nu=3.0)
    moment = StudentTCalibration(3, covariance="moment").fit(residual, factors)
    paper = StudentTCalibration(3, covariance="paper").fit(residual, factors)
    assert_same(moment, paper)
    gaussian = GaussianCalibration(3).fit(residual, factors)
    scale = factors @ factors.mT
    torch.testing.assert_close(moment(factors).covariance, gaussian(factors).covariance, rtol=1e-12, atol=0)
    factor = (paper.nu_ / (paper.nu_ - 2) * paper.tau_**2)[:, None, None]
    torch.testing.assert_close(paper(factors).covariance, factor * scale, rtol=1e-12, atol=1e-12)
    default = StudentTCalibration(3).fit(residual, factors)
    torch.testing.assert_close(default(factors).covariance, paper(factors).covariance, rtol=1e-12, atol=1e-12)
    for name in ("log_prob", "marginal_cdf"):
        assert torch.equal(getattr(moment(factors), name)(residual), getattr(paper(factors), name)(residual))


def test_the_covariance_is_the_second_moment_where_nu_is_near_two() -> None:
    """Eq. 17 diverges there; the other keypoints keep it."""
    rng = np.random.default_rng(1)
    heavy, factors = random_data(rng, 4000, 1, nu=2.05)
    light, others = random_data(rng, 4000, 1, nu=6.0)
    residual, factors = torch.cat([heavy, light], 1), torch.cat([factors, others], 1)
    fitted = StudentTCalibration(2).fit(residual, factors)
    assert fitted.nu_[0] < NEAR_TWO < fitted.nu_[1]
    second_moment = GaussianCalibration(2).fit(residual, factors).tau_
    eq_17 = fitted.tau_ * (fitted.nu_ / (fitted.nu_ - 2)).sqrt()
    expected = torch.stack([second_moment[0], eq_17[1]])
    torch.testing.assert_close(fitted.moment_tau_, expected, rtol=1e-12, atol=0)


# --- both together ----------------------------------------------------------------------------------------


def test_before_anything_is_fitted_nothing_is_scaled_or_pruned() -> None:
    factors = scale_tril_from_raw(double(np.random.default_rng(0).normal(size=(5, 3, 3))))
    none = Calibrations.none(3)
    assert (none.threshold, none.visibility_threshold) == (-np.inf, None)
    for family in ("gaussian", "student-t"):
        torch.testing.assert_close(
            none.distribution(factors, family, torch.ones(5, 3) > 0).covariance, factors @ factors.mT
        )


def test_each_family_has_its_own_distribution() -> None:
    residual, factors = random_data(np.random.default_rng(0), 300, 3)
    gaussian, student = (kind(3).fit(residual, factors) for kind in CALIBRATIONS)
    both = Calibrations(gaussian, student, threshold=-0.5, visibility_threshold=0.25)
    distribution, heavy = (
        both.distribution(factors, family, torch.ones(300, 3) > 0) for family in ("gaussian", "student-t")
    )
    assert isinstance(distribution, Gaussian)
    assert isinstance(heavy, StudentT)
    torch.testing.assert_close(distribution.covariance, gaussian(factors).covariance)
    torch.testing.assert_close(heavy.scale, student(factors).scale)
    assert torch.equal(heavy.dof, student.nu_)


@pytest.mark.parametrize("calibration", [GaussianCalibration, StudentTCalibration])
def test_arrays_with_coco_flags_give_the_same_fit_as_tensors(calibration: type[Any]) -> None:
    rng = np.random.default_rng(0)
    factors = scale_tril_from_raw(torch.from_numpy(rng.normal(size=(90, 2, 3)))).numpy()
    residual, flags, weight = rng.normal(size=(90, 2, 2)), rng.integers(0, 3, (90, 2)), rng.random(90)
    tensors = map(torch.from_numpy, (residual, factors, flags > 0, weight))
    expected = calibration(2).fit(*tensors).state_dict()
    for labelled in (flags, flags.astype(np.float32), torch.from_numpy(flags), flags > 0):
        found = calibration(2).fit(residual, factors, labelled, weight).state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"labelled": np.full((9, 2), 0.5)}, "0, 1 and 2"),
        ({"labelled": np.full((9, 2), np.nan)}, "0, 1 and 2"),
        ({"labelled": [["yes", "no"]] * 9}, "labelled should be"),
        ({"residual": np.full((9, 2, 2), "a")}, "residuals should be"),
    ],
)
def test_inputs_that_are_not_numeric_arrays_are_refused(wrong: dict[str, Any], words: str) -> None:
    data = {"residual": np.zeros((9, 2, 2)), "scale_tril": np.tile(np.eye(2), (9, 2, 1, 1))}
    with pytest.raises(HaloposeError, match=words):
        GaussianCalibration(2).fit(**(data | wrong))
