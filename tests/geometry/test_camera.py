"""Projection against OpenCV, Jacobians against central differences, rotations and poses against scipy."""

from collections.abc import Callable
from typing import Any, cast

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from halopose.errors import HaloposeError
from halopose.geometry.camera import (
    Camera,
    Mount,
    angles_from_rotation,
    body_pose,
    camera_pose,
    exp_so3,
    intrinsics_jacobian,
    log_so3,
    look_at,
    normalise,
    perturb,
    pose_difference,
    pose_jacobian,
    project,
    project_points,
    projection_jacobian,
    rotation_from_angles,
    skew,
    to_camera,
    undistort,
)
from halopose.types import Array
from tests.helpers.approaches import rectangle

LENS = (-0.12, 0.05, 1e-3, -8e-4, -0.01)
CAMERA = Camera(1200.0, 1190.0, 320.5, 190.2, 640, 384, LENS)
SEEDS = st.integers(0, 2**32 - 1)
SMALL_ANGLES = st.floats(-1.5, 1.5)


def central(function: Callable[[Array], Array], at: Array, steps: list[float]) -> Array:
    """Central differences (..., len(at)) of a function of a vector."""
    columns = []
    for index, step in enumerate(steps):
        change = np.zeros(len(at))
        change[index] = step
        columns.append((function(at + change) - function(at - change)) / (2 * step))
    return np.stack(columns, axis=-1)


def assert_same_jacobian(actual: Array, expected: Array) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


def random_pose(rng: np.random.Generator) -> tuple[Array, Array]:
    position = np.array([-rng.uniform(300, 4000), rng.normal() * 50, rng.uniform(20, 250)])
    return look_at(position, [rng.uniform(0, 500), rng.normal() * 20, 0.0], rng.normal() * 0.1), position


# --- parity -----------------------------------------------------------------------------------------------


@given(SEEDS, st.booleans())
def test_projection_equals_opencv(seed: int, distorted: bool) -> None:
    rng = np.random.default_rng(seed)
    camera = CAMERA if distorted else Camera(900.0, 950.0, 310.0, 180.0, 640, 384)
    rotation, position = random_pose(rng)
    points = rectangle(2500.0, 45.0) + rng.normal(size=(4, 3))
    expected, _ = cv2.projectPoints(
        points, cv2.Rodrigues(rotation)[0], -rotation @ position, camera.matrix, np.array(camera.distortion)
    )
    np.testing.assert_allclose(project_points(camera, rotation, position, points), expected[:, 0], rtol=1e-9, atol=1e-9)


@given(SEEDS)
def test_undistortion_inverts_distortion(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points = np.column_stack([rng.uniform(-0.35, 0.35, 50), rng.uniform(-0.25, 0.25, 50), np.ones(50)])
    np.testing.assert_allclose(normalise(CAMERA, project(CAMERA, points)), points[:, :2], atol=1e-12)
    plain = Camera(CAMERA.fx, CAMERA.fy, CAMERA.cx, CAMERA.cy, 640, 384)
    np.testing.assert_allclose(undistort(CAMERA, project(CAMERA, points)), project(plain, points), atol=1e-9)


def test_beyond_the_fold_of_the_lens_there_is_no_inverse() -> None:
    barrel = Camera(300.0, 300.0, 320.0, 192.0, 640, 384, (-0.4, 0.0, 0.0, 0.0, 0.0))
    outside = barrel.fx * np.array([[2.0, 0.0], [0.0, 5.0]]) + [barrel.cx, barrel.cy]
    assert np.isnan(normalise(barrel, outside)).all()


@given(st.lists(st.floats(-3, 3), min_size=3, max_size=3))
def test_exponential_and_logarithm_equal_scipy(vector: Array) -> None:
    vector = np.asarray(vector)
    expected = Rotation.from_rotvec(vector)
    np.testing.assert_allclose(exp_so3(vector), expected.as_matrix(), atol=1e-13)
    np.testing.assert_allclose(exp_so3(log_so3(exp_so3(vector))), expected.as_matrix(), atol=1e-12)
    if np.linalg.norm(vector) < np.pi - 1e-3:
        np.testing.assert_allclose(log_so3(exp_so3(vector)), vector, atol=1e-11)


@pytest.mark.parametrize("axis", np.eye(3))
def test_logarithm_of_half_a_turn(axis: Array) -> None:
    np.testing.assert_allclose(np.abs(log_so3(exp_so3(np.pi * axis))), np.pi * axis, atol=1e-7)


@given(SMALL_ANGLES, SMALL_ANGLES, SMALL_ANGLES)
def test_angles_equal_scipy_and_return(yaw: float, pitch: float, roll: float) -> None:
    rotation = rotation_from_angles(yaw, pitch, roll)
    expected = Rotation.from_euler("ZYX", [yaw, pitch, roll]).as_matrix().T @ np.diag([1.0, -1.0, -1.0])
    np.testing.assert_allclose(rotation, expected, atol=1e-14)
    np.testing.assert_allclose(angles_from_rotation(rotation), (yaw, pitch, roll), atol=1e-12)


# --- axes -------------------------------------------------------------------------------------------------


def test_axes_mean_what_they_say() -> None:
    body = rotation_from_angles(0.0, 0.0, 0.0)
    np.testing.assert_allclose(body @ [1.0, 2.0, 3.0], [1.0, -2.0, -3.0])
    nose_up = rotation_from_angles(0.0, 0.1, 0.0).T @ [1.0, 0.0, 0.0]
    assert nose_up[2] > 0
    nose_right = rotation_from_angles(0.1, 0.0, 0.0).T @ [1.0, 0.0, 0.0]
    assert nose_right[1] < 0
    right_wing = rotation_from_angles(0.0, 0.0, 0.1).T @ [0.0, 1.0, 0.0]
    assert right_wing[2] < 0


def test_the_runway_stands_upright_in_the_image() -> None:
    position = np.array([-1500.0, 0.0, 80.0])
    pixels = project_points(CAMERA, look_at(position, [0.0, 0.0, 0.0]), position, rectangle(2500.0, 45.0))
    near_left, near_right, far_right, far_left = pixels
    assert near_left[0] < far_left[0] < far_right[0] < near_right[0]
    assert near_left[1] > far_left[1]


def test_a_mounted_camera_looks_where_it_should() -> None:
    level, there = rotation_from_angles(0.0, 0.0, 0.0), np.array([-1000.0, 0.0, 60.0])
    rotation, position = camera_pose(level, there, Mount.looking(pitch=-0.06, lever_arm=[5.0, 1.0, 2.0]))
    np.testing.assert_allclose(position, [-995.0, -1.0, 58.0])
    np.testing.assert_allclose(rotation.T @ [0.0, 0.0, 1.0], [np.cos(0.06), 0.0, -np.sin(0.06)], atol=1e-14)


@given(SEEDS)
def test_camera_and_aircraft_poses_are_inverse(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rotation = rotation_from_angles(*(rng.normal(size=(3, 5)) * 0.2))
    position = rng.normal(size=(5, 3)) * 100
    yaw, pitch, roll = rng.normal(size=3) * 0.1
    mount = Mount.looking(yaw, pitch, roll, lever_arm=rng.normal(size=3) * 5)
    back = body_pose(*camera_pose(rotation, position, mount), mount)
    np.testing.assert_allclose(back[0], rotation, atol=1e-13)
    np.testing.assert_allclose(back[1], position, atol=1e-10)


@given(SEEDS)
def test_the_difference_of_poses_undoes_a_perturbation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rotation, position = random_pose(rng)
    change = rng.uniform(-1.5, 1.5, size=(7, 6))
    moved = perturb(rotation, position, change)
    np.testing.assert_allclose(pose_difference(rotation, position, *moved), change, atol=1e-10)


# --- Jacobians --------------------------------------------------------------------------------------------


@given(SEEDS)
def test_jacobians_equal_central_differences(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rotation, position = random_pose(rng)
    corners = rectangle(2500.0, 45.0)
    points = to_camera(rotation, position, corners)

    for point in points:
        numeric = central(lambda p: project(CAMERA, p), point, [1e-3] * 3)
        assert_same_jacobian(projection_jacobian(CAMERA, point), numeric)

    def moved(change: Array) -> Array:
        return project_points(CAMERA, *perturb(rotation, position, change), corners)

    analytic = pose_jacobian(CAMERA, rotation, position, corners)
    numeric = central(moved, np.zeros(6), [1e-2] * 3 + [1e-6] * 3)
    assert_same_jacobian(analytic[..., :3], numeric[..., :3])
    assert_same_jacobian(analytic[..., 3:], numeric[..., 3:])


@given(SEEDS)
def test_intrinsics_jacobian_equals_central_differences(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points = np.column_stack([rng.uniform(-0.3, 0.3, 4), rng.uniform(-0.2, 0.2, 4), np.ones(4)]) * 1000

    def with_parameters(p: Array) -> Array:
        return project(Camera(p[0], p[1], p[2], p[3], 640, 384, (p[4], p[5], p[6], p[7], p[8])), points)

    numeric = central(with_parameters, np.array(CAMERA.parameters), [1e-2] * 4 + [1e-4] * 5)
    assert_same_jacobian(intrinsics_jacobian(CAMERA, points), numeric)


# --- edges ------------------------------------------------------------------------------------------------


def test_behind_the_camera_is_nan() -> None:
    assert np.isnan(project(CAMERA, np.array([[1.0, 1.0, -5.0], [0.0, 0.0, 0.0]]))).all()


def test_contains_and_field_of_view() -> None:
    camera = Camera.from_fov(640, 384, np.deg2rad(30.0))
    edge = project(camera, np.array([np.tan(np.deg2rad(15.0)), 0.0, 1.0]))
    np.testing.assert_allclose(edge, [639.5, 191.5])
    inside = camera.contains(np.array([[0.0, 0.0], [-1.0, 5.0], [5.0, 384.0], [np.nan, 3.0]]))
    assert inside.tolist() == [True, False, False, False]


def test_cross_product() -> None:
    a, b = np.array([1.0, 2.0, 3.0]), np.array([-1.0, 0.5, 2.0])
    np.testing.assert_allclose(skew(a) @ b, np.cross(a, b))


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(HaloposeError, match="5 distortion"):
        Camera(1.0, 1.0, 0.0, 0.0, 10, 10, cast(Any, (0.0,)))
    with pytest.raises(HaloposeError, match="positive focal"):
        Camera(-1.0, 1.0, 0.0, 0.0, 10, 10)
    with pytest.raises(HaloposeError, match=r"\(3, 3\)"):
        Mount(np.eye(2))
    with pytest.raises(HaloposeError, match="orthonormal"):
        Mount(2 * np.eye(3))
    with pytest.raises(HaloposeError, match="reflection"):
        Mount(np.diag([1.0, 1.0, -1.0]))
