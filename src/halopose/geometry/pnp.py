"""Covariance-weighted PnP (paper, appendix on 6-DoF pose estimation), for many frames at once.

In: runway points (K, 3), their pixels (N, K, 2) with covariances (N, K, 2, 2), perhaps attitudes (N, 3, 3).
Out: poses with 6x6 covariances, chi-square costs and, where there is no trustworthy answer, the reason why.

``pnp_start`` finds where to begin, ``pnp_refine`` the minimum from there; here inputs and answers are checked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from halopose.errors import HaloposeError
from halopose.geometry.camera import Array, Camera, normalise, skew
from halopose.geometry.pnp_refine import Fit, Mask, Pose, Problem, damped, evaluate, refine
from halopose.geometry.pnp_start import collinear, first_poses, principal, with_linear_position

_APART = 2.0  # standard deviations that the camera must be above the plane, and corners spread if suspect
_SUSPECT = 25.0  # chi-square beyond which a pose does not explain the pixels
_MIN_ASPECT = 1e-10  # det / trace^2 under which a keypoint's covariance counts as singular
_MAX_SPREAD = 0.5  # standard deviation of log depth and of the angles beyond which linearisation says nothing
_LIMITS = np.array([_MAX_SPREAD**2] * 3 + [np.inf] * 2 + [_MAX_SPREAD**2])
_MAX_INFLATION = 1e11  # of a variance by its correlation with the others, beyond which inversion is noise
SAME = 1e-4  # squared distance, in standard deviations, within which two minima are one


class Failure(IntEnum):
    """Why a frame has no pose."""

    NONE = 0
    TOO_FEW_POINTS = 1
    NOT_FINITE = 2
    BAD_COVARIANCE = 3
    DEGENERATE = 4
    BEHIND_CAMERA = 5
    NOT_CONVERGED = 6
    ILL_CONDITIONED = 7
    BELOW_GROUND = 8

    @property
    def reason(self) -> str:
        return _REASONS[self]


_REASONS = {
    Failure.NONE: "solved",
    Failure.TOO_FEW_POINTS: "too few points: the pose takes four, the position alone two",
    Failure.NOT_FINITE: "a pixel, a covariance or the attitude is not finite, or a pixel is off the lens",
    Failure.BAD_COVARIANCE: "a keypoint's covariance is not symmetric and positive definite",
    Failure.DEGENERATE: "the points are coincident or collinear, exactly or within their noise",
    Failure.BEHIND_CAMERA: "the points would lie behind the camera",
    Failure.NOT_CONVERGED: "the search found no minimum",
    Failure.ILL_CONDITIONED: "the points do not determine the pose: the linearised spread says nothing",
    Failure.BELOW_GROUND: "the camera would be below the runway: corners may be swapped",
}


@dataclass(frozen=True)
class Minimum:
    """A pose (N, 3, 3), (N, 3) of least cost (N,); NaN, NaN and infinite where there is none."""

    rotation: Array
    position: Array
    cost: Array


@dataclass(frozen=True)
class Solution(Minimum):
    """The best minimum, with its covariance (N, 6, 6) in runway axes, positions first.

    The covariance is NaN where the frame failed; its attitude part is zero where the attitude was given.
    ``cost`` (N,) is the chi-square of the residuals, or the Student-t's counterpart, with ``dof`` (N,) degrees
    of freedom. ``alternative`` is the other pose that the same plane allows, refined as well.
    """

    covariance: Array
    dof: NDArray[np.int64]
    failure: NDArray[np.int64]
    alternative: Minimum

    @property
    def converged(self) -> Mask:
        """Which frames have a pose (N,)."""
        return self.failure == 0

    @property
    def reasons(self) -> list[str]:
        """What became of each frame, in words."""
        return [Failure(code).reason for code in self.failure.tolist()]

    @property
    def ambiguity(self) -> Array:
        """Cost over the alternative's (N,): 0 if there is no other pose, 1 if both fit alike."""
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = self.cost / self.alternative.cost
        return np.where(self.alternative.cost > 0, np.nan_to_num(ratio), 1.0)


@np.errstate(all="ignore")  # trial steps may leave all bounds, and frames without an answer are NaN throughout
def solve_pose(
    camera: Camera,
    points: Array,
    pixels: Array,
    covariance: Array,
    *,
    mask: Mask | None = None,
    nu: Array | None = None,
    start: tuple[Array, Array] | None = None,
    ground: bool = True,
) -> Solution:
    """Rotation and position of cameras from four or more points (K, 3) or (N, K, 3) and their pixels (N, K, 2).

    ``covariance`` (N, K, 2, 2) is in pixel^2. ``mask`` (N, K) keeps points where it is true. With ``nu`` (K,)
    or (N, K) the residuals follow a Student-t with ``covariance`` as scale matrix, tau included. ``start``,
    rotation (N, 3, 3) and position (N, 3), replaces the two poses that the plane through the points allows.
    ``ground``: the points lie on the ground (z up), so that a camera below them is refused.
    """
    _check_shapes(points, pixels, covariance, mask, nu, None if start is None else start[0])
    problem, failure = _prepare(camera, points, pixels, covariance, mask, nu, 4)
    if start is not None:
        first = Pose.at(start[0].transpose(1, 2, 0).copy(), start[1].T, problem.centre)
        return _minimise(problem, first, 6, failure, ground)
    extent, axes = principal(problem)
    failure[collinear(extent) & (failure == 0)] = Failure.DEGENERATE
    return _minimise(*first_poses(problem, extent, axes, failure > 0), 6, failure, ground)


@np.errstate(all="ignore")
def solve_position(
    camera: Camera,
    points: Array,
    pixels: Array,
    covariance: Array,
    rotation: Array,
    *,
    mask: Mask | None = None,
    nu: Array | None = None,
) -> Solution:
    """Position alone, from two or more points, with the rotation (N, 3, 3), runway to camera, given (IRS)."""
    _check_shapes(points, pixels, covariance, mask, nu, rotation)
    problem, failure = _prepare(camera, points, pixels, covariance, mask, nu, 2)
    if not np.isfinite(rotation).all():
        failure[~np.isfinite(rotation).all((1, 2))] = Failure.NOT_FINITE
    return _minimise(problem, with_linear_position(problem, rotation.transpose(1, 2, 0).copy()), 3, failure, True)


def _check_shapes(
    points: Array, pixels: Array, covariance: Array, mask: Mask | None, nu: Array | None, rotation: Array | None
) -> None:
    if pixels.ndim != 3:
        raise HaloposeError(f"pixels should have shape (N, K, 2), got {pixels.shape}")
    frames, count = pixels.shape[:2]
    expected: list[tuple[str, Array | Mask | None, tuple[tuple[int, ...], ...]]] = [
        ("pixels", pixels, ((frames, count, 2),)),
        ("points", points, ((count, 3), (frames, count, 3))),
        ("covariances", covariance, ((frames, count, 2, 2),)),
        ("the mask", mask, ((frames, count),)),
        ("nu", nu, ((count,), (frames, count))),
        ("rotations", rotation, ((frames, 3, 3),)),
    ]
    for name, array, shapes in expected:
        if array is not None and array.shape not in shapes:
            raise HaloposeError(f"{name} should have shape {' or '.join(map(str, shapes))}, got {array.shape}")
    if not math.isfinite(points.sum()):
        raise HaloposeError("the runway points must be finite, also those that are masked out")


def _prepare(
    camera: Camera,
    points: Array,
    pixels: Array,
    covariance: Array,
    mask: Mask | None,
    nu: Array | None,
    needed: int,
) -> tuple[Problem, NDArray[np.int64]]:
    """Whiten and centre; the failures (N,) tell which frames cannot be solved."""
    offset, focal = camera.centre_and_focal
    observed = (pixels.transpose(2, 1, 0) - offset) / focal
    plain = normalise(camera, pixels).transpose(2, 1, 0) if camera.distorted else observed
    whitening, trace, definite = _whitening(camera, covariance)
    placed = points.T[..., None] if points.ndim == 2 else points.transpose(2, 1, 0)
    failure = np.zeros(len(pixels), dtype=np.int64)
    if mask is None:
        kept = np.full(len(pixels), points.shape[-2])
        share = np.full((points.shape[-2], 1), 1 / points.shape[-2])
        lowest = np.minimum.reduce(placed[2])
    else:
        kept = mask.sum(1)
        share = mask.T / np.maximum(kept, 1)
        lowest = np.where(mask.T, placed[2], np.inf).min(0)
    if mask is not None or points.shape[-2] < needed or not (definite.all() and np.isfinite(plain).all()):
        used = share > 0
        finite = np.isfinite(plain).all(0) & np.isfinite(covariance).all((2, 3)).T
        failure[(definite < used).any(0)] = Failure.BAD_COVARIANCE
        failure[(finite < used).any(0)] = Failure.NOT_FINITE
        failure[kept < needed] = Failure.TOO_FEW_POINTS
        observed, plain, whitening = (np.where(used, array, 0.0) for array in (observed, plain, whitening))
        whitening[..., failure > 0] = np.nan
    centre = np.add.reduce(placed * share, 1)
    placed = placed - centre[:, None]
    if mask is not None:
        placed = np.where(mask.T, placed, 0.0)  # what is not used goes to the centre, which is always in front
    tails = None if nu is None else nu[:, None] if nu.ndim == 1 else nu.T
    seen = (observed, plain, whitening, share, trace, kept, tails)
    return Problem(camera, placed, centre, lowest, *seen), failure


def _whitening(camera: Camera, covariance: Array) -> tuple[Array, Array, Mask]:
    """Entries 11, 22, 21 (3, K, N) of L^-1 diag(fx, fy), traces (K, N), and which are positive definite (K, N)."""
    xx, xy, yx, yy = covariance.reshape(*covariance.shape[:2], 4).transpose(2, 1, 0)
    determinant, trace = xx * yy - xy * yx, xx + yy
    definite = (determinant > _MIN_ASPECT * trace * trace) & (xx > 0) & (np.abs(xy - yx) <= 1e-6 * trace)
    first, area = np.sqrt(xx), np.sqrt(determinant)
    whitening = np.empty((3, *xx.shape))
    np.divide(camera.fx, first, out=whitening[0])
    np.divide(camera.fy * first, area, out=whitening[1])
    np.divide(-camera.fx * xy, first * area, out=whitening[2])
    return whitening, trace, definite


def _minimise(problem: Problem, first: Pose, free: int, failure: NDArray[np.int64], ground: bool) -> Solution:
    """Refine one or two candidates for each frame, and answer with the better one that is valid."""
    fit, converged = refine(problem, first, free)
    turn, offset = fit.pose.unpacked()
    covariance, sound = _covariance(_information(problem, fit, free), turn, offset)
    position = (problem.centre - np.einsum("ijn,in->jn", turn, offset)).T
    rotation, cost = turn.transpose(2, 0, 1), fit.cost
    # From pixels alone a runway seen edge-on looks the same from above and from below.
    margin = _APART * np.sqrt(covariance[:, 2, 2]) * (1 if free == 6 else -1)
    height = position[:, 2] - problem.lowest if ground else np.full(len(position), np.inf)
    valid = (height > margin) & sound & converged
    if not (cost < _SUSPECT).all():
        valid &= (cost < _SUSPECT) | _stand_apart(problem, free)
    dof = 2 * problem.kept - free
    if len(valid) == len(failure) and valid.all() and not failure.any():
        nowhere = Minimum(rotation * np.nan, position * np.nan, np.full_like(cost, np.inf))
        return Solution(rotation, position, cost, covariance, dof, failure, nowhere)
    code = np.where(height > -np.abs(margin), Failure.DEGENERATE, Failure.BELOW_GROUND)
    lost = np.isnan(cost)
    code[~sound] = Failure.ILL_CONDITIONED
    code[~converged] = Failure.NOT_CONVERGED
    code[lost] = Failure.BEHIND_CAMERA
    if lost.any():
        code[lost & ~_stand_apart(problem, free)] = Failure.DEGENERATE
    code[valid] = Failure.NONE
    return _choose(rotation, position, np.where(valid, cost, np.inf), covariance, dof, failure, code)


def _stand_apart(problem: Problem, free: int) -> Mask:
    """Whether pixels spread more than their noise (N,): both ways for a pose, along a line for a position."""
    pixels = problem.observed * problem.camera.centre_and_focal[1]
    pixels = pixels - np.add.reduce(pixels * problem.share, 1)[:, None]
    (xx, xy), (_, yy) = np.einsum("ikn,jkn->ijn", pixels * problem.share, pixels)
    half_gap = np.hypot((xx - yy) / 2, xy)
    variance = (xx + yy) / 2 + (half_gap if free == 3 else -half_gap)
    noise = np.where(problem.share > 0, problem.trace / 2, 0.0) * problem.share
    return np.asarray(variance > _APART**2 * noise.sum(0))


def _choose(
    rotation: Array,
    position: Array,
    cost: Array,
    covariance: Array,
    dof: NDArray[np.int64],
    failure: NDArray[np.int64],
    code: NDArray[np.int64],
) -> Solution:
    """The cheaper of one or two candidates of each frame, the other one as its alternative; NaN for failures."""
    frames = len(failure)
    swap = cost[-frames:] < cost[:frames]
    best = np.arange(frames) + swap * (len(cost) - frames)
    other = np.arange(frames) + ~swap * (len(cost) - frames)
    failure = np.where(failure == 0, code[best], failure)
    distance = np.square(position[other] - position[best]).sum(1)
    apart = distance > SAME * covariance[best, :3, :3].trace(0, 1, 2)
    second = _blank((failure > 0) | (code[other] > 0) | ~apart, rotation[other], position[other])
    cost_of_second = np.where(np.isnan(second[1][:, 0]), np.inf, cost[other])
    first = _blank(failure > 0, rotation[best], position[best], covariance[best])
    cost = np.where(failure == 0, cost[best], np.inf)
    alternative = Minimum(second[0], second[1], cost_of_second)
    return Solution(first[0], first[1], cost, first[2], dof, failure, alternative)


def _blank(frames: Mask, *arrays: Array) -> list[Array]:
    """Arrays (N, ...) with NaN in some frames."""
    return [np.where(frames.reshape(-1, *[1] * (array.ndim - 1)), np.nan, array) for array in arrays]


def _outward() -> Array:
    """Coefficients (3, 18): the centre in camera axes to minus its change (3, 6) with the six unknowns.

    Turning by w moves it by w x itself; the bearing by its depth; the log inverse depth by minus itself.
    """
    table = np.zeros((3, 3, 6))
    table[..., :3] = -skew(np.eye(3))
    table[2, 0, 3] = table[2, 1, 4] = -1.0
    table[..., 5] = np.eye(3)
    return table.reshape(3, 18)


_OUTWARD = _outward()


def _information(problem: Problem, fit: Fit, free: int) -> Array:
    """Normal matrix for the covariance; under a Student-t, that of Gaussians with its second moments.

    Not the weights of the last step, nor the Fisher information: both promise too much of so few points.
    """
    if problem.nu is None:
        return fit.normal
    whitening = problem.whitening * np.sqrt(np.maximum(1 - 2 / problem.nu, 0))
    return evaluate(problem._replace(nu=None, whitening=whitening), fit.pose, free).normal


def _covariance(normal: Array, rotation: Array, offset: Array) -> tuple[Array, Mask]:
    """Covariances (N, 6, 6) of the poses in runway axes, and which of them mean something (N,)."""
    size = len(normal) - 1
    information = normal[:size, :size].transpose(2, 0, 1)
    try:
        inner = np.linalg.inv(information)
    except np.linalg.LinAlgError:
        inner = np.linalg.inv(damped(information))
    variance = inner.diagonal(axis1=1, axis2=2)
    limit = np.minimum(_MAX_INFLATION / information.diagonal(axis1=1, axis2=2), _LIMITS[-size:])
    sound = (variance <= limit) & (variance > 0)
    inward = rotation.transpose(2, 1, 0)
    change = (offset.T @ _OUTWARD).reshape(-1, 3, 6)
    outer = np.zeros((len(inner), 6, size))
    np.matmul(inward, change[..., -size:], out=outer[:, :3])
    if size == 6:
        np.negative(inward, out=outer[:, 3:, :3])
    return outer @ inner @ outer.transpose(0, 2, 1), np.asarray(sound.all(1))
