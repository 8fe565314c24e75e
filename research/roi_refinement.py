"""Region-of-interest refinement on frames of 1920 x 1152 pixels at distances from 2 to 6 km.

    python -m research.roi_refinement --scenes 100

Uses scenes with separate seeds, in all weathers of training. Compares three detections:

1. on the frame at the detector's input size (`--before BASE HEADS` uses another detector);
2. on a crop at full resolution around the first detection;
3. on a crop around the position of a filter, with 30 m of position error and the attitude error of an IRS.

Prints the share of runways found, the corner error in frame pixels, the share of corners in their 95 % ellipses, and
the distance error with known attitude (`solve_position`). Intervals resample scenes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from halopose.cli.terminal import progress, say
from halopose.geometry.camera import Camera
from halopose.geometry.observations import Observations
from halopose.geometry.pnp import solve_position
from halopose.landing import shipped_detectors
from halopose.landing.association import Viewpoint
from halopose.landing.roi_refinement import RoiRefiner, expected_box, refine_with_roi
from halopose.landing.world.render import render_scene
from halopose.landing.world.scenes import TRAINING_WEATHERS, Scene, SceneSettings, corners_in_image, sample_scene
from halopose.poses import PoseDistributions
from halopose.prediction.uncertain_pose import UncertainPose
from halopose.types import Array
from research.tables import markdown

CAMERA = Camera.from_fov(1920, 1152, np.radians(30))
LIMIT, DRAWS, SEED = 5.991, 2000, 8_000_000
PLACE, ATTITUDE = 30.0, np.array([3.5e-3, 0.9e-3, 0.9e-3])  # metres; radians of yaw, pitch and roll


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenes", type=int, default=100)
    parser.add_argument("--conf", type=float, default=0.7, help="lowest score, by default that of halopose land")
    parser.add_argument("--seed", type=int, default=SEED, help="of the first scene")
    parser.add_argument("--base", type=Path, help="another detector than the one that ships, with --artifact")
    parser.add_argument("--artifact", type=Path)
    parser.add_argument("--before", type=Path, nargs=2, help="a detector and its heads, to look once with")
    given = parser.parse_args()
    conf = given.conf
    model = UncertainPose.load(
        given.base or shipped_detectors.footage_detector(),
        given.artifact or shipped_detectors.footage_artifact(),
        family="gaussian",
    )

    def steered(scene: Scene, image: Array) -> PoseDistributions:
        whole = model.predict(image, conf=conf)[0]
        return RoiRefiner(model, conf).refine(image, whole, expected_box(believed(scene), scene.runway.corners()))

    ways: dict[str, Callable[[Scene, Array], PoseDistributions]] = {
        "once": lambda _, image: model.predict(image, conf=conf)[0],
        "twice": lambda _, image: next(refine_with_roi(model, [image], conf=conf)),
        "twice, steered": steered,
    }
    if given.before:
        before = UncertainPose.load(*given.before, family="gaussian")
        ways = {"once, before": lambda _, image: before.predict(image, conf=conf)[0], **ways}
    settings = SceneSettings(camera=CAMERA, distance=(2000.0, 6000.0), parallel_share=0.0)
    found: dict[str, list[Array]] = {way: [] for way in ways}
    with progress() as step:
        for number in range(given.scenes):
            weather = TRAINING_WEATHERS[number % len(TRAINING_WEATHERS)]
            scene = sample_scene(given.seed + number, weather, settings)
            image = render_scene(scene)
            for way, look in ways.items():
                found[way].append(judged(scene, look(scene, image)))
            step("looking", number + 1, given.scenes)
    rows = {way: np.array(each) for way, each in found.items()}
    say(table(rows))
    for second in ("twice", "twice, steered"):
        for way in rows:
            if way.startswith("once"):
                say(compared(rows[second], rows[way], second, way))


def believed(scene: Scene) -> Viewpoint:
    """Position and attitude that a filter would state, with errors of the stated size."""
    rng = np.random.default_rng([scene.seed, 9])
    place, turns = scene.position + PLACE * rng.standard_normal(3), ATTITUDE * rng.standard_normal(3)
    spread = PLACE**2 * np.eye(3), np.diag(np.square(ATTITUDE[::-1]))  # about x rolls, about z yaws
    return Viewpoint(scene.camera, scene.mount, place, spread[0], scene.attitude + turns, spread[1])


def table(rows: dict[str, Array]) -> str:
    """One line: what each kind of detection finds, (N, 3) each."""
    cells = []
    for way, found in rows.items():
        seen = found[np.isfinite(found[:, 1])]
        cells.append(
            [
                f"looked {way}",
                f"{len(seen)} of {len(found)}",
                f"{np.median(seen[:, 0]):.2f} px",
                f"{told(seen[:, 2], np.mean, 100)} %",
                f"{told(seen[:, 1], rms, 100)} %",
            ]
        )
    head = ["", "found", "corner error, median", "in 95 % ellipses", "RMSE of the distance"]
    return markdown(head, cells)


def compared(twice: Array, other: Array, second: str, name: str) -> str:
    """Ratio of distance errors of two kinds of detection, over frames where both found the runway."""
    both = np.isfinite(twice[:, 1]) & np.isfinite(other[:, 1])
    ratio = bootstrap([twice[both, 1], other[both, 1]], lambda a, b: rms(a) / rms(b))
    numbers = f"{ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f})"
    return f"RMSE of the distance, {second} over {name}, {both.sum()} scenes that both see: {numbers}"


def judged(scene: Scene, poses: PoseDistributions) -> Array:
    """Mean corner error, relative distance error, share of corners in their ellipses; NaN if not detected."""
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
    found = solve_position(Observations(CAMERA, scene.runway.corners(), poses.mean[best], spread, rotation[None]))
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
