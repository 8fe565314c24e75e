"""The commands that need a base model, end to end on small scenes: what they write, and what they refuse."""

import json
import shutil
import sys

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from halopose.cli.app import app, main
from halopose.fitting.artifact import Artifact
from tests.helpers.models import ASSETS, host_of, pose_model, write_scenes

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:no samples for keypoints"),
]


@pytest.fixture(scope="module")
def work(tmp_path_factory, one_thread):
    """Data, a checkpoint, and the artifact that ``halopose fit`` makes of them."""
    folder = tmp_path_factory.mktemp("cli")
    counts = {"train": 14, "val": 10, "test": 6}
    write_scenes(folder, host_of("11"), counts)
    torch.save({"model": pose_model("11")}, folder / "base.pt")
    run("fit", folder / "data.yaml", *base(folder), "-o", folder / "a.safetensors", "--imgsz", 64,
        "--epochs", 2, "--calibration-share", 0.5)  # fmt: skip
    return folder


def base(folder):
    return "--base", folder / "base.pt"


def run(*arguments) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refused(monkeypatch, capsys, *arguments) -> str:
    monkeypatch.setattr(sys, "argv", ["halopose", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.count("\n") == 1
    return error


def test_fit_writes_artifact_and_report(work):
    artifact = Artifact.load(work / "a.safetensors")
    assert artifact.imgsz == 64
    assert set(artifact.card["images"]) == {"heads", "calibration", "evaluation"}
    metrics = json.loads((work / "a-report" / "metrics.json").read_text())
    assert metrics["gaussian"]["nll"] == pytest.approx(artifact.card["figures"]["gaussian"]["nll"])
    assert (work / "a-report" / "report.html").is_file()


def test_fit_by_steps_is_a_fit(work, tmp_path):
    run("collect", work / "data.yaml", *base(work), "--split", "train", "--sizes", 64, "-o", tmp_path / "train")
    run("collect", work / "data.yaml", *base(work), "--split", "val", "--sizes", 64, "--detections", 20,
        "-o", tmp_path / "val")  # fmt: skip
    run("train", tmp_path / "train", *base(work), "--epochs", 2, "-o", tmp_path / "heads.safetensors")
    heads = Artifact.load(tmp_path / "heads.safetensors")
    fitted = Artifact.load(work / "a.safetensors")
    for mine, theirs in zip(heads.heads.parameters(), fitted.heads.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert heads.threshold == float("-inf")
    run("calibrate", tmp_path / "val", *base(work), "--artifact", tmp_path / "heads.safetensors",
        "-o", tmp_path / "done.safetensors")  # fmt: skip
    done = Artifact.load(tmp_path / "done.safetensors")
    assert not torch.equal(done.gaussian.tau_, torch.ones(17))
    assert len(done.card["images"]["calibration"]) == 10


def test_calibrating_on_training_images_is_refused(work, tmp_path, monkeypatch, capsys):
    run("collect", work / "data.yaml", *base(work), "--split", "train", "--sizes", 64, "--detections", 20,
        "-o", tmp_path / "train")  # fmt: skip
    line = refused(monkeypatch, capsys, "calibrate", tmp_path / "train", *base(work), "--artifact",
                   work / "a.safetensors", "-o", tmp_path / "x")  # fmt: skip
    assert "among those the heads were trained on" in line


def test_evaluate_leaves_out_what_the_artifact_has_seen(work, tmp_path, monkeypatch, capsys):
    arguments = "evaluate", work / "data.yaml", *base(work), "--artifact", work / "a.safetensors", "--bootstrap", 0
    output = run(*arguments, "--split", "val", "-o", tmp_path / "val", "--pictures", 2)
    assert "5 of 10 images were used to make the artifact: left out" in output
    mine = json.loads((tmp_path / "val" / "metrics.json").read_text())
    fitted = json.loads((work / "a-report" / "metrics.json").read_text())
    assert mine["gaussian"]["nll"] == pytest.approx(fitted["gaussian"]["nll"])
    assert mine["matched_instances"] == fitted["matched_instances"]
    assert "every image was used" in refused(
        monkeypatch, capsys, *arguments, "--split", "train", "-o", tmp_path / "t"
    )


def test_predict_writes_pictures_and_json(work, tmp_path):
    run("predict", ASSETS / "bus.jpg", *base(work), "--artifact", work / "a.safetensors", "-o", tmp_path,
        "--family", "student-t")  # fmt: skip
    [image] = json.loads((tmp_path / "predictions.json").read_text())
    assert image["image"] == "bus"
    assert (tmp_path / "bus.jpg").stat().st_size > 10_000
    for entry in image["detections"]:
        assert np.shape(entry["covariance"]) == np.shape(entry["scale"]) == (17, 3)
        assert len(entry["keep"]) == len(entry["dof"]) == 17


def test_predict_keeps_pictures_of_equal_names_apart(work, tmp_path, monkeypatch, capsys):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        shutil.copy(ASSETS / "bus.jpg", tmp_path / folder)
    heads = *base(work), "--artifact", work / "a.safetensors"
    run("predict", tmp_path / "*" / "bus.jpg", *heads, "-o", tmp_path / "out")
    assert [image["image"] for image in json.loads((tmp_path / "out" / "predictions.json").read_text())] == [
        "a/bus",
        "b/bus",
    ]
    for folder in ("a", "b"):
        assert (tmp_path / "out" / folder / "bus.jpg").is_file()
    line = refused(monkeypatch, capsys, "predict", tmp_path / "a", *heads, "-o", tmp_path / "a")
    assert line.endswith("would take its place: choose another --output\n")
    assert (tmp_path / "a" / "bus.jpg").read_bytes() == (ASSETS / "bus.jpg").read_bytes()


def test_predict_refuses_missing_and_foreign_things(work, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # the default output is a folder here
    artifact = "--artifact", work / "a.safetensors"
    assert "cannot read image" in refused(
        monkeypatch, capsys, "predict", tmp_path / "no.jpg", *base(work), *artifact
    )
    assert "give --artifact" in refused(monkeypatch, capsys, "predict", ASSETS, *base(work))
    torch.save({"model": pose_model("11", seed=5)}, tmp_path / "other.pt")
    line = refused(monkeypatch, capsys, "predict", ASSETS, "--base", tmp_path / "other.pt", *artifact)
    assert "made for another base" in line


@pytest.mark.parametrize("command", ["fit", "fit runways", "report", "train", "calibrate", "evaluate", "predict"])
def test_outputs_that_cannot_be_written_are_refused_before_any_work(work, tmp_path, monkeypatch, capsys, command):
    (tmp_path / "file").write_text("x")
    inside, folder, heads = (
        tmp_path / "file" / "a.safetensors",
        tmp_path / "file",
        ("--artifact", work / "a.safetensors"),
    )
    arguments = {
        "fit": ("fit", work / "data.yaml", *base(work), "-o", inside),
        "fit runways": ("fit", "-o", inside),
        "report": ("fit", work / "data.yaml", *base(work), "-o", tmp_path / "a.safetensors", "--report", folder),
        "train": ("train", work / "a" / "train", *base(work), "-o", inside),
        "calibrate": ("calibrate", work / "a" / "val", *base(work), *heads, "-o", inside),
        "evaluate": ("evaluate", work / "data.yaml", *base(work), *heads, "--split", "test", "-o", folder),
        "predict": ("predict", ASSETS / "bus.jpg", *base(work), *heads, "-o", folder),
    }[command]
    for late in (
        "landing.world.write_dataset", "pipeline.fit", "pipeline.train_heads", "pipeline.calibrate_artifact",
        "pipeline.collect_validation", "predictor.UncertainPose.stream",
    ):  # fmt: skip
        monkeypatch.setattr(f"halopose.{late}", lambda *given, **more: pytest.fail("too late"))
    line = refused(monkeypatch, capsys, *arguments)
    assert line.startswith(f"halopose: cannot write to {folder}")


def test_fit_into_a_folder_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert refused(monkeypatch, capsys, "fit", "-o", ".").endswith("it is a folder, name a file\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("full_disk")
def test_predict_on_a_full_disk_is_one_line(work, tmp_path, monkeypatch, capsys):
    heads = "--artifact", work / "a.safetensors"
    line = refused(monkeypatch, capsys, "predict", ASSETS / "bus.jpg", *base(work), *heads, "-o", tmp_path)
    assert line == f"halopose: cannot write {tmp_path / 'bus.jpg'}: File too large\n"
    assert not list(tmp_path.iterdir())
