"""Does the spread of noisy PnP solves match the covariance that is reported with them?

    python -m research.pnp_spread

A camera of 1,200 px focal length on a three-degree glide path sees the corners of a 2,500 m x 45 m runway with
Gaussian noise, anisotropic and different for each corner. For the full pose and for the position with the attitude
given, the table shows the standard deviations of 1,000 solves over the predicted ones along the runway axes, and
how often the 95 % ellipsoid holds the true position: in the full form, with the rotation marginalised out, and in
the paper's form, with the rotation held fixed.
"""

from __future__ import annotations

import argparse

import numpy as np
from scipy.stats import chi2

from halopose.geometry.camera import Array, Camera, exp_so3, look, project_points
from halopose.geometry.integrity import ambiguous
from halopose.geometry.pnp import Solution, solve_pose, solve_position
from halopose.geometry.propagation import fixed_rotation_covariance
from halopose.landing.runway import runway_corners

CAMERA = Camera(1200.0, 1200.0, 319.5, 191.5, 640, 384)
CORNERS = runway_corners(2500.0, 45.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--solves", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(f"{arguments.solves} solves a row; spread is measured / predicted; coverage is of the 95 % ellipsoid")
    print(
        f"{'unknown':10}{'distance':>9}{'noise, px':>11}{'predicted x, y, z (m)':>26}{'spread x, y, z':>20}"
        f"{'full':>8}{'fixed':>8}{'failed':>8}{'ambiguous':>11}"
    )
    for unknown in ("pose", "position"):
        for distance in (500.0, 1500.0, 4000.0):
            for low, high in ((0.3, 0.3), (0.3, 1.0)):
                print(row(unknown, distance, low, high, arguments.solves, arguments.seed))


def row(unknown: str, distance: float, low: float, high: float, solves: int, seed: int) -> str:
    """One line of the table."""
    rng = np.random.default_rng(seed)
    position = np.array([-distance, 0.006 * distance, distance * np.tan(np.deg2rad(3))])
    rotation = look(position, [min(300.0, 0.3 * distance), 0.0, 0.0], 0.02)
    exact = project_points(CAMERA, rotation, position, CORNERS)
    factor = exp_so3(rng.uniform(0, np.pi, (4, 1)) * [0.0, 0.0, 1.0])[:, :2, :2] * rng.uniform(low, high, (4, 1, 2))
    covariance = np.broadcast_to(factor @ factor.swapaxes(1, 2), (solves, 4, 2, 2))
    pixels = exact + (factor @ rng.normal(size=(solves, 4, 2, 1)))[..., 0]
    predicted = solve(unknown, exact[None], covariance[:1], rotation)
    solution = solve(unknown, pixels, covariance, rotation)
    good = solution.converged
    error = solution.position[good] - position
    fixed = fixed_rotation_covariance(
        CAMERA, solution.rotation[good], solution.position[good], CORNERS, covariance[good]
    )
    deviation = np.sqrt(np.diag(predicted.covariance[0])[:3])
    spread = error.std(0) / deviation
    noise = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    return (
        f"{unknown:10}{distance:>7.0f} m{noise:>11}"
        f"{' '.join(f'{value:8.2f}' for value in deviation)}{' '.join(f'{value:6.2f}' for value in spread):>20}"
        f"{coverage(error, solution.covariance[good, :3, :3]):>8.1%}{coverage(error, fixed):>8.1%}"
        f"{np.mean(~good):>8.1%}{ambiguous(solution).mean():>11.1%}"
    )


def solve(unknown: str, pixels: Array, covariance: Array, rotation: Array) -> Solution:
    if unknown == "pose":
        return solve_pose(CAMERA, CORNERS, pixels, covariance)
    return solve_position(CAMERA, CORNERS, pixels, covariance, np.broadcast_to(rotation, (len(pixels), 3, 3)))


def coverage(error: Array, covariance: Array) -> float:
    """Share of errors (N, 3) inside the 95 % ellipsoids of covariances (N, 3, 3)."""
    distance = np.einsum("ni,nij,nj->n", error, np.linalg.inv(covariance), error)
    return float(np.mean(distance < chi2.ppf(0.95, 3)))


if __name__ == "__main__":
    main()
