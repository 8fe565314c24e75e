"""Camera files of OpenCV and ROS against OpenCV's own projection, and their mistakes in one line."""

from pathlib import Path

import cv2
import numpy as np
import pytest

from halopose.errors import HaloposeError
from halopose.geometry.camera import Camera, Mount, project
from halopose.landing.recordings.cameras import Lens, camera_text, read_camera
from halopose.poses import PoseDistributions

MATRIX = np.array([[1200.0, 0.0, 319.5], [0.0, 1190.0, 191.5], [0.0, 0.0, 1.0]])
BROWN = np.array([-0.2, 0.05, 1e-3, -5e-4, 0.01])
FISHEYE = np.array([0.02, -0.01, 0.003, -0.001])
ROS = """
image_width: 640
image_height: 384
camera_matrix: {rows: 3, cols: 3, data: [1200, 0, 319.5, 0, 1190, 191.5, 0, 0, 1]}
distortion_model: plumb_bob
distortion_coefficients: {rows: 1, cols: 5, data: [-0.2, 0.05, 0.001, -0.0005, 0.01]}
mount: {pitch_deg: -6.5, lever_arm: [4, 0, 0.5]}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "camera.yaml"
    path.write_text(text)
    return path


def test_opencv_and_ros_cameras_agree(tmp_path: Path) -> None:
    storage = cv2.FileStorage(str(tmp_path / "cv.yaml"), cv2.FILE_STORAGE_WRITE)
    for name, value in (("camera_matrix", MATRIX), ("distortion_coefficients", BROWN)):
        storage.write(name, value)
    storage.write("image_width", 640)
    storage.write("image_height", 384)
    storage.release()
    ros = read_camera(written(tmp_path, ROS))
    assert read_camera(tmp_path / "cv.yaml").camera == ros.camera
    points = np.random.default_rng(0).normal(size=(20, 3)) * (2.0, 1.0, 1.0) + (0, 0, 20)
    by_opencv = cv2.projectPoints(points, np.zeros(3), np.zeros(3), MATRIX, BROWN)[0][:, 0]
    np.testing.assert_allclose(project(ros.camera, points), by_opencv, atol=1e-9)
    np.testing.assert_allclose(ros.mount.rotation, Mount.looking(pitch=np.radians(-6.5)).rotation)
    np.testing.assert_allclose(ros.mount.lever_arm, (4, 0, 0.5))


def test_written_cameras_are_read_back(tmp_path: Path) -> None:
    camera = Camera(1200.0, 1190.0, 319.5, 191.5, 640, 384, (-0.2, 0.05, 1e-3, -5e-4, 0.01))
    mount = Mount.looking(0.01, -0.1, 0.02, (4.0, 0.1, 0.5))
    again = read_camera(written(tmp_path, camera_text(camera, mount)))
    assert again.camera == camera
    np.testing.assert_array_equal(again.mount.rotation, mount.rotation)


def test_a_fisheye_s_image_is_rectified_as_its_keypoints_are() -> None:
    """A bright spot is where the rectified keypoint says, to a tenth of a pixel, far from the image's middle."""
    lens = Lens(Camera(400.0, 400.0, 319.5, 191.5, 640, 384), fisheye=tuple(FISHEYE.tolist()))
    image = np.zeros((384, 640, 3), np.uint8)
    image[90, 480] = 255
    image = np.asarray(cv2.GaussianBlur(image, (0, 0), 2) * 20, np.uint8)
    keypoints = np.array([[[480.0, 90.0]]])
    spread = np.eye(2)[None, None]
    poses = PoseDistributions(np.zeros((1, 4)), np.ones(1), keypoints, spread, spread)
    [[expected]] = lens.rectified(poses).keypoints
    weight = lens.rectified_image(image)[..., 0].astype(float)
    rows, columns = np.indices(weight.shape)
    found = np.array([(columns * weight).sum(), (rows * weight).sum()]) / weight.sum()
    np.testing.assert_allclose(found, expected, atol=0.1)
    assert np.linalg.norm(expected - keypoints[0, 0]) > 3
    assert Lens(lens.camera).rectified_image(image) is image


def test_bent_pixels_are_those_that_are_rectified() -> None:
    lens = Lens(Camera(400.0, 400.0, 319.5, 191.5, 640, 384), fisheye=tuple(FISHEYE.tolist()))
    pixels = np.random.default_rng(0).uniform((100, 60), (540, 320), (50, 2))
    np.testing.assert_allclose(lens._moved(lens.bent(pixels)), pixels, atol=1e-6)
    assert np.abs(lens.bent(pixels) - pixels).max() > 1
    np.testing.assert_array_equal(Lens(lens.camera).bent(pixels), pixels)


def test_a_fisheye_is_rectified_with_its_covariances() -> None:
    """Simulated pixels about a fisheye's, moved one by one, spread as the moved covariance says."""
    lens = Lens(Camera(400.0, 400.0, 319.5, 191.5, 640, 384), fisheye=tuple(FISHEYE.tolist()))
    points = np.array([[[0.5, 0.2, 1.0], [-0.6, 0.3, 1.0], [0.1, -0.3, 1.0], [0.0, 0.0, 1.0]]])
    pixels = cv2.fisheye.distortPoints(points[..., :2] / points[..., 2:], lens.camera.matrix, FISHEYE)
    spread = np.broadcast_to([[0.04, 0.01], [0.01, 0.09]], (1, 4, 2, 2)).copy()
    poses = PoseDistributions(np.zeros((1, 4)), np.ones(1), np.asarray(pixels, dtype=float), spread, spread)
    moved = lens.rectified(poses)
    np.testing.assert_allclose(moved.keypoints, project(lens.camera, points), atol=1e-5)
    noise = np.random.default_rng(1).multivariate_normal(np.zeros(2), spread[0, 0], 20_000)
    around = lens.rectified(
        PoseDistributions(
            np.zeros((20_000, 4)),
            np.ones(20_000),
            pixels + noise[:, None],
            np.repeat(spread, 20_000, 0),
            np.repeat(spread, 20_000, 0),
        )
    )
    for corner in range(4):
        found = np.cov(around.keypoints[:, corner].T)
        np.testing.assert_allclose(found, moved.covariance[0, corner], atol=0.03 * found.max())


def test_sizes_with_a_point_and_a_mark_at_the_beginning_are_read(tmp_path: Path) -> None:
    text = "\ufeff%YAML:1.0\n---\n" + ROS.replace("640", "640.0")
    assert read_camera(written(tmp_path, text)).camera == read_camera(written(tmp_path, ROS)).camera


def test_a_rounded_rotation_becomes_the_nearest_one(tmp_path: Path) -> None:
    exact = Mount.looking(0.1, -0.2, 0.3).rotation
    rounded = ", ".join(f"{value:.3f}" for value in exact.ravel())
    found = read_camera(written(tmp_path, ROS.replace("pitch_deg: -6.5", f"rotation: [{rounded}]"))).mount.rotation
    np.testing.assert_allclose(found @ found.T, np.eye(3), atol=1e-12)
    np.testing.assert_allclose(found, exact, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("image_width: 640", ""), "no image_width"),
        (("image_width: 640", "image_width: 300"), "another image size"),
        (("plumb_bob", "magic"), "unknown distortion model 'magic'"),
        (("plumb_bob", "equidistant"), "a fisheye takes 4"),
        (("data: [1200,", "data: ["), "takes 9 numbers, got 8"),
        (("data: [1200,", "data: [.nan,"), "takes finite numbers, got nan"),
        (("image_width: 640", "image_width: 640.5"), "whole number of pixels, got 640.5"),
        (("image_width: 640", "image_width: .inf"), "whole number of pixels, got inf"),
        (("image_width: 640", f"image_width: 1{'0' * 400}"), "whole number of pixels"),
        (
            ("pitch_deg: -6.5", "rotation: [0, -1, 0, 0, 0, 1, 1, 0, 0]"),
            "camera.yaml: the mount's rotation mirrors",
        ),
        (("pitch_deg: -6.5", "rotation: [0, 1.1, 0, 0, 0, 1, 1, 0, 0]"), "not orthonormal"),
        (("1200, 0,", "0.0012, 0,"), "in pixels"),
        (("camera_matrix", "matrix"), "has no camera_matrix"),
        (("pitch_deg", "pitch"), "does not know 'pitch'"),
        (("{rows", "{{rows"), "is not yaml"),
    ],
)
def test_mistakes_are_one_line_errors(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    with pytest.raises(HaloposeError, match=words) as caught:
        read_camera(written(tmp_path, ROS.replace(*change)))
    assert "\n" not in str(caught.value)
