"""First poses against the truth of exact pixels and both poses of OpenCV's IPPE."""

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halopose.geometry import pnp
from halopose.geometry.camera import Camera
from halopose.geometry.observations import Observations
from halopose.geometry.pnp import collinear, first_poses, principal, with_linear_position
from halopose.types import Array
from tests.helpers.approaches import CAMERA, CORNERS, LENS, sight

SEEDS = st.integers(0, 2**32 - 1)
SOLID = np.concatenate([CORNERS, [[300.0, 200.0, 60.0], [900.0, -150.0, 90.0]]])


def posed(camera: Camera, points: Array, pixels: Array, covariance: Array) -> tuple[Array, Array]:
    """The first poses of frames as rotations (M, 3, 3) and positions (M, 3)."""
    problem, failure = pnp._prepare(Observations(camera, points, pixels, covariance), 4)
    repeated, first = first_poses(problem, *principal(problem), failure > 0)
    rotation, centre = first.unpacked()
    return rotation.transpose(2, 0, 1), (repeated.centre - np.einsum("ijn,in->jn", rotation, centre)).T


@given(SEEDS, st.sampled_from([500.0, 1500.0, 4000.0]), st.booleans())
def test_exact_pixels_of_a_plane_start_at_the_exact_pose(seed: int, distance: float, distorted: bool) -> None:
    camera = LENS if distorted else CAMERA
    seen = sight(distance, 1, np.random.default_rng(seed), camera=camera)
    rotations, positions = posed(camera, CORNERS, seen.exact[None], seen.covariance)
    assert len(rotations) == 2  # the second one is NaN if its points would lie behind the camera
    best = np.nanargmin(np.abs(rotations - seen.rotation).max((1, 2)))
    np.testing.assert_allclose(rotations[best], seen.rotation, atol=1e-6)
    np.testing.assert_allclose(positions[best], seen.position, rtol=1e-5)


@given(SEEDS)
def test_both_rotations_of_a_plane_equal_opencv(seed: int) -> None:
    seen = sight(1500.0, 1, np.random.default_rng(seed))
    rotations, _ = posed(CAMERA, CORNERS, seen.pixels, seen.covariance)
    _, vectors, _, _ = cv2.solvePnPGeneric(CORNERS, seen.pixels[0], CAMERA.matrix, None, flags=cv2.SOLVEPNP_IPPE)
    for vector in vectors:
        assert np.abs(rotations - cv2.Rodrigues(vector)[0]).max((1, 2)).min() < 1e-5


def test_points_that_are_no_plane_have_one_pose() -> None:
    seen = sight(1500.0, 3, np.random.default_rng(1), points=SOLID)
    rotations, positions = posed(CAMERA, SOLID, np.tile(seen.exact, (3, 1, 1)), seen.covariance)
    np.testing.assert_allclose(rotations, seen.rotations, atol=1e-6)
    np.testing.assert_allclose(positions, np.tile(seen.position, (3, 1)), rtol=1e-4)


@given(SEEDS)
def test_the_true_rotation_has_the_true_position(seed: int) -> None:
    seen = sight(1500.0, 1, np.random.default_rng(seed))
    problem, _ = pnp._prepare(Observations(CAMERA, CORNERS, seen.exact[None], seen.covariance), 2)
    rotation, centre = with_linear_position(problem, seen.rotation[..., None]).unpacked()
    position = problem.centre[:, 0] - rotation[..., 0].T @ centre[:, 0]
    np.testing.assert_allclose(position, seen.position, rtol=1e-6)


@pytest.mark.parametrize(
    ("points", "line"),
    [(CORNERS, False), (SOLID[:4], False), (np.linspace(0, 1, 4)[:, None] * [2500.0, 45.0, 0.0], True)],
)
def test_collinear_points_are_detected(points: Array, line: bool) -> None:
    seen = sight(1500.0, 2, np.random.default_rng(2))
    problem, _ = pnp._prepare(Observations(CAMERA, points, seen.pixels, seen.covariance), 4)
    extent, axes = principal(problem)
    assert (collinear(extent) == line).all()
    np.testing.assert_allclose(np.square(np.einsum("jin,jkn->ikn", axes, problem.points)).mean(1), extent, atol=1e-6)
