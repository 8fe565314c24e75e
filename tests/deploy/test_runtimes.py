"""The choice of a runtime: shipped heads in PyTorch, ONNX Runtime and OpenVINO, and the cache of exports."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halopose.data.films import FilmWriter
from halopose.deploy import runtimes
from halopose.errors import HaloposeError
from halopose.hosts import model_zoo
from halopose.landing.world.dataset_writer import write_dataset
from halopose.prediction.deployed_pose import DeployedPose
from halopose.prediction.uncertain_pose import UncertainPose
from tests.helpers.commands import run
from tests.helpers.models import artifact_for, host_of, photograph, with_split_student
from tests.helpers.onnx_files import framework_onnx
from tests.helpers.values import present, read_picture

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # of tracing, and of random weights that detect too much
]


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOPOSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("HALOPOSE_RUNTIME", raising=False)


def entries(folder: Path) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = json.loads((folder / "predictions.json").read_text())
    return content


def test_shipped_heads_predict_track_and_evaluate_in_every_runtime(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    model = present(model_zoo.find_model("runway"))
    files = "--base", model.base(), "--artifact", model.artifact()
    data = write_dataset(tmp_path / "data", {"test": 2})
    images = sorted((tmp_path / "data" / "images" / "test").iterdir())
    film = tmp_path / "film.mp4"
    with FilmWriter(film, 10.0) as writer:
        for _ in range(2):
            writer.write(read_picture(images[0]))
    found, tracks, metrics = {}, {}, {}
    for name in ("torch", "onnx", "openvino"):
        options = "--imgsz", 320, "--conf", 0.3, "--runtime", name
        run("predict", *images, *files, *options, "-o", tmp_path / name, "--no-pictures")
        found[name] = entries(tmp_path / name)
        if name == "openvino":  # the same code from here on
            continue
        run("track", film, *files, *options, "--confirm", 1, "--no-picture", "-o", tmp_path / f"t-{name}")
        tracks[name] = json.loads((tmp_path / f"t-{name}" / "tracks.json").read_text())
        run("evaluate", data, *files, "--split", "test", "--imgsz", 320, "--bootstrap", 0, "--overlap", "allow",
            "--runtime", name, "-o", tmp_path / f"e-{name}")  # fmt: skip
        metrics[name] = json.loads((tmp_path / f"e-{name}" / "metrics.json").read_text())
    assert len(list((tmp_path / "cache" / "exported").iterdir())) == 2  # for predicting and for evaluating
    for name in ("onnx", "openvino"):
        assert len(found[name]) == len(found["torch"]) > 0
        for ours, theirs in zip(found[name], found["torch"], strict=True):
            assert np.allclose(ours["keypoints"], theirs["keypoints"], atol=1e-2)
            assert np.allclose(ours["covariance"], theirs["covariance"], atol=1e-3 * np.max(theirs["covariance"]))
    assert len(tracks["onnx"]) == len(tracks["torch"]) > 0
    assert metrics["onnx"]["matched_instances"] == metrics["torch"]["matched_instances"] > 0


def test_the_cache_is_keyed_by_model_heads_and_settings_and_repaired(tmp_path: Path) -> None:
    host = host_of("11")
    heads = artifact_for(host, imgsz=64)
    loaded = [UncertainPose.load(host, heads, runtime="onnx") for _ in range(2)]
    assert all(isinstance(model, DeployedPose) for model in loaded)
    folder = UncertainPose.exported(host, heads)
    model = folder / "model.onnx"
    before = model.stat().st_mtime_ns
    assert UncertainPose.exported(host, heads) == folder
    assert model.stat().st_mtime_ns == before
    assert UncertainPose.exported(host, with_split_student(heads)) != folder
    model.write_bytes(model.read_bytes()[:-100])
    repaired = UncertainPose.load(host, heads, runtime="auto")
    assert isinstance(repaired, DeployedPose)
    wanted = UncertainPose.load(host, heads).predict(photograph("bus.jpg"), conf=0.6)[0]
    assert np.allclose(repaired.predict(photograph("bus.jpg"), conf=0.6)[0].boxes, wanted.boxes, atol=1e-2)


def test_an_onnx_base_is_keyed_by_its_content(tmp_path: Path) -> None:
    path = framework_onnx("11", tmp_path, 64)
    heads = artifact_for(host_of("11"), imgsz=64)
    folder = UncertainPose.exported(path, heads)
    assert UncertainPose.exported(path, heads) == folder
    (tmp_path / f"{path.name}.json").write_text(json.dumps({"assigner": "matched"}))
    assert UncertainPose.exported(path, heads) != folder


def test_the_default_is_stated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runtimes.default_runtime() == runtimes.resolve_runtime(None) == "torch"
    settings = runtimes.user_settings()
    settings.parent.mkdir(parents=True)
    settings.write_text("runtime: onnx\n")
    assert runtimes.resolve_runtime(None) == runtimes.resolve_runtime("auto") == "onnx"
    assert runtimes.resolve_runtime("torch") == "torch"
    assert runtimes.resolve_runtime(None, ("widen",)) == runtimes.resolve_runtime("auto", ("widen",)) == "torch"
    model = UncertainPose.load(host_of("11"), artifact_for(host_of("11"), imgsz=64))
    assert isinstance(model, DeployedPose)
    monkeypatch.setenv("HALOPOSE_RUNTIME", "torch")  # before the file
    assert runtimes.resolve_runtime(None) == "torch"
    assert runtimes.resolve_exported(None) == "onnx"


def test_mistakes_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HaloposeError, match="widen"):
        runtimes.resolve_runtime("onnx", ("widen",))
    with pytest.raises(HaloposeError, match="tensorrt"):
        UncertainPose.load(host_of("11"), runtime="tensorrt")  # type: ignore[arg-type]
    settings = runtimes.user_settings()
    settings.parent.mkdir(parents=True)
    settings.write_text("runtimes: onnx\n")
    with pytest.raises(HaloposeError, match="runtimes"):
        runtimes.default_runtime()
    monkeypatch.setenv("HALOPOSE_RUNTIME", "fast")
    with pytest.raises(HaloposeError, match="HALOPOSE_RUNTIME"):
        runtimes.default_runtime()
    monkeypatch.setattr(runtimes, "find_spec", lambda name: None)
    with pytest.raises(HaloposeError, match="pip install"):
        runtimes.resolve_runtime("openvino")
    assert runtimes.resolve_runtime("auto") == "torch"
    folder = UncertainPose.exported(host_of("11"), artifact_for(host_of("11"), imgsz=64))
    with pytest.raises(HaloposeError, match="exported folder"):
        UncertainPose.load(folder, runtime="torch")
    monkeypatch.setenv("HALOPOSE_CACHE", str(settings))
    with pytest.raises(HaloposeError, match="cannot write"):
        UncertainPose.exported(host_of("11"), artifact_for(host_of("11"), imgsz=64))
