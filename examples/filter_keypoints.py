"""Kalman filter that uses the predicted covariance of every keypoint in every frame.

python examples/filter_keypoints.py

The film is synthetic: the camera moves over a photograph while a pillar hides parts of the person. Hidden keypoints
get a large covariance, so that the filter relies on earlier frames. A filter with one fixed covariance per keypoint
(the mean of the predicted ones) improves less. The truth is the prediction on the original photograph, transformed
by the motion of the camera.
"""

from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np

from halopose import UncertainPose
from halopose.data.images import read_image
from halopose.types import Array

FRAMES, RATE = 60, 25.0
ACCELERATION = 1000.0  # pixels / s^2, standard deviation of the acceleration
PHOTO = Path(__file__).parent / "photographs" / "photographer.jpg"


def film(photo: Array, rng: np.random.Generator) -> Iterator[tuple[Array, Array]]:
    """Yield frames and the motion (2, 3) of the photograph in each of them."""
    for n in range(FRAMES):
        angle = 2 * np.pi * n / FRAMES
        zoom = 0.8 + 0.1 * np.sin(angle)
        motion = np.array([[zoom, 0, 60 + 40 * np.sin(angle)], [0, zoom, 40 + 20 * np.cos(2 * angle)]])
        frame = cv2.warpAffine(photo, motion, (512, 512), borderValue=(120, 120, 120))
        pillar = round(-80 + 672 * n / FRAMES)
        frame[:, max(pillar, 0) : max(pillar + 80, 0)] = 60
        yield np.clip(frame + rng.normal(0, 12, frame.shape), 0, 255).astype(np.uint8), motion


def smooth(measured: Array, covariance: Array) -> Array:
    """Filter measurements (T, K, 2) with covariances (T, K, 2, 2) under a constant-velocity model."""
    step = 1 / RATE
    move = np.block([[np.eye(2), step * np.eye(2)], [np.zeros((2, 2)), np.eye(2)]])
    push = np.vstack([step**2 / 2 * np.eye(2), step * np.eye(2)])
    state = np.concatenate([measured[0], np.zeros_like(measured[0])], axis=1)  # (K, 4): place and velocity
    spread = np.zeros((len(state), 4, 4))
    spread[:, :2, :2], spread[:, 2:, 2:] = covariance[0], 200.0**2 * np.eye(2)
    track = [measured[0]]
    for seen, noise in zip(measured[1:], covariance[1:], strict=True):
        state, spread = state @ move.T, move @ spread @ move.T + ACCELERATION**2 * push @ push.T
        gain = spread[:, :, :2] @ np.linalg.inv(spread[:, :2, :2] + noise)
        state = state + np.einsum("kij,kj->ki", gain, seen - state[:, :2])
        spread = spread - gain @ spread[:, :2]
        track.append(state[:, :2])
    return np.array(track)


def main() -> dict[str, float]:
    """Root-mean-square errors in pixels: single frames, fixed covariances, predicted covariances."""
    model = UncertainPose.load()
    photo = read_image(PHOTO)
    still = model.predict(photo)[0].keypoints[0]
    frames, motions = zip(*film(photo, np.random.default_rng(0)), strict=True)
    truth = np.array([still @ motion[:, :2].T + motion[:, 2] for motion in motions])
    seen = model.predict(frames)
    measured = np.array([poses.keypoints[0] for poses in seen])
    covariance = np.array([poses.covariance[0] for poses in seen])
    fixed = np.broadcast_to(covariance.mean(0), covariance.shape)
    tracks = {
        "frame by frame": measured,
        "filter, fixed covariances": smooth(measured, fixed),
        "filter, predicted covariances": smooth(measured, covariance),
    }
    return {name: float(np.sqrt(((track - truth) ** 2).sum(-1).mean())) for name, track in tracks.items()}


if __name__ == "__main__":
    for name, error in main().items():
        print(f"{name:32}{error:5.1f} px")
