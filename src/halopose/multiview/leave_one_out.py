"""Are the covariances true? Each view is predicted from the others and compared with what it saw.

In: what was gathered. Out: residuals with the covariances that they should have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import chi2

from halopose.multiview.rig import CalibratedView
from halopose.multiview.scene import Gathered
from halopose.multiview.triangulation import ViewObservations, triangulate_points
from halopose.types import Array


@dataclass(frozen=True)
class HeldOutView:
    """Residuals (M, 2) of views against what others predict, covariances (M, 2, 2), and which they are (M,)."""

    residual: Array
    covariance: Array
    view: Array
    row: Array

    @property
    def squared(self) -> Array:
        """Squared Mahalanobis distances (M,): chi-squares with two degrees of freedom if all is true."""
        solved = np.linalg.solve(self.covariance, self.residual[..., None])[..., 0]
        return np.asarray((self.residual * solved).sum(-1))

    def held(self, probability: float) -> float:
        """Share of residuals in regions that are to hold this probability."""
        return float(np.mean(self.squared <= chi2.ppf(probability, 2)))


def leave_one_out(
    views: Sequence[CalibratedView],
    gathered: Gathered,
    *,
    others: int = 2,
    consistent: float | None = 0.999,
    weighted: bool = True,
) -> HeldOutView | None:
    """Predict every view from the others, at least so many: the point's covariance projected, plus the view's own.

    None where no keypoint is seen by enough views.
    """
    seen = gathered.sightings
    parts = []
    for number, view in enumerate(views):
        used = seen.used.copy()
        used[:, number] = False
        rows = np.flatnonzero(seen.used[:, number] & (used.sum(1) >= others))
        if not len(rows):
            continue
        found = triangulate_points(views, seen.take(rows, used[rows]), consistent=consistent, weighted=weighted)
        good = np.isfinite(found.covariance).all((1, 2)) & (found.used.sum(1) >= others)
        rows, place, covariance = rows[good], found.place[good], found.covariance[good]
        jacobian = view.jacobian(place)
        predicted = jacobian @ covariance @ np.swapaxes(jacobian, -1, -2) + seen.covariance[rows, number]
        residual = seen.pixels[rows, number] - view.project(place)
        parts.append((residual, predicted, np.full(len(rows), number), rows))
    if not parts:
        return None
    residual, covariance, which, rows = (np.concatenate(part) for part in zip(*parts, strict=True))
    sound = np.isfinite(residual).all(1)
    return HeldOutView(residual[sound], covariance[sound], which[sound], rows[sound])


def worse_camera(gathered: Gathered, view: int, pixels: float, seed: int = 0, stated: bool = True) -> Gathered:
    """The same with noise of so many pixels added to one view; stated: its covariances say so."""
    seen = gathered.sightings
    noise = np.random.default_rng(seed).normal(0, pixels, seen.pixels[:, view].shape)
    moved = [seen.pixels.copy(), seen.covariance.copy(), None if seen.scale is None else seen.scale.copy()]
    moved[0][:, view] += noise
    if stated:
        for part in moved[1:]:
            if part is not None:
                part[:, view] += pixels**2 * np.eye(2)
    return replace(gathered, sightings=ViewObservations(moved[0], moved[1], seen.used, moved[2], seen.nu))
