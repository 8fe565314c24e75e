"""Poses of least cost for ``pnp``: damped Gauss-Newton steps on whitened residuals, for many frames at once.

In: a ``Problem``, what is observed, and first poses. Out: a ``Fit`` for each, and which of them converged (N,).

Inside, a pose is (turn, bearing): a point at x from the kept points' centre lies along turn @ x + bearing, where
bearing = (b1, b2, 1) and turn is the rotation over the centre's depth. The projection is linear in the bearing
and almost so in the inverse depth, so that undamped steps seldom fail even far away. Arrays are
component-first and frame-last, (3, K, N): every numpy call then works on long rows, or on few numbers if N is 1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halopose.geometry.camera import Array, Camera, distort, distort_jacobian

Mask = NDArray[np.bool_]

_MAX_STEPS = 30
_MAX_REWEIGHTED_STEPS = 200  # reweighting converges only linearly
_GAIN = 1e-7  # chi-square that the last step may still gain: 3e-4 standard deviations, most of which it takes away
_RELATIVE_GAIN = 1e-6  # the same relative to the cost
_FIRST_DAMPING = 1e-3
_MAX_DAMPING = 1e12
_FLOOR = 1e-14  # relative damping that keeps a pivot from being exactly zero
_TINY = 1e-300  # the same where a whole column is zero; the step is then absurd and refused


class Problem(NamedTuple):
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

    def take(self, frames: NDArray[np.intp]) -> Problem:
        """The frames of an index, in its order."""

        def of(array: Array) -> Array:
            return array if array.shape[-1] == 1 else array[..., frames]

        return Problem(
            self.camera, of(self.points), of(self.centre), of(self.lowest), of(self.observed), of(self.plain),
            of(self.whitening), of(self.share), of(self.trace), self.kept,
            None if self.nu is None else of(self.nu),
        )  # fmt: skip


class Pose(NamedTuple):
    """Turn (3, 3, N), the rotation over the depth of the centre, and bearing (3, N), whose last row is 1."""

    turn: Array
    bearing: Array

    @classmethod
    def at(cls, rotation: Array, position: Array, centre: Array) -> Pose:
        offset = np.einsum("ijn,jn->in", rotation, centre - position)
        depth = np.where(offset[2] > 0, offset[2], np.nan)
        return cls(rotation / depth, offset / depth)

    def moved(self, step: Array) -> Pose:
        """After a step (6, N) in rotation, bearing and log inverse depth, or (3, N) without the rotation."""
        bearing = self.bearing.copy()
        bearing[:2] += step[-3:-1]
        growth = np.exp(step[-1])
        if len(step) == 3:
            return Pose(self.turn * growth, bearing)
        quaternion = np.empty((4, 1, step.shape[1]))
        quaternion[0] = 1.0
        np.multiply(step[:3, None], 0.5, out=quaternion[1:])
        change = _QUATERNION @ (quaternion * quaternion[:, 0]).reshape(16, -1)
        growth /= change[9]
        change *= growth
        return Pose(np.einsum("ijn,jkn->ikn", change[:9].reshape(3, 3, -1), self.turn), bearing)

    def take(self, frames: NDArray[np.intp]) -> Pose:
        return Pose(self.turn[..., frames], self.bearing[:, frames])

    def unpacked(self) -> tuple[Array, Array]:
        """Rotations (3, 3, N) and the centre in camera axes (3, N)."""
        depth = 1 / np.sqrt(np.add.reduce(self.turn[:, 0] * self.turn[:, 0]))
        return self.turn * depth, self.bearing * depth


class Fit(NamedTuple):
    """A pose on its way to the minimum."""

    pose: Pose
    normal: Array  # (P + 1, P + 1, N): products of the whitened Jacobian's columns and the residual
    cost: Array  # (N,)

    def take(self, frames: NDArray[np.intp]) -> Fit:
        return Fit(self.pose.take(frames), self.normal[..., frames], self.cost[frames])

    def put(self, frames: NDArray[np.intp], other: Fit) -> None:
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


def evaluate(problem: Problem, pose: Pose, free: int) -> Fit:
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
    whiten(columns, problem.whitening)
    if problem.nu is None:
        normal = products(columns)
        return Fit(pose, normal, normal[free, free].copy())
    cost = _reweight(columns, problem.nu)
    return Fit(pose, products(columns), cost)


def _through_lens(camera: Camera, image: Array, columns: Array) -> Array:
    """Distorted (u, v) (2, K, N); the columns (P, 2, K, N) follow in place."""
    u, v = image[:2]
    xx, xy, yy = distort_jacobian(u, v, camera.distortion)
    first, second = columns[:, 0].copy(), columns[:, 1].copy()
    columns[:, 0] = xx * first + xy * second
    columns[:, 1] = xy * first + yy * second
    return np.stack(distort(u, v, camera.distortion))


def whiten(columns: Array, whitening: Array) -> None:
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


def products(columns: Array) -> Array:
    """Inner products (P, P, N) of columns (P, 2, K, N)."""
    size, two, count, frames = columns.shape
    flat = columns.reshape(size, two * count, frames)
    return np.einsum("imn,jmn->ijn", flat, flat)


def solve_normal(normal: Array, damping: Array | None = None) -> tuple[Array, Array]:
    """Step (P, N) of a normal matrix (P + 1, P + 1, N), and how much chi-square it promises to gain (N,)."""
    size = len(normal) - 1
    system = normal.transpose(2, 0, 1)
    if damping is not None:
        system = damped(system, damping)
    step = _lapack(system)
    return step, np.add.reduce(step * normal[size, :size])


def _lapack(system: Array) -> Array:
    """Solutions (P, N) of systems (N, P + 1, P + 1) whose last column is the right-hand side."""
    size = system.shape[1] - 1
    try:
        return np.asarray(np.linalg.solve(system[:, :size, :size], system[:, :size, size:])[..., 0].T)
    except np.linalg.LinAlgError:  # some frame is exactly singular: its step will be absurd, and refused
        return _lapack(damped(system))


def damped(system: Array, damping: Array | None = None) -> Array:
    """Matrices (N, P, P) with their diagonals raised by a share (N,), else as little as counts, and above zero."""
    system = system.copy()
    diagonal = system.reshape(len(system), -1)[:, :: system.shape[1] + 1]
    diagonal *= 1 + (_FLOOR if damping is None else damping[:, None])
    diagonal += _TINY
    return system


def refine(problem: Problem, first: Pose, free: int) -> tuple[Fit, Mask]:
    """Poses of least cost near the first ones (N), and which of them converged (N,).

    ``free`` is 6, or 3 where the rotation stays as it is.
    """
    fit = evaluate(problem, first, free)
    whole, index = fit, np.arange(len(fit.cost))
    converged = np.zeros(len(index), dtype=bool)
    damping: Array | None = None
    for _ in range(_MAX_STEPS if problem.nu is None else _MAX_REWEIGHTED_STEPS):
        step, promise = solve_normal(fit.normal, damping)
        done = ~(promise > _GAIN + _RELATIVE_GAIN * fit.cost)
        over = done
        if damping is not None:
            done &= damping == 0
            over = done | (damping > _MAX_DAMPING)
        pose = fit.pose.moved(step)
        if np.count_nonzero(over):
            # The last step is too small to be worth another look: the linear model foretells its gain.
            last, ended, rest = Fit(pose, fit.normal, fit.cost - promise), *map(np.flatnonzero, (over, ~over))
            converged[index[ended]] = done[ended]
            whole.put(index[ended], last.take(ended))
            if not len(rest):
                break
            index, problem, fit, pose = index[rest], problem.take(rest), fit.take(rest), pose.take(rest)
            damping = None if damping is None else damping[rest]
        fit, damping = _better(fit, evaluate(problem, pose, len(step)), damping)
    return whole, converged


def _better(fit: Fit, trial: Fit, damping: Array | None) -> tuple[Fit, Array | None]:
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
