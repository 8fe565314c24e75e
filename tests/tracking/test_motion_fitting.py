"""Fit of the motion model: accelerations and correlated errors."""

import numpy as np

from halopose.tracking.motion import Motion
from halopose.tracking.motion_fitting import fit_motion
from tests.tracking.test_motion import MOTION, walk


def test_motion_and_lasting_errors_are_found_again() -> None:
    found = fit_motion([walk(150, seed, 4.0)[0] for seed in (0, 1)], 2)
    assert np.abs(np.log(found.acceleration / MOTION.acceleration)).max() < 0.8
    assert found.acceleration[1] > 2 * found.acceleration[0]
    assert abs(float(found.share) - 0.4) < 0.25
    assert 0.08 < float(found.memory) < 1.2


def test_lasting_errors_are_distinguished_from_fresh_ones() -> None:
    fresh = Motion(MOTION.acceleration, np.array(0.02), MOTION.memory)
    assert fit_motion([walk(200, 2, None, fresh)[0]], 2).share < 0.25


def test_too_short_a_film_teaches_nothing() -> None:
    found = fit_motion([walk(5, 3)[0]], 2)
    np.testing.assert_array_equal(found.acceleration, Motion.typical(2).acceleration)
