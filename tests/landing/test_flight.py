"""Flights with made-up sightings: solved, checked and fused consistently, whatever goes wrong in between."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from halopose.errors import HaloposeError
from halopose.geometry.camera import perturb, rotation_from_angles
from halopose.landing.fixes import angle_axes, solve, usable_corners
from halopose.landing.flight import _measured, _start, at, conclude, given_attitudes, land, truth_of
from halopose.landing.navigation.fusion import consistency, fuse
from halopose.landing.navigation.sensors import ATTITUDE, GNSS, GaussMarkov, Measurement, Sensors
from halopose.landing.settings import LandingSettings
from halopose.landing.sighting import Sightings, expected_corners
from halopose.landing.summary import distances, summarise, to_text, total_covariance
from halopose.landing.world.approach import fly
from halopose.poses import PoseDistributions

ALONE = Sensors(gnss=None, localizer=None, glide_slope=None, radio=None)


def approach_of(seed, end=300.0):
    approach = fly(seed, "clear", 100.0, start=2500.0, end=end)
    truth = truth_of(approach)
    return approach, truth, np.arange(0.0, truth.times[-1], 1.0)


def sighted(approach, truth, times, rng, wrong=None):
    """True corners with Gaussian noise of covariances that differ by corner; ``wrong`` moves one far away."""
    world = approach.world
    exact = expected_corners(
        world.camera, world.mount, truth.position(times), truth.attitude(times), world.runway.corners()
    )
    root = rng.normal(size=(len(times), 4, 2, 2)) * 0.3 + 0.5 * np.eye(2)
    pixels = exact + (root @ rng.normal(size=(len(times), 4, 2, 1)))[..., 0]
    if wrong is not None:
        pixels[:, wrong] += (25.0, -18.0)
    covariance = root @ np.swapaxes(root, -1, -2) + 1e-3 * np.eye(2)
    keep = np.ones((len(times), 4), dtype=bool)
    return Sightings(pixels, covariance, covariance, keep, np.ones(len(times)))


def flown(seed, settings=None, wrong=None):
    parts = approach_of(seed)
    settings = replace(settings or LandingSettings(rate=1.0), seed=seed)
    return conclude(*parts, sighted(*parts, np.random.default_rng([seed, 5]), wrong), settings)


@pytest.fixture(scope="module")
def flights():
    return [flown(seed, LandingSettings(rate=1.0, sensors=ALONE, persistence=0.0)) for seed in range(24)]


def test_vision_covers_what_it_promises(flights):
    inside = [
        distances(f.fixes.position - f.position, total_covariance(f))[f.fixes.trusted] < 7.815 for f in flights
    ]
    assert 0.92 < np.concatenate(inside).mean() < 0.98


def test_the_fused_track_is_consistent(flights):
    for part in (0.3, 0.6, 0.95):
        values = [flight.nees[int(part * len(flight.nees))] for flight in flights]
        assert consistency(values, 3, probability=0.999).consistent


def test_false_alarms_are_as_rare_as_asked_for(flights):
    alarmed = np.concatenate([~flight.fixes.trusted[flight.fixes.solved] for flight in flights])
    assert alarmed.mean() < 0.03


def test_a_wrong_corner_is_left_out_or_the_frame_is():
    flight = flown(3, wrong=2)
    good = flight.fixes.solved
    assert ((flight.fixes.excluded == 2) | ~flight.fixes.trusted)[good].mean() > 0.9
    unchecked = flown(3, LandingSettings(rate=1.0, integrity=False), wrong=2)
    trusted = flight.fixes.trusted
    error, other = (np.linalg.norm((f.fixes.position - f.position)[trusted], axis=1) for f in (flight, unchecked))
    assert np.median(error) < 0.2 * np.nanmedian(other)


def test_frames_without_the_runway_say_so():
    approach, truth, times = approach_of(1)
    sightings = sighted(approach, truth, times, np.random.default_rng(0))
    sightings.pixels[5], sightings.covariance[5], sightings.keep[5], sightings.score[5] = (
        np.nan,
        np.nan,
        False,
        0.0,
    )
    flight = conclude(approach, truth, times, sightings, LandingSettings(seed=1, rate=1.0))
    assert flight.fixes.reasons[5] == "no runway detected"
    assert np.isnan(flight.fixes.position[5]).all()
    assert not flight.fixes.trusted[5]
    assert np.isfinite(flight.fused).all()


def test_the_whole_pose_needs_no_attitude():
    settings = LandingSettings(rate=1.0, attitude="vision", sensors=replace(Sensors(), attitude=None))
    flight = flown(2, settings)
    near = flight.position[:, 0] > -1200
    assert flight.fixes.trusted[near].mean() > 0.8
    assert np.all(flight.fixes.sensitivity[flight.fixes.solved] == 0)
    with pytest.raises(HaloposeError, match="--attitude vision"):
        LandingSettings(sensors=replace(Sensors(), attitude=None))


def test_pruned_corners_are_left_out_while_enough_remain():
    keep = np.array([[1, 1, 1, 0], [1, 0, 0, 1], [1, 1, 1, 1]], dtype=bool)
    blank = np.zeros((3, 4, 2))
    sightings = Sightings(blank, blank[..., None], blank[..., None], keep, np.ones(3))
    assert usable_corners(sightings, LandingSettings()).sum(1).tolist() == [3, 4, 4]
    assert usable_corners(sightings, LandingSettings(prune=False)).all()
    assert usable_corners(sightings, LandingSettings(attitude="vision")).all()


def test_angle_axes_turn_as_the_angles_do():
    rng = np.random.default_rng(4)
    attitudes, change = rng.normal(0, 0.2, (20, 3)), rng.normal(0, 1e-5, (20, 3))
    turn = (angle_axes(attitudes) @ change[..., None])[..., 0]
    moved, _ = perturb(
        rotation_from_angles(*attitudes.T), np.zeros((20, 3)), np.concatenate([np.zeros((20, 3)), turn], axis=1)
    )
    np.testing.assert_allclose(moved, rotation_from_angles(*(attitudes + change).T), atol=1e-9)


def test_sensitivity_is_how_far_the_position_moves():
    flight = flown(6, LandingSettings(rate=1.0, integrity=False))
    world, step = flight.approach.world, np.array([1e-5, -2e-5, 3e-5])
    known = (flight.sightings, world.camera, world.mount, world.runway.corners())
    attitudes = given_attitudes(flight)
    low, high = (solve(*known, attitudes + sign * step, flight.settings).position for sign in (-1, 1))
    expected = 2 * (flight.fixes.sensitivity @ step[:, None])[..., 0]
    good = np.isfinite(low).all(1) & np.isfinite(high).all(1)
    np.testing.assert_allclose((high - low)[good], expected[good], rtol=0.15, atol=2e-3)


def test_between_measurements_the_aircraft_flies_on():
    """GNSS alone falls silent and comes back: the filter itself says what it would have been in between."""
    approach, truth, _ = approach_of(7)
    start = _start(truth, 7)
    silent = replace(GNSS, rate=1.0, outages=((0.0, 2.5), (5.5, 9.5)))
    only = replace(LandingSettings(seed=7), sensors=replace(ALONE, irs=None, gnss=silent))
    fusion, measured = _measured(approach, truth, only)
    times = np.array([0.0, 2.0, 5.25, 9.0])
    blind = [Measurement(time, "vision", np.zeros(3), 1e12 * np.eye(3)) for time in times.tolist()]
    queried = fuse([*measured, *blind], start, replace(fusion, gate=1.0))
    position, spread = at(fuse(measured, start, replace(fusion, gate=1.0)), times, start, fusion.coasting)
    rows = np.searchsorted(queried.times, times)
    np.testing.assert_allclose(position, queried.positions[rows], rtol=1e-4)
    np.testing.assert_allclose(spread, queried.position_covariances[rows], rtol=1e-4, atol=1e-4)


def test_the_filter_knows_the_sensors_on_board():
    approach, truth, _ = approach_of(7)
    worse = GaussMarkov((5e-3, 5e-3, 5e-3), 60.0)
    sensors = Sensors(radio=None, attitude=replace(ATTITUDE, bias=worse))
    fusion, _ = _measured(approach, truth, LandingSettings(sensors=sensors))
    assert fusion.attitude_bias == worse
    assert fusion.gnss_bias == GNSS.bias


class Oracle:
    """Stands in for the detector: it knows where the corners are, frame by frame."""

    def __init__(self, settings):
        approach = fly(settings.seed, settings.weather, 100.0)
        truth = truth_of(approach)
        times = np.arange(0.0, truth.times[-1], 1 / settings.rate)
        self.left = list(sighted(approach, truth, times, np.random.default_rng(1)).pixels)

    def predict(self, image, conf):
        assert image.shape == (384, 640, 3)
        corners = self.left.pop(0)[None]
        spread = np.broadcast_to(0.5 * np.eye(2), (1, 4, 2, 2)).copy()
        boxes = np.concatenate([corners.min(1), corners.max(1)], axis=1)
        return [PoseDistributions(boxes, np.ones(1), corners, spread, spread)]


def test_a_whole_landing_and_its_summary():
    settings = LandingSettings(seed=5, rate=0.1)
    flight = land(Oracle(settings), settings)
    summary = summarise(flight)
    assert summary["frames"] == len(flight.images) == len(flight.frame_times)
    assert summary["trusted"] >= 0.8 * summary["frames"]
    assert summary["root_mean_square_error"]["z"]["fused"] < 3
    assert "frames: runway detected" in to_text(summary)


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("rate", [0.0, -1.0, 101.0, np.nan]),
        ("seed", [-1]),
        ("weather", ["snow"]),
        ("attitude", ["gyro"]),
        ("conf", [-0.1, 1.1, np.nan]),
        ("persistence", [-1.0, np.inf, np.nan]),
        ("false_alarm", [0.0, 1.0, -1e-3, np.nan]),
        ("requirement", ["cat-4"]),
        ("fault_probability", [0.0, 1.0, np.inf, np.nan]),
    ],
)
def test_senseless_settings_are_refused_before_anything_flies(setting, values):
    for value in values:
        with pytest.raises(HaloposeError):
            LandingSettings(**{setting: value})


def test_a_model_of_something_else_is_refused_at_the_first_image(monkeypatch):
    drawn = []
    monkeypatch.setattr("halopose.landing.flight.render", drawn.append)
    empty = np.zeros((0, 17, 2, 2))
    people = PoseDistributions(np.zeros((0, 4)), np.zeros(0), np.zeros((0, 17, 2)), empty, empty)
    model = SimpleNamespace(predict=lambda image, conf: [people])
    with pytest.raises(HaloposeError, match="this model has 17 keypoints"):
        land(model, LandingSettings())
    assert len(drawn) == 1


def test_persistent_errors_count_as_fewer_frames():
    """The mean of errors that decay as rho has the variance of so many fewer independent ones."""
    settings = LandingSettings(rate=2.0, persistence=3.0)
    rho, count = np.exp(-1 / 6), 4000
    lags = np.arange(1, count)
    variance = (1 + 2 * ((1 - lags / count) * rho**lags).sum()) / count
    assert settings.repetition == pytest.approx(variance * count, rel=0.01)
    assert LandingSettings(persistence=0.0).repetition == 1.0
