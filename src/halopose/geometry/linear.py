"""One linearisation of the residuals of a frame, and all solutions that leave out one point.

Errors of the rotation and of the intrinsics, and causes shared by the points, become unknowns with a prior. The rows
of different points are then independent, and leaving out a point subtracts its rows from the normal matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from halopose.geometry.camera import intrinsics_jacobian, pose_jacobian, project_points, to_camera
from halopose.geometry.observations import Observations
from halopose.geometry.pnp import Solution
from halopose.types import Array, Mask


@dataclass(frozen=True)
class Linearisation:
    """Solutions with all points and without each of G groups of them; infinite where there is none.

    Attributes:
        covariance: Covariance of the position with all points (N, 3, 3).
        covariance_without: Covariance of the position without each group (N, G, 3, 3).
        covariance_free: The same with all points, if the camera's rotation is not known after all, and if its
            intrinsics are not (N, 2, 3, 3); infinite where they are given as exact.
        separation: Change of the position when a group is left out (N, G, 3).
        shares: Decrease of the chi-square when a group is left out (N, G). Without a fault it is chi-square with two
            degrees of freedom per point.
    """

    covariance: Array
    covariance_without: Array
    covariance_free: Array
    separation: Array
    shares: Array


def linearise(observations: Observations, solution: Solution, groups: Mask | None = None) -> Linearisation:
    """Linearise at the solutions of N frames, all of which have converged.

    Args:
        observations: Points and pixels of N frames.
        solution: Their solutions.
        groups: Which points (G, K) to leave out together; default: each point alone.
    """
    given, mask = observations.R_cam_world, observations.used
    R_cam_world = solution.rotation if given is None else given
    jacobian, prior, free = _unknowns(observations, R_cam_world, solution.position)
    residual = observations.pixels - project_points(
        observations.camera, R_cam_world, solution.position, observations.points
    )
    used = mask[..., None, None]
    factor = np.linalg.inv(np.linalg.cholesky(np.where(used, observations.covariance, np.eye(2))))
    # np.where instead of a product with zero: masked points may be NaN or behind the camera.
    rows = np.where(used, factor @ jacobian, 0.0)
    left = np.where(used[..., 0], (factor @ residual[..., None])[..., 0], 0.0)
    normals = np.swapaxes(rows, -1, -2) @ rows  # (N, K, P, P)
    pulls = (np.swapaxes(rows, -1, -2) @ left[..., None])[..., 0]
    total, pull = normals.sum(1) + np.diag(prior), pulls.sum(1)
    alone = np.stack([scaled_inverse(total - np.diag(prior * rows)) for rows in free], axis=1)[..., :3, :3]
    left_out = (np.eye(mask.shape[1]) if groups is None else groups).astype(np.float64)
    normals = np.einsum("gk,nkij->ngij", left_out, normals)
    pulls = np.einsum("gk,nki->ngi", left_out, pulls)
    lost = np.square(left).sum(-1) @ left_out.T
    inverse = scaled_inverse(total)
    others = scaled_inverse(total[:, None] - normals)
    finite = np.isfinite(others[..., 0, 0])
    known = np.where(finite[..., None, None], others, 0.0)
    step = (inverse @ pull[..., None])[..., 0]
    moved = (known @ (pull[:, None] - pulls)[..., None])[..., 0]
    gained = (pull * step).sum(-1)
    kept = ((pull[:, None] - pulls) * moved).sum(-1)
    shares = lost + kept - gained[:, None]
    in_use: Mask = np.asarray((mask[:, None] & (left_out > 0)).any(2), dtype=bool)
    separation = np.where(in_use[..., None], moved[..., :3] - step[:, None, :3], 0.0)
    shares = np.where(finite & in_use, np.maximum(shares, 0.0), 0.0)
    alone = np.where(np.array([rows.any() for rows in free])[:, None, None], alone, np.inf)
    return Linearisation(inverse[:, :3, :3], others[..., :3, :3], alone, separation, shares)


def _unknowns(observations: Observations, R_cam_world: Array, p_world: Array) -> tuple[Array, Array, list[Mask]]:
    """Return the Jacobian (N, K, 2, P) by position and scaled error sources, the prior (P,), and which unknowns (P,)
    are the rotation and which the intrinsics.
    """
    camera, points = observations.camera, observations.points
    by_pose = pose_jacobian(camera, R_cam_world, p_world, points)
    none = by_pose[..., :0]
    position, turns, lens = by_pose[..., :3], none, none
    if observations.R_cam_world is None:
        position = by_pose
    elif observations.attitude_covariance is not None:
        spread = np.broadcast_to(observations.attitude_covariance, (len(observations), 3, 3))
        turns = by_pose[..., 3:] @ root_of(spread)[:, None]
    if observations.intrinsics_covariance is not None:
        by_lens = intrinsics_jacobian(camera, to_camera(R_cam_world, p_world, points))
        lens = by_lens @ root_of(observations.intrinsics_covariance)
        lens = lens[..., (np.nan_to_num(lens) != 0).any((0, 1, 2))]  # parameters that are exact have no column
    parts = [position, turns, lens, none if observations.shared is None else observations.shared]
    kind = np.repeat(np.arange(len(parts)), [part.shape[-1] for part in parts])
    return np.concatenate(parts, axis=-1), (kind > 0).astype(np.float64), [kind == 1, kind == 2]


def root_of(covariance: Array) -> Array:
    """Return R with covariance (..., m, m) = R R'; the covariance may be singular."""
    values, vectors = np.linalg.eigh(covariance)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0))[..., None, :])


def scaled_inverse(matrices: Array) -> Array:
    """Invert positive definite matrices (..., P, P) after scaling their diagonals to one; infinite where singular."""
    diagonal = np.einsum("...ii->...i", matrices)
    sound = (diagonal > 0).all(-1)
    size = matrices.shape[-1]
    scale = 1 / np.sqrt(np.where(sound[..., None], diagonal, 1.0))
    scaled = np.where(sound[..., None, None], matrices * scale[..., None] * scale[..., None, :], np.eye(size))
    finite = np.asarray(np.isfinite(scaled).all((-2, -1)))  # else the eigenvalues do not converge
    scaled = np.where(finite[..., None, None], scaled, np.eye(size))
    sound = sound & finite & (np.linalg.eigvalsh(scaled)[..., 0] > 1e-13)
    inner = np.linalg.inv(np.where(sound[..., None, None], scaled, np.eye(size)))
    return np.where(sound[..., None, None], inner * scale[..., None] * scale[..., None, :], np.inf)
