"""Covariance-weighted PnP (paper, appendix on 6-DoF pose estimation), for many frames at once.

In: runway points (K, 3), their pixels (N, K, 2) with covariances (N, K, 2, 2), perhaps attitudes (N, 3, 3).
Out: poses with 6x6 covariances, chi-square costs and, where there is no trustworthy answer, the reason why.

Inside, a pose is (turn, bearing): a point at x from the kept points' centre lies along turn @ x + bearing, where
bearing = (b1, b2, 1) and turn is the rotation over the centre's depth. The projection is linear in the bearing
and almost so in the inverse depth, so that undamped steps seldom fail even far away. Arrays are
component-first and frame-last, (3, K, N): every numpy call then works on long rows, or on few numbers if N is 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halopose.errors import HaloposeError
from halopose.landing import scalar
from halopose.landing.camera import Array, Camera, distort, distort_jacobian, normalise, skew

Mask = NDArray[np.bool_]

_MAX_STEPS = 30
_MAX_REWEIGHTED_STEPS = 200  # reweighting converges only linearly
_GAIN = 1e-7  # chi-square that the last step may still gain: 3e-4 standard deviations, most of which it takes away
_RELATIVE_GAIN = 1e-6  # the same relative to the cost
_FIRST_DAMPING = 1e-3
_FEW = 4  # poses up to which plain floats beat numpy
_MANY = 200  # poses from which elimination in numpy beats a call of LAPACK for each
_MAX_DAMPING = 1e12
_FLOOR = 1e-14  # relative damping that keeps a pivot from being exactly zero
_TINY = 1e-300  # the same where a whole column is zero; the step is then absurd and refused
_PLANAR = 0.01  # thickness^2 / width^2 under which points start from the plane through them
_COLLINEAR = 1e-8  # width^2 / length^2 of the points under which they are a line
_APART = 2.0  # standard deviations that the camera must be above the plane, and corners spread if suspect
_SUSPECT = 25.0  # chi-square beyond which a pose does not explain the pixels
_MIN_ASPECT = 1e-10  # det / trace^2 under which a keypoint's covariance counts as singular
_MAX_SPREAD = 0.5  # standard deviation of log depth and of the angles beyond which linearisation says nothing
_LIMITS = np.array([_MAX_SPREAD**2] * 3 + [np.inf] * 2 + [_MAX_SPREAD**2])
_MAX_INFLATION = 1e11  # of a variance by its correlation with the others, beyond which inversion is noise
_SAME = 1e-4  # squared distance, in standard deviations, within which two minima are one


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
) -> Solution:
    """Rotation and position of cameras from four or more points (K, 3) or (N, K, 3) and their pixels (N, K, 2).

    ``covariance`` (N, K, 2, 2) is in pixel^2. ``mask`` (N, K) keeps points where it is true. With ``nu`` (K,)
    or (N, K) the residuals follow a Student-t with ``covariance`` as scale matrix, tau included. ``start``,
    rotation (N, 3, 3) and position (N, 3), replaces the two poses that the plane through the points allows.
    """
    _check_shapes(points, pixels, covariance, mask, nu, None if start is None else start[0])
    problem, failure = _prepare(camera, points, pixels, covariance, mask, nu, 4)
    if start is not None:
        first = _Pose.at(start[0].transpose(1, 2, 0).copy(), start[1].T, problem.centre)
        return _minimise(problem, first, 6, failure)
    extent, axes = _principal(problem)
    failure[(extent[1] <= _COLLINEAR * extent[0]) & (failure == 0)] = Failure.DEGENERATE
    if ((extent[2] <= _PLANAR * extent[1]) | (failure > 0)).all():
        rotations = _planar_rotations(problem, extent, axes)
        problem = problem.take(np.tile(np.arange(len(failure)), 2))
    else:
        rotations = _general_rotations(problem, failure)
    return _minimise(problem, _with_linear_position(problem, rotations), 6, failure)


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
    return _minimise(problem, _with_linear_position(problem, rotation.transpose(1, 2, 0).copy()), 3, failure)


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


# --- the problem ------------------------------------------------------------------------------------------


class _Problem(NamedTuple):
    """What is observed, frame last; a last axis of length 1 serves every frame."""

    camera: Camera
    points: Array  # (3, K, N), from the centre of the kept ones; zero if masked out
    centre: Array  # (3, N)
    lowest: Array  # (N,): height of the lowest kept point
    observed: Array  # (2, K, N), normalised but still distorted
    plain: Array  # (2, K, N), without distortion
    whitening: Array  # (3, K, N): entries 11, 22, 21 of L^-1 diag(fx, fy); zero if masked out, NaN in bad frames
    share: Array  # (K, N): one over the number of kept points, zero where masked out
    trace: Array  # (K, N) of the covariances, in pixel^2
    kept: NDArray[np.int64]  # (N,): number of kept points
    nu: Array | None  # (K, N)

    def take(self, frames: NDArray[np.intp]) -> _Problem:
        """The frames of an index, in its order."""

        def of(array: Array) -> Array:
            return array if array.shape[-1] == 1 else array[..., frames]

        return _Problem(
            self.camera, of(self.points), of(self.centre), of(self.lowest), of(self.observed), of(self.plain),
            of(self.whitening), of(self.share), of(self.trace), self.kept,
            None if self.nu is None else of(self.nu),
        )  # fmt: skip


def _prepare(
    camera: Camera,
    points: Array,
    pixels: Array,
    covariance: Array,
    mask: Mask | None,
    nu: Array | None,
    needed: int,
) -> tuple[_Problem, NDArray[np.int64]]:
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
    return _Problem(camera, placed, centre, lowest, *seen), failure


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


# --- refinement -------------------------------------------------------------------------------------------


class _Pose(NamedTuple):
    """Turn (3, 3, N), the rotation over the depth of the centre, and bearing (3, N), whose last row is 1."""

    turn: Array
    bearing: Array

    @classmethod
    def at(cls, rotation: Array, position: Array, centre: Array) -> _Pose:
        offset = np.einsum("ijn,jn->in", rotation, centre - position)
        depth = np.where(offset[2] > 0, offset[2], np.nan)
        return cls(rotation / depth, offset / depth)

    def moved(self, step: Array) -> _Pose:
        """After a step (6, N) in rotation, bearing and log inverse depth, or (3, N) without the rotation."""
        bearing = self.bearing.copy()
        bearing[:2] += step[-3:-1]
        growth = np.exp(step[-1])
        if len(step) == 3:
            return _Pose(self.turn * growth, bearing)
        quaternion = np.empty((4, 1, step.shape[1]))
        quaternion[0] = 1.0
        np.multiply(step[:3, None], 0.5, out=quaternion[1:])
        change = _QUATERNION @ (quaternion * quaternion[:, 0]).reshape(16, -1)
        growth /= change[9]
        change *= growth
        return _Pose(np.einsum("ijn,jkn->ikn", change[:9].reshape(3, 3, -1), self.turn), bearing)

    def take(self, frames: NDArray[np.intp]) -> _Pose:
        return _Pose(self.turn[..., frames], self.bearing[:, frames])

    def unpacked(self) -> tuple[Array, Array]:
        """Rotations (3, 3, N) and the centre in camera axes (3, N)."""
        depth = 1 / np.sqrt(np.add.reduce(self.turn[:, 0] * self.turn[:, 0]))
        return self.turn * depth, self.bearing * depth


class _Fit(NamedTuple):
    """A pose on its way to the minimum."""

    pose: _Pose
    normal: Array  # (P + 1, P + 1, N): products of the whitened Jacobian's columns and the residual
    cost: Array  # (N,)

    def take(self, frames: NDArray[np.intp]) -> _Fit:
        return _Fit(self.pose.take(frames), self.normal[..., frames], self.cost[frames])

    def put(self, frames: NDArray[np.intp], other: _Fit) -> None:
        """Overwrite frames with another's, in place."""
        for mine, theirs in zip((*self.pose, *self[1:]), (*other.pose, *other[1:]), strict=True):
            mine[..., frames] = theirs


def _quaternion() -> Array:
    """Coefficients (10, 16): a quaternion's products q_i q_j to its rotation matrix and its squared length."""
    table = np.zeros((10, 4, 4))
    table[9] = np.eye(4)
    for i, j, k in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        table[4 * i] = np.diag([1.0, -1.0, -1.0, -1.0])
        table[4 * i, i + 1, i + 1] = 1.0
        table[3 * i + j, i + 1, j + 1] = table[3 * j + i, i + 1, j + 1] = 2.0
        table[3 * i + j, 0, k + 1], table[3 * j + i, 0, k + 1] = -2.0, 2.0
    return table.reshape(10, 16)


def _jacobian() -> Array:
    """Coefficients (12, 12) of d (u, v) / d (rotation, bearing, log inverse depth).

    They multiply the products of (1, z1, z2, z3) / depth and (u, v, 1), where z is the turned point.
    """
    table = np.zeros((6, 2, 4, 3))
    point = np.zeros((2, 3, 4, 3))  # d (u, v) / d (depth * z)
    for row in range(2):
        point[row, row, :, 2] = 1.0
        point[row, 2, :, row] = -1.0
        table[3 + row, row, 0, 2] = 1.0
        for axis in range(3):
            table[5, row, axis + 1] += point[row, axis, axis + 1]
        for i, j, k in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):  # turning about axis i moves zj by -zk and zk by zj
            table[i, row, k + 1] -= point[row, j, k + 1]
            table[i, row, j + 1] += point[row, k, j + 1]
    return table.reshape(12, 12)


_QUATERNION = _quaternion()
_JACOBIAN = _jacobian()


def _evaluate(problem: _Problem, pose: _Pose, free: int) -> _Fit:
    """Linearise the whitened residuals in the last ``free`` unknowns; the cost is NaN behind the camera."""
    turned = np.einsum("ijn,jkn->ikn", pose.turn, problem.points)
    image = turned + pose.bearing[:, None]
    inverse = 1 / np.sqrt(image[2])  # of a negative depth there is no root
    inverse *= inverse
    image *= inverse  # (u, v, 1)
    parts = np.empty((4, 1, *inverse.shape))
    parts[0, 0] = inverse
    np.multiply(turned, inverse, out=parts[1:, 0])
    columns = np.empty((free + 1, 2, *inverse.shape))
    np.matmul(_JACOBIAN[-2 * free :], (parts * image).reshape(12, -1), out=columns[:free].reshape(2 * free, -1))
    if problem.camera.distorted:
        image = _through_lens(problem.camera, image, columns[:free])
    np.subtract(problem.observed, image[:2], out=columns[free])
    _whiten(columns, problem.whitening)
    if problem.nu is None:
        normal = _products(columns)
        return _Fit(pose, normal, normal[free, free].copy())
    cost = _reweight(columns, problem.nu)
    return _Fit(pose, _products(columns), cost)


def _through_lens(camera: Camera, image: Array, columns: Array) -> Array:
    """Distorted (u, v) (2, K, N); the columns (P, 2, K, N) follow in place."""
    u, v = image[:2]
    xx, xy, yy = distort_jacobian(u, v, camera.distortion)
    first, second = columns[:, 0].copy(), columns[:, 1].copy()
    columns[:, 0] = xx * first + xy * second
    columns[:, 1] = xy * first + yy * second
    return np.stack(distort(u, v, camera.distortion))


def _whiten(columns: Array, whitening: Array) -> None:
    """Multiply columns (P, 2, K, N) by lower-triangular factors (3, K, N), in place."""
    shear = columns[:, 0] * whitening[2]
    columns *= whitening[:2]
    columns[:, 1] += shear


def _reweight(columns: Array, nu: Array) -> Array:
    """Weigh whitened columns (P + 1, 2, K, N) for a step of reweighted least squares; the Student-t's cost (N,).

    The cost, sum (nu + 2) log(1 + m / nu), is twice the negative log-likelihood less a constant, and tends to
    the chi-square as nu grows.
    """
    distance = np.square(columns[-1]).sum(0)
    columns *= np.sqrt((nu + 2) / (nu + distance))
    return ((nu + 2) * np.log1p(distance / nu)).sum(0)


def _products(columns: Array) -> Array:
    """Inner products (P, P, N) of columns (P, 2, K, N)."""
    size, two, count, frames = columns.shape
    flat = columns.reshape(size, two * count, frames)
    return np.einsum("imn,jmn->ijn", flat, flat)


def _solve(normal: Array, damping: Array | None = None) -> tuple[Array, Array]:
    """Step (P, N) of a normal matrix (P + 1, P + 1, N), and how much chi-square it promises to gain (N,)."""
    size, frames = len(normal) - 1, normal.shape[-1]
    system = normal.transpose(2, 0, 1)
    if damping is not None:
        system = _damped(system, damping)
    step = _eliminate(system.transpose(1, 2, 0)) if frames >= _MANY else _lapack(system)
    return step, np.add.reduce(step * normal[size, :size])


def _lapack(system: Array) -> Array:
    """Solutions (P, N) of systems (N, P + 1, P + 1) whose last column is the right-hand side."""
    size = system.shape[1] - 1
    try:
        return np.asarray(np.linalg.solve(system[:, :size, :size], system[:, :size, size:])[..., 0].T)
    except np.linalg.LinAlgError:  # some frame is exactly singular: its step will be absurd, and refused
        return _lapack(_damped(system, np.full(len(system), _FLOOR)))


def _eliminate(system: Array) -> Array:
    """The same from (P + 1, P + 1, N), positive definite: one pass of elimination over all frames at once."""
    size = len(system) - 1
    rows = system[:size].copy()
    for pivot in range(size):
        rows[pivot, pivot + 1 :] /= rows[pivot, pivot]
        rows[pivot + 1 :, pivot + 1 :] -= rows[pivot + 1 :, pivot, None] * rows[pivot, pivot + 1 :]
    step = rows[:, size].copy()
    for row in range(size - 2, -1, -1):
        step[row] -= np.add.reduce(rows[row, row + 1 : size] * step[row + 1 :])
    return step


def _damped(system: Array, damping: Array) -> Array:
    """Matrices (N, P, P) with their diagonals raised by a share (N,), and above zero."""
    system = system.copy()
    diagonal = system.reshape(len(system), -1)[:, :: system.shape[1] + 1]
    diagonal *= 1 + damping[:, None]
    diagonal += _TINY
    return system


def _refine(problem: _Problem, fit: _Fit) -> tuple[_Fit, Mask]:
    """Poses of least cost by damped Gauss-Newton steps, and which of them converged (N,).

    Damping appears only where a step failed. Frames leave as they end, at once those that have no cost.
    """
    whole, index = fit, np.arange(len(fit.cost))
    converged = np.zeros(len(index), dtype=bool)
    damping: Array | None = None
    for _ in range(_MAX_STEPS if problem.nu is None else _MAX_REWEIGHTED_STEPS):
        step, promise = _solve(fit.normal, damping)
        done = ~(promise > _GAIN + _RELATIVE_GAIN * fit.cost)
        over = done
        if damping is not None:
            done &= damping == 0
            over = done | (damping > _MAX_DAMPING)
        pose = fit.pose.moved(step)
        if np.count_nonzero(over):
            # The last step is too small to be worth another look: the linear model foretells its gain.
            last, ended, rest = _Fit(pose, fit.normal, fit.cost - promise), *map(np.flatnonzero, (over, ~over))
            converged[index[ended]] = done[ended]
            whole.put(index[ended], last.take(ended))
            if not len(rest):
                break
            index, problem, fit, pose = index[rest], problem.take(rest), fit.take(rest), pose.take(rest)
            damping = None if damping is None else damping[rest]
        fit, damping = _better(fit, _evaluate(problem, pose, len(step)), damping)
    return whole, converged


def _refine_few(problem: _Problem, first: _Pose, free: int) -> tuple[_Fit, Mask] | None:
    """What ``_refine`` finds, frame by frame in plain floats; None if some frame needs more than plain steps."""
    if problem.nu is not None or problem.camera.distorted:
        return None
    fits = []
    for frame in range(first.turn.shape[-1]):
        arrays = (problem.points, problem.observed, problem.whitening)
        rows = [row for array in arrays for row in array[..., frame % array.shape[-1]].tolist()]
        points = list(zip(*rows, strict=True))
        turn, bearing = first.turn[..., frame].tolist(), first.bearing[:, frame].tolist()
        fit = scalar.refine(points, turn, bearing, free, _GAIN, _RELATIVE_GAIN, _MAX_STEPS)
        if fit is None:
            return None
        fits.append(fit)
    turns, bearings, normals, costs = (np.array(parts).T for parts in zip(*fits, strict=True))
    # Transposed as a whole: frames come last, and a turn's own axes are swapped back.
    return _Fit(_Pose(turns.swapaxes(0, 1), bearings), normals, costs), np.ones(len(fits), dtype=bool)


def _better(fit: _Fit, trial: _Fit, damping: Array | None) -> tuple[_Fit, Array | None]:
    """The trial where its cost is lower, and the damping (N,) to go on with; None if there is none at all."""
    better = trial.cost < fit.cost
    if damping is None and np.count_nonzero(better) == len(better):
        return trial, None
    damping = np.zeros(len(better)) if damping is None else damping
    kept = np.flatnonzero(~better)
    trial.put(kept, fit.take(kept))
    eased = np.where(damping > _FIRST_DAMPING, damping / 10, 0.0)
    damping = np.where(better, eased, np.maximum(10 * damping, _FIRST_DAMPING))
    return trial, damping if damping.any() else None


# --- first guesses ----------------------------------------------------------------------------------------


def _with_linear_position(problem: _Problem, rotation: Array) -> _Pose:
    """Poses with given rotations (3, 3, N): with s the inverse depth, u (1 + s z3) = s z1 + b1 is linear."""
    rotated = np.einsum("ijn,jkn->ikn", rotation, problem.points)
    columns = np.zeros((4, 2, *rotated.shape[1:]))
    columns[0, 0] = columns[1, 1] = 1.0
    columns[2] = rotated[:2] - problem.plain * rotated[2]
    columns[3] = problem.plain
    _whiten(columns, problem.whitening)
    unknown, _ = _solve(_products(columns))
    bearing = np.ones((3, rotation.shape[-1]))
    bearing[:2] = unknown[:2]
    return _Pose(rotation * np.where(unknown[2] > 0, unknown[2], np.nan), bearing)


def _principal(problem: _Problem) -> tuple[Array, Array]:
    """Mean squared extents (3, N) of the kept points, largest first, and their axes (3, 3, N) as columns."""
    scatter = np.einsum("ikn,jkn->nij", problem.points * problem.share, problem.points)
    extent, axes = np.linalg.eigh(scatter)
    return extent[:, ::-1].T, axes[..., ::-1].transpose(1, 2, 0)


def _planar_rotations(problem: _Problem, extent: Array, axes: Array) -> Array:
    """Both rotations (3, 3, 2 N) that the plane through the points allows, in closed form (IPPE).

    The homography's slope at the centre is the foreshortened plane seen along the line of sight, over the depth:
    the upper left part of a rotation, up to a scale that makes its larger singular value one. What is missing
    of its columns' lengths is their third row, known up to a common sign.
    """
    sight, ((e, f), (g, h)) = _homography(problem, extent, axes)
    length = np.sqrt(np.add.reduce(sight * sight) + 1)
    d1, d2 = sight / length
    tilt = -1 / (1 + 1 / length)
    cross = tilt * d1 * d2
    view = np.stack([1 + tilt * d1 * d1, cross, d1, cross, 1 + tilt * d2 * d2, d2, -d1, -d2, 1 / length])
    view = view.reshape(3, 3, -1)  # takes the optical axis to the line of sight
    (a, b), (c, d) = view[:2, :2] + sight[:, None] * np.stack([d1, d2])
    # The slope with the line of sight's own foreshortening taken off, up to a positive factor.
    e, f, g, h = d * e - b * g, d * f - b * h, a * g - c * e, a * h - c * f
    half, determinant = (e * e + f * f + g * g + h * h) / 2, e * h - f * g
    largest = np.sqrt(half + np.sqrt(np.maximum(half * half - determinant * determinant, 0)))
    upper = np.stack([e, f, g, h]).reshape(2, 2, -1) / largest
    third = np.sqrt(np.maximum(1 - np.add.reduce(upper * upper), 0))
    third[1] = np.copysign(third[1], -np.add.reduce(upper[:, 0] * upper[:, 1]))
    columns = np.empty((3, 3, 2, len(length)))
    columns[:2, :2] = upper[:, :, None]
    columns[2, :2, 0], columns[2, :2, 1] = third, -third
    columns[:, 2] = _cross(columns[:, 0], columns[:, 1])
    plane = np.stack([axes[:, 0], axes[:, 1], _cross(axes[:, 0], axes[:, 1])])
    turned = np.einsum("ijn,jksn->iksn", view, columns)
    return np.einsum("ijsn,jkn->iksn", turned, plane).reshape(3, 3, -1)


def _cross(a: Array, b: Array) -> Array:
    return np.stack([a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]])


def _homography(problem: _Problem, extent: Array, axes: Array) -> tuple[Array, Array]:
    """Where the centre is seen (2, N), and the slope (2, 2, N) of the image there along the two longer axes.

    The centre is in front of the camera, so that the homography's last entry may be one.
    """
    size = np.sqrt(extent[:2])
    plane = np.einsum("jin,jkn->ikn", axes[:, :2], problem.points) / size[:, None]
    middle = np.add.reduce(problem.plain * problem.share, 1)
    image = problem.plain - middle[:, None]
    spread = np.sqrt(np.add.reduce(image * image * problem.share, 1))
    image /= spread[:, None]
    columns = np.zeros((9, 2, *image.shape[1:]))
    columns[:2, 0] = columns[3:5, 1] = plane
    columns[2, 0] = columns[5, 1] = 1.0
    columns[6:8] = -image * plane[:, None]
    columns[8] = image
    unknown, _ = _solve(_products(columns * (problem.share > 0)))
    rows = unknown[:6].reshape(2, 3, -1)
    slope = (rows[:, :2] - rows[:, 2:] * unknown[6:]) * spread[:, None] / size
    return middle + spread * rows[:, 2], slope


def _general_rotations(problem: _Problem, failure: NDArray[np.int64]) -> Array:
    """Rotations (3, 3, N) of points that are no plane, frame by frame by OpenCV's SQPNP."""
    import cv2

    frames = problem.plain.shape[-1]
    points, share = (np.broadcast_to(a, (*a.shape[:-1], frames)) for a in (problem.points, problem.share))
    rotation = np.full((3, 3, frames), np.nan)
    for frame in np.flatnonzero(failure == 0):
        kept = share[:, frame] > 0
        world, image = points[:, kept, frame].T.copy(), problem.plain[:, kept, frame].T.copy()
        found, vector, _ = cv2.solvePnP(world, image, np.eye(3), None, flags=cv2.SOLVEPNP_SQPNP)
        if found:
            rotation[..., frame] = cv2.Rodrigues(vector)[0]
    return rotation


# --- the answer -------------------------------------------------------------------------------------------


def _minimise(problem: _Problem, first: _Pose, free: int, failure: NDArray[np.int64]) -> Solution:
    """Refine one or two candidates for each frame, and answer with the better one that is valid."""
    few = _refine_few(problem, first, free) if 0 < first.turn.shape[-1] <= _FEW else None
    fit, converged = few or _refine(problem, _evaluate(problem, first, free))
    turn, offset = fit.pose.unpacked()
    covariance, sound = _covariance(_information(problem, fit, free), turn, offset)
    position = (problem.centre - np.einsum("ijn,in->jn", turn, offset)).T
    rotation, cost = turn.transpose(2, 0, 1), fit.cost
    # From pixels alone a runway seen edge-on looks the same from above and from below.
    margin = _APART * np.sqrt(covariance[:, 2, 2]) * (1 if free == 6 else -1)
    height = position[:, 2] - problem.lowest
    valid = (height > margin) & sound & converged
    if not (cost < _SUSPECT).all():
        valid &= (cost < _SUSPECT) | _stand_apart(problem, free)
    dof = 2 * problem.kept - free
    if len(valid) == len(failure) and valid.all() and not failure.any():
        nowhere = Minimum(rotation * np.nan, position * np.nan, np.full_like(cost, np.inf))
        return Solution(rotation, position, cost, covariance, dof, failure, nowhere)
    code = np.where(height > -np.abs(margin), Failure.DEGENERATE, Failure.BELOW_GROUND)
    code[~sound] = Failure.ILL_CONDITIONED
    code[~converged] = Failure.NOT_CONVERGED
    code[np.isnan(cost)] = Failure.BEHIND_CAMERA
    code[valid] = Failure.NONE
    return _choose(rotation, position, np.where(valid, cost, np.inf), covariance, dof, failure, code)


def _stand_apart(problem: _Problem, free: int) -> Mask:
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
    apart = distance > _SAME * covariance[best, :3, :3].trace(0, 1, 2)
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


def _information(problem: _Problem, fit: _Fit, free: int) -> Array:
    """Normal matrix for the covariance; under a Student-t, that of Gaussians with its second moments.

    Not the weights of the last step, nor the Fisher information: both promise too much of so few points.
    """
    if problem.nu is None:
        return fit.normal
    whitening = problem.whitening * np.sqrt(np.maximum(1 - 2 / problem.nu, 0))
    return _evaluate(problem._replace(nu=None, whitening=whitening), fit.pose, free).normal


def _covariance(normal: Array, rotation: Array, offset: Array) -> tuple[Array, Mask]:
    """Covariances (N, 6, 6) of the poses in runway axes, and which of them mean something (N,)."""
    size = len(normal) - 1
    information = normal[:size, :size].transpose(2, 0, 1)
    try:
        inner = np.linalg.inv(information)
    except np.linalg.LinAlgError:
        inner = np.linalg.inv(_damped(information, np.full(len(information), _FLOOR)))
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


__all__ = ["Failure", "Mask", "Minimum", "Solution", "solve_pose", "solve_position"]
