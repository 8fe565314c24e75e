"""How the keypoints of one object err together, beside what each of them does alone.

In: residuals (M, K, 2) of partly labelled objects, Cholesky factors (M, K, 2, 2). Out: a ``Correlation``, shared
by all objects, and with it the joint law of an object: covariance, density, samples, some keypoints given others.

A residual whitened by its own factor, z_k = L_k^-1 r_k, has the identity as its covariance; R (2K, 2K) has those
blocks on its diagonal and, off it, how whitened residuals of different keypoints go together. So the law of every
single keypoint stays exactly as it was. Gaussian: r ~ N(0, D R D'), with D the factors on a diagonal. Student-t: v
follows a multivariate t with scale R and ``dof`` degrees of freedom, and each v_k is stretched along its own
direction until its length has the law of that keypoint's t; with one nu for all that is the multivariate t.

R and ``dof`` are fitted to ranks of distances and to directions: no temperature and no outlier moves them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy import optimize, special

from halopose.arrays import repeated_view
from halopose.calibration.missing_keypoints import distances, log_shares, pairings, places_among, rising_places
from halopose.calibration.whitening import directions, factors, squared_length, squares, stretched, whiten
from halopose.errors import HaloposeError
from halopose.types import Array

SMALLEST_EIGENVALUE = 0.02  # of R; less is more than so many images can tell
DOF_RANGE = (2.5, 1e4)
MIN_OBJECTS = 200  # a scale with fewer has the correlation of all of them
_OBJECTS = 1000  # that the tails are fitted to


@dataclass(frozen=True, eq=False)
class Correlation:
    """R (2K, 2K) in the order x1, y1, x2, y2, ..., and the degrees of freedom of the joint Student-t.

    shrinkage: the share of the identity in R. objects: how many it was fitted on. scales (S, 2K, 2K): R by object
    scale, parted by edges (S - 1,), areas of predicted boxes times ``area_factor``; None if all scales share one.

    >>> rng = np.random.default_rng(0)
    >>> together = rng.normal(size=(2000, 1, 2))  # one half of the variance is common to both keypoints
    >>> residual = (together + rng.normal(size=(2000, 2, 2))) / np.sqrt(2)
    >>> found = fit_correlation(residual, np.tile(np.eye(2), (2000, 2, 1, 1)))
    >>> round(float(found.matrix[0, 2]), 1), round(float(found.matrix[1, 3]), 1)
    (0.5, 0.5)
    """

    matrix: Array
    dof: float = math.inf
    shrinkage: float = 0.0
    objects: int = 0
    scales: Array | None = None
    edges: tuple[float, ...] = ()
    area_factor: float = 1.0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Correlation):
            return NotImplemented
        names = ("matrix", "dof", "shrinkage", "objects", "scales", "edges", "area_factor")
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in names)

    __hash__ = None  # type: ignore[assignment]  # arrays inside may change

    @property
    def keypoints(self) -> int:
        return len(self.matrix) // 2

    def of_objects(self, area: Array) -> Array:
        """R (N, 2K, 2K) of objects with predicted boxes of these areas (N,)."""
        if self.scales is None:
            return repeated_view(self.matrix, len(area))
        place = np.searchsorted(np.asarray(self.edges), area * self.area_factor, side="left")
        return np.asarray(self.scales[place])

    def to_json(self) -> dict[str, Any]:
        """Plain json content."""
        dof = self.dof if math.isfinite(self.dof) else None
        content = {
            "matrix": self.matrix.tolist(),
            "dof": dof,
            "shrinkage": self.shrinkage,
            "objects": self.objects,
        }
        if self.scales is None:
            return content
        scales = {"matrices": self.scales.tolist(), "edges": list(self.edges), "area_factor": self.area_factor}
        return {**content, "scales": scales}

    @classmethod
    def from_json(cls, content: Any, keypoints: int) -> Correlation:
        """The inverse of ``to_json``; a ValueError, KeyError or TypeError if the content is not that."""
        matrix = np.array(content["matrix"], dtype=float)
        if matrix.shape != (2 * keypoints, 2 * keypoints) or not is_correlation(matrix):
            raise ValueError("not a correlation of whitened residuals")
        dof = math.inf if content["dof"] is None else float(content["dof"])
        if not dof > 0:
            raise ValueError("degrees of freedom are positive")
        known = matrix, dof, float(content["shrinkage"]), int(content["objects"])
        if "scales" not in content:
            return cls(*known)
        parts = content["scales"]
        scales, edges = np.array(parts["matrices"], dtype=float), tuple(float(edge) for edge in parts["edges"])
        if scales.shape != (len(edges) + 1, *matrix.shape) or list(edges) != sorted(edges):
            raise ValueError("correlations by scale do not fit their edges")
        if not is_correlation(scales):
            raise ValueError("not correlations of whitened residuals")
        return cls(*known, scales, edges, float(parts["area_factor"]))


def is_correlation(matrix: Array) -> bool:
    """Whether matrices (..., 2K, 2K) are symmetric and positive definite with identities on their diagonals."""
    if not np.isfinite(matrix).all() or np.abs(matrix - np.swapaxes(matrix, -1, -2)).max(initial=0.0) > 1e-9:
        return False
    count = matrix.shape[-1] // 2
    blocks = _blocks(matrix)[..., np.arange(count), np.arange(count), :, :]
    return bool(np.abs(blocks - np.eye(2)).max(initial=0.0) < 1e-6 and (np.linalg.eigvalsh(matrix) > 0).all())


# --- fitting ------------------------------------------------------------------------------------------------


def fit_correlation(
    residual: Array,
    scale_tril: Array,
    labelled: Array | None = None,
    mirror: tuple[int, ...] | None = None,
    *,
    area: Array | None = None,
    edges: tuple[float, ...] = (),
    area_factor: float = 1.0,
) -> Correlation:
    """Fit to residuals (M, K, 2) under factors (M, K, 2, 2); labelled (M, K), by default all.

    mirror: which keypoint each becomes in the mirror. Objects and their mirror images then count alike. area (M,):
    of the predicted boxes, for an R of its own between ``edges`` of area times ``area_factor``.
    """
    labelled = np.ones(residual.shape[:2], dtype=bool) if labelled is None else labelled
    length, direction = directions(residual, scale_tril, labelled)
    places = rising_places(length, labelled)
    return fit_directions(direction, labelled, places, mirror, area=area, edges=edges, area_factor=area_factor)


def fit_directions(
    direction: Array,
    labelled: Array,
    places: Array,
    mirror: tuple[int, ...] | None = None,
    *,
    area: Array | None = None,
    edges: tuple[float, ...] = (),
    area_factor: float = 1.0,
) -> Correlation:
    """``fit_correlation`` to directions (M, K, 2), and places (n,) of labelled keypoints by rising length.

    That is all that is looked at of residuals, and of larger data it is known once for all parts of them.
    """
    survival = log_shares(places, labelled)
    scores = direction * np.sqrt(-2 * survival)[..., None]  # normal scores: ranks as a Gaussian would have them
    matrix, noise = _moments(scores, labelled)
    if mirror is not None:
        matrix, noise = (matrix + _mirrored(matrix, mirror)) / 2, noise / 2
    shrinkage = _shrinkage(matrix, noise)
    size = len(matrix)
    matrix = (1 - shrinkage) * matrix + shrinkage * np.eye(size)
    several = labelled.sum(1) > 1
    found = Correlation(matrix, math.inf, shrinkage, int(several.sum()))
    found = replace(found, dof=_tails(found, survival, direction, labelled))
    if not edges:
        return found
    if area is None:
        raise HaloposeError("a correlation by object scale needs the objects' areas")
    place = np.searchsorted(np.asarray(edges), area * area_factor, side="left")
    parts = []
    for number in range(len(edges) + 1):
        rows = np.flatnonzero((place == number) & several)
        own = found
        if len(rows) >= MIN_OBJECTS:
            among = places_among(places, rows, labelled.shape)
            own = fit_directions(direction[rows], labelled[rows], among, mirror)
        parts.append(own.matrix)
    return replace(found, scales=np.array(parts), edges=tuple(edges), area_factor=area_factor)


def _moments(scores: Array, labelled: Array) -> tuple[Array, Array]:
    """Correlation (2K, 2K) of scores (M, K, 2) with identities on its diagonal, and the variance of its entries.

    Every pair of keypoints counts the objects that have both.
    """
    objects, keypoints = labelled.shape
    flat = scores.reshape(objects, 2 * keypoints)
    both = _gram(labelled.astype(float))
    pairs = np.repeat(np.repeat(both, 2, 0), 2, 1)
    product = _gram(flat) / np.maximum(pairs, 1)
    spread = _gram(np.square(flat)) / np.maximum(pairs, 1)
    own = _blocks(product)[np.arange(keypoints), np.arange(keypoints)]
    values, vectors = np.linalg.eigh(own)
    root = (vectors / np.sqrt(np.maximum(values, 1e-6))[:, None, :]) @ np.swapaxes(vectors, 1, 2)
    root = np.where((both.diagonal() > 2)[:, None, None], root, np.eye(2))
    wide = np.zeros((2 * keypoints, 2 * keypoints))
    _blocks(wide)[np.arange(keypoints), np.arange(keypoints)] = root
    matrix = wide @ product @ wide
    _blocks(matrix)[np.arange(keypoints), np.arange(keypoints)] = np.eye(2)
    return (matrix + matrix.T) / 2, np.where(pairs > 1, (spread - product**2) / np.maximum(pairs, 1), 1.0)


def _gram(rows: Array) -> Array:
    """The product (C, C) of rows (N, C) with themselves.

    By torch, which keeps to the threads it may use: numpy's takes all cores, also those that other folds are on.
    """
    columns = torch.from_numpy(rows)
    return np.asarray((columns.T @ columns).numpy())


def _shrinkage(matrix: Array, noise: Array) -> float:
    """Share of the identity: what noise explains of the correlations, and as much as makes all of it definite."""
    keypoint = np.arange(len(matrix)) // 2
    apart = keypoint[:, None] != keypoint
    signal = float(np.square(matrix[apart]).sum())
    share = min(float(noise[apart].sum()) / signal, 1.0) if signal else 1.0
    lowest = float(np.linalg.eigvalsh(matrix)[0])
    return max(share, (SMALLEST_EIGENVALUE - lowest) / (1 - lowest) if lowest < SMALLEST_EIGENVALUE else 0.0)


def _mirrored(matrix: Array, mirror: tuple[int, ...]) -> Array:
    """R of mirror images: partners change places, and x its sign."""
    index = (2 * np.array(mirror)[:, None] + np.arange(2)).ravel()
    sign = np.tile([-1.0, 1.0], len(mirror))
    return np.asarray(matrix[np.ix_(index, index)] * sign * sign[:, None])


def _tails(found: Correlation, survival: Array, direction: Array, labelled: Array) -> float:
    """Degrees of freedom under which the ranks are likeliest, infinite if the Gaussian is as likely."""
    rows = np.flatnonzero(labelled.sum(1) > 1)
    if len(rows) > _OBJECTS:
        rows = rows[:: -(-len(rows) // _OBJECTS)]
    if not len(rows):
        return math.inf
    survival, direction, labelled = survival[rows], direction[rows], labelled[rows]
    forms = pairings(direction, found.matrix, labelled)
    known = squares(direction)  # 1, or 0 where there is no direction

    def loss(log_dof: float) -> float:
        dof = math.exp(log_dof)
        squared = squared_length(survival, dof) * known
        length = np.sqrt(squared)
        distance = ((forms @ length[..., None])[..., 0] * length).sum(1)
        return -float(_dependence(squared, distance, labelled, dof).mean())

    best = optimize.minimize_scalar(loss, bounds=tuple(np.log(DOF_RANGE)), method="bounded", options={"xatol": 0.02})
    return math.exp(best.x) if best.fun < loss(math.inf) - 1e-4 else math.inf


# --- the joint law ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JointDistribution:
    """The joint law of N objects' residuals: factors (N, K, 2, 2), R (2K, 2K) or (N, 2K, 2K).

    dof (K,) or (N, K): of each keypoint's Student-t; None for Gaussians. together: of the joint t.
    """

    scale_tril: Array
    correlation: Array
    dof: Array | None = None
    together: float = math.inf

    @property
    def _common(self) -> float:
        return math.inf if self.dof is None else self.together

    def log_prob(self, residual: Array, labelled: Array | None = None) -> Array:
        """Log-density (N,) in pixels of residuals (N, K, 2) at labelled keypoints (N, K), by default all."""
        labelled = np.ones(residual.shape[:2], dtype=bool) if labelled is None else labelled
        white = whiten(residual, self.scale_tril)
        alone = self._log_kernel(white) - np.log(2 * np.pi)
        alone = alone - np.log(np.einsum("nkii->nki", self.scale_tril)).sum(-1)
        return np.asarray(np.where(labelled, alone, 0.0).sum(1) + self.gain(residual, labelled))

    def gain(self, residual: Array, labelled: Array) -> Array:
        """How much likelier objects (N,) are than if their keypoints erred independently, in nats."""
        return gains([self], residual, labelled)[0]

    def holds(self, residual: Array, probability: float) -> Array:
        """Whether all keypoints of objects (N,) with residuals (N, K, 2) lie in the ellipsoid of a probability."""
        labelled = np.ones(residual.shape[:2], dtype=bool)
        shared = self._shared(whiten(residual, self.scale_tril))
        [distance], _ = distances([shared], self.correlation, labelled)
        return np.asarray(distance <= squared_radius(2 * residual.shape[1], probability, self._common))

    def sample(self, count: int, rng: np.random.Generator) -> Array:
        """Residuals (count, N, K, 2)."""
        root = np.linalg.cholesky(self.correlation)
        keypoints = self.scale_tril.shape[1]
        normal = rng.standard_normal((count, len(self.scale_tril), 2 * keypoints, 1))
        drawn = (root @ normal)[..., 0]
        if math.isfinite(self._common):
            drawn = drawn / np.sqrt(rng.chisquare(self._common, drawn.shape[:2]) / self._common)[..., None]
        return self._residual(drawn.reshape(*drawn.shape[:2], keypoints, 2))

    def given(self, residual: Array, known: Array) -> Given:
        """The law of all other keypoints, given residuals (N, K, 2) of known ones (N, K)."""
        mask = np.repeat(known, 2, axis=1)
        certain = (self.scale_tril == 0).all((-2, -1))  # known before, and telling nothing of the others
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
        """v (..., K, 2) of whitened residuals: directions stay, lengths become those of the common law."""
        if self.dof is None:
            return white
        return stretched(white, self.dof, self._common)

    def _residual(self, shared: Array) -> Array:
        white = shared if self.dof is None else stretched(shared, self._common, self.dof)
        return np.asarray((self.scale_tril @ white[..., None])[..., 0])


def gains(distributions: Sequence[JointDistribution], residual: Array, labelled: Array) -> list[Array]:
    """``JointDistribution.gain`` (N,) of several laws of the same objects that have one correlation."""
    whites = [
        np.where(labelled[..., None], whiten(residual, distribution.scale_tril), 0.0) for distribution in distributions
    ]
    shared = [distribution._shared(white) for distribution, white in zip(distributions, whites, strict=True)]
    apart, log_det = distances(shared, distributions[0].correlation, labelled)
    return [
        _dependence(squares(each), distance, labelled, distribution._common) - log_det
        for distribution, each, distance in zip(distributions, shared, apart, strict=True)
    ]


@dataclass(frozen=True)
class Given:
    """What is left to know of objects some of whose keypoints are known: mean (N, 2K) and spread (N, 2K, 2K) of v,
    both exact for known ones, and degrees of freedom (N,)."""

    distribution: JointDistribution
    location: Array
    spread: Array
    dof: Array

    def sample(self, count: int, rng: np.random.Generator) -> Array:
        """Residuals (count, N, K, 2); those of known keypoints are what is known of them."""
        values, vectors = np.linalg.eigh(self.spread)
        root = vectors * np.sqrt(np.maximum(values, 0.0))[:, None, :]
        drawn = (root @ rng.standard_normal((count, *self.location.shape, 1)))[..., 0]
        if np.isfinite(self.dof).all():
            drawn = drawn / np.sqrt(rng.chisquare(self.dof, drawn.shape[:2]) / self.dof)[..., None]
        shared = self.location + drawn
        return self.distribution._residual(shared.reshape(count, len(shared[0]), -1, 2))

    def moments(self, draws: int = 4000, seed: int = 0) -> tuple[Array, Array]:
        """Mean residuals (N, K, 2) and their covariances (N, K, 2, 2); a Student-t's from seeded draws."""
        keypoints = self.location.shape[1] // 2
        if self.distribution.dof is None:
            factor = self.distribution.scale_tril
            mean = (factor @ self.location.reshape(-1, keypoints, 2, 1))[..., 0]
            own = _blocks(self.spread)[:, np.arange(keypoints), np.arange(keypoints)]
            return mean, np.asarray(factor @ own @ np.swapaxes(factor, -1, -2))
        drawn = self.sample(draws, np.random.default_rng(seed))
        mean = drawn.mean(0)
        apart = drawn - mean
        return mean, np.einsum("cnki,cnkj->nkij", apart, apart) / draws


def squared_radius(size: int, probability: float, dof: float = math.inf) -> float:
    """Of the ellipsoid that holds a probability of a t in so many dimensions, in units of its scale matrix."""
    if math.isinf(dof):
        return float(special.chdtri(size, 1 - probability))
    return float(size * special.fdtri(size, dof, probability))


def joint_covariance(covariance: Array, correlation: Array) -> Array:
    """Covariance (N, 2K, 2K) of all keypoints from those of each (N, K, 2, 2), which are its diagonal blocks."""
    objects, keypoints = covariance.shape[:2]
    factor = factors(covariance)
    wide = np.zeros((objects, 2 * keypoints, 2 * keypoints))
    _blocks(wide)[:, np.arange(keypoints), np.arange(keypoints)] = factor
    result = wide @ correlation @ np.swapaxes(wide, 1, 2)
    _blocks(result)[:, np.arange(keypoints), np.arange(keypoints)] = covariance
    return result


def whitened_correlation(joint: Array) -> Array:
    """R (N, 2K, 2K) of joint covariances (N, 2K, 2K)."""
    keypoints = joint.shape[-1] // 2
    own = _blocks(joint)[:, np.arange(keypoints), np.arange(keypoints)]
    inverse = np.linalg.inv(np.linalg.cholesky(own))
    wide = np.zeros(joint.shape)
    _blocks(wide)[:, np.arange(keypoints), np.arange(keypoints)] = inverse
    result = wide @ joint @ np.swapaxes(wide, 1, 2)
    _blocks(result)[:, np.arange(keypoints), np.arange(keypoints)] = np.eye(2)
    return (result + np.swapaxes(result, 1, 2)) / 2


def own_and_shared(covariance: Array, correlation: Array) -> tuple[Array, Array]:
    """The same joint covariance as a part that keypoints (N, K, 2, 2) have each of their own, and M common causes.

    The second (N, K, 2, M) says how far keypoints move with each of M independent standard normal causes, as
    ``geometry`` takes it. R = s I + V V', with s its smallest eigenvalue.
    """
    if not is_correlation(correlation):
        raise HaloposeError("a correlation is symmetric and positive definite, with identities on its diagonal")
    values, vectors = np.linalg.eigh(correlation)
    loads = vectors[:, 1:] * np.sqrt(values[1:] - values[0])
    known = np.isfinite(covariance).all(axis=(2, 3), keepdims=True)
    factor = np.linalg.cholesky(np.where(known, covariance, np.eye(2)))
    causes = factor @ loads.reshape(1, covariance.shape[1], 2, -1)
    return values[0] * covariance, np.where(known, causes, 0.0)


def _dependence(squared: Array, distance: Array, labelled: Array, dof: float) -> Array:
    """Log-density (N,) of v under the joint law, less R's determinant, less that of independent ones.

    squared: lengths (N, K) of v.
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
    """Matrices (N, 2K, 2K) whose rows and columns outside of masks (N, 2K) are the identity's."""
    inside = mask[:, :, None] & mask[:, None, :]
    result = np.where(inside, matrix, 0.0)
    index = np.arange(mask.shape[1])
    result[:, index, index] += ~mask
    return result


def _blocks(matrix: Array) -> Array:
    """A view (..., K, K, 2, 2) of the 2 x 2 blocks of matrices (..., 2K, 2K)."""
    keypoints = matrix.shape[-1] // 2
    view = matrix.reshape(*matrix.shape[:-2], keypoints, 2, keypoints, 2)
    return np.moveaxis(view, -3, -2)
