"""Kalman filter that uses the predicted covariance of every keypoint in every frame.

python examples/filter_keypoints.py
"""

# %% script
from pathlib import Path

PHOTOGRAPHS = Path(__file__).parent / "photographs"

# %% [markdown]
# # Filter with covariances
#
# A Kalman filter needs the measurement noise. With halopose it is known for each keypoint in each frame: a keypoint
# that is hidden for a moment gets a large covariance, and the filter relies on earlier frames.
#
# The film is synthetic, so that the truth is known: the camera moves over a photograph while a pillar hides parts of
# the person. The truth is the prediction on the still photograph, moved with the camera.

# %%
from collections.abc import Iterator

import cv2
import numpy as np

from halopose import UncertainPose
from halopose.data.images import read_image
from halopose.types import Array

FRAMES, RATE = 60, 25.0


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


model = UncertainPose.load()
photo = read_image(PHOTOGRAPHS / "photographer.jpg")
frames, motions = zip(*film(photo, np.random.default_rng(0)), strict=True)
still = model.predict(photo)[0].keypoints[0]
truth = np.array([still @ motion[:, :2].T + motion[:, 2] for motion in motions])
seen = model.predict(frames)
seen[25]

# %% [markdown]
# ## The filter
#
# Each keypoint has a position and a velocity. The only line that differs from a textbook filter is the gain: `noise` is
# the covariance that the model predicts for this keypoint in this frame.

# %%
ACCELERATION = 1000.0  # standard deviation of the acceleration in pixels / s^2


def smooth(measured: Array, covariance: Array) -> Array:
    """Filter measurements (T, K, 2) with covariances (T, K, 2, 2) under a constant-velocity model."""
    step = 1 / RATE
    move = np.block([[np.eye(2), step * np.eye(2)], [np.zeros((2, 2)), np.eye(2)]])
    push = np.vstack([step**2 / 2 * np.eye(2), step * np.eye(2)])
    state = np.concatenate([measured[0], np.zeros_like(measured[0])], axis=1)  # (K, 4): position and velocity
    spread = np.zeros((len(state), 4, 4))
    spread[:, :2, :2], spread[:, 2:, 2:] = covariance[0], 200.0**2 * np.eye(2)
    track = [measured[0]]
    for position, noise in zip(measured[1:], covariance[1:], strict=True):
        state, spread = state @ move.T, move @ spread @ move.T + ACCELERATION**2 * push @ push.T
        gain = spread[:, :, :2] @ np.linalg.inv(spread[:, :2, :2] + noise)
        state = state + np.einsum("kij,kj->ki", gain, position - state[:, :2])
        spread = spread - gain @ spread[:, :2]
        track.append(state[:, :2])
    return np.array(track)


# %% [markdown]
# ## Compare
#
# The second filter has one fixed covariance per keypoint, the mean of the predicted ones.

# %%
measured = np.array([poses.keypoints[0] for poses in seen])
covariance = np.array([poses.covariance[0] for poses in seen])
fixed = np.broadcast_to(covariance.mean(0), covariance.shape)
tracks = {
    "frame by frame": measured,
    "filter, fixed covariances": smooth(measured, fixed),
    "filter, predicted covariances": smooth(measured, covariance),
}
errors = {name: float(np.sqrt(((track - truth) ** 2).sum(-1).mean())) for name, track in tracks.items()}
for name, error in errors.items():
    print(f"{name:32}{error:5.1f} px")

# %% [markdown]
# ## Ready-made
#
# `halopose track film.mp4` does more: it pairs persons over time, learns how long errors last, bridges gaps and smooths
# in both directions. [How to track a film](../how-to/track.md)
