"""evaluate and predict, end to end on small scenes: what they write, and what they refuse."""

import csv
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from halopose.cli.app import app
from halopose.data import images
from halopose.data.capture import Frame
from halopose.data.coco import parse_predictions
from halopose.data.dataset import Dataset
from halopose.data.dataset_loading import load_dataset
from halopose.data.films import FilmWriter, film_facts
from halopose.display import Window
from halopose.fitting.artifact import Artifact
from halopose.hosts import model_zoo
from halopose.hosts.ultralytics.ultralytics_host import UltralyticsHost
from halopose.poses import PoseDistributions
from halopose.prediction import predict_files, track_sources
from halopose.prediction.track_sources import read_frames
from halopose.prediction.uncertain_pose import UncertainPose
from halopose.types import Array
from tests.cli.test_fitting_commands import as_coco
from tests.helpers.commands import base, refused, run
from tests.helpers.models import ASSETS, artifact_for, pose_model
from tests.helpers.values import present, read_picture

pytestmark = pytest.mark.usefixtures("one_thread")


def test_evaluate_leaves_out_what_the_artifact_has_seen(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "evaluate", work / "data.yaml", *base(work), "--artifact", work / "a.safetensors", "--bootstrap", 0
    output = run(*arguments, "--split", "val", "-o", tmp_path / "val", "--pictures", 2)
    assert "5 of 10 images" in output
    mine = json.loads((tmp_path / "val" / "metrics.json").read_text())
    fitted = json.loads((work / "a-report" / "metrics.json").read_text())
    assert mine["gaussian"]["nll"] == pytest.approx(fitted["gaussian"]["nll"])
    assert mine["matched_instances"] == fitted["matched_instances"]
    assert "every image was used" in refused(monkeypatch, capsys, *arguments, "--split", "train", "-o", tmp_path / "t")


def test_predict_writes_pictures_and_json(work: Path, tmp_path: Path) -> None:
    run("predict", ASSETS / "bus.jpg", *base(work), "--artifact", work / "a.safetensors", "-o", tmp_path,
        "--family", "student-t")  # fmt: skip
    entries = json.loads((tmp_path / "predictions.json").read_text())
    assert {entry["file_name"] for entry in entries} == {"bus.jpg"}
    assert (tmp_path / "bus.jpg").stat().st_size > 10_000
    for entry in entries:
        assert np.shape(entry["covariance"]) == np.shape(entry["scale"]) == (17, 3)
        assert len(entry["keep"]) == len(entry["dof"]) == 17


def test_predict_keeps_pictures_of_equal_names_apart(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        shutil.copy(ASSETS / "bus.jpg", tmp_path / folder)
    heads = *base(work), "--artifact", work / "a.safetensors"
    run("predict", tmp_path / "*" / "bus.jpg", *heads, "-o", tmp_path / "out")
    entries = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert {entry["file_name"] for entry in entries} == {"a/bus.jpg", "b/bus.jpg"}
    assert len({entry["image_id"] for entry in entries}) == 2
    for folder in ("a", "b"):
        assert (tmp_path / "out" / folder / "bus.jpg").is_file()
    line = refused(monkeypatch, capsys, "predict", tmp_path / "a", *heads, "-o", tmp_path / "a")
    assert "would replace the source" in line
    assert (tmp_path / "a" / "bus.jpg").read_bytes() == (ASSETS / "bus.jpg").read_bytes()


def test_predict_refuses_missing_and_foreign_things(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # the default output is a folder here
    artifact = "--artifact", work / "a.safetensors"
    assert "no file" in refused(monkeypatch, capsys, "predict", tmp_path / "no.jpg", *base(work), *artifact)
    assert not (tmp_path / "poses").exists()
    assert "--artifact" in refused(monkeypatch, capsys, "predict", ASSETS, *base(work))
    torch.save({"model": pose_model("11", seed=5)}, tmp_path / "other.pt")
    line = refused(monkeypatch, capsys, "predict", ASSETS, "--base", tmp_path / "other.pt", *artifact)
    assert "made for another base" in line


@pytest.mark.usefixtures("full_disk")
def test_predict_on_a_full_disk_is_a_one_line_error(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = "--artifact", work / "a.safetensors"
    line = refused(monkeypatch, capsys, "predict", ASSETS / "bus.jpg", *base(work), *heads, "-o", tmp_path)
    assert line.startswith(f"halopose: cannot write {tmp_path}")
    assert "File too large" in line
    assert line.endswith("to resume\n")
    assert not list(tmp_path.glob("*.jpg"))


def test_predict_then_score_without_touching_a_file(work: Path, tmp_path: Path) -> None:
    """Ids are those of the data: numbers where names are numbers, else of the name; or the truth's own."""
    dataset = load_dataset(work / "data.yaml", "val")
    folder = Path(str(dataset.records[0].path)).parent
    truth = coco_beside(dataset, tmp_path)
    heads = *base(work), "--artifact", work / "a.safetensors"
    run("predict", folder, *heads, "--conf", 0.01, "-o", tmp_path / "poses")
    entries = json.loads((tmp_path / "poses" / "predictions.json").read_text())
    assert {entry["image_id"] for entry in entries} <= set(dataset.image_ids.tolist())
    output = run("score", tmp_path / "poses" / "predictions.json", truth, "-o", tmp_path / "s", "--bootstrap", 0)
    assert "matched instances" in output
    content = json.loads(truth.read_text())
    number = {image["id"]: 1000 + n for n, image in enumerate(content["images"])}
    for image in content["images"]:
        image["id"] = number[image["id"]]
    for annotation in content["annotations"]:
        annotation["image_id"] = number[annotation["image_id"]]
        annotation["category_id"] -= 1
    for category in content["categories"]:
        category["id"] -= 1
    (tmp_path / "renamed.json").write_text(json.dumps(content))
    run("predict", folder, *heads, "--conf", 0.01, "-o", tmp_path / "p", "--truth", tmp_path / "renamed.json")
    both = tmp_path / "p" / "predictions.json", tmp_path / "renamed.json"
    assert run("score", *both, "-o", tmp_path / "t", "--bootstrap", 0).splitlines()[:3] == output.splitlines()[:3]


def coco_beside(dataset: Dataset, folder: Path) -> Path:
    links = folder / "data"
    links.mkdir()
    for record in dataset.records:
        shutil.copy(str(record.path), links)
    moved = replace(dataset, records=tuple(replace(r, path=links / r.path.name) for r in dataset.records))
    return as_coco(moved, folder / "truth.json")


def test_a_truth_without_the_image_is_refused(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "truth.json").write_text(json.dumps({"images": [{"id": 1, "file_name": "other.jpg"}]}))
    heads = *base(work), "--artifact", work / "a.safetensors", "--truth", tmp_path / "truth.json"
    line = refused(monkeypatch, capsys, "predict", ASSETS / "bus.jpg", *heads, "-o", tmp_path / "out")
    assert "no image bus.jpg" in line


def test_predict_finds_the_head_and_the_names_of_the_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that uses one-to-many by default, and heads made for its one-to-one head."""
    model = pose_model("26", (4, 3))
    torch.save({"model": model}, tmp_path / "base.pt")
    artifact = artifact_for(UltralyticsHost(model, end2end=True))
    names = ("near_left", "near_right", "far_right", "far_left")
    replace(artifact, layout=replace(artifact.layout, names=names)).save(tmp_path / "a.safetensors")
    drawn: list[Any] = []

    def draw(image: Array, *_: Any, names: Any, **__: Any) -> Array:
        drawn.append(names)
        return image

    monkeypatch.setattr("halopose.drawing.draw_poses", draw)
    run("predict", ASSETS / "bus.jpg", *base(tmp_path), "--artifact", tmp_path / "a.safetensors", "-o", tmp_path)
    assert drawn == [names]


def test_settings_reach_the_pictures(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def predict(self: UncertainPose, image: Any, **given: Any) -> list[PoseDistributions]:
        seen.append(given)
        return [nothing(self)]

    monkeypatch.setattr(UncertainPose, "predict", predict)
    run("evaluate", work / "data.yaml", *base(work), "--artifact", work / "a.safetensors", "--bootstrap", 0,
        "--split", "test", "--imgsz", 96, "--conf", 0.02, "--iou", 0.6, "--pictures", 2,
        "-o", tmp_path)  # fmt: skip
    assert seen == [{"imgsz": 96, "conf": 0.02, "iou": 0.6}] * 2


def nothing(model: UncertainPose) -> PoseDistributions:
    count = len(model.artifact.layout)
    empty = np.zeros((0, count, 2, 2))
    return PoseDistributions(np.zeros((0, 4)), np.zeros(0), np.zeros((0, count, 2)), empty, empty)


def test_the_visibility_threshold_is_the_artifacts_or_the_users(work: Path, tmp_path: Path) -> None:
    artifact = Artifact.load(work / "a.safetensors")
    calibrations = replace(artifact.calibrations, threshold=float("-inf"), visibility_threshold=0.6)
    replace(artifact, calibrations=calibrations).save(tmp_path / "a.safetensors")
    kept = {}
    for option in ((), ("--visibility", 0), ("--visibility", 0.3)):
        run("predict", ASSETS / "bus.jpg", *base(work), "--artifact", tmp_path / "a.safetensors", *option,
            "-o", tmp_path / "out", "--exist-ok")  # fmt: skip
        content = json.loads((tmp_path / "out" / "predictions.json").read_text())
        kept[option[1:]] = parse_predictions("p", content, None)
    visibility = present(kept[()].visibility)
    assert (visibility < 0.6).any()
    assert np.array_equal(present(kept[()].keep), visibility >= 0.6)
    assert present(kept[(0,)].keep).all()
    assert np.array_equal(present(kept[(0.3,)].keep), visibility >= 0.3)


def test_bad_files_are_passed_over_and_listed(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b", "c"):
        shutil.copy(ASSETS / "bus.jpg", tmp_path / f"{name}.jpg")
    (tmp_path / "b.jpg").write_bytes(b"no image")
    heads = *base(work), "--artifact", work / "a.safetensors"
    result = CliRunner().invoke(app, [str(word) for word in ("predict", tmp_path, *heads, "-o", tmp_path / "out")])
    assert result.exit_code == 1
    assert "skipped: image" in result.output
    assert "2 of 3" in result.output
    entries = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert {entry["file_name"] for entry in entries} == {"a.jpg", "c.jpg"}


def test_a_stopped_run_is_resumed(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a", "b", "c"):
        shutil.copy(ASSETS / "bus.jpg", tmp_path / "in" / f"{name}.jpg")
    words = "predict", tmp_path / "in", *base(work), "--artifact", work / "a.safetensors", "-o", tmp_path / "out"
    whole, calls = UncertainPose.predict, []

    def interrupted(model: Any, image: Array, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole(model, image, **options)

    monkeypatch.setattr(UncertainPose, "predict", interrupted)
    stopped = CliRunner().invoke(app, [str(word) for word in words])
    assert stopped.exit_code != 0
    assert "same command resumes" in stopped.output
    entries = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert {entry["file_name"] for entry in entries} == {"a.jpg", "b.jpg"}
    assert "2 of 3" in run(*words)
    assert len(calls) == 4
    entries = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert {entry["file_name"] for entry in entries} == {"a.jpg", "b.jpg", "c.jpg"}


def test_a_film_becomes_a_film(work: Path, tmp_path: Path) -> None:
    image = cv2.resize(read_picture(ASSETS / "bus.jpg"), (96, 128))
    with FilmWriter(tmp_path / "clip.mp4", 10) as film:
        for _ in range(3):
            film.write(image)
    heads = *base(work), "--artifact", work / "a.safetensors"
    output = run("predict", tmp_path / "clip.mp4", ASSETS / "bus.jpg", *heads, "-o", tmp_path / "out")
    assert re.search(r"clip: 3 frames, \d+ ms/frame", output)
    assert film_facts(tmp_path / "out" / "clip.mp4") == (10.0, 3)
    assert (tmp_path / "out" / "bus.jpg").is_file()


def test_the_shipped_heads_are_found_for_their_base(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given with --base alone, the base that the shipped heads are for needs no --artifact; others do."""
    words = ("predict", ASSETS / "bus.jpg", *base(work), "-o", tmp_path / "out")
    assert "--artifact" in refused(monkeypatch, capsys, *words)
    monkeypatch.setattr(model_zoo, "is_default_base", lambda path: True)
    monkeypatch.setattr(model_zoo, "shipped_artifact", lambda: work / "a.safetensors")
    run(*words)
    assert (tmp_path / "out" / "bus.jpg").is_file()


def test_an_uncalibrated_artifact_is_refused_unless_insisted_on(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("train", work / "a-work" / "train", *base(work), "--epochs", 1, "-o", tmp_path / "heads.safetensors")
    words = *base(work), "--artifact", tmp_path / "heads.safetensors", "-o", tmp_path / "out"
    for command in (("predict", ASSETS / "bus.jpg"), ("evaluate", work / "data.yaml", "--split", "test")):
        assert "not calibrated" in refused(monkeypatch, capsys, *command, *words)
    run("predict", ASSETS / "bus.jpg", *words, "--uncalibrated")


def test_options_from_a_file(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("predict:\n  family: student-t\n  hide-pruned: true\n")
    words = (
        "predict",
        ASSETS / "bus.jpg",
        *base(work),
        "--artifact",
        work / "a.safetensors",
        "-o",
        tmp_path / "out",
    )
    run("--config", tmp_path / "config.yaml", *words)
    assert "dof" in json.loads((tmp_path / "out" / "predictions.json").read_text())[0]
    mistakes = {"pradict: {}": "predict", "predict: {confidence: 0.9}": "conf", "predict: 3": "epochs"}
    for content, advice in mistakes.items():
        (tmp_path / "config.yaml").write_text(content)
        line = refused(monkeypatch, capsys, *words, "--config", tmp_path / "config.yaml")
        assert "config.yaml" in line
        assert advice in line
    (tmp_path / "config.yaml").write_text("predict: {exist_ok: true, conf: 0.89}")
    run(*words, "--config", tmp_path / "config.yaml")
    assert all(entry["score"] >= 0.89 for entry in json.loads((tmp_path / "out" / "predictions.json").read_text()))


def test_quiet_prints_nothing_and_models_are_listed(work: Path, tmp_path: Path) -> None:
    words = (
        "predict",
        ASSETS / "bus.jpg",
        *base(work),
        "--artifact",
        work / "a.safetensors",
        "-o",
        tmp_path / "out",
    )
    assert run("--quiet", *words) == ""
    listed = " ".join(run("models").split())
    assert "4 corners" in listed
    for model in model_zoo.named_models():
        assert model.figures is not None
        assert f"licence {model.licence}; base {model.network}" in listed
        assert f"published: {model.figures}" in listed
    assert run("--version").startswith("halopose ")


@pytest.fixture(scope="module")
def novel(work: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact with novelty."""
    path = tmp_path_factory.mktemp("novel") / "n.safetensors"
    printed = run("novelty", work / "data.yaml", *base(work), "--artifact", work / "a.safetensors", "-o", path)
    assert printed.endswith(f"14 images, calibrated on 5 -> {path}\n")
    return path


def test_calibrating_anew_ranks_novelty_among_the_same_images(work: Path, novel: Path, tmp_path: Path) -> None:
    printed = run("calibrate", work / "data.yaml", *base(work), "--artifact", novel, "--split", "test",
               "-o", tmp_path / "c.safetensors")  # fmt: skip
    before, after = Artifact.load(novel), Artifact.load(tmp_path / "c.safetensors")
    assert before.novelty is not None
    assert after.novelty is not None
    assert f"refer to {len(after.novelty.known)} detections" in printed
    assert list(present(after.card.novelty).calibration) == sorted(after.card.images.of("calibration"))
    assert not set(present(after.card.novelty).calibration) & set(present(before.card.novelty).calibration)
    assert torch.equal(before.novelty.centre, after.novelty.centre)  # what was fitted stays


def test_novelty_is_added_and_nothing_else_changes(
    work: Path, novel: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = Artifact.load(work / "a.safetensors"), Artifact.load(novel)
    assert before.novelty is None
    for key, value in before.heads.state_dict().items():
        assert torch.equal(value, after.heads.state_dict()[key])
    assert torch.equal(before.calibrations.gaussian.tau_, after.calibrations.gaussian.tau_)
    assert replace(after.card, novelty=None) == before.card
    assert not set(present(after.card.novelty).calibration) & set(before.card.images.of("evaluation"))
    error = refused(monkeypatch, capsys, "novelty", work / "data.yaml", *base(work), "--artifact",
                    work / "a.safetensors", "-o", novel, "--val", "train")  # fmt: skip
    assert "every validation image" in error


def test_predict_flags_out_of_distribution_detections(
    work: Path, novel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "predict", ASSETS / "bus.jpg", *base(work), "--alarm", 0.5
    printed = run(*arguments, "--artifact", novel, "-o", tmp_path, "--monitor", 0.01)
    assert "no alarm of 1" in printed
    entries = json.loads((tmp_path / "predictions.json").read_text())
    flagged = [entry for entry in entries if not entry["in_distribution"]]
    assert all((entry["novelty"] <= 0.5) == (entry in flagged) for entry in entries)
    assert all(0 < entry["image_novelty"] <= 1 for entry in entries)
    assert f"{len(flagged)} out of distribution" in printed
    error = refused(monkeypatch, capsys, *arguments, "--artifact", work / "a.safetensors", "-o", tmp_path / "no")
    assert "halopose novelty" in error


def test_evaluate_under_shift(work: Path, novel: Path, tmp_path: Path) -> None:
    how = "--split", "test", "--bootstrap", 0, "--pictures", 0
    shift = "--shift", "--kinds", "blur", "--against", work / "data.yaml"
    printed = run("evaluate", work / "data.yaml", *base(work), "--artifact", novel, *how, *shift, "-o", tmp_path)
    steps = json.loads((tmp_path / "shift.json").read_text())["rows"]
    assert [(row["name"], row["severity"]) for row in steps] == [
        ("unchanged", 0), ("blur", 1), ("blur", 3), ("blur", 5), ("data", 0)
    ]  # fmt: skip
    assert "| blur 5 |" in printed
    alarms = json.loads((tmp_path / "metrics.json").read_text())["novelty"]
    assert alarms["images"]["count"] == 6
    assert re.search(r"alarms at 5 %: .* detections .* images", printed)
    assert "Out-of-distribution alarms" in (tmp_path / "report.html").read_text()
    assert "</html>" in (tmp_path / "shift.html").read_text()


def test_films_are_never_written_over_sources_or_foreign_films(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before any work, also where the output folder is reached by a link."""
    film = small_film(tmp_path / "clip.mp4")
    content = film.read_bytes()
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "other").mkdir()
    shutil.copy(film, tmp_path / "other" / "clip.avi")
    monkeypatch.setattr(UncertainPose, "predict", lambda *given, **more: pytest.fail("too late"))
    heads = *base(work), "--artifact", work / "a.safetensors"
    for folder in (tmp_path, tmp_path / "link"):
        assert "replace the source" in refused(monkeypatch, capsys, "predict", film, *heads, "-o", folder)
    line = refused(monkeypatch, capsys, "predict", tmp_path / "other" / "clip.avi", *heads, "-o", tmp_path)
    assert "clip.mp4 exists already" in line
    assert film.read_bytes() == content
    assert not (tmp_path / "predictions.json").exists()


def small_film(path: Path, frames: int = 3) -> Path:
    image = cv2.resize(read_picture(ASSETS / "bus.jpg"), (96, 128))
    with FilmWriter(path, 10) as film:
        for _ in range(frames):
            film.write(image)
    return path


def test_json_of_a_film_holds_its_frame_rate(work: Path, tmp_path: Path) -> None:
    heads = *base(work), "--artifact", work / "a.safetensors"
    run("predict", small_film(tmp_path / "clip.mp4"), *heads, "-o", tmp_path / "out", "--no-pictures")
    assert not (tmp_path / "out" / "clip.mp4").exists()
    printed = run("track", tmp_path / "out" / "predictions.json", "-o", tmp_path / "tracks")
    assert "--rate" not in printed
    assert read_frames(tmp_path / "out" / "predictions.json")[2] == 10


def test_later_runs_into_a_folder_are_numbered(work: Path, tmp_path: Path) -> None:
    """Existing results are kept, unless `--exist-ok` is given."""
    words = "predict", ASSETS / "bus.jpg", *base(work), "--artifact", work / "a.safetensors", "-o", tmp_path / "out"
    run(*words)
    before = (tmp_path / "out" / "predictions.json").read_bytes()
    assert "out2" in run(*words, "--conf", 0.9)
    assert "out3" in run(*words)
    assert (tmp_path / "out" / "predictions.json").read_bytes() == before
    assert (tmp_path / "out3" / "predictions.json").read_bytes() == before
    run(*words, "--exist-ok", "--conf", 0.9)
    assert (tmp_path / "out" / "predictions.json").read_bytes() == (tmp_path / "out2" / "predictions.json").read_bytes()
    assert not (tmp_path / "out4").exists()


def test_a_second_process_in_the_folder_is_refused(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "predict", ASSETS / "bus.jpg", *base(work), "--artifact", work / "a.safetensors", "-o", tmp_path / "out"
    hold = (
        "import sys, time\nfrom halopose.data.lock import locked\n"
        "with locked(sys.argv[1]):\n    print('held', flush=True)\n    time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", hold, tmp_path / "out"], stdout=subprocess.PIPE) as process:
        assert present(process.stdout).read(4) == b"held"
        assert str(process.pid) in refused(monkeypatch, capsys, *words)
        process.kill()
    assert not (tmp_path / "out" / "predictions.json").exists()
    run(*words)


def test_a_stopped_run_is_resumed_only_for_the_same_files(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replaced image is predicted again; another folder with the same names is another run."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for name in ("1", "2", "3"):
            shutil.copy(ASSETS / "bus.jpg", tmp_path / folder / f"{name}.jpg")
    heads = *base(work), "--artifact", work / "a.safetensors", "-o", tmp_path / "out"
    whole, calls = UncertainPose.predict, [0]

    def interrupted(model: Any, image: Array, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return whole(model, image, **options)

    monkeypatch.setattr(UncertainPose, "predict", interrupted)
    assert CliRunner().invoke(app, [str(word) for word in ("predict", tmp_path / "a", *heads)]).exit_code != 0
    assert "3 of 3" in run("predict", tmp_path / "b", *heads)
    assert len({e["file_name"] for e in json.loads((tmp_path / "out2" / "predictions.json").read_text())}) == 3
    assert calls == [6]
    cv2.imwrite(str(tmp_path / "a" / "1.jpg"), np.zeros((64, 64, 3), np.uint8))
    assert "1 of 3" in run("predict", tmp_path / "a", *heads)
    entries = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert calls == [8]
    assert {entry["file_name"] for entry in entries} >= {"2.jpg", "3.jpg"}
    assert not (tmp_path / "out3").exists()


@pytest.mark.parametrize("name", ["yolo11s-pose.pt", "person", "missing.pt"])
def test_a_base_that_is_no_file_and_no_name_is_refused_with_the_known_names(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refused(monkeypatch, capsys, "predict", ASSETS / "bus.jpg", "--base", name)
    for word in (f"no file {name}", "yolo11n-pose", "runway", "halopose fit"):
        assert word in line
    (tmp_path / "model.onnx").write_bytes(b"x")
    assert "damaged" in refused(monkeypatch, capsys, "predict", ASSETS / "bus.jpg", "--base", "model.onnx")


def test_names_of_models_have_any_case_and_may_end_in_pt() -> None:
    assert model_zoo.find_model("YOLO11n-Pose.pt") == model_zoo.find_model("yolo11n-pose") != None  # noqa: E711
    assert model_zoo.find_model("Runway") is not None


def test_labels_table_and_chosen_detections(work: Path, tmp_path: Path) -> None:
    heads = *base(work), "--artifact", work / "a.safetensors", "--conf", 0.4
    film = tmp_path / "film.mp4"
    with FilmWriter(film, 12.0) as writer:
        for _ in range(4):
            writer.write(cv2.resize(read_picture(ASSETS / "bus.jpg"), (96, 128)))
    output = run("predict", film, ASSETS / "bus.jpg", *heads, "-o", tmp_path / "out", "--save-txt", "--save-csv",
                 "--max-det", 2, "--vid-stride", 2)  # fmt: skip
    assert "3 images, per image:" in output
    for part in ("ms read", "ms model", "ms uncertainty", "ms draw"):
        assert part in output
    entries = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert {(e["file_name"], e.get("frame_rate")) for e in entries} == {
        ("bus.jpg", None), ("film_000000", 6.0), ("film_000001", 6.0),
    }  # fmt: skip
    assert max(Counter(entry["file_name"] for entry in entries).values()) == 2
    rows = list(csv.DictReader((tmp_path / "out" / "keypoints.csv").read_text().splitlines()))
    assert len(rows) == 17 * len(entries)
    assert [float(row["x"]) for row in rows[:17]] == pytest.approx(entries[0]["keypoints"][::3])
    labels = (tmp_path / "out" / "labels" / "bus.txt").read_text().splitlines()
    assert [len(line.split()) for line in labels] == [56, 56]
    assert film_facts(tmp_path / "out" / "film.mp4") == (6.0, 2)
    run("predict", ASSETS / "bus.jpg", *heads, "-o", tmp_path / "none", "--classes", "1,2")
    assert json.loads((tmp_path / "none" / "predictions.json").read_text()) == []


def test_a_window_that_cannot_open_is_a_one_line_error(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    heads = *base(work), "--artifact", work / "a.safetensors", "-o", tmp_path / "out"
    assert "save pictures instead" in refused(monkeypatch, capsys, "predict", ASSETS / "bus.jpg", *heads, "--show")
    assert not (tmp_path / "out").exists()


def closing_after(count: int, shown: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """An endless camera, and a window that the user closes after a number of frames."""

    class ClosedWindow(Window):
        def __init__(self, title: str = "", rate: bool = False) -> None:
            self._open = False

        def show(self, image: Array, wait: bool = False) -> bool:
            shown.append(image.shape)
            return len(shown) < count

    def frames(source: int, stride: int) -> Iterator[Frame]:
        picture = cv2.resize(read_picture(ASSETS / "bus.jpg"), (96, 128))
        yield from (Frame(number, picture, 30.0, 0) for number in range(10**6))

    for module in (predict_files, track_sources):
        monkeypatch.setattr(module, "check_screen", lambda: None)
        monkeypatch.setattr(module, "Window", ClosedWindow)
    monkeypatch.setattr(images, "frames_of", frames)


def test_a_camera_is_tracked_until_the_window_is_closed(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[int, ...]] = []
    closing_after(13, shown, monkeypatch)
    heads = *base(work), "--artifact", work / "a.safetensors", "--conf", 0.4
    output = run("track", "0", *heads, "-o", tmp_path / "out", "--show", "--save-txt", "--max-det", 2)
    assert "tracks in 13 frames" in output
    assert "13 frames, per frame:" in output
    assert len(shown) == 13
    assert film_facts(tmp_path / "out" / "camera_0.mp4")[1] == 13
    entries = json.loads((tmp_path / "out" / "tracks.json").read_text())
    assert {entry["frame"] for entry in entries} <= set(range(13))
    last = max((tmp_path / "out" / "labels").iterdir())
    assert all(len(line.split()) == 57 for line in last.read_text().splitlines())


def test_films_of_a_folder_are_tracked_into_folders(work: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        with FilmWriter(tmp_path / "in" / f"{name}.mp4", 12.0) as writer:
            for _ in range(6):
                writer.write(cv2.resize(read_picture(ASSETS / "bus.jpg"), (96, 128)))
    heads = *base(work), "--artifact", work / "a.safetensors", "--conf", 0.4
    run("track", tmp_path / "in", *heads, "-o", tmp_path / "out", "--vid-stride", 2, "--confirm", 1)
    for name in ("a", "b"):
        assert film_facts(tmp_path / "out" / name / f"{name}.mp4") == (6.0, 3)
        assert {e["frame"] for e in json.loads((tmp_path / "out" / name / "tracks.json").read_text())} == {0, 1, 2}


def test_closing_the_window_keeps_what_was_recorded(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream without end: the window is closed after three frames."""
    shown: list[tuple[int, ...]] = []

    closing_after(3, shown, monkeypatch)
    output = run("predict", "0", *base(work), "--artifact", work / "a.safetensors", "-o", tmp_path / "out", "--show")
    assert "window was closed" in output
    assert len(shown) == 3
    rate, count = film_facts(tmp_path / "out" / "camera_0.mp4")
    assert (count, rate <= 30) == (2, True)
