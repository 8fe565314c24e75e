"""The training of the runway detector under a permissive licence: one short stage, stopped and continued."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from halopose.hosts.yolonas.yolonas_host import YoloNASHost
from research import runway_nas

ROOT = Path(__file__).parents[2]
PLAN = (replace(runway_nas.STAGES[0], images=6, batch=2), replace(runway_nas.STAGES[1], images=2, batch=2, stop=None))


def losses(work: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (work / "curve.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def short_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runway_nas, "STAGES", PLAN)


def test_a_stopped_training_continues_exactly_and_its_checkpoint_loads(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for work in (whole, stopped):
        work.mkdir()
    with torch.random.fork_rng():
        training = runway_nas.Training(whole)
        training.run(np.inf, np.inf)
        for _ in range(5):
            runway_nas.Training(stopped).run(0.0, np.inf)  # stops after every step
    assert len(losses(whole)) == 4
    assert losses(stopped) == losses(whole)
    weights = training.averaged()
    assert all(torch.equal(value, weights[name]) for name, value in runway_nas.Training(stopped).averaged().items())
    snapshot = sorted((whole / "snapshots").iterdir())[-1]
    begun = runway_nas.Training(tmp_path, snapshot)  # the last stage, from weights alone
    assert (begun.stage, begun.step) == (1, 0)
    assert all(torch.equal(value, weights[name]) for name, value in begun.averaged().items())
    runway_nas.write_model(weights, tmp_path / "runway-nas.pt")
    host = YoloNASHost.load(tmp_path / "runway-nas.pt")
    assert host.class_names == ("runway",)
    assert host.keypoint_count == 4
    assert not host.oks_factor


def test_the_training_imports_nothing_under_agpl() -> None:
    code = "import sys, research.runway_nas; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not {"ultralytics", "halopose_models"} & set(done.stdout.split())


@pytest.mark.parametrize("stage", runway_nas.STAGES, ids=lambda stage: stage.name)
def test_labels_are_corners_in_the_image_and_their_boxes(stage: runway_nas.Stage) -> None:
    for index in range(2 * stage.batch):
        image, rows = runway_nas._draw(stage, index, index)
        assert image.shape == (*stage.shape, 3)
        for row in rows:
            corners = row[5:].reshape(4, 3)[:, :2]
            low, high = row[1:3] - row[3:5] / 2, row[1:3] + row[3:5] / 2
            assert (corners >= low - 0.01).all()
            assert (corners <= high + 0.01).all()
            assert (corners >= 0).all()
            assert (corners <= np.array(stage.shape[::-1])).all()
