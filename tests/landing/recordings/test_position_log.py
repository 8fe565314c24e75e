"""Positions agree in all coordinate frames; deviations and sigmas against samples; CSV round trip."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pymap3d
import pytest

from halopose.landing.flight import SimulatedFlight
from halopose.landing.landing_settings import CameraErrors, LandingSettings
from halopose.landing.navigation.sensors import IlsSite
from halopose.landing.recordings.position_log import Positions, positions_of, write_csv
from halopose.landing.recordings.record_flight import site_of
from halopose.landing.recordings.runway_sites import read_runway
from tests.landing.test_flight import flown


@pytest.fixture(scope="module")
def flight() -> SimulatedFlight:
    return flown(3, LandingSettings(rate=1.0, camera=CameraErrors(clock=0.0)))


@pytest.fixture(scope="module")
def positions(flight: SimulatedFlight) -> Positions:
    return positions_of(flight, site_of(flight))


def test_all_coordinate_frames_agree(positions: Positions, flight: SimulatedFlight) -> None:
    """Back from latitude and longitude by pymap3d's cartesian way, which the forward way does not take."""
    site = positions.site
    np.testing.assert_allclose(site.from_wgs84(positions.places), flight.fused, atol=1e-6)
    corner = np.array(pymap3d.geodetic2ecef(site.latitude, site.longitude, site.height))
    away = np.array(pymap3d.geodetic2ecef(*positions.places.T)).T - corner
    np.testing.assert_allclose(np.linalg.norm(away, axis=1), np.linalg.norm(flight.fused, axis=1), rtol=1e-9)
    np.testing.assert_allclose(
        np.linalg.eigvalsh(positions.enu_covariance), np.linalg.eigvalsh(flight.fused_covariance), rtol=1e-9
    )


def test_deviations_have_the_sigma_of_sampled_positions(positions: Positions) -> None:
    n = len(positions) // 2
    rng = np.random.default_rng(0)
    drawn = rng.multivariate_normal(positions.position[n], positions.covariance[n], 40_000)
    ils = IlsSite.of_runway(positions.site.length)
    for axis, angle in enumerate((ils.localizer_angle, ils.glide_slope_angle)):
        sampled = angle(drawn)[0]
        assert sampled.mean() == pytest.approx(positions.deviations[n, axis], abs=5 * sampled.std() / 200)
        assert sampled.std() == pytest.approx(positions.sigma[n, axis], rel=0.03)


def test_the_localizer_stands_beyond_the_far_end_of_a_displaced_threshold(flight: SimulatedFlight) -> None:
    """Runway 28R of San Francisco: the antenna is 300 m past the end that the table states on the earth."""
    site = read_runway("KSFO/28R")
    end = np.array(pymap3d.geodetic2enu(37.6287420, -122.3934100, 1.5, site.latitude, site.longitude, site.height))
    away = float(np.hypot(*end[:2])) + 300.0
    moved = replace(flight, fused=np.tile([-3000.0, 400.0, 200.0], (len(flight.frame_times), 1)))
    found = positions_of(moved, site).deviations[:, 0]
    np.testing.assert_allclose(found, np.arctan2(400.0, 3000.0 + away), rtol=1e-6)


def test_left_and_high_are_positive(flight: SimulatedFlight) -> None:
    """400 m left of the centreline, and well above a path of three degrees."""
    moved = replace(flight, fused=np.tile([-3000.0, 400.0, 400.0], (len(flight.frame_times), 1)))
    found = positions_of(moved, site_of(flight))
    assert (found.deviations > 0.02).all()


def test_valid_means_no_alert_and_levels_within_the_alert_limits(flight: SimulatedFlight, positions: Positions) -> None:
    answers, limits = flight.track.output, flight.settings.approach_requirement.limits
    within = (answers.levels <= limits).all(1)
    np.testing.assert_array_equal(positions.valid, within & ~answers.alerted)
    wide = replace(answers, levels=answers.levels + 100.0)
    wider = replace(flight, track=replace(flight.track, output=wide))
    assert not positions_of(wider, site_of(flight)).available.any()
    behind = replace(flight, fused=flight.fused + np.array([9e4, 0.0, 0.0]))
    assert not positions_of(behind, site_of(flight)).valid.any()


def test_the_body_points_along_the_track(positions: Positions) -> None:
    """Its forward axis is within the crab angle of the landing direction, its up axis is up."""
    assert (positions.body[:, 0, 0] > np.cos(np.radians(15))).all()
    assert (positions.body[:, 2, 2] > np.cos(np.radians(15))).all()
    np.testing.assert_allclose(np.linalg.det(positions.body), 1.0, rtol=1e-9)


def test_the_csv_file_reads_back(positions: Positions, tmp_path: Path) -> None:
    with write_csv(positions, tmp_path / "positions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(positions)
    read = np.array([[float(row[f"{axis}_m"]) for axis in "xyz"] for row in rows])
    np.testing.assert_array_equal(read, positions.position)
    variance = np.array([float(row["yy_m2"]) for row in rows])
    np.testing.assert_array_equal(variance, positions.covariance[:, 1, 1])
    glide = np.radians([float(row["glide_slope_sigma_deg"]) for row in rows])
    np.testing.assert_allclose(glide, positions.sigma[:, 1], rtol=1e-12)
    assert [row["valid"] == "1" for row in rows] == positions.valid.tolist()
