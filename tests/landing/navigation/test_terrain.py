"""The radio altimeter over hills: used where the ground is known, weighted by distance."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from halopose.errors import HaloposeError
from halopose.landing.flight import draw_initial_state
from halopose.landing.navigation.fusion import FusedTrack, consistency, fuse
from halopose.landing.navigation.sensors import RADIO_CEILING, simulate
from halopose.landing.navigation.terrain import LEVEL, Terrain
from halopose.landing.recordings.logs import read_terrain
from halopose.landing.recordings.runway_sites import Site
from halopose.landing.runway import runway_corners
from tests.landing.navigation.test_navigator import SETTINGS, SITE, SLOW, TIMES, TRUTH

ALONG = np.arange(-8000.0, 3001.0, 50.0)
HILLS = Terrain(ALONG, 14.0 * (1 - np.cos(ALONG / 350.0)) * (ALONG < -500))  # 0 to 28 m
NEAR = Terrain(ALONG[ALONG >= -1500], HILLS.height[ALONG >= -1500])


def flown(seed: int, believed: Terrain) -> FusedTrack:
    """A flight over hills."""
    measured = simulate(TRUTH, SLOW, seed, SITE, HILLS)
    return fuse(measured, draw_initial_state(TRUTH, seed), replace(SETTINGS, terrain=believed), TIMES)


def test_hills_with_a_profile_raise_no_flag_and_leave_the_filter_consistent() -> None:
    tracks = [flown(seed, HILLS) for seed in range(2)]
    assert not any(track.output.flagged.any() for track in tracks)
    nis = np.concatenate([track.nis_of("radio") for track in tracks])
    assert consistency(nis, 1, 0.999).consistent


def test_the_radio_altimeter_is_used_only_where_the_ground_is_known() -> None:
    track = flown(0, NEAR)
    assert not track.output.flagged.any()
    used = track.times[(track.source == "radio") & track.accepted]
    assert -1500 < TRUTH.position(used)[:, 0].min() < -1300
    assert len(used) > 10
    assert "the ground is not known here" in " ".join(track.ignored + track.reasons)


def test_hills_that_the_profile_does_not_have_are_flagged() -> None:
    assert flown(0, replace(LEVEL, growth=0.0)).output.flagged.any()


def test_far_ground_counts_less() -> None:
    _, slope, sigma = LEVEL.at(np.array([-6000.0, -1000.0, 0.0, 500.0]))
    np.testing.assert_allclose(sigma, [6.3, 1.3, 0.3, 0.3])
    assert not slope.any()


def test_gaps_and_the_side_of_a_profile_are_not_known() -> None:
    terrain = Terrain(np.array([-1000.0, -900.0, -400.0, -300.0]), np.zeros(4))
    places = np.array([[-950.0, 0, 50], [-600.0, 0, 50], [-350.0, 0, 50], [-200.0, 0, 50], [-350.0, 400.0, 50]])
    assert terrain.known(places, np.ones(5)).tolist() == [True, False, True, False, False]
    assert not terrain.known(places, np.full(5, 60.0)).any()  # it may be over unknown ground
    hill = np.array([[-0.0, 0.0, 90.0]])
    assert HILLS.known(hill, np.ones(1))
    assert not HILLS.known(hill - (1100.0, 0, 0), np.full(1, 300.0))


def test_a_profile_is_read_with_the_surface_of_the_runway(tmp_path: Path) -> None:
    site = Site("28", runway_corners(2500.0, 45.0, heights=(0.0, 0.0, 5.0, 5.0)), 37.61, -122.36, 4.0, 0.0)
    path = tmp_path / "terrain.csv"
    path.write_text("x_m,height_m\n-100,-2\n-200,4\n-300,6\n")
    height, slope, _ = read_terrain(path, site).at(np.array([-250.0, -50.0, 1250.0]))
    np.testing.assert_allclose(height, [5.0, -1.0, 2.5])
    np.testing.assert_allclose(slope, [-0.02, 0.02, 0.002], atol=1e-12)
    for text, message in (
        ("x_m\n1\n", "height_m"),
        ("time_s,height_m\n1,1\n", "x_m"),
        ("x_m,height_m\n-9,\n", "finite"),
    ):
        path.write_text(text)
        with pytest.raises(HaloposeError, match=message):
            read_terrain(path, site)


def test_a_radio_altimeter_has_its_range_above_the_ground() -> None:
    mountain = Terrain(ALONG, np.full(len(ALONG), -700.0), sigma=0.0, growth=0.0)
    radio = [each for each in simulate(TRUTH, SLOW, 0, SITE, mountain) if each.source == "radio"]
    assert radio
    assert max(float(each.value[0]) for each in radio) < 1.1 * RADIO_CEILING
