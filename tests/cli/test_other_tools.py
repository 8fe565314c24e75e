"""From another tool's file to covariances and tracks, through the commands."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from halopose.data.formats.pose_table import PoseTable
from halopose.data.formats.reading import read_table, write_table
from halopose.types import Array
from tests.helpers.commands import run

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


def test_convert_to_labels_and_sigmas(tmp_path: Path) -> None:
    for number in (1, 2):
        write_table(film(40, number, noise=True), tmp_path / f"{number}.csv")
        run("convert", tmp_path / f"{number}.csv", "-o", tmp_path / f"{number}.json", "--labels")
    printed = run("sigmas", tmp_path / "1.json", tmp_path / "2.json")
    assert "--sigmas" in printed
    assert "repeated labels" in printed
    printed = run("sigmas", tmp_path / "1.json", "--predictions", tmp_path / "2.csv")
    assert "residuals" in printed
