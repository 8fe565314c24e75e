"""Compare the spread of noisy PnP solutions with the covariance stated for them.

    python -m research.pnp_spread

The noise is Gaussian, anisotropic and different for each point. The first table shows runways: a camera of 1,200 px
focal length on a three-degree glide path sees the corners of a 2,500 m x 45 m runway. It has the standard deviations
of the solutions over the stated ones along the runway axes, for the full pose and for the position with known
attitude. Coverage of the 95 % ellipsoid is given with the rotation marginalised out, and with the rotation held fixed
as in the paper.

The second table shows objects: the four corners of a tag, eight of a cube, and 48 of a chessboard. All points also
move by a common error of half a pixel, stated as a joint covariance or left out of it. Coverage is of the 95 % region
of all six parameters.
"""

from __future__ import annotations

import argparse

import numpy as np
from scipy.stats import chi2

from halopose.geometry.camera import Camera, exp_so3, log_so3, look_at, project, project_points
from halopose.geometry.integrity import ambiguous
from halopose.geometry.object_pose import solve_pnp
from halopose.geometry.observations import Observations
from halopose.geometry.pnp import Solution, solve_pose, solve_position
from halopose.geometry.propagation import fixed_rotation_covariance
from halopose.landing.runway import runway_corners
from halopose.types import Array

RUNWAY_CAMERA = Camera(1200.0, 1200.0, 319.5, 191.5, 640, 384)
CORNERS = runway_corners(2500.0, 45.0)
OBJECT_CAMERA = Camera.from_opencv(
    [[800.0, 0.0, 320.0], [0.0, 790.0, 240.0], [0.0, 0.0, 1.0]], [-0.1, 0.05, 1e-3, -5e-4], (640, 480)
)
OBJECTS = {
    "tag": 0.1 * np.array([[-1.0, 1, 0], [1, 1, 0], [1, -1, 0], [-1, -1, 0]]),
    "cube": 0.1 * np.array([[x, y, z] for x in (-1.0, 1) for y in (-1.0, 1) for z in (-1.0, 1)]),
    "board on a hand": 0.03 * np.array([[x, y, 0.0] for y in range(6) for x in range(8)]),
}
RVEC, TVEC = np.array([0.5, -0.6, 0.3]), np.array([0.05, -0.02, 0.9])
COMMON = 0.5  # standard deviation in pixels of the error that all points of an object share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--solves", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(f"{given.solves} solutions a row; spread is measured / stated; coverage is of the 95 % region")
    print(
        f"{'unknown':10}{'distance':>9}{'noise, px':>11}{'stated x, y, z (m)':>26}{'spread x, y, z':>20}"
        f"{'full':>8}{'fixed':>8}{'failed':>8}{'ambiguous':>11}"
    )
    for unknown in ("pose", "position"):
        for distance in (500.0, 1500.0, 4000.0):
            for low, high in ((0.3, 0.3), (0.3, 1.0)):
                print(runway_row(unknown, distance, low, high, given.solves, given.seed))
    print(f"\n{'object':18}{'errors':12}{'stated as':14}{'spread':>14}{'in 95 %':>9}{'failed':>8}")
    for name, points in OBJECTS.items():
        for errors, stated in (("independent", "independent"), ("common", "joint"), ("common", "independent")):
            print(object_row(name, points, errors, stated, given.solves, given.seed))


def runway_row(unknown: str, distance: float, low: float, high: float, solves: int, seed: int) -> str:
    """One line of the table of runways."""
    rng = np.random.default_rng(seed)
    position = np.array([-distance, 0.006 * distance, distance * np.tan(np.deg2rad(3))])
    rotation = look_at(position, [min(300.0, 0.3 * distance), 0.0, 0.0], 0.02)
    exact = project_points(RUNWAY_CAMERA, rotation, position, CORNERS)
    pixels, one = noisy(exact, low, high, solves, rng)
    covariance = np.broadcast_to(one, (solves, 4, 2, 2))
    stated = solve_runway(unknown, exact[None], covariance[:1], rotation)
    solution = solve_runway(unknown, pixels, covariance, rotation)
    good = solution.converged
    error = solution.position[good] - position
    fixed = fixed_rotation_covariance(
        RUNWAY_CAMERA, solution.rotation[good], solution.position[good], CORNERS, covariance[good]
    )
    deviation = np.sqrt(np.diag(stated.covariance[0])[:3])
    spread = error.std(0) / deviation
    noise = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    return (
        f"{unknown:10}{distance:>7.0f} m{noise:>11}"
        f"{' '.join(f'{value:8.2f}' for value in deviation)}{' '.join(f'{value:6.2f}' for value in spread):>20}"
        f"{coverage(error, solution.covariance[good, :3, :3]):>8.1%}{coverage(error, fixed):>8.1%}"
        f"{np.mean(~good):>8.1%}{ambiguous(solution).mean():>11.1%}"
    )


def solve_runway(unknown: str, pixels: Array, covariance: Array, rotation: Array) -> Solution:
    """The full pose, or the position with known attitude."""
    if unknown == "pose":
        return solve_pose(Observations(RUNWAY_CAMERA, CORNERS, pixels, covariance))
    turned = np.broadcast_to(rotation, (len(pixels), 3, 3))
    return solve_position(Observations(RUNWAY_CAMERA, CORNERS, pixels, covariance, turned))


def object_row(name: str, points: Array, errors: str, stated: str, solves: int, seed: int) -> str:
    """One line of the table of objects."""
    rng, count = np.random.default_rng(seed), len(points)
    exact = project(OBJECT_CAMERA, points @ exp_so3(RVEC).T + TVEC)
    pixels, independent = noisy(exact, 0.2, 0.6, solves, rng)
    covariance = independent
    if errors == "common":
        pixels = pixels + rng.normal(0, COMMON, (solves, 1, 2))
        covariance = independent + COMMON**2 * np.eye(2)
    if stated == "joint":
        joint = np.zeros((count, 2, count, 2))
        joint[np.arange(count), :, np.arange(count), :] = independent
        covariance = (joint + COMMON**2 * np.eye(2)[None, :, None, :]).reshape(2 * count, 2 * count)
    deviation = np.sqrt(np.diag(solve_pnp(points, exact, covariance, OBJECT_CAMERA).covariance))
    poses = solve_pnp(points, pixels, covariance, OBJECT_CAMERA)
    good = poses.retval
    turn = log_so3(exp_so3(poses.rvec[good]) @ exp_so3(RVEC).T)
    error = np.concatenate([poses.tvec[good] - TVEC, turn], axis=1)
    spread = error.std(0) / deviation
    return (
        f"{name:18}{errors:12}{stated:14}{f'{spread.min():.2f} to {spread.max():.2f}':>14}"
        f"{coverage(error, poses.covariance[good]):>9.1%}{np.mean(~good):>8.1%}"
    )


def noisy(exact: Array, low: float, high: float, solves: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Pixels (solves, K, 2) with noise whose standard deviations lie between two limits, and its covariances."""
    count = len(exact)
    turn = exp_so3(rng.uniform(0, np.pi, (count, 1)) * [0.0, 0.0, 1.0])[:, :2, :2]
    factor = turn * rng.uniform(low, high, (count, 1, 2))
    return exact + (factor @ rng.normal(size=(solves, count, 2, 1)))[..., 0], factor @ factor.swapaxes(1, 2)


def coverage(error: Array, covariance: Array) -> float:
    """Share of errors (N, D) inside the 95 % ellipsoids of covariances (N, D, D)."""
    distance = np.einsum("ni,nij,nj->n", error, np.linalg.inv(covariance), error)
    return float(np.mean(distance < chi2.ppf(0.95, error.shape[1])))


if __name__ == "__main__":
    main()
