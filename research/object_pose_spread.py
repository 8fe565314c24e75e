"""Does the spread of noisy object poses match the covariance that ``solve_pnp`` states with them?

    python -m research.object_pose_spread

Four corners of a tag, eight of a cube, and the 48 corners of a chessboard as a camera on a robot's hand sees them,
with Gaussian noise that is anisotropic and different for each point; then the same with all points moved together
by half a pixel, stated as a joint covariance, and the same again with that joint covariance left out. The table
shows standard deviations of the solves over the stated ones, and how often the 95 % region of all six numbers
holds the truth.
"""

from __future__ import annotations

import argparse

import numpy as np
from scipy.stats import chi2

from halopose.geometry.camera import Array, Camera, exp_so3, log_so3, project
from halopose.geometry.object_pose import solve_pnp

CAMERA = Camera.from_opencv(
    [[800.0, 0.0, 320.0], [0.0, 790.0, 240.0], [0.0, 0.0, 1.0]], [-0.1, 0.05, 1e-3, -5e-4], (640, 480)
)
OBJECTS = {
    "tag": 0.1 * np.array([[-1.0, 1, 0], [1, 1, 0], [1, -1, 0], [-1, -1, 0]]),
    "cube": 0.1 * np.array([[x, y, z] for x in (-1.0, 1) for y in (-1.0, 1) for z in (-1.0, 1)]),
    "board on a hand": 0.03 * np.array([[x, y, 0.0] for y in range(6) for x in range(8)]),
}
RVEC, TVEC = np.array([0.5, -0.6, 0.3]), np.array([0.05, -0.02, 0.9])
TOGETHER = 0.5  # pixels that all points move together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--solves", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(f"{arguments.solves} solves a row; spread is measured / stated, smallest and largest of the six")
    print(f"{'object':18}{'errors':12}{'stated as':14}{'spread':>14}{'in 95 %':>9}{'failed':>8}")
    for name, points in OBJECTS.items():
        for errors, stated in (("apart", "apart"), ("together", "joint"), ("together", "apart")):
            print(row(name, points, errors, stated, arguments.solves, arguments.seed))


def row(name: str, points: Array, errors: str, stated: str, solves: int, seed: int) -> str:
    """One line of the table."""
    rng, count = np.random.default_rng(seed), len(points)
    factor = exp_so3(rng.uniform(0, np.pi, (count, 1)) * [0.0, 0.0, 1.0])[:, :2, :2] * rng.uniform(
        0.2, 0.6, (count, 1, 2)
    )
    each = factor @ factor.swapaxes(1, 2)
    exact = project(CAMERA, points @ exp_so3(RVEC).T + TVEC)
    pixels = exact + (factor @ rng.normal(size=(solves, count, 2, 1)))[..., 0]
    covariance = each
    if errors == "together":
        pixels = pixels + rng.normal(0, TOGETHER, (solves, 1, 2))
        covariance = each + TOGETHER**2 * np.eye(2)
    if stated == "joint":
        joint = np.zeros((count, 2, count, 2))
        joint[np.arange(count), :, np.arange(count), :] = each
        covariance = (joint + TOGETHER**2 * np.eye(2)[None, :, None, :]).reshape(2 * count, 2 * count)
    expected = np.sqrt(np.diag(solve_pnp(points, exact, covariance, CAMERA).covariance))
    poses = solve_pnp(points, pixels, covariance, CAMERA)
    good = poses.retval
    turn = log_so3(exp_so3(poses.rvec[good]) @ exp_so3(RVEC).T)
    error = np.concatenate([poses.tvec[good] - TVEC, turn], axis=1)
    spread = error.std(0) / expected
    distance = np.einsum("ni,nij,nj->n", error, np.linalg.inv(poses.covariance[good]), error)
    held = np.mean(distance < chi2.ppf(0.95, 6))
    return (
        f"{name:18}{errors:12}{stated:14}{f'{spread.min():.2f} to {spread.max():.2f}':>14}{held:>9.1%}"
        f"{np.mean(~good):>8.1%}"
    )


if __name__ == "__main__":
    main()
