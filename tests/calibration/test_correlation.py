"""The joint distribution of keypoints: marginals are kept, parameters are recovered, and scipy agrees."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from halopose.calibration.correlation import Correlation, fit_correlation
from halopose.errors import HaloposeError
from halopose.types import Array
from halopose.uncertainty.joint_distribution import (
    JointDistribution,
    is_correlation,
    joint_covariance,
    own_and_shared,
    whitened_correlation,
)
from halopose.uncertainty.whitening import whiten

KEYPOINTS = 4


def some_correlation(seed: int = 0, keypoints: int = KEYPOINTS) -> Array:
    rng = np.random.default_rng(seed)
    loads = rng.normal(size=(2 * keypoints, 3))
    return whitened_correlation((loads @ loads.T / 3 + np.eye(2 * keypoints))[None])[0]


def some_factors(count: int, seed: int = 1, keypoints: int = KEYPOINTS) -> Array:
    rng = np.random.default_rng(seed)
    factors = np.zeros((count, keypoints, 2, 2))
    factors[..., 0, 0], factors[..., 1, 1] = rng.uniform(1, 5, (2, count, keypoints))
    factors[..., 1, 0] = rng.normal(size=(count, keypoints))
    return factors


def test_gaussian_density_equals_scipy() -> None:
    factors, matrix = some_factors(5), some_correlation()
    distribution = JointDistribution(factors, matrix)
    residual = distribution.sample(1, np.random.default_rng(0))[0]
    joint = joint_covariance(factors @ np.swapaxes(factors, -1, -2), matrix)
    expected = [stats.multivariate_normal(np.zeros(8), joint[n]).logpdf(residual[n].ravel()) for n in range(5)]
    np.testing.assert_allclose(distribution.log_prob(residual), expected, rtol=1e-10)
    labelled = np.array([True, False, True, True])
    some = np.repeat(labelled, 2)
    expected = [
        stats.multivariate_normal(np.zeros(6), joint[n][np.ix_(some, some)]).logpdf(residual[n][labelled].ravel())
        for n in range(5)
    ]
    np.testing.assert_allclose(distribution.log_prob(residual, np.tile(labelled, (5, 1))), expected, rtol=1e-10)


def test_one_nu_for_all_is_the_multivariate_t() -> None:
    factors, matrix = some_factors(5), some_correlation()
    distribution = JointDistribution(factors, matrix, np.full(KEYPOINTS, 4.5), 4.5)
    residual = distribution.sample(1, np.random.default_rng(0))[0]
    joint = joint_covariance(factors @ np.swapaxes(factors, -1, -2), matrix)
    expected = [stats.multivariate_t(np.zeros(8), joint[n], df=4.5).logpdf(residual[n].ravel()) for n in range(5)]
    np.testing.assert_allclose(distribution.log_prob(residual), expected, rtol=1e-9)


def test_the_density_integrates_to_each_keypoints_own_distribution() -> None:
    """The density ratio to the distribution of one keypoint, averaged over the other one, is 1."""
    matrix = some_correlation(keypoints=2)
    factors = np.tile(np.eye(2), (20_000, 2, 1, 1))
    distribution = JointDistribution(factors, matrix, np.array([3.0, 8.0]), 5.0)
    own = JointDistribution(factors, np.eye(4), np.array([3.0, 8.0]))  # independent keypoints
    rng = np.random.default_rng(2)
    residual = own.sample(1, rng)[0]
    residual[:, 0] = [1.3, -0.4]
    ratio = np.exp(distribution.log_prob(residual) - own.log_prob(residual))
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / math.sqrt(len(ratio))


@pytest.mark.parametrize("joint_dof", [3.0, math.inf])
def test_samples_have_the_marginals_of_every_keypoint(joint_dof: float) -> None:
    nu = np.array([3.0, 5.0, 9.0, 30.0])
    factors = np.repeat(some_factors(1), 20_000, axis=0)
    residual = JointDistribution(factors, some_correlation(), nu, joint_dof).sample(1, np.random.default_rng(0))[0]
    squared = np.square(whiten(residual, factors)).sum(-1)
    for k in range(KEYPOINTS):  # half the squared length of a circular t is F(2, nu)
        assert stats.kstest(squared[:, k] / 2, stats.f(2, nu[k]).cdf).pvalue > 1e-3


def test_true_correlation_is_estimated_from_partly_labelled_objects() -> None:
    matrix, factors = some_correlation(), some_factors(6000)
    distribution = JointDistribution(factors, matrix, np.array([3.0, 5.0, 9.0, 30.0]), 5.0)
    rng = np.random.default_rng(3)
    residual = distribution.sample(1, rng)[0]
    labelled = rng.random((6000, KEYPOINTS)) < 0.6
    residual[~labelled] = 1e6  # what is not labelled may be anything
    found = fit_correlation(residual, factors, labelled)
    assert np.abs(found.matrix - matrix).max() < 0.06
    assert 4 < found.dof < 6.5
    assert is_correlation(found.matrix)
    assert found.objects == int((labelled.sum(1) > 1).sum())


def test_temperatures_do_not_matter() -> None:
    factors = some_factors(500)
    residual = JointDistribution(factors, some_correlation()).sample(1, np.random.default_rng(4))[0]
    tau = np.array([0.5, 1.0, 2.0, 7.0])[:, None, None]
    assert np.allclose(
        fit_correlation(residual, factors).matrix, fit_correlation(residual, tau * factors).matrix, atol=1e-12
    )


def test_independent_keypoints_shrink_to_the_identity() -> None:
    residual = np.random.default_rng(5).normal(size=(60, KEYPOINTS, 2))
    found = fit_correlation(residual, np.tile(np.eye(2), (60, KEYPOINTS, 1, 1)))
    assert found.shrinkage > 0.5
    assert np.abs(found.matrix - np.eye(8)).max() < 0.25


@pytest.mark.parametrize("objects", [0, 1, 3])
def test_few_objects_give_something_definite(objects: int) -> None:
    residual = np.random.default_rng(6).normal(size=(objects, KEYPOINTS, 2))
    found = fit_correlation(residual, np.tile(np.eye(2), (objects, KEYPOINTS, 1, 1)))
    assert is_correlation(found.matrix)


def test_mirror_images_count_alike() -> None:
    matrix, mirror = some_correlation(), (1, 0, 3, 2)
    factors = np.tile(np.eye(2), (800, KEYPOINTS, 1, 1))
    residual = JointDistribution(factors, matrix).sample(1, np.random.default_rng(7))[0]
    flipped = residual[:, mirror] * [-1.0, 1.0]
    both = fit_correlation(residual, factors, None, mirror)
    assert np.allclose(both.matrix, fit_correlation(flipped, factors, None, mirror).matrix, atol=1e-12)


def test_covariance_keeps_its_blocks_and_comes_back() -> None:
    factors, matrix = some_factors(3), some_correlation()
    covariance = factors @ np.swapaxes(factors, -1, -2)
    joint = joint_covariance(covariance, matrix)
    for k in range(KEYPOINTS):
        part = slice(2 * k, 2 * k + 2)
        assert np.array_equal(joint[:, part, part], covariance[:, k])
    np.testing.assert_allclose(whitened_correlation(joint), np.broadcast_to(matrix, joint.shape), atol=1e-12)
    own, shared = own_and_shared(covariance, matrix)
    flat = shared.reshape(3, 8, -1)
    total = joint_covariance(own, np.eye(8)) + flat @ np.swapaxes(flat, 1, 2)
    np.testing.assert_allclose(total, joint, atol=1e-9)


def test_given_equals_the_formula_for_gaussians() -> None:
    factors, matrix = some_factors(2), some_correlation()
    distribution = JointDistribution(factors, matrix)
    joint = joint_covariance(factors @ np.swapaxes(factors, -1, -2), matrix)
    residual = distribution.sample(1, np.random.default_rng(8))[0]
    known = np.tile([True, False, True, False], (2, 1))
    mean, spread = distribution.given(residual, known).moments()
    a, b = np.repeat(known[0], 2), ~np.repeat(known[0], 2)
    for n in range(2):
        gain = joint[n][np.ix_(b, a)] @ np.linalg.inv(joint[n][np.ix_(a, a)])
        np.testing.assert_allclose(mean[n].ravel()[b], gain @ residual[n].ravel()[a], rtol=1e-9)
        left = joint[n][np.ix_(b, b)] - gain @ joint[n][np.ix_(a, b)]
        np.testing.assert_allclose(spread[n, 1], left[:2, :2], rtol=1e-9)
        np.testing.assert_allclose(spread[n, 3], left[2:, 2:], rtol=1e-9)
    np.testing.assert_allclose(mean[known], residual[known], rtol=1e-12)
    assert np.abs(spread[known]).max() < 1e-12


def test_given_of_a_multivariate_t() -> None:
    """Mean as the Gaussian's; covariance (nu + d) / (nu + p) nu' / (nu' - 2) of the Gaussian's, nu' = nu + p."""
    nu, factors, matrix = 7.0, some_factors(1), some_correlation()
    distribution = JointDistribution(factors, matrix, np.full(KEYPOINTS, nu), nu)
    residual = distribution.sample(1, np.random.default_rng(9))[0]
    known = np.array([[True, False, True, False]])
    mean, spread = distribution.given(residual, known).moments(draws=60_000)
    plain, left = JointDistribution(factors, matrix).given(residual, known).moments()
    joint = joint_covariance(factors @ np.swapaxes(factors, -1, -2), matrix)[0]
    a = np.repeat(known[0], 2)
    distance = residual[0].ravel()[a] @ np.linalg.solve(joint[np.ix_(a, a)], residual[0].ravel()[a])
    factor = (nu + distance) / (nu + 4) * (nu + 4) / (nu + 2)
    np.testing.assert_allclose(mean, plain, atol=0.1)
    np.testing.assert_allclose(spread[0, 1], factor * left[0, 1], rtol=0.1, atol=0.15)


def test_json_round_trip_and_damage() -> None:
    found = Correlation(some_correlation(), math.inf, 0.1, 20)
    assert Correlation.from_json(found.to_json(), KEYPOINTS) == found
    assert Correlation(found.matrix, 4.0) != found
    assert found != 1
    content = found.to_json()
    for key, value in (("matrix", np.ones((8, 8)).tolist()), ("matrix", [[1.0]]), ("dof", -1.0)):
        with pytest.raises(ValueError, match=r"correlation|positive"):
            Correlation.from_json({**content, key: value}, KEYPOINTS)
    with pytest.raises(HaloposeError, match="identities"):
        own_and_shared(np.tile(np.eye(2), (1, KEYPOINTS, 1, 1)), 2 * np.eye(8))


@pytest.mark.parametrize("joint_dof", [math.inf, 9.0])
def test_ellipsoids_of_whole_objects_have_their_coverage(joint_dof: float) -> None:
    nu = None if math.isinf(joint_dof) else np.array([5.0, 9.0, 12.0, 30.0])
    distribution = JointDistribution(some_factors(1), some_correlation(), nu, joint_dof)
    drawn = distribution.sample(4000, np.random.default_rng(5))[:, 0]
    many = JointDistribution(np.repeat(distribution.scale_tril, 4000, axis=0), distribution.correlation, nu, joint_dof)
    for probability in (0.5, 0.95):
        error = math.sqrt(probability * (1 - probability) / 4000)
        assert many.holds(drawn, probability).mean() == pytest.approx(probability, abs=3.5 * error)


def test_every_scale_has_its_own_correlation_where_it_has_enough_objects() -> None:
    """Small objects err together, large ones do not, and of huge ones there are too few."""
    rng = np.random.default_rng(6)
    count = {10.0: 3000, 100.0: 3000, 1000.0: 20}
    area = np.repeat(list(count), list(count.values()))
    common = rng.normal(size=(len(area), 1, 2)) * (area == 10.0)[:, None, None]
    residual = common + rng.normal(size=(len(area), 2, 2))
    factors = np.tile(np.eye(2), (len(area), 2, 1, 1))
    found = fit_correlation(residual, factors, area=area, edges=(25.0, 250.0), area_factor=0.5)
    shared = [float(matrix[0, 2]) for matrix in found.of_objects(np.array([10.0, 100.0, 1000.0]))]
    assert shared[0] == pytest.approx(0.5, abs=0.05)
    assert abs(shared[1]) < 0.05
    assert shared[2] == found.matrix[0, 2]
    assert Correlation.from_json(found.to_json(), 2) == found
    assert found.of_objects(area[:0]).shape == (0, 4, 4)
    plain = fit_correlation(residual, factors)
    np.testing.assert_array_equal(plain.matrix, found.matrix)
    np.testing.assert_array_equal(plain.of_objects(area[:3]), np.tile(plain.matrix, (3, 1, 1)))
    assert plain != found
    damaged = found.to_json()
    damaged["scales"]["edges"] = [250.0, 25.0]
    with pytest.raises(ValueError, match="edges"):
        Correlation.from_json(damaged, 2)
    with pytest.raises(HaloposeError, match="areas"):
        fit_correlation(residual, factors, edges=(25.0,))
