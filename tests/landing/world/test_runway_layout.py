"""Markings and lights: symmetric, on the pavement, and glide path lights that depend on the position."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halopose.landing.world.runway_layout import field_patches, opposite, runway_lights, runway_patches
from halopose.landing.world.scenes import Runway

WIDTHS = st.sampled_from([23.0, 30.0, 40.0, 45.0, 50.0, 60.0])
RUNWAYS = st.builds(Runway, length=st.floats(1500, 4000), width=WIDTHS, threshold=st.just((120.0, -300.0)))


@given(st.integers(1, 36), st.sampled_from(["", "L", "R", "C"]))
def test_the_other_end_is_named_by_the_opposite_heading(number: int, letter: str) -> None:
    name = f"{number:02d}{letter}"
    other = opposite(name)
    assert (int(other[:2]) - number) % 36 == 18
    assert opposite(other) == name


@given(RUNWAYS)
def test_markings_stay_on_the_pavement(runway: Runway) -> None:
    x0, y0 = runway.threshold
    for patch in runway_patches(runway, 1.0):
        assert x0 <= patch.x[0] < patch.x[1] <= x0 + runway.length
        for low, high in patch.bars:
            assert y0 - runway.width / 2 - 1e-9 <= low < high <= y0 + runway.width / 2 + 1e-9


@given(RUNWAYS)
def test_both_ends_carry_the_same_marks(runway: Runway) -> None:
    """Apart from their names, whose figures lie between the threshold bars and the first pair of bars."""
    x0, y0 = runway.threshold
    middle = x0 + runway.length / 2

    def marks(sign: int) -> list[Any]:
        return sorted(
            (round(sign * (x - middle), 6), *sorted((round(sign * (a - y0), 6), round(sign * (b - y0), 6))))
            for patch in runway_patches(runway, 1.0)
            if not 40 < min(patch.x[0] - x0, x0 + runway.length - patch.x[1]) < 74 or patch.dash
            for x in [sum(patch.x) / 2]
            for a, b in patch.bars
        )

    assert marks(1) == marks(-1)


@pytest.mark.parametrize(("angle", "whites"), [(2.0, 0), (2.7, 1), (3.0, 2), (3.3, 3), (4.0, 4)])
def test_papi_shows_more_white_the_higher_the_aircraft(angle: float, whites: int) -> None:
    runway = Runway(3000.0, 45.0)
    viewer = np.array([-2600.0, 0.0, 3000.0 * np.tan(np.radians(angle))])
    lights = runway_lights(runway, viewer, np.random.default_rng(0))
    units = (np.abs(lights.place[:, 0] - 400) < 1) & (np.abs(lights.place[:, 1]) > runway.width / 2 + 10)
    inwards = np.argsort(-np.abs(lights.place[units, 1]))
    green = lights.colour[units, 1][inwards] > 0.5
    assert green.tolist() == [True] * whites + [False] * (4 - whites)  # the inner units turn red first


def test_taxiways_leave_the_runway_alone() -> None:
    runway = Runway(2500.0, 45.0)
    for seed in range(20):
        for patch in field_patches(runway, np.random.default_rng(seed)):
            covers = any(low < 0 < high for low, high in patch.bars) and not patch.slant
            assert not covers or patch.x[1] <= 0 or patch.x[0] >= runway.length
