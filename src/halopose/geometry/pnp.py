"""Covariance-weighted PnP (paper, appendix on 6-DoF pose estimation), for many frames at once.

``solve_pose`` finds rotation and position, ``solve_position`` the position under a given rotation. Both return poses
with 6x6 covariances, chi-square costs and, where there is no reliable pose, the reason.

Internally a pose is (turn, bearing): a point at x from the centre of the used points lies along turn @ x + bearing.
bearing is (b1, b2, 1), and turn is the rotation divided by the depth of the centre. The projection is linear in the
bearing and almost linear in the inverse depth, so undamped Gauss-Newton steps rarely fail. Arrays are component-first
and frame-last, (3, K, N).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from halopose.errors import HaloposeError
from halopose.geometry.camera import Camera, distort, distort_jacobian, normalise, skew
from halopose.geometry.observations import Observations
from halopose.types import Array, Mask

SAME_MINIMUM = 1e-4  # squared distance in standard deviations below which two minima count as one

_MIN_SIGMAS = 2.0  # standard deviations: height of the camera above the points, and spread of doubtful pixels
_DOUBTFUL_COST = 25.0  # chi-square above which a pose does not explain the pixels
_MIN_ASPECT = 1e-10  # det / trace^2 below which a keypoint's covariance counts as singular
_MAX_SPREAD = 0.5  # standard deviation of log depth and angles above which the linearisation is invalid
_VARIANCE_LIMITS = np.array([_MAX_SPREAD**2] * 3 + [np.inf] * 2 + [_MAX_SPREAD**2])
_MAX_INFLATION = 1e11  # of a variance by correlations; above it the inverse is numerical noise
_PLANAR = 0.01  # thickness^2 / width^2 below which points are treated as a plane
_COLLINEAR = 1e-8  # width^2 / length^2 below which points are a line
_MAX_STEPS = 30
_MAX_REWEIGHTED_STEPS = 200  # reweighting converges only linearly
_GAIN = 1e-7  # chi-square gain of the last step: 3e-4 standard deviations
_RELATIVE_GAIN = 1e-6  # the same relative to the cost
_FIRST_DAMPING = 1e-3
_MAX_DAMPING = 1e12
_FLOOR = 1e-14  # relative damping that keeps a pivot from being exactly zero
_TINY = 1e-300  # the same where a whole column is zero; such a step is refused later


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
        """The failure in words."""
        return _REASONS[self]


_REASONS = {
    Failure.NONE: "solved",
    Failure.TOO_FEW_POINTS: "too few points: a pose needs four, a position with a given rotation two",
    Failure.NOT_FINITE: "a pixel, a covariance or the rotation is not finite, or a pixel is outside the lens model",
    Failure.BAD_COVARIANCE: "a keypoint's covariance is not symmetric and positive definite",
    Failure.DEGENERATE: "the points are coincident or collinear, exactly or within their noise",
    Failure.BEHIND_CAMERA: "the points would lie behind the camera",
    Failure.NOT_CONVERGED: "the search found no minimum",
    Failure.ILL_CONDITIONED: "the points do not determine the pose: its linearised covariance is not valid",
    Failure.BELOW_GROUND: "the camera would be below the ground: points may be swapped",
}


@dataclass(frozen=True)
class Minimum:
    """Poses of least cost; NaN, NaN and infinite where there is none.

    Attributes:
        rotation: (N, 3, 3), world to camera.
        position: (N, 3), of the camera in world axes.
        cost: (N,).
    """

    rotation: Array
    position: Array
    cost: Array


@dataclass(frozen=True)
class Solution(Minimum):
    """The best minimum of every frame, with its covariance.

    Attributes:
        cost: (N,) chi-square of the residuals, or its Student-t counterpart.
        covariance: (N, 6, 6) in world axes, position before rotation. NaN where the frame failed. The rotation part
            is zero where the rotation was given as exact.
        dof: (N,) degrees of freedom of the cost.
        failure: (N,) codes of ``Failure``.
        alternative: The other pose that a plane of points allows, refined as well.
    """

    covariance: Array
    dof: NDArray[np.int64]
    failure: NDArray[np.int64]
    alternative: Minimum

    @property
    def converged(self) -> Mask:
        """Frames with a pose (N,)."""
        return self.failure == 0

    @property
    def reasons(self) -> list[str]:
        """Outcome of each frame in words."""
        return [Failure(code).reason for code in self.failure.tolist()]

    @property
    def ambiguity(self) -> Array:
        """Cost divided by the cost of the alternative (N,): 0 without an alternative, 1 if both fit equally well."""
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = self.cost / self.alternative.cost
        return np.where(self.alternative.cost > 0, np.nan_to_num(ratio), 1.0)


@np.errstate(all="ignore")  # trial steps may leave all bounds, and failed frames are NaN throughout
def solve_pose(
    observations: Observations, *, start: tuple[Array, Array] | None = None, ground: bool = True
) -> Solution:
    """Find rotation and position of the camera from four or more points.

    Args:
        observations: Points and pixels; a given rotation is not used.
        start: Rotation (N, 3, 3) and position (N, 3) to start from. Default: the two poses that the plane through
            the points allows.
        ground: The points lie on the ground (z up), so a camera below them is refused.

    Returns:
        Poses of N frames.
    """
    problem, failure = _prepare(observations, 4)
    if start is not None:
        _check_start(observations, start)
        first = Pose.at(start[0].transpose(1, 2, 0).copy(), start[1].T, problem.centre)
        return _minimise(problem, first, 6, failure, ground)
    extent, axes = principal(problem)
    failure[collinear(extent) & (failure == 0)] = Failure.DEGENERATE
    return _minimise(*first_poses(problem, extent, axes, failure > 0), 6, failure, ground)


@np.errstate(all="ignore")
def solve_position(observations: Observations) -> Solution:
    """Find the position of the camera from two or more points, with its rotation given and taken as exact."""
    R_cam_world = observations.R_cam_world
    if R_cam_world is None:
        raise HaloposeError("a position needs the camera's rotation: give R_cam_world, or solve for the whole pose")
    problem, failure = _prepare(observations, 2)
    if not np.isfinite(R_cam_world).all():
        failure[~np.isfinite(R_cam_world).all((1, 2))] = Failure.NOT_FINITE
    return _minimise(problem, with_linear_position(problem, R_cam_world.transpose(1, 2, 0).copy()), 3, failure, True)


def _check_start(observations: Observations, start: tuple[Array, Array]) -> None:
    expected = (len(observations), 3, 3), (len(observations), 3)
    got = np.shape(start[0]), np.shape(start[1])
    if got != expected:
        raise HaloposeError(f"rotations and positions to start from should have shapes {expected}, got {got}")


class Problem(NamedTuple):
    """Whitened and centred observations, frame last; a last axis of length 1 serves every frame."""

    camera: Camera
    points: Array  # (3, K, N), from the centre of the used points; zero if masked out
    centre: Array  # (3, N)
    lowest: Array  # (N,): height of the lowest used point
    observed: Array  # (2, K, N), normalised but still distorted
    plain: Array  # (2, K, N), without distortion
    whitening: Array  # (3, K, N): entries 11, 22, 21 of L^-1 diag(fx, fy); zero if masked out, NaN in bad frames
    share: Array  # (K, N): one over the number of used points, zero where masked out
    trace: Array  # (K, N) of the covariances, in pixel^2
    kept: NDArray[np.int64]  # (N,): number of used points
    nu: Array | None  # (K, N)

    def take(self, frames: NDArray[np.intp]) -> Problem:
        """Return the frames of an index, in its order."""

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
        """Convert rotations (3, 3, N) and positions (3, N); NaN if the centre is behind the camera."""
        offset = np.einsum("ijn,jn->in", rotation, centre - position)
        depth = np.where(offset[2] > 0, offset[2], np.nan)
        return cls(rotation / depth, offset / depth)

    def moved(self, step: Array) -> Pose:
        """Apply a step (6, N) in rotation, bearing and log inverse depth, or (3, N) without rotation."""
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
        """Return the frames of an index, in its order."""
        return Pose(self.turn[..., frames], self.bearing[:, frames])

    def unpacked(self) -> tuple[Array, Array]:
        """Return rotations (3, 3, N) and the centre in camera axes (3, N)."""
        depth = 1 / np.sqrt(np.add.reduce(self.turn[:, 0] * self.turn[:, 0]))
        return self.turn * depth, self.bearing * depth


class Fit(NamedTuple):
    """A pose with its linearisation."""

    pose: Pose
    normal: Array  # (P + 1, P + 1, N): products of the whitened Jacobian's columns and the residual
    cost: Array  # (N,)

    def take(self, frames: NDArray[np.intp]) -> Fit:
        """Return the frames of an index, in its order."""
        return Fit(self.pose.take(frames), self.normal[..., frames], self.cost[frames])

    def put(self, frames: NDArray[np.intp], other: Fit) -> None:
        """Overwrite frames with those of another fit, in place."""
        for mine, theirs in zip((*self.pose, *self[1:]), (*other.pose, *other[1:]), strict=True):
            mine[..., frames] = theirs


# --- preparation ------------------------------------------------------------------------------------------


def _prepare(observations: Observations, needed: int) -> tuple[Problem, NDArray[np.int64]]:
    """Whiten and centre; the failures (N,) tell which frames cannot be solved."""
    camera, points, pixels = observations.camera, observations.points, observations.pixels
    covariance, mask, nu = observations.covariance, observations.mask, observations.nu
    if covariance.ndim != 4:
        raise HaloposeError(
            "covariances of this solver should have shape (N, K, 2, 2): use solve_jointly for joint ones"
        )
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
        placed = np.where(mask.T, placed, 0.0)  # masked points go to the centre, which is in front of the camera
    dof = None if nu is None else nu[:, None] if nu.ndim == 1 else nu.T
    seen = (observed, plain, whitening, share, trace, kept, dof)
    return Problem(camera, placed, centre, lowest, *seen), failure


def _whitening(camera: Camera, covariance: Array) -> tuple[Array, Array, Mask]:
    """Return entries 11, 22, 21 (3, K, N) of L^-1 diag(fx, fy), traces (K, N), and which are definite (K, N)."""
    xx, xy, yx, yy = covariance.reshape(*covariance.shape[:2], 4).transpose(2, 1, 0)
    determinant, trace = xx * yy - xy * yx, xx + yy
    definite = (determinant > _MIN_ASPECT * trace * trace) & (xx > 0) & (np.abs(xy - yx) <= 1e-6 * trace)
    first, area = np.sqrt(xx), np.sqrt(determinant)
    whitening = np.empty((3, *xx.shape))
    np.divide(camera.fx, first, out=whitening[0])
    np.divide(camera.fy * first, area, out=whitening[1])
    np.divide(-camera.fx * xy, first * area, out=whitening[2])
    return whitening, trace, definite


# --- first poses -----------------------------------------------------------------------------------------


def first_poses(problem: Problem, extent: Array, axes: Array, failed: Mask) -> tuple[Problem, Pose]:
    """Return the problem and the poses to refine: 2 N of them if the points are planes, else N.

    Args:
        problem: N frames.
        extent: Extents (3, N) by ``principal``.
        axes: Axes (3, 3, N) by ``principal``.
        failed: Frames (N,) that have failed already and are skipped.
    """
    if ((extent[2] <= _PLANAR * extent[1]) | failed).all():
        rotation = _planar_rotations(problem, extent, axes)
        problem = problem.take(np.tile(np.arange(len(failed)), 2))
    else:
        rotation = _general_rotations(problem, failed)
    return problem, with_linear_position(problem, rotation)


def collinear(extent: Array) -> Mask:
    """Return the frames (N,) whose points lie on a line or coincide."""
    return np.asarray(extent[1] <= _COLLINEAR * extent[0])


def with_linear_position(problem: Problem, rotation: Array) -> Pose:
    """Return poses with given rotations (3, 3, N); u (1 + s z3) = s z1 + b1 is linear in the inverse depth s."""
    rotated = np.einsum("ijn,jkn->ikn", rotation, problem.points)
    columns = np.zeros((4, 2, *rotated.shape[1:]))
    columns[0, 0] = columns[1, 1] = 1.0
    columns[2] = rotated[:2] - problem.plain * rotated[2]
    columns[3] = problem.plain
    whiten(columns, problem.whitening)
    unknown, _ = solve_normal(products(columns))
    bearing = np.ones((3, rotation.shape[-1]))
    bearing[:2] = unknown[:2]
    return Pose(rotation * np.where(unknown[2] > 0, unknown[2], np.nan), bearing)


def principal(problem: Problem) -> tuple[Array, Array]:
    """Return mean squared extents (3, N) of the used points, largest first, and their axes (3, 3, N) as columns."""
    scatter = np.einsum("ikn,jkn->nij", problem.points * problem.share, problem.points)
    extent, axes = np.linalg.eigh(scatter)
    return extent[:, ::-1].T, axes[..., ::-1].transpose(1, 2, 0)


def _planar_rotations(problem: Problem, extent: Array, axes: Array) -> Array:
    """Return both rotations (3, 3, 2 N) that the plane through the points allows, in closed form (IPPE).

    The slope of the homography at the centre is the upper left part of a rotation along the line of sight, up to a
    scale that makes its larger singular value one. Unit columns give the third row, up to a common sign.

    Reference:
        Collins and Bartoli, Infinitesimal Plane-Based Pose Estimation, IJCV 2014.
    """
    sight, ((e, f), (g, h)) = _homography(problem, extent, axes)
    length = np.sqrt(np.add.reduce(sight * sight) + 1)
    d1, d2 = sight / length
    tilt = -1 / (1 + 1 / length)
    cross = tilt * d1 * d2
    view = np.stack([1 + tilt * d1 * d1, cross, d1, cross, 1 + tilt * d2 * d2, d2, -d1, -d2, 1 / length])
    view = view.reshape(3, 3, -1)  # takes the optical axis to the line of sight
    (a, b), (c, d) = view[:2, :2] + sight[:, None] * np.stack([d1, d2])
    # The slope without the foreshortening along the line of sight, up to a positive factor.
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


def _homography(problem: Problem, extent: Array, axes: Array) -> tuple[Array, Array]:
    """Return the image of the centre (2, N) and the slope (2, 2, N) of the image there along the two longer axes.

    The last entry of the homography is set to one, which is valid because the centre is in front of the camera.
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
    unknown, _ = solve_normal(products(columns * (problem.share > 0)))
    rows = unknown[:6].reshape(2, 3, -1)
    slope = (rows[:, :2] - rows[:, 2:] * unknown[6:]) * spread[:, None] / size
    return middle + spread * rows[:, 2], slope


def _general_rotations(problem: Problem, failed: Mask) -> Array:
    """Return rotations (3, 3, N) for points that are not a plane, by OpenCV's SQPNP; NaN where it finds none."""
    import cv2

    frames = problem.plain.shape[-1]
    points, share = (np.broadcast_to(a, (*a.shape[:-1], frames)) for a in (problem.points, problem.share))
    rotation = np.full((3, 3, frames), np.nan)
    for frame in np.flatnonzero(~failed):
        kept = share[:, frame] > 0
        world, image = points[:, kept, frame].T.copy(), problem.plain[:, kept, frame].T.copy()
        try:
            found, vector, _ = cv2.solvePnP(world, image, np.eye(3), None, flags=cv2.SOLVEPNP_SQPNP)
        except cv2.error:  # raised where all pixels nearly coincide
            continue
        if found:
            rotation[..., frame] = cv2.Rodrigues(vector)[0]
    return rotation


# --- refinement ------------------------------------------------------------------------------------------


def _quaternion() -> Array:
    """Return coefficients (10, 16) of the products q_i q_j of a quaternion in rotation matrix and squared length."""
    table = np.zeros((10, 4, 4))
    table[9] = np.eye(4)
    for i, j, k in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        table[4 * i] = np.diag([1.0, -1.0, -1.0, -1.0])
        table[4 * i, i + 1, i + 1] = 1.0
        table[3 * i + j, i + 1, j + 1] = table[3 * j + i, i + 1, j + 1] = 2.0
        table[3 * i + j, 0, k + 1], table[3 * j + i, 0, k + 1] = -2.0, 2.0
    return table.reshape(10, 16)


def _jacobian() -> Array:
    """Return coefficients (12, 12) of d (u, v) / d (rotation, bearing, log inverse depth).

    They multiply the products of (1, z1, z2, z3) / depth and (u, v, 1), where z is the rotated point.
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
    inverse = 1 / np.sqrt(image[2])  # NaN for a negative depth
    inverse *= inverse
    image *= inverse  # (u, v, 1)
    parts = np.empty((4, 1, *inverse.shape))
    parts[0, 0] = inverse
    np.multiply(turned, inverse, out=parts[1:, 0])
    columns = np.empty((free + 1, 2, *inverse.shape))
    np.matmul(_JACOBIAN[-2 * free :], (parts * image).reshape(12, -1), out=columns[:free].reshape(2 * free, -1))
    if problem.camera.distorted:
        image = _distorted(problem.camera, image, columns[:free])
    np.subtract(problem.observed, image[:2], out=columns[free])
    whiten(columns, problem.whitening)
    if problem.nu is None:
        normal = products(columns)
        return Fit(pose, normal, normal[free, free].copy())
    cost = _reweight(columns, problem.nu)
    return Fit(pose, products(columns), cost)


def _distorted(camera: Camera, image: Array, columns: Array) -> Array:
    """Return distorted (u, v) (2, K, N); the Jacobian columns (P, 2, K, N) are changed in place."""
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
    """Weight whitened columns (P + 1, 2, K, N) for reweighted least squares, in place; return the cost (N,).

    The cost of the Student-t is sum (nu + 2) log(1 + m / nu), twice the negative log-likelihood up to a constant. It
    tends to the chi-square for large nu.
    """
    distance = np.square(columns[-1]).sum(0)
    columns *= np.sqrt((nu + 2) / (nu + distance))
    return ((nu + 2) * np.log1p(distance / nu)).sum(0)


def products(columns: Array) -> Array:
    """Return inner products (P, P, N) of columns (P, 2, K, N)."""
    size, two, count, frames = columns.shape
    flat = columns.reshape(size, two * count, frames)
    return np.einsum("imn,jmn->ijn", flat, flat)


def solve_normal(normal: Array, damping: Array | None = None) -> tuple[Array, Array]:
    """Return the step (P, N) of a normal matrix (P + 1, P + 1, N) and the predicted decrease of the cost (N,)."""
    size = len(normal) - 1
    system = normal.transpose(2, 0, 1)
    if damping is not None:
        system = damped(system, damping)
    step = _solve_systems(system)
    return step, np.add.reduce(step * normal[size, :size])


def _solve_systems(system: Array) -> Array:
    """Solve systems (N, P + 1, P + 1) whose last column is the right-hand side; return (P, N)."""
    size = system.shape[1] - 1
    try:
        return np.asarray(np.linalg.solve(system[:, :size, :size], system[:, :size, size:])[..., 0].T)
    except np.linalg.LinAlgError:  # a frame is exactly singular: its step is refused later
        return _solve_systems(damped(system))


def damped(system: Array, damping: Array | None = None) -> Array:
    """Return matrices (N, P, P) with diagonals raised by a share (N,), by default just enough to be positive."""
    system = system.copy()
    diagonal = system.reshape(len(system), -1)[:, :: system.shape[1] + 1]
    diagonal *= 1 + (_FLOOR if damping is None else damping[:, None])
    diagonal += _TINY
    return system


def refine(problem: Problem, first: Pose, free: int) -> tuple[Fit, Mask]:
    """Find poses of least cost by Gauss-Newton steps, damped only where a step failed.

    Args:
        problem: N frames.
        first: N poses to start from.
        free: Number of unknowns: 6, or 3 where the rotation is fixed.

    Returns:
        The fits, and the frames that converged (N,).
    """
    fit = evaluate(problem, first, free)
    whole, index = fit, np.arange(len(fit.cost))
    converged = np.zeros(len(index), dtype=bool)
    damping: Array | None = None
    for _ in range(_MAX_STEPS if problem.nu is None else _MAX_REWEIGHTED_STEPS):
        step, predicted = solve_normal(fit.normal, damping)
        done = ~(predicted > _GAIN + _RELATIVE_GAIN * fit.cost)
        over = done
        if damping is not None:
            done &= damping == 0
            over = done | (damping > _MAX_DAMPING)
        pose = fit.pose.moved(step)
        if np.count_nonzero(over):
            # The last step is small enough for its gain to be predicted by the linear model.
            last, ended, rest = Fit(pose, fit.normal, fit.cost - predicted), *map(np.flatnonzero, (over, ~over))
            converged[index[ended]] = done[ended]
            whole.put(index[ended], last.take(ended))
            if not len(rest):
                break
            index, problem, fit, pose = index[rest], problem.take(rest), fit.take(rest), pose.take(rest)
            damping = None if damping is None else damping[rest]
        fit, damping = _accept_better(fit, evaluate(problem, pose, len(step)), damping)
    return whole, converged


def _accept_better(fit: Fit, trial: Fit, damping: Array | None) -> tuple[Fit, Array | None]:
    """Return the trial where its cost is lower, and the damping (N,) for the next step; None if there is none."""
    better = trial.cost < fit.cost
    if damping is None and np.count_nonzero(better) == len(better):
        return trial, None
    damping = np.zeros(len(better)) if damping is None else damping
    kept = np.flatnonzero(~better)
    trial.put(kept, fit.take(kept))
    eased = np.where(damping > _FIRST_DAMPING, damping / 10, 0.0)
    damping = np.where(better, eased, np.maximum(10 * damping, _FIRST_DAMPING))
    return trial, damping if damping.any() else None


# --- selection and covariance ----------------------------------------------------------------------------


def _minimise(problem: Problem, first: Pose, free: int, failure: NDArray[np.int64], ground: bool) -> Solution:
    """Refine one or two candidates for each frame and return the better valid one."""
    fit, converged = refine(problem, first, free)
    turn, offset = fit.pose.unpacked()
    covariance, sound = _covariance(_information(problem, fit, free), turn, offset)
    position = (problem.centre - np.einsum("ijn,in->jn", turn, offset)).T
    rotation, cost = turn.transpose(2, 0, 1), fit.cost
    # From pixels alone, a plane seen edge-on looks the same from above and from below.
    margin = _MIN_SIGMAS * np.sqrt(covariance[:, 2, 2]) * (1 if free == 6 else -1)
    height = position[:, 2] - problem.lowest if ground else np.full(len(position), np.inf)
    valid = (height > margin) & sound & converged
    if not (cost < _DOUBTFUL_COST).all():
        valid &= (cost < _DOUBTFUL_COST) | _spread_beyond_noise(problem, free)
    dof = 2 * problem.kept - free
    if len(valid) == len(failure) and valid.all() and not failure.any():
        none = Minimum(rotation * np.nan, position * np.nan, np.full_like(cost, np.inf))
        return Solution(rotation, position, cost, covariance, dof, failure, none)
    code = np.where(height > -np.abs(margin), Failure.DEGENERATE, Failure.BELOW_GROUND)
    behind = np.isnan(cost)
    code[~sound] = Failure.ILL_CONDITIONED
    code[~converged] = Failure.NOT_CONVERGED
    code[behind] = Failure.BEHIND_CAMERA
    if behind.any():
        code[behind & ~_spread_beyond_noise(problem, free)] = Failure.DEGENERATE
    code[valid] = Failure.NONE
    return _choose(rotation, position, np.where(valid, cost, np.inf), covariance, dof, failure, code)


def _spread_beyond_noise(problem: Problem, free: int) -> Mask:
    """Return frames (N,) whose pixels spread more than their noise: both ways for a pose, one way for a position."""
    pixels = problem.observed * problem.camera.centre_and_focal[1]
    pixels = pixels - np.add.reduce(pixels * problem.share, 1)[:, None]
    (xx, xy), (_, yy) = np.einsum("ikn,jkn->ijn", pixels * problem.share, pixels)
    half_gap = np.hypot((xx - yy) / 2, xy)
    variance = (xx + yy) / 2 + (half_gap if free == 3 else -half_gap)
    noise = np.where(problem.share > 0, problem.trace / 2, 0.0) * problem.share
    return np.asarray(variance > _MIN_SIGMAS**2 * noise.sum(0))


def _choose(
    rotation: Array,
    position: Array,
    cost: Array,
    covariance: Array,
    dof: NDArray[np.int64],
    failure: NDArray[np.int64],
    code: NDArray[np.int64],
) -> Solution:
    """Return the candidate of lower cost of each frame, with the other as its alternative; NaN for failures."""
    frames = len(failure)
    swap = cost[-frames:] < cost[:frames]
    best = np.arange(frames) + swap * (len(cost) - frames)
    other = np.arange(frames) + ~swap * (len(cost) - frames)
    failure = np.where(failure == 0, code[best], failure)
    distance = np.square(position[other] - position[best]).sum(1)
    apart = distance > SAME_MINIMUM * covariance[best, :3, :3].trace(0, 1, 2)
    second = _with_nan((failure > 0) | (code[other] > 0) | ~apart, rotation[other], position[other])
    cost_of_second = np.where(np.isnan(second[1][:, 0]), np.inf, cost[other])
    first = _with_nan(failure > 0, rotation[best], position[best], covariance[best])
    cost = np.where(failure == 0, cost[best], np.inf)
    alternative = Minimum(second[0], second[1], cost_of_second)
    return Solution(first[0], first[1], cost, first[2], dof, failure, alternative)


def _with_nan(frames: Mask, *arrays: Array) -> list[Array]:
    """Return arrays (N, ...) with NaN in some frames."""
    return [np.where(frames.reshape(-1, *[1] * (array.ndim - 1)), np.nan, array) for array in arrays]


def _outward() -> Array:
    """Return coefficients (3, 18) from the centre in camera axes to minus its derivative (3, 6) by the six unknowns.

    The derivative by a rotation w is w x centre, by the bearing the depth, by the log inverse depth minus the centre.
    """
    table = np.zeros((3, 3, 6))
    table[..., :3] = -skew(np.eye(3))
    table[2, 0, 3] = table[2, 1, 4] = -1.0
    table[..., 5] = np.eye(3)
    return table.reshape(3, 18)


_OUTWARD = _outward()


def _information(problem: Problem, fit: Fit, free: int) -> Array:
    """Return the normal matrix for the covariance; for a Student-t that of Gaussians with its second moments.

    The weights of the last step and the Fisher information are both too optimistic for a few points.
    """
    if problem.nu is None:
        return fit.normal
    whitening = problem.whitening * np.sqrt(np.maximum(1 - 2 / problem.nu, 0))
    return evaluate(problem._replace(nu=None, whitening=whitening), fit.pose, free).normal


def _covariance(normal: Array, rotation: Array, offset: Array) -> tuple[Array, Mask]:
    """Return covariances (N, 6, 6) of the poses in world axes, and the frames where they are valid (N,)."""
    size = len(normal) - 1
    information = normal[:size, :size].transpose(2, 0, 1)
    try:
        inner = np.linalg.inv(information)
    except np.linalg.LinAlgError:
        inner = np.linalg.inv(damped(information))
    variance = inner.diagonal(axis1=1, axis2=2)
    limit = np.minimum(_MAX_INFLATION / information.diagonal(axis1=1, axis2=2), _VARIANCE_LIMITS[-size:])
    sound = (variance <= limit) & (variance > 0)
    inward = rotation.transpose(2, 1, 0)
    change = (offset.T @ _OUTWARD).reshape(-1, 3, 6)
    outer = np.zeros((len(inner), 6, size))
    np.matmul(inward, change[..., -size:], out=outer[:, :3])
    if size == 6:
        np.negative(inward, out=outer[:, 3:, :3])
    return outer @ inner @ outer.transpose(0, 2, 1), np.asarray(sound.all(1))
