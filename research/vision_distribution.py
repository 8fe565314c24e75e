"""Fit the distribution of vision errors in flight, which ``LandingSettings`` states as settings.

``research.landing_results --persistence`` flies approaches, fits the parameters and prints them. The errors of corners
and of position fixes are in units of their stated standard deviations, flight by flight.

The error along each axis is a white part plus a Gauss-Markov part. Each part has a variance factor, drawn once per
flight from an inverse gamma distribution. Given the factors both parts are Gaussian; the likelihood averages over
them. The factor of the white part can be estimated in flight. The other cannot, so its variance is stated as the mean
over flights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats
from scipy.optimize import minimize
from scipy.special import logsumexp

from halopose.landing.association import CornerDetections, associate, expected_corners, in_distribution_only
from halopose.landing.flight import true_trajectory, vision_model_of
from halopose.landing.landing_settings import TRUTH_RATE, CornerCorrelation, LandingSettings
from halopose.landing.vision_fix import solve
from halopose.landing.world.approach import fly
from halopose.poses import PoseDistributions
from halopose.types import Array

_QUANTILES = (np.arange(8) + 0.5) / 8  # of the factors' distributions, over which the likelihood is averaged
_HALF = (0.5, 0.5, 0.5)


def unit_errors(settings: LandingSettings, poses: Sequence[PoseDistributions]) -> tuple[Array, Array]:
    """Errors of fixes (N, 3) and of corners (N, 4, 2) in their own standard deviations, NaN without any."""
    settings = replace(settings, persistent_share=_HALF, variance_factor=(1.0, 1.0, 1.0))
    approach = fly(settings.seed, settings.weather, TRUTH_RATE)
    truth = true_trajectory(approach)
    times = np.arange(0.0, truth.times[-1], 1 / settings.rate)
    eye = replace(vision_model_of(approach, [], times, settings), attitudes=truth.attitude(times))
    position = truth.position(times)
    exact = expected_corners(eye.camera, eye.mount, position, eye.attitudes, eye.corners)
    fixes, corners = np.full((len(times), 3), np.nan), np.full((len(times), 4, 2), np.nan)
    for n, each in enumerate(in_distribution_only(found, settings.alarm) for found in poses):
        chosen = associate(each, eye.viewpoint(n, position[n], 25.0 * np.eye(3)), eye.corners)
        if chosen.index is None:
            continue
        seen = CornerDetections.of_frame(each, chosen, student=each.dof is not None)
        away = (seen.pixels[0] - exact[n])[..., None]
        corners[n] = np.linalg.solve(np.linalg.cholesky(seen.covariance[0]), away)[..., 0]
        fix = solve(seen, eye.select(slice(n, n + 1)), len(times))
        if fix.trusted[0]:
            taken = eye.measurement(n, float(times[n]), seen, fix, position[n])
            fixes[n] = np.linalg.solve(taken.drift / np.sqrt(_HALF), taken.value - position[n])
    return fixes, corners


def corner_distribution(corners: Array) -> tuple[float, CornerCorrelation]:
    """The variance of corners (N, 4, 2) over what is stated, and how they err together."""
    known = corners[np.isfinite(corners).all((1, 2))]
    r = np.corrcoef(known.reshape(-1, 8).T)
    sides = np.mean([-r[0, 2], -r[0, 4], r[2, 4], r[0, 6], -r[2, 6], -r[4, 6]])
    bent = np.mean([r[0, 5], r[0, 7], -r[2, 5], -r[2, 7], -r[4, 5], -r[4, 7]])
    size = round(float(np.clip((sides + bent) / 2, 0, 0.5)), 2)
    lift = float(np.clip(r[5, 7] - size, 0, 0.95 - size))
    return float(np.square(known).mean()), CornerCorrelation(
        size, round(lift, 2), round(float(np.clip(r[1, 3], 0, 0.95)), 2)
    )


@dataclass(frozen=True)
class CornerErrorDistribution:
    """Variances (3,) of the white and of the lasting part, seconds of the latter, degrees of freedom of the factor
    of each."""

    white: Array
    lasting: Array
    persistence: float
    freedom: float
    lasting_freedom: float

    @classmethod
    def fitted(cls, flights: Sequence[tuple[Array, Array]]) -> CornerErrorDistribution:
        """The likeliest, of flights with times (N,) and errors (N, 3) in stated standard deviations."""
        start = np.log([0.5] * 6 + [15.0, 30.0, 15.0])
        bounds = [(-6.0, 3.0)] * 6 + [(0.0, np.log(300.0))] + [(np.log(4.0), np.log(1000.0))] * 2
        best = minimize(lambda x: -sum(cls.of(x).likelihood(*f) for f in flights), start, bounds=bounds)
        return cls.of(best.x)

    @classmethod
    def of(cls, logarithms: Array) -> CornerErrorDistribution:
        """From the logarithms (9,) of everything."""
        values = np.exp(logarithms)
        return cls(values[:3], values[3:6], *values[6:].tolist())

    def likelihood(self, times: Array, errors: Array) -> float:
        """Logarithm of the density of a flight's errors (N, 3) at times (N,), but for a constant."""
        root, axes = np.linalg.eigh(np.exp(-np.abs(times[:, None] - times) / self.persistence))
        squares = np.square(axes.T @ errors)
        white, lasting = (
            stats.invgamma.ppf(_QUANTILES, freedom / 2, scale=freedom / 2)[:, None, None]
            for freedom in (self.freedom, self.lasting_freedom)
        )
        spread = (white * self.white)[:, None] + lasting * self.lasting * np.maximum(root, 0)[:, None]
        each = -0.5 * (np.log(spread) + squares / spread).sum((2, 3))
        return float(logsumexp(each) - np.log(each.size))

    def __str__(self) -> str:
        lasting = self.lasting * self.lasting_freedom / (self.lasting_freedom - 2)
        total = self.white + lasting
        return (
            f"VISION_VARIANCE_FACTOR = {_words(total)}, VISION_PERSISTENT_SHARE = {_words(lasting / total)}, "
            f"VISION_DRIFT: {self.persistence:.0f} s, "
            f"VISION_NOISE_SCALE_DOF = {self.freedom:.0f}, of what lasts {self.lasting_freedom:.0f}"
        )


def _words(values: Array) -> str:
    return "(" + ", ".join(f"{value:.2f}" for value in values) + ")"
