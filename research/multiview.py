"""Covariances on film of four calibrated cameras: each camera is predicted from the three others.

    pip download --no-deps pose2sim==0.10.49 && unzip pose2sim-0.10.49-py3-none-any.whl -d pose2sim
    python -m research.multiview --data pose2sim/Pose2Sim -o build/multiview

The demos of Pose2Sim (BSD-3-Clause) are not part of this repository. The first shows a person on a treadmill in 100
frames at 60 Hz, with a blurred face. In the second, another person is rendered into the films. Poses are predicted
once and kept in the output folder. Errors of neighbouring frames are nearly equal, so intervals resample series; a
series is one keypoint of one person in one camera.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import chi2

from halopose.data.coco import parse_predictions
from halopose.data.files import read_json
from halopose.data.films import by_film
from halopose.errors import HaloposeError
from halopose.keypoints import COCO_NAMES, Keypoints
from halopose.multiview.leave_one_out import leave_one_out, worse_camera
from halopose.multiview.rig import CalibratedView, read_calibration
from halopose.multiview.scene import ReconstructedScene, SceneObservations, build_scene
from halopose.multiview.synchronise import estimate_offsets
from halopose.multiview.triangulation import ViewObservations
from halopose.poses import PoseDistributions
from halopose.types import Array

RATE = 60.0
BODY = np.arange(17) >= 5  # all but nose, eyes and ears


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="the folder Pose2Sim of the unpacked wheel")
    parser.add_argument("-o", "--output", type=Path, default=Path("build/multiview"))
    parser.add_argument("--offsets", action="store_true", help="estimate how many frames the films are apart, too")
    arguments = parser.parse_args()
    for demo in ("SinglePerson", "MultiPerson"):
        views, films = load(arguments.data / f"Demo_{demo}", arguments.output / demo)
        print(f"\n== Demo_{demo}: {len(views)} cameras, {len(films[0])} frames")
        if arguments.offsets:
            sure = [[poses[poses.scores > 0.4] for poses in film] for film in films]
            try:
                found = estimate_offsets(views, sure)
                print(f"offsets {found.frames.round(1).tolist()} frames, pairs disagree by {found.spread:.1f}")
            except HaloposeError as error:
                print(error)
        scene = build_scene(views, films, Keypoints.of(17), rate=RATE)
        people = person_of(scene)
        for person in scene.persons:
            tall = np.nanmedian(np.nanmax(person.place[..., 2], 1) - np.nanmin(person.place[..., 2], 1))
            print(f"person {person.identity}: {len(person.frames)} frames, {tall:.2f} m tall")
            coverage(scene, people == person.identity)
        main_person = int(np.bincount(people[people > 0]).argmax()) if demo == "SinglePerson" else tallest(scene)
        where_weights_pay(scene, people == main_person)


def load(folder: Path, output: Path) -> tuple[list[CalibratedView], list[list[PoseDistributions]]]:
    """Views and poses of a demo; they are predicted the first time."""
    views = read_calibration(folder / "calibration" / "Calib.qca.txt")
    path = output / "predictions.json"
    if not path.exists():
        films = [str(folder / "videos" / f"{view.name}.mp4") for view in views]
        options = ["--family", "student-t", "--conf", "0.1", "--no-pictures", "-o", str(output)]
        subprocess.run([sys.executable, "-m", "halopose", "predict", *films, *options], check=True)
    content = read_json(path)
    found = by_film(path, content, parse_predictions(path, content, None))
    return views, [found[view.name] for view in views]


def tallest(scene: ReconstructedScene) -> int:
    """The real person of the second demo, whose arm is raised."""
    tall = {p.identity: np.nanmedian(np.nanmax(p.place[..., 2], 1)) for p in scene.persons}
    return max(tall, key=lambda identity: float(tall[identity]))


def person_of(scene: ReconstructedScene) -> Array:
    """Identity of the person of each detection (N,), 0 for none."""
    place = scene.points.place.reshape(-1, 17, 3)
    frame = scene.gathered.frame.reshape(-1, 17)[:, 0]
    result = np.zeros(len(place), dtype=np.int64)
    for person in scene.persons:
        for n, row in enumerate(person.frames):
            same = [np.array_equal(one, person.place[n], equal_nan=True) for one in place[frame == row]]
            result[np.flatnonzero(frame == row)[same]] = person.identity
    return np.repeat(result, 17)


def interval(values: Array, series: Array, draws: int = 1000) -> str:
    """A mean with its 95 % interval, by resampling whole series."""
    rng = np.random.default_rng(0)
    _, at = np.unique(series, return_inverse=True)
    total, count = np.bincount(at, values), np.bincount(at)
    picked = rng.integers(len(count), size=(draws, len(count)))
    low, high = np.quantile(total[picked].sum(1) / count[picked].sum(1), [0.025, 0.975])
    return f"{values.mean():.3f} [{low:.3f}, {high:.3f}]"


def coverage(scene: ReconstructedScene, chosen: Array) -> None:
    """Each camera predicted from the three others: all keypoints, the body's, and one by one."""
    print(f"  {'keypoint':16}{'number':>8}{'inside 95 %':>22}{'inside 50 %':>22}{'mean d^2 (2)':>25}{'pixels':>11}")
    checked = leave_one_out(scene.views, scene.gathered, others=3, consistent=None)
    if checked is None:
        print("  never seen by all four")
        return
    keypoint = scene.gathered.keypoint[checked.row].astype(int)
    mine = chosen[checked.row]
    rows = [("all", mine), ("body", mine & BODY[keypoint])]
    rows += [(name, mine & (keypoint == k)) for k, name in enumerate(COCO_NAMES)]
    for name, part in rows:
        if not part.any():
            continue
        squared, series = checked.squared[part], (100 * checked.view + keypoint)[part]
        inside = [interval((squared <= chi2.ppf(p, 2)).astype(float), series) for p in (0.95, 0.5)]
        pixels = np.median(np.linalg.norm(checked.residual[part], axis=1))
        distance = interval(squared, series)
        print(f"  {name:16}{part.sum():>8}{inside[0]:>22}{inside[1]:>22}{distance:>25}{pixels:>11.1f}")


def where_weights_pay(scene: ReconstructedScene, chosen: Array) -> None:
    """Median distance in pixels between a camera and what the three others predict, by how these are weighted."""
    gathered = scene.gathered
    seen = gathered.observations
    hidden = ~seen.used & np.isfinite(seen.pixels).all(-1)
    every = replace(gathered, observations=replace(seen, used=seen.used | hidden))
    sigma = np.where(seen.used, np.sqrt(np.trace(seen.covariance, axis1=-2, axis2=-1)), np.nan)
    cases: list[tuple[str, SceneObservations, Array, int]] = [
        ("all", gathered, np.ones_like(hidden), -1),
        ("stated sigmas of the others differ by 2 or more", gathered, _differ(sigma, 2.0), -1),
        ("stated sigmas of the others differ by 3 or more", gathered, _differ(sigma, 3.0), -1),
        ("pruned in another camera, and used all the same", every, seen.used & _another(hidden), -1),
    ]
    for noise in (30.0, 100.0):
        for label, stated in (("stated", True), ("not stated", False)):
            worse = worse_camera(gathered, 0, noise, stated=stated)
            cases.append((f"{noise:.0f} px of noise in cam01, {label}", worse, np.ones_like(hidden), 0))
    print(f"  {'median px of the camera left out':50}{'number':>7}{'alike':>9}{'score':>9}{'sigma':>9}{'robust':>9}")
    for name, data, where, worse_view in cases:
        told, count = [], 0
        for way, options in _ways(data):
            found = leave_one_out(scene.views, way, others=3 if options else 2, **options)
            if found is None:
                continue
            part = chosen[found.row] & BODY[data.keypoint[found.row].astype(int)] & where[found.row, found.view]
            part &= found.view != worse_view
            told.append(float(np.median(np.linalg.norm(found.residual[part], axis=1))) if part.any() else np.nan)
            count = max(count, int(part.sum()))
        print(f"  {name:50}{count:>7}" + "".join(f"{value:>9.1f}" for value in told))


def _another(which: Array) -> Array:
    """Where another view than this one (N, V) is of a kind."""
    return which.sum(1, keepdims=True) - which > 0


def _differ(sigma: Array, ratio: float) -> Array:
    """Where the sigmas of the other views (N, V) differ by a ratio."""
    result = np.zeros(sigma.shape, dtype=bool)
    for view in range(sigma.shape[1]):
        others = np.delete(sigma, view, axis=1)
        known = np.isfinite(others).all(1)
        result[known, view] = others[known].max(1) >= ratio * others[known].min(1)
    return result


def _ways(gathered: SceneObservations) -> list[tuple[SceneObservations, dict[str, Any]]]:
    """Weights: equal; by the base model's score; by Gaussian covariance; robust with exclusion."""
    seen = gathered.observations
    score = np.maximum(gathered.scores, 1e-3)[..., None, None]
    by_score = ViewObservations(seen.pixels, 100 * np.eye(2) / score**2, seen.used)
    gaussian = ViewObservations(seen.pixels, seen.covariance, seen.used)
    return [
        (gathered, {"weighted": False, "consistent": None}),
        (replace(gathered, observations=by_score), {"consistent": None}),
        (replace(gathered, observations=gaussian), {"consistent": None}),
        (gathered, {}),
    ]


if __name__ == "__main__":
    main()
