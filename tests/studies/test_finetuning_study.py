"""Fine-tuning: only the keypoint term changes, the trainer runs offline, and the scores are right."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner
from ultralytics.nn.tasks import PoseModel

from halopose.cli.app import app
from halopose.data.dataset_loading import load_dataset
from halopose.errors import HaloposeError
from halopose.evaluation.bootstrap import resample_images
from halopose.evaluation.metrics import LEVELS
from halopose.finetuning.finetuning_settings import FinetuneSettings, tuning_key
from halopose.finetuning.ultralytics_trainer import FineTuner, PoksModel, tune
from halopose.fitting.feature_cache import MatchStore
from halopose.fitting.pipeline import collect_validation
from halopose.fitting.settings import FitSettings
from halopose.hosts.loading import load_host
from halopose.hosts.ultralytics.ultralytics_host import UltralyticsHost
from halopose.matching.greedy_matching import candidate_pairs, greedy_match
from halopose.studies.coco_ap import CocoScores
from halopose.studies.finetuning_study import REPORT_METRICS, BaseModelScores, ComparisonSettings, finetune, to_json
from halopose.studies.residual_analysis import constant_predictions
from tests.helpers.models import pose_model, write_scenes

pytestmark = pytest.mark.usefixtures("one_thread")


QUICK = ComparisonSettings(heads=False, bootstrap=20)


def training_batch(keypoints: int, objects: int, side: int = 96) -> dict[str, Any]:
    """Two images with objects on the first."""
    generator = torch.Generator().manual_seed(0)
    points = 0.2 + 0.6 * torch.rand(objects, keypoints, 2, generator=generator)
    seen = (torch.rand(objects, keypoints, 1, generator=generator) < 0.7).float() * 2
    return {
        "img": torch.rand(2, 3, side, side, generator=generator),
        "batch_idx": torch.zeros(objects),
        "cls": torch.zeros(objects, 1),
        "bboxes": torch.tensor([[0.5, 0.5, 0.8, 0.8]]).repeat(objects, 1),
        "keypoints": torch.cat([points, seen], dim=2),
    }


def losses(model: PoseModel, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, float]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)  # the flow of 26 draws
        total, items = model.loss(batch)
    return total, {name: float(value) for name, value in items.items()}


@pytest.mark.parametrize("kind", ["11", "26"])
def test_only_the_keypoint_term_changes(kind: str) -> None:
    plain = pose_model(kind, (4, 3)).train()
    tuned = pose_model(kind, (4, 3)).train()
    tuned.__class__ = PoksModel
    seen: list[tuple[torch.Tensor, ...]] = []
    batch = training_batch(4, objects=2)
    _, before = losses(plain, batch)
    tuned.criterion = tuned.init_criterion()
    branch = getattr(tuned.criterion, "one2one", tuned.criterion)
    branch.keypoint_loss.register_forward_hook(lambda module, inputs, output: seen.append((*inputs, output)))
    total, after = losses(tuned, batch)
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} == {"pose_loss"}
    predicted, true, labelled, area, value = (tensor.detach() for tensor in seen[0])
    terms = []
    for k in range(4):
        rows = [i for i in range(len(true)) if labelled[i, k]]
        squares = [float((predicted[i, k, :2] - true[i, k, :2]).square().sum()) for i in rows]
        energy = [s / (2 * float(area[i]) * (2 / 4) ** 2) for s, i in zip(squares, rows, strict=True)]
        if rows:
            terms.append(math.exp(-sum(energy) / len(energy)))
    assert float(value) == pytest.approx(1 - sum(terms) / len(terms), abs=1e-5)
    assert after["pose_loss"] == pytest.approx(float(value) * tuned.args.pose, rel=1e-5)
    total.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in tuned.parameters() if p.grad is not None)


def test_a_batch_without_objects() -> None:
    model = pose_model("11", (4, 3)).train()
    model.__class__ = PoksModel
    total, items = losses(model, training_batch(4, objects=0))
    assert items["pose_loss"] == 0
    total.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A data set and the base model that labelled it."""
    folder = tmp_path_factory.mktemp("finetune")
    model = pose_model("11")
    torch.save({"model": model}, folder / "base.pt")
    return write_scenes(folder / "data", UltralyticsHost(model), {"train": 5, "val": 8}), folder / "base.pt"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_one_epoch_end_to_end(scenes: tuple[Path, Path], tmp_path: Path) -> None:
    data, base = scenes
    before = contents(data.parent) | {"base": base.read_bytes()}
    output = tmp_path / "out.pt"
    options = ["--epochs", 1, "--imgsz", 64, "--batch", 4, "--lr", 1e-5, "--head-epochs", 1, "--freeze", 10]
    options += ["--bootstrap", 20]
    done = CliRunner().invoke(app, ["finetune", str(data), "--base", str(base), "-o", str(output), *map(str, options)])
    assert done.exit_code == 0, done.output
    assert contents(data.parent) | {"base": base.read_bytes()} == before
    result = json.loads(output.with_suffix(".json").read_text())
    assert result["settings"]["loss"] == "poks"
    scores = result["scores"]
    assert list(scores) == ["before", "oks", "poks"]
    for one in scores.values():
        assert 0 <= one["ap"]["value"] <= 1
        assert 0 <= one["gaussian.ace"]["value"] <= 0.5
        assert one["gaussian.ace"]["margin"] > 0
    change = scores["poks"]["ap"]["value"] - scores["before"]["ap"]["value"]
    assert result["differences"]["poks - before"]["ap"]["value"] == pytest.approx(change)
    assert "Gaussian ACE" in done.output
    assert load_host(tmp_path / "out-oks.pt").fingerprints != load_host(output).fingerprints
    old, new = (torch.load(path, weights_only=False)["model"].state_dict() for path in (base, output))
    names = [name for name in old if not torch.equal(old[name].float(), new[name].float())]
    assert names
    assert not [name for name in names if "running" in name], "normalisation moved"
    changed = {name.split(".")[1] for name in names}
    assert all(int(layer) >= 10 for layer in changed), "frozen layers moved"
    assert type(torch.load(output, weights_only=False)["model"]) is PoseModel
    tuned = load_host(output)  # with safe loading
    assert set(tuned.fingerprints).isdisjoint(load_host(base).fingerprints)


def test_the_control_without_heads(tmp_path: Path) -> None:
    """Four keypoints, the framework's own loss, and the same result from the same seed."""
    model = pose_model("v8", (4, 3))
    torch.save({"model": model}, tmp_path / "base.pt")
    host = UltralyticsHost(model)
    data = write_scenes(tmp_path / "data", host, {"train": 4, "val": 8})
    text = data.read_text().replace("- 17", "- 4")
    data.write_text(text)
    splits = load_dataset(data, "train"), load_dataset(data, "val")
    settings = FinetuneSettings(loss="oks", epochs=1, imgsz=64, batch=4, warmup_epochs=0)
    results = [
        finetune(tmp_path / "base.pt", *splits, tmp_path / f"{name}.pt", tmp_path / name, settings, QUICK)
        for name in "ab"
    ]
    for name, one in results[0].items():
        assert json.dumps(one.estimate) == json.dumps(results[1][name].estimate)  # some are NaN
        curve = one.coverage["gaussian"]["joint"]
        assert np.abs(curve - LEVELS).mean() == pytest.approx(one.estimate["gaussian.ace"])
    again = finetune(tmp_path / "base.pt", *splits, tmp_path / "c.pt", tmp_path / "a", replace(settings, seed=1), QUICK)
    assert again["before"].estimate["ap"] == results[0]["before"].estimate["ap"]  # another tuning in the same folder
    assert list(results[0]) == ["before", "oks"]
    assert results[0]["before"].estimate["ap"] != results[0]["oks"].estimate["ap"]


def test_killed_finetuning_resumes(scenes: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resume after the last complete epoch; a finished run is not repeated."""
    data, base = scenes
    dataset = load_dataset(data, "train")
    settings = FinetuneSettings(epochs=3, imgsz=64, batch=4, learning_rate=1e-3)
    save = FineTuner.save_model
    epochs: list[int] = []

    def killed(trainer: FineTuner) -> bool:
        epochs.append(trainer.epoch)
        done = save(trainer)
        if len(epochs) == 2:
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(FineTuner, "save_model", killed)
    with pytest.raises(KeyboardInterrupt):
        tune(base, dataset, tmp_path / "out.pt", tmp_path, settings)
    state = torch.load(next(tmp_path.glob("*/state.pt")), weights_only=True)
    assert state["epoch"] == 1
    seen: list[bool] = []
    forward = FineTuner.resume_training

    def watched(trainer: FineTuner, ckpt: Any) -> None:
        forward(trainer, ckpt)
        live = trainer.model.state_dict()
        seen.append(all(torch.equal(live[name].cpu(), value) for name, value in state["model"].items()))
        assert trainer.ema.updates == state["updates"]
        assert trainer.optimizer.state_dict()["state"].keys() == state["optimizer"]["state"].keys()

    monkeypatch.setattr(FineTuner, "resume_training", watched)
    tune(base, dataset, tmp_path / "out.pt", tmp_path, settings)
    assert seen == [True]
    assert epochs == [0, 1, 2]
    tune(base, dataset, tmp_path / "again.pt", tmp_path, settings)
    assert epochs == [0, 1, 2], "a finished tuning was run again"
    assert not list(tmp_path.rglob("state.pt"))
    assert load_host(tmp_path / "again.pt").fingerprints == load_host(tmp_path / "out.pt").fingerprints


def test_a_disk_that_refuses_is_a_one_line_error(
    scenes: tuple[Path, Path], tmp_path: Path, full_disk: Callable[[int | None], None]
) -> None:
    """No partial files remain, and a rerun continues when there is space."""
    data, base = scenes
    work, output = tmp_path / "work", tmp_path / "out.pt"

    def refused(match: str, target: Path = output) -> None:
        with pytest.raises(HaloposeError, match=match) as error:
            tune(base, load_dataset(data, "train"), target, work, FinetuneSettings(epochs=1, imgsz=64, batch=4))
        assert "\n" not in str(error.value)
        assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".") or path.suffix == ".partial"]

    refused(r"cannot write .*labels.*\.txt: File too large")
    full_disk(1_000_000)
    refused(r"cannot write .*state\.pt: File too large")
    run = next(work.glob("tuning-*")) / "run"
    shutil.rmtree(run)
    run.write_text("in the way")
    refused("fine-tuning stopped: Not a directory .*run")
    run.unlink()
    full_disk(None)
    refused(r"cannot write .*out\.pt: File exists", base / "out.pt")
    full_disk(1_000_000)
    output.write_text("before")
    refused(r"cannot write .*out\.pt: File too large")
    assert output.read_text() == "before"


def test_key_depends_on_every_input_of_finetuning(scenes: tuple[Path, Path]) -> None:
    data, base = scenes
    host, train = load_host(base), load_dataset(data, "train")
    settings = FinetuneSettings()
    moved = train.records[0].objects.keypoints + 0.01
    other = replace(train.records[0], objects=replace(train.records[0].objects, keypoints=moved))
    key = tuning_key(host, train, settings)
    assert key == tuning_key(host, load_dataset(data, "train"), replace(settings, workers=0))
    assert key != tuning_key(host, train, replace(settings, loss="oks"))
    assert key != tuning_key(host, load_dataset(data, "val"), settings)
    assert key != tuning_key(host, replace(train, records=(other, *train.records[1:])), settings)


def test_refusals(scenes: tuple[Path, Path], tmp_path: Path) -> None:
    data, base = scenes
    train, val = load_dataset(data, "train"), load_dataset(data, "val")
    with pytest.raises(HaloposeError, match="the validation"):
        finetune(base, train, train, tmp_path / "out.pt", tmp_path)
    with pytest.raises(HaloposeError, match="overwrite the base"):
        finetune(base, train, val, base, tmp_path)
    fused = tmp_path / "fused.pt"
    torch.save({"model": pose_model("11").fuse(verbose=False)}, fused)
    with pytest.raises(HaloposeError, match="fused"):
        finetune(fused, train, val, tmp_path / "out.pt", tmp_path, FinetuneSettings(imgsz=64), QUICK)


def test_scores_equal_those_of_the_matching(scenes: tuple[Path, Path], tmp_path: Path) -> None:
    """AR at OKS 0.5 counted by hand from our matching, which equals that of pycocotools."""
    data, base = scenes
    host = load_host(base)
    store: MatchStore = collect_validation(host, load_dataset(data, "val"), tmp_path, FitSettings(imgsz=64, conf=0.001))
    accuracy = CocoScores.of(store)
    scores = accuracy.scores()
    truth = store.ground_truth()
    found = constant_predictions(store)
    taken = greedy_match(candidate_pairs(found, truth), len(found), truth.ignore, truth.crowd, np.array([0.5]))[0]
    recalled = np.unique(taken[taken >= 0])
    counted = ~truth.ignore
    assert scores["ar50"] == pytest.approx(counted[recalled].sum() / counted.sum())
    images = np.unique(truth.images)
    for pick, draw in zip(resample_images(len(images), 5), accuracy.draws(5), strict=True):
        often = np.bincount(pick, minlength=len(images))[np.searchsorted(images, truth.image_ids)] * counted
        assert draw["ar50"] == pytest.approx(often[recalled].sum() / often.sum())
    assert accuracy.scores() == scores


def test_equal_bases_differ_by_nothing() -> None:
    draws = {metric: np.arange(4.0) for metric in REPORT_METRICS}
    one = BaseModelScores(dict.fromkeys(REPORT_METRICS, 0.5), draws, {}, 4.0, 7)
    result = to_json({"before": one, "poks": one})
    assert result["scores"]["poks"]["nu"] == 4.0
    assert result["differences"]["poks - before"]["ap"] == {"value": 0.0, "margin": 0.0}


def test_without_pycocotools(monkeypatch: pytest.MonkeyPatch, scenes: tuple[Path, Path], tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    data, base = scenes
    with pytest.raises(HaloposeError, match="pycocotools"):
        finetune(base, load_dataset(data, "train"), load_dataset(data, "val"), tmp_path / "o.pt", tmp_path)
