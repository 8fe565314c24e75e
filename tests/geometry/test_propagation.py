"""Every first-order covariance against re-solved samples, and the forms against each other."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halopose.errors import HaloposeError
from halopose.geometry.camera import INTRINSICS, Mount, body_pose, exp_so3, perturb, pose_difference, project_points
from halopose.geometry.observations import Observations
from halopose.geometry.pnp import solve_pose, solve_position
from halopose.geometry.propagation import (
    body_covariance,
    camera_attitude_covariance,
    fixed_rotation_covariance,
    monte_carlo_covariance,
    pose_covariance,
    position_covariance,
    unscented_covariance,
)
from halopose.types import Array
from tests.helpers.approaches import CAMERA, CORNERS, LENS, NoisyFrames, sight

SEEDS = st.integers(0, 2**32 - 1)
FRAMES = 3000


def deviations(covariance: Array) -> Array:
    return np.sqrt(np.diagonal(covariance, axis1=-2, axis2=-1))


def assert_alike(actual: Array, expected: Array, tolerance: float) -> None:
    """Matrices equal relative to the deviations on their diagonals."""
    scale = deviations(expected)[..., :, None] * deviations(expected)[..., None, :]
    np.testing.assert_allclose(actual / scale, expected / scale, atol=tolerance)


def pose_of(seen: NoisyFrames) -> tuple[Array, Array]:
    return seen.rotation[None], seen.position[None]


@given(SEEDS, st.sampled_from([500.0, 1500.0, 4000.0]), st.booleans())
def test_the_solver_reports_these_very_covariances(seed: int, distance: float, distorted: bool) -> None:
    camera = LENS if distorted else CAMERA
    seen = sight(distance, 1, np.random.default_rng(seed), camera=camera)
    frame = (CORNERS, seen.covariance)
    full = solve_pose(Observations(camera, CORNERS, seen.exact[None], seen.covariance))
    assert_alike(full.covariance, pose_covariance(camera, *pose_of(seen), *frame), 1e-6)
    alone = solve_position(Observations(camera, CORNERS, seen.exact[None], seen.covariance, seen.rotations))
    assert_alike(alone.covariance[:, :3, :3], fixed_rotation_covariance(camera, *pose_of(seen), *frame), 1e-6)


@given(SEEDS)
def test_marginalising_the_rotation_never_shrinks_the_position(seed: int) -> None:
    seen = sight(1500.0, 1, np.random.default_rng(seed))
    full = pose_covariance(CAMERA, *pose_of(seen), CORNERS, seen.covariance)[0, :3, :3]
    fixed = fixed_rotation_covariance(CAMERA, *pose_of(seen), CORNERS, seen.covariance)[0]
    assert (np.linalg.eigvalsh(full - fixed) > -1e-9 * np.trace(full)).all()


def test_a_mask_equals_leaving_the_point_out() -> None:
    seen = sight(1500.0, 1, np.random.default_rng(1))
    mask = np.array([[True, True, True, False]])
    masked = position_covariance(CAMERA, *pose_of(seen), CORNERS, seen.covariance, mask)
    without = position_covariance(CAMERA, *pose_of(seen), CORNERS[:3], seen.covariance[:, :3])
    np.testing.assert_allclose(masked, without, rtol=1e-9)


def test_masked_points_may_hold_any_value() -> None:
    seen = sight(1500.0, 1, np.random.default_rng(1))
    passed = np.concatenate([CORNERS, [seen.position - [900.0, 0.0, 0.0]]])  # behind the camera
    unsound = np.concatenate([seen.covariance, np.full((1, 1, 2, 2), -1.0)], axis=1)
    mask = np.array([[True, True, True, True, False]])
    for form in (pose_covariance, position_covariance, fixed_rotation_covariance):
        masked = form(CAMERA, *pose_of(seen), passed, unsound, mask)
        np.testing.assert_allclose(masked, form(CAMERA, *pose_of(seen), CORNERS, seen.covariance), rtol=1e-9)


@pytest.mark.parametrize("form", ["pose", "position"])
@pytest.mark.parametrize("distance", [500.0, 1500.0])
def test_sigma_points_and_samples_agree_with_the_first_order(form: str, distance: float) -> None:
    seen = sight(distance, 1, np.random.default_rng(2), high=0.5)

    def solve(pixels: Array) -> Any:
        each = np.broadcast_to(seen.covariance[0], (*pixels.shape, 2))
        if form == "pose":
            return solve_pose(Observations(CAMERA, CORNERS, pixels, each))
        return solve_position(
            Observations(CAMERA, CORNERS, pixels, each, np.broadcast_to(seen.rotation, (len(pixels), 3, 3)))
        )

    size = 6 if form == "pose" else 3
    first = solve(seen.exact[None]).covariance[0, :size, :size]
    assert_alike(unscented_covariance(solve, seen.exact, seen.covariance[0])[:size, :size], first, 0.1)
    sampled = monte_carlo_covariance(solve, seen.exact, seen.covariance[0], FRAMES)[:size, :size]
    assert_alike(sampled, first, 0.1)


def test_pixels_without_a_pose_have_no_spread() -> None:
    seen = sight(4000.0, 1, np.random.default_rng(3))

    def solve(pixels: Array) -> Any:
        return solve_pose(
            Observations(CAMERA, CORNERS, pixels, np.broadcast_to(100 * seen.covariance[0], (*pixels.shape, 2)))
        )

    with pytest.raises(HaloposeError, match="no covariance"):
        unscented_covariance(solve, seen.exact, 100 * seen.covariance[0])


def test_intrinsics_errors_add_to_the_covariance() -> None:
    """The pixels stay and the camera model changes: the pose moves as the implicit function theorem says."""
    deviation = np.array([3.0, 3.0, 1.0, 1.0, 2e-3, 1e-3, 1e-4, 1e-4, 1e-3])
    seen = sight(1500.0, 1, np.random.default_rng(4), camera=LENS)

    def found(parameters: Array) -> Array:
        named: dict[str, Any] = dict(zip(INTRINSICS[:4], parameters[:4], strict=True))
        camera = replace(LENS, **named, distortion=tuple(parameters[4:]))
        pose = solve_pose(Observations(camera, CORNERS, seen.exact[None], seen.covariance))
        position = solve_position(
            Observations(camera, CORNERS, seen.exact[None], seen.covariance, seen.rotations)
        ).position[0]
        change = pose_difference(seen.rotation, seen.position, pose.rotation[0], pose.position[0])
        return np.concatenate([change, position - seen.position])

    steps = 0.05 * np.diag(deviation)
    moved = np.stack([(found(LENS.parameters + s) - found(LENS.parameters - s)) / 0.1 for s in steps], axis=1)
    frame = (LENS, *pose_of(seen), CORNERS, seen.covariance)
    nuisance = np.diag(deviation**2)
    added = pose_covariance(*frame, intrinsics=nuisance) - pose_covariance(*frame)
    assert_alike(added[0], moved[:6] @ moved[:6].T, 0.01)
    added = position_covariance(*frame, intrinsics=nuisance) - position_covariance(*frame)
    assert_alike(added[0, :3, :3], moved[6:] @ moved[6:].T, 0.01)


def test_errors_of_attitude_and_mount_carry_over_to_the_aircraft() -> None:
    """Simulate all of it: IRS, mounting angles, lever arm and pixels, and compare the aircraft's position."""
    rng = np.random.default_rng(5)
    seen = sight(1500.0, FRAMES, rng)
    mount = Mount.looking(pitch=-0.05, lever_arm=[12.0, -1.0, 3.0])
    irs, mounting, lever = np.diag([4e-4, 6e-4, 8e-4]) ** 2, np.diag([3e-4, 5e-4, 2e-4]) ** 2, 0.05
    body, aircraft = body_pose(seen.rotation, seen.position, mount)
    # What the system believes: the true attitude and mount, each with its error.
    believed_body = perturb(body, np.zeros(3), _draw(rng, irs, FRAMES))[0]
    believed_mount = exp_so3(_draw(rng, mounting, FRAMES)[:, 3:]) @ mount.rotation
    believed_arm = mount.lever_arm + lever * rng.normal(size=(FRAMES, 3))
    camera_rotation = believed_mount @ believed_body
    solution = solve_position(Observations(CAMERA, CORNERS, seen.pixels, seen.covariance, camera_rotation))
    position = solution.position - np.einsum("nj,nji->ni", believed_arm, believed_body)
    attitude = camera_attitude_covariance(irs, seen.rotation[None], mounting)
    camera = position_covariance(CAMERA, *pose_of(seen), CORNERS, seen.covariance[:1], attitude=attitude)
    arm_only = np.diag([lever**2] * 3 + [0.0] * 3)
    promised = body_covariance(camera, seen.rotation[None], mount, arm_only)
    np.testing.assert_allclose((position - aircraft).std(0), deviations(promised[0])[:3], rtol=0.1)
    without = position_covariance(CAMERA, *pose_of(seen), CORNERS, seen.covariance[:1])
    assert deviations(without)[0, 1] < 0.8 * (position - aircraft)[:, 1].std()


def _draw(rng: np.random.Generator, covariance: Array, count: int) -> Array:
    """Changes of a pose (count, 6) that turn it with a covariance."""
    angles = rng.normal(size=(count, 3)) @ np.linalg.cholesky(covariance).T
    return np.concatenate([np.zeros((count, 3)), angles], axis=1)


def test_the_full_pose_moves_to_the_aircraft_with_the_mount_s_errors() -> None:
    rng = np.random.default_rng(6)
    seen = sight(500.0, FRAMES, rng, high=0.5)
    mount = Mount.looking(pitch=-0.05, lever_arm=[20.0, 2.0, 4.0])
    spread = np.diag([0.1, 0.1, 0.1, 2e-3, 2e-3, 2e-3]) ** 2
    solution = solve_pose(Observations(CAMERA, CORNERS, seen.pixels, seen.covariance))
    body, aircraft = body_pose(seen.rotation, seen.position, mount)
    error = rng.normal(size=(FRAMES, 6)) * np.sqrt(np.diag(spread))
    turned = np.swapaxes(exp_so3(error[:, 3:]) @ mount.rotation, 1, 2) @ solution.rotation
    position = solution.position - np.einsum("nj,nji->ni", mount.lever_arm + error[:, :3], turned)
    camera = pose_covariance(CAMERA, *pose_of(seen), CORNERS, seen.covariance[:1])
    promised = body_covariance(camera, seen.rotation[None], mount, spread)[0]
    change = pose_difference(body, aircraft, turned, position)
    np.testing.assert_allclose(change.std(0), deviations(promised), rtol=0.1)
    assert_alike(np.cov(change.T), promised, 0.1)


def test_pixels_are_where_the_pose_says() -> None:
    seen = sight(1500.0, 1, np.random.default_rng(7))
    np.testing.assert_allclose(project_points(CAMERA, seen.rotation, seen.position, CORNERS), seen.exact)
