"""Is a vision position to be trusted: consistency of the corners, exclusion of one, protection levels.

In: what ``pnp`` takes, and the risks that may be run. Out: probabilities (N,), masks (N, K) and bounds in metres.

Protection levels follow solution separation. For each axis q, with s0 the standard deviation of the solution from
all K points, sk that of the one without point k, and sk^2 - s0^2 the variance of their difference,

    T_k = Qinv(false_alarm / (2 K)) max(sqrt(sk^2 - s0^2), sk / 10)
    PL  = max(Qinv(r / 2) s0, max_k T_k + Qinv(r / fault_probability) sk),    r = risk of the axis / (K + 1)

so that a point faulty with ``fault_probability``, wrong by any amount, leads to an error beyond PL without a
separation beyond its T_k no more often than the risk. One fault at a time is covered, faults that share a cause
(a wrong runway, a wrong camera model) are not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from halopose.errors import HaloposeError
from halopose.geometry.attitude import solve_with_attitude
from halopose.geometry.camera import Array, Camera
from halopose.geometry.pnp import Mask, Solution, solve_pose, solve_position

_SMALLEST = 0.1  # of sk: linearisation does not tell smaller separations from none
_AXES = np.array([0.25, 0.25, 0.5])  # how the risk is shared among x, y and z


@dataclass(frozen=True)
class Exclusion:
    """The solution after leaving out at most one point, the points kept (N, K), and which was left out (N,).

    ``excluded`` is -1 where none was; ``consistent`` (N,) says whether what is left fits together.
    """

    solution: Solution
    mask: Mask
    excluded: NDArray[np.int64]
    consistent: Mask


@dataclass(frozen=True)
class Protection:
    """Bounds (N,) in metres that the error passes unnoticed no more often than the risk.

    ``separation`` and ``threshold`` (N, K, 3) compare the solution with those without each point; a frame is
    ``alarmed`` (N,) if one of its separations is beyond its threshold, and its levels then hold no promise.
    Levels are infinite where the solution, or one without a point, fails.
    """

    horizontal: Array
    vertical: Array
    separation: Array
    threshold: Array
    alarmed: Mask


def consistency(solution: Solution) -> Array:
    """Probability (N,) of corner residuals at least this large, by the chi-square of ``cost`` and ``dof``.

    It is one without degrees of freedom, when nothing can be checked, and zero where there is no solution. Low
    values mean that the corners, their covariances, the runway or the camera are wrong; high ones prove nothing.
    """
    probability = stats.chi2.sf(np.where(solution.converged, solution.cost, 0.0), np.maximum(solution.dof, 1))
    return np.where(solution.converged, np.where(solution.dof > 0, probability, 1.0), 0.0)


def ambiguous(solution: Solution, odds: float = 1e-3) -> Mask:
    """Whether the other pose of the plane (N,) is more than ``odds`` times as likely as the chosen one."""
    with np.errstate(invalid="ignore"):
        gap = solution.alternative.cost - solution.cost
    return solution.converged & (gap < -2 * np.log(odds))


def exclude(
    camera: Camera,
    points: Array,
    pixels: Array,
    covariance: Array,
    rotation: Array | None = None,
    *,
    attitude: Array | None = None,
    mask: Mask | None = None,
    false_alarm: float = 1e-3,
) -> Exclusion:
    """Leave out the one point without which the others fit best, in frames that are not consistent.

    The arguments are those of ``solve_pose`` or, with ``rotation``, ``solve_position``; with that rotation's
    covariance too, ``attitude`` (N, 3, 3), those of ``solve_with_attitude``. A frame is inconsistent if its
    probability is under ``false_alarm``; at 0 none is. Leaving a point out must keep a degree of freedom to
    check what is left: three points for a position, and five to begin with for a pose.
    """
    if false_alarm:
        check_risk("false_alarm", false_alarm)
    mask = np.ones(pixels.shape[:2], dtype=bool) if mask is None else mask
    whole = _solve(camera, points, pixels, covariance, rotation, attitude, mask)
    wrong = np.flatnonzero(consistency(whole) < false_alarm)
    excluded = np.full(len(pixels), -1)
    if len(wrong):
        turned, known = (None if each is None else each[wrong] for each in (rotation, attitude))
        placed = points if points.ndim == 2 else points[wrong]
        without = _without_each(camera, placed, pixels[wrong], covariance[wrong], turned, known, mask[wrong])
        probability = np.where(without.dof > 0, consistency(without), 0.0).reshape(-1, pixels.shape[1])
        best = probability.argmax(1)
        mended = probability.max(1) >= false_alarm
        excluded[wrong[mended]] = best[mended]
        mask = mask.copy()
        mask[wrong[mended], best[mended]] = False
    solution = (
        whole if (excluded < 0).all() else _solve(camera, points, pixels, covariance, rotation, attitude, mask)
    )
    return Exclusion(solution, mask, excluded, consistency(solution) >= false_alarm)


def protection_levels(
    camera: Camera,
    points: Array,
    pixels: Array,
    covariance: Array,
    rotation: Array | None = None,
    *,
    attitude: Array | None = None,
    mask: Mask | None = None,
    integrity_risk: float = 1e-7,
    fault_probability: float = 1e-3,
    false_alarm: float = 1e-3,
) -> Protection:
    """Horizontal and vertical protection levels of the camera's position, as the module's docstring defines them.

    Half of ``integrity_risk`` goes to the vertical axis, a quarter to each of the others; the horizontal level is
    the root of the squares of both. ``fault_probability`` is that of one point being wrong beyond its covariance.
    """
    for name, risk in (
        ("integrity_risk", integrity_risk), ("fault_probability", fault_probability), ("false_alarm", false_alarm),
    ):  # fmt: skip
        check_risk(name, risk)
    mask = np.ones(pixels.shape[:2], dtype=bool) if mask is None else mask
    count = np.maximum(mask.sum(1), 1)[:, None, None]
    whole = _solve(camera, points, pixels, covariance, rotation, attitude, mask)
    without = _without_each(camera, points, pixels, covariance, rotation, attitude, mask)
    shape = (*mask.shape, 3)
    deviation = _deviation(whole)[:, None]
    others = np.where(mask[..., None], _deviation(without).reshape(shape), deviation)
    separation = np.abs(without.position.reshape(shape) - whole.position[:, None])
    separation = np.where(mask[..., None], separation, 0.0)
    with np.errstate(invalid="ignore"):  # infinite deviations, where there is no solution
        apart = np.maximum(others**2 - deviation**2, np.square(_SMALLEST * others))
        difference = np.nan_to_num(np.sqrt(apart), nan=np.inf, posinf=np.inf)
    threshold = stats.norm.isf(false_alarm / (2 * count)) * difference
    risk = integrity_risk * _AXES / (count + 1)
    faulty = threshold + stats.norm.isf(np.minimum(risk / fault_probability, 0.5)) * others
    level = np.nan_to_num(np.maximum(stats.norm.isf(risk / 2) * deviation, faulty), nan=np.inf, posinf=np.inf).max(
        1
    )
    alarmed = (separation > threshold).any((1, 2)) & whole.converged
    return Protection(np.hypot(level[:, 0], level[:, 1]), level[:, 2], separation, threshold, alarmed)


def _solve(
    camera: Camera,
    points: Array,
    pixels: Array,
    covariance: Array,
    rotation: Array | None,
    attitude: Array | None,
    mask: Mask,
) -> Solution:
    if rotation is None:
        return solve_pose(camera, points, pixels, covariance, mask=mask)
    if attitude is None:
        return solve_position(camera, points, pixels, covariance, rotation, mask=mask)
    return solve_with_attitude(camera, points, pixels, covariance, rotation, attitude, mask=mask)


def _without_each(
    camera: Camera,
    points: Array,
    pixels: Array,
    covariance: Array,
    rotation: Array | None,
    attitude: Array | None,
    mask: Mask,
) -> Solution:
    """Solutions (N * K) that leave out each point in turn, frame by frame."""
    count = pixels.shape[1]

    def repeat(array: Array | None) -> Array | None:
        return None if array is None else np.repeat(array, count, axis=0)

    left = (mask[:, None] & ~np.eye(count, dtype=bool)).reshape(-1, count)
    placed = points if points.ndim == 2 else np.repeat(points, count, axis=0)
    seen, spread = np.repeat(pixels, count, axis=0), np.repeat(covariance, count, axis=0)
    return _solve(camera, placed, seen, spread, repeat(rotation), repeat(attitude), left)


def _deviation(solution: Solution) -> Array:
    """Standard deviations of the position (N, 3), infinite where there is none."""
    variance = np.diagonal(solution.covariance, axis1=1, axis2=2)[:, :3]
    return np.where(solution.converged[:, None], np.sqrt(variance), np.inf)


def check_risk(name: str, value: float) -> None:
    """Refuse what is no probability strictly between 0 and 1."""
    if not 0 < value < 1:
        raise HaloposeError(f"{name} must lie between 0 and 1, got {value}")


__all__ = ["Exclusion", "Protection", "ambiguous", "check_risk", "consistency", "exclude", "protection_levels"]
