"""Camera effects: the lens against OpenCV, uncovered corners, and a visible effect of each option."""

from dataclasses import replace

import cv2
import numpy as np
import pytest

from halopose.geometry.camera import Camera
from halopose.landing.world.camera_effects import as_recorded, through_lens
from halopose.landing.world.footage_style import Footage, pinhole_for
from halopose.landing.world.render import radiance, render_scene
from halopose.landing.world.scenes import CameraSensor, Scene, SceneSettings, corners_in_image, sample_scene

CAMERA = replace(Camera.from_fov(320, 192, np.radians(40)), distortion=(-0.3, 0.0, 0.0, 0.0, 0.0))


def scene_with(footage: Footage, camera: Camera | None = None, seed: int = 4) -> Scene:
    camera = camera or Camera.from_fov(320, 192, np.radians(30))
    scene = sample_scene(seed, "clear", SceneSettings(camera=camera, distance=(900.0, 1500.0)))
    return replace(scene, footage=footage, sensor=CameraSensor(noise=0.0), parallel=None)


def test_a_lens_bends_as_opencv_says() -> None:
    """Dots drawn in a pinhole picture are found where OpenCV projects their rays with the distortion."""
    pinhole = pinhole_for(CAMERA)
    light = np.zeros((3, pinhole.height, pinhole.width), np.float32)
    rays = np.array([(-0.2, -0.1), (0.0, 0.0), (0.25, 0.12), (-0.28, 0.16)])
    for x, y in rays:
        dot = (round(16 * (x * pinhole.fx + pinhole.cx)), round(16 * (y * pinhole.fy + pinhole.cy)))
        cv2.circle(light[1], dot, 3 * 16, 1.0, -1, cv2.LINE_8, 4)
    seen = through_lens(light, pinhole, CAMERA)[1]
    points = np.column_stack([rays, np.ones(4)])
    expected, _ = cv2.projectPoints(points, np.zeros(3), np.zeros(3), CAMERA.matrix, np.array(CAMERA.distortion))
    for u, v in expected[:, 0]:
        part = seen[round(v) - 6 : round(v) + 7, round(u) - 6 : round(u) + 7]
        rows, columns = np.mgrid[round(v) - 6 : round(v) + 7, round(u) - 6 : round(u) + 7]
        assert (part * columns).sum() / part.sum() == pytest.approx(u, abs=0.4)
        assert (part * rows).sum() / part.sum() == pytest.approx(v, abs=0.4)


def test_corners_of_a_distorted_runway_are_where_the_labels_say() -> None:
    """The runway's near end, by the light that a distorted camera sees with and without a runway."""
    scene = scene_with(Footage(), CAMERA)
    corners = corners_in_image(scene)[0]
    away = np.abs(radiance(scene) - radiance(replace(scene, bare=True))).sum(0)
    inside, outside = (corners[:2].mean(0) + np.array([0.0, down]) for down in (-2.0, 25.0))
    assert away[round(inside[1]), round(inside[0])] > 10 * max(away[round(outside[1]), round(outside[0])], 1e-3)


@pytest.mark.parametrize(
    "footage",
    [
        Footage(frame=1),
        Footage(frame=2),
        Footage(frame=3),
        Footage(frame=4),
        Footage(glare=0.2),
        Footage(drops=60),
        Footage(dust=8),
        Footage(grey=True),
        Footage(contrast=1.0),
        Footage(tone=1.5),
        Footage(sharpening=1.0),
        Footage(scale=0.5),
        Footage(quality=20),
        Footage(text=True),
        Footage(wear=0.8),
        Footage(shoulder=20.0),
        Footage(lightness=0.9, shoulder=20.0),
        Footage(roads=8),
        Footage(buildings=150),
        Footage(slope=0.012),
    ],
    ids=lambda footage: next(name for name, value in vars(footage).items() if value != vars(Footage())[name]),
)
def test_each_addition_shows_and_is_the_same_again(footage: Footage) -> None:
    scenes = [scene_with(footage, seed=seed) for seed in range(4, 9)]
    pictures = [render_scene(scene) for scene in scenes]
    plain = [render_scene(replace(scene, footage=Footage())) for scene in scenes]
    changed = [float((a != b).mean()) for a, b in zip(pictures, plain, strict=True)]
    assert max(changed) > 5e-4
    np.testing.assert_array_equal(render_scene(scenes[0]), pictures[0])
    if footage.grey:
        assert (pictures[0] == pictures[0][..., :1]).all()


def test_nothing_covers_a_runway() -> None:
    """Cockpits, wipers and letters do not change the pixels around any corner."""
    for seed in range(30):
        scene = scene_with(Footage(frame=1 + seed % 4, text=True), seed=seed)
        image = np.full((192, 320, 3), 128, np.uint8)
        recorded = as_recorded(image, scene)
        for u, v in corners_in_image(scene)[0]:
            around = recorded[max(int(v) - 3, 0) : int(v) + 4, max(int(u) - 3, 0) : int(u) + 4]
            assert np.abs(around.astype(int) - 128).max() <= 3
