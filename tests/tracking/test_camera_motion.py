"""Image motion is estimated from the background, not from moving objects."""

import cv2
import numpy as np

from halopose.tracking.camera_motion import CameraMotion


def test_a_shift_with_turn_and_zoom_is_found_again() -> None:
    rng = np.random.default_rng(0)
    scene = cv2.GaussianBlur(rng.integers(0, 255, (500, 700), dtype=np.uint8), (0, 0), 2.0)
    scene = cv2.cvtColor(cv2.equalizeHist(scene), cv2.COLOR_GRAY2BGR)
    matrix = np.array([[1.01, -0.02, 6.0], [0.02, 1.01, -4.0]])
    after = cv2.warpAffine(scene, matrix, (700, 500))
    before, after = scene[50:450, 50:650].copy(), after[50:450, 50:650].copy()
    box = np.array([[200.0, 100.0, 400.0, 300.0]])
    before[100:300, 200:400], after[100:300, 230:430] = 90, 90  # something that moves by itself
    background = CameraMotion()
    assert background.update(before, box) is None
    warp = background.update(after, box)
    assert warp is not None
    np.testing.assert_allclose(warp.linear, matrix[:, :2], atol=2e-3)
    corner = np.array([50.0, 50.0])
    expected = matrix[:, :2] @ corner + matrix[:, 2] - corner
    np.testing.assert_allclose(warp.offset, expected, atol=0.5)


def test_an_image_without_corners_gives_no_warp() -> None:
    background = CameraMotion()
    grey = np.full((100, 100, 3), 90, np.uint8)
    assert [background.update(grey, np.zeros((0, 4))) for _ in range(2)] == [None, None]
