"""Scenes: corners against OpenCV's projection, ranges, and what may be labelled."""

from dataclasses import replace
from typing import Any, cast

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halopose.errors import HaloposeError
from halopose.geometry.camera import Camera, project_points
from halopose.landing.world.scenes import (
    WEATHERS,
    Runway,
    SceneSettings,
    Weather,
    corners_in_image,
    labelled_runways,
    sample_scene,
)

SEEDS = st.integers(0, 2**62)


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.sampled_from(WEATHERS))
def test_corners_are_where_opencv_projects_them(seed: int, weather: Weather) -> None:
    camera = replace(Camera.from_fov(640, 384, np.radians(30)), distortion=(-0.2, 0.05, 1e-3, -1e-3, 0.0))
    scene = sample_scene(seed, weather, SceneSettings(camera=camera))
    rotation, eye = scene.camera_pose()
    half, length = scene.runway.width / 2, scene.runway.length
    corners = np.array([[0, half, 0], [0, -half, 0], [length, -half, 0], [length, half, 0]])
    expected, _ = cv2.projectPoints(
        corners, cv2.Rodrigues(rotation)[0], -rotation @ eye, camera.matrix, np.array(camera.distortion)
    )
    np.testing.assert_allclose(corners_in_image(scene)[0], expected[:, 0], atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.sampled_from(WEATHERS))
def test_a_sampled_scene_shows_its_runway_as_a_pilot_sees_it(seed: int, weather: Weather) -> None:
    scene = sample_scene(seed, weather)
    (near_left, near_right, far_right, far_left), visible = corners_in_image(scene)
    assert near_left[0] < near_right[0]
    assert far_left[0] < far_right[0]
    assert max(far_left[1], far_right[1]) < min(near_left[1], near_right[1])
    assert scene.camera.contains(corners_in_image(scene)[0]).all()
    assert -6000 <= scene.position[0] <= -300
    assert 12 <= scene.position[2] < 600
    assert visible.all() or weather == "fog"
    assert visible[:2].all()


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_a_parallel_runway_is_in_view_as_a_whole_or_not_at_all(seed: int) -> None:
    scene = sample_scene(seed, "clear", SceneSettings(parallel_share=1.0))
    assert labelled_runways(scene)[0] == scene.runway
    if scene.parallel is None:
        return
    if len(labelled_runways(scene)) == 1:
        near_left, near_right, far_right, far_left = scene.parallel.corners()
        share = np.linspace(0, 1, 81)[:, None]
        edges = np.concatenate([a + share * (b - a) for a, b in ((near_left, far_left), (near_right, far_right))])
        pixels = project_points(scene.camera, *scene.camera_pose(), edges)
        assert scene.camera.contains(pixels).mean() < 0.02  # at most a sliver between the points looked at


def test_the_same_seed_is_the_same_scene_and_another_is_not() -> None:
    first, again, other = sample_scene(5, "dusk"), sample_scene(5, "dusk"), sample_scene(6, "dusk")
    assert repr(first) == repr(again) != repr(other)


def test_fog_hides_what_lies_beyond_the_visibility() -> None:
    scene = replace(sample_scene(3, "fog"), visibility=1200.0, runway=Runway(3000.0, 45.0))
    scene = replace(scene, position=np.array([-600.0, 0.0, 50.0]), attitude=np.array([0.0, 0.05, 0.0]))
    assert corners_in_image(scene)[1].tolist() == [True, True, False, False]


def test_mistakes_are_named() -> None:
    with pytest.raises(HaloposeError, match="unknown weather 'snow'"):
        sample_scene(0, cast(Any, "snow"))
    with pytest.raises(HaloposeError, match="in view"):
        sample_scene(0, "clear", SceneSettings(camera=Camera.from_fov(64, 38, np.radians(0.5))))
