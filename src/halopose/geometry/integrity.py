"""Consistency check of a position from points: exclusion of a wrong point, and protection levels.

All solutions without one point come from one linearisation at the solution with all points (solution separation in
its linear form, as in ARAIM). Leaving out point k lowers the chi-square by w_k, with two degrees of freedom. It moves
the position along an axis by at most sqrt(w_k (sk^2 - s0^2)), with s0 and sk the standard deviations with and without
the point. A frame alarms if the chi-square or a w_k is too large. Both tests share ``false_alarm`` equally, so it is
the total rate per frame. Without an alarm, with T^2 the limit of the w_k and r the risk of an axis over K + 1,

    level = max(Qinv(r / 2) s0, max_k T sqrt(sk^2 - s0^2) + Qinv(r / fault_probability) sk).

Faults of two points at a time are further hypotheses: every pair, with the product of both probabilities plus the
probability of a common cause (``Risks.pairs``). For a pair, T^2 is the limit of the total chi-square. Three faults at
a time, and pairs without which there is no position, are not covered. If their probability exceeds the budget, the
levels are infinite, as in ARAIM.

A rotation that is wrong by any angle, and intrinsics that are wrong by any amount, are hypotheses too: of all points,
with that error left free. World points that are wrong cannot be noticed from the points; their probability
(``Risks.model_fault``) counts as not covered, and so do faults of the camera after an exclusion.

After an alarm the K subsets of a frame are solved again. The best one is used if no other fits nearly as well; the
levels also cover the others, weighted by their odds, and the pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtrc, chdtri, ndtri

from halopose.errors import HaloposeError
from halopose.geometry.attitude import solve_with_attitude
from halopose.geometry.linear import Linearisation, linearise
from halopose.geometry.observations import Observations
from halopose.geometry.pnp import Solution, solve_pose, solve_position
from halopose.types import Array, Mask

_FEWEST = {True: 3, False: 5}  # points needed to exclude one, by whether the rotation is given
WORLD_AXES = np.eye(3)


class Verdict(IntEnum):
    """Outcome of the consistency check of a frame."""

    CONSISTENT = 0
    POINT_EXCLUDED = 1
    UNSOLVED = 2
    INCONSISTENT = 3
    UNCLEAR = 4

    @property
    def reason(self) -> str:
        """The outcome in words."""
        return _REASONS[self]


_REASONS = {
    Verdict.CONSISTENT: "the points are consistent",
    Verdict.POINT_EXCLUDED: "the points are consistent after one was excluded",
    Verdict.UNSOLVED: "the points determine no position",
    Verdict.INCONSISTENT: "the points are inconsistent, whichever one is excluded",
    Verdict.UNCLEAR: "one point is wrong, but it is not clear which",
}


@dataclass(frozen=True)
class Risks:
    """Probabilities per frame.

    Attributes:
        false_alarm: Probability of an alarm without a fault.
        integrity: Probability of an error beyond a level without an alarm.
        fault_probability: Prior probability that a point is wrong beyond its covariance.
        odds: Largest odds, after an alarm, of another point being the wrong one. Above them the frame is not used.
        pairs: Pairs of points with a common cause of faults, with its probability.
        rotation_fault: Prior probability that the given rotation is wrong beyond its covariance.
        lens_fault: Prior probability that the intrinsics are wrong beyond their covariance.
        model_fault: Prior probability that the known points are wrong.
        budget: Largest probability of faults that no hypothesis covers; above it levels are infinite. Default:
            ``integrity``.
    """

    false_alarm: float = 1e-3
    integrity: float = 1e-7
    fault_probability: float = 1e-3
    odds: float = 1e-3
    pairs: tuple[tuple[tuple[int, int], float], ...] = ()
    rotation_fault: float = 0.0
    lens_fault: float = 0.0
    model_fault: float = 0.0
    budget: float | None = None

    def __post_init__(self) -> None:
        for name in ("false_alarm", "integrity", "fault_probability", "odds"):
            check_risk(name, getattr(self, name))
        for pair, value in self.pairs:
            check_risk(f"the probability of points {pair}", value)
        for name in ("rotation_fault", "lens_fault", "model_fault"):
            if not 0 <= getattr(self, name) < 1:
                raise HaloposeError(f"{name} must be 0 or more and below 1, got {getattr(self, name)}")

    def hypotheses(self, points: int) -> tuple[Mask, Array]:
        """Return which points (G, K) are wrong under each hypothesis, single ones first, and the priors (G,)."""
        common = {frozenset(pair): value for pair, value in self.pairs}
        both = self.fault_probability**2
        pairs = list(combinations(range(points), 2))
        groups = np.zeros((points + len(pairs), points), dtype=bool)
        groups[:points] = np.eye(points, dtype=bool)
        for row, pair in enumerate(pairs):
            groups[points + row, list(pair)] = True
        priors = [common.get(frozenset(pair), 0.0) + both for pair in pairs]
        return groups, np.array([self.fault_probability] * points + priors)

    def unmonitored(self, points: int) -> float:
        """Return the probability of wrong known points, or of three faulty ones at once, which no level covers."""
        return self.model_fault + comb(points, 3) * self.fault_probability**3

    @property
    def camera(self) -> Array:
        """Prior probabilities (2,) of a wrong rotation and of wrong intrinsics."""
        return np.array([self.rotation_fault, self.lens_fault])


@dataclass(frozen=True)
class Assessment:
    """Checked positions of N frames.

    Attributes:
        solution: Solutions after exclusion.
        mask: Points in use (N, K).
        excluded: Index of the excluded point (N,), or -1.
        verdict: Codes of ``Verdict`` (N,).
        levels: Protection levels (N, A) along the axes, in the unit of the points; infinite where there is no bound.
        statistic: chi-square with all points (N,).
        shares: Decrease of the chi-square when a point is left out (N, K).
    """

    solution: Solution
    mask: Mask
    excluded: NDArray[np.int64]
    verdict: NDArray[np.int64]
    levels: Array
    statistic: Array
    shares: Array

    @property
    def trusted(self) -> Mask:
        """Frames (N,) whose position and levels may be used."""
        return self.verdict <= Verdict.POINT_EXCLUDED

    @property
    def alarmed(self) -> Mask:
        """Frames (N,) whose points were inconsistent before exclusion."""
        return (self.verdict != Verdict.CONSISTENT) & (self.verdict != Verdict.UNSOLVED)

    @property
    def reasons(self) -> list[str]:
        """Outcome of each frame in words."""
        return [
            self.solution.reasons[n] if code == Verdict.UNSOLVED else Verdict(code).reason
            for n, code in enumerate(self.verdict.tolist())
        ]


def consistency(solution: Solution) -> Array:
    """Return the p-value (N,) of the residuals under the chi-square distribution of ``cost`` and ``dof``.

    It is one without degrees of freedom and zero where there is no solution. Low values mean that points, pixels,
    covariances or the camera are wrong. High values prove nothing.
    """
    probability = chdtrc(np.maximum(solution.dof, 1), np.where(solution.converged, solution.cost, 0.0))
    return np.where(solution.converged, np.where(solution.dof > 0, probability, 1.0), 0.0)


def ambiguous(solution: Solution, odds: float = 1e-3) -> Mask:
    """Return the frames (N,) where the other pose of the plane is more than ``odds`` times as likely as the best."""
    with np.errstate(invalid="ignore"):
        gap = solution.alternative.cost - solution.cost
    return solution.converged & (gap < -2 * np.log(odds))


def assess(
    observations: Observations, *, risks: Risks | None = None, axes: Array = WORLD_AXES, check: bool = True
) -> Assessment:
    """Solve, check, exclude one point where necessary, and bound the error of the camera's position.

    The solver is ``solve_pose``, or with a given rotation ``solve_position``, or with errors of the rotation or of the
    intrinsics, or shared ones, ``solve_with_attitude``. Exclusion needs five points for a pose and three for a
    position.

    Args:
        observations: Points and pixels of N frames.
        risks: Probabilities of false alarms and of errors beyond the levels.
        axes: Unit vectors (A, 3) in world axes along which to bound the error.
        check: Run the consistency check; without it every solution is accepted.
    """
    risks = risks or Risks()
    fewest = _FEWEST[observations.R_cam_world is not None]
    mask = observations.used
    solution = _solve(observations)
    verdict = np.where(solution.converged, int(Verdict.CONSISTENT), int(Verdict.UNSOLVED))
    shares, levels = np.zeros(mask.shape), np.full((len(mask), len(axes)), np.inf)
    good = np.flatnonzero(solution.converged)
    if len(good):
        groups, priors = risks.hypotheses(mask.shape[1])
        linear = linearise(observations.select(good), _select(solution, good), groups)
        shares[good] = linear.shares[:, : mask.shape[1]]
        levels[good] = _levels(linear, _in_use(groups, mask[good]), priors, mask[good], solution.dof[good], risks, axes)
        levels[good[mask[good].sum(1) < fewest]] = np.inf
    excluded = np.full(len(observations), -1)
    alarmed = np.flatnonzero(_alarms(solution, shares, mask, risks)) if check else good[:0]
    statistic = np.where(solution.converged, solution.cost, np.nan)
    if len(alarmed):
        trial = _exclude(observations.select(alarmed), fewest, risks, axes)
        excluded[alarmed], verdict[alarmed], levels[alarmed] = trial
        mask = mask.copy()
        mask[alarmed, excluded[alarmed]] &= excluded[alarmed] < 0
        if (excluded >= 0).any():
            solution = _solve(replace(observations, mask=mask))
            verdict[(verdict == Verdict.POINT_EXCLUDED) & ~solution.converged] = Verdict.UNSOLVED
    return Assessment(solution, mask, excluded, verdict, levels, statistic, shares)


def _solve(observations: Observations) -> Solution:
    """Choose the solver by the given errors and solve."""
    if observations.R_cam_world is None:
        return solve_pose(observations)
    uncertain = observations.attitude_covariance, observations.intrinsics_covariance, observations.shared
    return solve_position(observations) if all(u is None for u in uncertain) else solve_with_attitude(observations)


def _select(solution: Solution, frames: NDArray[np.intp]) -> Solution:
    """Return some frames of a solution; its alternatives are not selected."""
    names = ("rotation", "position", "cost", "covariance", "dof", "failure")
    return replace(solution, **{name: getattr(solution, name)[frames] for name in names})


def _alarms(solution: Solution, shares: Array, mask: Mask, risks: Risks) -> Mask:
    """Return the solutions (N,) whose chi-square is too large, in total or for one point."""
    half = risks.false_alarm / 2
    alone = np.exp(-shares.max(1) / 2) < half / np.maximum(mask.sum(1), 1)  # chi-square with two degrees
    return solution.converged & (solution.dof > 0) & ((consistency(solution) < half) | alone)


def _in_use(groups: Mask, mask: Mask) -> Mask:
    """Return which groups (N, G) have all their points in use."""
    return np.asarray((mask[:, None] | ~groups).all(2))


def _levels(
    linear: Linearisation, used: Mask, priors: Array, mask: Mask, dof: Array, risks: Risks, axes: Array
) -> Array:
    """Return the levels (N, A) of frames without an alarm."""
    points = mask.sum(1)
    count = np.maximum(points, 1)[:, None, None]
    whole = np.sqrt(_along(linear.covariance, axes))[:, None]
    hypotheses = np.concatenate([linear.covariance_without, linear.covariance_free], axis=1)
    without = np.sqrt(_along(hypotheses, axes))
    priors = np.append(priors, risks.camera)
    used = np.concatenate([used, np.broadcast_to(risks.camera > 0, (len(used), 2))], axis=1)
    covered = used & np.isfinite(without).all(2)
    apart = np.sqrt(np.maximum(np.where(covered[..., None], without, 0.0) ** 2 - whole**2, 0.0))
    single = np.sqrt(-2 * np.log(risks.false_alarm / 2 / count))
    total = np.sqrt(chdtri(np.maximum(dof, 1), risks.false_alarm / 2))[:, None, None]
    limit = np.where((np.arange(len(priors)) < mask.shape[1])[:, None], single, total)
    risk, overdrawn = _risk_per_hypothesis(covered, used, priors, points, risks, len(axes))
    share = risk[:, None, None]
    tail = _tail(share / np.maximum(priors, 1e-300)[:, None])
    faulty = limit * apart + tail * np.where(covered[..., None], without, 0.0)
    faulty = np.where(covered[..., None], faulty, 0.0)
    level = np.maximum(_tail(share / 2) * whole, faulty).max(1)
    return np.where(overdrawn[:, None], np.inf, np.nan_to_num(level, nan=np.inf, posinf=np.inf))


def _risk_per_hypothesis(
    covered: Mask, used: Mask, priors: Array, points: Array, risks: Risks, axes: int
) -> tuple[Array, Mask]:
    """Return the risk (N,) of each hypothesis and axis, and whether uncovered faults exceed the budget (N,)."""
    left = np.array([risks.unmonitored(int(count)) for count in points]) + (used & ~covered) @ priors
    budget = risks.integrity if risks.budget is None else risks.budget
    risk = risks.integrity - (left if risks.budget is None else 0.0)
    return np.maximum(risk, 1e-300) / axes / (covered.sum(1) + 1), left >= budget


def _exclude(
    observations: Observations, fewest: int, risks: Risks, axes: Array
) -> tuple[NDArray[np.int64], NDArray[np.int64], Array]:
    """Return the point to exclude (M,) or -1, the verdict (M,) and the levels (M, A) of frames that alarmed."""
    mask = observations.used
    frames, count = mask.shape
    left = (mask[:, None] & ~np.eye(count, dtype=bool)).reshape(-1, count)
    each = _solve(replace(observations.select(np.repeat(np.arange(frames), count)), mask=left))
    possible = (mask & (mask.sum(1) >= fewest)[:, None]).ravel() & each.converged & (each.dof > 0)
    cost = np.where(possible, each.cost, np.inf).reshape(frames, count)
    best = cost.argmin(1)
    row = np.arange(frames)
    fits = np.where(possible, consistency(each), 0.0).reshape(frames, count)[row, best] >= risks.false_alarm
    with np.errstate(invalid="ignore"):
        odds = np.nan_to_num(np.exp(-(cost - cost[row, best][:, None]) / 2))
    odds[row, best] = 0.0
    # A point that cannot be excluded may still be the wrong one.
    odds = np.where(mask & ~np.isfinite(cost), 1.0, odds)
    verdict = np.where(odds.max(1) < risks.odds, int(Verdict.POINT_EXCLUDED), int(Verdict.UNCLEAR))
    verdict = np.where(fits, verdict, int(Verdict.INCONSISTENT))
    groups, priors = risks.hypotheses(count)
    used, pairs = _in_use(groups, mask), groups[count:]
    rest = (mask[:, None] & ~pairs).reshape(-1, count)
    second = _solve(replace(observations.select(np.repeat(np.arange(frames), len(pairs))), mask=rest))
    solved = used & np.concatenate([np.ones_like(mask), second.converged.reshape(frames, -1)], axis=1)
    again = replace(risks, model_fault=risks.model_fault + float(risks.camera.sum()))  # no hypothesis any more
    risk, overdrawn = _risk_per_hypothesis(solved, used, priors, mask.sum(1), again, len(axes))
    position, spread = _separated(each, frames, axes)
    at_best = position[row, best][:, None]
    level = _tail(risk / 2)[:, None] * spread[row, best]
    for places, sigma, odds_of, prior in (
        (position, spread, odds, priors[:count]),
        (*_separated(second, frames, axes), solved[:, count:].astype(float), priors[count:]),
    ):
        allowed = risk[:, None] / prior
        counted = (odds_of > allowed)[..., None]
        quantile = _tail(allowed[..., None] / np.where(counted, odds_of[..., None], 1.0))
        other = np.abs((places - at_best) @ axes.T) + quantile * sigma
        level = np.maximum(level, np.where(counted, other, 0.0).max(1, initial=0.0))
    verdict_good = (verdict == Verdict.POINT_EXCLUDED) & ~overdrawn
    level = np.where(verdict_good[:, None], np.nan_to_num(level, nan=np.inf, posinf=np.inf), np.inf)
    return np.where(verdict == Verdict.POINT_EXCLUDED, best, -1), verdict, level


def _separated(solution: Solution, frames: int, axes: Array) -> tuple[Array, Array]:
    """Return positions (M, G, 3) of solutions of M frames, and their standard deviations (M, G, A) along axes."""
    spread = _along(solution.covariance.reshape(frames, -1, 6, 6)[..., :3, :3], axes)
    return solution.position.reshape(frames, -1, 3), np.sqrt(spread)


def _along(covariance: Array, axes: Array) -> Array:
    """Return variances (..., A) along axes (A, 3) of covariances (..., 3, 3)."""
    return np.maximum(np.einsum("ai,...ij,aj->...a", axes, covariance, axes), 0.0)


def _tail(probability: Array) -> Array:
    """Return the standard normal quantiles of these upper tail probabilities, at least zero."""
    return np.asarray(-ndtri(np.minimum(probability, 0.5)))


def check_risk(name: str, value: float) -> None:
    """Raise HaloposeError unless the value lies strictly between 0 and 1."""
    if not 0 < value < 1:
        raise HaloposeError(f"{name} must lie between 0 and 1, got {value}")
