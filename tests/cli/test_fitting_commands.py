"""fit and its steps, end to end on small scenes: what they write, and what they refuse."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halopose.boxes import box_area
from halopose.data.dataset import Dataset
from halopose.data.dataset_loading import load_dataset
from halopose.data.files import write_json
from halopose.fitting.artifact import Artifact
from halopose.hosts.ultralytics.ultralytics_host import UltralyticsHost
from halopose.keypoints import Keypoints
from halopose.prediction.uncertain_pose import UncertainPose
from tests.helpers.commands import base, refused, run
from tests.helpers.models import ASSETS, pose_model, write_scenes
from tests.helpers.values import present

pytestmark = pytest.mark.usefixtures("one_thread")


def test_fit_writes_artifact_and_report(work: Path) -> None:
    artifact = Artifact.load(work / "a.safetensors")
    assert artifact.imgsz == 64
    assert set(artifact.card.images.counts()) == {"heads", "calibration", "evaluation"}
    metrics = json.loads((work / "a-report" / "metrics.json").read_text())
    assert metrics["gaussian"]["nll"] == pytest.approx(present(artifact.card.figures).gaussian.nll)
    assert (work / "a-report" / "report.html").is_file()


def by_steps(data: Path, folder: Path, heads: tuple[str, Path], *, source: str = "matched", **options: Any) -> Artifact:
    """collect, train, calibrate by hand, as a fit with half of the validation images to calibrate on."""
    images = options.pop("images", ())
    val = options.pop("val", ("--split", "val"))
    run("collect", data, *heads, *images, "--split", "train", "--sizes", 64, "-o", folder / "train")
    source_data = val[0] if val[0] != "--split" else data
    run("collect", source_data, *heads, *images, *(val if val[0] == "--split" else ()), "--sizes", 64,
        "--detections", 20, "-o", folder / "val")  # fmt: skip
    trained = [item for name, value in options.items() for item in (f"--{name}", value)]
    run("train", folder / "train", *heads, "--epochs", 2, *trained, "-o", folder / "heads.safetensors")
    run("calibrate", folder / "val", *heads, "--artifact", folder / "heads.safetensors", "--share", 0.5,
        "--source", source, "-o", folder / "done.safetensors")  # fmt: skip
    return Artifact.load(folder / "done.safetensors")


def same_artifact(one: Artifact, other: Artifact, folder: Path) -> None:
    """Equal to the last byte, but for the figures that a fit measures at its end."""
    for name, artifact in (("one", one), ("other", other)):
        replace(artifact, card=replace(artifact.card, figures=None)).save(folder / name)
    assert (folder / "one").read_bytes() == (folder / "other").read_bytes()


def test_fit_by_steps_is_a_fit(work: Path, tmp_path: Path) -> None:
    done = by_steps(work / "data.yaml", tmp_path, base(work))
    assert Artifact.load(tmp_path / "heads.safetensors").calibrations.threshold == float("-inf")
    assert not torch.equal(done.calibrations.gaussian.tau_, torch.ones(17))
    same_artifact(done, Artifact.load(work / "a.safetensors"), tmp_path)


@pytest.mark.parametrize("count", [4, 5])
@pytest.mark.parametrize("form", ["yaml", "json"])
def test_steps_use_keypoint_layout_of_the_data(tmp_path: Path, count: int, form: str) -> None:
    """Names, sigmas and the area factor of other keypoints than COCO's, from a yaml and from COCO json."""
    host = UltralyticsHost(pose_model("11", (count, 3)))
    torch.save({"model": pose_model("11", (count, 3))}, tmp_path / "base.pt")
    names = [f"corner_{letter}" for letter in "abcde"[:count]]
    sigmas = [0.05 + 0.01 * k for k in range(count)]
    yaml = write_scenes(tmp_path / "data", host, {"train": 8, "val": 8}, kpt_shape=[count, 3],
                        kpt_names={0: names}, kpt_oks_sigmas=sigmas)  # fmt: skip
    fit_options = "--base", tmp_path / "base.pt", "--imgsz", 64, "--epochs", 2, "--calibration-share", 0.5
    if form == "yaml":
        run("fit", yaml, *fit_options, "-o", tmp_path / "fit.safetensors")
        done = by_steps(yaml, tmp_path, base(tmp_path))
    else:
        train, val = (as_coco(load_dataset(yaml, split), tmp_path / f"{split}.json") for split in ("train", "val"))
        folder = "--images", tmp_path / "data"
        run("fit", train, "--val", val, *folder, *fit_options, "-o", tmp_path / "fit.safetensors")
        done = by_steps(train, tmp_path, base(tmp_path), images=folder, val=(val,))
    fitted = Artifact.load(tmp_path / "fit.safetensors")
    assert fitted.layout == Keypoints.of(count, names=names, sigmas=sigmas)
    assert fitted.layout.area_factor == 1.0
    same_artifact(done, fitted, tmp_path)


def as_coco(dataset: Dataset, path: Path) -> Path:
    """A YOLO split as COCO json."""
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for record in dataset.records:
        pixels, objects = record.read()
        name = str(Path(str(record.path)).relative_to(path.parent / "data"))
        images.append({"id": record.image_id, "file_name": name, "height": pixels.shape[0]})
        for n in range(len(objects)):
            points = np.concatenate([objects.keypoints[n], 2.0 * objects.labelled[n][:, None]], axis=1)
            low, high = objects.boxes[n, :2], objects.boxes[n, 2:]
            annotations.append({
                "id": len(annotations) + 1, "image_id": record.image_id, "category_id": 1, "iscrowd": 0,
                "bbox": [*low, *(high - low)], "area": objects.area[n], "keypoints": points.ravel().tolist(),
            })  # fmt: skip
    category = {"id": 1, "name": "thing", "keypoints": dataset.layout.names, "sigmas": dataset.layout.sigmas}
    write_json(path, {"images": images, "annotations": annotations, "categories": [category]})
    return path


def test_calibration_on_assigned_cells_has_the_weights_of_the_training(work: Path, tmp_path: Path) -> None:
    """By hand as in a fit, with weights that are not the defaults; the card says what was done."""
    options = "--alpha", 3, "--no-scale-weight", "--calibration", "assigned"
    run("fit", work / "data.yaml", *base(work), "-o", tmp_path / "fit.safetensors", "--imgsz", 64, "--epochs", 2,
        "--calibration-share", 0.5, *options)  # fmt: skip
    fitted = Artifact.load(tmp_path / "fit.safetensors")
    run("collect", work / "data.yaml", *base(work), "--split", "train", "--sizes", 64, "-o", tmp_path / "train")
    run("train", tmp_path / "train", *base(work), "--epochs", 2, "--alpha", 3, "--no-scale-weight",
        "-o", tmp_path / "heads.safetensors")  # fmt: skip
    run("collect", work / "data.yaml", *base(work), "--split", "val", "--sizes", 64, "--detections", 20,
        "-o", tmp_path / "val")  # fmt: skip
    run("calibrate", tmp_path / "val", *base(work), "--artifact", tmp_path / "heads.safetensors", "--share", 0.5,
        "--source", "assigned", "-o", tmp_path / "done.safetensors")  # fmt: skip
    done = Artifact.load(tmp_path / "done.safetensors")
    assert done.card.fit_settings.calibration == "assigned"
    assert done.card.fit_settings.train.alpha == 3
    same_artifact(done, fitted, tmp_path)


def test_calibrating_on_training_images_is_refused(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("collect", work / "data.yaml", *base(work), "--split", "train", "--sizes", 64, "--detections", 20,
        "-o", tmp_path / "train")  # fmt: skip
    line = refused(monkeypatch, capsys, "calibrate", tmp_path / "train", *base(work), "--artifact",
                   work / "a.safetensors", "-o", tmp_path / "x")  # fmt: skip
    assert "trained on" in line


@pytest.mark.parametrize("command", ["fit", "report", "train", "calibrate", "evaluate", "predict"])
def test_outputs_that_cannot_be_written_are_refused_before_any_work(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (tmp_path / "file").write_text("x")
    inside, folder, heads = (
        tmp_path / "file" / "a.safetensors",
        tmp_path / "file",
        ("--artifact", work / "a.safetensors"),
    )
    arguments = {
        "fit": ("fit", work / "data.yaml", *base(work), "-o", inside),
        "report": ("fit", work / "data.yaml", *base(work), "-o", tmp_path / "a.safetensors", "--report", folder),
        "train": ("train", work / "a-work" / "train", *base(work), "-o", inside),
        "calibrate": ("calibrate", work / "a-work" / "val", *base(work), *heads, "-o", inside),
        "evaluate": ("evaluate", work / "data.yaml", *base(work), *heads, "--split", "test", "-o", folder),
        "predict": ("predict", ASSETS / "bus.jpg", *base(work), *heads, "-o", folder),
    }[command]
    for late in (
        "fitting.pipeline.fit", "fitting.pipeline.train_heads",
        "fitting.pipeline.calibrate_artifact", "fitting.pipeline.collect_validation",
        "prediction.uncertain_pose.UncertainPose.stream",
    ):  # fmt: skip
        monkeypatch.setattr(f"halopose.{late}", lambda *given, **more: pytest.fail("too late"))
    line = refused(monkeypatch, capsys, *arguments)
    assert line.startswith(f"halopose: cannot write to {folder}")


def test_two_concurrent_runs_in_a_folder_are_refused(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second says so in one line; a lock that a killed process leaves behind is none."""
    hold = (
        "import sys, time\nfrom halopose.data.lock import locked\n"
        "with locked(sys.argv[1]):\n    print('held', flush=True)\n    time.sleep(60)"
    )
    arguments = "collect", work / "data.yaml", *base(work), "--sizes", 64, "-o", tmp_path / "work"
    with subprocess.Popen([sys.executable, "-c", hold, tmp_path / "work"], stdout=subprocess.PIPE) as process:
        assert present(process.stdout).read(4) == b"held"
        line = refused(monkeypatch, capsys, *arguments)
        assert f"process {process.pid} works in {tmp_path / 'work'}" in line
        assert line.count("\n") == 1
        process.kill()
    run(*arguments)


def test_fit_into_a_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.yaml").touch()
    line = refused(monkeypatch, capsys, "fit", "data.yaml", "--base", "base.pt", "-o", ".")
    assert "folder" in line
    assert [path.name for path in tmp_path.iterdir()] == ["data.yaml"]


def test_fit_without_data_explains_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refused(monkeypatch, capsys, "fit")
    assert "--base" in line
    assert "yaml" in line
    assert not list(tmp_path.iterdir())


def test_fit_never_works_in_a_folder_of_other_files(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The work folder is named after the artifact; a data set of the user there is refused and left alone."""
    (tmp_path / "mine-work" / "train" / "images").mkdir(parents=True)
    words = "fit", work / "data.yaml", *base(work), "-o", tmp_path / "mine.safetensors"
    line = refused(monkeypatch, capsys, *words)
    assert "mine-work" in line
    assert "--work" in line
    assert not (tmp_path / "mine.safetensors").exists()


def test_calibrating_anew_is_as_the_heads_were_made(work: Path, tmp_path: Path) -> None:
    """A guarantee and regions by scale stay until other settings are given."""
    calibrate = "calibrate", work / "data.yaml", *base(work), "--split", "test"
    chosen = "--rule", "risk:0.4@0.6", "--region-scales"
    steps = {"chosen": chosen, "again": (), "other": ("--rule", "f1", "--no-region-scales")}
    before, found = work / "a.safetensors", []
    for name, options in steps.items():
        run(*calibrate, "--artifact", before, *options, "-o", tmp_path / f"{name}.safetensors")
        before = tmp_path / f"{name}.safetensors"
        made, regions = Artifact.load(before).card.fit_settings, Artifact.load(before).calibrations.regions
        assert regions is not None
        found.append((made.rule, made.region_scales, len(regions.edges)))
    assert found == [("risk:0.4@0.6", True, 2), ("risk:0.4@0.6", True, 2), ("f1", False, 0)]


def test_a_camera_of_ones_own_is_adapted_to(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Annotated images instead of a feature cache; --offset adds means and does not change keypoints."""
    heads = *base(work), "--artifact", work / "a.safetensors"
    run("calibrate", work / "data.yaml", *heads, "--split", "test", "-o", tmp_path / "plain.safetensors")
    printed = run(
        "calibrate", work / "data.yaml", *heads, "--split", "test", "--offset", "-o", tmp_path / "own.safetensors"
    )
    assert "temperature" in printed
    assert "calibrate without --offset" in printed
    plain, own = (Artifact.load(tmp_path / f"{name}.safetensors") for name in ("plain", "own"))
    assert plain.calibrations.offset is None
    assert own.card.images == plain.card.images
    means = torch.full((17, 2), 0.25, dtype=torch.float64)  # an untrained base has no bias worth finding
    assert own.calibrations.offset is not None
    moved = replace(own, calibrations=replace(own.calibrations, offset=means))
    moved.save(tmp_path / "moved.safetensors")
    image = load_dataset(work / "data.yaml", "test").records[0].path
    models = [UncertainPose.load_base(work / "base.pt", each) for each in (plain, tmp_path / "moved.safetensors")]
    before, after = (model.predict(image, conf=0.01)[0] for model in models)
    assert len(before)
    np.testing.assert_array_equal(before.keypoints, after.keypoints)
    np.testing.assert_array_equal(before.mean, before.keypoints)
    size = np.sqrt(box_area(after.boxes))
    np.testing.assert_allclose(after.mean - after.keypoints, np.tile(0.25 * size[:, None, None], (1, 17, 2)))
    assert model_identity(models[0]) != model_identity(models[1])
    line = refused(monkeypatch, capsys, "calibrate", work / "data.yaml", *heads, "--split", "test", "--offset",
                   "--source", "assigned", "-o", tmp_path / "x.safetensors")  # fmt: skip
    assert "--offset" in line


def model_identity(model: UncertainPose) -> str:
    return json.dumps(model.identity()[-1])
