"""Lines in addition to corners: Jacobians, positions, and the gain in simulated solves."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halopose.errors import HaloposeError
from halopose.geometry.attitude import solve_with_attitude
from halopose.geometry.camera import INTRINSICS, Camera, exp_so3, look_at, perturb, project_points
from halopose.geometry.lines import Lines, line_intrinsics_jacobian, line_residuals, lines_of_corners
from halopose.geometry.observations import Observations
from halopose.types import Array
from tests.helpers.approaches import RECTANGLE_EDGES, rectangle

PLAIN = Camera(1200.0, 1190.0, 319.5, 191.5, 640, 384)
BENT = Camera(1200.0, 1190.0, 319.5, 191.5, 640, 384, (-0.2, 0.05, 1e-3, -5e-4, 0.0))
CORNERS = rectangle(2500.0, 45.0)
EDGES = np.asarray(RECTANGLE_EDGES)


def view(distance: float = 1500.0, roll: float = 0.05) -> tuple[Array, Array]:
    position = np.array([[-distance, 0.01 * distance, 0.055 * distance + 10]])
    return look_at(position, [300.0, 0.0, 0.0], roll), position


def between(camera: Camera, rotation: Array, position: Array, shares: tuple[float, float] = (0.2, 0.7)) -> Array:
    """Where each line is truly seen (N, 3, 2, 2), at shares of its length on the ground."""
    ends = CORNERS[EDGES]
    places = np.stack([ends[:, 0] + share * (ends[:, 1] - ends[:, 0]) for share in shares], axis=1)
    pixels = project_points(camera, rotation, position, places.reshape(-1, 3))
    return pixels.reshape(len(position), 3, 2, 2)


def seen(camera: Camera, rotation: Array, position: Array, sigma: float = 0.3) -> Lines:
    stations = between(camera, rotation, position)
    spread = np.broadcast_to(sigma**2 * np.eye(6), (len(position), 6, 6))
    return Lines(stations, spread, CORNERS[EDGES])


@pytest.mark.parametrize("camera", [PLAIN, BENT])
def test_points_on_a_line_lie_on_it_through_any_lens(camera: Camera) -> None:
    residual, _ = line_residuals(camera, *view(), seen(camera, *view()))
    np.testing.assert_allclose(residual, 0, atol=1e-6)


@given(st.integers(0, 2**32), st.floats(400.0, 5000.0))
def test_jacobians_are_central_differences(seed: int, distance: float) -> None:
    rng = np.random.default_rng(seed)
    rotation, position = view(distance)
    lines = seen(PLAIN, rotation, position)
    lines = Lines(lines.stations + rng.normal(0, 2, lines.stations.shape), lines.covariance, lines.ends)
    _, jacobian = line_residuals(PLAIN, rotation, position, lines)
    change = rng.normal(size=(1, 6)) * ([1e-2] * 3 + [1e-6] * 3)
    low, high = (line_residuals(PLAIN, *perturb(rotation, position, s * change), lines)[0] for s in (-1, 1))
    expected = -2 * (jacobian @ change[..., None])[..., 0]
    np.testing.assert_allclose(high - low, expected, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("parameter", range(4))
def test_lines_move_with_the_camera_as_points_on_them_do(parameter: int) -> None:
    name = INTRINSICS[parameter]
    moved = replace(PLAIN, **{name: getattr(PLAIN, name) + 1e-3})
    rotation, position = view()
    lines = seen(PLAIN, rotation, position)
    change = -line_residuals(moved, rotation, position, lines)[0] / 1e-3  # the line moves, the station does not
    expected = line_intrinsics_jacobian(PLAIN, rotation, position, lines)[..., parameter]
    np.testing.assert_allclose(change, expected, atol=1e-5)


def test_lines_of_corners_carry_the_joint_distribution_of_the_corners() -> None:
    """Simulated corners: their distances across the true lines have the stated covariance."""
    rng = np.random.default_rng(1)
    rotation, position = view()
    root = rng.normal(size=(8, 8)) * 0.2 + 0.5 * np.eye(8)
    exact = project_points(PLAIN, rotation, position, CORNERS)
    pixels = exact + (rng.normal(size=(20_000, 8)) @ root.T).reshape(-1, 4, 2)
    joint = np.broadcast_to(root @ root.T, (len(pixels), 8, 8))
    turned, placed = (np.repeat(each, len(pixels), axis=0) for each in (rotation, position))
    lines = lines_of_corners(pixels, joint, CORNERS, RECTANGLE_EDGES)
    found, _ = line_residuals(PLAIN, turned, placed, lines)
    stated = lines_of_corners(exact, joint[:1], CORNERS, RECTANGLE_EDGES).covariance[0]
    np.testing.assert_allclose(np.cov(found.T), stated, atol=0.05 * np.diagonal(stated).max())


def test_four_corners_equal_four_points_of_independent_covariance() -> None:
    spread = np.broadcast_to(np.diag([1.0, 4.0]), (1, 4, 2, 2))
    one = lines_of_corners(project_points(PLAIN, *view(), CORNERS), spread, CORNERS, RECTANGLE_EDGES)
    joint = np.zeros((1, 8, 8))
    joint[0] = np.diag([1.0, 4.0] * 4)
    other = lines_of_corners(project_points(PLAIN, *view(), CORNERS), joint, CORNERS, RECTANGLE_EDGES)
    np.testing.assert_allclose(one.covariance, other.covariance)


@pytest.mark.parametrize("uncertain", [False, True])
def test_solves_with_lines_have_their_stated_spread(uncertain: bool) -> None:
    """2,000 simulated frames at 1.5 km: corners of 2 px, side edges and threshold of 0.3 px at two stations."""
    rng, count = np.random.default_rng(3), 2000
    rotation, position = view()
    rotation, position = (np.repeat(each, count, axis=0) for each in (rotation, position))
    attitude = 1e-6 * np.eye(3)
    given = rotation @ exp_so3(1e-3 * rng.normal(size=(count, 3)))
    lens = np.diag([1.0, 1.0, 0.3, 0.3, 0, 0, 0, 0, 0]) if uncertain else None
    pixels = project_points(PLAIN, rotation, position, CORNERS) + 2 * rng.normal(size=(count, 4, 2))
    spread = np.broadcast_to(4 * np.eye(2), (count, 4, 2, 2))
    exact = seen(PLAIN, rotation, position)
    lines = Lines(exact.stations + 0.3 * rng.normal(size=exact.stations.shape), exact.covariance, exact.ends)
    if lens is not None:  # one lens for all frames would be one draw: every frame has its own, to first order
        wrong = rng.normal(size=(count, 9)) * np.sqrt(np.diagonal(lens))
        by_points = np.zeros((count, 4, 2, 9))
        away = (pixels - (PLAIN.cx, PLAIN.cy)) / (PLAIN.fx, PLAIN.fy)
        by_points[..., 0, 0], by_points[..., 1, 1] = away[..., 0], away[..., 1]
        by_points[..., 0, 2] = by_points[..., 1, 3] = 1.0
        pixels = pixels + (by_points @ wrong[:, None, :, None])[..., 0]
        off = (lines.stations - (PLAIN.cx, PLAIN.cy)) / (PLAIN.fx, PLAIN.fy)
        shift = off * wrong[:, None, None, :2] + wrong[:, None, None, 2:4]
        lines = Lines(lines.stations + shift, lines.covariance, lines.ends)
    frames = PLAIN, CORNERS, pixels, spread, given, attitude
    alone = solve_with_attitude(Observations(*frames, intrinsics_covariance=lens))
    both = solve_with_attitude(Observations(*frames, intrinsics_covariance=lens, lines=lines))
    assert both.converged.all()
    assert (both.dof == 11).all()
    error = both.position - position
    distance = np.einsum("ni,nij,nj->n", error, np.linalg.inv(both.covariance[:, :3, :3]), error)
    assert 0.93 < (distance < 7.815).mean() < 0.97
    assert 10.3 < both.cost.mean() < 11.7
    without = np.sqrt(np.square(alone.position - position).sum(1).mean())
    assert np.sqrt(np.square(error).sum(1).mean()) < 0.6 * without


def test_wrong_shapes_are_one_line_errors() -> None:
    with pytest.raises(HaloposeError, match="lines take stations"):
        Lines(np.zeros((1, 3, 2, 2)), np.zeros((1, 3, 3)), np.zeros((3, 2, 3)))
