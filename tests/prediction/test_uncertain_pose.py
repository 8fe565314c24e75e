"""UncertainPose: detections of the base model with distributions in original pixels, and a whole fit."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import cv2
import numpy as np
import pytest
import torch
from ultralytics import YOLO

from halopose.calibration.calibrate import DISTRIBUTIONS, apply_calibrations
from halopose.calibration.calibrators import Calibrations
from halopose.data.coco import parse_ground_truth, parse_predictions
from halopose.data.dataset_loading import load_dataset
from halopose.data.films import FilmWriter
from halopose.errors import HaloposeError
from halopose.evaluation.evaluate import evaluate
from halopose.evaluation.scores import Scores
from halopose.fitting.artifact import Artifact
from halopose.fitting.feature_cache import MatchStore
from halopose.fitting.pipeline import evaluate_artifact, fit, predictions_of
from halopose.fitting.settings import FitSettings, TrainSettings
from halopose.hosts.loading import load_host
from halopose.hosts.ultralytics.results import to_ultralytics
from halopose.hosts.ultralytics.ultralytics_host import UltralyticsHost
from halopose.matching.matched_poses import match_poses
from halopose.poses import GroundTruth, PoseDistributions
from halopose.prediction.uncertain_pose import UncertainPose
from halopose.protocol import Protocol
from halopose.types import Array, Family
from tests.helpers.models import (
    KINDS,
    PHOTOGRAPHS,
    artifact_for,
    framework_on,
    host_of,
    photograph,
    pose_model,
    scenes,
    with_split_student,
    write_scenes,
)
from tests.helpers.values import present

pytestmark = pytest.mark.usefixtures("one_thread")
IMGSZ = 160


def uncertain(kind: str, **options: Any) -> UncertainPose:
    return UncertainPose(host_of(kind), artifact_for(host_of(kind), imgsz=IMGSZ), **options)


def same_as_framework(poses: PoseDistributions, expected: Any) -> None:
    assert len(poses) > 5
    assert np.array_equal(poses.boxes, expected.boxes.xyxy.numpy())
    assert np.array_equal(poses.scores, expected.boxes.conf.numpy())
    assert np.array_equal(present(poses.class_ids), expected.boxes.cls.numpy() + 1)
    assert np.array_equal(poses.keypoints, expected.keypoints.data[..., :2].numpy())
    assert np.array_equal(present(poses.visibility), expected.keypoints.data[..., 2].numpy())


# Detections and distributions ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PHOTOGRAPHS)
@pytest.mark.parametrize("kind", KINDS)
def test_detections_are_the_frameworks_bit_by_bit(kind: str, name: str) -> None:
    [poses] = uncertain(kind).predict(photograph(name))
    same_as_framework(poses, framework_on(kind, name, IMGSZ))


def test_differently_shaped_images_in_a_batch_too() -> None:
    """As the framework has each of them alone: neighbours change nothing."""
    images = [photograph(name) for name in PHOTOGRAPHS]
    for poses, name in zip(uncertain("11").predict(images, batch=2), PHOTOGRAPHS, strict=True):
        same_as_framework(poses, framework_on("11", name, IMGSZ))


@pytest.mark.parametrize("kind", ["11", "26-one-to-one"])
@pytest.mark.parametrize("family", ["gaussian", "student-t"])
def test_covariance_is_the_dense_heads_in_original_pixels(kind: str, family: Family) -> None:
    model, image = uncertain(kind), photograph("zidane.jpg")
    [poses] = model.predict(image, family=family)
    host, artifact = model.host, model.artifact
    batch, [box] = host.preprocess([image], IMGSZ, True)
    output = host.forward(batch)
    [selection] = host.select(output, conf=0.25, iou=0.7)
    with torch.no_grad():
        factors = artifact.heads.dense(output.features)[0, selection.cell].double()
    undo = np.diag([1 / box.gain[0], 1 / box.gain[1]])
    dispersion = undo @ (factors @ factors.mT).numpy() @ undo
    fitted = artifact.calibrations
    calibration = fitted.gaussian if family == "gaussian" else fitted.student
    scale = dispersion * calibration.tau_.numpy()[:, None, None] ** 2
    moment = dispersion * fitted.student.moment_tau_.numpy()[:, None, None] ** 2
    size = np.abs(scale).max((-1, -2), keepdims=True)
    assert (np.abs(poses.scale - scale) / size).max() < 1e-4
    covariance = scale if family == "gaussian" else moment
    size = np.abs(covariance).max((-1, -2), keepdims=True)
    assert (np.abs(poses.covariance - covariance) / size).max() < 1e-4
    assert (poses.dof is None) is (family == "gaussian")
    if family == "student-t":
        assert np.array_equal(present(poses.dof), np.tile(fitted.student.nu_.numpy(), (len(poses), 1)))


def test_twice_the_pixels_are_four_times_the_covariance() -> None:
    model, image = uncertain("11"), scenes(1, side=IMGSZ)[0]
    large = cv2.resize(image, (2 * IMGSZ, 2 * IMGSZ), interpolation=cv2.INTER_NEAREST)
    [one], [two] = model.predict(image), model.predict(large)  # the input is the same after the letterbox
    assert len(one) > 3
    assert np.allclose(two.covariance, 4 * one.covariance, rtol=1e-6)
    assert np.allclose(two.keypoints, 2 * one.keypoints, atol=1e-3)
    assert np.array_equal(two.scores, one.scores)


def test_families_switch_without_reloading() -> None:
    model, image = uncertain("11"), photograph("bus.jpg")
    [gaussian], [student] = model.predict(image, family="gaussian"), model.predict(image)
    [default] = UncertainPose(model.host, model.artifact, "student-t").predict(image)
    assert gaussian.dof is None
    assert np.array_equal(default.covariance, student.covariance)
    assert np.array_equal(present(default.dof), present(student.dof))
    assert np.array_equal(gaussian.keypoints, student.keypoints)
    assert np.array_equal(present(gaussian.keep), present(student.keep))  # pruning does not depend on the family
    assert not np.allclose(gaussian.covariance, student.covariance)
    with pytest.raises(HaloposeError, match="unknown family"):
        model.predict(image, family=cast(Any, "cauchy"))


def test_keep_follows_the_rule() -> None:
    """eq. 22: keep what is visible, and whose -trace / (s^2 kappa^2) of the Gaussian covariance is high enough."""
    model, image = uncertain("11"), photograph("bus.jpg")
    [poses] = model.predict(image, family="gaussian")
    area = 0.53 * np.maximum((poses.boxes[:, 2:] - poses.boxes[:, :2]).prod(1), 1)
    kappa = model.artifact.layout.kappa
    confidence = -np.trace(poses.covariance, axis1=-2, axis2=-1) / (area[:, None] * kappa**2)
    middle = float(np.median(confidence))
    for threshold in (middle, float("-inf"), 1.0):
        for visible in (None, 0.5, 1.1):
            calibrations = replace(model.artifact.calibrations, threshold=threshold, visibility_threshold=visible)
            artifact = replace(model.artifact, calibrations=calibrations)
            [found] = UncertainPose(model.host, artifact).predict(image)
            seen = True if visible is None else present(poses.visibility) >= visible
            assert np.array_equal(present(found.keep), (confidence >= threshold) & seen)
        assert np.array_equal(found.keypoints, poses.keypoints)


def test_no_detections_have_the_right_shapes() -> None:
    model = uncertain("11")
    for kind in ("11", "26-one-to-one"):
        model = uncertain(kind)
        for poses in model.predict([photograph("bus.jpg")] * 2, conf=1.0, family="student-t", batch=2):
            assert (poses.boxes.shape, poses.scores.shape) == ((0, 4), (0,))
            assert (poses.keypoints.shape, poses.covariance.shape) == ((0, 17, 2), (0, 17, 2, 2))
            assert (present(poses.keep).shape, present(poses.visibility).shape) == ((0, 17), (0, 17))
            assert poses.to_json() == []
            assert poses.plot(photograph("bus.jpg")).shape == photograph("bus.jpg").shape
            assert len(to_ultralytics(poses, photograph("bus.jpg"))) == 0


def test_a_batch_is_its_images() -> None:
    model, images = uncertain("11"), scenes(5, side=96)
    single = model.predict(images)
    for size in (2, 5, 50):
        for one, other in zip(single, model.predict(images, batch=size), strict=True):
            assert len(one) == len(other)
            assert np.allclose(one.keypoints, other.keypoints, atol=1e-2)
            assert same_covariances(one, other)


def test_a_batch_of_many_shapes_is_its_images_in_their_order() -> None:
    model = uncertain("11")
    tall, wide = (cv2.resize(photograph("bus.jpg"), size) for size in ((96, 160), (160, 96)))
    images = [tall, wide, tall[:, ::-1].copy(), wide[::-1].copy(), tall]
    expected, read = model.predict(images), []

    def source() -> Iterator[Array]:
        for number, image in enumerate(images):
            read.append(number)
            yield image

    stream = model.stream(source(), batch=3)
    found = [next(stream)]
    assert read == [0, 1, 2]  # no further ahead than a batch
    found += stream
    assert [image.name for image, _ in found] == [f"image_{number}" for number in range(5)]
    for (_, poses), one in zip(found, expected, strict=True):
        assert len(poses) == len(one) > 0
        assert np.allclose(poses.keypoints, one.keypoints, atol=1e-2)
        assert same_covariances(poses, one)


def same_covariances(one: PoseDistributions, other: PoseDistributions) -> bool:
    """Whether entries differ by less than a thousandth of the product of their standard deviations."""
    spread = np.sqrt(one.covariance[..., [0, 1], [0, 1]])
    return bool((np.abs(one.covariance - other.covariance) < 1e-3 * spread[..., None] * spread[..., None, :]).all())


def test_identities_differ_between_models() -> None:
    """Weights of heads, tails and calibrations each: a run must not go on with another model's results."""
    host, artifact = host_of("11"), artifact_for(host_of("11"))
    fitted = artifact.calibrations
    heads, student = copy.deepcopy(artifact.heads), copy.deepcopy(fitted.student)
    with torch.no_grad():
        next(heads.parameters()).mul_(2.0)
        student.nu_ += 1
    others = [
        replace(artifact, heads=heads),
        replace(artifact, calibrations=replace(fitted, student=student)),
        replace(artifact, calibrations=replace(fitted, correlation=None)),
        with_split_student(artifact, fitted.threshold),
    ]
    identities = [json.dumps(UncertainPose(host, each).identity()) for each in (artifact, *others)]
    assert len(set(identities)) == 5
    assert json.dumps(UncertainPose(host, artifact_for(host)).identity()) == identities[0]


def test_stream_names_its_images(tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "one.png"), scenes(1)[0])
    cv2.imwrite(str(tmp_path / "two.png"), scenes(2)[1])
    stream = uncertain("11").stream(tmp_path)
    image, poses = next(stream)
    assert (image.name, type(poses)) == ("one", PoseDistributions)
    assert [image.name for image, _ in stream] == ["two"]


@pytest.mark.parametrize(
    "options", [{"conf": -0.1}, {"conf": 1.5}, {"iou": 2.0}, {"conf": float("nan")}, {"conf": None}]
)
def test_thresholds_out_of_range_are_one_line_errors(options: dict[str, Any]) -> None:
    """At the call already, not when the stream is read."""
    with pytest.raises(HaloposeError, match="between 0 and 1"):
        uncertain("11").stream(scenes(1), **options)


@pytest.mark.parametrize("device", ["", "gpu", "cuda:99", "0"])
def test_devices_that_are_not_there_are_one_line_errors(device: str) -> None:
    with pytest.raises(HaloposeError, match=f"no device '{device}' here") as error:
        UncertainPose.load(pose_model("11"), artifact_for(host_of("11")), device=device)
    assert "\n" not in str(error.value)


def test_loading_from_files_modules_and_hosts(tmp_path: Path) -> None:
    image = scenes(1, side=96)[0]
    artifact_for(host_of("11"), imgsz=IMGSZ).save(tmp_path / "heads.safetensors")
    torch.save({"model": pose_model("11")}, tmp_path / "base.pt")
    [expected] = uncertain("11").predict(image)
    for base in (tmp_path / "base.pt", str(tmp_path / "base.pt"), pose_model("11"), host_of("11")):
        [poses] = UncertainPose.load(base, tmp_path / "heads.safetensors").predict(image)
        assert np.array_equal(poses.covariance, expected.covariance)
    with pytest.raises(HaloposeError, match="another base"):
        UncertainPose.load(pose_model("v8"), tmp_path / "heads.safetensors")


def test_options_that_an_exported_folder_would_ignore_are_refused(tmp_path: Path) -> None:
    artifact = artifact_for(host_of("11"))
    for options in ({"artifact": artifact}, {"device": "cpu"}, {"widen": True}, {"unsafe": True}):
        with pytest.raises(HaloposeError, match=f"exported folder.*{next(iter(options))}") as error:
            UncertainPose.load(tmp_path, **cast(Any, options))
        assert "\n" not in str(error.value)


def test_the_visibility_threshold_replaces_that_of_the_artifact() -> None:
    artifact = artifact_for(host_of("11"), imgsz=IMGSZ)
    image = photograph("bus.jpg")
    for threshold, expected in ((None, None), (0.4, 0.4), (0.0, None)):
        model = UncertainPose.load_base(host_of("11"), artifact, visibility_threshold=threshold)
        assert model.artifact.calibrations.visibility_threshold == expected
    assert not present(
        UncertainPose.load(host_of("11"), artifact, visibility_threshold=1.1).predict(image)[0].keep
    ).any()


def test_an_artifact_of_the_one_to_one_head_finds_its_head(tmp_path: Path) -> None:
    """The base is right; which of its two heads to use is written in the artifact."""
    artifact = artifact_for(host_of("26-one-to-one"), imgsz=IMGSZ)
    [poses] = UncertainPose.load(pose_model("26"), artifact).predict(photograph("bus.jpg"))
    same_as_framework(poses, framework_on("26-one-to-one", "bus.jpg", IMGSZ))


# What results turn into ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gaussian", "student-t"])
def test_json_is_read_by_score(family: Family) -> None:
    [poses] = uncertain("11").predict(photograph("bus.jpg"), family=family)
    entries = poses.to_json()
    found = parse_predictions("entries", entries, None)
    assert present(found.image_ids).tolist() == [0] * len(poses)
    for name in ("scores", "keypoints", "visibility", "covariance", "scale", "dof"):
        before, after = getattr(poses, name), getattr(found, name)
        assert (before is None) == (after is None), name
        assert before is None or np.allclose(before, after, rtol=1e-12), name
    assert np.allclose(found.boxes, poses.boxes, atol=1e-3)
    assert [entry["keep"] for entry in entries] == present(poses.keep).tolist()


def test_json_holds_coco_categories() -> None:
    """A one-class model's class 0 is COCO's category 1, as in the ground truth that ``score`` compares with."""
    [poses] = uncertain("11").predict(photograph("bus.jpg"))
    content = {
        "images": [{"id": 0}],
        "annotations": [
            {"image_id": 0, "category_id": 1, "bbox": [0, 0, 9, 9], "area": 81, "keypoints": [5, 5, 2] * 17}
        ],
        "categories": [{"id": 1, "keypoints": [f"k{n}" for n in range(17)]}],
    }
    truth = parse_ground_truth("truth", content)
    assert len(parse_predictions("entries", poses.to_json(), truth)) == len(poses)


def test_ultralytics_results_carry_the_distribution() -> None:
    image = photograph("bus.jpg")
    [poses] = uncertain("11").predict(image, family="student-t")
    results = to_ultralytics(poses, image, path="bus.jpg", names={0: "person"})
    same_as_framework(poses, results)
    for name in ("covariance", "scale", "dof", "keep"):
        assert np.array_equal(getattr(results, name), getattr(poses, name))
    assert (results.path, results.names) == ("bus.jpg", {0: "person"})
    assert results.plot().shape == image.shape


def test_ultralytics_results_keep_the_distribution_when_sliced_or_moved() -> None:
    [poses] = uncertain("11").predict(photograph("bus.jpg"), family="student-t")
    results = to_ultralytics(poses)
    chosen = poses.scores > np.median(poses.scores)
    for made, index in (
        (results.cpu(), slice(None)),
        (results.numpy(), slice(None)),
        (results.to("cpu"), slice(None)),
        (results[1:3], slice(1, 3)),
        (results[1], [1]),
        (results[torch.from_numpy(chosen)], chosen),
        (results[1:3].numpy()[[1]], [2]),
    ):
        expected = poses[index]
        assert len(made) == len(expected)
        assert made.names == results.names
        np.testing.assert_allclose(np.asarray(made.boxes.conf), expected.scores, rtol=1e-6)
        for name in ("covariance", "scale", "dof", "keep"):
            assert np.array_equal(getattr(made, name), getattr(expected, name)), name


# Names, models and mistakes --------------------------------------------------------------------------------


def test_models_load_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = UncertainPose.load_base("runway")
    assert model.artifact.layout.names == ("near_left", "near_right", "far_right", "far_left")
    assert repr(model) == "UncertainPose(runway.safetensors, 4 keypoints, student-t, input 640)"
    assert repr(model.artifact) == "Artifact(4 keypoints of runway.safetensors, calibrated, input 640)"


def test_calling_is_predicting() -> None:
    model, image = uncertain("11"), photograph("bus.jpg")
    assert model(image, conf=0.3) == model.predict(image, conf=0.3)


def test_yolo_objects_are_loaded(tmp_path: Path) -> None:
    torch.save({"model": pose_model("11"), "train_args": {}}, tmp_path / "base.pt")
    host = load_host(YOLO(str(tmp_path / "base.pt")))
    assert set(host.fingerprints) & set(host_of("11").fingerprints)


def test_heads_that_nothing_calibrated_are_refused() -> None:
    host = host_of("11")
    artifact = artifact_for(host)
    plain = replace(artifact, calibrations=Calibrations.none(17))
    with pytest.raises(HaloposeError, match="not calibrated"):
        UncertainPose(host, plain)
    assert UncertainPose(host, plain, uncalibrated=True).predict(photograph("bus.jpg"))


@pytest.mark.parametrize(
    "options",
    [{"batch": 0}, {"batch": 2.5}, {"imgsz": -64}, {"imgsz": 10**9}, {"imgsz": (640, 480)}, {"imgsz": "640"}],
)
def test_sizes_that_are_none_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(HaloposeError, match=next(iter(options))):
        uncertain("11").predict(photograph("bus.jpg"), **options)


# From images to an artifact --------------------------------------------------------------------------------

SETTINGS = FitSettings(
    train=TrainSettings(epochs=4, batch=64, holdout=0.2), train_sizes=(64,), imgsz=64, calibration_share=0.5
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    return write_scenes(tmp_path_factory.mktemp("data"), host_of("11"), {"train": 16, "val": 10})


@pytest.mark.parametrize("source", ["matched", "assigned"])
def test_fit_end_to_end(data: Path, tmp_path: Path, source: str) -> None:
    host = host_of("11")
    training, validation = load_dataset(data, "train"), load_dataset(data, "val")
    settings = replace(SETTINGS, calibration=cast(Any, source))
    artifact, scores = fit(host, training, validation, tmp_path / "work", settings)
    assert scores.matched_instances > 5
    losses = present(artifact.card.training).holdout_loss
    assert min(losses) < losses[0] or len(losses) == 1
    used = artifact.card.images
    assert sorted(used.of("calibration", "evaluation")) == sorted(validation.image_ids.tolist())
    assert used.of("heads").tolist() == training.image_ids.tolist()

    # again from what is on disk, and by hand
    again, same = fit(host, training, validation, tmp_path / "work", settings)
    again.save(tmp_path / "again.safetensors")
    artifact.save(tmp_path / "artifact.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "artifact.safetensors").read_bytes()
    loaded = Artifact.load(tmp_path / "artifact.safetensors")
    store, images = MatchStore(tmp_path / "work" / "val"), used.of("evaluation")
    protocol = Protocol(bootstrap=0)
    found = evaluate_artifact(loaded, host, store, images, protocol)
    truth = store.ground_truth(images)
    matched = match_poses(predictions_of(loaded.heads, store, images), truth, protocol)
    expected = evaluate(matched, apply_calibrations(matched, loaded.calibrations, protocol), protocol)
    for distribution in DISTRIBUTIONS:
        for name in ("ace", "ence", "nll", "akp"):
            values = [one.distribution(distribution).metric(name) for one in (found, expected, scores, same)]
            assert values == values[:1] * 4
    check_with_predictor(UncertainPose(host, loaded), validation, images, truth, found)


def check_with_predictor(model: Any, validation: Any, images: Any, truth: GroundTruth, scores: Scores) -> None:
    """The predicted distributions have the NLL of the evaluation, up to the half precision of stored windows."""
    parts = []
    for record in validation.subset(images).records:
        [poses] = model.predict(record.read()[0], conf=SETTINGS.conf, iou=SETTINGS.iou)
        count = min(len(poses), 20)
        ids = np.full(count, record.image_id)
        parts.append(replace(poses[:count], image_ids=ids))
    matched = match_poses(PoseDistributions.concatenate(parts), truth, Protocol())
    r, covariance = matched.residual[matched.labelled], matched.covariance[matched.labelled]
    distance = np.einsum("ni,nij,nj->n", r, np.linalg.inv(covariance), r)
    nll = (distance + np.log(np.linalg.det(2 * np.pi * covariance))) / 2
    assert len(matched) == scores.matched_instances
    assert nll.mean() == pytest.approx(scores.gaussian.nll, abs=0.02)


def test_images_in_both_splits_are_refused(data: Path, tmp_path: Path) -> None:
    training = load_dataset(data, "train")
    with pytest.raises(HaloposeError, match="the validation"):
        fit(host_of("11"), training, training, tmp_path, SETTINGS)


def test_a_store_of_another_base_is_refused(data: Path, tmp_path: Path) -> None:
    host, other = host_of("11"), host_of("v8")
    fit(
        host,
        load_dataset(data, "train"),
        load_dataset(data, "val"),
        tmp_path,
        replace(SETTINGS, calibration_share=0.4),
    )
    with pytest.raises(HaloposeError, match="another base"):
        evaluate_artifact(artifact_for(other), other, MatchStore(tmp_path / "val"))
    changed = UltralyticsHost(pose_model("11", seed=1))
    with pytest.raises(HaloposeError, match="other data or settings"):
        fit(changed, load_dataset(data, "train"), load_dataset(data, "val"), tmp_path, SETTINGS)


@pytest.mark.usefixtures("published_base")
def test_images_without_persons_give_no_detections() -> None:
    """Context features are defined also for images without detections."""
    model = UncertainPose.load()
    empty = np.full((90, 160, 3), 114, np.uint8)
    families: tuple[Family, ...] = ("gaussian", "student-t")
    for family in families:
        found = model.predict([empty, photograph("bus.jpg"), empty], family=family)
        assert [len(poses) > 0 for poses in found] == [False, True, False]
        assert found[0].covariance.shape == (0, 17, 2, 2)
    assert len(model.predict(empty)[0]) == 0


def test_results_carry_image_path_names_and_speed(tmp_path: Path) -> None:
    pose = uncertain(KINDS[0])
    image = photograph(PHOTOGRAPHS[0])
    cv2.imwrite(str(tmp_path / "photo.png"), image)
    [of_file] = pose.predict(tmp_path / "photo.png")
    [of_array] = pose.predict(image)
    assert of_file == of_array
    assert of_file.path == tmp_path / "photo.png"
    assert of_array.path is None
    assert np.array_equal(of_file.image, image)
    assert of_array.image is image or np.array_equal(of_array.image, image)
    assert of_file.names == pose.layout.names
    speed = present(of_file.speed)
    assert min(speed.read, speed.model, speed.uncertainty) > 0
    assert pickle.loads(pickle.dumps(of_file)).path == of_file.path
    with FilmWriter(tmp_path / "film.mp4", 10.0) as film:
        for shade in (0, 90, 180):
            film.write(np.full((160, 160, 3), shade, dtype=np.uint8))
    frames = pose.predict(tmp_path / "film.mp4")
    assert [present(poses.origin).frame for poses in frames] == [0, 1, 2]
    assert [round(float(poses.image.mean()) / 10) * 10 for poses in frames] == [0, 90, 180]
