"""Is a position from points to be trusted: do they fit, is one wrong, and how far off may the position be.

In: what ``pnp`` takes, and the risks that may be run. Out: an ``Assessment`` with a position, what became of every
frame, and protection levels in metres along chosen axes.

All solutions without one point come from one linearisation at the solution with all of them (solution separation
in its linear form, as in ARAIM). Leaving out point k lowers the chi-square by w_k, with two degrees of freedom,
and moves the position along an axis by no more than sqrt(w_k (sk^2 - s0^2)), with s0 and sk the standard
deviations with and without it. A frame alarms if the chi-square itself, or a w_k, is too large; each takes half of
the false alarms, and the w_k share theirs, so that ``false_alarm`` is the rate of a frame in total. Without an
alarm, with T^2 the limit of the w_k and r the risk of an axis over K + 1,

    level = max(Qinv(r / 2) s0, max_k T sqrt(sk^2 - s0^2) + Qinv(r / fault_probability) sk).

After an alarm all K subsets of a frame are solved anew. The one that fits best is answered if no other fits nearly
as well; those that might still be the right one count in the levels with their odds. One fault at a time is
covered; two (see ``Risks.unmonitored``), and faults that share a cause, a wrong runway or a wrong camera model,
are not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from math import comb

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtrc, ndtri

from halopose.errors import HaloposeError
from halopose.geometry.attitude import solve_with_attitude
from halopose.geometry.camera import Array, Camera
from halopose.geometry.linear import Linear, linearise
from halopose.geometry.pnp import Solution, solve_pose, solve_position
from halopose.geometry.pnp_refine import Mask

_FEWEST = {True: 3, False: 5}  # points, by whether the rotation is given, of which one can be spared
WORLD_AXES = np.eye(3)


class Verdict(IntEnum):
    """What became of a frame."""

    FITS = 0
    MENDED = 1
    UNSOLVED = 2
    CONTRADICTION = 3
    UNCLEAR = 4

    @property
    def reason(self) -> str:
        return _REASONS[self]


_REASONS = {
    Verdict.FITS: "the points fit together",
    Verdict.MENDED: "the points fit together without one of them",
    Verdict.UNSOLVED: "the points give no position",
    Verdict.CONTRADICTION: "the points do not fit together, whichever one is left out",
    Verdict.UNCLEAR: "one point is wrong, and it is not clear which",
}


@dataclass(frozen=True)
class Risks:
    """Probabilities of one frame: of an alarm without a fault, of an error beyond a level without an alarm.

    ``fault_probability`` is that of one point being wrong beyond its covariance. ``odds``: after an alarm, how
    likely another point than the one left out may be the wrong one, against it, for the frame to be answered.
    """

    false_alarm: float = 1e-3
    integrity: float = 1e-7
    fault_probability: float = 1e-3
    odds: float = 1e-3

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_risk(name, value)

    def unmonitored(self, points: int) -> float:
        """Probability that two or more of the points are wrong at once, of which the levels say nothing."""
        return comb(points, 2) * self.fault_probability**2


@dataclass(frozen=True)
class Assessment:
    """Solutions of N frames, the points kept (N, K), the one left out (N,) or -1, and what became of them (N,).

    ``levels`` (N, A) are in metres along the axes; infinite where nothing can be promised. ``statistic`` (N,) is
    the chi-square with all points and ``shares`` (N, K) how much of it each point takes with it when left out.
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
        return self.verdict <= Verdict.MENDED

    @property
    def alarmed(self) -> Mask:
        """Frames (N,) whose points did not fit together as they came."""
        return (self.verdict != Verdict.FITS) & (self.verdict != Verdict.UNSOLVED)

    @property
    def reasons(self) -> list[str]:
        """What became of each frame, in words."""
        return [
            self.solution.reasons[n] if code == Verdict.UNSOLVED else Verdict(code).reason
            for n, code in enumerate(self.verdict.tolist())
        ]


def consistency(solution: Solution) -> Array:
    """Probability (N,) of corner residuals at least this large, by the chi-square of ``cost`` and ``dof``.

    It is one without degrees of freedom, when nothing can be checked, and zero where there is no solution. Low
    values mean that the corners, their covariances, the runway or the camera are wrong; high ones prove nothing.
    """
    probability = chdtrc(np.maximum(solution.dof, 1), np.where(solution.converged, solution.cost, 0.0))
    return np.where(solution.converged, np.where(solution.dof > 0, probability, 1.0), 0.0)


def ambiguous(solution: Solution, odds: float = 1e-3) -> Mask:
    """Whether the other pose of the plane (N,) is more than ``odds`` times as likely as the chosen one."""
    with np.errstate(invalid="ignore"):
        gap = solution.alternative.cost - solution.cost
    return solution.converged & (gap < -2 * np.log(odds))


@dataclass(frozen=True)
class Given:
    """What is given of N frames: the arguments of the solvers, to be asked for with different masks."""

    camera: Camera
    points: Array
    pixels: Array
    covariance: Array
    rotation: Array | None
    attitude: Array | None
    intrinsics: Array | None
    shared: Array | None

    def take(self, frames: NDArray[np.intp]) -> Given:
        """The frames of an index, in its order."""
        rotation, attitude, shared = (
            None if each is None else each[frames] for each in (self.rotation, self.attitude, self.shared)
        )
        points = self.points if self.points.ndim == 2 else self.points[frames]
        seen = self.pixels[frames], self.covariance[frames]
        return Given(self.camera, points, *seen, rotation, attitude, self.intrinsics, shared)

    def solve(self, mask: Mask) -> Solution:
        seen = self.camera, self.points, self.pixels, self.covariance
        if self.rotation is None:
            return solve_pose(*seen, mask=mask)
        if self.attitude is None and self.intrinsics is None and self.shared is None:
            return solve_position(*seen, self.rotation, mask=mask)
        attitude = np.zeros((3, 3)) if self.attitude is None else self.attitude
        return solve_with_attitude(
            *seen, self.rotation, attitude, intrinsics=self.intrinsics, shared=self.shared, mask=mask
        )

    def linearise(self, solution: Solution, mask: Mask) -> Linear:
        return linearise(
            self.camera, self.points, self.pixels, self.covariance, solution, mask,
            rotation=self.rotation, attitude=self.attitude, intrinsics=self.intrinsics,
            shared=self.shared,
        )  # fmt: skip


def assess(
    camera: Camera,
    points: Array,
    pixels: Array,
    covariance: Array,
    rotation: Array | None = None,
    *,
    attitude: Array | None = None,
    intrinsics: Array | None = None,
    shared: Array | None = None,
    mask: Mask | None = None,
    risks: Risks | None = None,
    axes: Array = WORLD_AXES,
    check: bool = True,
) -> Assessment:
    """Solve, check, leave out one point where that is called for, and bound the camera's error along axes (A, 3).

    The arguments are those of ``solve_pose`` or, with ``rotation``, ``solve_position``; with that rotation's
    covariance ``attitude`` (3, 3) or (N, 3, 3), the camera's ``intrinsics`` (9, 9) or ``shared`` (N, K, 2, M),
    those of ``solve_with_attitude``. One of three points can be spared for a position, and one of five for a pose.
    Without ``check`` every solution is taken as it comes.
    """
    risks = risks or Risks()
    mask = np.ones(pixels.shape[:2], dtype=bool) if mask is None else mask
    if attitude is not None:
        attitude = np.broadcast_to(attitude, (len(pixels), 3, 3))
    given = Given(camera, points, pixels, covariance, rotation, attitude, intrinsics, shared)
    solution = given.solve(mask)
    verdict = np.where(solution.converged, int(Verdict.FITS), int(Verdict.UNSOLVED))
    shares, levels = np.zeros(mask.shape), np.full((len(mask), len(axes)), np.inf)
    good = np.flatnonzero(solution.converged)
    if len(good):
        linear = given.take(good).linearise(_taken(solution, good), mask[good])
        shares[good] = linear.shares
        levels[good] = _levels(linear, mask[good], _FEWEST[rotation is not None], risks, axes)
    excluded = np.full(len(pixels), -1)
    alarmed = np.flatnonzero(_alarms(solution, shares, mask, risks)) if check else good[:0]
    statistic = np.where(solution.converged, solution.cost, np.nan)
    if len(alarmed):
        trial = _mend(given.take(alarmed), mask[alarmed], _FEWEST[rotation is not None], risks, axes)
        excluded[alarmed], verdict[alarmed], levels[alarmed] = trial
        mask = mask.copy()
        mask[alarmed, excluded[alarmed]] &= excluded[alarmed] < 0
        if (excluded >= 0).any():
            solution = given.solve(mask)
            verdict[(verdict == Verdict.MENDED) & ~solution.converged] = Verdict.UNSOLVED
    return Assessment(solution, mask, excluded, verdict, levels, statistic, shares)


def _taken(solution: Solution, frames: NDArray[np.intp]) -> Solution:
    """Some frames of a solution; its alternatives are left behind."""
    names = ("rotation", "position", "cost", "covariance", "dof", "failure")
    return replace(solution, **{name: getattr(solution, name)[frames] for name in names})


def _alarms(solution: Solution, shares: Array, mask: Mask, risks: Risks) -> Mask:
    """Which solutions (N,) hold points that do not fit: all together, or one of them."""
    half = risks.false_alarm / 2
    alone = np.exp(-shares.max(1) / 2) < half / np.maximum(mask.sum(1), 1)  # chi-square with two degrees
    return solution.converged & (solution.dof > 0) & ((consistency(solution) < half) | alone)


def _levels(linear: Linear, mask: Mask, fewest: int, risks: Risks, axes: Array) -> Array:
    """Levels (N, A) of frames without an alarm."""
    count = np.maximum(mask.sum(1), 1)[:, None, None]
    whole = np.sqrt(_along(linear.covariance, axes))[:, None]
    without = np.sqrt(_along(linear.without, axes))
    apart = np.sqrt(np.maximum(without**2 - whole**2, 0.0))
    limit = np.sqrt(-2 * np.log(risks.false_alarm / 2 / count))
    risk = risks.integrity / len(axes) / (count + 1)
    faulty = limit * apart + _tail(risk / risks.fault_probability) * without
    faulty = np.where(mask[..., None], faulty, 0.0)
    level = np.maximum(_tail(risk / 2) * whole, faulty).max(1)
    return np.where(mask.sum(1)[:, None] >= fewest, np.nan_to_num(level, nan=np.inf, posinf=np.inf), np.inf)


def _mend(
    given: Given, mask: Mask, fewest: int, risks: Risks, axes: Array
) -> tuple[NDArray[np.int64], NDArray[np.int64], Array]:
    """The point to leave out (M,) or -1, the verdict (M,) and the levels (M, A) of frames that alarmed."""
    frames, count = mask.shape
    left = (mask[:, None] & ~np.eye(count, dtype=bool)).reshape(-1, count)
    each = given.take(np.repeat(np.arange(frames), count)).solve(left)
    possible = (mask & (mask.sum(1) >= fewest)[:, None]).ravel() & each.converged & (each.dof > 0)
    cost = np.where(possible, each.cost, np.inf).reshape(frames, count)
    best = cost.argmin(1)
    row = np.arange(frames)
    fits = np.where(possible, consistency(each), 0.0).reshape(frames, count)[row, best] >= risks.false_alarm
    with np.errstate(invalid="ignore"):
        odds = np.nan_to_num(np.exp(-(cost - cost[row, best][:, None]) / 2))
    odds[row, best] = 0.0
    # A point that cannot be left out cannot be cleared either.
    odds = np.where(mask & ~np.isfinite(cost), 1.0, odds)
    verdict = np.where(odds.max(1) < risks.odds, int(Verdict.MENDED), int(Verdict.UNCLEAR))
    verdict = np.where(fits, verdict, int(Verdict.CONTRADICTION))
    risk = risks.integrity / len(axes) / (mask.sum(1) + 1)[:, None] / risks.fault_probability
    position = each.position.reshape(frames, count, 3)
    spread = np.sqrt(_along(each.covariance.reshape(frames, count, 6, 6)[..., :3, :3], axes))
    apart = np.abs((position - position[row, best][:, None]) @ axes.T)
    counted = (odds > risk)[..., None]
    other = apart + _tail(risk[..., None] / np.where(counted, odds[..., None], 1.0)) * spread
    level = np.maximum(np.where(counted, other, 0.0).max(1), _tail(risk / 2) * spread[row, best])
    level = np.where((verdict == Verdict.MENDED)[:, None], level, np.inf)
    return np.where(verdict == Verdict.MENDED, best, -1), verdict, level


def _along(covariance: Array, axes: Array) -> Array:
    """Variances (..., A) of covariances (..., 3, 3) along axes (A, 3)."""
    return np.maximum(np.einsum("ai,...ij,aj->...a", axes, covariance, axes), 0.0)


def _tail(probability: Array) -> Array:
    """Standard deviations beyond which a normal error lies with these probabilities, never under zero."""
    return np.asarray(-ndtri(np.minimum(probability, 0.5)))


def check_risk(name: str, value: float) -> None:
    """Refuse what is no probability strictly between 0 and 1."""
    if not 0 < value < 1:
        raise HaloposeError(f"{name} must lie between 0 and 1, got {value}")
