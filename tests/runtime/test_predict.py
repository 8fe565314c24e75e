"""Single-file runtime: compared with the package and with the exports of the frameworks."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import cv2
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from benchmarks.export import libreyolo_onnx, ultralytics_onnx

from halopose.boxes import box_area
from halopose.cli import app
from halopose.data.dataset import image_id
from halopose.deploy.deployed_model import Deployed, Detecting
from halopose.deploy.graph import Form, TopkSettings
from halopose.deploy.onnx_file import ExportSettings, build, sealed, write_model
from halopose.hosts.ultralytics.ultralytics_host import UltralyticsHost
from halopose.prediction.uncertain_pose import UncertainPose
from halopose.runtime import predict
from halopose.types import Family
from halopose.uncertainty.heads import HeadSettings
from halopose.uncertainty.pruning import localization_confidence
from tests.helpers import commands
from tests.helpers.models import (
    ASSETS,
    KINDS,
    PHOTOGRAPHS,
    artifact_for,
    host_of,
    photograph,
    pose_model,
    wants_end2end,
    with_split_student,
)
from tests.helpers.values import present, read_picture

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*swigvarlink:DeprecationWarning"),
]
SIZE = 160
MANY = TopkSettings(candidates=400, windows=100)


@cache
def exported(kind: str, form: Form = "topk") -> bytes:
    artifact = artifact_for(host_of(kind), imgsz=SIZE)
    return sealed(build(host_of(kind), artifact, ExportSettings(form, MANY)))


@pytest.fixture
def model_file(tmp_path: Path) -> Callable[..., Path]:
    def write(kind: str, form: Form = "topk") -> Path:
        path = tmp_path / "model.onnx"
        path.write_bytes(exported(kind, form))
        return path

    return write


def same(found: Any, expected: Any, pixels: float = 8e-3) -> None:
    """Equality to 0.001 input pixels; the photographs are eight times as large as the input."""
    assert len(found) == len(expected)
    assert np.allclose(found.boxes, expected.boxes, atol=pixels)
    assert np.allclose(found.keypoints, expected.keypoints, atol=pixels)
    assert np.allclose(found.scores, expected.scores, atol=1e-5)
    assert np.allclose(found.visibility, expected.visibility, atol=1e-5)
    assert np.array_equal(found.class_ids, present(expected.class_ids))
    for name in ("covariance", "scale"):
        own, theirs = getattr(found, name), getattr(expected, name)
        assert (np.abs(own - theirs) <= 1e-3 * np.abs(theirs).max((2, 3), keepdims=True)).all(), name


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_equal_those_of_the_package(kind: str, model_file: Callable[..., Path]) -> None:
    """Two photographs at two sizes other than the size of the trace."""
    model = predict.Model(str(model_file(kind)))
    pose = UncertainPose(host_of(kind), artifact_for(host_of(kind), imgsz=SIZE))
    for name, imgsz in zip(PHOTOGRAPHS, (SIZE, 224), strict=True):
        found = model.detect(photograph(name), conf=0.4, imgsz=imgsz)
        for family in get_args(Family):
            [expected] = pose.predict(photograph(name), conf=0.4, imgsz=imgsz, family=family)
            assert len(expected) > 3
            poses = predict.describe(model.facts, found, family)
            same(poses, expected)
            assert (poses.keep != expected.keep).mean() < 0.01  # one at the threshold may fall to either side
            assert (poses.dof is None) == (family == "gaussian")
            assert expected.dof is None or np.allclose(present(poses.dof), expected.dof)
            for own, theirs in (
                (poses.region(0.9), expected.region(0.9)),
                (poses.region(0.955, whole=True), expected.whole_region(0.955)),
                (poses.joint_covariance(), expected.joint_covariance),
            ):
                largest = np.abs(theirs).max((-2, -1), keepdims=True)
                assert (np.abs(own - theirs) <= 2e-3 * largest).all()


@pytest.mark.parametrize("kind", ["11", "nas"])
def test_context_features_and_split_student_t_equal_those_of_the_package(kind: str, tmp_path: Path) -> None:
    """Heads with context features, and separate distributions for kept and for pruned keypoints."""
    artifact = artifact_for(host_of(kind), HeadSettings(overlaps=True, features=True), imgsz=SIZE)
    [first] = UncertainPose(host_of(kind), artifact).predict(photograph(PHOTOGRAPHS[0]), conf=0.4)
    area = box_area(first.boxes) * artifact.layout.area_factor
    confidence = localization_confidence(first.covariance, area, artifact.layout.kappa)
    artifact = with_split_student(artifact, float(np.median(confidence)))
    path = tmp_path / "model.onnx"
    write_model(build(host_of(kind), artifact, ExportSettings("topk", MANY)), path)
    model, pose = predict.Model(str(path)), UncertainPose(host_of(kind), artifact)
    for name, imgsz in zip(PHOTOGRAPHS, (SIZE, 224), strict=True):
        found = model.detect(photograph(name), conf=0.4, imgsz=imgsz)
        [expected] = pose.predict(photograph(name), conf=0.4, imgsz=imgsz, family="student-t")
        poses = predict.describe(model.facts, found, "student-t")
        clear = poses.keep == expected.keep  # one at the threshold may fall to either side
        assert clear.mean() > 0.99
        assert expected.keep is not None
        assert 0 < expected.keep.mean() < 1
        assert np.allclose(present(poses.dof)[clear], present(expected.dof)[clear])
        for field in ("covariance", "scale"):
            own, theirs = getattr(poses, field), getattr(expected, field)
            near = np.abs(own - theirs) <= 2e-3 * np.abs(theirs).max((2, 3), keepdims=True)
            assert near[clear].all(), field


@pytest.mark.parametrize("kind", ["11", "12", "26-one-to-one", "nas"])
@pytest.mark.filterwarnings("ignore")  # theirs
def test_outputs_equal_those_of_the_frameworks_own_export(
    kind: str, model_file: Callable[..., Path], tmp_path: Path
) -> None:
    model = pose_model(kind)
    peer = libreyolo_onnx(model, tmp_path) if kind == "nas" else ultralytics_onnx(model, tmp_path, wants_end2end(kind))
    session = onnxruntime.InferenceSession(str(peer), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    own = predict.Model(str(model_file(kind)))
    pixels, _ = predict.prepare(photograph("bus.jpg"), own.facts, 640)
    found = own.run(pixels[None])
    for name, value in zip(names, session.run(names, {"images": pixels[None]}), strict=True):
        assert np.allclose(found[name], value, atol=1e-4), name


@pytest.mark.parametrize("kind", ["11", "nas"])
def test_the_dense_form_gives_the_same_result(kind: str, model_file: Callable[..., Path]) -> None:
    sparse = Deployed(model_file(kind))
    dense = Deployed(model_file(kind, "dense"))
    for name in PHOTOGRAPHS:
        settings = Detecting(conf=0.4)
        same(
            dense.predict(photograph(name), settings, "gaussian"),
            sparse.predict(photograph(name), settings, "gaussian"),
        )


@pytest.mark.parametrize("form", ["topk", "dense"])
@pytest.mark.parametrize("kind", ["v8", "nas"])
def test_images_of_a_batch_do_not_see_each_other(kind: str, form: str, model_file: Callable[..., Path]) -> None:
    model = predict.Model(str(model_file(kind, form)))
    batch = np.stack(
        [predict.prepare(cv2.resize(photograph(name), (96, 96)), model.facts, 96)[0] for name in PHOTOGRAPHS]
    )
    together = model.run(batch)
    for number in range(2):
        alone = model.run(batch[number : number + 1])
        for name, value in alone.items():
            assert np.allclose(together[name][number], value[0], atol=1e-3, rtol=1e-3), name


@pytest.mark.parametrize(
    ("kind", "form"), [("11", "topk"), ("11", "dense"), ("26-one-to-one", "topk"), ("nas", "topk")]
)
def test_another_runtime_gives_the_same_result(kind: str, form: str, model_file: Callable[..., Path]) -> None:
    openvino = pytest.importorskip("openvino")
    path = model_file(kind, form)
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    names = [value.name for value in onnx.load(path).graph.output]
    other = Deployed(path, lambda batch: dict(zip(names, compiled(batch).to_tuple(), strict=True)))
    for name in PHOTOGRAPHS:
        poses = other.predict(photograph(name), Detecting(conf=0.4), "gaussian")
        same(poses, Deployed(path).predict(photograph(name), Detecting(conf=0.4), "gaussian"))


def test_keypoints_without_visibility_and_several_classes() -> None:
    host = UltralyticsHost(pose_model("11", (5, 2), classes=3))
    artifact = artifact_for(host, imgsz=SIZE)
    model = build(host, artifact, ExportSettings(topk=MANY))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    facts = predict.Facts.read({entry.key: entry.value for entry in model.metadata_props}, "")
    runtime = predict.Model(
        "", lambda batch: dict(zip(names, session.run(names, {"images": batch}), strict=True)), facts
    )
    found = runtime.predict(photograph("bus.jpg"), conf=0.4)
    [expected] = UncertainPose(host, artifact).predict(photograph("bus.jpg"), conf=0.4)
    assert found.visibility is None
    assert len(found) == len(expected) > 3
    assert len(np.unique(found.class_ids)) > 1
    assert np.array_equal(found.class_ids, present(expected.class_ids))
    assert np.allclose(found.covariance, expected.covariance, rtol=1e-3, atol=1e-3 * expected.covariance.max())


def test_an_offset_of_the_mean_is_exported(tmp_path: Path) -> None:
    host = host_of("11")
    artifact = artifact_for(host, imgsz=SIZE)
    offset = torch.linspace(-0.05, 0.05, 2 * host.keypoint_count, dtype=torch.float64).reshape(-1, 2)
    moved = replace(artifact, calibrations=replace(artifact.calibrations, offset=offset))
    write_model(build(host, moved, ExportSettings(topk=MANY)), tmp_path / "model.onnx")
    [expected] = UncertainPose(host, moved).predict(photograph("bus.jpg"), conf=0.4)
    found = Deployed(tmp_path / "model.onnx").predict(photograph("bus.jpg"), Detecting(conf=0.4), "gaussian")
    assert np.allclose(present(found.offset), present(expected.offset), atol=1e-2)
    assert np.abs(present(found.offset)).max() > 1
    assert np.allclose(found.keypoints, expected.keypoints, atol=1e-2)  # the base's own stay


def test_detections_beyond_the_windows_are_left_out_with_a_warning(tmp_path: Path) -> None:
    artifact = artifact_for(host_of("11"), imgsz=SIZE)
    write_model(build(host_of("11"), artifact, ExportSettings(topk=TopkSettings(64, 2))), tmp_path / "model.onnx")
    model = predict.Model(str(tmp_path / "model.onnx"))
    with pytest.warns(UserWarning, match="export with more --windows"):
        poses = model.predict(photograph("bus.jpg"), conf=0.4)
    [whole] = UncertainPose(host_of("11"), artifact).predict(photograph("bus.jpg"), conf=0.4)
    assert 2 <= len(poses) <= 6 < len(whole)
    for score, covariance in zip(poses.scores, poses.covariance, strict=True):
        [place] = np.flatnonzero(np.abs(whole.scores - score) < 1e-6)
        assert np.allclose(whole.covariance[place], covariance, rtol=1e-3)


@pytest.mark.parametrize("seed", range(20))
def test_suppression_is_that_of_torchvision(seed: int) -> None:
    from halopose.hosts.torchvision_shim import ensure_torchvision

    ensure_torchvision()
    import torchvision

    generator = np.random.default_rng(seed)
    corner = generator.uniform(0, 40, (80, 2))
    boxes = np.concatenate([corner, corner + generator.uniform(5, 40, (80, 2))], axis=1).astype(np.float32)
    scores, classes = generator.uniform(size=80).astype(np.float32), generator.integers(0, 2, 80)
    expected = torchvision.ops.batched_nms(*map(torch.from_numpy, (boxes, scores, classes)), 0.4)
    assert predict.suppress(boxes, scores, classes, 0.4).tolist() == expected.tolist()


@pytest.mark.parametrize("size", [(64, 48), (320, 200), (1000, 700), (37, 500)])
def test_resizing_without_opencv_and_pil(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    image = photograph("bus.jpg")[:400, :300]
    expected = [predict.resize(image, size, antialias) for antialias in (True, False)]
    monkeypatch.setattr(predict, "cv2", None)
    monkeypatch.setattr(predict, "Image", None)
    for antialias, wanted in zip((True, False), expected, strict=True):
        limit = 1 if antialias else 0  # OpenCV's own rounding, which examples/cpp repeats
        assert np.abs(predict.resize(image, size, antialias).astype(int) - wanted).max() <= limit
    assert np.abs(expected[0].astype(int) - expected[1]).max() > 1 or size[0] > 900  # enlarged they are alike


ALONE = """
import sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cv2", "PIL", "torch", "halopose", "scipy", "onnx"):
            raise ImportError(name)
sys.meta_path.insert(0, Nothing())
sys.argv = sys.argv[1:]
import runpy
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_alone(*arguments: Any) -> subprocess.CompletedProcess[str]:
    """Run predict.py in a process with numpy and onnxruntime only."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", ALONE, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_the_file_runs_with_numpy_and_onnxruntime_alone(model_file: Callable[..., Path], tmp_path: Path) -> None:
    runtime = tmp_path / "predict.py"
    runtime.write_bytes(Path(predict.__file__).read_bytes())
    path = model_file("11")
    small = cv2.resize(photograph("bus.jpg"), (SIZE, SIZE))  # no resizing, so that pixels are equal
    np.save(tmp_path / "bus.npy", small)
    done = run_alone(runtime, tmp_path / "bus.npy", "--json", "--conf", 0.4, "--family", "student-t")
    assert done.returncode == 0, done.stderr
    expected = Deployed(path).predict(small, Detecting(conf=0.4), "student-t").to_json()
    found = json.loads(done.stdout)
    assert len(found) == len(expected) > 3
    for own, theirs in zip(found, expected, strict=True):
        assert (own.pop("image_id"), own.pop("file_name")) == (image_id("bus.npy"), "bus.npy")
        assert list(own) == list(theirs)[1:]
        del theirs["image_id"]
        for key, value in theirs.items():
            assert np.allclose(own[key], value, rtol=1e-6), key
    refused = run_alone(runtime, ASSETS / "bus.jpg")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "opencv-python-headless" in refused.stderr


def test_the_file_is_written_for_older_versions_of_python() -> None:
    """Checks the syntax only, not the functions that are called."""
    ast.parse(Path(predict.__file__).read_text(), feature_version=(3, 9))


def test_the_command_line_draws(
    model_file: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [str(ASSETS / "bus.jpg"), "--model", str(model_file("11")), "--conf", "0.4", "--imgsz", "160"]
    assert predict.main(arguments) == 0
    assert "detections" in capsys.readouterr().out
    drawn = read_picture(tmp_path / "poses" / "bus.jpg")
    assert drawn.shape == photograph("bus.jpg").shape
    assert (np.abs(drawn.astype(int) - photograph("bus.jpg")) > 40).mean() > 0.01


def test_json_equals_that_of_the_package_for_images_of_one_name(
    model_file: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names, ids and order; other tests compare detections."""
    (tmp_path / "deployed").mkdir()
    model_file("11").rename(tmp_path / "deployed" / "model.onnx")
    small = cv2.resize(photograph("bus.jpg"), (SIZE, SIZE))
    for names in (("a/1.png", "b/2.png"), ("a/1.png", "b/1.png"), ("a/1.png", "a/1.bmp")):
        paths = [tmp_path / name for name in names]
        for path in paths:
            path.parent.mkdir(exist_ok=True)
            cv2.imwrite(str(path), small)
        out = tmp_path / "-".join(names).replace("/", "")
        commands.run("predict", *paths, "--deployed", tmp_path / "deployed", "-o", out, "--conf", 0.4)
        arguments = [*map(str, paths), "--model", str(tmp_path / "deployed" / "model.onnx"), "--conf", "0.4"]
        capsys.readouterr()
        assert predict.main([*arguments, "--json"]) == 0
        printed, written = json.loads(capsys.readouterr().out), json.loads((out / "predictions.json").read_text())
        assert printed == written
        assert predict.main([*arguments, "-o", str(out / "own")]) == 0
        assert len(list((out / "own").rglob("*.jpg"))) == 2


@pytest.mark.filterwarnings("always:.*are beyond the cells")
def test_a_warning_is_one_line_on_both_command_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = artifact_for(host_of("11"), imgsz=SIZE)
    write_model(build(host_of("11"), artifact, ExportSettings(topk=TopkSettings(64, 2))), tmp_path / "model.onnx")
    photo = str(ASSETS / "bus.jpg")
    assert predict.main([photo, "--model", str(tmp_path / "model.onnx"), "--json", "--conf", "0.4"]) == 0
    own = capsys.readouterr().err
    words = [
        "halopose",
        "predict",
        photo,
        "--deployed",
        str(tmp_path),
        "-o",
        str(tmp_path / "out"),
        "--conf",
        "0.4",
    ]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        app.main()
    theirs = capsys.readouterr()
    lines = [*own.splitlines(), *theirs.out.splitlines(), *theirs.err.splitlines()]
    stdout_text = [line for line in lines if "beyond the cells" in line]
    assert [line.split()[0] for line in stdout_text] == ["predict.py:", "warning:"]
    assert not any("MissingCovarianceWarning" in line or "predict.py:" in line for line in lines[1:])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["missing.jpg"], "cannot read image missing.jpg"),
        (["{photo}", "--conf", "2"], "conf"),
        (["{photo}", "--probability", "1"], "--probability"),
        (["{photo}", "--imgsz", "32"], "too small"),
        (["{photo}", "--imgsz", "0"], "imgsz"),
        (["{photo}", "--imgsz", "60000"], "16384"),
        (["{photo}", "-o", "file"], "cannot write into file"),
        (["several.npy"], "cannot read image several.npy"),
        (["{photo}", "--model", "nowhere.onnx"], "no model at nowhere.onnx"),
        (["empty"], "no images in empty"),
    ],
)
def test_mistakes_are_one_line_errors(
    arguments: list[str],
    line: str,
    model_file: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    np.savez(tmp_path / "several.npz", a=np.zeros(3))
    (tmp_path / "several.npz").rename("several.npy")
    path = model_file("26-one-to-one")
    given = [argument.format(photo=ASSETS / "bus.jpg") for argument in arguments]
    code = predict.main(given if "--model" in given else [*given, "--model", str(path)])
    error = capsys.readouterr().err
    assert code == 2
    assert error.count("\n") == 1
    assert line in error


def run_runtime(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    code = predict.main([*map(str, arguments), "--conf", "0.4"])
    stdout_text = capsys.readouterr()
    return code, stdout_text.out, stdout_text.err


@pytest.mark.parametrize("linked", ["folder", "file"])
def test_a_picture_never_overwrites_an_image(
    linked: str, model_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the output folder, or the picture in it, is a symbolic link; nothing is written then."""
    source, out = tmp_path / "photos" / "b.jpg", tmp_path / "out"
    source.parent.mkdir()
    cv2.imwrite(str(source), cv2.resize(photograph("bus.jpg"), (SIZE, SIZE)))
    cv2.imwrite(str(source.with_name("a.png")), cv2.resize(photograph("bus.jpg"), (SIZE, SIZE)))
    before = source.read_bytes()
    if linked == "folder":
        out.symlink_to(source.parent)
    else:
        out.mkdir()
        (out / "b.jpg").symlink_to(source)
    code, _, error = run_runtime(capsys, source.parent, "--model", model_file("11"), "-o", out)
    assert (code, error.count("\n")) == (2, 1)
    assert "overwrite" in error
    assert source.read_bytes() == before
    assert not (out / "a.jpg").exists()


def test_a_link_in_the_output_folder_is_replaced_not_followed(
    model_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, out = tmp_path / "other.txt", tmp_path / "out"
    other.write_text("kept")
    out.mkdir()
    (out / "bus.jpg").symlink_to(other)
    assert run_runtime(capsys, ASSETS / "bus.jpg", "--model", model_file("11"), "-o", out)[0] == 0
    assert other.read_text() == "kept"
    assert not (out / "bus.jpg").is_symlink()
    assert [path.name for path in out.iterdir()] == ["bus.jpg"]


def test_one_damaged_image_does_not_hide_the_others(
    model_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, path = tmp_path / "photos", model_file("11")
    folder.mkdir()
    cv2.imwrite(str(folder / "good.png"), cv2.resize(photograph("bus.jpg"), (SIZE, SIZE)))
    (folder / "bad.jpg").write_bytes(b"damaged")
    np.save(folder / "floats.npy", np.zeros((8, 8, 3)))
    code, printed, error = run_runtime(capsys, folder, "--model", path, "--json")
    assert code == 1
    assert {entry["file_name"] for entry in json.loads(printed)} == {"good.png"}
    assert [name in line for name, line in zip(("bad.jpg", "floats.npy"), error.splitlines(), strict=True)] == [
        True
    ] * 2
    code, printed, _ = run_runtime(capsys, folder, "--model", path, "-o", tmp_path / "out")
    assert (code, printed.count("\n")) == (1, 1)
    assert [picture.name for picture in (tmp_path / "out").iterdir()] == ["good.jpg"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_pipes_and_images_beyond_the_budget_are_passed_over(model_file: Callable[..., Path], tmp_path: Path) -> None:
    """The script sets OpenCV's limit, so that it is checked from the header, before anything is decoded."""
    runtime, folder = tmp_path / "predict.py", tmp_path / "photos"
    runtime.write_bytes(Path(predict.__file__).read_bytes())
    folder.mkdir()
    os.mkfifo(folder / "a.jpg")
    for name, side in (("good.png", SIZE), ("large.png", 2 * SIZE)):
        cv2.imwrite(str(folder / name), np.zeros((side, side, 3), np.uint8))
    words = [sys.executable, runtime, folder, "--model", model_file("11"), "--json"]
    env = {**os.environ, "HALOPOSE_MAX_PIXELS": str(SIZE * SIZE)}
    done = subprocess.run(list(map(str, words)), env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert {entry["file_name"] for entry in json.loads(done.stdout)} == {"good.png"}
    lines = [line for line in done.stderr.splitlines() if "cannot read" in line]
    assert [name in line for name, line in zip(("a.jpg", "large.png"), lines, strict=True)] == [True, True]


def test_without_opencv_nothing_is_drawn(
    model_file: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    np.save(tmp_path / "bus.npy", cv2.resize(photograph("bus.jpg"), (SIZE, SIZE)))
    path = model_file("11")
    monkeypatch.setattr(predict, "cv2", None)
    code, printed, error = run_runtime(capsys, tmp_path / "bus.npy", "--model", path, "-o", tmp_path / "out")
    assert (code, printed.count("\n"), error.count("\n")) == (0, 1, 1)
    assert "OpenCV" in error
    assert run_runtime(capsys, tmp_path / "bus.npy", "--model", path, "--json")[2] == ""


def test_control_characters_of_a_file_name_do_not_reach_the_terminal(
    model_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = run_runtime(capsys, tmp_path / "a\x1b[2Jb.jpg", "--model", model_file("11"))
    assert code == 2
    assert "\x1b" not in error


def test_objects_of_every_scale_have_their_own_joint_distribution(tmp_path: Path) -> None:
    host, artifact = host_of("11"), artifact_for(host_of("11"), imgsz=SIZE)
    [first] = UncertainPose(host, artifact).predict(photograph("bus.jpg"), conf=0.4)
    areas = 0.53 * np.unique(box_area(first.boxes))
    pooled = present(artifact.calibrations.correlation)
    scales = np.stack([share * pooled.matrix + (1 - share) * np.eye(34) for share in (0.0, 0.5, 0.9)])
    edges = tuple(float(areas[place : place + 2].mean()) for place in (len(areas) // 3, 2 * len(areas) // 3))
    by_scale = replace(pooled, scales=scales, edges=edges, area_factor=0.53)
    artifact = replace(artifact, calibrations=replace(artifact.calibrations, correlation=by_scale))
    write_model(build(host, artifact, ExportSettings(topk=MANY)), tmp_path / "model.onnx")
    [expected] = UncertainPose(host, artifact).predict(photograph("bus.jpg"), conf=0.4)
    alone = predict.Model(str(tmp_path / "model.onnx")).predict(photograph("bus.jpg"), conf=0.4)
    found = Deployed(tmp_path / "model.onnx").predict(photograph("bus.jpg"), Detecting(conf=0.4), "student-t")
    largest = np.abs(expected.joint_covariance).max((1, 2), keepdims=True)
    assert len(np.unique(present(expected.correlation)[:, 0, 2])) == 3
    for own in (alone.joint_covariance(), found.joint_covariance):
        assert (np.abs(own - expected.joint_covariance) <= 2e-3 * largest).all()
    facts = Deployed(tmp_path / "model.onnx").facts
    edge = predict._correlation_of_objects(facts.correlation, np.array(edges) / 0.53)
    assert np.array_equal(present(edge), by_scale.of_objects(np.array(edges) / 0.53))


@pytest.mark.parametrize("kind", ["11", "26-one-to-one", "nas"])
def test_nothing_found_is_no_mistake(kind: str, model_file: Callable[..., Path]) -> None:
    model = predict.Model(str(model_file(kind)))
    for family in get_args(Family):
        poses = model.predict(photograph("bus.jpg"), conf=1.0, family=family)
        assert len(poses) == 0
        assert poses.covariance.shape == (0, 17, 2, 2)
        assert poses.to_json() == []
    assert (
        Deployed(model_file(kind)).predict(photograph("bus.jpg"), Detecting(conf=1.0), "gaussian").keypoint_count == 17
    )
