"""Fit the correlation of the keypoints of one object (see `halopose.uncertainty.joint_distribution`).

R and the joint degrees of freedom are fitted to ranks of distances and to directions, so temperatures and outliers do
not affect them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from halopose.errors import HaloposeError
from halopose.types import Array
from halopose.uncertainty.joint_distribution import is_correlation, keypoint_blocks, log_dependence
from halopose.uncertainty.missing_keypoints import log_shares, pairings, places_among, rising_places
from halopose.uncertainty.whitening import directions, squared_length, squares

SMALLEST_EIGENVALUE = 0.02  # smallest shrinkage of R
DOF_RANGE = (2.5, 1e4)
MIN_OBJECTS = 200  # a scale with fewer objects takes the correlation of all objects
_OBJECTS = 1000  # largest number of objects for the joint degrees of freedom


@dataclass(frozen=True, eq=False)
class Correlation:
    """Correlation R (2K, 2K) in the order x1, y1, x2, y2, ..., and degrees of freedom of the joint Student-t.

    Attributes:
        matrix: R (2K, 2K) of all objects.
        dof: degrees of freedom of the joint t.
        shrinkage: share of the identity in R.
        objects: number of objects it was fitted on.
        scales: R (S, 2K, 2K) by object scale; None if all scales share one.
        edges: areas (S - 1,) between the scales, of predicted boxes times ``area_factor``.
        area_factor: object area divided by box area.

    Example:
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
        """Return R (N, 2K, 2K) of objects with predicted boxes of areas (N,)."""
        if self.scales is None:
            return np.broadcast_to(self.matrix, (len(area), *self.matrix.shape))
        place = np.searchsorted(np.asarray(self.edges), area * self.area_factor, side="left")
        return np.asarray(self.scales[place])

    def to_json(self) -> dict[str, Any]:
        """Return json content."""
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
        """Build from ``to_json``.

        Raises:
            ValueError: The content is not valid; KeyError or TypeError likewise.
        """
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
    """Fit to residuals under Cholesky factors.

    Args:
        residual: residuals (M, K, 2).
        scale_tril: Cholesky factors (M, K, 2, 2).
        labelled: which keypoints (M, K) are labelled; default: all.
        mirror: mirrored partner of each keypoint; objects and their mirror images then count equally.
        area: areas (M,) of the predicted boxes, for a separate R by object scale.
        edges: areas between the scales.
        area_factor: object area divided by box area.
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
    """Fit to directions (M, K, 2), and places (n,) of labelled keypoints by rising length; see ``fit_correlation``.

    Directions and places are all that the fit uses of residuals. For folds of larger data they are computed once.
    """
    survival = log_shares(places, labelled)
    scores = direction * np.sqrt(-2 * survival)[..., None]  # normal scores: Gaussian quantiles of the ranks
    matrix, noise = _moments(scores, labelled)
    if mirror is not None:
        matrix, noise = (matrix + _mirrored(matrix, mirror)) / 2, noise / 2
    shrinkage = _shrinkage(matrix, noise)
    size = len(matrix)
    matrix = (1 - shrinkage) * matrix + shrinkage * np.eye(size)
    several = labelled.sum(1) > 1
    found = Correlation(matrix, math.inf, shrinkage, int(several.sum()))
    found = replace(found, dof=_fit_dof(found, survival, direction, labelled))
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
    """Return the correlation (2K, 2K) of scores (M, K, 2) with identities on its diagonal, and the variance of its
    entries.

    Every pair of keypoints uses the objects that have both.
    """
    objects, keypoints = labelled.shape
    flat = scores.reshape(objects, 2 * keypoints)
    both = _gram(labelled.astype(float))
    pairs = np.repeat(np.repeat(both, 2, 0), 2, 1)
    product = _gram(flat) / np.maximum(pairs, 1)
    spread = _gram(np.square(flat)) / np.maximum(pairs, 1)
    own = keypoint_blocks(product)[np.arange(keypoints), np.arange(keypoints)]
    values, vectors = np.linalg.eigh(own)
    root = (vectors / np.sqrt(np.maximum(values, 1e-6))[:, None, :]) @ np.swapaxes(vectors, 1, 2)
    root = np.where((both.diagonal() > 2)[:, None, None], root, np.eye(2))
    wide = np.zeros((2 * keypoints, 2 * keypoints))
    keypoint_blocks(wide)[np.arange(keypoints), np.arange(keypoints)] = root
    matrix = wide @ product @ wide
    keypoint_blocks(matrix)[np.arange(keypoints), np.arange(keypoints)] = np.eye(2)
    return (matrix + matrix.T) / 2, np.where(pairs > 1, (spread - product**2) / np.maximum(pairs, 1), 1.0)


def _gram(rows: Array) -> Array:
    """Return the product (C, C) of rows (N, C) with themselves.

    Torch respects the number of threads; numpy would take the cores of the other folds.
    """
    columns = torch.from_numpy(rows)
    return np.asarray((columns.T @ columns).numpy())


def _shrinkage(matrix: Array, noise: Array) -> float:
    """Return the share of the identity: the share of correlation that noise explains, and enough to make R definite."""
    keypoint = np.arange(len(matrix)) // 2
    apart = keypoint[:, None] != keypoint
    signal = float(np.square(matrix[apart]).sum())
    share = min(float(noise[apart].sum()) / signal, 1.0) if signal else 1.0
    lowest = float(np.linalg.eigvalsh(matrix)[0])
    return max(share, (SMALLEST_EIGENVALUE - lowest) / (1 - lowest) if lowest < SMALLEST_EIGENVALUE else 0.0)


def _mirrored(matrix: Array, mirror: tuple[int, ...]) -> Array:
    """Return R of mirror images: partners are exchanged, and x changes sign."""
    index = (2 * np.array(mirror)[:, None] + np.arange(2)).ravel()
    sign = np.tile([-1.0, 1.0], len(mirror))
    return np.asarray(matrix[np.ix_(index, index)] * sign * sign[:, None])


def _fit_dof(found: Correlation, survival: Array, direction: Array, labelled: Array) -> float:
    """Return the most likely degrees of freedom for the ranks; infinite if the Gaussian is as likely."""
    rows = np.flatnonzero(labelled.sum(1) > 1)
    if len(rows) > _OBJECTS:
        rows = rows[:: -(-len(rows) // _OBJECTS)]
    if not len(rows):
        return math.inf
    survival, direction, labelled = survival[rows], direction[rows], labelled[rows]
    forms = pairings(direction, found.matrix, labelled)
    known = squares(direction)  # 1, or 0 without a direction

    def loss(log_dof: float) -> float:
        dof = math.exp(log_dof)
        squared = squared_length(survival, dof) * known
        length = np.sqrt(squared)
        distance = ((forms @ length[..., None])[..., 0] * length).sum(1)
        return -float(log_dependence(squared, distance, labelled, dof).mean())

    from scipy import optimize  # predicting starts without it

    best = optimize.minimize_scalar(loss, bounds=tuple(np.log(DOF_RANGE)), method="bounded", options={"xatol": 0.02})
    return math.exp(best.x) if best.fun < loss(math.inf) - 1e-4 else math.inf
