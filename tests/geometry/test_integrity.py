"""Rates of alarms and of missed errors against what the risks allow, and the exclusion of a wrong corner."""

import numpy as np
import pytest
from scipy.stats import kstest

from halopose.errors import HaloposeError
from halopose.geometry.integrity import ambiguous, consistency, exclude, protection_levels
from halopose.geometry.pnp import solve_pose, solve_position
from tests.helpers.approaches import CAMERA, CORNERS, sight

SIX = np.concatenate([CORNERS, [[400.0, 15.0, 0.0], [900.0, -15.0, 0.0]]])


def test_good_corners_give_uniform_probabilities():
    seen = sight(1500.0, 2000, np.random.default_rng(1))
    for solution, dof in (
        (solve_pose(CAMERA, CORNERS, seen.pixels, seen.covariance), 2),
        (solve_position(CAMERA, CORNERS, seen.pixels, seen.covariance, seen.rotations), 5),
    ):
        assert (solution.dof == dof).all()
        assert kstest(consistency(solution), "uniform").pvalue > 1e-3


def test_nothing_to_check_and_nothing_solved():
    seen = sight(1500.0, 2, np.random.default_rng(2))
    mask = np.array([[True, False, True, False], [True, False, False, False]])
    solution = solve_position(
        CAMERA, CORNERS, seen.exact[None].repeat(2, 0), seen.covariance, seen.rotations, mask=mask
    )
    assert consistency(solution)[0] == pytest.approx(1.0, abs=1e-3)
    assert consistency(solution)[1] == 0


@pytest.mark.parametrize("with_attitude", [True, False])
@pytest.mark.parametrize("wrong", [0, 2])
def test_a_wrong_corner_is_found_and_left_out(with_attitude, wrong):
    points = CORNERS if with_attitude else SIX
    seen = sight(1000.0, 200, np.random.default_rng(3), points=points)
    pixels = seen.pixels.copy()
    pixels[::2, wrong] += [25.0, -20.0]
    rotation = seen.rotations if with_attitude else None
    result = exclude(CAMERA, points, pixels, seen.covariance, rotation)
    assert (result.excluded[::2] == wrong).mean() > 0.97
    assert (result.excluded[1::2] == -1).mean() > 0.97
    assert result.consistent.mean() > 0.99
    assert ((~result.mask).sum(1) == (result.excluded >= 0)).all()
    assert not result.mask[result.excluded == wrong, wrong].any()
    error = np.abs(result.solution.position - seen.position)
    deviation = np.sqrt(np.diagonal(result.solution.covariance, axis1=1, axis2=2)[:, :3])
    assert (error[::2] < 4.5 * deviation[::2]).mean() > 0.97


def test_four_corners_cannot_spare_one_for_a_pose():
    seen = sight(1500.0, 2, np.random.default_rng(4))
    pixels = seen.pixels.copy()
    pixels[:, 0] += [0.0, 40.0]
    result = exclude(CAMERA, CORNERS, pixels, seen.covariance)
    assert (result.excluded == -1).all()
    assert not result.consistent.any()


def test_every_frame_may_have_its_own_runway():
    seen = sight(1500.0, 4, np.random.default_rng(5))
    pixels = seen.pixels.copy()
    pixels[1, 3] += [20.0, 20.0]
    shared = exclude(CAMERA, CORNERS, pixels, seen.covariance, seen.rotations)
    own = exclude(CAMERA, np.tile(CORNERS, (4, 1, 1)), pixels, seen.covariance, seen.rotations)
    assert own.excluded.tolist() == shared.excluded.tolist() == [-1, 3, -1, -1]
    np.testing.assert_allclose(own.solution.position, shared.solution.position, rtol=1e-9)


@pytest.mark.parametrize("with_attitude", [True, False])
def test_errors_pass_the_levels_unnoticed_no_more_often_than_the_risk(with_attitude):
    """With risks large enough to count: every corner is wrong in turn, by the amount that hides best."""
    points = CORNERS if with_attitude else SIX
    frames, risk, fault = 300, 0.02, 0.2
    seen = sight(800.0, frames, np.random.default_rng(6), points=points, high=0.6)
    rotation = seen.rotations if with_attitude else None
    settings = {"integrity_risk": risk, "fault_probability": fault, "false_alarm": 0.05}
    worst = 0.0
    for size in (1.5, 3.0):
        for corner in range(4):
            pixels = seen.pixels.copy()
            pixels[:, corner] += size * np.array([0.8, -0.6])
            levels = protection_levels(CAMERA, points, pixels, seen.covariance, rotation, **settings)
            solve = solve_pose if rotation is None else solve_position
            extra = () if rotation is None else (rotation,)
            error = np.abs(solve(CAMERA, points, pixels, seen.covariance, *extra).position - seen.position)
            beyond = (error[:, 2] > levels.vertical) | (np.hypot(error[:, 0], error[:, 1]) > levels.horizontal)
            worst = max(worst, np.mean(beyond & ~levels.alarmed))
    assert fault * worst <= risk


def test_alarms_without_a_fault_are_as_rare_as_said():
    seen = sight(800.0, 3000, np.random.default_rng(7), high=0.6)
    levels = protection_levels(CAMERA, CORNERS, seen.pixels, seen.covariance, seen.rotations, false_alarm=0.05)
    assert levels.alarmed.mean() <= 3 * 0.05 * 1.2  # three axes
    assert levels.alarmed.mean() > 0.02
    assert (levels.vertical > 0).all()
    assert np.isfinite(levels.horizontal).all()


def test_levels_grow_as_the_risk_falls_and_are_infinite_without_a_check():
    seen = sight(1500.0, 3, np.random.default_rng(8))
    given = (CAMERA, CORNERS, seen.pixels, seen.covariance)
    loose = protection_levels(*given, seen.rotations, integrity_risk=1e-3)
    tight = protection_levels(*given, seen.rotations, integrity_risk=1e-9)
    assert (tight.vertical > loose.vertical).all()
    assert (tight.horizontal > loose.horizontal).all()
    alone = protection_levels(*given)  # four corners of a pose: none can be spared
    assert np.isinf(alone.vertical).all()
    mask = np.zeros((3, 4), dtype=bool)
    assert np.isinf(protection_levels(*given, seen.rotations, mask=mask).horizontal).all()


def test_two_poses_of_like_cost_are_ambiguous():
    near, far = (sight(d, 50, np.random.default_rng(9), high=h) for d, h in ((1500.0, 0.4), (4000.0, 2.5)))
    assert not ambiguous(solve_pose(CAMERA, CORNERS, near.pixels, near.covariance)).any()
    unsure = solve_pose(CAMERA, CORNERS, far.pixels, far.covariance)
    assert ambiguous(unsure).any()
    gap = unsure.alternative.cost - unsure.cost
    assert (ambiguous(unsure, 0.01) == (unsure.converged & (np.exp(-gap / 2) > 0.01))).all()


def test_risks_are_probabilities():
    seen = sight(1500.0, 1, np.random.default_rng(10))
    with pytest.raises(HaloposeError, match="integrity_risk must lie between 0 and 1"):
        protection_levels(CAMERA, CORNERS, seen.pixels, seen.covariance, seen.rotations, integrity_risk=0.0)
    with pytest.raises(HaloposeError, match="false_alarm"):
        exclude(CAMERA, CORNERS, seen.pixels, seen.covariance, seen.rotations, false_alarm=2.0)
