"""From another tool's file to covariances and tracks, through the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from halopose.data.coco import parse_predictions
from halopose.data.formats.pose_table import PoseTable
from halopose.data.formats.reading import read_table, write_table
from halopose.geometry.object_pose import solve_pnp
from halopose.keypoints import COCO_NAMES
from halopose.types import Array
from tests.helpers.commands import run
from tests.helpers.rigs import rig, walk
from tests.multiview.test_rig import toml_of

NAMES = ("nose", "left_ear", "right_ear", "tail")


def film(frames: int, seed: int, noise: bool) -> PoseTable:
    """One animal that walks; noisy predictions whose score falls with the error, or labels."""
    rng = np.random.default_rng(seed)
    path = np.stack([100 + 2.0 * np.arange(frames), 200 + 30 * np.sin(np.arange(frames) / 10)], axis=1)
    body = np.array([[0, 0], [-10, 10], [-10, -10], [-60, 0]], dtype=float)
    points = path[:, None] + body
    score: Array = np.ones(points.shape[:2])
    if noise:
        score = rng.uniform(0.1, 0.95, score.shape)
        points = points + rng.normal(size=points.shape) * (6 * (1 - score))[..., None]
    return PoseTable(NAMES, points, score, np.arange(frames), np.full(frames, -1))


def test_deeplabcut_csv_to_covariances_and_tracks(tmp_path: Path) -> None:
    write_table(film(150, 0, noise=False), tmp_path / "labels.csv")
    write_table(film(150, 1, noise=True), tmp_path / "fit.csv")
    write_table(film(60, 2, noise=True), tmp_path / "later.csv")
    calibration = tmp_path / "c.json"
    family = "--family", "student-t", "--sigmas", "0.1,0.1,0.1,0.1"
    run("recalibrate", tmp_path / "fit.csv", tmp_path / "labels.csv", "-o", calibration, *family)
    run("apply", calibration, tmp_path / "later.csv", "-o", tmp_path / "out.csv")
    run("apply", calibration, tmp_path / "later.csv", "-o", tmp_path / "out.json")
    table, source = read_table(tmp_path / "out.csv"), film(60, 2, noise=True)
    assert table.covariance is not None
    assert np.allclose(table.keypoints, source.keypoints)
    spread = np.sqrt(np.linalg.det(table.covariance)) ** 0.5
    assert np.corrcoef(spread.ravel(), (1 - source.scores).ravel())[0, 1] > 0.7
    entries = json.loads((tmp_path / "out.json").read_text())
    assert len(entries) == 60
    assert {"covariance", "dof", "keep"} <= set(entries[0])
    run("track", tmp_path / "out.json", "-o", tmp_path / "tracks", "--rate", 25)
    assert len({entry["track_id"] for entry in json.loads((tmp_path / "tracks" / "tracks.json").read_text())}) == 1


def test_applied_covariances_are_taken_by_triangulation_and_pnp(tmp_path: Path) -> None:
    """Scores alone, in four cameras around a person whose keypoints in space are known."""
    rng, views, person = np.random.default_rng(0), rig(), walk(24)
    results: list[dict[str, Any]] = []
    labels: dict[str, list[dict[str, Any]]] = {"images": [], "annotations": []}
    for number, view in enumerate(views):
        for frame, points in enumerate(person):
            exact, score = view.project(points), rng.uniform(0.1, 0.95, 17)
            seen = exact + rng.normal(size=exact.shape) * (8 * (1.05 - score))[:, None]
            low, high = exact.min(0) - 10, exact.max(0) + 10
            identity = 100 * number + frame + 1
            place = {"image_id": identity, "category_id": 1, "bbox": [*low, *(high - low)]}
            results.append(
                place
                | {
                    "file_name": f"{view.name}_{frame:06d}",
                    "score": 0.9,
                    "keypoints": np.c_[seen, score].ravel().tolist(),
                }
            )
            area = float((high - low).prod())
            true = {"id": identity, "area": area, "iscrowd": 0, "num_keypoints": 17}
            labels["annotations"].append(place | true | {"keypoints": np.c_[exact, np.full(17, 2)].ravel().tolist()})
            labels["images"].append({"id": identity, "file_name": f"{identity}.jpg", "width": 960, "height": 720})
    labels["categories"] = [{"id": 1, "name": "person", "keypoints": list(COCO_NAMES)}]
    (tmp_path / "p.json").write_text(json.dumps(results))
    (tmp_path / "truth.json").write_text(json.dumps(labels))
    run("recalibrate", tmp_path / "p.json", tmp_path / "truth.json", "-o", tmp_path / "c.json")
    run("apply", tmp_path / "c.json", tmp_path / "p.json", "-o", tmp_path / "applied.json")
    (tmp_path / "cameras.toml").write_text(toml_of(views))
    said = run(
        "triangulate", tmp_path / "cameras.toml", tmp_path / "applied.json", "--rate", 30, "-o", tmp_path / "scene"
    )
    assert "1 person in 24 frames" in said
    entries = json.loads((tmp_path / "applied.json").read_text())
    poses = parse_predictions(tmp_path / "applied.json", entries, None)
    distances = []
    for row, points in enumerate(person):  # the first camera
        pose = solve_pnp(points, poses.mean[row], poses.covariance[row], views[0].camera)
        error = pose.tvec - views[0].rotation @ -views[0].position
        spread = pose.covariance[:3, :3]
        assert np.isfinite(spread).all()
        distances.append(float(error @ np.linalg.solve(spread, error)))
    assert np.median(distances) < 8  # chi-square with three degrees of freedom has a median of 2.4


def test_convert_to_labels_and_sigmas(tmp_path: Path) -> None:
    for number in (1, 2):
        write_table(film(40, number, noise=True), tmp_path / f"{number}.csv")
        run("convert", tmp_path / f"{number}.csv", "-o", tmp_path / f"{number}.json", "--labels")
    printed = run("sigmas", tmp_path / "1.json", tmp_path / "2.json")
    assert "--sigmas" in printed
    assert "repeated labels" in printed
    printed = run("sigmas", tmp_path / "1.json", "--predictions", tmp_path / "2.csv")
    assert "residuals" in printed
