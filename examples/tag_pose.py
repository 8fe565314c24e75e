"""Pose of an AprilTag and of a chessboard with covariance: corners with covariances, then PnP.

    python examples/tag_pose.py

Both are rendered at a known pose with noise and detected by OpenCV. The covariance of a corner follows from the image
gradients around it: it is large along directions with weak edges. `solve_pnp` takes corners as OpenCV's `solvePnP`
does, with covariances. The script prints the pose error next to the predicted standard deviation.
"""

from __future__ import annotations

import cv2
import numpy as np

from halopose.geometry.camera import Camera, exp_so3, project
from halopose.geometry.object_pose import ObjectPose, solve_pnp
from halopose.types import Array

CAMERA = Camera.from_opencv([[900, 0, 480], [0, 900, 360], [0, 0, 1]], size=(960, 720))
RVEC, TVEC = np.array([2.75, 0.35, -0.2]), np.array([0.03, -0.02, 0.7])  # tilted, 70 cm away
NOISE = 6.0  # grey levels
REACH = 4  # pixels on each side of a corner that are used
# Smallest standard deviation in pixels. Blur shifts the corner of one dark square, but not the crossing of four.
FLOORS = {"AprilTag": 0.25, "chessboard": 0.05}


def photograph(picture: Array, corners: Array, rng: np.random.Generator) -> Array:
    """Render a flat picture whose outer corners are at (4, 3) in object coordinates."""
    high, wide = picture.shape
    seen = project(CAMERA, corners @ exp_so3(RVEC).T + TVEC)
    source = np.array([[0, 0], [wide, 0], [wide, high], [0, high]], dtype=np.float32) - 0.5
    warp = cv2.getPerspectiveTransform(source, seen.astype(np.float32))
    finer = (
        np.array([[4, 0, 1.5], [0, 4, 1.5], [0, 0, 1]]) @ warp
    )  # rendered at four times the resolution, then averaged
    large = cv2.warpPerspective(picture, finer, (4 * CAMERA.width, 4 * CAMERA.height), borderValue=255)
    image = cv2.resize(large, (CAMERA.width, CAMERA.height), interpolation=cv2.INTER_AREA)
    return np.clip(image * 0.7 + 30 + rng.normal(0, NOISE, image.shape), 0, 255).astype(np.uint8)


def corner_covariances(image: Array, corners: Array, floor: float) -> Array:
    """Covariances (K, 2, 2) of corners: noise over the squared gradients around each, plus a floor."""
    smooth = cv2.GaussianBlur(image.astype(np.float64), (0, 0), 1.0)
    gradient = np.stack([cv2.Sobel(smooth, cv2.CV_64F, 1, 0), cv2.Sobel(smooth, cv2.CV_64F, 0, 1)], -1) / 8
    result = []
    for x, y in corners.round().astype(int):
        part = gradient[y - REACH : y + REACH + 1, x - REACH : x + REACH + 1].reshape(-1, 2)
        result.append((0.7 * NOISE) ** 2 * np.linalg.inv(part.T @ part) + floor**2 * np.eye(2))
    return np.array(result)


def find_tag(image: Array) -> Array:
    """Corners (4, 2) of an AprilTag: top left, top right, bottom right, bottom left."""
    settings = cv2.aruco.DetectorParameters()
    settings.cornerRefinementMethod = cv2.aruco.CORNER_REFINE_SUBPIX
    detector = cv2.aruco.ArucoDetector(cv2.aruco.getPredefinedDictionary(cv2.aruco.DICT_APRILTAG_36h11), settings)
    return np.asarray(detector.detectMarkers(image)[0][0], dtype=np.float64).reshape(4, 2)


def find_board(image: Array) -> Array:
    """Inner corners (35, 2) of a chessboard, row by row."""
    return np.asarray(cv2.findChessboardCornersSB(image, (7, 5))[1], dtype=np.float64).reshape(-1, 2)


def main() -> dict[str, ObjectPose]:
    rng = np.random.default_rng(0)
    marker = cv2.aruco.generateImageMarker(cv2.aruco.getPredefinedDictionary(cv2.aruco.DICT_APRILTAG_36h11), 7, 800)
    tag = cv2.copyMakeBorder(marker, 100, 100, 100, 100, cv2.BORDER_CONSTANT, value=255)
    checks = np.kron(np.indices((6, 8)).sum(0) % 2, np.ones((100, 100))).astype(np.uint8) * 255
    board = cv2.copyMakeBorder(checks, 100, 100, 100, 100, cv2.BORDER_CONSTANT, value=255)
    half = 0.08 * np.array([[-1.0, 1, 0], [1, 1, 0], [1, -1, 0], [-1, -1, 0]])  # a tag of 16 cm
    squares = 0.03 * np.array([[x - 3.0, 2.0 - y, 0] for y in range(5) for x in range(7)])  # of 3 cm
    objects = {
        "AprilTag": (photograph(tag, half * 1.25, rng), half, find_tag),
        "chessboard": (photograph(board, half / 0.08 * [0.15, 0.12, 0], rng), squares, find_board),
    }
    poses = {}
    for name, (image, points, find) in objects.items():
        seen = find(image)
        if name == "chessboard" and seen[0, 0] > seen[6, 0]:
            seen = seen[::-1]  # the board is symmetric under a half turn
        poses[name] = solve_pnp(points, seen, corner_covariances(image, seen, FLOORS[name]), CAMERA)
    return poses


if __name__ == "__main__":
    for name, pose in main().items():
        error, stated = 1000 * np.abs(pose.tvec - TVEC), 1000 * np.sqrt(np.diag(pose.covariance)[:3])
        print(f"{name}: chi-square {pose.cost:.1f} of {pose.dof}, ambiguity {pose.ambiguity:.2f}")
        for axis, off, sigma in zip("xyz", error, stated, strict=True):
            print(f"  {axis}: error {off:.2f} mm, predicted standard deviation {sigma:.2f} mm")
