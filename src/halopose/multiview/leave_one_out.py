"""Check 3D covariances: predict each view from the other views and compare with its observations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import chi2

from halopose.multiview.rig import CalibratedView
from halopose.multiview.scene import SceneObservations
from halopose.multiview.triangulation import ViewObservations, triangulate_points
from halopose.types import Array


@dataclass(frozen=True)
class HeldOutView:
    """Residuals of M observations against predictions from the other views.

    Attributes:
        residual: Residuals (M, 2) in pixels.
        covariance: Predicted covariances (M, 2, 2) of the residuals.
        view: Indices (M,) of the views.
        row: Indices (M,) of the observations.
    """

    residual: Array
    covariance: Array
    view: Array
    row: Array

    @property
    def squared(self) -> Array:
        """Squared Mahalanobis distances (M,); chi-square with two degrees of freedom if the covariances are right."""
        solved = np.linalg.solve(self.covariance, self.residual[..., None])[..., 0]
        return np.asarray((self.residual * solved).sum(-1))

    def coverage(self, probability: float) -> float:
        """Share of residuals inside the regions of this nominal probability."""
        return float(np.mean(self.squared <= chi2.ppf(probability, 2)))


def leave_one_out(
    views: Sequence[CalibratedView],
    gathered: SceneObservations,
    *,
    others: int = 2,
    consistent: float | None = 0.999,
    weighted: bool = True,
) -> HeldOutView | None:
    """Predict every view from the others; covariances are that of the projected point plus that of the view.

    Args:
        views: Calibrated views.
        gathered: Observations of all keypoints.
        others: Smallest number of other views of a keypoint.
        consistent: As in ``triangulate_points``.
        weighted: As in ``triangulate_points``.

    Returns:
        Residuals, or None if no keypoint is seen by enough views.
    """
    seen = gathered.observations
    parts = []
    for number, view in enumerate(views):
        used = seen.used.copy()
        used[:, number] = False
        rows = np.flatnonzero(seen.used[:, number] & (used.sum(1) >= others))
        if not len(rows):
            continue
        found = triangulate_points(views, seen.take(rows, used[rows]), consistent=consistent, weighted=weighted)
        solved_rows = np.isfinite(found.covariance).all((1, 2)) & (found.used.sum(1) >= others)
        rows, place, covariance = rows[solved_rows], found.place[solved_rows], found.covariance[solved_rows]
        jacobian = view.jacobian(place)
        predicted = jacobian @ covariance @ np.swapaxes(jacobian, -1, -2) + seen.covariance[rows, number]
        residual = seen.pixels[rows, number] - view.project(place)
        parts.append((residual, predicted, np.full(len(rows), number), rows))
    if not parts:
        return None
    residual, covariance, view_index, rows = (np.concatenate(part) for part in zip(*parts, strict=True))
    finite = np.isfinite(residual).all(1)
    return HeldOutView(residual[finite], covariance[finite], view_index[finite], rows[finite])


def worse_camera(
    gathered: SceneObservations, view: int, pixels: float, seed: int = 0, stated: bool = True
) -> SceneObservations:
    """Add noise to one view.

    Args:
        gathered: Observations.
        view: Index of the view.
        pixels: Standard deviation of the noise in pixels.
        seed: Seed of the noise.
        stated: Whether to add the noise to the covariances of the view.
    """
    seen = gathered.observations
    noise = np.random.default_rng(seed).normal(0, pixels, seen.pixels[:, view].shape)
    moved = [seen.pixels.copy(), seen.covariance.copy(), None if seen.scale is None else seen.scale.copy()]
    moved[0][:, view] += noise
    if stated:
        for part in moved[1:]:
            if part is not None:
                part[:, view] += pixels**2 * np.eye(2)
    return replace(gathered, observations=ViewObservations(moved[0], moved[1], seen.used, moved[2], seen.nu))
