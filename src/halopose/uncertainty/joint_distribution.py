"""Joint distribution of the residuals of one object's keypoints.

The residual of keypoint k, whitened by its own Cholesky factor, is z_k = L_k^-1 r_k with identity covariance. The
correlation R (2K, 2K) has identity blocks on its diagonal; its other blocks are the correlations between whitened
residuals of different keypoints. The distribution of every single keypoint is therefore unchanged.

Gaussian: r ~ N(0, D R D'), with D the block-diagonal matrix of the factors. Student-t: v follows a multivariate t
with scale R and ``joint_dof`` degrees of freedom, and each v_k is stretched along its direction until its length
has the distribution of that keypoint's t. With the same nu everywhere this is the multivariate t.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from halopose.errors import HaloposeError
from halopose.types import Array
from halopose.uncertainty.missing_keypoints import distances
from halopose.uncertainty.whitening import factors, squares, stretched, whiten


@dataclass(frozen=True)
class JointDistribution:
    """Joint distribution of the residuals of N objects.

    Attributes:
        scale_tril: Cholesky factors (N, K, 2, 2).
        correlation: R (2K, 2K) or (N, 2K, 2K).
        dof: degrees of freedom (K,) or (N, K) of each keypoint's Student-t; None for Gaussians.
        joint_dof: degrees of freedom of the joint t.
    """

    scale_tril: Array
    correlation: Array
    dof: Array | None = None
    joint_dof: float = math.inf

    @property
    def _common(self) -> float:
        return math.inf if self.dof is None else self.joint_dof

    def log_prob(self, residual: Array, labelled: Array | None = None) -> Array:
        """Log-density (N,) in pixels of residuals (N, K, 2) at labelled keypoints (N, K), by default all."""
        labelled = np.ones(residual.shape[:2], dtype=bool) if labelled is None else labelled
        white = whiten(residual, self.scale_tril)
        alone = self._log_kernel(white) - np.log(2 * np.pi)
        alone = alone - np.log(np.einsum("nkii->nki", self.scale_tril)).sum(-1)
        return np.asarray(np.where(labelled, alone, 0.0).sum(1) + self.gain(residual, labelled))

    def gain(self, residual: Array, labelled: Array) -> Array:
        """Return the log-likelihood ratio (N,) in nats against independent keypoints."""
        return gains([self], residual, labelled)[0]

    def holds(self, residual: Array, probability: float) -> Array:
        """Return which objects (N,) with residuals (N, K, 2) are inside the ellipsoid of a probability."""
        labelled = np.ones(residual.shape[:2], dtype=bool)
        shared = self._shared(whiten(residual, self.scale_tril))
        [distance], _ = distances([shared], self.correlation, labelled)
        return np.asarray(distance <= squared_radius(2 * residual.shape[1], probability, self._common))

    def sample(self, count: int, rng: np.random.Generator) -> Array:
        """Draw residuals (count, N, K, 2)."""
        root = np.linalg.cholesky(self.correlation)
        keypoints = self.scale_tril.shape[1]
        normal = rng.standard_normal((count, len(self.scale_tril), 2 * keypoints, 1))
        drawn = (root @ normal)[..., 0]
        if math.isfinite(self._common):
            drawn = drawn / np.sqrt(rng.chisquare(self._common, drawn.shape[:2]) / self._common)[..., None]
        return self._residual(drawn.reshape(*drawn.shape[:2], keypoints, 2))

    def given(self, residual: Array, known: Array) -> Given:
        """Return the distribution of all other keypoints, given residuals (N, K, 2) of known ones (N, K)."""
        mask = np.repeat(known, 2, axis=1)
        certain = (self.scale_tril == 0).all((-2, -1))  # exactly known, so independent of the others
        white = whiten(np.nan_to_num(residual), np.where(certain[..., None, None], np.eye(2), self.scale_tril))
        shared = np.where((known & ~certain)[..., None], self._shared(white), 0.0)
        flat = shared.reshape(mask.shape)
        between = np.where(mask[:, None, :] & ~mask[:, :, None], self.correlation, 0.0)
        inner = _masked(self.correlation, mask)
        gain = np.swapaxes(np.linalg.solve(inner, np.swapaxes(between, 1, 2)), 1, 2)
        spread = np.where(
            ~mask[:, None, :] & ~mask[:, :, None], self.correlation - gain @ np.swapaxes(between, 1, 2), 0
        )
        dof = self._common + mask.sum(1)
        if math.isfinite(self._common):
            distance = (flat * np.linalg.solve(inner, flat[..., None])[..., 0]).sum(1)
            spread = spread * ((self._common + distance) / dof)[:, None, None]
        mean = flat + (gain @ flat[..., None])[..., 0]
        return Given(self, mean, (spread + np.swapaxes(spread, 1, 2)) / 2, dof)

    def _log_kernel(self, white: Array) -> Array:
        squared = squares(white)
        if self.dof is None:
            return np.asarray(-squared / 2)
        return np.asarray(-(self.dof + 2) / 2 * np.log1p(squared / self.dof))

    def _shared(self, white: Array) -> Array:
        """Return v (..., K, 2) of whitened residuals: same directions, lengths of the common distribution."""
        if self.dof is None:
            return white
        return stretched(white, self.dof, self._common)

    def _residual(self, shared: Array) -> Array:
        white = shared if self.dof is None else stretched(shared, self._common, self.dof)
        return np.asarray((self.scale_tril @ white[..., None])[..., 0])


def gains(distributions: Sequence[JointDistribution], residual: Array, labelled: Array) -> list[Array]:
    """Return ``JointDistribution.gain`` (N,) of several distributions of the same objects with one correlation."""
    whites = [
        np.where(labelled[..., None], whiten(residual, distribution.scale_tril), 0.0) for distribution in distributions
    ]
    shared = [distribution._shared(white) for distribution, white in zip(distributions, whites, strict=True)]
    apart, log_det = distances(shared, distributions[0].correlation, labelled)
    return [
        log_dependence(squares(each), distance, labelled, distribution._common) - log_det
        for distribution, each, distance in zip(distributions, shared, apart, strict=True)
    ]


@dataclass(frozen=True)
class Given:
    """Conditional distribution of objects with some known keypoints.

    Attributes:
        distribution: the joint distribution.
        location: mean (N, 2K) of v; exact for known keypoints.
        spread: covariance (N, 2K, 2K) of v; zero for known keypoints.
        dof: degrees of freedom (N,).
    """

    distribution: JointDistribution
    location: Array
    spread: Array
    dof: Array

    def sample(self, count: int, rng: np.random.Generator) -> Array:
        """Draw residuals (count, N, K, 2); those of known keypoints are their known values."""
        values, vectors = np.linalg.eigh(self.spread)
        root = vectors * np.sqrt(np.maximum(values, 0.0))[:, None, :]
        drawn = (root @ rng.standard_normal((count, *self.location.shape, 1)))[..., 0]
        if np.isfinite(self.dof).all():
            drawn = drawn / np.sqrt(rng.chisquare(self.dof, drawn.shape[:2]) / self.dof)[..., None]
        shared = self.location + drawn
        return self.distribution._residual(shared.reshape(count, len(shared[0]), -1, 2))

    def moments(self, draws: int = 4000, seed: int = 0) -> tuple[Array, Array]:
        """Return mean residuals (N, K, 2) and covariances (N, K, 2, 2); of a Student-t from seeded draws."""
        keypoints = self.location.shape[1] // 2
        if self.distribution.dof is None:
            factor = self.distribution.scale_tril
            mean = (factor @ self.location.reshape(-1, keypoints, 2, 1))[..., 0]
            own = keypoint_blocks(self.spread)[:, np.arange(keypoints), np.arange(keypoints)]
            return mean, np.asarray(factor @ own @ np.swapaxes(factor, -1, -2))
        drawn = self.sample(draws, np.random.default_rng(seed))
        mean = drawn.mean(0)
        apart = drawn - mean
        return mean, np.einsum("cnki,cnkj->nkij", apart, apart) / draws


def squared_radius(size: int, probability: float, dof: float = math.inf) -> float:
    """Return the squared radius of the ellipsoid that contains a probability of a t in ``size`` dimensions, in units of
    its scale.
    """
    if math.isinf(dof):
        return float(special.chdtri(size, 1 - probability))
    return float(size * special.fdtri(size, dof, probability))


def is_correlation(matrix: Array) -> bool:
    """Return whether matrices (..., 2K, 2K) are symmetric and positive definite with identities on their diagonals."""
    if not np.isfinite(matrix).all() or np.abs(matrix - np.swapaxes(matrix, -1, -2)).max(initial=0.0) > 1e-9:
        return False
    count = matrix.shape[-1] // 2
    blocks = keypoint_blocks(matrix)[..., np.arange(count), np.arange(count), :, :]
    return bool(np.abs(blocks - np.eye(2)).max(initial=0.0) < 1e-6 and (np.linalg.eigvalsh(matrix) > 0).all())


def joint_covariance(covariance: Array, correlation: Array) -> Array:
    """Return the covariance (N, 2K, 2K) of all keypoints with diagonal blocks (N, K, 2, 2)."""
    objects, keypoints = covariance.shape[:2]
    factor = factors(covariance)
    wide = np.zeros((objects, 2 * keypoints, 2 * keypoints))
    keypoint_blocks(wide)[:, np.arange(keypoints), np.arange(keypoints)] = factor
    result = wide @ correlation @ np.swapaxes(wide, 1, 2)
    keypoint_blocks(result)[:, np.arange(keypoints), np.arange(keypoints)] = covariance
    return result


def whitened_correlation(joint: Array) -> Array:
    """Return R (N, 2K, 2K) of joint covariances (N, 2K, 2K)."""
    keypoints = joint.shape[-1] // 2
    own = keypoint_blocks(joint)[:, np.arange(keypoints), np.arange(keypoints)]
    inverse = np.linalg.inv(np.linalg.cholesky(own))
    wide = np.zeros(joint.shape)
    keypoint_blocks(wide)[:, np.arange(keypoints), np.arange(keypoints)] = inverse
    result = wide @ joint @ np.swapaxes(wide, 1, 2)
    keypoint_blocks(result)[:, np.arange(keypoints), np.arange(keypoints)] = np.eye(2)
    return (result + np.swapaxes(result, 1, 2)) / 2


def own_and_shared(covariance: Array, correlation: Array) -> tuple[Array, Array]:
    """Split a joint covariance into an independent part per keypoint (N, K, 2, 2) and M common causes (N, K, 2, M).

    The second part is the shift of the keypoints by M independent standard normal causes, as ``geometry`` takes it.
    R = s I + V V' with s the smallest eigenvalue.
    """
    if not is_correlation(correlation):
        raise HaloposeError("a correlation is symmetric and positive definite, with identities on its diagonal")
    values, vectors = np.linalg.eigh(correlation)
    loads = vectors[:, 1:] * np.sqrt(values[1:] - values[0])
    known = np.isfinite(covariance).all(axis=(2, 3), keepdims=True)
    factor = np.linalg.cholesky(np.where(known, covariance, np.eye(2)))
    causes = factor @ loads.reshape(1, covariance.shape[1], 2, -1)
    return values[0] * covariance, np.where(known, causes, 0.0)


def log_dependence(squared: Array, distance: Array, labelled: Array, dof: float) -> Array:
    """Return the log-density ratio (N,) of v against independent keypoints, without the determinant of R.

    ``squared`` (N, K) are the squared lengths of v.
    """
    squared = np.where(labelled, squared, 0.0)
    if math.isinf(dof):
        return np.asarray((squared.sum(1) - distance) / 2)
    size = 2 * labelled.sum(1)
    joint = special.gammaln((dof + size) / 2) - special.gammaln(dof / 2) - size / 2 * math.log(dof * math.pi)
    joint = joint - (dof + size) / 2 * np.log1p(distance / dof)
    single = -math.log(2 * math.pi) - (dof + 2) / 2 * np.log1p(squared / dof)
    return np.asarray(joint - np.where(labelled, single, 0.0).sum(1))


def _masked(matrix: Array, mask: Array) -> Array:
    """Return matrices (N, 2K, 2K) with identity rows and columns outside of masks (N, 2K)."""
    inside = mask[:, :, None] & mask[:, None, :]
    result = np.where(inside, matrix, 0.0)
    index = np.arange(mask.shape[1])
    result[:, index, index] += ~mask
    return result


def keypoint_blocks(matrix: Array) -> Array:
    """Return a view (..., K, K, 2, 2) of the 2x2 blocks of matrices (..., 2K, 2K)."""
    keypoints = matrix.shape[-1] // 2
    view = matrix.reshape(*matrix.shape[:-2], keypoints, 2, keypoints, 2)
    return np.moveaxis(view, -3, -2)
