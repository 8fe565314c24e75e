"""Pixels: edges where the labels are, coverage against supersampling, air after Koschmieder, same bytes."""

from dataclasses import replace
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halopose.geometry.camera import Camera, Mount, normalise
from halopose.landing.world.image_sensor import develop
from halopose.landing.world.render import (
    _coverage,
    _dashes,
    _ground,
    _pulse,
    _view,
    _windows,
    daylight,
    radiance,
    render_scene,
)
from halopose.landing.world.runway_layout import Patch
from halopose.landing.world.scenes import (
    WEATHERS,
    CameraSensor,
    Runway,
    Scene,
    SceneSettings,
    Weather,
    runway_pixels,
    sample_scene,
)
from halopose.types import Array

CAMERA = Camera.from_fov(640, 384, np.radians(30))
PURE = CameraSensor(blur=0.0, noise=0.0)
WIDTHS = st.floats(0.01, 200)


def scene_at(
    position: Any, attitude: Any = (0.0, 0.06, 0.0), weather: Weather = "clear", visibility: float = 1e9
) -> Scene:
    """A scene without lights or sensor, in the clearest air."""
    return Scene(
        1, weather, Runway(2800.0, 45.0), np.array(position, float), np.array(attitude, float), CAMERA,
        Mount.looking(pitch=np.radians(-6.5)), visibility, (0.8, 1.0), 0.0, PURE,
    )  # fmt: skip


@given(st.floats(-100, 100), WIDTHS, st.floats(-50, 50), st.floats(0.1, 80))
def test_a_pulse_is_the_share_of_the_footprint_inside(value: float, width: int, low: float, size: float) -> None:
    fine = value + width * (np.arange(4001) / 4000 - 0.5)
    expected = ((fine >= low) & (fine <= low + size)).mean()
    assert abs(_pulse(np.array([value]), np.array([width]), low, low + size)[0] - expected) < 1e-3


@given(st.floats(-300, 300), WIDTHS, st.floats(1, 40), st.floats(1, 40))
def test_dashes_are_the_share_of_the_footprint_painted(value: float, width: int, painted: float, gap: float) -> None:
    fine = value + width * ((np.arange(20000) + 0.5) / 20000 - 0.5)
    expected = (np.mod(fine - 7.0, painted + gap) < painted).mean()
    assert abs(_dashes(np.array([value]), np.array([width]), 7.0, (painted, gap))[0] - expected) < 5e-3


def supersampled(scene: Scene, factor: int = 8) -> Array:
    """Share of each pixel inside the runway's quadrilateral, by testing many points of it."""
    corners = runway_pixels(scene, scene.runway).astype(np.float32)
    offset = (np.arange(factor) + 0.5) / factor - 0.5
    u = (np.arange(scene.camera.width)[:, None] + offset).ravel()
    v = (np.arange(scene.camera.height)[:, None] + offset).ravel()
    inside = np.ones((len(v), len(u)), bool)
    for (x0, y0), (x1, y1) in zip(corners, np.roll(corners, -1, 0), strict=True):
        inside &= (x1 - x0) * (v[:, None] - y0) - (y1 - y0) * (u - x0) <= 0
    return inside.reshape(scene.camera.height, factor, scene.camera.width, factor).mean((1, 3))


@pytest.mark.parametrize("distance", [320.0, 900.0, 2500.0, 6000.0])
@pytest.mark.parametrize("roll", [0.0, 0.12])
def test_the_runway_covers_the_pixels_that_supersampling_says(distance: float, roll: float) -> None:
    height = (distance + 300) * np.tan(np.radians(3))
    scene = scene_at((-distance, 0.02 * distance, height), (0.05, 0.06, roll))
    view = _view(scene)
    ground = _ground(view, CAMERA)
    patch = Patch((0.0, scene.runway.length), ((-22.5, 22.5),), (0.0, 0.0, 0.0))
    covered = np.zeros((CAMERA.height, CAMERA.width))
    covered[ground.top :] = _coverage(ground, (slice(None), slice(None)), patch)
    expected = supersampled(scene)
    assert abs(covered.sum() / expected.sum() - 1) < 0.01
    rows, columns = np.mgrid[0 : CAMERA.height, 0 : CAMERA.width]
    for axis in (rows, columns):
        centre = [(axis * share).sum() / share.sum() for share in (covered, expected)]
        assert abs(centre[0] - centre[1]) < 0.05  # pixels
    assert np.abs(covered - expected).mean() < 0.1 * expected.mean() + 1e-4


@pytest.mark.parametrize("lateral", [4.0, -9.0])
def test_painted_edges_agree_with_the_labelled_corners(lateral: float) -> None:
    """The left edge, found where grass turns to the white side stripe, against the line through the corners."""
    scene = scene_at((-300.0, lateral, 33.0), (0.03, 0.06, 0.05))
    light = radiance(scene).mean(0)
    near, _, _, far = runway_pixels(scene, scene.runway)
    gaps = []
    for row in range(int(near[1]) - 32, int(near[1]) - 4):
        line = far[0] + (near[0] - far[0]) * (row - far[1]) / (near[1] - far[1])
        start = int(line)
        grass, stripe = light[row, start - 7 : start - 2].mean(), light[row, start - 2 : start + 5].max()
        peak = start - 2 + int(np.argmax(light[row, start - 2 : start + 5]))
        filled = (light[row, start - 2 : peak] - grass).sum() / (stripe - grass)
        gaps.append(peak - 0.5 - filled - line)
    assert abs(np.mean(gaps)) < 0.08
    assert np.std(gaps) < 0.25


def test_a_patch_with_a_corner_beside_the_camera_is_drawn() -> None:
    scene = scene_at((-300.0, 0.0, 33.0), (0.12, 0.06, 0.0))
    view = _view(scene)
    ground = _ground(view, CAMERA)
    aside, ahead = (Patch(x, ((480.0, 1500.0),), (0.0, 0.0, 0.0)) for x in ((-300.0, 6000.0), (900.0, 6000.0)))
    everywhere, somewhere = _windows(scene, view, ground, [aside, ahead])
    assert everywhere == (slice(0, CAMERA.height - ground.top), slice(0, CAMERA.width))
    assert somewhere not in (None, everywhere)


def test_fog_takes_contrast_away_with_distance_after_koschmieder() -> None:
    visibility = 900.0
    place = (-800.0, 0.0, 60.0)
    clear, foggy = (radiance(scene_at(place, weather="fog", visibility=v)) for v in (1e9, visibility))
    scene = scene_at(place, weather="fog")
    rotation, eye = scene.camera_pose()
    row, column = np.mgrid[150:384:7, 0:640:11]
    plain = normalise(CAMERA, np.stack([column, row], -1).astype(float))
    rays = np.concatenate([plain, np.ones((*plain.shape[:2], 1))], -1) @ rotation
    distance = np.linalg.norm(rays, axis=-1) * eye[2] / -rays[..., 2]
    air = daylight(scene).horizon
    expected = air + (clear[:, row, column] - air) * np.exp(-3.912 * distance / visibility)
    np.testing.assert_allclose(foggy[:, row, column], expected, atol=2e-5)
    assert distance.max() > 2 * distance.min()  # near and far were both looked at


def test_a_far_runway_does_not_flicker() -> None:
    """No aliasing: a shift by a fraction of a pixel hardly changes the total brightness of the runway."""
    distance, totals = 6000.0, []
    for shift in np.linspace(0, 3e-3, 7):
        scene = scene_at((-distance, 0.0, 330.0), (shift, 0.06, 0.0))
        near_left, near_right, far_right, _ = runway_pixels(scene, scene.runway)
        box = radiance(scene)[
            :, int(far_right[1]) + 1 : int(near_left[1]), int(near_left[0]) - 6 : int(near_right[0]) + 6
        ]
        totals.append(box.mean())
    assert np.std(totals) / np.mean(totals) < 0.02


@pytest.mark.parametrize("weather", WEATHERS)
def test_the_same_scene_gives_the_same_bytes(weather: Weather) -> None:
    scene = sample_scene(1, weather)
    first = render_scene(scene)
    assert first.shape == (384, 640, 3)
    assert first.dtype == np.uint8
    np.testing.assert_array_equal(render_scene(scene), first)
    assert (render_scene(replace(scene, frame=1)) != first).any()  # its noise is another


def test_weathers_look_different() -> None:
    mean = {w: render_scene(replace(sample_scene(1, w), sensor=PURE)).mean() for w in ("clear", "night")}
    assert mean["night"] < 0.5 * mean["clear"]
    fog = render_scene(scene_at((-1500.0, 0.0, 95.0), weather="fog", visibility=1e3))
    clear = render_scene(scene_at((-1500.0, 0.0, 95.0), weather="clear", visibility=6e4))
    assert fog.std() < 0.5 * clear.std()


def test_lights_shine_where_they_stand() -> None:
    scene = replace(sample_scene(1, "night", SceneSettings(distance=(900, 1100))), sensor=PURE)
    lit, dark = radiance(scene), radiance(replace(scene, lights=0.0))
    added = (lit - dark).sum(0)
    corners = runway_pixels(scene, scene.runway)
    mask = np.zeros(added.shape, np.uint8)
    cv2.polylines(mask, [np.rint(corners).astype(np.int32)], True, 1, 9)
    assert added[mask > 0].sum() > 0.3 * added[int(corners[:, 1].min()) - 3 : int(corners[:, 1].max()) + 3].sum()


def test_noise_grows_with_the_sensor_setting() -> None:
    scene = scene_at((-2000.0, 0.0, 120.0))
    light = radiance(scene)
    clean = develop(light, scene).astype(float)
    noisy = develop(light, replace(scene, sensor=replace(PURE, noise=0.03))).astype(float)
    inside = (clean > 40) & (clean < 215)
    assert abs((noisy - clean)[inside].std() / (0.03 * 255) - 1) < 0.05


def test_other_cameras_work() -> None:
    distorted = replace(Camera.from_fov(320, 192, np.radians(40)), distortion=(-0.1, 0.02, 0.0, 0.0, 0.0))
    assert render_scene(sample_scene(1, "clear", SceneSettings(camera=distorted))).shape == (192, 320, 3)
