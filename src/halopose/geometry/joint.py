"""PnP with keypoints that err together: one covariance of all of them in place of one each.

In: what ``pnp`` takes, but covariances (N, 2 K, 2 K) in the order u1, v1, u2, ..., such as
``PoseDistributions.joint_covariance``. Out: a ``Solution`` whose pose, cost and covariance count what keypoints
have in common; it starts where each of them alone leads, from both poses that a plane allows.
"""

from __future__ import annotations

import math

import numpy as np

from halopose.errors import HaloposeError
from halopose.geometry.attitude import block_diagonal, linearised_pose, own_blocks, solve_with_attitude
from halopose.geometry.camera import Array, Camera, perturb
from halopose.geometry.pnp import SAME, Failure, Minimum, Solution, solve_pose
from halopose.geometry.pnp_refine import Mask
from halopose.uncertainty.joint_distribution import squared_radius

_STEPS = 10
_CONVERGED = 1e-6  # standard deviations that the last step may still go


def solve_jointly(
    camera: Camera,
    points: Array,
    pixels: Array,
    covariance: Array,
    rotation: Array | None = None,
    *,
    attitude: Array | None = None,
    intrinsics: Array | None = None,
    mask: Mask | None = None,
    ground: bool = True,
) -> Solution:
    """The pose of least chi-square under a joint covariance (N, 2 K, 2 K); the position alone with a rotation.

    attitude, intrinsics: covariances of a given rotation and of the camera, as ``solve_with_attitude`` takes them.
    ground: the points lie on the ground, as for ``solve_pose``.

    >>> from halopose.geometry.camera import look, project_points
    >>> camera = Camera.from_fov(640, 384, 0.5)
    >>> plate = np.array([[0, 1, 0], [0, -1, 0], [5, -1, 0], [5, 1, 0.0]])
    >>> eye = np.array([-9.0, 0.5, 2.0])
    >>> pixels = project_points(camera, look(eye, [3.0, 0, 0]), eye, plate)[None]
    >>> joint = 0.5 * np.eye(8) + 0.5  # all coordinates have one half of their error in common
    >>> solve_jointly(camera, plate, pixels, joint[None]).position.round(3).tolist()
    [[-9.0, 0.5, 2.0]]
    """
    size = 2 * pixels.shape[1]
    if covariance.shape != (len(pixels), size, size):
        raise HaloposeError(f"joint covariances should have shape {(len(pixels), size, size)}, got {covariance.shape}")
    if rotation is not None:
        known = np.zeros((3, 3)) if attitude is None else attitude
        seen = camera, points, pixels, covariance, rotation, known
        return solve_with_attitude(*seen, intrinsics=intrinsics, mask=mask)
    if attitude is not None or intrinsics is not None:
        raise HaloposeError("an error of attitude or camera takes a given rotation: solve for the position")
    first = solve_pose(camera, points, pixels, own_blocks(covariance), mask=mask, ground=ground)
    if not first.converged.any():
        return first
    mask = np.ones(pixels.shape[:2], dtype=bool) if mask is None else mask
    one, other = (_minimum(camera, points, pixels, covariance, mask, start) for start in (first, first.alternative))
    return _better(first, one, other)


def position_ellipsoid(solution: Solution, probability: float, nu: float = math.inf) -> Array:
    """Matrices M (N, 3, 3): (p - position)' M^-1 (p - position) <= 1 holds the true p with a probability.

    nu: degrees of freedom of the keypoints' joint Student-t, ``PoseDistributions.joint_dof``. A position is linear
    in the pixels as far as its covariance is true, and what is linear in a t is a t with as many.

    >>> from halopose.geometry.camera import look, project_points
    >>> camera = Camera.from_fov(640, 384, 0.5)
    >>> plate = np.array([[0, 1, 0], [0, -1, 0], [5, -1, 0], [5, 1, 0.0]])
    >>> eye = np.array([-9.0, 0.5, 2.0])
    >>> pixels = project_points(camera, look(eye, [3.0, 0, 0]), eye, plate)[None]
    >>> solution = solve_jointly(camera, plate, pixels, np.eye(8)[None])
    >>> sizes = [np.sqrt(position_ellipsoid(solution, 0.95, nu)[0, 0, 0]) for nu in (np.inf, 10.0)]
    >>> bool(1.0 < sizes[1] / sizes[0] < 1.1)
    True
    """
    if not (0 < probability < 1 and nu > 2):
        raise HaloposeError(
            "an ellipsoid takes a probability between 0 and 1 and more than 2 degrees of freedom, "
            f"got {probability} and {nu}"
        )
    scale = 1.0 if math.isinf(nu) else (nu - 2) / nu
    return np.asarray(solution.covariance[:, :3, :3] * (scale * squared_radius(3, probability, nu)))


def _minimum(
    camera: Camera, points: Array, pixels: Array, covariance: Array, mask: Mask, start: Minimum
) -> tuple[Minimum, Array]:
    """Where the joint law is least near N poses, and the covariances (N, 6, 6); nowhere if it comes to no rest."""
    some = np.flatnonzero(np.isfinite(start.cost))
    frames = len(start.cost)
    result = Minimum(np.full((frames, 3, 3), np.nan), np.full((frames, 3), np.nan), np.full(frames, np.inf))
    spread = np.full((frames, 6, 6), np.nan)
    if not len(some):
        return result, spread
    placed = points if points.ndim == 2 else points[some]
    rotation, position, cost, total, sound = _refined(
        camera, placed, pixels[some], covariance[some], mask[some], start.rotation[some], start.position[some]
    )
    found = some[sound]
    result.rotation[found], result.position[found], result.cost[found] = (
        rotation[sound],
        position[sound],
        cost[sound],
    )
    spread[found] = total[sound]
    return result, spread


def _better(first: Solution, one: tuple[Minimum, Array], other: tuple[Minimum, Array]) -> Solution:
    """The lesser of two minima as the solution and the other as its alternative, unless they are one."""
    swap = other[0].cost < one[0].cost
    best, second = _chosen(swap, other[0], one[0]), _chosen(swap, one[0], other[0])
    covariance = np.where(swap[:, None, None], other[1], one[1])
    distance = np.square(second.position - best.position).sum(1)
    alone = ~(distance > SAME * covariance[:, :3, :3].trace(0, 1, 2))
    nowhere = Minimum(np.full_like(second.rotation, np.nan), second.position * np.nan, np.full_like(best.cost, np.inf))
    failure = np.where(first.converged & np.isinf(best.cost), Failure.NOT_CONVERGED, first.failure)
    return Solution(
        best.rotation, best.position, best.cost, covariance, first.dof, failure, _chosen(alone, nowhere, second)
    )


def _chosen(which: Mask, one: Minimum, other: Minimum) -> Minimum:
    """The one where ``which`` (N,) is true, else the other."""
    return Minimum(
        np.where(which[:, None, None], one.rotation, other.rotation),
        np.where(which[:, None], one.position, other.position),
        np.where(which, one.cost, other.cost),
    )


def _refined(
    camera: Camera,
    points: Array,
    pixels: Array,
    covariance: Array,
    mask: Mask,
    rotation: Array,
    position: Array,
) -> tuple[Array, Array, Array, Array, Mask]:
    """Gauss-Newton's poses, their costs (N,) and covariances (N, 6, 6), and which of them came to rest (N,)."""
    kept = np.repeat(mask, 2, axis=1)
    factor = np.linalg.inv(np.linalg.cholesky(block_diagonal(covariance, kept)))
    for _ in range(_STEPS):
        by_pose, residual = linearised_pose(camera, rotation, position, points, pixels, kept)
        rows, left = factor @ by_pose, factor @ residual[..., None]
        # Metres and radians differ by orders of magnitude: columns are scaled alike before the inverse.
        scale = 1 / np.sqrt(np.square(rows).sum(1, keepdims=True))
        scaled = rows * scale
        transposed = np.swapaxes(scaled, 1, 2)
        total = np.linalg.inv(transposed @ scaled) * scale * np.swapaxes(scale, 1, 2)
        step = (total @ np.swapaxes(rows, 1, 2) @ left)[..., 0]
        rotation, position = perturb(rotation, position, step)
        # How far the step goes in units of its own spread is how much it lowers the chi-square.
        gone = np.linalg.norm((rows @ step[..., None])[..., 0], axis=1)
        if (gone < _CONVERGED).all():
            break
    _, residual = linearised_pose(camera, rotation, position, points, pixels, kept)
    cost = np.square(factor @ residual[..., None]).sum((1, 2))
    return rotation, position, cost, total, np.asarray(gone < 1e-2)
