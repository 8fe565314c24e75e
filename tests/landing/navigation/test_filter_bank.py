"""The filter bank keeps valid covariances under rounding."""

from __future__ import annotations

import numpy as np

from halopose.landing.navigation.filter_bank import FilterBank, Innovation
from halopose.landing.navigation.motion_model import FusionSettings, InitialState
from halopose.landing.navigation.sensors import Measurement


def test_covariances_stay_positive_after_measurements_of_very_unequal_precision() -> None:
    """A prior of 10 km, and fixes of 3 mm along one axis and 3 km along the others."""
    spread = np.diag([1e8] * 3 + [1e4] * 3)
    start = InitialState(0.0, [-4e3, 0.0, 250.0], [60.0, 0.0, -3.0], spread)
    bank = FilterBank.start(start, FusionSettings())
    every = np.ones(len(bank.states), dtype=bool)
    for step in range(12):
        loose = np.full(3, 1e7)
        loose[step % 3] = 1e-5
        turn = np.linalg.qr(np.random.default_rng(step).standard_normal((3, 3)))[0]
        fix = Measurement(0.0, "gnss", np.array([-4e3, 0.0, 250.0]), (turn * loose) @ turn.T)
        bank = bank.corrected(Innovation.of(fix, bank), every)
        lowest = np.linalg.eigvalsh(bank.covariances).min()
        assert lowest > -1e-12 * np.abs(bank.covariances).max()
        assert np.diagonal(bank.covariances, axis1=1, axis2=2).min() >= 0
