"""What ships for landing: the detector, its heads, and the scenes it has never seen."""

import numpy as np
import pytest

from halopose.errors import HaloposeError
from halopose.fitting.artifact import Artifact
from halopose.hosts import shipped as hub
from halopose.landing.world.dataset import CORNER_NAMES, corners_in_image, render, sample_scene
from halopose.predictor import UncertainPose


@pytest.fixture(scope="module")
def model() -> UncertainPose:
    return UncertainPose.load(hub.runway_detector(), hub.runway_artifact())


def test_detector_and_heads_belong_together(model: UncertainPose) -> None:
    assert model.artifact.layout.names == CORNER_NAMES
    assert model.artifact.card["images"]["calibration"]
    with pytest.raises(HaloposeError, match="base"):
        UncertainPose(model.host, Artifact.load(hub.shipped_artifact()))


def test_corners_of_new_scenes_lie_where_their_ellipses_say(model: UncertainPose) -> None:
    """Twenty clear scenes: found, and off by about as much as the covariances state."""
    distances = []
    for seed in range(900, 920):
        scene = sample_scene(seed, "clear")
        poses = model.predict(render(scene), conf=0.5)[0]
        corners, _ = corners_in_image(scene)
        if not len(poses):
            continue
        best = int(np.abs(poses.keypoints - corners).mean((1, 2)).argmin())
        off = corners - poses.keypoints[best]
        distances.append(np.einsum("ki,kij,kj->k", off, np.linalg.inv(poses.covariance[best]), off))
    assert len(distances) >= 16
    assert 0.8 < np.mean(np.concatenate(distances) < 5.99) <= 1.0  # 95 % of a Gaussian


def test_heads_for_real_cameras_are_others_for_the_same_detector(model: UncertainPose) -> None:
    """Equal keypoints and weights of novelty; larger ellipses, as footage errs more, and ranks of its own."""
    footage = UncertainPose(model.host, Artifact.load(hub.footage_artifact()))
    image = render(sample_scene(4))
    plain, real = (one.predict(image, conf=0.5)[0] for one in (model, footage))
    assert len(plain)
    assert np.array_equal(plain.keypoints, real.keypoints)
    assert (np.linalg.det(real.covariance) > np.linalg.det(plain.covariance)).all()
    assert model.artifact.novelty is not None
    assert footage.artifact.novelty is not None
    assert footage.artifact.novelty.weights.equal(model.artifact.novelty.weights)
    assert real.novelty is not None
    assert (real.novelty >= plain.novelty).all()
    assert not set(footage.artifact.card["images"]["calibration"]) & set(footage.artifact.card["images"]["heads"])
