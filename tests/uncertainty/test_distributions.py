"""Gaussian and Student-t against scipy, gradients against finite differences, and the head's raw outputs."""

import math
from typing import Any

import numpy as np
import pytest
import scipy
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import special, stats

from halopose.types import Array
from halopose.uncertainty.distributions import (
    LOG_ASPECT_BOUND,
    LOG_SIZE_BOUND,
    RAW_CHANNELS,
    SHEAR_BOUND,
    Gaussian,
    Parameterisation,
    StudentT,
    scale_tril_from_covariance,
    scale_tril_from_raw,
)
from tests.helpers.values import present

EXACT: dict[str, float] = {"rtol": 1e-10, "atol": 1e-300}
# The quantiles of older versions of scipy are exact to 1e-8, and 0 where the probability is tiny.
exact_quantiles = pytest.mark.skipif(
    tuple(map(int, scipy.__version__.split(".")[:2])) < (1, 15), reason="needs scipy 1.15 as an oracle"
)
NUS = [2 + 1e-9, 2.5, 4.0, 30.0, 1e3, 1e7]
SEEDS = st.integers(0, 2**32 - 1)
PARAMETERISATIONS = list(RAW_CHANNELS)
DTYPES = [torch.float32, torch.float64]


def double(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def random_factors(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    """Factors of sizes from a thousandth to a thousand pixels, some of them very oblong."""
    raw = rng.normal(size=(*shape, 3)) * [2, 3, 2]
    return scale_tril_from_raw(double(raw))


def distributions(factors: torch.Tensor, nu: Any = None) -> Any:
    return Gaussian(factors) if nu is None else StudentT(factors, double(nu))


def assert_exact(actual: torch.Tensor, expected: Any, **tolerance: float) -> None:
    bounds = EXACT | tolerance
    np.testing.assert_allclose(actual.numpy(), expected, rtol=bounds["rtol"], atol=bounds["atol"])


# --- parity with scipy ------------------------------------------------------------------------------------


@given(SEEDS)
def test_log_prob_equals_scipy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    factor = random_factors(rng)
    covariance = (factor @ factor.mT).numpy()
    # From the centre far out into the tail, in every direction.
    far = 10 ** rng.uniform(-6, 4, (50, 1))
    residual = (double(rng.normal(size=(50, 2)) * far) @ factor.mT).numpy()
    nu = 10 ** rng.uniform(0.31, 4)
    expected = stats.multivariate_normal.logpdf(residual, cov=covariance)
    assert_exact(Gaussian(factor).log_prob(double(residual)), expected, atol=1e-10)
    expected = stats.multivariate_t.logpdf(residual, shape=covariance, df=nu)
    assert_exact(distributions(factor, nu).log_prob(double(residual)), expected, atol=1e-10)


DISTANCES = np.r_[0, np.geomspace(1e-300, 1e12, 200)]
PROBABILITIES = np.r_[0, np.geomspace(1e-300, 0.5, 100), 1 - np.geomspace(0.5, 1e-15, 50)]


def test_mahalanobis_distribution_of_the_gaussian_equals_scipy() -> None:
    distribution = Gaussian(torch.eye(2, dtype=torch.float64))
    assert_exact(distribution.mahalanobis_cdf(double(DISTANCES)), stats.chi2.cdf(DISTANCES, 2))
    assert_exact(distribution.mahalanobis_quantile(double(PROBABILITIES)), stats.chi2.ppf(PROBABILITIES, 2))


@exact_quantiles
@pytest.mark.parametrize("nu", NUS)
def test_mahalanobis_distribution_of_student_t_equals_scipy(nu: Any) -> None:
    distribution = distributions(torch.eye(2, dtype=torch.float64), nu)
    assert_exact(distribution.mahalanobis_cdf(double(DISTANCES)), stats.f.cdf(DISTANCES / 2, 2, nu))
    assert_exact(distribution.mahalanobis_quantile(double(PROBABILITIES)), 2 * stats.f.ppf(PROBABILITIES, 2, nu))


VALUES = np.r_[-np.geomspace(30, 1e-12, 100), 0, np.geomspace(1e-12, 30, 100)]
INNER = np.r_[np.geomspace(1e-250, 0.5, 100), 1 - np.geomspace(0.49, 1e-15, 50)]


@pytest.mark.parametrize("nu", [None, *NUS])
def test_marginal_distribution_equals_scipy(nu: Any) -> None:
    factor = double([[2.0, 0.0], [-1.5, 0.25]])
    scale = np.array([2.0, math.hypot(1.5, 0.25)])
    distribution, reference = distributions(factor, nu), stats.norm if nu is None else stats.t(nu)
    assert_exact(distribution.marginal_scale, scale)
    residual = VALUES[:, None] * scale
    assert_exact(distribution.marginal_cdf(double(residual)), reference.cdf(residual / scale))
    expected = reference.ppf(INNER)[:, None] * scale
    assert_exact(distribution.marginal_quantile(double(INNER)[:, None].expand(-1, 2)), expected, atol=1e-15)
    assert_exact(distribution.marginal_quantile(0.9), reference.ppf(0.9) * scale)


@pytest.mark.parametrize("nu", [2 + 1e-9, 2.5, 4.0, 30.0, 300.0])
def test_marginal_cdf_of_student_t_equals_the_incomplete_beta_function(nu: Any) -> None:
    """scipy.stats.t is the very function that the package calls; this reference is independent of it."""
    value = -np.geomspace(1e-3, 1e6, 100)
    expected = special.betainc(nu / 2, 0.5, nu / (nu + value**2)) / 2
    assert_exact(distributions(torch.eye(2).double(), nu).standard_cdf(double(value)[:, None])[:, 0], expected)


@exact_quantiles
@given(SEEDS, st.sampled_from([None, *NUS]))
def test_quantiles_invert_the_cdfs(seed: int, nu: Any) -> None:
    rng = np.random.default_rng(seed)
    distribution = distributions(random_factors(rng, 20), nu)
    p = double(rng.uniform(1e-6, 1 - 1e-6, 20))
    assert_exact(distribution.mahalanobis_cdf(distribution.mahalanobis_quantile(p)), p.numpy())
    pair = double(rng.uniform(1e-6, 1 - 1e-6, (20, 2)))
    assert_exact(distribution.marginal_cdf(distribution.marginal_quantile(pair)), pair.numpy())


def test_student_t_tends_to_the_gaussian() -> None:
    rng = np.random.default_rng(0)
    factors, p = random_factors(rng, 50), double(rng.uniform(0.01, 0.99, 50))
    gaussian, student = Gaussian(factors), distributions(factors, 1e7)
    residual = gaussian.sample(1, torch.Generator().manual_seed(0))[0]
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
    for name, argument in {
        "log_prob": residual,
        "marginal_cdf": residual,
        "mahalanobis_cdf": gaussian.mahalanobis(residual),
        "mahalanobis_quantile": p,
        "marginal_quantile": p[:, None],
    }.items():
        pair = (getattr(distribution, name)(argument) for distribution in (student, gaussian))
        torch.testing.assert_close(*pair, **close)
    torch.testing.assert_close(student.covariance, gaussian.covariance, **close)
    # The gap shrinks as 1 / nu.
    gaps = [
        (distributions(factors, nu).log_prob(residual) - gaussian.log_prob(residual)).abs().max() for nu in (1e4, 1e5)
    ]
    assert gaps[0] / gaps[1] == pytest.approx(10, rel=0.02)


# --- gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("student", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_gradients_equal_finite_differences(student: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    entries = double(rng.normal(size=(4, 3)) * 0.5).requires_grad_()
    residual = double(rng.normal(size=(4, 2)) * 2).requires_grad_()
    joint = double(rng.uniform(0.05, 0.95, 4)).requires_grad_()
    pair = double(rng.uniform(0.05, 0.95, (4, 2))).requires_grad_()
    dof = double(rng.uniform(2.2, 40, 4)).requires_grad_()

    def distribution(entries: torch.Tensor, dof: torch.Tensor) -> Any:
        # gradcheck nudges every entry; the zero above the diagonal is no parameter.
        a, b, c = entries.unbind(-1)
        rows = torch.stack([a.exp(), torch.zeros_like(a), b, c.exp()], -1).unflatten(-1, (2, 2))
        return StudentT(rows, dof) if student else Gaussian(rows)

    for function, argument in [
        (lambda r, e, d: distribution(e, d).log_prob(r), residual),
        (lambda r, e, d: distribution(e, d).mahalanobis_cdf(distribution(e, d).mahalanobis(r)), residual),
        (lambda p, e, d: distribution(e, d).mahalanobis_quantile(p), joint),
        (lambda r, e, d: distribution(e, d).marginal_cdf(r), residual),
        (lambda p, e, d: distribution(e, d).marginal_quantile(p), pair),
    ]:
        assert torch.autograd.gradcheck(function, (argument, entries, dof), atol=1e-7, rtol=1e-5)


def test_gradient_in_shared_dof_sums_over_the_batch() -> None:
    factors, residual = random_factors(np.random.default_rng(0), 5, 3), torch.ones(5, 3, 2).double()
    shared = double([2.5, 4.0, 9.0]).requires_grad_()
    single = double([2.5, 4.0, 9.0]).expand(5, 3).clone().requires_grad_()
    for dof in (shared, single):
        distribution = StudentT(factors, dof)
        (distribution.marginal_cdf(residual).sum() + distribution.marginal_quantile(0.8).sum()).backward()
    torch.testing.assert_close(shared.grad, present(single.grad).sum(0))


@pytest.mark.parametrize("nu", [3.0, 1e3, 1e5, 1e7])
@pytest.mark.parametrize("method", ["marginal_cdf", "marginal_quantile"])
def test_gradients_of_the_marginals_hold_in_float32(method: str, nu: Any) -> None:
    def gradient(dtype: torch.dtype) -> torch.Tensor:
        argument = torch.tensor([0.3, 0.8], dtype=dtype, requires_grad=True)
        distribution = StudentT(torch.eye(2, dtype=dtype), torch.tensor(nu, dtype=dtype))
        getattr(distribution, method)(argument).sum().backward()
        return present(argument.grad).double()

    torch.testing.assert_close(gradient(torch.float32), gradient(torch.float64), rtol=1e-3, atol=0)


# --- raw head outputs -------------------------------------------------------------------------------------


def raw_values(dtype: torch.dtype) -> Any:
    width: Any = 32 if dtype == torch.float32 else 64
    extreme = st.sampled_from([0.0, 1e4, -1e4, 90.0, -90.0, 2.0**127, -(2.0**127)])
    any_finite = st.floats(width=width, allow_nan=False, allow_infinity=False)
    return extreme | any_finite | st.floats(-12, 12, width=width)


@pytest.mark.parametrize("parameterisation", PARAMETERISATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data(), stride=st.sampled_from([1.0, 8.0, 16.0, 32.0, 64.0]))
def test_any_raw_output_is_a_positive_definite_matrix(
    data: st.DataObject, dtype: torch.dtype, parameterisation: Parameterisation, stride: float
) -> None:
    numpy_dtype = np.float32 if dtype == torch.float32 else np.float64
    shape = (4, RAW_CHANNELS[parameterisation])
    raw = torch.from_numpy(data.draw(arrays(numpy_dtype, shape, elements=raw_values(dtype)))).requires_grad_()
    factors = scale_tril_from_raw(raw, parameterisation, stride)
    assert factors.dtype == dtype
    assert (torch.diagonal(factors, dim1=-2, dim2=-1) > 0).all()
    assert (factors[..., 0, 1] == 0).all()
    scale = Gaussian(factors).scale.detach()
    assert (torch.linalg.eigvalsh(scale) > 0).all()
    torch.testing.assert_close(torch.linalg.cholesky(scale), factors.detach(), rtol=2e-2, atol=0)
    assert torch.linalg.cond(scale.double()).max() < 2e4
    residual = stride * torch.tensor([[0.0, 0.0], [1.0, -2.0], [300.0, 5.0], [0.01, -40.0]], dtype=dtype)
    for distribution in (Gaussian(factors), StudentT(factors, torch.tensor(2.5, dtype=dtype))):
        (gradient,) = torch.autograd.grad(distribution.log_prob(residual).sum(), raw, retain_graph=True)
        assert torch.isfinite(distribution.log_prob(residual)).all()
        assert torch.isfinite(gradient).all()


@given(arrays(np.float64, (5, 3), elements=st.floats(-2, 2)), st.sampled_from([1.0, 8.0, 32.0]))
def test_moderate_raw_outputs_are_the_formula(raw: Array, stride: float) -> None:
    a, b, c = raw.T
    b = np.clip(b, -SHEAR_BOUND * np.exp((a + c) / 2), SHEAR_BOUND * np.exp((a + c) / 2))
    zero = np.zeros(5)
    expected: dict[Parameterisation, list[Array]] = {
        "full": [np.exp(a), zero, b, np.exp(c)],
        "diagonal": [np.exp(a), zero, zero, np.exp(c)],
        "isotropic": [np.exp(a), zero, zero, np.exp(a)],
    }
    inputs: dict[Parameterisation, Array] = {"full": raw, "diagonal": raw[:, [0, 2]], "isotropic": raw[:, :1]}
    for parameterisation, entries in expected.items():
        factors = scale_tril_from_raw(double(inputs[parameterisation]), parameterisation, stride)
        assert_exact(factors, stride * np.stack(entries, -1).reshape(5, 2, 2))


def test_bounds_are_the_documented_ones() -> None:
    factors = scale_tril_from_raw(double([[1e4, 1e5, 1e4], [-1e4, -1e5, -1e4], [1e4, 0, -1e4]]))
    big, small, aspect = math.exp(LOG_SIZE_BOUND), math.exp(-LOG_SIZE_BOUND), math.exp(LOG_ASPECT_BOUND)
    expected = [
        [[big, 0], [SHEAR_BOUND * big, big]],
        [[small, 0], [-SHEAR_BOUND * small, small]],
        [[aspect, 0], [0, 1 / aspect]],
    ]
    assert_exact(factors, expected)


def test_stride_may_be_one_per_anchor() -> None:
    raw = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    stride = torch.tensor([8.0, 8, 16, 16, 32])
    factors = scale_tril_from_raw(raw, stride=stride)
    for anchor in range(5):
        torch.testing.assert_close(
            factors[:, anchor], scale_tril_from_raw(raw[:, anchor], stride=float(stride[anchor]))
        )


@pytest.mark.parametrize("parameterisation", PARAMETERISATIONS)
def test_a_wrong_number_of_channels_is_refused(parameterisation: Parameterisation) -> None:
    with pytest.raises(ValueError, match=rf"takes {RAW_CHANNELS[parameterisation]} channels, got 4"):
        scale_tril_from_raw(torch.zeros(5, 4), parameterisation)


@given(SEEDS)
def test_factors_of_a_covariance_equal_cholesky(seed: int) -> None:
    factors = random_factors(np.random.default_rng(seed), 30)
    covariance = factors @ factors.mT
    own = scale_tril_from_covariance(covariance)
    torch.testing.assert_close(own, torch.linalg.cholesky(covariance), rtol=1e-10, atol=0)
    torch.testing.assert_close(own @ own.mT, covariance, rtol=1e-12, atol=0)


# --- geometry ---------------------------------------------------------------------------------------------


@given(SEEDS, st.sampled_from([None, 2.5, 8.0]), st.sampled_from([0.1, 0.5, 0.9, 0.999]))
def test_ellipse_is_the_eigen_decomposition(seed: int, nu: Any, probability: float) -> None:
    distribution = distributions(random_factors(np.random.default_rng(seed), 10), nu)
    axes, angle = distribution.ellipse(probability)
    quantile = distribution.mahalanobis_quantile(double(probability))
    values = torch.linalg.eigvalsh(distribution.scale).flip(-1)
    assert_exact(axes, (quantile * values).sqrt().numpy())
    major = torch.stack([angle.cos(), angle.sin()], -1)
    stretched = (distribution.scale @ major[..., None])[..., 0]
    assert_exact(stretched / values[:, :1], major.numpy(), atol=1e-12)
    assert ((angle > -math.pi / 2) & (angle <= math.pi / 2)).all()
    # The boundary holds exactly the probability.
    minor = torch.stack([-angle.sin(), angle.cos()], -1)
    for turn in np.linspace(0, 2 * np.pi, 9).tolist():
        point = axes[:, :1] * math.cos(turn) * major + axes[:, 1:] * math.sin(turn) * minor
        assert_exact(distribution.mahalanobis(point), quantile.expand(10).numpy())


def test_ellipse_of_simple_matrices() -> None:
    rows = [[[2.0, 0], [0, 1]], [[1.0, 0], [0, 2]], [[1.0, 0], [0, 1]], [[1.0, 0], [-0.0, 2]]]
    axes, angle = Gaussian(double(rows)).ellipse(-math.expm1(-0.5))  # the quantile is 1
    assert_exact(axes, [[2, 1], [2, 1], [1, 1], [2, 1]])
    assert_exact(angle, [0, math.pi / 2, 0, math.pi / 2])


def test_ellipse_tilts_from_x_towards_y() -> None:
    _, angle = Gaussian(double([[[1.0, 0], [1, 0.1]], [[1.0, 0], [-1, 0.1]]])).ellipse(0.5)
    assert 0 < angle[0] < math.pi / 2
    assert angle[1] == pytest.approx(-angle[0])


@given(SEEDS, st.sampled_from([None, 2.5, 30.0]))
def test_flipping_the_image_negates_the_off_diagonal(seed: int, nu: Any) -> None:
    """Flipped in x, the factor keeps its diagonal and changes the sign below it; the density is the same."""
    rng = np.random.default_rng(seed)
    factors, residual = random_factors(rng, 10), double(rng.normal(size=(10, 2)))
    mirrored = factors * double([[1, 1], [-1, 1]])
    distribution, flipped = distributions(factors, nu), distributions(mirrored, nu)
    mirror = double([-1.0, 1.0])
    assert_exact(flipped.log_prob(residual * mirror), distribution.log_prob(residual).numpy())
    assert_exact(flipped.scale, (distribution.scale * double([[1, -1], [-1, 1]])).numpy())
    assert_exact(flipped.marginal_scale, distribution.marginal_scale.numpy())


# --- sampling and moments ---------------------------------------------------------------------------------


@pytest.mark.parametrize("nu", [None, 8.0])
def test_samples_follow_the_distribution(nu: Any) -> None:
    distribution = distributions(double([[[3.0, 0], [-2, 0.5]], [[0.1, 0], [0.3, 4]]]), nu)
    draws = distribution.sample(100_000, torch.Generator().manual_seed(0))
    assert draws.shape == (100_000, 2, 2)
    for k in range(2):
        empirical = np.cov(draws[:, k].numpy().T)
        spread = np.sqrt(np.outer(np.diag(distribution.covariance[k]), np.diag(distribution.covariance[k])))
        np.testing.assert_allclose(empirical / spread, distribution.covariance[k].numpy() / spread, atol=0.02)
        distance = distribution.mahalanobis(draws)[:, k]
        joint = stats.chi2(2).cdf if nu is None else lambda d: stats.f.cdf(d / 2, 2, nu)
        assert stats.kstest(distance.numpy(), joint).pvalue > 0.01
        marginal = stats.norm.cdf if nu is None else stats.t(nu).cdf
        for axis in range(2):
            standard = (draws / distribution.marginal_scale)[:, k, axis].numpy()
            assert stats.kstest(standard, marginal).pvalue > 0.01


def test_samples_are_reproducible_and_keep_the_dtype() -> None:
    distribution = Gaussian(torch.eye(2).expand(3, 2, 2))
    first, second = (distribution.sample(5, torch.Generator().manual_seed(1)) for _ in range(2))
    assert first.dtype == torch.float32
    assert torch.equal(first, second)


@given(SEEDS, st.floats(2.001, 1e6))
def test_covariance_of_student_t(seed: int, nu: Any) -> None:
    factors = random_factors(np.random.default_rng(seed), 4)
    distribution = distributions(factors, nu)
    assert_exact(distribution.covariance, nu / (nu - 2) * (factors @ factors.mT).numpy())
    moment = torch.ones(4, 2, 2).double()
    assert StudentT(factors, double(nu), moment).covariance is moment
    assert_exact(StudentT(factors, double(nu), moment).scale, distribution.scale.numpy())
    assert_exact(Gaussian(factors).covariance, distribution.scale.numpy())


@pytest.mark.parametrize("nu", [1.0, 2.0])
def test_variance_is_infinite_from_two_degrees_of_freedom_down(nu: Any) -> None:
    distribution = distributions(double([[2.0, 0], [1, 3]]), nu)
    assert torch.isinf(torch.diagonal(distribution.covariance)).all()


def test_dof_broadcasts_over_keypoints() -> None:
    factors = random_factors(np.random.default_rng(0), 6, 3)
    nu = [2.5, 5.0, 50.0]
    distribution, residual = distributions(factors, nu), torch.ones(6, 3, 2).double()
    for k in range(3):
        single = distributions(factors[:, k], nu[k])
        for name in ("log_prob", "marginal_cdf"):
            assert_exact(getattr(distribution, name)(residual)[:, k], getattr(single, name)(residual[:, k]).numpy())
        assert_exact(distribution.marginal_quantile(0.7)[:, k], single.marginal_quantile(0.7).numpy())
        assert_exact(distribution.covariance[:, k], single.covariance.numpy())
        assert_exact(distribution.ellipse(0.9)[0][:, k], single.ellipse(0.9)[0].numpy())


@pytest.mark.parametrize("dof", [4, 4.0, np.float32(4), np.array(4.0), np.full(3, 4.0)])
def test_degrees_of_freedom_may_be_a_number_or_an_array(dof: Any) -> None:
    factors = scale_tril_from_raw(torch.randn(5, 3, 3, dtype=torch.float64, generator=torch.Generator()))
    distribution, expected = StudentT(factors, dof), StudentT(factors, torch.tensor(4.0, dtype=torch.float64))
    residual = torch.ones(5, 3, 2, dtype=torch.float64)
    for method in ("log_prob", "marginal_cdf"):
        torch.testing.assert_close(getattr(distribution, method)(residual), getattr(expected, method)(residual))
    torch.testing.assert_close(distribution.covariance, expected.covariance)
    torch.testing.assert_close(distribution.ellipse(0.9)[0], expected.ellipse(0.9)[0])
