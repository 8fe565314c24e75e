"""The shipped runway detectors and heads, on held-out scenes."""

from dataclasses import replace

import numpy as np
import pytest

from halopose.errors import HaloposeError
from halopose.fitting.artifact import Artifact
from halopose.hosts import model_zoo as hub
from halopose.landing import shipped_detectors
from halopose.landing.runway_datasets import CORNER_NAMES
from halopose.landing.world.footage_style import PAVED
from halopose.landing.world.render import render_scene
from halopose.landing.world.scenes import Scene, SceneSettings, corners_in_image, sample_scene
from halopose.prediction.uncertain_pose import UncertainPose
from halopose.types import Array


@pytest.fixture(scope="module")
def model() -> UncertainPose:
    return UncertainPose.load_base(shipped_detectors.runway_detector(), shipped_detectors.runway_artifact())


@pytest.fixture(scope="module")
def footage() -> UncertainPose:
    return UncertainPose.load_base("runway-footage")


def test_detector_and_heads_belong_together(model: UncertainPose) -> None:
    assert model.artifact.layout.names == CORNER_NAMES
    assert model.artifact.card.images.calibration
    with pytest.raises(HaloposeError, match="base"):
        UncertainPose(model.host, Artifact.load(hub.shipped_artifact()))


def distances(model: UncertainPose, scenes: list[Scene], conf: float) -> list[Array]:
    """Squared distances (4,) of the corners of scenes from where the model found them, under its covariances."""
    found = []
    for scene in scenes:
        poses = model.predict(render_scene(scene), conf=conf)[0]
        corners, _ = corners_in_image(scene)
        if len(poses):
            best = int(np.abs(poses.keypoints - corners).mean((1, 2)).argmin())
            off = corners - poses.keypoints[best]
            found.append(np.einsum("ki,kij,kj->k", off, np.linalg.inv(poses.covariance[best]), off))
    return found


def test_corners_of_new_scenes_lie_where_their_ellipses_say(model: UncertainPose) -> None:
    """Twenty clear scenes: found, and off by about as much as the covariances state."""
    found = distances(model, [sample_scene(seed, "clear") for seed in range(900, 920)], 0.5)
    assert len(found) >= 16
    assert 0.8 < np.mean(np.concatenate(found) < 5.99) <= 1.0  # 95 % of a Gaussian


def test_footage_heads_have_their_own_detector(model: UncertainPose, footage: UncertainPose) -> None:
    """Forty scenes as cameras record them; other keypoints than the detector of simulated flights."""
    with pytest.raises(HaloposeError, match="base"):
        UncertainPose(model.host, footage.artifact)
    assert not set(footage.artifact.card.images.of("calibration")) & set(footage.artifact.card.images.of("heads"))
    recorded = SceneSettings(footage=True, paved=PAVED)
    found = distances(footage, [sample_scene(seed, "clear", recorded) for seed in range(900, 940)], 0.5)
    assert len(found) >= 28
    assert 0.85 < np.mean(np.concatenate(found) < 5.99) <= 1.0


def test_a_runway_begins_with_its_pavement_or_its_threshold(footage: UncertainPose) -> None:
    """Labels of real frames may begin at either: ellipses of the near corners hold both."""
    held = []
    for seed in range(30, 42):
        scene = sample_scene(seed, "clear", SceneSettings(distance=(900.0, 1600.0)))
        paved = replace(scene, runway=replace(scene.runway, before=(150.0, 150.0)))
        poses = footage.predict(render_scene(paved), conf=0.5)[0]
        if len(poses) == 1:
            ends = [paved, replace(paved, runway=replace(paved.runway, counted=True))]
            off = np.array([corners_in_image(each)[0][:2] - poses.keypoints[0, :2] for each in ends])
            held.append(np.einsum("eki,kij,ekj->ek", off, np.linalg.inv(poses.covariance[0, :2]), off) < 5.99)
    assert len(held) >= 8
    assert np.mean(held) > 0.8
