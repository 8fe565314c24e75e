"""Region-of-interest refinement: results in pixels of the whole frame, and only where it helps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halopose.boxes import part_around
from halopose.deploy.deployed_model import Deployed, Detecting
from halopose.geometry.camera import Camera
from halopose.landing.association import Viewpoint
from halopose.landing.roi_refinement import RoiDetector, RoiRefiner, expected_box, refine_with_roi
from halopose.landing.world.render import render_scene
from halopose.landing.world.scenes import Scene, SceneSettings, corners_in_image, sample_scene
from halopose.poses import PoseDistributions
from halopose.prediction.deployed_pose import DeployedPose
from halopose.prediction.uncertain_pose import UncertainPose
from halopose.types import Array, Family

LARGE = SceneSettings(camera=Camera.from_fov(1600, 960, np.radians(30)), distance=(2500.0, 3000.0), parallel_share=0.0)


@pytest.fixture(scope="module")
def model() -> UncertainPose:
    return UncertainPose.load_base("runway")


@pytest.fixture(scope="module")
def frame() -> tuple[Array, Array]:
    """A large frame, and the corners of its runway (4, 2)."""
    scene = sample_scene(5, "clear", LARGE)
    return render_scene(scene), corners_in_image(scene)[0]


@given(
    st.integers(64, 4000), st.integers(64, 4000), st.integers(32, 1280),
    st.tuples(*[st.floats(0.0, 1.0)] * 4),
)  # fmt: skip
def test_crop_lies_in_the_frame_and_contains_its_box(
    width: int, height: int, size: int, shares: tuple[float, float, float, float]
) -> None:
    x, y = sorted((shares[0] * width, shares[2] * width)), sorted((shares[1] * height, shares[3] * height))
    left, top, right, bottom = part_around(np.array([x[0], y[0], x[1], y[1]]), width, height, size)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    assert right - left >= min(size, width) - 1
    for low, high, near, far in ((left, right, *x), (top, bottom, *y)):
        assert low <= near + 1
        assert far - 1 <= high


def test_the_refined_detection_is_a_prediction_of_the_crop(model: UncertainPose, frame: tuple[Array, Array]) -> None:
    image, truth = frame
    found = next(refine_with_roi(model, [image]))
    first = model.predict(image)[0]
    best = first.boxes[int(np.argmax(first.scores))]
    left, top, right, bottom = part_around(best, image.shape[1], image.shape[0], 640)
    part = model.predict(np.ascontiguousarray(image[top:bottom, left:right]))[0]
    assert len(part)
    assert len(found) >= len(part)
    np.testing.assert_array_equal(found.keypoints[: len(part)], part.keypoints + np.array([left, top]))
    np.testing.assert_array_equal(found.covariance[: len(part)], part.covariance)
    assert np.linalg.norm(found.mean[: len(part)] - truth, axis=-1).mean(1).min() < 12


def test_an_exported_model_refines_too(model: UncertainPose, frame: tuple[Array, Array]) -> None:
    """It has no artifact: refinement may use only what every predictor has."""

    class Exported:
        path, layout, facts = "exported", model.layout, SimpleNamespace(imgsz=640)

        def predict(self, image: Array, settings: Detecting, family: Family) -> PoseDistributions:
            return model.predict(image, conf=settings.conf, family=family)[0]

    exported = DeployedPose(cast(Deployed, Exported()))
    [expected], [found] = refine_with_roi(model, [frame[0]]), refine_with_roi(exported, [frame[0]])
    assert len(found)
    np.testing.assert_array_equal(found.keypoints, expected.keypoints)


def test_frame_of_the_input_size_is_processed_once(model: UncertainPose, frame: tuple[Array, Array]) -> None:
    image = np.ascontiguousarray(frame[0][:384, :640])
    once, found = model.predict(image)[0], next(refine_with_roi(model, [image]))
    np.testing.assert_array_equal(found.keypoints, once.keypoints)
    np.testing.assert_array_equal(found.covariance, once.covariance)


def test_last_position_is_searched_if_the_whole_frame_shows_nothing(
    model: UncertainPose, frame: tuple[Array, Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    image = frame[0]
    looks: list[tuple[int, ...]] = []
    predict = UncertainPose.predict

    def seen(self: UncertainPose, source: Array, **options: Any) -> object:
        looks.append(source.shape[:2])
        hidden = len(looks) == 3  # the whole of the second frame
        return predict(self, np.zeros_like(source) if hidden else source, **options)

    monkeypatch.setattr(UncertainPose, "predict", seen)
    first, second = refine_with_roi(model, [image, image])
    assert looks == [(960, 1600), (384, 640)] * 2
    assert len(second)
    assert len(first)


def view_of(scene: Scene, sigma: float, attitude: float = 1e-3) -> Viewpoint:
    """A filter that knows where it is, to sigma metres."""
    return Viewpoint(
        scene.camera, scene.mount, scene.position, sigma**2 * np.eye(3), scene.attitude, attitude**2 * np.eye(3)
    )


@given(st.integers(0, 10**6), st.floats(0.1, 100.0))
@settings(max_examples=30, deadline=None)
def test_the_runway_is_in_the_box_where_a_filter_expects_it(seed: int, sigma: float) -> None:
    scene = sample_scene(seed, "clear", LARGE)
    box, surer = (expected_box(view_of(scene, each), scene.runway.corners()) for each in (sigma, sigma / 2))
    assert box is not None
    assert surer is not None
    assert (box[:2] <= surer[:2]).all()
    assert (box[2:] >= surer[2:]).all()
    corners = corners_in_image(scene)[0]
    assert (surer[:2] <= corners.min(0)).all()
    assert (surer[2:] >= corners.max(0) - 0.5).all()
    behind = replace(scene, attitude=scene.attitude + np.array([np.pi, 0.0, 0.0]))
    assert expected_box(view_of(behind, sigma), scene.runway.corners()) is None


def test_a_filter_shows_what_the_whole_frame_does_not(model: UncertainPose, frame: tuple[Array, Array]) -> None:
    """The part is where the filter expects the runway; each frame is read and looked at once."""
    image, truth = frame
    box = np.concatenate([truth.min(0) - 20, truth.max(0) + 20])
    nothing = model.predict(np.zeros_like(image))[0]
    assert not len(nothing)
    assert not len(RoiRefiner(model, 0.25).refine(image, nothing))
    read: list[int] = []

    def images() -> Iterator[Array]:
        for number in range(3):
            read.append(number)
            yield image

    looks = RoiDetector(RoiRefiner(model, 0.25), [nothing] * 3, images(), lambda poses: poses, lambda pixels: pixels)
    assert not len(looks.at(0, None))
    found = looks.at(2, box)
    assert len(found)
    left, top, *_ = part = part_around(box, image.shape[1], image.shape[0], 640)
    alone = model.predict(np.ascontiguousarray(image[top : part[3], left : part[2]]))[0]
    np.testing.assert_array_equal(found.keypoints, alone.keypoints + np.array([left, top]))
    assert looks.at(2, None) is found
    assert read == [0, 1, 2]


def test_the_expected_place_comes_before_the_higher_score(model: UncertainPose) -> None:
    """Of two runways the second look is at the one that the filter means."""
    boxes = np.array([[100.0, 100.0, 140.0, 140.0], [900.0, 500.0, 950.0, 560.0]])
    corners = boxes[:, [[0, 3], [2, 3], [2, 1], [0, 1]]]
    spread = np.tile(np.eye(2), (2, 4, 1, 1))
    two = PoseDistributions(boxes, np.array([0.9, 0.5]), corners, spread, spread)
    looked: list[Array] = []

    class Looking(RoiRefiner):
        def _part(self, image: Array, whole: PoseDistributions, place: Array) -> PoseDistributions:
            looked.append(place)
            return whole

    image = np.zeros((960, 1600, 3), np.uint8)
    refiner = Looking(model, 0.25)
    for expected in (None, boxes[1] + [-50, -50, 50, 50], np.array([0.0, 600.0, 50.0, 700.0])):
        refiner.refine(image, two, expected)
    np.testing.assert_array_equal(looked, [boxes[0], boxes[1], [0, 600, 50, 700]])
