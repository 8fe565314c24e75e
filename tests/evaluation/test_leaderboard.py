"""Rows of the leaderboard: figures against closed forms, and files that others can add to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from halopose.data.coco import parse_ground_truth, parse_predictions
from halopose.data.synthetic_poses import World, synthesize
from halopose.errors import HaloposeError
from halopose.evaluation.leaderboard import energy_score, noise_floor, read_rows
from halopose.matching.matched_poses import MatchedPoses, match_poses
from halopose.uncertainty.distributions import Gaussian
from tests.helpers.commands import refused, run


@pytest.fixture(scope="module")
def matched() -> MatchedPoses:
    truth, results = synthesize(World(images=60, persons=150, dof=None, overconfidence=1.0, ankle_overconfidence=1.0))
    objects = parse_ground_truth("truth", truth)
    return match_poses(parse_predictions("results", results, objects), objects)


def test_the_energy_score_of_a_true_gaussian(matched: MatchedPoses) -> None:
    """E|X - r| is sigma sqrt(pi), as X - r has twice the variance; so is E|X - X'|: the score is half of it."""
    factors = torch.eye(2, dtype=torch.float64).expand(*matched.labelled.shape, 2, 2)
    residual = np.random.default_rng(0).normal(size=matched.residual.shape)
    found = energy_score(Gaussian(factors), replace(matched, residual=residual))
    assert found == pytest.approx(np.sqrt(np.pi) / 2, rel=0.03)


def test_the_noise_floor_falls_with_the_number_of_images(matched: MatchedPoses) -> None:
    inside = np.random.default_rng(0).uniform(size=matched.labelled.shape)
    few = matched.select(np.flatnonzero(np.isin(matched.image_ids, np.unique(matched.image_ids)[:12])))
    assert noise_floor(inside[: len(few)], few) > 1.2 * noise_floor(inside, matched)


def test_rows_of_others_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    truth, results = synthesize(World(images=40, persons=100))
    (tmp_path / "t.json").write_text(json.dumps(truth))
    (tmp_path / "p.json").write_text(json.dumps(results))
    page, rows = tmp_path / "page.md", tmp_path / "rows.json"
    run("leaderboard", tmp_path / "t.json", f"first={tmp_path / 'p.json'}", "-o", page, "--rows", rows, "--cost", "1")
    first = read_rows(rows)[0]
    assert first.name == "first"
    assert 0.9 < first.held < 1
    assert first.auroc > 0.5
    run("leaderboard", tmp_path / "t.json", rows, f"again={tmp_path / 'p.json'}", "-o", page)
    assert page.read_text().count("\n") == 4
    assert all(f"| {name} |" in page.read_text() for name in ("first", "again"))
    assert "NAME=FILE" in refused(monkeypatch, capsys, "leaderboard", tmp_path / "t.json", tmp_path / "p.json")
    rows.write_text('{"format": "halopose-leaderboard-1", "rows": [{}]}')
    with pytest.raises(HaloposeError, match="damaged"):
        read_rows(rows)
