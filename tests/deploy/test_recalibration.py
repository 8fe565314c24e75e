"""Calibration and evaluation in the deployed runtime: compared with the PyTorch pipeline."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from halopose.data.dataset_loading import load_dataset
from halopose.deploy import recalibration
from halopose.deploy.deployed_model import Deployed
from halopose.deploy.folder import write_folder
from halopose.deploy.graph import TopkSettings
from halopose.deploy.onnx_file import ExportSettings, build
from halopose.errors import HaloposeError
from halopose.fitting.card import Card, ImageRoles
from halopose.fitting.feature_cache import MatchStore
from halopose.fitting.pipeline import calibrate_artifact, collect_validation, evaluate_artifact
from halopose.fitting.settings import FitSettings
from halopose.prediction.uncertain_pose import UncertainPose
from halopose.protocol import Protocol
from tests.helpers.models import artifact_for, host_of, write_scenes

pytestmark = pytest.mark.usefixtures("one_thread")
PROTOCOL = Protocol(area="box")
SETTINGS = FitSettings(imgsz=64, train_sizes=(64,))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    return write_scenes(tmp_path_factory.mktemp("data"), host_of("11"), {"val": 12, "other": 8})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    artifact = artifact_for(host_of("11"))
    model = build(host_of("11"), artifact, ExportSettings(topk=TopkSettings(84, 64)))
    write_folder(tmp_path / "deployed", model, artifact)
    return tmp_path / "deployed"


@pytest.fixture
def store(data: Path, tmp_path: Path) -> MatchStore:
    return collect_validation(host_of("11"), load_dataset(data, "val"), tmp_path / "store", SETTINGS)


def seen_image(data: Path) -> np.ndarray:
    return load_dataset(data, "other").records[0].read()[0]


def test_scores_equal_those_of_the_pipeline(data: Path, folder: Path, store: MatchStore) -> None:
    deployed = Deployed(folder)
    metrics = recalibration.score(deployed, recalibration.collect(deployed, load_dataset(data, "val")), PROTOCOL)
    expected = evaluate_artifact(artifact_for(host_of("11")), host_of("11"), store, protocol=PROTOCOL)
    assert metrics.matched_instances == expected.matched_instances > 5
    for distribution in ("uncalibrated", "gaussian", "student_t"):  # the store keeps windows in half precision
        assert metrics.distribution(distribution).nll == pytest.approx(
            expected.distribution(distribution).nll, abs=0.02
        )
        assert metrics.distribution(distribution).ace == pytest.approx(
            expected.distribution(distribution).ace, abs=0.01
        )
    assert metrics.pruned.kept_fraction == pytest.approx(expected.pruned.kept_fraction, abs=0.02)


def test_an_offset_is_that_of_the_pipeline_and_moves_the_distribution_alone(
    data: Path, folder: Path, store: MatchStore
) -> None:
    seen = recalibration.collect(Deployed(folder), load_dataset(data, "val"))
    card = Card(images=ImageRoles(heads=()), settings=SETTINGS)
    trained = replace(artifact_for(host_of("11")), card=card)
    expected = calibrate_artifact(trained, host_of("11"), store, "matched", offset=True).calibrations.offset
    before = UncertainPose.load(folder).predict(seen_image(data), conf=0.1)[0]
    recalibration.calibrate(folder, seen, offset=True)
    found = recalibration.calibrations_of(Deployed(folder).facts).offset
    assert found is not None
    assert expected is not None
    assert np.allclose(found, expected, atol=0.01)
    after = UncertainPose.load(folder).predict(seen_image(data), conf=0.1)[0]
    assert np.array_equal(before.keypoints, after.keypoints)
    assert after.offset is not None
    recalibration.calibrate(folder, seen)
    assert Deployed(folder).facts.offset is None


def test_calibration_is_that_of_the_pipeline_and_lands_in_the_file(data: Path, folder: Path, store: MatchStore) -> None:
    before = UncertainPose.load(folder, family="gaussian")
    count = recalibration.calibrate(folder, recalibration.collect(Deployed(folder), load_dataset(data, "val")))
    # The exported model is calibrated already, and few objects hardly narrow that calibration.
    card = Card(images=ImageRoles(heads=(), calibration=()), settings=SETTINGS)
    trained = replace(artifact_for(host_of("11")), card=card)
    expected = calibrate_artifact(trained, host_of("11"), store, "matched").calibrations
    found = recalibration.calibrations_of(Deployed(folder).facts)
    assert count > 5
    assert np.allclose(found.gaussian.tau_, expected.gaussian.tau_, rtol=0.01)
    assert np.allclose(found.student.tau_, expected.student.tau_, rtol=0.03)
    assert np.allclose(found.student.moment_tau_, expected.student.moment_tau_, rtol=0.01)
    image = seen_image(data)
    [old] = before.predict(image, conf=0.1)
    [new] = UncertainPose.load(folder, family="gaussian").predict(image, conf=0.1)
    ratio = np.square(expected.gaussian.tau_.numpy() / artifact_for(host_of("11")).calibrations.gaussian.tau_.numpy())
    assert np.array_equal(old.keypoints, new.keypoints)
    assert np.allclose(new.covariance, old.covariance * ratio[:, None, None], rtol=0.03)
    card = json.loads((folder / "card.json").read_text())
    assert card["images"]["calibration"] == sorted(load_dataset(data, "val").image_ids.tolist())
    assert set(recalibration.images_seen(Deployed(folder))) == set(load_dataset(data, "val").image_ids)


DAMAGED = [
    [],
    "card",
    3,
    None,
    {"images": []},
    {"images": {"heads": "abc"}},
    {"images": {"heads": [1.5]}},
    {"images": {"heads": [[1]]}},
    {"images": {"heads": None}},
    {"images": {"heads": [10**400]}},
    {"images": {"unknown": [1]}},
    {"images": {}, "settings": {**SETTINGS.to_json(), "rule": 5}},
    {"images": {}, "settings": {**SETTINGS.to_json(), "rule": "guess"}},
    {"images": {}, "settings": {**SETTINGS.to_json(), "region_scales": "maybe"}},
    "missing",
]


def test_a_card_that_cannot_be_read_is_refused_before_anything_is_written(data: Path, folder: Path) -> None:
    """Without the card a model could be evaluated on the images it was made with."""
    seen = recalibration.collect(Deployed(folder), load_dataset(data, "val"))
    before = (folder / "model.onnx").read_bytes()
    for content in DAMAGED:
        (folder / "card.json").unlink(missing_ok=True)
        if content != "missing":
            (folder / "card.json").write_text(json.dumps(content))
        with pytest.raises(HaloposeError, match=r"^[^\n]+$"):
            recalibration.calibrate(folder, seen)
        assert (folder / "model.onnx").read_bytes() == before, content
        if not isinstance(content, dict) or "settings" not in content:
            with pytest.raises(HaloposeError, match=r"card\.json"):
                recalibration.images_seen(Deployed(folder))
    assert not len(recalibration.images_seen(Deployed(folder), ()))  # the user knows that the images are new
