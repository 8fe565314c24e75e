"""What a second look at a frame's own resolution brings to a camera of 1920 x 1152 pixels, from 2 to 6 km.

    python -m experiments.closer_look --scenes 40

Scenes of seeds of their own, in all weathers of training. Every frame is looked at once, shrunk to the detector's
input, and again in a part at its own resolution. Prints how often the runway landed on is found at confidence .5,
the error of its corners in pixels of the frame, how many of them lie in their 95 % ellipses, and the error of the
distance with the attitude known (`solve_position`), with intervals of resampled scenes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

from halopose.geometry.camera import Camera
from halopose.geometry.pnp import solve_position
from halopose.landing.closer import look_closer
from halopose.landing.world.render import render
from halopose.landing.world.scenes import TRAINING_WEATHERS, Scene, SceneSettings, corners_in_image, sample_scene
from halopose.poses import PoseDistributions
from halopose.predictor import UncertainPose
from halopose.types import Array

CAMERA = Camera.from_fov(1920, 1152, np.radians(30))
CONF, LIMIT, DRAWS, SEED = 0.5, 5.991, 2000, 7_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenes", type=int, default=40)
    count = parser.parse_args().scenes
    model = UncertainPose.load("runway")
    settings = SceneSettings(camera=CAMERA, distance=(2000.0, 6000.0), parallel_share=0.0)
    ways: dict[str, list[Array]] = {"once": [], "twice": []}
    for number in range(count):
        weather = TRAINING_WEATHERS[number % len(TRAINING_WEATHERS)]
        scene = sample_scene(SEED + number, weather, settings)
        image = render(scene)
        ways["once"].append(judged(scene, model.predict(image, conf=CONF)[0]))
        ways["twice"].append(judged(scene, next(look_closer(model, [image], conf=CONF))))
    rows = {way: np.array(found) for way, found in ways.items()}
    both = np.isfinite(rows["once"][:, 1]) & np.isfinite(rows["twice"][:, 1])
    for way, found in rows.items():
        seen = found[np.isfinite(found[:, 1])]
        print(
            f"looked {way}: found in {len(seen)} of {count}; median corner error {np.median(seen[:, 0]):.2f} px;"
        )
        print(f"    in 95 % ellipses {told(seen[:, 2], np.mean, 100)} %; where both found it ({both.sum()}):")
        print(f"    RMSE of distance over distance {told(found[both, 1], rms, 100)} %")
    ratio = bootstrap([rows["twice"][both, 1], rows["once"][both, 1]], lambda a, b: rms(a) / rms(b))
    print(f"RMSE twice over once: {ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f})")


def judged(scene: Scene, poses: PoseDistributions) -> Array:
    """Mean corner error, relative error of the distance, share of corners in their ellipses; NaN if unseen."""
    truth = corners_in_image(scene)[0]
    size = np.linalg.norm(np.ptp(truth, axis=0))
    away = np.linalg.norm(poses.mean.mean(1) - truth.mean(0), axis=1)
    if not len(poses) or away.min() > size:
        return np.full(3, np.nan)
    best = [int(np.argmin(away))]
    residual = truth - poses.mean[best][0]
    spread = poses.covariance[best]
    distance = np.einsum("ki,ki->k", residual, np.linalg.solve(spread[0], residual[..., None])[..., 0])
    rotation, eye = scene.camera_pose()
    found = solve_position(CAMERA, scene.runway.corners(), poses.mean[best], spread, rotation[None])
    off = (np.linalg.norm(found.position[0]) - np.linalg.norm(eye)) / np.linalg.norm(eye)
    return np.array([np.hypot(*residual.T).mean(), off, (distance <= LIMIT).mean()])


def rms(values: Array) -> float:
    return float(np.sqrt(np.nanmean(np.square(values))))


def bootstrap(columns: list[Array], statistic: Callable[..., Any]) -> tuple[float, float, float]:
    """A statistic of columns (N,) of the same scenes, with its 95 % interval."""
    rng = np.random.default_rng(0)
    count = len(columns[0])
    drawn = []
    for _ in range(DRAWS):
        index = rng.integers(count, size=count)
        drawn.append(statistic(*(column[index] for column in columns)))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(statistic(*columns)), float(low), float(high)


def told(values: Array, statistic: Callable[..., Any], scale: float) -> str:
    middle, low, high = (scale * value for value in bootstrap([values], statistic))
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


if __name__ == "__main__":
    main()
