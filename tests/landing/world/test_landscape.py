"""Textures: periodic, prefiltered without changing their mean, and the same in every process."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from halopose.landing.world.landscape import landscape, noise_texture, sample, spectral_noise
from halopose.types import Array


def points(rng: np.random.Generator, size: float, shape: tuple[int, ...] = (12, 17)) -> Array:
    return rng.uniform(0, size, (2, *shape)).astype(np.float32)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(-3, 3), st.integers(-3, 3), st.floats(-2, 9))
def test_a_texture_repeats(seed: int, turns_x: int, turns_y: int, fineness: float) -> None:
    texture = noise_texture(2.0, 1.0)
    x, y = points(np.random.default_rng(seed), 1024.0)
    level = np.full_like(x, fineness)
    moved = sample(texture, x + 1024.0 * turns_x, y + 1024.0 * turns_y, level)
    np.testing.assert_allclose(moved, sample(texture, x, y, level), atol=0.15 * 2 ** -max(fineness - 1, 0) + 0.02)


def test_texel_centres_give_the_texels() -> None:
    texture = noise_texture(2.0, 1.0)
    row, column = np.mgrid[100:110, 40:60].astype(np.float32)
    at = sample(texture, 2 * column, 2 * row, np.zeros_like(row))
    np.testing.assert_allclose(at, texture.levels[0][100:110, 40:60], atol=1e-5)


def test_a_wide_footprint_is_the_mean_along_x() -> None:
    texture = noise_texture(2.0, 1.0)
    for number, level in enumerate(texture.levels):
        block = texture.levels[0].reshape(512, -1, 2**number).mean(2)
        np.testing.assert_allclose(level, block, atol=1e-5)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 2.5))
def test_noise_has_unit_variance_and_no_mean(seed: int, slope: float) -> None:
    noise = spectral_noise(np.random.default_rng(seed), slope, 64)
    assert abs(noise.mean()) < 1e-5
    assert abs(noise.std() - 1) < 1e-5


def test_a_landscape_is_made_alike_each_time() -> None:
    first = landscape(0).levels[0].copy()
    landscape.cache_clear()
    np.testing.assert_array_equal(landscape(0).levels[0], first)
    assert first.std() > 5  # it has structure
