"""Runways on the earth: round trips, geodesic distances, and one-line errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pymap3d.vincenty
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halopose.errors import HaloposeError
from halopose.landing.recordings.runway_sites import (
    Site,
    _table,
    corners_seen_from,
    from_table,
    other_runways,
    read_runway,
    runway_content,
)
from halopose.landing.runway import runway_corners


@given(st.floats(-75, 75), st.floats(-179, 179), st.floats(0, 6.28), st.integers(0, 2**32))
def test_positions_go_to_the_earth_and_back(latitude: float, longitude: float, heading: float, seed: int) -> None:
    site = Site("09", runway_corners(2500.0, 45.0), latitude, longitude, 100.0, heading)
    places = np.random.default_rng(seed).normal(0, 3000, (5, 3))
    np.testing.assert_allclose(site.from_wgs84(site.to_wgs84(places)), places, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(site.to_enu(places), axis=1), np.linalg.norm(places, axis=1))


def test_corners_written_are_corners_read(tmp_path: Path) -> None:
    corners = runway_corners(2500.0, 45.0, heights=(0, 0, 5.0, 5.0))
    site = Site("28R", corners, 37.61, -122.36, 4.0, np.radians(298.0))
    (tmp_path / "runway.json").write_text(json.dumps(runway_content(site)))
    again = read_runway(tmp_path / "runway.json")
    np.testing.assert_allclose(again.corners, corners, atol=1e-6)
    assert again.heading == pytest.approx(site.heading, abs=1e-9)


@pytest.mark.parametrize("airport", ["KSFO", "KATL", "KLAX", "KCLT"])
def test_runways_of_the_table_are_as_long_as_published(airport: str) -> None:
    """By Vincenty's formula on the ellipsoid; what is off by more says so."""
    rows = [row for row in _table() if row["airport"] == airport]
    assert rows
    for row in rows:
        one, other = (from_table(airport, row[f"{end}_end"]) for end in ("low", "high"))
        ends = [float(row[f"{end}_{key}"]) for end in ("low", "high") for key in ("latitude", "longitude")]
        metres, bearing = pymap3d.vincenty.vdist(*ends)[:2]
        assert one.length == pytest.approx(float(metres), abs=1.0)
        assert np.degrees(one.heading) % 360 == pytest.approx(float(bearing), abs=0.02)
        assert np.degrees(other.heading - one.heading) % 360 == pytest.approx(180.0, abs=0.1)
        off = abs(float(metres) - float(row["length_m"]))
        assert ("give surveyed corners" in one.note) == (off > 20)
        assert one.corners[0, 0] == -float(row["low_displaced_m"])
        assert row["source"].startswith("OurAirports")


def test_other_runways_of_the_airport_are_known(tmp_path: Path) -> None:
    """28L is 229 m to the left of 28R; a file with the corners of 28R has the same neighbours."""
    site = from_table("KSFO", "28R")
    (tmp_path / "runway.json").write_text(json.dumps(runway_content(site)))
    for start in (site, read_runway(tmp_path / "runway.json")):
        others = other_runways(start)
        assert sorted(other.designator for other in others) == ["01L", "01R", "10R"]
        parallel = corners_seen_from(start, next(other for other in others if other.designator == "10R"))
        np.testing.assert_allclose(np.abs(parallel[:, 1].mean()), 229, atol=3)
        assert parallel[1, 1] < parallel[0, 1]  # near right is to the right of near left
        assert parallel[2:, 0].min() > parallel[:2, 0].max()  # and far corners are farther
    nowhere = Site("28", runway_corners(2500.0, 45.0), 37.61, -120.0, 4.0, np.radians(298.0))
    assert other_runways(nowhere) == []


CORNERS = runway_content(Site("28R", runway_corners(2500.0, 45.0), 37.61, -122.36, 4.0, np.radians(298.0)))["corners"]


def swapped(corners: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{**each, "latitude": each["longitude"], "longitude": each["latitude"]} for each in corners]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"corners": swapped(CORNERS)}, "longitude swapped"),
        ({"corners": CORNERS[:3]}, "corners are four"),
        ({"corners": [*CORNERS[:3], {"latitude": 10**400, "longitude": 2, "height": 3}]}, "corner 4 needs"),
        ({"corners": [*CORNERS[:3], {**CORNERS[3], "height": 1e300}]}, "a corner has 1e"),
        ({"corners": [CORNERS[i] for i in (1, 0, 3, 2)]}, "corners are exchanged"),
        ({"corners": [CORNERS[i] for i in (0, 2, 1, 3)]}, "near left, near right"),
        ({"corners": [*CORNERS[:3], {"latitude": 1, "longitude": 2}]}, "corner 4 needs"),
        ({"corners": [*CORNERS[:2], *({**c, "height": 300.0} for c in CORNERS[2:])]}, "a slope of"),
        ({"airport": "KSFO", "designator": "09"}, "no runway '09' at KSFO: 01L"),
        ({"airport": "XXXX", "designator": "09"}, "no airport 'XXXX'"),
        ({}, "needs corners"),
    ],
)
def test_mistakes_are_one_line_errors(tmp_path: Path, content: dict[str, Any], words: str) -> None:
    (tmp_path / "runway.json").write_text(json.dumps(content))
    with pytest.raises(HaloposeError, match=words) as caught:
        read_runway(tmp_path / "runway.json")
    assert "\n" not in str(caught.value)


def lard_content(order: tuple[int, int, int, int]) -> dict[str, object]:
    """The table's runway in LARD's form; order: which of our corners its A, B, C and D are."""
    site = read_runway("KSFO/28R")
    places = site.to_wgs84(site.corners).tolist()
    keys = ("latitude", "longitude", "altitude")
    corners = {
        name: {"coordinate": dict(zip(keys, places[k], strict=True))} for name, k in zip("ABCD", order, strict=True)
    }
    return {"KSFO": {"28R": corners, "10L": {"A": {}}}}


@pytest.mark.parametrize("order", [(2, 3, 0, 1), (3, 2, 1, 0), (3, 2, 0, 1)])
def test_a_runway_of_lard_s_data_base_is_the_same_one(tmp_path: Path, order: tuple[int, int, int, int]) -> None:
    path = tmp_path / "runways_database.json"
    path.write_text(json.dumps(lard_content(order)))
    table, found = read_runway("KSFO/28R"), read_runway(f"{path}#KSFO/28R")
    np.testing.assert_allclose(found.corners[:, :2] - found.corners[:2, :2].mean(0),
                               table.corners[:, :2] - table.corners[:2, :2].mean(0), atol=0.02)  # fmt: skip
    assert found.heading == pytest.approx(table.heading, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "words"), [("KLAX/24R", "no airport"), ("KSFO/19", "no runway"), ("KSFO/10L", "corners A to D")]
)
def test_runways_missing_in_lard_are_refused(tmp_path: Path, name: str, words: str) -> None:
    path = tmp_path / "runways_database.json"
    path.write_text(json.dumps(lard_content((2, 3, 0, 1))))
    with pytest.raises(HaloposeError, match=words) as caught:
        read_runway(f"{path}#{name}")
    assert "\n" not in str(caught.value)
