"""From the command line to a deployed folder and back: export, predict, calibrate, evaluate."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halopose.cli import app as cli
from halopose.data.images import write_image
from halopose.deploy.deployed_model import Deployed
from halopose.fitting.artifact import Artifact
from halopose.hosts import model_zoo
from halopose.landing.world.render import render_scene
from halopose.landing.world.scenes import sample_scene
from halopose.plugins import NamedModel
from tests.helpers.models import ASSETS, artifact_for, host_of, pose_model, write_scenes
from tests.helpers.values import present

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*of .* detections are beyond"),
]


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["halopose", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    output = capsys.readouterr()
    return int(stop.value.code or 0), output.out, output.err


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    folder = tmp_path_factory.mktemp("work")
    torch.save({"model": pose_model("11")}, folder / "base.pt")
    artifact_for(host_of("11"), imgsz=64).save(folder / "heads.safetensors")
    write_scenes(folder, host_of("11"), {"val": 10, "other": 8})
    return folder


def test_a_model_goes_out_and_is_used(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ("--base", work / "base.pt", "--artifact", work / "heads.safetensors")
    out = tmp_path / "deployed"
    code, text, _ = run(monkeypatch, capsys, "export", *base, "-o", out, "--windows", 60)
    assert code == 0, text
    assert {path.name for path in out.iterdir()} == {"model.onnx", "predict.py", "README.md", "card.json"}
    results = []
    for name, source in {"torch": base, "deployed": ("--deployed", out)}.items():
        options = ("-o", tmp_path / name, "--conf", 0.5, "--imgsz", 96)
        assert run(monkeypatch, capsys, "predict", ASSETS / "bus.jpg", *source, *options)[0] == 0
        results.append(json.loads((tmp_path / name / "predictions.json").read_text()))
    assert len(results[0]) == len(results[1]) > 2
    for own, theirs in zip(*results, strict=True):
        assert np.allclose(own["keypoints"], theirs["keypoints"], atol=0.02)
        assert np.allclose(own["covariance"], theirs["covariance"], rtol=1e-2, atol=1e-3 * np.max(own["covariance"]))

    data = work / "data.yaml"
    calibrate = ("calibrate", data, "--deployed", out, "--split", "other")
    code, text, error = run(monkeypatch, capsys, *calibrate, "--rule", "risk:0.05@0.95")
    assert (code, error.count("\n")) == (2, 1)
    assert "risk:0.05@0.95" in error  # on eight images: it is not forgotten
    made = []
    for asked in (("--rule", "f1", "--region-scales"), (), ("--rule", "youden", "--no-region-scales")):
        code, text, error = run(monkeypatch, capsys, *calibrate, *asked)
        assert code == 0, error
        assert "of 8 images" in text
        settings = json.loads((out / "card.json").read_text())["settings"]
        made.append((settings["rule"], len(present(Deployed(out).facts.regions)["edges"])))
    assert made == [("f1", 2), ("f1", 2), ("youden", 0)]
    evaluate = ("evaluate", data, "--deployed", out, "-o", tmp_path / "report", "--bootstrap", 0)
    code, text, error = run(monkeypatch, capsys, *evaluate)
    assert code == 0, error
    assert json.loads((tmp_path / "report" / "metrics.json").read_text())["matched_instances"] > 3
    code, _, error = run(monkeypatch, capsys, *evaluate, "--split", "other")
    assert code == 2
    assert "every image was used" in error


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["export", "--base", "{base}"], "give --artifact"),
        (["export", "--half", "--int8", "images"], "--half or --int8"),
        (["predict", "bus.jpg", "--deployed", "nowhere"], "no folder nowhere: write one with `halopose export"),
        (["predict", "bus.jpg", "--deployed", "{empty}"], "no model at"),
        (["predict", "bus.jpg", "--deployed", "{empty}", "--base", "{base}"], "--base and --artifact"),
        (["calibrate", "{data}", "--deployed", "{empty}"], "no model at"),
        (["calibrate", "{data}"], "give --base, or --deployed"),
        (["calibrate", "{data}", "--deployed", "{empty}", "-o", "x"], "--output"),
        (["calibrate", "{data}", "--deployed", "{empty}", "--source", "assigned"], "--source assigned"),
        (
            ["calibrate", "{data}", "--deployed", "{empty}", "--share", "0.5"],
            "--share",
        ),
        (["evaluate", "{data}", "--deployed", "{empty}", "-o", "x", "--shift"], "--shift"),
        (["evaluate", "{data}", "--deployed", "{empty}", "-o", "x", "--pictures", "8"], "--pictures"),
        (["evaluate", "{data}", "--deployed", "{empty}", "-o", "x", "--base", "x"], "leave --base and --artifact"),
        (["predict", "bus.jpg", "--deployed", "{empty}", "--device", "cpu"], "--device"),
        (["predict", "bus.jpg", "--deployed", "{empty}", "--half"], "fixed precision"),
        (["track", "bus.jpg", "--deployed", "{empty}", "--device", "cpu"], "--device"),
        (["evaluate", "{data}", "-o", "{empty}"], "give --base, or --deployed"),
    ],
)
def test_mistakes_are_one_line_errors(
    arguments: list[str],
    line: str,
    work: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    shutil.copy(ASSETS / "bus.jpg", tmp_path)
    places = {"base": work / "base.pt", "empty": tmp_path / "empty", "data": work / "data.yaml"}
    code, _, error = run(monkeypatch, capsys, *(argument.format(**places) for argument in arguments))
    assert code == 2
    assert error.count("\n") == 1
    assert line in error


def test_a_visibility_threshold_reaches_a_deployed_folder(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ("--base", work / "base.pt", "--artifact", work / "heads.safetensors")
    out, data = tmp_path / "deployed", work / "data.yaml"
    assert run(monkeypatch, capsys, "export", *base, "-o", out)[0] == 0
    kept = []
    for number, options in enumerate([(), ("--visibility", 1)]):
        predict = ("predict", ASSETS / "bus.jpg", "--deployed", out, "-o", tmp_path / f"p{number}", "--conf", 0.4)
        assert run(monkeypatch, capsys, *predict, *options)[0] == 0
        entries = json.loads((tmp_path / f"p{number}" / "predictions.json").read_text())
        evaluate = ("evaluate", data, "--deployed", out, "-o", tmp_path / f"e{number}", "--bootstrap", 0)
        assert run(monkeypatch, capsys, *evaluate, *options)[0] == 0
        scores = json.loads((tmp_path / f"e{number}" / "metrics.json").read_text())
        kept.append((np.mean([entry["keep"] for entry in entries]), scores["pruned"]["kept_fraction"]))
    assert min(kept[0]) > 0
    assert max(kept[1]) == 0


def test_models_have_names_and_their_alarms_go_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_image(tmp_path / "runway.png", render_scene(sample_scene(900, "clear")))
    assert run(monkeypatch, capsys, "export", "--base", "runway", "-o", tmp_path / "deployed")[0] == 0
    results = []
    for name, source in {"named": ("--base", "runway"), "deployed": ("--deployed", tmp_path / "deployed")}.items():
        predict = ("predict", tmp_path / "runway.png", *source, "--alarm", 0.05, "-o", tmp_path / name)
        code, _, error = run(monkeypatch, capsys, *predict)
        assert code == 0, error
        results.append(json.loads((tmp_path / name / "predictions.json").read_text()))
    for own, theirs in zip(*results, strict=True):
        assert own["novelty"] == pytest.approx(theirs["novelty"], abs=0.01)
        assert own["in_distribution"] == theirs["in_distribution"]
    assert results[0]


def test_names_of_models_reach_every_command(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = work / "heads.safetensors"
    mine = NamedModel("mine", "", lambda: work / "base.pt", lambda: heads)
    monkeypatch.setattr(model_zoo, "named_models", lambda: (mine,))
    assert model_zoo.resolve("mine", None) == model_zoo.resolve(None, "mine") == (work / "base.pt", heads)
    assert model_zoo.resolve("mine", "other.safetensors") == (work / "base.pt", "other.safetensors")
    assert model_zoo.resolve("other.pt", None) == ("other.pt", None)
    evaluate = (
        "evaluate",
        work / "data.yaml",
        "--base",
        "mine",
        "-o",
        tmp_path,
        "--bootstrap",
        0,
        "--pictures",
        0,
    )
    assert run(monkeypatch, capsys, *evaluate)[0] == 0
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("a file goes before a name")
    assert model_zoo.resolve("mine", None) == ("mine", None)


def test_the_exported_card_is_the_artifacts(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ("--base", work / "base.pt", "--artifact", work / "heads.safetensors")
    assert run(monkeypatch, capsys, "export", *base, "-o", tmp_path, "--form", "dense", "--imgsz", 96)[0] == 0
    assert json.loads((tmp_path / "card.json").read_text()) == Artifact.load(work / "heads.safetensors").card.to_json()
    text = (tmp_path / "README.md").read_text()
    assert "17 keypoints, input size 96" in text
    assert "| `factors` | batch x anchors x 17 x 3 |" in text
    assert "visibility" in text
