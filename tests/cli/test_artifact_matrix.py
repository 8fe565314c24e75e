"""Every kind of artifact through every command: the shipped ones, and one of each kind that ``fit`` can make."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from halopose.data.films import FilmWriter
from halopose.fitting.artifact import Artifact
from halopose.hosts import model_zoo
from halopose.landing.world.dataset_writer import write_dataset
from tests.helpers.commands import base, run
from tests.helpers.models import host_of, pose_model, write_scenes
from tests.helpers.values import read_picture

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*are beyond the cells"),  # random weights detect too much
]

FITTED = {
    "student-t loss": ("--dof", 4),
    "context": ("--context",),
    "last layer": ("--trunk", "last-layer", "--dispersion", "isotropic"),
    "assigned": ("--calibration", "assigned", "--region-scales"),
    "end2end": ("--end2end",),
}


def evaluated(data: Path, base_model: Path, artifact: Path, output: Path, *more: Any) -> dict[str, Any]:
    """Metrics of a tiny evaluation."""
    run("evaluate", data, "--base", base_model, "--artifact", artifact, "--split", "test", "--bootstrap", 0,
        "--pictures", 1, "-o", output, *more)  # fmt: skip
    content: dict[str, Any] = json.loads((output / "metrics.json").read_text())
    return content


def through_the_other_commands(
    data: Path, model: Path, artifact: Path, folder: Path, size: int, matches: bool = True
) -> None:
    """Predict, track, calibrate if detections match objects, export, and predict and evaluate what was exported."""
    files = "--base", model, "--artifact", artifact
    images = sorted((data.parent / "images" / "test").iterdir())
    run("predict", *images, *files, "-o", folder / "poses", "--imgsz", size, "--conf", 0.05, "--save-csv")
    found = json.loads((folder / "poses" / "predictions.json").read_text())
    assert all("dof" in entry for entry in found)
    film = folder / "film.mp4"
    with FilmWriter(film, 10.0) as writer:
        for _ in range(3):
            writer.write(read_picture(images[0]))
    if found:
        options = "--conf", 0.05, "--score", 0.05, "--confirm", 1, "--imgsz", size
        run("track", film, *files, *options, "-o", folder / "tracks")
    if matches:
        run("calibrate", data, *files, "--split", "test", "-o", folder / "calibrated.safetensors")
    run("export", *files, "--imgsz", size, "-o", folder / "deployed")
    run("predict", images[0], "--deployed", folder / "deployed", "-o", folder / "exported", "--conf", 0.05)
    run(
        "evaluate", data, "--deployed", folder / "deployed", "--split", "test", "--bootstrap", 0, "-o", folder / "again"
    )


@pytest.mark.parametrize("kind", FITTED)
def test_fitted_artifacts_are_evaluated(work: Path, tmp_path: Path, kind: str) -> None:
    """Each kind of heads as ``fit`` makes them, on images that the fit did not use."""
    checkpoint, data, options = work / "base.pt", work / "data.yaml", FITTED[kind]
    if kind == "end2end":
        checkpoint = tmp_path / "base.pt"
        torch.save({"model": pose_model("26")}, checkpoint)
        data = write_scenes(tmp_path / "data", host_of("26-one-to-one"), {"train": 8, "val": 8, "test": 4})
    artifact = tmp_path / "a.safetensors"
    run("fit", data, "--base", checkpoint, "-o", artifact, "--imgsz", 64, "--epochs", 1,
        "--calibration-share", 0.5, "--novelty-images", 0, *options)  # fmt: skip
    metrics = evaluated(data, checkpoint, artifact, tmp_path / "out")
    assert metrics["matched_instances"] > 0
    if kind == "context":
        through_the_other_commands(data, checkpoint, artifact, tmp_path, 64)


def test_heads_with_context_features_are_evaluated_under_shift(work: Path, tmp_path: Path) -> None:
    """With an out-of-distribution model, added later, and a step of corruption."""
    plain, novel = tmp_path / "a.safetensors", tmp_path / "n.safetensors"
    run("fit", work / "data.yaml", *base(work), "-o", plain, "--imgsz", 64, "--epochs", 1, "--calibration-share",
        0.5, "--context")  # fmt: skip
    run("novelty", work / "data.yaml", *base(work), "--artifact", plain, "-o", novel)
    metrics = evaluated(work / "data.yaml", work / "base.pt", novel, tmp_path / "out", "--shift", "--kinds", "blur")
    assert metrics["novelty"] is not None
    assert len(json.loads((tmp_path / "out" / "shift.json").read_text())["rows"]) == 4
    run("calibrate", work / "data.yaml", *base(work), "--artifact", novel, "--split", "test",
        "-o", tmp_path / "c.safetensors")  # fmt: skip


@pytest.mark.parametrize("name", [model.name for model in model_zoo.named_models()])
def test_shipped_artifacts_pass_every_command(tmp_path: Path, name: str) -> None:
    """The heads of YOLO11n-pose on random weights of the same architecture, as the published ones are not here."""
    model = model_zoo.find_model(name)
    assert model is not None
    artifact = Artifact.load(model.artifact())
    if name == "yolo11n-pose":
        checkpoint, size = tmp_path / "base.pt", 64
        torch.save({"model": pose_model("11")}, checkpoint)
        artifact = replace(artifact, base=host_of("11").fingerprints)
        data = write_scenes(tmp_path / "data", host_of("11"), {"test": 3})
    else:
        checkpoint, size = model.base(), 320
        data = write_dataset(tmp_path / "data", {"test": 3})
    artifact.save(tmp_path / "a.safetensors")
    shift = ("--shift", "--kinds", "blur") if artifact.novelty is not None else ()
    metrics = evaluated(data, checkpoint, tmp_path / "a.safetensors", tmp_path / "out", "--imgsz", size, *shift)
    assert (tmp_path / "out" / "shift.json").is_file() == bool(shift)
    assert metrics["keypoints"] >= 0
    through_the_other_commands(data, checkpoint, tmp_path / "a.safetensors", tmp_path, size, name != "yolo11n-pose")
