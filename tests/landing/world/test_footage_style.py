"""Scenes of footage: many cameras, reproducible by seed, and no effect on plain scenes."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from halopose.geometry.camera import Camera, normalise
from halopose.landing.world.footage_style import (
    SIZES,
    Footage,
    footage_ranges,
    pinhole_for,
    sample_footage,
    sample_pavement,
)
from halopose.landing.world.image_sensor import develop
from halopose.landing.world.render import radiance, render_scene
from halopose.landing.world.scenes import SceneSettings, corners_in_image, labelled_runways, sample_scene

SEEDS = st.integers(0, 2**62)


def test_the_plain_world_has_none_of_it() -> None:
    scene = sample_scene(3, "clear", SceneSettings(camera=Camera.from_fov(160, 96, np.radians(30))))
    assert scene.footage is None
    np.testing.assert_array_equal(render_scene(scene), develop(radiance(scene), scene))


@settings(max_examples=40)
@given(SEEDS)
def test_a_camera_sees_the_runway_whole_and_its_pinhole_sees_all_it_sees(seed: int) -> None:
    camera = footage_ranges(seed).camera
    assert (camera.width, camera.height) in SIZES
    pinhole = pinhole_for(camera)
    ends = np.array([(u, v) for u in (0.0, camera.width - 1.0) for v in (0.0, camera.height - 1.0)])
    seen = normalise(camera, ends) * (pinhole.fx, pinhole.fy) + (pinhole.cx, pinhole.cy)
    assert pinhole.contains(seen).all()
    scene = sample_scene(seed, "clear", SceneSettings(footage=True))
    assert scene.camera.contains(corners_in_image(scene)[0]).all()
    assert scene.footage == sample_footage(seed)


def test_every_addition_occurs_and_is_missing() -> None:
    drawn = [sample_footage(seed) for seed in range(300)]
    for name, nothing in vars(Footage()).items():
        share = np.mean([getattr(each, name) != nothing for each in drawn])
        assert name == "slope" or 0.1 < share < 0.9, name


def test_pavement_before_the_threshold_is_drawn_and_labels_may_begin_there() -> None:
    drawn = [sample_pavement(seed, 0.35) for seed in range(400)]
    sides, counted = np.array([each[0] for each in drawn]), np.array([each[1] for each in drawn])
    displaced = (sides > 0).any(1)
    assert 0.25 < displaced.mean() < 0.45
    assert 0.6 < counted[displaced].mean() < 0.8
    assert not counted[~displaced].any()
    assert 0.25 < (sides[:, 0] != sides[:, 1])[displaced].mean() < 0.55
    drawing = [sample_scene(seed, "clear", SceneSettings(footage=True, paved=0.35)).runway for seed in range(20)]
    assert [(runway.before, runway.counted) for runway in drawing] == [
        sample_pavement(seed, 0.35) for seed in range(20)
    ]
    assert sample_scene(3, "clear", SceneSettings(footage=True)).runway.before == (0.0, 0.0)
    camera = Camera.from_fov(320, 192, np.radians(30))
    scene = sample_scene(3, "clear", SceneSettings(camera=camera, distance=(900.0, 1000.0)))
    longer = replace(scene, runway=replace(scene.runway, before=(200.0, 150.0)))
    counting = replace(scene, runway=replace(scene.runway, before=(200.0, 150.0), counted=True))
    np.testing.assert_array_equal(corners_in_image(scene)[0], corners_in_image(longer)[0])
    away = corners_in_image(counting)[0] - corners_in_image(scene)[0]
    assert away[0, 1] > away[1, 1] + 1 > 5
    np.testing.assert_array_equal(away[2:], 0)
    np.testing.assert_array_equal(render_scene(longer), render_scene(counting))
    changed = np.flatnonzero((radiance(longer) != radiance(scene)).any((0, 2)))
    near, begins = corners_in_image(scene)[0][:2, 1], corners_in_image(counting)[0][:2, 1]
    assert changed.min() >= near.min() - 2
    assert changed.max() <= begins.max() + 2


def test_a_crop_of_a_large_picture_has_its_pixels() -> None:
    """The part has the pixels of the whole, at its own resolution, and the whole runway in it."""
    large = SceneSettings(camera=Camera.from_fov(1920, 1152, np.radians(30)), distance=(1000.0, 6000.0))
    for seed in range(30):
        whole = sample_scene(seed, "clear", large)
        part = sample_scene(seed, "clear", replace(large, part=640))
        assert (part.camera.width, part.camera.height) == (640, 384)
        assert labelled_runways(part)
        away = corners_in_image(whole)[0] - corners_in_image(part)[0]
        if part.camera.fx == whole.camera.fx:
            np.testing.assert_allclose(away, np.tile(np.rint(away[0]), (4, 1)), atol=1e-9)
        else:
            assert part.camera.fx < whole.camera.fx
            np.testing.assert_array_less(0.6, np.ptp(corners_in_image(part)[0], axis=0).max() / 384)
