"""Accuracy of positions from the aligned runway model, beside positions from the corners alone.

    python -m research.runway_alignment --work work/ --scenes 300
    python -m research.runway_alignment --work work/ --scenes 100 --width 2048

Uses scenes with separate seeds in all weathers of training: the shipped runway detector finds the corners, PnP with the
known attitude gives the prior, and ``align_model`` refines it. At more than 640 pixels, detection and a first
alignment use the image reduced to 640 pixels. `--attitude-error 0.9` adds an attitude error in milliradians, which
the prior states. A rerun keeps finished scenes in the work folder.

Prints, per distance and weather: found runways, the share that is refined, along-track errors before and after, and
how often the position is in its 95 % ellipsoid.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import process_time

import cv2
import numpy as np

from halopose.cli.terminal import progress, say
from halopose.geometry.camera import Camera, exp_so3
from halopose.geometry.observations import Observations
from halopose.geometry.plane_alignment import AlignmentSettings, Lights, align_model
from halopose.geometry.pnp import solve_position
from halopose.landing.association import detect_in_image
from halopose.landing.runway_layers import RunwayLayers
from halopose.landing.shipped_detectors import load_detector
from halopose.landing.world.render import render_scene
from halopose.landing.world.scenes import TRAINING_WEATHERS, SceneSettings, runway_pixels, sample_scene
from halopose.prediction.predictor import Predictor
from halopose.types import Array
from research.tables import markdown

SEED = 9_500_000
BINS = ((300, 1000), (1000, 2000), (2000, 4000), (4000, 6000))
LIMIT = 7.815  # 95 % of chi-square with three degrees of freedom
CONF = 0.25
WIDTH = 640


@dataclass(frozen=True)
class Result:
    """One scene; errors in metres, along the runway first. None: not found."""

    seed: int
    weather: str
    distance: float
    corners: list[float] | None = None
    corners_nees: float = 0.0
    aligned: list[float] | None = None
    nees: float = 0.0
    reason: str = ""
    seconds: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--scenes", type=int, default=300)
    parser.add_argument("--seed", type=int, default=SEED, help="of the first scene")
    parser.add_argument("--width", type=int, default=WIDTH, help="of the images in pixels")
    parser.add_argument("--attitude-error", type=float, default=0.0, help="in milliradians, per axis")
    parser.add_argument("--picture", type=Path, help="errors by distance as a picture, e.g. alignment.png")
    given = parser.parse_args()
    results = measure(given.work, given.seed, given.scenes, given.width, given.attitude_error * 1e-3)
    say(table(results))
    say(summary(results))
    if given.picture:
        draw(results, given.picture)


def draw(results: list[Result], path: Path) -> None:
    """Draw along-track errors by distance, from corners and aligned."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.subplots()
    found = [r for r in results if r.corners and r.aligned]
    refined = [r for r in found if not r.reason]
    for rows, name, colour, mark in (
        (found, "corners alone", "#c2571a", "o"),
        (refined, "aligned, where accepted", "#1f6fb2", "^"),
    ):
        errors = [max(abs((r.corners if rows is found else r.aligned)[0]), 1e-2) for r in rows]  # type: ignore[index]
        axes.plot([r.distance for r in rows], errors, mark, ms=4, alpha=0.7, label=name, color=colour)
    axes.set(xscale="log", yscale="log", xlabel="distance to the threshold (m)", ylabel="along-track error (m)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)


def measure(work: Path, first: int, count: int, width: int, attitude_rad: float) -> list[Result]:
    """Measure scenes, or read those that are finished."""
    path = work / f"alignment-{first}-{width}-{1e3 * attitude_rad:g}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines() if path.is_file() else []
    results = [Result(**json.loads(line)) for line in lines]
    model = load_detector() if len(results) < count else None
    with progress() as step, path.open("a") as file:
        for number in range(len(results), count):
            assert model is not None
            results.append(_measure(model, first + number, TRAINING_WEATHERS[number % 4], width, attitude_rad))
            file.write(json.dumps(asdict(results[-1])) + "\n")
            file.flush()
            step("aligning", number + 1, count)
    return results[:count]


def _measure(model: Predictor, seed: int, weather: str, width: int, attitude_rad: float) -> Result:
    camera = Camera.from_fov(width, round(width * 0.6), np.radians(30))
    scene = sample_scene(seed, weather, SceneSettings(camera=camera))  # type: ignore[arg-type]
    image = render_scene(scene)
    rotation, eye = scene.camera_pose()
    if attitude_rad:
        rotation = rotation @ exp_so3(attitude_rad * np.random.default_rng([seed, 11]).standard_normal(3))
    result = Result(seed, weather, float(-eye[0]))
    small, reduced = camera, image
    if width > WIDTH:
        small = camera.part(0, 0, camera.width, camera.height, WIDTH)
        reduced = cv2.resize(image, (small.width, small.height), interpolation=cv2.INTER_AREA)
    poses = detect_in_image(model, reduced, CONF)
    truth = runway_pixels(replace(scene, camera=small), scene.runway)
    away = np.linalg.norm(poses.mean.mean(1) - truth.mean(0), axis=1)
    if not len(poses) or away.min() > np.linalg.norm(np.ptp(truth, axis=0)):
        return result
    best = [int(np.argmin(away))]
    spread = attitude_rad**2 * np.eye(3) if attitude_rad else None
    observed = Observations(
        small, scene.runway.corners(), poses.mean[best], poses.covariance[best], rotation[None],
        None if spread is None else spread[None],
    )  # fmt: skip
    solved = solve_position(observed)
    if not solved.converged[0]:
        return result
    position, covariance = solved.position[0], solved.covariance[0][:3, :3]
    result = replace(result, corners=_listed(position - eye), corners_nees=_nees(position - eye, covariance))
    # The almanac tells darkness, but not whether lamps are on by day.
    lights: Lights = "on" if weather in ("dusk", "night") else "auto"
    target = RunwayLayers(scene.runway.length, scene.runway.width)
    start = process_time()
    found = align_model(
        reduced, small, rotation, position, covariance, target, attitude_covariance=spread, lights=lights
    )
    if width > WIDTH and found.accepted:
        settings = AlignmentSettings(band=8.0)
        found = align_model(
            image, camera, rotation, found.position, found.covariance, target,
            attitude_covariance=spread, lights=lights, settings=settings,
        )  # fmt: skip
    error = found.position - eye
    return replace(
        result,
        aligned=_listed(error),
        nees=_nees(error, found.covariance),
        reason=found.reason,
        seconds=process_time() - start,
    )


def _listed(values: Array) -> list[float]:
    return [float(value) for value in values]


def _nees(error: Array, covariance: Array) -> float:
    return float(error @ np.linalg.solve(covariance, error))


def table(results: list[Result]) -> str:
    """One row per distance and weather."""
    rows = []
    for low, high in BINS:
        for weather in (*TRAINING_WEATHERS, "all"):
            found = [r for r in results if r.corners and low <= r.distance < high and weather in (r.weather, "all")]
            refined = [r for r in found if not r.reason]
            if not refined:
                continue
            before, after = (np.array([getattr(r, name)[0] for r in refined]) for name in ("corners", "aligned"))
            inside = np.mean([r.nees < LIMIT for r in refined])
            rows.append([
                f"{low / 1000:g} to {high / 1000:g} km", weather, f"{len(found)}", f"{len(refined) / len(found):.0%}",
                f"{_rms(before):.3g}", f"{_rms(after):.3g}", f"{np.median(np.abs(after)):.2g}", f"{inside:.0%}",
                f"{np.mean([r.nees for r in refined]):.1f}",
            ])  # fmt: skip
    head = [
        "distance",
        "weather",
        "found",
        "refined",
        "corners, rms m",
        "aligned, rms m",
        "median m",
        "in 95 %",
        "NEES",
    ]
    return markdown(head, rows)


def summary(results: list[Result]) -> str:
    """Share of refinements that are worse than corners and beyond the stated 99 %, and the time."""
    refined = [r for r in results if r.aligned and r.corners and not r.reason]
    worse = [r for r in refined if r.nees > 11.345 and abs(r.aligned[0]) > abs(r.corners[0])]  # type: ignore[index]
    times = [r.seconds for r in results if r.aligned]
    reasons = {r.reason for r in results if r.reason}
    counts = ", ".join(f"{reason}: {sum(r.reason == reason for r in results)}" for reason in sorted(reasons))
    return (
        f"{len(worse)} of {len(refined)} refinements are worse than corners and outside the stated 99 %. "
        f"Median time {np.median(times):.2f} s. Refused: {counts}."
    )


def _rms(values: Array) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


if __name__ == "__main__":
    main()
