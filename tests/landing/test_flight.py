"""Flights with simulated detections: solved, checked and fused consistently, also under faults."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from halopose.errors import HaloposeError
from halopose.geometry.camera import perturb, rotation_from_angles
from halopose.landing.association import (
    NOT_WHERE_EXPECTED,
    OUT_OF_DISTRIBUTION,
    CornerDetections,
    as_pose_distributions,
    expected_corners,
)
from halopose.landing.flight import (
    SimulatedFlight,
    land,
    navigate,
    simulate_sensors,
    true_trajectory,
    vision_model_of,
)
from halopose.landing.landing_settings import CameraErrors, CornerCorrelation, LandingSettings
from halopose.landing.navigation.fusion import consistency
from halopose.landing.navigation.sensors import ATTITUDE, GNSS, GaussMarkov, Sensors, TrueTrajectory
from halopose.landing.reports.flight_page import log_of
from halopose.landing.summary import distances, summarise, total_covariance
from halopose.landing.vision_fix import angle_axes, solve, usable_corners
from halopose.landing.world.approach import fly
from halopose.poses import PoseDistributions
from halopose.prediction.uncertain_pose import UncertainPose
from halopose.types import Array

ALONE = Sensors(gnss=None, localizer=None, glide_slope=None, radio=None)


INDEPENDENT = LandingSettings(
    rate=1.0, sensors=ALONE, persistent_share=(0.0, 0.0, 0.0), corner_correlation=CornerCorrelation(0.0, 0.0, 0.0)
)


def approach_of(seed: int, end: float = 300.0) -> tuple[Any, TrueTrajectory, Array]:
    approach = fly(seed, "clear", 100.0, start=2500.0, end=end)
    truth = true_trajectory(approach)
    return approach, truth, np.arange(0.0, truth.times[-1], 1.0)


def sighted(
    approach: Any, truth: TrueTrajectory, times: Array, rng: np.random.Generator, wrong: Any = None
) -> CornerDetections:
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
    return CornerDetections(pixels, covariance, covariance, keep, np.ones(len(times)))


def flown(seed: int, settings: Any = None, wrong: Any = None) -> SimulatedFlight:
    parts = approach_of(seed)
    settings = replace(settings or LandingSettings(rate=1.0), seed=seed)
    return navigate(*parts, as_pose_distributions(sighted(*parts, np.random.default_rng([seed, 5]), wrong)), settings)


@pytest.fixture(scope="module")
def flights() -> list[SimulatedFlight]:
    return [flown(seed, INDEPENDENT) for seed in range(10)]


def test_vision_fixes_have_their_stated_coverage(flights: list[SimulatedFlight]) -> None:
    inside = [
        distances(f.vision_fixes.position - f.position, total_covariance(f))[f.vision_fixes.trusted] < 7.815
        for f in flights
    ]
    assert 0.92 < np.concatenate(inside).mean() < 0.98


def test_the_fused_track_is_consistent(flights: list[SimulatedFlight]) -> None:
    for part in (0.3, 0.6, 0.95):
        values = [flight.nees[int(part * len(flight.nees))] for flight in flights]
        assert consistency(values, 3, probability=0.999).consistent


def test_false_alarm_rate_is_below_the_setting(flights: list[SimulatedFlight]) -> None:
    alarmed = np.concatenate([~flight.vision_fixes.trusted[flight.corner_detections.seen] for flight in flights])
    assert alarmed.mean() < 0.01
    assert not any(flight.track.output.flagged.any() for flight in flights)


def test_a_wrong_corner_is_left_out_or_the_frame_is() -> None:
    flight = flown(3, wrong=2)
    good = flight.vision_fixes.solved
    assert ((flight.vision_fixes.excluded == 2) | ~flight.vision_fixes.trusted)[good].mean() > 0.9
    unchecked = flown(3, LandingSettings(rate=1.0, integrity=False), wrong=2)
    trusted = flight.vision_fixes.trusted
    error, other = (
        np.linalg.norm((f.vision_fixes.position - f.position)[trusted], axis=1) for f in (flight, unchecked)
    )
    assert np.isfinite(error).all()
    assert np.median(error) < 0.25 * np.nanmedian(other)


def test_frames_without_the_runway_are_marked() -> None:
    approach, truth, times = approach_of(1)
    corner_detections = sighted(approach, truth, times, np.random.default_rng(0))
    (
        corner_detections.pixels[5],
        corner_detections.covariance[5],
        corner_detections.keep[5],
        corner_detections.score[5],
    ) = (
        np.nan,
        np.nan,
        False,
        0.0,
    )
    flight = navigate(
        approach, truth, times, as_pose_distributions(corner_detections), LandingSettings(seed=1, rate=1.0)
    )
    assert flight.vision_fixes.reasons[5] == "no runway detected"
    assert np.isnan(flight.vision_fixes.position[5]).all()
    assert not flight.vision_fixes.trusted[5]
    assert np.isfinite(flight.fused).all()


def test_the_log_states_the_outcome_of_each_fix() -> None:
    """Images are stamped late by the camera's clock, and that is when the filter has them."""
    flight = flown(3)
    assert not np.array_equal(flight.stamps, flight.frame_times)
    updates = [frame["vision"] for frame in log_of(flight)["frames"]]
    found = [update["nis"] for update in updates if update["nis"] is not None]
    np.testing.assert_array_equal(np.sort(found), np.sort(flight.track.nis_of("vision")))
    assert [update["nis"] is not None for update in updates] == flight.vision_fixes.trusted.tolist()


def test_out_of_distribution_detections_are_not_used() -> None:
    approach, truth, times = approach_of(1)
    seen = as_pose_distributions(sighted(approach, truth, times, np.random.default_rng(0)))
    seen = [replace(each, novelty=np.full(len(each), 0.01 if n == 5 else 0.5)) for n, each in enumerate(seen)]
    settings = LandingSettings(seed=1, rate=1.0)
    flight = navigate(approach, truth, times, seen, settings)
    assert flight.vision_fixes.reasons[5] == OUT_OF_DISTRIBUTION
    assert not flight.vision_fixes.trusted[5]
    assert flight.vision_fixes.trusted[4]
    used = navigate(approach, truth, times, seen, replace(settings, alarm=0.0))
    assert used.vision_fixes.trusted[5]
    with pytest.raises(HaloposeError, match="alarm"):
        LandingSettings(alarm=1.5)


def test_the_whole_pose_needs_no_attitude() -> None:
    settings = LandingSettings(rate=1.0, attitude="vision", sensors=replace(Sensors(), attitude=None))
    flight = flown(2, settings)
    near = flight.position[:, 0] > -1200
    assert flight.vision_fixes.trusted[near].mean() > 0.8
    assert np.all(flight.vision_fixes.sensitivity[flight.vision_fixes.solved] == 0)
    with pytest.raises(HaloposeError, match="--attitude vision"):
        LandingSettings(sensors=replace(Sensors(), attitude=None))


def test_pruned_corners_are_left_out_while_enough_remain() -> None:
    keep = np.array([[1, 1, 1, 0], [1, 0, 0, 1], [1, 1, 1, 1]], dtype=bool)
    blank = np.zeros((3, 4, 2))
    corner_detections = CornerDetections(blank, blank[..., None], blank[..., None], keep, np.ones(3))
    assert usable_corners(corner_detections, LandingSettings()).sum(1).tolist() == [3, 4, 4]
    assert usable_corners(corner_detections, LandingSettings(prune=False)).all()
    assert usable_corners(corner_detections, LandingSettings(attitude="vision")).all()


def test_angle_axes_turn_as_the_angles_do() -> None:
    rng = np.random.default_rng(4)
    attitudes, change = rng.normal(0, 0.2, (20, 3)), rng.normal(0, 1e-5, (20, 3))
    turn = (angle_axes(attitudes) @ change[..., None])[..., 0]
    moved, _ = perturb(
        rotation_from_angles(*attitudes.T), np.zeros((20, 3)), np.concatenate([np.zeros((20, 3)), turn], axis=1)
    )
    np.testing.assert_allclose(moved, rotation_from_angles(*(attitudes + change).T), atol=1e-9)


def test_sensitivity_is_how_far_the_position_moves() -> None:
    flight = flown(6, LandingSettings(rate=1.0, integrity=False))
    _, measured = simulate_sensors(flight.approach, flight.truth, flight.settings)
    eye = vision_model_of(flight.approach, measured, flight.frame_times, flight.settings)
    step = np.array([1e-5, -2e-5, 3e-5])
    low, high = (
        solve(flight.corner_detections, replace(eye, attitudes=eye.attitudes + sign * step)).position
        for sign in (-1, 1)
    )
    expected = 2 * (flight.vision_fixes.sensitivity @ step[:, None])[..., 0]
    good = np.isfinite(low).all(1) & np.isfinite(high).all(1) & (flight.position[:, 0] > -1500)
    np.testing.assert_allclose((high - low)[good], expected[good], rtol=0.15, atol=5e-3)


def test_a_parallel_runway_that_is_all_there_is_to_see_is_not_used() -> None:
    parts = approach_of(4)
    approach, truth, times = parts
    world = approach.world
    beside = world.runway.corners() + np.array([0.0, 229.0, 0.0])
    corner_detections = sighted(*parts, np.random.default_rng(2))
    pixels = expected_corners(world.camera, world.mount, truth.position(times), truth.attitude(times), beside)
    flight = navigate(
        *parts, as_pose_distributions(replace(corner_detections, pixels=pixels)), LandingSettings(seed=4, rate=1.0)
    )
    assert not flight.corner_detections.seen.any()
    assert set(flight.vision_fixes.reasons) == {NOT_WHERE_EXPECTED}
    assert flight.track.output.flags[-1] == ("vision excluded",)
    assert np.abs(flight.fused - flight.position)[:, 1].max() < 10


def test_late_images_are_put_in_their_place() -> None:
    """Images that take 0.3 s give nearly the same flight as images that take no time."""
    now, late = (
        flown(5, replace(INDEPENDENT, camera=CameraErrors(clock=0.0, latency=seconds))) for seconds in (0.0, 0.3)
    )
    np.testing.assert_allclose(late.fused, now.fused, atol=0.05)


def test_an_uncertain_camera_mounting_widens_the_covariance() -> None:
    sure, unsure = (
        flown(5, replace(INDEPENDENT, camera=CameraErrors(mounting=m, centre=c))) for m, c in ((0.0, 0.0), (5e-3, 5.0))
    )
    good = sure.vision_fixes.solved & unsure.vision_fixes.solved
    assert (unsure.vision_fixes.levels[good] > sure.vision_fixes.levels[good]).mean() > 0.9
    inside = distances(unsure.vision_fixes.position - unsure.position, total_covariance(unsure))[good] < 16.3
    assert inside.mean() > 0.8  # one draw of each error lasts for the whole flight


def test_the_filter_knows_the_sensors_on_board() -> None:
    approach, truth, _ = approach_of(7)
    worse = GaussMarkov((5e-3, 5e-3, 5e-3), 60.0)
    sensors = Sensors(radio=None, attitude=replace(ATTITUDE, bias=worse))
    fusion, _ = simulate_sensors(approach, truth, LandingSettings(sensors=sensors))
    assert fusion.attitude_bias == worse
    assert fusion.gnss_bias == GNSS.bias


class Oracle:
    """Stands in for the detector: it knows where the corners are, frame by frame."""

    def __init__(self, settings: Any, start: float = 6000.0) -> None:
        approach = fly(settings.seed, settings.weather, 100.0, start=start)
        truth = true_trajectory(approach)
        times = np.arange(0.0, truth.times[-1], 1 / settings.rate)
        self.left = list(sighted(approach, truth, times, np.random.default_rng(1)).pixels)

    def predict(self, image: Array, conf: float) -> list[PoseDistributions]:
        assert image.shape == (384, 640, 3)
        corners = self.left.pop(0)[None]
        spread = np.broadcast_to(0.5 * np.eye(2), (1, 4, 2, 2)).copy()
        boxes = np.concatenate([corners.min(1), corners.max(1)], axis=1)
        return [PoseDistributions(boxes, np.ones(1), corners, spread, spread)]


def test_a_whole_landing_and_its_summary() -> None:
    settings = LandingSettings(seed=5, rate=0.1)
    flight = land(cast(UncertainPose, Oracle(settings)), settings)
    summary = summarise(flight)
    assert summary["frames"] == len(flight.images) == len(flight.frame_times)
    assert summary["trusted"] >= 0.8 * summary["frames"]
    assert summary["root_mean_square_error"]["z"]["fused"] < 3


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("rate", [0.0, -1.0, 101.0, np.nan]),
        ("seed", [-1]),
        ("weather", ["snow"]),
        ("attitude", ["gyro"]),
        ("conf", [-0.1, 1.1, np.nan]),
        ("persistence_s", [-1.0, 0.0, np.inf, np.nan]),
        ("persistent_share", [(1.0, 0.0, 0.0), (-0.1, 0.0, 0.0)]),
        ("false_alarm", [0.0, 1.0, -1e-3, np.nan]),
        ("requirement", ["cat-4"]),
        ("fault_probability", [0.0, 1.0, np.inf, np.nan]),
    ],
)
def test_senseless_settings_are_refused_before_anything_flies(setting: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(HaloposeError):
            LandingSettings(**{setting: value})


def test_a_model_of_something_else_is_refused_at_the_first_image(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("halopose.landing.flight.render_scene", drawn.append)
    empty = np.zeros((0, 17, 2, 2))
    people = PoseDistributions(np.zeros((0, 4)), np.zeros(0), np.zeros((0, 17, 2)), empty, empty)
    model = SimpleNamespace(predict=lambda image, conf: [people])
    with pytest.raises(HaloposeError, match="17 keypoints"):
        land(cast(UncertainPose, model), LandingSettings())
    assert len(drawn) == 1


def test_correlated_corner_errors_keep_their_covariance() -> None:
    rng = np.random.default_rng(3)
    root = rng.normal(size=(5, 4, 2, 2))
    covariance = root @ np.swapaxes(root, 2, 3)
    own, shared = CornerCorrelation(0.3, 0.6, 0.2).parts(covariance)
    np.testing.assert_allclose(own + shared @ np.swapaxes(shared, 2, 3), covariance, atol=1e-12)
    flat = shared.reshape(5, 8, 3)
    together = flat @ np.swapaxes(flat, 1, 2)
    level = np.linalg.cholesky(covariance)[..., 0, 0]  # along u alone
    np.testing.assert_allclose(together[:, 0, 2], -0.3 * level[:, 0] * level[:, 1], rtol=1e-9)
    with pytest.raises(HaloposeError, match="lift"):
        CornerCorrelation(lift=1.0)
    with pytest.raises(HaloposeError, match="size and lift"):
        CornerCorrelation(size=0.5, lift=0.5)
