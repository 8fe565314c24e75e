"""PnP against scipy's minimum and OpenCV, its spread against the stated covariance, and refused inputs."""

from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import least_squares
from scipy.stats import chi2

from halopose.errors import HaloposeError
from halopose.geometry.camera import Camera, look_at, perturb, pose_difference, project_points
from halopose.geometry.observations import Observations
from halopose.geometry.pnp import Failure, Solution, solve_pose, solve_position
from halopose.types import Array
from tests.helpers.approaches import CAMERA, CORNERS, LENS, covariances, rectangle, sight

SEEDS = st.integers(0, 2**32 - 1)
DISTANCES = [500.0, 1500.0, 4000.0]
MANY = np.concatenate([CORNERS, [[400.0, 0.0, 0.0], [900.0, 10.0, 0.0]]])  # six points of a plane
SOLID = np.concatenate([CORNERS, [[300.0, 200.0, 60.0], [900.0, -150.0, 90.0]]])


def scaled_distance(solution: Solution, frame: int, position: Array) -> float:
    """Largest offset of a position in standard deviations of the solution."""
    deviation = np.sqrt(np.diag(solution.covariance[frame])[:3])
    return np.abs((solution.position[frame] - position) / deviation).max()


def cost_of(
    camera: Camera,
    points: Array,
    seen: Array,
    covariance: Array,
    rotation: Array,
    position: Array,
    nu: Array | None = None,
) -> float:
    """Chi-square or its Student-t counterpart of a pose, straight from the definition."""
    residual = seen - project_points(camera, rotation, position, points)
    distance = np.einsum("ki,kij,kj->k", residual, np.linalg.inv(covariance), residual)
    return np.sum(distance if nu is None else (nu + 2) * np.log1p(distance / nu))


def scipy_minimum(
    camera: Camera,
    points: Array,
    seen: Array,
    covariance: Array,
    rotation: Array,
    position: Array,
    free: int,
    nu: Array | None = None,
) -> tuple[Array, float]:
    """Position and cost of least cost near a pose, by scipy's least squares with numeric derivatives."""
    factor = np.linalg.inv(np.linalg.cholesky(covariance))

    def residuals(change: Array) -> Array:
        moved = perturb(rotation, position, np.concatenate([change, np.zeros(6 - free)]))
        white = (factor @ (seen - project_points(camera, *moved, points))[..., None])[..., 0]
        if nu is None:
            return white.ravel()
        distance = np.square(white).sum(1)  # the same direction, but the length that the Student-t gives it
        return (white * np.sqrt((nu + 2) * np.log1p(distance / nu) / distance)[:, None]).ravel()

    away = np.array([20.0, 1.0, 1.0, 1e-3, 1e-3, 1e-3])[:free]
    best = least_squares(residuals, away, x_scale=away, jac="3-point", xtol=1e-12, ftol=1e-14, gtol=1e-12)
    return position + best.x[:3], 2 * best.cost


# --- the minimum ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("camera", [CAMERA, LENS])
def test_exact_pixels_give_the_exact_pose(distance: float, camera: Camera) -> None:
    seen = sight(distance, 1, np.random.default_rng(0), camera=camera)
    for solution in (
        solve_pose(Observations(camera, CORNERS, seen.exact[None], seen.covariance)),
        solve_position(Observations(camera, CORNERS, seen.exact[None], seen.covariance, seen.rotations)),
    ):
        assert solution.reasons == ["solved"]
        np.testing.assert_allclose(solution.position[0], seen.position, atol=1e-6)
        np.testing.assert_allclose(solution.rotation[0], seen.rotation, atol=1e-9)
        assert solution.cost[0] < 1e-12


@settings(max_examples=15)
@given(SEEDS, st.sampled_from(DISTANCES), st.booleans(), st.sampled_from([None, 4.0]))
def test_the_minimum_equals_scipy(seed: int, distance: float, distorted: bool, nu: Array | None) -> None:
    camera = LENS if distorted else CAMERA
    seen = sight(distance, 1, np.random.default_rng(seed), high=0.6, camera=camera)
    tails = None if nu is None else np.full(4, nu)
    for free, solution in (
        (6, solve_pose(Observations(camera, CORNERS, seen.pixels, seen.covariance, nu=tails))),
        (3, solve_position(Observations(camera, CORNERS, seen.pixels, seen.covariance, seen.rotations, nu=tails))),
    ):
        frame = (camera, CORNERS, seen.pixels[0], seen.covariance[0])
        pose = (solution.rotation[0], solution.position[0])
        position, cost = scipy_minimum(*frame, *pose, free, tails)
        assert solution.cost[0] == pytest.approx(cost_of(*frame, *pose, tails), rel=1e-5, abs=1e-6)
        assert solution.cost[0] <= cost * (1 + 1e-5) + 1e-6
        assert scaled_distance(solution, 0, position) < 1e-3


def test_equal_weights_without_noise_in_the_model_equal_opencv() -> None:
    seen = sight(1500.0, 20, np.random.default_rng(3), low=0.5, high=0.5)
    solution = solve_pose(Observations(CAMERA, CORNERS, seen.pixels, seen.covariance))
    for frame, pixels in enumerate(seen.pixels):
        _, vector, offset = cv2.solvePnP(CORNERS, pixels, CAMERA.matrix, None, flags=cv2.SOLVEPNP_IPPE)
        vector, offset = cv2.solvePnPRefineLM(CORNERS, pixels, CAMERA.matrix, None, vector, offset)
        position = -cv2.Rodrigues(vector)[0].T @ offset[:, 0]
        assert scaled_distance(solution, frame, position) < 0.02


def test_points_off_a_plane_start_from_opencv() -> None:
    seen = sight(1500.0, 5, np.random.default_rng(4), points=SOLID)
    solution = solve_pose(Observations(CAMERA, SOLID, seen.pixels, seen.covariance))
    assert solution.converged.all()
    assert (solution.dof == 6).all()
    assert max(scaled_distance(solution, frame, seen.position) for frame in range(5)) < 5


def test_a_runway_that_is_not_quite_flat() -> None:
    bent = CORNERS + np.array([0.0, 0.4, 12.0, 11.0])[:, None] * [0.0, 0.0, 1.0]
    seen = sight(1500.0, 1, np.random.default_rng(4), points=bent)
    solution = solve_pose(Observations(CAMERA, bent, seen.exact[None], seen.covariance))
    np.testing.assert_allclose(solution.position[0], seen.position, atol=1e-5)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_two_corners_suffice_with_the_attitude_given(count: int) -> None:
    seen = sight(1500.0, 1, np.random.default_rng(5))
    mask = np.arange(4)[None] < count
    solution = solve_position(
        Observations(CAMERA, CORNERS, seen.exact[None], seen.covariance, seen.rotations, mask=mask)
    )
    np.testing.assert_allclose(solution.position[0], seen.position, atol=1e-6)
    assert solution.dof[0] == 2 * count - 3


# --- one code for any number of frames --------------------------------------------------------------------


@pytest.mark.parametrize("distance", DISTANCES)
def test_a_frame_alone_equals_the_frame_in_a_batch(distance: float) -> None:
    seen = sight(distance, 250, np.random.default_rng(6))
    solvers: tuple[Callable[..., Solution], ...] = (
        lambda pixels, covariance, rotation: solve_pose(Observations(CAMERA, CORNERS, pixels, covariance)),
        lambda pixels, covariance, rotation: solve_position(
            Observations(CAMERA, CORNERS, pixels, covariance, rotation)
        ),
    )
    for solve in solvers:
        batch = solve(seen.pixels, seen.covariance, seen.rotations)
        for frame in range(0, 250, 10):
            part = slice(frame, frame + 1)
            alone = solve(seen.pixels[part], seen.covariance[part], seen.rotations[part])
            assert scaled_distance(batch, frame, alone.position[0]) < 1e-6
            np.testing.assert_allclose(alone.covariance[0], batch.covariance[frame], rtol=1e-5, atol=1e-12)
            np.testing.assert_allclose(alone.cost[0], batch.cost[frame], rtol=1e-7)
            np.testing.assert_allclose(alone.alternative.cost[0], batch.alternative.cost[frame], rtol=1e-4)


def test_a_mask_equals_leaving_the_point_out() -> None:
    rng = np.random.default_rng(7)
    seen = sight(1500.0, 8, rng, points=MANY)
    mask = np.ones((8, 6), dtype=bool)
    mask[:, 5] = False
    masked = solve_pose(
        Observations(CAMERA, MANY, np.where(mask[..., None], seen.pixels, np.nan), seen.covariance, mask=mask)
    )
    without = solve_pose(Observations(CAMERA, MANY[:5], seen.pixels[:, :5], seen.covariance[:, :5]))
    np.testing.assert_allclose(masked.position, without.position, rtol=1e-6)
    np.testing.assert_allclose(masked.covariance, without.covariance, rtol=1e-5, atol=1e-12)
    assert (masked.dof == 4).all()


def test_no_frames_give_no_answers() -> None:
    empty = (np.zeros((0, 4, 2)), np.zeros((0, 4, 2, 2)))
    for solution in (
        solve_pose(Observations(CAMERA, CORNERS, *empty)),
        solve_position(Observations(CAMERA, CORNERS, *empty, np.zeros((0, 3, 3)))),
    ):
        assert solution.position.shape == (0, 3)
        assert solution.covariance.shape == (0, 6, 6)
        assert solution.reasons == []


def test_planes_and_other_points_may_share_a_batch() -> None:
    seen = sight(1500.0, 3, np.random.default_rng(23), points=SOLID)
    mask = np.ones((3, 6), dtype=bool)
    mask[1, 4:] = False  # only the corners
    mask[2, 2:] = False
    solution = solve_pose(Observations(CAMERA, SOLID, np.tile(seen.exact, (3, 1, 1)), seen.covariance, mask=mask))
    assert solution.failure.tolist() == [0, 0, Failure.TOO_FEW_POINTS]
    np.testing.assert_allclose(solution.position[:2], np.tile(seen.position, (2, 1)), atol=1e-5)


def test_every_frame_may_have_its_own_runway() -> None:
    rng = np.random.default_rng(8)
    seen = sight(1500.0, 3, rng)
    points = np.stack([rectangle(length, 45.0) for length in (2000.0, 2500.0, 3000.0)])
    pixels = project_points(CAMERA, seen.rotations, np.tile(seen.position, (3, 1)), points)
    solution = solve_pose(Observations(CAMERA, points, pixels, seen.covariance))
    np.testing.assert_allclose(solution.position, np.tile(seen.position, (3, 1)), atol=1e-5)


def test_a_start_is_taken_up() -> None:
    seen = sight(1500.0, 50, np.random.default_rng(9))
    cold = solve_pose(Observations(CAMERA, CORNERS, seen.pixels, seen.covariance))
    rotation, position = perturb(seen.rotation, seen.position, np.array([80.0, 5, 5, 0.01, 0.01, 0.01]))
    start = (np.tile(rotation, (50, 1, 1)), np.tile(position, (50, 1)))
    warm = solve_pose(Observations(CAMERA, CORNERS, seen.pixels, seen.covariance), start=start)
    assert max(scaled_distance(cold, frame, warm.position[frame]) for frame in range(50)) < 1e-3
    assert np.isinf(warm.alternative.cost).all()


# --- spread -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("attitude", ["estimated", "given"])
def test_noisy_solves_spread_as_the_covariance_says(distance: float, attitude: str) -> None:
    """The stated covariance is linearised: at 4,000 m it holds for 0.3 px of noise, but not for 1 px."""
    high = 0.3 if distance == 4000.0 and attitude == "estimated" else 1.0
    seen = sight(distance, 1000, np.random.default_rng(11), high=high)
    if attitude == "estimated":
        solution = solve_pose(Observations(CAMERA, CORNERS, seen.pixels, seen.covariance))
        expected = solve_pose(Observations(CAMERA, CORNERS, seen.exact[None], seen.covariance[:1])).covariance[0]
        change = pose_difference(seen.rotation, seen.position, solution.rotation, solution.position)
        size = 6
    else:
        solution = solve_position(Observations(CAMERA, CORNERS, seen.pixels, seen.covariance, seen.rotations))
        rotation = seen.rotation[None]
        expected = solve_position(
            Observations(CAMERA, CORNERS, seen.exact[None], seen.covariance[:1], rotation)
        ).covariance[0]
        change = solution.position - seen.position
        size = 3
    assert solution.converged.all()
    np.testing.assert_allclose(change.std(0), np.sqrt(np.diag(expected))[:size], rtol=0.1)
    error, promised = change[:, :3], solution.covariance[:, :3, :3]
    distance = np.einsum("ni,nij,nj->n", error, np.linalg.inv(promised), error)
    assert 0.93 <= np.mean(distance < chi2.ppf(0.95, 3)) <= 0.97
    assert solution.cost.mean() == pytest.approx(8 - size, rel=0.1)


@pytest.mark.parametrize("nu", [4.0, 8.0])
def test_student_t_resists_outliers_and_admits_its_spread(nu: float) -> None:
    rng = np.random.default_rng(12)
    seen = sight(1500.0, 2000, rng, high=0.6)
    heavy = np.sqrt(nu / rng.chisquare(nu, (2000, 4, 1)))
    pixels = seen.exact + (seen.pixels - seen.exact) * heavy
    tails = np.full(4, nu)
    robust = solve_position(Observations(CAMERA, CORNERS, pixels, seen.covariance, seen.rotations, nu=tails))
    plain = solve_position(Observations(CAMERA, CORNERS, pixels, seen.covariance, seen.rotations))
    error = robust.position - seen.position
    assert (error**2).mean(0)[0] < ((plain.position - seen.position) ** 2).mean(0)[0]
    distance = np.einsum("ni,nij,nj->n", error, np.linalg.inv(robust.covariance[:, :3, :3]), error)
    assert 0.92 <= np.mean(distance < chi2.ppf(0.95, 3)) <= 0.97


def test_many_degrees_of_freedom_are_the_gaussian() -> None:
    seen = sight(1500.0, 6, np.random.default_rng(13))
    gaussian = solve_pose(Observations(CAMERA, CORNERS, seen.pixels, seen.covariance))
    student = solve_pose(Observations(CAMERA, CORNERS, seen.pixels, seen.covariance, nu=np.full((6, 4), 1e9)))
    np.testing.assert_allclose(student.cost, gaussian.cost, rtol=1e-5)
    np.testing.assert_allclose(student.covariance, gaussian.covariance, rtol=1e-3, atol=1e-9)


def test_the_other_pose_of_the_plane_is_a_minimum_too() -> None:
    seen = sight(4000.0, 20, np.random.default_rng(14))
    solution = solve_pose(Observations(CAMERA, CORNERS, seen.pixels, seen.covariance))
    other = solution.alternative
    assert np.isfinite(other.cost).all()
    assert (other.cost > solution.cost).all()
    assert ((solution.ambiguity >= 0) & (solution.ambiguity < 1)).all()
    for frame in range(20):
        frame_data = (CAMERA, CORNERS, seen.pixels[frame], seen.covariance[frame])
        at = cost_of(*frame_data, other.rotation[frame], other.position[frame])
        assert other.cost[frame] == pytest.approx(at, rel=1e-4)
        for axis, step in enumerate([5.0, 0.5, 0.5, 1e-4, 1e-4, 1e-4]):
            for sign in (-1, 1):
                change = np.zeros(6)
                change[axis] = sign * step
                moved = perturb(other.rotation[frame], other.position[frame], change)
                assert cost_of(*frame_data, *moved) > at * (1 - 1e-6)


# --- what it refuses --------------------------------------------------------------------------------------


def refused(solution: Solution, frame: int, failure: Any) -> bool:
    """That a frame failed for a reason, and shows nothing that could be taken for an answer."""
    return (
        solution.failure[frame] == failure
        and not solution.converged[frame]
        and np.isnan(solution.position[frame]).all()
        and np.isnan(solution.rotation[frame]).all()
        and np.isnan(solution.covariance[frame]).all()
        and np.isinf(solution.cost[frame])
    )


def both(pixels: Array, covariance: Array, mask: Array | None = None, points: Array = CORNERS) -> tuple[Any, Any]:
    """The pose and the position of frames as seen at 1,500 m."""
    seen = sight(1500.0, len(pixels), np.random.default_rng(0))
    return (
        solve_pose(Observations(CAMERA, points, pixels, covariance, mask=mask)),
        solve_position(Observations(CAMERA, points, pixels, covariance, seen.rotations, mask=mask)),
    )


def test_bad_frames_fail_alone_and_say_why() -> None:
    seen = sight(1500.0, 7, np.random.default_rng(15))
    pixels, covariance = seen.pixels.copy(), seen.covariance.copy()
    mask = np.ones((7, 4), dtype=bool)
    pixels[0, 2, 0] = np.nan
    covariance[1, 1, 0, 0] = np.inf
    covariance[2, 3] = [[1.0, 2.0], [2.0, 1.0]]  # indefinite
    covariance[3, 0] = [[1.0, 1.0], [1.0, 1.0 + 1e-13]]  # as good as singular
    covariance[4, 0] = [[1.0, 0.3], [0.1, 1.0]]  # not symmetric
    mask[5, 1:] = False  # one corner
    expected = [
        Failure.NOT_FINITE, Failure.NOT_FINITE, Failure.BAD_COVARIANCE, Failure.BAD_COVARIANCE,
        Failure.BAD_COVARIANCE, Failure.TOO_FEW_POINTS,
    ]  # fmt: skip
    for solution in both(pixels, covariance, mask):
        assert all(refused(solution, frame, failure) for frame, failure in enumerate(expected))
        assert solution.failure[6] == 0
        assert solution.reasons[0] == Failure.NOT_FINITE.reason
    alone = solve_pose(Observations(CAMERA, CORNERS, seen.pixels[6:], seen.covariance[6:]))
    np.testing.assert_allclose(both(pixels, covariance, mask)[0].position[6], alone.position[0], rtol=1e-9)


def test_masked_points_may_hold_any_value() -> None:
    seen = sight(1500.0, 1, np.random.default_rng(16))
    pixels, covariance = seen.pixels.copy(), seen.covariance.copy()
    pixels[0, 3], covariance[0, 3] = np.nan, -1.0
    mask = np.array([[True, True, True, False]])
    solution = solve_position(Observations(CAMERA, CORNERS, pixels, covariance, seen.rotations, mask=mask))
    assert solution.converged.all()


@pytest.mark.parametrize("count", [1, 30])
@pytest.mark.parametrize("nu", [None, np.full(6, 4.0)])
@pytest.mark.parametrize("camera", [CAMERA, LENS])
def test_masked_points_may_lie_behind_the_camera(count: int, nu: Array | None, camera: Camera) -> None:
    """Two more points: one that the camera has passed, one that it is just passing."""
    seen = sight(500.0, count, np.random.default_rng(24), camera=camera)
    passed = np.concatenate([CORNERS, seen.position - np.array([[900.0, 0.0, 0.0], [0.0, 5.0, 0.0]])])
    hidden = ((0, 0), (0, 2), (0, 0))
    pixels, covariance = np.pad(seen.pixels, hidden), np.pad(seen.covariance, (*hidden, (0, 0)))
    mask = np.arange(6) < np.full((count, 1), 4)
    tails = None if nu is None else nu[:4]
    for masked, without in (
        (
            solve_position(Observations(camera, passed, pixels, covariance, seen.rotations, mask=mask, nu=nu)),
            solve_position(Observations(camera, CORNERS, seen.pixels, seen.covariance, seen.rotations, nu=tails)),
        ),
        (
            solve_pose(Observations(camera, passed, pixels, covariance, mask=mask, nu=nu)),
            solve_pose(Observations(camera, CORNERS, seen.pixels, seen.covariance, nu=tails)),
        ),
    ):
        assert masked.reasons == without.reasons == ["solved"] * count
        np.testing.assert_allclose(masked.position, without.position, rtol=1e-6)
        np.testing.assert_allclose(masked.covariance, without.covariance, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("count", [1, 30])
def test_coincident_and_collinear_pixels_are_refused(count: int) -> None:
    """Alone and among valid frames, with and without noise."""
    rng = np.random.default_rng(17)
    seen = sight(1500.0, count, rng)
    spot, line = np.array([300.0, 200.0]), np.linspace(0, 1, 4)[:, None] * [60.0, 25.0] + [250.0, 150.0]
    for pixels in (np.tile(spot, (4, 1)), line, line[[0, 1, 3, 2]]):
        for noise in (0.0, 0.2):
            frames = seen.pixels.copy()
            frames[0] = pixels + noise * rng.normal(size=(4, 2))
            solution = solve_pose(Observations(CAMERA, CORNERS, frames, seen.covariance))
            assert not solution.converged[0]
            assert np.isnan(solution.position[0]).all()
            assert solution.converged[1:].all()
    frames[0] = spot + 0.2 * rng.normal(size=(4, 2))
    solution = solve_position(Observations(CAMERA, CORNERS, frames, seen.covariance, seen.rotations))
    assert not solution.converged[0]


@pytest.mark.parametrize("points", [np.linspace(0, 1, 4)[:, None] * [2500.0, 45.0, 0.0], np.zeros((4, 3))])
def test_collinear_and_coincident_points_are_refused(points: Array) -> None:
    seen = sight(1500.0, 3, np.random.default_rng(18))
    solution = solve_pose(Observations(CAMERA, points, seen.pixels, seen.covariance))
    assert all(refused(solution, frame, Failure.DEGENERATE) for frame in range(3))
    if not points.any():
        assert not both(seen.pixels, seen.covariance, points=points)[1].converged.any()


def test_an_attitude_that_looks_away_is_refused() -> None:
    seen = sight(1500.0, 3, np.random.default_rng(19))
    backwards = np.tile(look_at(seen.position, seen.position - [100.0, 0.0, 0.0]), (3, 1, 1))
    solution = solve_position(Observations(CAMERA, CORNERS, seen.pixels, seen.covariance, backwards))
    assert not solution.converged.any()
    solution = solve_pose(
        Observations(CAMERA, CORNERS, seen.pixels, seen.covariance), start=(backwards, np.tile(seen.position, (3, 1)))
    )
    assert refused(solution, 0, Failure.BEHIND_CAMERA)
    attitude = seen.rotations.copy()
    attitude[1, 0, 0] = np.nan
    solution = solve_position(Observations(CAMERA, CORNERS, seen.pixels, seen.covariance, attitude))
    assert solution.failure.tolist() == [0, Failure.NOT_FINITE, 0]


def test_left_and_right_swapped_is_a_view_from_below() -> None:
    seen = sight(1500.0, 3, np.random.default_rng(20))
    solution = solve_pose(Observations(CAMERA, CORNERS, seen.pixels[:, [1, 0, 3, 2]], seen.covariance))
    assert all(refused(solution, frame, Failure.BELOW_GROUND) for frame in range(3))


def test_noise_as_large_as_the_runway_is_refused() -> None:
    seen = sight(4000.0, 40, np.random.default_rng(21), low=8.0, high=12.0)
    solution = solve_pose(Observations(CAMERA, CORNERS, seen.pixels, seen.covariance))
    error = np.linalg.norm(solution.position - seen.position, axis=1)
    deviation = np.sqrt(solution.covariance[:, :3, :3].trace(axis1=1, axis2=2))
    with np.errstate(invalid="ignore"):
        assert not (error > 6 * deviation).any()
    assert (~solution.converged).mean() > 0.5


@settings(max_examples=20)
@given(SEEDS)
def test_no_input_gives_a_confident_answer_that_does_not_fit(seed: int) -> None:
    """Random corners: either refused, or the cost tells that they do not fit, or the pose explains them."""
    rng = np.random.default_rng(seed)
    pixels = rng.uniform([0, 0], [640, 384], (20, 4, 2)) if rng.random() < 0.5 else rng.normal(200, 3, (20, 4, 2))
    covariance = np.stack([covariances(rng, 4, 1e-3, 3.0) for _ in range(20)])
    solution = solve_pose(Observations(CAMERA, CORNERS, pixels, covariance))
    for frame in np.flatnonzero(solution.converged):
        at = cost_of(
            CAMERA, CORNERS, pixels[frame], covariance[frame], solution.rotation[frame], solution.position[frame]
        )
        assert at == pytest.approx(solution.cost[frame], rel=1e-3, abs=1e-5)
        assert (np.linalg.eigvalsh(solution.covariance[frame]) > 0).all()
        assert solution.position[frame, 2] > 0


def test_wrong_shapes_are_refused() -> None:
    seen = sight(1500.0, 2, np.random.default_rng(22))
    with pytest.raises(HaloposeError, match=r"pixels .* \(N, K, 2\)"):
        solve_pose(Observations(CAMERA, CORNERS, seen.pixels[0], seen.covariance))
    with pytest.raises(HaloposeError, match=r"covariances.*\(1, 4, 2, 2\)"):
        solve_pose(Observations(CAMERA, CORNERS, seen.pixels, seen.covariance[:1]))
    with pytest.raises(HaloposeError, match="rotations should have shape"):
        solve_position(Observations(CAMERA, CORNERS, seen.pixels, seen.covariance, seen.rotation))
    with pytest.raises(HaloposeError, match="must be finite"):
        solve_pose(Observations(CAMERA, CORNERS * np.nan, seen.pixels, seen.covariance))
