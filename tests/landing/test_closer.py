"""A second look at a part of a large frame: in pixels of the whole frame, and only where it is worth it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halopose.geometry.camera import Camera
from halopose.landing.closer import look_closer, part_around
from halopose.landing.world.render import render
from halopose.landing.world.scenes import SceneSettings, corners_in_image, sample_scene
from halopose.predictor import UncertainPose
from halopose.types import Array

LARGE = SceneSettings(
    camera=Camera.from_fov(1600, 960, np.radians(30)), distance=(2500.0, 3000.0), parallel_share=0.0
)


@pytest.fixture(scope="module")
def model() -> UncertainPose:
    return UncertainPose.load("runway")


@pytest.fixture(scope="module")
def frame() -> tuple[Array, Array]:
    """A large frame, and the corners of its runway (4, 2)."""
    scene = sample_scene(5, "clear", LARGE)
    return render(scene), corners_in_image(scene)[0]


@given(
    st.integers(64, 4000), st.integers(64, 4000), st.integers(32, 1280),
    st.tuples(*[st.floats(0.0, 1.0)] * 4),
)  # fmt: skip
def test_the_part_lies_in_the_frame_and_holds_what_it_is_around(
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


def test_the_second_look_is_a_prediction_of_the_part(model: UncertainPose, frame: tuple[Array, Array]) -> None:
    image, truth = frame
    found = next(look_closer(model, [image]))
    first = model.predict(image)[0]
    best = first.boxes[int(np.argmax(first.scores))]
    left, top, right, bottom = part_around(best, image.shape[1], image.shape[0], 640)
    part = model.predict(np.ascontiguousarray(image[top:bottom, left:right]))[0]
    assert len(part)
    assert len(found) >= len(part)
    np.testing.assert_array_equal(found.keypoints[: len(part)], part.keypoints + np.array([left, top]))
    np.testing.assert_array_equal(found.covariance[: len(part)], part.covariance)
    assert np.linalg.norm(found.mean[: len(part)] - truth, axis=-1).mean(1).min() < 12


def test_a_frame_of_the_input_s_size_is_looked_at_once(model: UncertainPose, frame: tuple[Array, Array]) -> None:
    image = np.ascontiguousarray(frame[0][:384, :640])
    once, found = model.predict(image)[0], next(look_closer(model, [image]))
    np.testing.assert_array_equal(found.keypoints, once.keypoints)
    np.testing.assert_array_equal(found.covariance, once.covariance)


def test_where_it_was_is_looked_at_when_the_whole_frame_shows_nothing(
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
    first, second = look_closer(model, [image, image])
    assert looks == [(960, 1600), (384, 640)] * 2
    assert len(second)
    assert len(first)
