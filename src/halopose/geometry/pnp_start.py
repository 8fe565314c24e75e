"""Where the search for a pose begins: both poses that a plane allows, or one of points that are no plane.

In: a ``Problem`` of ``pnp_refine``. Out: a ``Pose`` for each frame, or two; weights count only for the position.
"""

from __future__ import annotations

import numpy as np

from halopose.geometry.camera import Array
from halopose.geometry.pnp_refine import Mask, Pose, Problem, products, solve_normal, whiten

_PLANAR = 0.01  # thickness^2 / width^2 under which points start from the plane through them
_COLLINEAR = 1e-8  # width^2 / length^2 of the points under which they are a line


def first_poses(problem: Problem, extent: Array, axes: Array, failed: Mask) -> tuple[Problem, Pose]:
    """Poses to refine, with the problem that fits them: of 2 N frames if the points are planes, else of N.

    ``extent`` and ``axes`` are those of ``principal``; frames that failed (N,) already are not looked at.
    """
    if ((extent[2] <= _PLANAR * extent[1]) | failed).all():
        rotation = _planar_rotations(problem, extent, axes)
        problem = problem.take(np.tile(np.arange(len(failed)), 2))
    else:
        rotation = _general_rotations(problem, failed)
    return problem, with_linear_position(problem, rotation)


def collinear(extent: Array) -> Mask:
    """Which frames' points are a line, or one point (N,)."""
    return np.asarray(extent[1] <= _COLLINEAR * extent[0])


def with_linear_position(problem: Problem, rotation: Array) -> Pose:
    """Poses with given rotations (3, 3, N): with s the inverse depth, u (1 + s z3) = s z1 + b1 is linear."""
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
    """Mean squared extents (3, N) of the kept points, largest first, and their axes (3, 3, N) as columns."""
    scatter = np.einsum("ikn,jkn->nij", problem.points * problem.share, problem.points)
    extent, axes = np.linalg.eigh(scatter)
    return extent[:, ::-1].T, axes[..., ::-1].transpose(1, 2, 0)


def _planar_rotations(problem: Problem, extent: Array, axes: Array) -> Array:
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


def _homography(problem: Problem, extent: Array, axes: Array) -> tuple[Array, Array]:
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
    unknown, _ = solve_normal(products(columns * (problem.share > 0)))
    rows = unknown[:6].reshape(2, 3, -1)
    slope = (rows[:, :2] - rows[:, 2:] * unknown[6:]) * spread[:, None] / size
    return middle + spread * rows[:, 2], slope


def _general_rotations(problem: Problem, failed: Mask) -> Array:
    """Rotations (3, 3, N) of points that are no plane, frame by frame by OpenCV's SQPNP; NaN where it finds none.

    It gives up on pixels that are one point, or nearly, with an error of its own.
    """
    import cv2

    frames = problem.plain.shape[-1]
    points, share = (np.broadcast_to(a, (*a.shape[:-1], frames)) for a in (problem.points, problem.share))
    rotation = np.full((3, 3, frames), np.nan)
    for frame in np.flatnonzero(~failed):
        kept = share[:, frame] > 0
        world, image = points[:, kept, frame].T.copy(), problem.plain[:, kept, frame].T.copy()
        try:
            found, vector, _ = cv2.solvePnP(world, image, np.eye(3), None, flags=cv2.SOLVEPNP_SQPNP)
        except cv2.error:
            continue
        if found:
            rotation[..., frame] = cv2.Rodrigues(vector)[0]
    return rotation
