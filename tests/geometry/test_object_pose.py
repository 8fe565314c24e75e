"""The pose of any object: against OpenCV and gtsam, its spread against the stated covariance, and joint covariances."""

from typing import Any

import cv2
import numpy as np
import pytest
from scipy.optimize import least_squares
from scipy.spatial.transform import Rotation

from halopose.errors import HaloposeError
from halopose.geometry.camera import Camera, exp_so3, log_so3, project
from halopose.geometry.object_pose import solve_pnp
from tests.helpers.approaches import covariances

MATRIX = np.array([[800.0, 0, 320], [0, 790, 240], [0, 0, 1]])
CAMERA = Camera.from_opencv(MATRIX, [-0.1, 0.05, 1e-3, -5e-4], (640, 480))
SQUARE = 0.1 * np.array([[-1.0, 1, 0], [1, 1, 0], [1, -1, 0], [-1, -1, 0]])
CUBE = 0.1 * np.array([[x, y, z] for x in (-1.0, 1) for y in (-1.0, 1) for z in (-1.0, 1)])
BOARD = 0.03 * np.array([[x, y, 0.0] for y in range(6) for x in range(8)])  # what a camera on a hand looks at
OBJECTS = {"square": SQUARE, "cube": CUBE, "board": BOARD}
RVEC, TVEC = np.array([0.5, -0.6, 0.3]), np.array([0.05, -0.02, 0.9])


def sight(points: np.ndarray, count: Any, seed: int, low: Any = 0.2, high: Any = 0.6, camera: Any = CAMERA) -> Any:
    """Pixels (count, K, 2) with noise, and their covariances (K, 2, 2)."""
    rng = np.random.default_rng(seed)
    each = covariances(rng, len(points), low, high)
    exact = project(camera, points @ exp_so3(RVEC).T + TVEC)
    return exact + (np.linalg.cholesky(each) @ rng.normal(size=(count, len(points), 2, 1)))[..., 0], each


def change(rvec: Any, tvec: Any) -> Any:
    """Errors (N, 6) in the order and axes of the covariance: translation, rotation about the camera's axes."""
    turn = log_so3(exp_so3(rvec) @ exp_so3(RVEC).T)
    return np.concatenate([tvec - TVEC, turn], axis=-1)


@pytest.mark.parametrize("name", OBJECTS)
def test_equal_weights_equal_opencv(name: str) -> None:
    points = OBJECTS[name]
    for pixels in sight(points, 5, 1, 0.3, 0.3)[0]:
        lens = np.array(CAMERA.distortion)
        _, rvec, tvec = cv2.solvePnP(points, pixels, CAMERA.matrix, lens, flags=cv2.SOLVEPNP_SQPNP)
        rvec, tvec = cv2.solvePnPRefineLM(points, pixels, CAMERA.matrix, lens, rvec, tvec)
        pose = solve_pnp(points, pixels, 0.3**2, CAMERA)
        found, own, at = pose.opencv
        assert found
        deviation = np.sqrt(np.diag(pose.covariance))
        assert np.abs((at - tvec)[:, 0] / deviation[:3]).max() < 1e-2
        assert np.abs((own - rvec)[:, 0] / deviation[3:]).max() < 1e-2


@pytest.mark.parametrize("name", OBJECTS)
def test_gtsam_finds_the_same_pose_and_covariance(name: str) -> None:
    gtsam = pytest.importorskip("gtsam")
    points = OBJECTS[name]
    pinhole = Camera.from_opencv(CAMERA.matrix)
    seen, each = sight(points, 3, 2, camera=pinhole)
    calibration = gtsam.Cal3_S2(pinhole.fx, pinhole.fy, 0.0, pinhole.cx, pinhole.cy)
    for pixels in seen:
        pose = solve_pnp(points, pixels, each, pinhole)
        graph, first = gtsam.NonlinearFactorGraph(), gtsam.Values()
        first.insert(0, gtsam.Pose3(gtsam.Rot3(exp_so3(RVEC).T), -exp_so3(RVEC).T @ TVEC))
        for k, point in enumerate(points):
            first.insert(k + 1, point)
            graph.add(gtsam.NonlinearEqualityPoint3(k + 1, point))
            noise = gtsam.noiseModel.Gaussian.Covariance(each[k])
            graph.add(gtsam.GenericProjectionFactorCal3_S2(pixels[k], noise, 0, k + 1, calibration))
        best = gtsam.LevenbergMarquardtOptimizer(graph, first).optimize()
        camera = best.atPose3(0)
        outward = camera.rotation().matrix()  # camera axes to object axes
        deviation = np.sqrt(np.diag(pose.covariance))
        assert np.abs((pose.tvec + outward.T @ camera.translation()) / deviation[:3]).max() < 1e-2
        # gtsam perturbs the camera's pose in its own axes, rotation first: T Exp(w, v).
        theirs = gtsam.Marginals(graph, best).marginalCovariance(0)
        turn = np.zeros((6, 6))
        turn[:3, :3], turn[:3, 3:] = cross(pose.tvec), -np.eye(3)
        turn[3:, :3] = -np.eye(3)
        ratio = np.sqrt(np.diag(turn @ theirs @ turn.T)) / deviation
        np.testing.assert_allclose(ratio, 1.0, rtol=1e-3)


def cross(vector: Any) -> Any:
    x, y, z = vector
    return np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", OBJECTS)
def test_a_thousand_noisy_solves_spread_as_stated(name: str, joint: bool) -> None:
    points, rng = OBJECTS[name], np.random.default_rng(3)
    pixels, each = sight(points, 1000, 4)
    stated = each
    if joint:  # all points move together by half a pixel too
        shift = rng.normal(0, 0.5, (1000, 1, 2))
        pixels = pixels + shift
        stated = np.zeros((len(points), 2, len(points), 2))
        stated[np.arange(len(points)), :, np.arange(len(points)), :] = each
        stated = stated + 0.25 * np.eye(2)[None, :, None, :]
        stated = stated.reshape(2 * len(points), 2 * len(points))
    exact = project(CAMERA, points @ exp_so3(RVEC).T + TVEC)
    expected = np.sqrt(np.diag(solve_pnp(points, exact, stated, CAMERA).covariance))
    poses = solve_pnp(points, pixels, stated, CAMERA)
    assert poses.retval.all()
    errors = change(poses.rvec, poses.tvec)
    assert np.abs(errors.std(0) / expected - 1).max() < 0.1
    squared = np.einsum("ni,nij,nj->n", errors, np.linalg.inv(poses.covariance), errors)
    assert squared.mean() == pytest.approx(6, rel=0.1)


def test_a_joint_covariance_of_independent_points_changes_nothing() -> None:
    pixels, each = sight(CUBE, 3, 5)
    joint = np.zeros((8, 2, 8, 2))
    joint[np.arange(8), :, np.arange(8), :] = each
    alone, together = solve_pnp(CUBE, pixels, each, CAMERA), solve_pnp(CUBE, pixels, joint.reshape(16, 16), CAMERA)
    deviation = np.sqrt(np.diagonal(alone.covariance, axis1=1, axis2=2))
    assert (np.abs(alone.tvec - together.tvec) < 1e-3 * deviation[:, :3]).all()
    np.testing.assert_allclose(together.covariance, alone.covariance, rtol=1e-3, atol=1e-12)


def test_the_joint_minimum_equals_scipy() -> None:
    rng = np.random.default_rng(6)
    pixels, _ = sight(SQUARE, 1, 7)
    root = rng.normal(0, 0.3, (8, 8))
    joint = root @ root.T + 0.05 * np.eye(8)
    pose = solve_pnp(SQUARE, pixels[0], joint, CAMERA)
    factor = np.linalg.inv(np.linalg.cholesky(joint))

    def residuals(x: Any) -> Any:
        return factor @ (pixels[0] - project(CAMERA, SQUARE @ exp_so3(x[:3]).T + x[3:])).ravel()

    best = least_squares(residuals, np.concatenate([pose.rvec, pose.tvec]) + 1e-3, xtol=1e-14, ftol=1e-14)
    assert pose.cost == pytest.approx(2 * best.cost, rel=1e-6)
    assert np.abs((pose.tvec - best.x[3:]) / np.sqrt(np.diag(pose.covariance))[:3]).max() < 1e-2


def test_masked_points_do_not_count() -> None:
    pixels, each = sight(CUBE, 2, 8)
    wrong = pixels.copy()
    wrong[:, 3] = 1e4
    keep = np.arange(8) != 3
    joint = np.kron(np.eye(8), np.eye(2)) + 0.1
    for stated in (each, joint):
        left, right = (solve_pnp(CUBE, seen, stated, CAMERA, mask=keep) for seen in (pixels, wrong))
        np.testing.assert_allclose(left.tvec, right.tvec, atol=1e-12)
        assert (left.dof == 8).all()


def test_ros_order_and_opencv_shapes() -> None:
    pixels, each = sight(CUBE, 1, 9)
    pose = solve_pnp(CUBE, pixels[0], each, CAMERA)
    _, rvec, tvec = pose.opencv
    assert rvec.shape == tvec.shape == (3, 1)
    np.testing.assert_allclose(pose.quaternion, Rotation.from_rotvec(pose.rvec).as_quat(), atol=1e-12)
    deviation = np.sqrt(np.diag(pose.covariance))
    assert deviation[2] > 3 * max(deviation[0], deviation[1])  # depth is what a camera knows least
    with pytest.raises(HaloposeError, match="one image"):
        solve_pnp(CUBE, pixels, each, CAMERA).opencv  # noqa: B018


def test_a_camera_from_below_is_no_mistake() -> None:
    """Of a tag there is no ground: both sides of its plane may be where the camera is."""
    for sign in (1, -1):
        rvec = np.array([0.3 * sign + np.pi * (sign > 0), 0.0, 0.0])
        seen = project(CAMERA, SQUARE @ exp_so3(rvec).T + TVEC)
        np.testing.assert_allclose(solve_pnp(SQUARE, seen, 0.1, CAMERA).tvec, TVEC, atol=1e-6)


@pytest.mark.parametrize(
    ("points", "pixels", "spread", "message"),
    [
        (SQUARE, np.zeros(8), 1.0, r"image_points should have shape"),
        (SQUARE, np.zeros((4, 2)), np.eye(3), r"covariances of 4 points"),
        (SQUARE[:3], np.zeros((4, 2)), 1.0, r"points should have shape"),
        (SQUARE, sight(SQUARE, 1, 0)[0][0], -np.eye(8), r"not positive definite"),
    ],
)
def test_invalid_inputs_are_refused(points: np.ndarray, pixels: np.ndarray, spread: Any, message: str) -> None:
    with pytest.raises(HaloposeError, match=message):
        solve_pnp(points, pixels, spread, CAMERA)


def test_unsolvable_pose_returns_a_reason() -> None:
    pose = solve_pnp(np.zeros((4, 3)), np.zeros((4, 2)), 1.0, CAMERA)
    assert not pose.retval
    assert "coincident" in pose.reasons[0]
    assert np.isnan(pose.tvec).all()


@pytest.mark.parametrize("points", [SQUARE, CUBE])
def test_pixels_that_are_one_point_spoil_no_other_frame(points: np.ndarray) -> None:
    """OpenCV's initial solver for solids raises its own error for these points."""
    seen = sight(points, 4, 3)[0]
    seen[1] = 300.0, 200.0
    seen[2] = project(CAMERA, points @ exp_so3(RVEC).T + [0.0, 0.0, 1e4])
    pose = solve_pnp(points, seen, 0.3**2, CAMERA)
    assert pose.retval.tolist() == [True, False, False, True]
    assert "coincident" in pose.reasons[1]
    assert np.isnan(pose.tvec[1:3]).all()
    assert np.isnan(pose.covariance[1:3]).all()


def test_masked_rows_of_a_joint_covariance_need_not_be_finite() -> None:
    seen = sight(CUBE, 3, 4)[0]
    joint = np.tile(0.05 * np.eye(16) + 0.02, (3, 1, 1))
    mask = np.arange(8) < 6
    expected = solve_pnp(CUBE[:6], seen[:, :6], joint[:, :12, :12], CAMERA)
    joint[:, 12:] = joint[:, :, 12:] = np.nan
    joint[1, 0, 2] = joint[1, 2, 0] = np.nan  # this one counts
    found = solve_pnp(CUBE, np.where(mask[:, None], seen, np.nan), joint, CAMERA, mask=mask)
    assert found.retval.tolist() == [True, False, True]
    assert "not finite" in found.reasons[1]
    np.testing.assert_allclose(found.tvec[[0, 2]], expected.tvec[[0, 2]], rtol=1e-9)
    np.testing.assert_allclose(found.covariance[[0, 2]], expected.covariance[[0, 2]], rtol=1e-6)


def test_cameras_of_opencv() -> None:
    assert Camera.from_opencv(np.diag([500.0, 510.0, 1.0])).distortion == (0,) * 5
    with pytest.raises(HaloposeError, match="without skew"):
        Camera.from_opencv([[500, 3, 0], [0, 500, 0], [0, 0, 1]])
    with pytest.raises(HaloposeError, match="five coefficients"):
        Camera.from_opencv(np.eye(3), np.ones(8))
