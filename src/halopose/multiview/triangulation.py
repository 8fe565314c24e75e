"""Triangulate points from several views, weighted by covariances, with rejection of contradicting views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import chi2

from halopose.geometry.camera import normalise, to_camera
from halopose.geometry.linear import scaled_inverse
from halopose.multiview.rig import CalibratedView
from halopose.types import Array, Mask

_STEPS = 20
_FIRST_DAMPING = 1e-3
_ENOUGH = 1e-8  # smallest decrease of the chi-square that counts as progress


@dataclass(frozen=True)
class Points:
    """N triangulated points.

    Attributes:
        place: Points (N, 3), NaN where fewer than two views are left.
        covariance: Covariances (N, 3, 3), NaN where unknown.
        cost: Chi-squares (N,) of the residuals under the covariances, with ``dof`` degrees of freedom.
        used: Views used (N, V).
        given: Views with an observation (N, V).
    """

    place: Array
    covariance: Array
    cost: Array
    used: Mask
    given: Mask

    @property
    def dof(self) -> Array:
        """Degrees of freedom (N,) of the chi-squares."""
        return np.maximum(2 * self.used.sum(1) - 3, 0)


@dataclass(frozen=True)
class ViewObservations:
    """Observations of N points in V views.

    Attributes:
        pixels: Pixels (N, V, 2).
        covariance: Covariances (N, V, 2, 2).
        used: Whether each observation is used (N, V).
        scale: Scale matrices (N, V, 2, 2) of Student-t distributions, or None.
        nu: Degrees of freedom (N, V) of Student-t distributions, or None.
    """

    pixels: Array
    covariance: Array
    used: Mask
    scale: Array | None = None
    nu: Array | None = None

    def take(self, rows: Array, used: Mask) -> ViewObservations:
        """Observations of the chosen points, with another ``used`` mask."""
        scale, nu = (None if part is None else part[rows] for part in (self.scale, self.nu))
        return ViewObservations(self.pixels[rows], self.covariance[rows], used, scale, nu)


def triangulate_points(
    views: Sequence[CalibratedView],
    seen: ViewObservations,
    *,
    consistent: float | None = 0.999,
    weighted: bool = True,
) -> Points:
    """Triangulate points by weighted least squares.

    If the chi-square of a point fails the test, the view whose removal lowers it most is rejected, one at a time.

    Args:
        views: Calibrated views (V of them).
        seen: Observations.
        consistent: Probability of the chi-square test; None keeps all views.
        weighted: Whether to weight pixels by their covariances. False is for comparison; the returned covariance
            still describes the actual errors.
    """
    given = seen.used & np.isfinite(seen.pixels).all(-1)
    seen = ViewObservations(seen.pixels, seen.covariance, given, seen.scale, seen.nu)
    found = _solve(views, seen, weighted)
    if consistent is None:
        return found
    for _ in range(len(views) - 2):
        with np.errstate(invalid="ignore"):
            limit = chi2.ppf(consistent, np.maximum(found.dof, 1))
            failed = np.flatnonzero((found.cost > limit) & (found.used.sum(1) > 2))
        if not len(failed):
            break
        found = _without_worst(views, seen, found, failed, weighted)
    return Points(found.place, found.covariance, found.cost, found.used, given)


def _without_worst(
    views: Sequence[CalibratedView], seen: ViewObservations, found: Points, failed: Array, weighted: bool
) -> Points:
    """Solve the points ``failed`` again without the view whose removal lowers the chi-square most."""
    count = len(views)
    trial_rows = np.repeat(failed, count)
    used = np.repeat(found.used[failed], count, axis=0)
    used[np.arange(len(trial_rows)), np.tile(np.arange(count), len(failed))] = False
    trial = _solve(views, seen.take(trial_rows, used), weighted)
    removed = found.used[failed]
    cost = np.where(removed, np.nan_to_num(trial.cost, nan=np.inf).reshape(-1, count), np.inf)
    best = np.arange(len(failed)) * count + cost.argmin(1)
    result = [part.copy() for part in (found.place, found.covariance, found.cost, found.used)]
    for part, new in zip(result, (trial.place, trial.covariance, trial.cost, trial.used), strict=True):
        part[failed] = new[best]
    return Points(result[0], result[1], result[2], result[3].astype(bool), found.given)


@np.errstate(all="ignore")  # points without enough views are NaN
def _solve(views: Sequence[CalibratedView], seen: ViewObservations, weighted: bool) -> Points:
    distribution = _ReprojectionDistribution(seen, weighted)
    place = _linear(views, seen, distribution)
    cost, normal, pull = distribution.linearise(views, place)
    damping = np.full(len(place), _FIRST_DAMPING)
    for _ in range(_STEPS):
        diagonal = np.einsum("nii->ni", normal)
        system = normal + (damping[:, None] * diagonal)[..., None] * np.eye(3)
        step = _solve_each(system, pull)
        trial = distribution.linearise(views, place + step)
        better = trial[0] < cost
        gain = np.where(better, cost - trial[0], 0.0)
        place = np.where(better[:, None], place + step, place)
        cost, normal, pull = (
            np.where(better.reshape(-1, *[1] * (old.ndim - 1)), new, old)
            for new, old in zip(trial, (cost, normal, pull), strict=True)
        )
        damping = np.where(better, damping / 10, damping * 10)
        if not (gain > _ENOUGH).any() and (damping > 1e-2).all():
            break
    enough = (seen.used.sum(1) >= 2) & np.isfinite(cost)
    covariance, squared = distribution.spread(views, place)
    place = np.where(enough[:, None], place, np.nan)
    covariance = np.where((enough & np.isfinite(covariance).all((1, 2)))[:, None, None], covariance, np.nan)
    return Points(place, covariance, np.where(enough, squared, np.nan), seen.used, seen.used)


def _solve_each(system: Array, pull: Array) -> Array:
    sound = np.isfinite(system).all((1, 2)) & (np.linalg.det(np.nan_to_num(system)) > 0)
    inner = np.linalg.inv(np.where(sound[:, None, None], system, np.eye(3)))
    return np.where(sound[:, None], (inner @ pull[..., None])[..., 0], np.nan)


class _ReprojectionDistribution:
    """Weights of the observations: inverse covariances or equal weights, and Student-t weights for outliers."""

    def __init__(self, seen: ViewObservations, weighted: bool) -> None:
        self.seen, self.weighted = seen, weighted
        used = seen.used[..., None, None]
        eye = np.eye(2)
        self.moments = np.linalg.inv(np.where(used, seen.covariance, eye)) * used
        self.nu = seen.nu if weighted and seen.scale is not None else None
        if not weighted:
            self.inverse = eye * used
        elif self.nu is None or seen.scale is None:
            self.inverse = self.moments
        else:
            self.inverse = np.linalg.inv(np.where(used, seen.scale, eye)) * used

    def linearise(self, views: Sequence[CalibratedView], place: Array) -> tuple[Array, Array, Array]:
        """Cost (N,), normal matrix (N, 3, 3) and gradient term (N, 3) at points (N, 3)."""
        residual, jacobian = self._residuals(views, place)
        weighted_residual = self.inverse @ residual[..., None]
        distance = (residual[..., None, :] @ weighted_residual)[..., 0, 0]
        cost, weight = distance, np.ones_like(distance)
        if self.nu is not None:
            cost = (self.nu + 2) * np.log1p(distance / self.nu)
            weight = (self.nu + 2) / (self.nu + distance)
        jacobian_t = np.swapaxes(jacobian, -1, -2) * weight[..., None, None]
        return (
            cost.sum(1),
            (jacobian_t @ self.inverse @ jacobian).sum(1),
            (jacobian_t @ weighted_residual)[..., 0].sum(1),
        )

    def spread(self, views: Sequence[CalibratedView], place: Array) -> tuple[Array, Array]:
        """Covariances (N, 3, 3) from the covariances of the observations, and chi-squares (N,)."""
        residual, jacobian = self._residuals(views, place)
        squared = np.einsum("nvi,nvij,nvj->n", residual, self.moments, residual)
        jacobian_t = np.swapaxes(jacobian, -1, -2)
        if self.weighted:
            return scaled_inverse((jacobian_t @ self.moments @ jacobian).sum(1)), squared
        inner = scaled_inverse((jacobian_t @ self.inverse @ jacobian).sum(1))
        gain_matrix = inner[:, None] @ jacobian_t @ self.inverse
        return (gain_matrix @ self.seen.covariance @ np.swapaxes(gain_matrix, -1, -2)).sum(1), squared

    def _residuals(self, views: Sequence[CalibratedView], place: Array) -> tuple[Array, Array]:
        """Residuals (N, V, 2) and Jacobians (N, V, 2, 3), zero where a view is not used."""
        used = self.seen.used
        residual, jacobian = np.zeros((*used.shape, 2)), np.zeros((*used.shape, 2, 3))
        for n, view in enumerate(views):
            on = used[:, n]
            residual[on, n] = self.seen.pixels[on, n] - view.project(place[on])
            jacobian[on, n] = view.jacobian(place[on])
        return residual, jacobian


def _linear(views: Sequence[CalibratedView], seen: ViewObservations, distribution: _ReprojectionDistribution) -> Array:
    """Linear triangulation (N, 3); the rows of the equations are in pixels."""
    rows = []
    for n, view in enumerate(views):
        ray = normalise(view.camera, seen.pixels[:, n])
        weight = np.sqrt(np.trace(distribution.inverse[:, n], axis1=-2, axis2=-1) / 2)
        for axis in range(2):
            direction = ray[:, axis, None] * view.rotation[2] - view.rotation[axis]
            row = np.concatenate([direction, (direction @ view.position)[:, None]], axis=1)
            rows.append(np.where(seen.used[:, n, None], row * weight[:, None], 0.0))
    table = np.nan_to_num(np.stack(rows, axis=1))
    estimate = _solve_each(
        np.einsum("nri,nrj->nij", table[..., :3], table[..., :3]),
        np.einsum("nri,nr->ni", table[..., :3], table[..., 3]),
    )
    # Solve again with each row divided by its depth: rows are then in pixels, and near cameras get no extra weight.
    for n, view in enumerate(views):
        depth = to_camera(view.rotation, view.position, estimate[:, None])[:, 0, 2]
        table[:, 2 * n : 2 * n + 2] *= (view.camera.fx / np.where(np.abs(depth) > 1e-9, depth, 1.0))[:, None, None]
    table = np.nan_to_num(table)
    return _solve_each(
        np.einsum("nri,nrj->nij", table[..., :3], table[..., :3]),
        np.einsum("nri,nr->ni", table[..., :3], table[..., 3]),
    )
