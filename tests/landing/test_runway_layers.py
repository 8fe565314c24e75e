"""The runway as layers, aligned with rendered scenes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from halopose.geometry.observations import Observations
from halopose.geometry.plane_alignment import Alignment, GroundPoints, Lights, align_model
from halopose.geometry.pnp import solve_position
from halopose.landing.runway_layers import RunwayLayers
from halopose.landing.world.render import render_scene
from halopose.landing.world.scenes import Scene, Weather, runway_pixels, sample_scene


def refined(scene: Scene, lights: Lights = "auto") -> tuple[Alignment, float]:
    """Alignment from corners with errors of 1.2 px, and the along-track error of the corners alone."""
    rotation, eye = scene.camera_pose()
    corners = runway_pixels(scene, scene.runway) + np.random.default_rng(scene.seed).normal(0, 1.2, (4, 2))
    spread = np.broadcast_to(1.44 * np.eye(2), (1, 4, 2, 2))
    start = solve_position(Observations(scene.camera, scene.runway.corners(), corners[None], spread, rotation[None]))
    model = RunwayLayers(scene.runway.length, scene.runway.width)
    position, covariance = start.position[0], start.covariance[0][:3, :3]
    found = align_model(render_scene(scene), scene.camera, rotation, position, covariance, model, lights=lights)
    return found, float(position[0] - eye[0])


@pytest.mark.parametrize(
    ("seed", "weather", "lights", "limit"),
    [(9_100_028, "clear", "auto", 3.0), (9_100_061, "haze", "auto", 6.0), (9_100_091, "night", "on", 3.0)],
)
def test_alignment_errs_by_metres_where_corners_err_by_tens(
    seed: int, weather: Weather, lights: Lights, limit: float
) -> None:
    scene = sample_scene(seed, weather)
    found, before = refined(scene, lights)
    error = found.position - scene.camera_pose()[1]
    assert found.accepted
    assert abs(error[0]) < limit < abs(before)
    assert error @ np.linalg.solve(found.covariance, error) < 16.3  # 99.9 %


def test_a_scene_without_a_runway_keeps_the_prior() -> None:
    scene = sample_scene(9_100_028, "clear")
    found, _ = refined(replace(scene, bare=True))
    assert not found.accepted


@pytest.mark.parametrize(("length", "width"), [(1800.0, 30.0), (2500.0, 45.0), (3200.0, 60.0), (1500.0, 23.0)])
def test_main_layers_cover_every_pixel_exactly_once(length: float, width: float) -> None:
    rng = np.random.default_rng(3)
    x, y = rng.uniform(-100, length + 100, 4000), rng.uniform(-width, width, 4000)
    blur = np.exp(rng.uniform(-2, 3, (2, 4000)))
    layers = RunwayLayers(length, width).layers(GroundPoints(x, y, *blur, *blur))
    total = sum(layer.coverage for layer in layers if layer.spread >= 1)
    np.testing.assert_allclose(total, 1, atol=1e-12)
    assert min(layer.coverage.min() for layer in layers) > -0.02  # rows of bars overlap a little where they are blurred
