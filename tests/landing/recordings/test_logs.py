"""Logs as csv: units by name, order of time, and mistakes in one line each."""

from pathlib import Path

import numpy as np
import pymap3d
import pytest

from halopose.errors import HaloposeError
from halopose.geometry.camera import rotation_from_angles
from halopose.landing.navigation.sensors import Measurement, Sensors
from halopose.landing.recordings.logs import Kind, attitudes_at, held, measurements, read_log, too_far
from halopose.landing.recordings.runway_sites import Site
from halopose.landing.runway import runway_corners

SITE = Site("28", runway_corners(2500.0, 45.0), 37.61, -122.36, 4.0, np.radians(298.0))


def read(tmp_path: Path, text: str, kind: Kind) -> list[np.ndarray]:
    (tmp_path / "log.csv").write_text(text)
    return [each.value for each in measurements(read_log(tmp_path / "log.csv"), kind, SITE, Sensors())]


def test_headings_and_yaws_in_degrees_and_radians_agree(tmp_path: Path) -> None:
    by_heading = read(tmp_path, "time_s,heading_deg,pitch_deg,roll_deg\n0,300,2,-1\n", "attitude")
    by_yaw = read(tmp_path, "time_s,yaw_rad,pitch_rad,roll_rad\n0,0.0349066,0.0349066,-0.0174533\n", "attitude")
    np.testing.assert_allclose(by_heading, by_yaw, atol=1e-6)


def test_a_gap_in_a_row_is_passed_over(tmp_path: Path) -> None:
    found = read(tmp_path, "time_s,localizer_deg,glide_slope_deg\n0,1,\n1,0.5,0.1\n", "ils")
    assert len(found) == 3


def test_attitudes_are_linear_between_samples_and_absent_away_from_them(tmp_path: Path) -> None:
    text = "time_s,yaw_deg,pitch_deg,roll_deg\n0,179,0,0\n0.1,-179,2,0\n5,0,0,0\n"
    (tmp_path / "log.csv").write_text(text.replace("179", "79").replace("-79", "81"))
    measured = measurements(read_log(tmp_path / "log.csv"), "attitude", SITE, Sensors())
    found = attitudes_at(measured, np.array([0.05, 2.0]))
    np.testing.assert_allclose(np.degrees(found[0]), (80, 1, 0), atol=1e-9)
    assert np.isnan(found[1]).all()


def test_positions_too_far_away_are_left_out_and_counted(tmp_path: Path) -> None:
    """A receiver without a fix writes 0, 0."""
    head = "time_s,latitude_deg,longitude_deg,height_m\n"
    found = read(tmp_path, f"{head}0,0,0,0\n1,37.6,-122.3,9\n2,,,\n3,0,0,0\n4,37.6,-122.3,9\n", "gnss")
    assert len(found) == 2
    assert "2 of 5 rows" in too_far(read_log(tmp_path / "log.csv"), SITE)
    (tmp_path / "log.csv").write_text(f"{head}1,37.6,-122.3,9\n")
    assert too_far(read_log(tmp_path / "log.csv"), SITE) == ""


def test_repeated_positions_of_sample_and_hold_are_left_out_and_counted(tmp_path: Path) -> None:
    """A receiver of 5 Hz, logged at 10 Hz."""
    head = "time_s,latitude_deg,longitude_deg,height_m\n"
    rows = [f"{n / 10},{37.6 + 1e-5 * (n // 2)},-122.3,9" for n in range(20)]
    assert len(read(tmp_path, head + "\n".join(rows) + "\n", "gnss")) == 10
    assert "10 of 20 rows" in held(read_log(tmp_path / "log.csv"), SITE)
    fresh = [f"{n / 10},{37.6 + 1e-5 * n},-122.3,9" for n in range(20)]
    assert len(read(tmp_path, head + "\n".join(fresh) + "\n", "gnss")) == 20
    assert held(read_log(tmp_path / "log.csv"), SITE) == ""


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("attitude", "time_s,heading_deg,pitch_deg\n0,1,2\n", "no column roll_deg or roll_rad"),
        ("attitude", "time_s,heading_rad,pitch_rad,roll_rad\n0,298,2,1\n", "call it heading_deg"),
        ("attitude", "time_s,heading_deg,pitch_deg,roll_deg\n0,118,2,1\n", "heads away from runway 28"),
        ("attitude", "time_s,heading_deg,pitch_deg,roll_deg\n0,298,80,1\n", "check its unit"),
        (
            "gnss",
            "time_s,latitude_deg,longitude_deg,height_m\n1,37,-122,9\n0,37,-122,9\n",
            "line 3: time goes back",
        ),
        ("gnss", "time_s,latitude_deg,longitude_deg,height_m\n0,-122.3,37.6,9\n", "swapped"),
        ("gnss", "time_s,latitude_deg,longitude_deg,height_m\n0,48.1,11.5,9\n", "swapped"),
        ("gnss", "time_s,lat,lon\n0,1,2\n", "no column latitude_deg"),
        ("gnss", "time,latitude_deg\n0,1\n", "no column time_s"),
        ("gnss", "time_s,latitude_deg,longitude_deg,height_m\n0,37,north,9\n", "'north' is not"),
        ("gnss", "time_s,latitude_deg,longitude_deg,height_m\n0,37\n", "2 values for 4 columns"),
        ("gnss", "time_s\n", "has no rows"),
        ("gnss", "time_s,latitude_deg,longitude_deg,height_m\n0,,,\n", "no value in any"),
        ("gnss", "time_s,latitude_deg,longitude_deg,height_m\n0,37,-122,\n", "no whole position"),
        ("attitude", "time_s,heading_deg,pitch_deg,roll_deg\n0,nan,nan,nan\n", "no value in any"),
        ("radio", "time_s,height_m,height_m\n0,70,80\n", "has 2 columns 'height_m'"),
        ("radio", "time_s,height_m\n0,7000\n", "in feet"),
        ("radio", "time_s,height_m\n0,70\n1000,60\n", "in seconds"),
        ("ils", "time_s,localizer_deg,glide_slope_deg\n0,75,0\n", "check its unit"),
        ("radio", f"time_s,height_m\n0,{'7' * 200_000}\n", "not a csv file"),
        (
            "irs",
            "time_s,acceleration_x_mps2,acceleration_y_mps2,acceleration_z_mps2\n0,0.3,0.1,-9.7\n1,0.2,0,-9.9\n",
            "without gravity",
        ),
    ],
)
def test_mistakes_are_one_line_errors(tmp_path: Path, kind: Kind, text: str, words: str) -> None:
    with pytest.raises(HaloposeError, match=words) as caught:
        read(tmp_path, text, kind)
    assert "\n" not in str(caught.value)


def test_headings_are_in_the_level_frame_of_the_aircraft(tmp_path: Path) -> None:
    """A line of sight through pymap3d, from the nose of the aircraft to runway axes, is the oracle."""
    p_runway = np.array([-10_000.0, 800.0, 520.0])
    places = [Measurement(0.0, "gnss", p_runway, np.eye(3))]
    (tmp_path / "log.csv").write_text("time_s,heading_deg,pitch_deg,roll_deg\n0,301,2,0\n")
    found = measurements(read_log(tmp_path / "log.csv"), "attitude", SITE, Sensors(), places)[0].value
    aircraft = SITE.to_wgs84(p_runway)
    ahead = pymap3d.aer2geodetic(301.0, 2.0, 1000.0, *aircraft)
    threshold = SITE.latitude, SITE.longitude, SITE.height
    ends = [np.array(pymap3d.geodetic2enu(*place, *threshold)) for place in (aircraft, ahead)]
    nose = (ends[1] - ends[0]) @ SITE.turn / 1000.0
    np.testing.assert_allclose(rotation_from_angles(*found)[0], nose, atol=1e-7)
    assert abs(found[1] - np.radians(2.0)) > 1e-3  # 0.157 mrad per km
