"""Covariance-weighted PnP (paper, appendix on 6-DoF pose estimation), for many frames at once.

In: runway points (K, 3), their pixels (N, K, 2) with covariances (N, K, 2, 2), perhaps attitudes (N, 3, 3).
Out: poses with 6x6 covariances, chi-square costs and, where there is no trustworthy answer, the reason why.

Inside, a pose is (rotation, bearing, scale): a point at x from the kept points' centroid lies along
scale * rotation @ x + bearing, with bearing = (b1, b2, 1) and 1 / scale the centroid's depth. The projection is
linear in the bearing and almost so in the scale, so that undamped steps seldom fail even far away. Arrays are
component-first and frame-last, (3, K, N): every numpy call then works on long rows, or on few numbers if N is 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halopose.errors import HaloposeError
from halopose.landing.camera import Array, Camera, distort, distort_jacobian, normalise, skew

Mask = NDArray[np.bool_]

_MAX_STEPS = 100
_DECREMENT = 1e-10  # chi-square that the next step may still promise: 1e-5 standard deviations
_ROUNDING = 1e-13  # the same relative to the cost
_FIRST_DAMPING = 1e-3
_MAX_DAMPING = 1e12
_FLOOR = 1e-14  # relative damping that keeps a pivot from being exactly zero
_TINY = 1e-300  # the same where a whole column is zero; the step is then absurd and refused
_PLANAR = 0.01  # thickness^2 / width^2 under which points start from the plane through them
_COLLINEAR = 1e-8  # width^2 / length^2 of the points under which they are a line
_APART = 2.0  # standard deviations that the corners must spread in the image
_MIN_ASPECT = 1e-10  # det / (trace / 2)^2 under which a keypoint's covariance counts as singular
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
    dof = 2 * problem.kept.sum(0) - 6
    good = np.flatnonzero(failure == 0)
    problem = problem.take(good)
    if start is not None:
        rotation, position = np.moveaxis(start[0], 0, -1)[..., good], start[1].T[:, good]
        return _minimise(problem, _Pose.at(rotation, position, problem.centre), 6, good, failure, dof)
    flat = (problem.extent[2] <= _PLANAR * problem.extent[1]).all()
    rotations = _planar_rotations(problem) if flat else _general_rotations(problem)
    problem = problem.take(np.tile(np.arange(len(good)), rotations.shape[-1] // max(len(good), 1)))
    return _minimise(problem, _with_linear_position(problem, rotations), 6, good, failure, dof)


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
    failure[~np.isfinite(rotation).all((1, 2))] = Failure.NOT_FINITE
    dof = 2 * problem.kept.sum(0) - 3
    good = np.flatnonzero(failure == 0)
    problem = problem.take(good)
    first = _with_linear_position(problem, np.moveaxis(rotation, 0, -1)[..., good])
    return _minimise(problem, first, 3, good, failure, dof)


def _check_shapes(
    points: Array, pixels: Array, covariance: Array, mask: Mask | None, nu: Array | None, rotation: Array | None
) -> None:
    if pixels.ndim != 3:
        raise HaloposeError(f"pixels should have shape (N, K, 2), got {pixels.shape}")
    frames, count = pixels.shape[:2]
    for name, array, *shapes in (
        ("pixels", pixels, (frames, count, 2)),
        ("points", points, (count, 3), (frames, count, 3)),
        ("covariances", covariance, (frames, count, 2, 2)),
        ("the mask", mask, (frames, count)),
        ("nu", nu, (count,), (frames, count)),
        ("rotations", rotation, (frames, 3, 3)),
    ):
        if isinstance(array, np.ndarray) and array.shape not in shapes:
            raise HaloposeError(f"{name} should have shape {' or '.join(map(str, shapes))}, got {array.shape}")


# --- the problem ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Problem:
    """What is observed, frame last; a last axis of length 1 serves every frame."""

    camera: Camera
    points: Array  # (3, K, N), from the centre of the kept ones
    centre: Array  # (3, N)
    lowest: Array  # (N,): height of the lowest kept point
    extent: Array  # (3, N): mean squared extents of the kept points along their principal axes, longest first
    axes: Array  # (3, 3, N): those axes as columns
    observed: Array  # (2, K, N), normalised but still distorted
    plain: Array  # (2, K, N), without distortion
    whitening: Array  # (3, K, N): entries 11, 21, 22 of L^-1 diag(fx, fy), zero where masked out
    kept: Mask  # (K, N)
    nu: Array | None  # (K, N)

    def take(self, frames: NDArray[np.intp]) -> _Problem:
        """The frames of an index, in its order."""
        if len(frames) == self.observed.shape[-1] and (frames[1:] > frames[:-1]).all():
            return self

        def of(array: Array) -> Array:
            return array if array.shape[-1] == 1 else array[..., frames]

        return replace(
            self, points=of(self.points), centre=of(self.centre), lowest=of(self.lowest), extent=of(self.extent),
            axes=of(self.axes), observed=self.observed[..., frames], plain=self.plain[..., frames],
            whitening=self.whitening[..., frames], kept=self.kept[:, frames],
            nu=None if self.nu is None else of(self.nu),
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
    """Whiten and centre; the failures (N,) tell which frames must not be solved."""
    observed = (pixels.transpose(2, 1, 0) - _column(camera.cx, camera.cy)) / _column(camera.fx, camera.fy)
    plain = normalise(camera, pixels).transpose(2, 1, 0) if camera.distorted else observed
    with np.errstate(all="ignore"):  # frames with NaN or indefinite covariances are left out
        whitening, noise, definite = _whitening(camera, covariance)
    kept = np.ones(definite.shape, dtype=bool) if mask is None else mask.T
    finite = np.isfinite(plain).all(0) & np.isfinite(noise)
    failure = np.zeros(len(pixels), dtype=np.int64)
    failure[(definite < kept).any(0)] = Failure.BAD_COVARIANCE
    failure[(finite < kept).any(0)] = Failure.NOT_FINITE
    failure[kept.sum(0) < needed] = Failure.TOO_FEW_POINTS
    if mask is not None or failure.any():
        observed, plain, whitening, noise = (
            np.where(kept & finite, array, 0.0) for array in (observed, plain, whitening, noise)
        )
    share = _share(kept if mask is not None else kept[:, :1])
    placed = points.T[..., None] if points.ndim == 2 else points.transpose(2, 1, 0)
    centre = (placed * share).sum(1)
    lowest = np.where(share > 0, placed[2], np.inf).min(0)
    placed = placed - centre[:, None]
    extent, axes = _principal(placed, share)
    degenerate = extent[0] <= 0 if needed == 2 else extent[1] <= _COLLINEAR * extent[0]
    spread = _spread(_column(camera.fx, camera.fy) * plain, kept)[0 if needed == 2 else 1]
    degenerate = degenerate | (spread <= _APART**2 * (noise * _share(kept)).sum(0))
    failure[degenerate & (failure == 0)] = Failure.DEGENERATE
    tails = None if nu is None else nu[:, None] if nu.ndim == 1 else nu.T
    return _Problem(camera, placed, centre, lowest, extent, axes, observed, plain, whitening, kept, tails), failure


def _column(first: float, second: float) -> Array:
    return np.array([[[first]], [[second]]])


def _share(kept: Mask) -> Array:
    """Weights (K, N) that sum to one over the kept points."""
    return kept / np.maximum(kept.sum(0), 1)


def _whitening(camera: Camera, covariance: Array) -> tuple[Array, Array, Mask]:
    """Entries 11, 21, 22 (3, K, N) of L^-1 diag(fx, fy), mean variances (K, N), and which are definite (K, N)."""
    xx, xy, yx, yy = covariance.reshape(*covariance.shape[:2], 4).transpose(2, 1, 0)
    first = 1 / np.sqrt(xx)
    shear = xy * first
    second = 1 / np.sqrt(yy - shear * shear)
    noise = (xx + yy) / 2
    definite = (xx * yy - xy * yx > _MIN_ASPECT * noise * noise) & (xx > 0) & (np.abs(xy - yx) <= 1e-6 * noise)
    return np.stack([camera.fx * first, -camera.fx * shear * first * second, camera.fy * second]), noise, definite


def _principal(points: Array, share: Array) -> tuple[Array, Array]:
    """Mean squared extents (3, N), largest first, and axes (3, 3, N) of centred points (3, K, N)."""
    extent, axes = np.linalg.eigh(np.einsum("ikn,jkn->nij", points * share, points))
    return extent[:, ::-1].T, axes[..., ::-1].transpose(1, 2, 0)


def _spread(pixels: Array, kept: Mask) -> tuple[Array, Array]:
    """Larger and smaller variance (N,) of pixels (2, K, N) along their principal axes."""
    share = _share(kept)
    pixels = pixels - (pixels * share).sum(1)[:, None]
    (xx, xy), (_, yy) = np.einsum("ikn,jkn->ijn", pixels * share, pixels)
    half_gap = np.hypot((xx - yy) / 2, xy)
    return (xx + yy) / 2 + half_gap, (xx + yy) / 2 - half_gap


# --- refinement -------------------------------------------------------------------------------------------


class _Pose(NamedTuple):
    """Rotation (3, 3, N), bearing (3, N) whose last row is 1, and scale (N,)."""

    rotation: Array
    bearing: Array
    scale: Array

    @classmethod
    def at(cls, rotation: Array, position: Array, centre: Array) -> _Pose:
        offset = (rotation * (centre - position)).sum(1)
        return cls(rotation, offset / offset[2], 1 / offset[2])

    def moved(self, step: Array) -> _Pose:
        """After a step (6, N) in rotation, bearing and log scale, or (3, N) without the rotation."""
        bearing, scale = self.bearing.copy(), self.scale * np.exp(step[-1])
        bearing[:2] += step[-3:-1]
        if len(step) == 3:
            return _Pose(self.rotation, bearing, scale)
        quaternion = np.ones((4, step.shape[1]))
        quaternion[1:] = step[:3] / 2
        turn = _QUATERNION @ (quaternion[:, None] * quaternion).reshape(16, -1)
        turn = (turn[:9] / turn[9]).reshape(3, 3, -1)
        return _Pose(np.einsum("ijn,jkn->ikn", turn, self.rotation), bearing, scale)


class _Fit(NamedTuple):
    """A pose on its way to the minimum."""

    rotation: Array
    bearing: Array
    scale: Array
    normal: Array  # (P + 1, P + 1, N): products of the whitened Jacobian's columns and the residual
    cost: Array  # (N,)

    @property
    def pose(self) -> _Pose:
        return _Pose(self.rotation, self.bearing, self.scale)

    def take(self, frames: NDArray[np.intp]) -> _Fit:
        return _Fit(*(array[..., frames] for array in self))

    def put(self, frames: NDArray[np.intp], other: _Fit) -> None:
        """Overwrite frames with another's, in place."""
        for mine, theirs in zip(self, other, strict=True):
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
    """Coefficients (6, 2, 4, 3) of d (u, v) / d (rotation, bearing, log scale).

    They multiply the products of (1, z1, z2, z3) / depth and (u, v, 1), where z is the rotated, scaled point.
    """
    table = np.zeros((6, 2, 4, 3))
    point = np.zeros((2, 3, 4, 3))  # d (u, v) / d (depth * z)
    for row in range(2):
        point[row, row, :, 2] = 1.0
        point[row, 2, :, row] = -1.0
        table[3 + row, row, 0, 2] = 1.0
        for axis in range(3):
            table[5, row, axis + 1] += point[row, axis, axis + 1]
        for i, j, k in (
            (0, 1, 2),
            (1, 2, 0),
            (2, 0, 1),
        ):  # turning about axis i moves z by (i, j, k) -> (0, -zk, zj)
            table[i, row, k + 1] -= point[row, j, k + 1]
            table[i, row, j + 1] += point[row, k, j + 1]
    return table.reshape(12, 12)


_QUATERNION = _quaternion()
_JACOBIAN = _jacobian()


def _evaluate(problem: _Problem, pose: _Pose, free: int) -> _Fit:
    """Linearise the whitened residuals in the last ``free`` unknowns; infinite cost behind the camera."""
    scaled = pose.scale * (pose.rotation[:, :, None] * problem.points).sum(1)
    along = scaled + pose.bearing[:, None]
    inverse = 1 / along[2]
    image = along * inverse  # (u, v, 1)
    parts = np.empty((4, 1, *inverse.shape))
    parts[0, 0] = inverse
    np.multiply(scaled, inverse, out=parts[1:, 0])
    columns = np.empty((free + 1, 2, *inverse.shape))
    np.matmul(_JACOBIAN[-2 * free :], (parts * image).reshape(12, -1), out=columns[:free].reshape(2 * free, -1))
    if problem.camera.distorted:
        image = _through_lens(problem.camera, image, columns[:free])
    np.subtract(problem.observed, image[:2], out=columns[free])
    _whiten(columns, problem.whitening)
    robust = None if problem.nu is None else _reweight(columns, problem.nu)
    normal = _products(columns)
    cost = normal[free, free] if robust is None else robust
    in_front = (inverse.min(0) > 0) & (pose.scale > 0)
    return _Fit(*pose, normal, np.where(in_front, cost, np.inf))


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
    first, second = columns[:, 0], columns[:, 1]
    second *= whitening[2]
    second += first * whitening[1]
    first *= whitening[0]


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


def _solve(normal: Array, damping: Array) -> tuple[Array, Array]:
    """Step (P, N) of a normal matrix (P + 1, P + 1, N), and how much chi-square it promises to gain (N,)."""
    size = len(normal) - 1
    system = normal.transpose(2, 0, 1).copy()
    diagonal = system.reshape(len(system), -1)[:, : size * (size + 2) : size + 2]
    diagonal *= 1 + _FLOOR + damping[:, None]
    diagonal += _TINY
    step = np.linalg.solve(system[:, :size, :size], system[:, :size, size:])[..., 0].T
    return np.asarray(step), np.asarray((step * normal[size, :size]).sum(0))


def _refine(problem: _Problem, fit: _Fit, damping: Array, steps: int = _MAX_STEPS) -> tuple[_Fit, Mask]:
    """Poses of least cost by damped Gauss-Newton steps, and which of them converged (N,).

    Damping appears only where a step failed. The frames still under way go on alone once others are done.
    """
    for left in range(steps, 0, -1):
        step, promise = _solve(fit.normal, damping)
        converged = (promise <= _DECREMENT + _ROUNDING * fit.cost) & (damping == 0)
        over = converged | ~(fit.cost < np.inf) | (damping > _MAX_DAMPING)
        if over.all():
            return fit, converged
        if over.any():
            rest = np.flatnonzero(~over)
            later, converged[rest] = _refine(problem.take(rest), fit.take(rest), damping[rest], left)
            fit.put(rest, later)
            return fit, converged
        trial = _evaluate(problem, fit.pose.moved(step), len(step))
        better = trial.cost < fit.cost
        if better.all():
            fit = trial
        else:
            chosen = np.flatnonzero(better)
            fit.put(chosen, trial.take(chosen))
        eased = np.where(damping > _FIRST_DAMPING, damping / 10, 0.0)
        damping = np.where(better, eased, np.maximum(10 * damping, _FIRST_DAMPING))
    return fit, np.zeros(len(damping), dtype=bool)


# --- first guesses ----------------------------------------------------------------------------------------


def _with_linear_position(problem: _Problem, rotation: Array) -> _Pose:
    """Poses with given rotations (3, 3, N): u (1 + scale z3) = scale z1 + b1, likewise v, is linear."""
    rotated = (rotation[:, :, None] * problem.points).sum(1)
    columns = np.zeros((4, 2, *problem.plain.shape[1:]))
    columns[0, 0] = columns[1, 1] = 1.0
    columns[2] = rotated[:2] - problem.plain * rotated[2]
    columns[3] = problem.plain
    _whiten(columns, problem.whitening)
    unknown, _ = _solve(_products(columns), np.zeros(columns.shape[-1]))
    bearing = np.ones((3, columns.shape[-1]))
    bearing[:2] = unknown[:2]
    return _Pose(rotation, bearing, unknown[2])


def _planar_rotations(problem: _Problem) -> Array:
    """Both rotations (3, 3, 2 N) that the plane through the points allows, in closed form (IPPE).

    The homography's slope at the centre is the foreshortened plane seen along the line of sight, over the depth:
    the upper left part of a rotation, up to a scale that makes its larger singular value one. What is missing
    of its columns' lengths is their third row, known up to a common sign.
    """
    sight, slope = _homography(problem)
    length = np.sqrt(np.square(sight).sum(0) + 1)
    d1, d2, d3 = sight[0] / length, sight[1] / length, 1 / length
    tilt = -1 / (1 + d3)
    view = np.stack([1 + tilt * d1 * d1, tilt * d1 * d2, d1, tilt * d1 * d2, 1 + tilt * d2 * d2, d2, -d1, -d2, d3])
    view = view.reshape(3, 3, -1)  # takes the optical axis to the line of sight
    (a, b), (c, d) = view[:2, :2] + sight[:, None] * np.stack([d1, d2])
    (e, f), (g, h) = slope
    (e, f), (g, h) = (d * e - b * g, d * f - b * h), (a * g - c * e, a * h - c * f)  # up to scale
    half, determinant = (e * e + f * f + g * g + h * h) / 2, e * h - f * g
    largest = half + np.sqrt(np.maximum(half * half - determinant * determinant, 0))
    scale = 1 / np.sqrt(largest) * np.sign(a * d - b * c)
    first, second = np.stack([e, g]) * scale, np.stack([f, h]) * scale
    third = np.sqrt(np.maximum(1 - np.stack([np.square(first).sum(0), np.square(second).sum(0)]), 0))
    third[1] = np.copysign(third[1], -(first * second).sum(0))
    columns = np.empty((3, 3, 2, len(scale)))
    columns[:2, 0], columns[:2, 1] = first[:, None], second[:, None]
    columns[2, 0], columns[2, 1] = third[0] * _SIGNS, third[1] * _SIGNS
    columns[:, 2] = _cross(columns[:, 0], columns[:, 1])
    axes = problem.axes.copy()
    axes[:, 2] = _cross(axes[:, 0], axes[:, 1])
    turned = np.einsum("ijn,jksn->iksn", view, columns)
    return np.einsum("ijsn,kjn->iksn", turned, axes).reshape(3, 3, -1)


_SIGNS = np.array([[1.0], [-1.0]])


def _cross(a: Array, b: Array) -> Array:
    return np.stack([a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]])


def _homography(problem: _Problem) -> tuple[Array, Array]:
    """Where the centre is seen (2, N), and the slope (2, 2, N) of the image there along the two longer axes.

    The centre is in front of the camera, so that the homography's last entry may be one.
    """
    size = np.sqrt(problem.extent[:2])
    plane = np.einsum("jin,jkn->ikn", problem.axes[:, :2], problem.points) / size[:, None]
    share = _share(problem.kept)
    middle = (problem.plain * share).sum(1)
    image = problem.plain - middle[:, None]
    spread = np.sqrt((image * image * share).sum(1))
    image = image / spread[:, None]
    columns = np.zeros((9, 2, *share.shape))
    columns[:2, 0] = columns[3:5, 1] = plane
    columns[2, 0] = columns[5, 1] = 1.0
    columns[6:8] = -image * plane[:, None]
    columns[8] = image
    unknown, _ = _solve(_products(columns * problem.kept), np.zeros(share.shape[1]))
    rows = unknown[:6].reshape(2, 3, -1)
    slope = (rows[:, :2] - rows[:, 2:] * unknown[6:]) * spread[:, None] / size
    return middle + spread * rows[:, 2], slope


def _general_rotations(problem: _Problem) -> Array:
    """Rotations (3, 3, N) of points that are no plane, frame by frame by OpenCV's SQPNP."""
    import cv2

    frames = problem.plain.shape[-1]
    points = np.broadcast_to(problem.points, (3, *problem.kept.shape))
    rotation = np.empty((3, 3, frames))
    for frame in range(frames):
        kept = problem.kept[:, frame]
        found, vector, _ = cv2.solvePnP(
            np.ascontiguousarray(points[:, kept, frame].T), np.ascontiguousarray(problem.plain[:, kept, frame].T),
            np.eye(3), None, flags=cv2.SOLVEPNP_SQPNP,
        )  # fmt: skip
        rotation[..., frame] = cv2.Rodrigues(vector)[0] if found else np.nan
    return rotation


# --- the answer -------------------------------------------------------------------------------------------


@np.errstate(all="ignore")  # trial steps may leave all bounds; their cost is then refused
def _minimise(
    problem: _Problem,
    first: _Pose,
    free: int,
    good: NDArray[np.intp],
    failure: NDArray[np.int64],
    dof: NDArray[np.int64],
) -> Solution:
    """Refine one or two candidates for each good frame, and answer with the better one that is valid."""
    fit, converged = _refine(problem, _evaluate(problem, first, free), np.zeros(len(first.scale)))
    covariance, weak = _covariance(fit)
    rotation = fit.rotation.transpose(2, 0, 1)
    position = (problem.centre - (fit.rotation * (fit.bearing / fit.scale)[:, None]).sum(0)).T
    code = np.where(position[:, 2] < problem.lowest, Failure.BELOW_GROUND, Failure.NONE)
    code[weak] = Failure.ILL_CONDITIONED
    code[~converged] = Failure.NOT_CONVERGED
    code[~(fit.cost < np.inf)] = Failure.BEHIND_CAMERA
    best, other = _rank(np.where(code == 0, fit.cost, np.inf), len(good))
    failure[good] = code[best]
    solved = code[best] == 0
    distance = np.square(position[other] - position[best]).sum(1)
    twofold = solved & (code[other] == 0) & (distance > _SAME * covariance[best, :3, :3].trace(0, 1, 2))

    def answer(chosen: Mask, rows: NDArray[np.intp], array: Array, fill: float = np.nan) -> Array:
        full = np.full((len(failure), *array.shape[1:]), fill)
        full[good[chosen]] = array[rows[chosen]]
        return full

    def minimum(chosen: Mask, rows: NDArray[np.intp]) -> tuple[Array, Array, Array]:
        return (
            answer(chosen, rows, rotation),
            answer(chosen, rows, position),
            answer(chosen, rows, fit.cost, np.inf),
        )

    alternative = Minimum(*minimum(twofold, other))
    return Solution(*minimum(solved, best), answer(solved, best, covariance), dof, failure, alternative)


def _rank(cost: Array, frames: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Rows of the better and of the other candidate of each frame; both the same if there is one only."""
    first = np.arange(frames)
    if len(cost) == frames:
        return first, first
    swap = cost[frames:] < cost[:frames]
    return first + frames * swap, first + frames * ~swap


def _covariance(fit: _Fit) -> tuple[Array, Mask]:
    """Covariances (N, 6, 6) of the poses in runway axes, and which of them mean nothing (N,)."""
    information = fit.normal[:-1, :-1].transpose(2, 0, 1).copy()
    frames, size = information.shape[:2]
    diagonal = information.reshape(frames, -1)[:, :: size + 1]
    diagonal *= 1 + _FLOOR
    diagonal += _TINY
    inner = np.linalg.inv(information)
    variance = inner.reshape(frames, -1)[:, :: size + 1]
    sound = (variance * diagonal <= _MAX_INFLATION) & (variance > 0) & (variance <= _LIMITS[-size:])
    inward = fit.rotation.transpose(2, 1, 0)
    offset = (fit.bearing / fit.scale).T
    change = np.zeros((frames, 3, size))
    change[:, 0, -3] = change[:, 1, -2] = -1 / fit.scale
    change[..., -1] = offset
    outer = np.zeros((frames, 6, size))
    if size == 6:
        change[..., :3] = -skew(offset)
        outer[:, 3:, :3] = -inward
    np.matmul(inward, change, out=outer[:, :3])
    return outer @ inner @ outer.transpose(0, 2, 1), np.logical_not(sound.all(1))


__all__ = ["Failure", "Mask", "Minimum", "Solution", "solve_pose", "solve_position"]
