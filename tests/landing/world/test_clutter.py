"""Roads and buildings: none near a runway, drawn where they are projected, far ones hidden by near ones."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from halopose.geometry.camera import project_points
from halopose.landing.world.clutter import draw_boxes, road_patches, sample_boxes
from halopose.landing.world.footage_style import Footage
from halopose.landing.world.scenes import SceneSettings, sample_scene


@settings(max_examples=40)
@given(st.integers(0, 2**62))
def test_nothing_stands_near_a_runway(seed: int) -> None:
    scene = sample_scene(seed, "clear", SceneSettings(parallel_share=0.5))
    boxes = sample_boxes(replace(scene, footage=Footage(buildings=200)))
    for runway in scene.runways:
        reach = np.linalg.norm(boxes.half, axis=1)
        assert (np.abs(boxes.middle[:, 1] - runway.threshold[1]) - reach > 100).all()
    assert (boxes.height > 0).all()


def test_number_of_roads_is_that_of_the_scene() -> None:
    scene = sample_scene(1)
    assert len(road_patches(replace(scene, footage=Footage(roads=7)))) == 7
    assert road_patches(scene) == []


def test_buildings_are_where_they_are_projected() -> None:
    """The change that they make to a grey picture holds the middle of each that is whole in view."""
    scene = replace(sample_scene(2), footage=Footage(buildings=120))
    rotation, eye = scene.camera_pose()
    camera = scene.camera
    image = np.full((3, camera.height, camera.width), 0.5, np.float32)
    light, horizon = np.full((3, 1, 1), 4.0, np.float32), np.full((3, 1, 1), 0.9, np.float32)
    draw_boxes(image, camera, rotation, eye, scene, light, horizon)
    changed = (image != 0.5).any(0)
    boxes = sample_boxes(scene)
    middle = np.column_stack([boxes.middle, boxes.height / 2])
    pixels = project_points(camera, rotation, eye, middle)
    inside = camera.contains(pixels) & (pixels > 2).all(1) & (pixels < (camera.width - 3, camera.height - 3)).all(1)
    assert inside.sum() >= 3
    spots = np.rint(pixels[inside]).astype(int)
    assert changed[spots[:, 1], spots[:, 0]].mean() > 0.9
    assert changed.mean() < 0.2
