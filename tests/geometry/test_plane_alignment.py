"""Alignment of layered planes, on pictures rendered by supersampling, which share no code with the alignment."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pytest

from halopose.errors import HaloposeError
from halopose.geometry.camera import Camera, exp_so3, look_at
from halopose.geometry.plane_alignment import (
    Alignment,
    GroundPoints,
    LampRow,
    Layer,
    align_model,
)
from halopose.types import Array, Mask

CAMERA = Camera.from_fov(320, 240, np.radians(50))
EYE = np.array([-14.0, 3.0, 9.0])
ROTATION = look_at(EYE, (0.0, 0.0, 0.0))
SPREAD = np.diag(np.square([0.35, 0.15, 0.25]))
SIDE, BARS = 8.0, (((-3.0, 3.0), (-2.5, -1.5)), ((-3.0, 3.0), (1.5, 2.5)), ((-0.5, 0.5), (-1.5, 1.5)))


class HeliPad:
    """A square pad with a white H."""

    lamps: Sequence[LampRow] = ()

    @cached_property
    def corners(self) -> Array:
        half = SIDE / 2
        return np.array([(-half, half, 0.0), (-half, -half, 0.0), (half, -half, 0.0), (half, half, 0.0)])

    def informative(self, ground: GroundPoints, band: float) -> Mask:
        reach = band * np.maximum(ground.pixel_x, ground.pixel_y)
        return np.asarray(np.maximum(np.abs(ground.x), np.abs(ground.y)) < SIDE / 2 + reach)

    def layers(self, ground: GroundPoints) -> list[Layer]:
        pad = ground.x_share(-SIDE / 2, SIDE / 2) * ground.y_share(-SIDE / 2, SIDE / 2)
        paint = sum(ground.x_share(*x) * ground.y_share(*y) for x, y in BARS)
        return [Layer(1 - pad, 4), Layer(pad - paint, 2), Layer(np.asarray(paint), 1)]


def picture(seed: int, *, contrast: float = 1.0, fine: int = 5) -> Array:
    """The pad from ``EYE``: rays through a grid of points in every pixel, averaged, then noise."""
    steps = (np.arange(fine) + 0.5) / fine - 0.5
    v, u = np.mgrid[0 : CAMERA.height, 0 : CAMERA.width].astype(float)
    light = np.zeros((CAMERA.height, CAMERA.width, 3))
    for du in steps:
        for dv in steps:
            ray = np.stack([(u + du - CAMERA.cx) / CAMERA.fx, (v + dv - CAMERA.cy) / CAMERA.fy, np.ones_like(u)], -1)
            along = ray @ ROTATION
            reach = -EYE[2] / np.minimum(along[..., 2], -1e-9)
            x, y = EYE[0] + reach * along[..., 0], EYE[1] + reach * along[..., 1]
            tone = np.where(np.maximum(np.abs(x), np.abs(y)) < SIDE / 2, 0.1, 0.3)
            for (x0, x1), (y0, y1) in BARS:
                tone = np.where((x > x0) & (x < x1) & (y > y0) & (y < y1), 0.7, tone)
            light += (0.3 + contrast * (tone - 0.3))[..., None] * (0.9, 1.0, 1.1) / fine**2
    noisy = np.sqrt(light) + np.random.default_rng(seed).normal(0, 0.01, light.shape)
    return np.rint(np.clip(noisy, 0, 1) * 255).astype(np.uint8)


def aligned(seed: int, image: Array, **options: object) -> Alignment:
    start = EYE + np.sqrt(np.diag(SPREAD)) * np.random.default_rng([seed, 1]).standard_normal(3)
    return align_model(image, CAMERA, ROTATION, start, SPREAD, HeliPad(), **options)  # type: ignore[arg-type]


def test_positions_become_exact_and_their_covariance_holds() -> None:
    found = [aligned(seed, picture(seed)) for seed in range(4)]
    errors = np.array([each.position - EYE for each in found])
    nees = [e @ np.linalg.solve(each.covariance, e) for e, each in zip(errors, found, strict=True)]
    assert all(each.accepted for each in found)
    assert np.abs(errors).max() < 0.05  # the prior errs by 0.15 to 0.35
    assert np.mean(nees) < 7.81


def test_an_uncertain_attitude_widens_the_covariance() -> None:
    image, turn = picture(7), 2e-3
    exact = aligned(7, image)
    wrong = ROTATION @ exp_so3(turn * np.array([0.5, -1.0, 0.8]))
    found = align_model(
        image, CAMERA, wrong, exact.position, SPREAD, HeliPad(), attitude_covariance=turn**2 * np.eye(3)
    )
    error = found.position - EYE
    assert error @ np.linalg.solve(found.covariance, error) < 16.3
    assert np.linalg.det(found.covariance) > np.linalg.det(exact.covariance)


@pytest.mark.parametrize(
    ("image", "word"),
    [
        (picture(1, contrast=0.0), "stand out"),
        (np.zeros((CAMERA.height, CAMERA.width, 3), np.uint8), "stand out"),
    ],
)
def test_the_prior_stays_where_no_borders_are_seen(image: Array, word: str) -> None:
    start = EYE + 0.1
    found = align_model(image, CAMERA, ROTATION, start, SPREAD, HeliPad())
    assert not found.accepted
    assert word in found.reason
    np.testing.assert_array_equal(found.position, start)
    np.testing.assert_array_equal(found.covariance, SPREAD)


def test_a_target_outside_the_image_is_refused() -> None:
    away = look_at(EYE, EYE + np.array([-10.0, 0.0, 1.0]))
    found = align_model(picture(1), CAMERA, away, EYE, SPREAD, HeliPad())
    assert "pixels" in found.reason


def test_an_image_of_another_size_is_an_error() -> None:
    with pytest.raises(HaloposeError, match="240, 320"):
        align_model(np.zeros((10, 10, 3), np.uint8), CAMERA, ROTATION, EYE, SPREAD, HeliPad())
