"""A simulated approach written to files and read back is the same flight; impossible inputs are one-line errors."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halopose.errors import HaloposeError
from halopose.geometry.camera import Mount
from halopose.landing.association import as_pose_distributions
from halopose.landing.flight import SimulatedFlight, draw_initial_state, simulate_sensors
from halopose.landing.landing_settings import UNSURVEYED, CameraErrors, LandingSettings
from halopose.landing.navigation.sensors import in_order
from halopose.landing.recordings.cameras import Lens, read_camera
from halopose.landing.recordings.frames import open_frames
from halopose.landing.recordings.input_checks import check_inputs
from halopose.landing.recordings.logs import Kind, measurements, read_log, read_terrain
from halopose.landing.recordings.record_flight import record
from halopose.landing.recordings.replay import (
    estimate_offset,
    missing,
    read_measurements,
    replay,
    settings_for,
    start_from,
)
from halopose.landing.recordings.runway_sites import Site, from_corners, read_runway
from halopose.landing.reports.flight_page import log_of, render_page
from halopose.landing.reports.flight_text import to_text
from halopose.landing.summary import summarise
from tests.landing.test_flight import approach_of, flown, sighted

SETTINGS = LandingSettings(rate=1.0, camera=CameraErrors(clock=0.0))
SEED = 3


class Recorded:
    """A flight, the folder it was written to, and everything read back."""

    def __init__(self, folder: Path) -> None:
        self.flight: SimulatedFlight = flown(SEED, SETTINGS)
        record(self.flight, folder)
        self.logs: dict[Kind, Path] = {
            kind: folder / f"{kind}.csv" for kind in ("attitude", "gnss", "ils", "radio", "irs")
        }
        self.lens: Lens = read_camera(folder / "camera.yaml")
        self.site: Site = read_runway(folder / "runway.json")
        self.terrain = read_terrain(folder / "terrain.csv", self.site)
        self.settings = replace(SETTINGS, seed=SEED)
        self.measured = read_measurements(self.logs, self.site, self.settings)
        self.seen = as_pose_distributions(sighted(*approach_of(SEED), np.random.default_rng([SEED, 5])))
        self.times = self.flight.frame_times

    def again(self, **changes: Any) -> Any:
        given = {"start": draw_initial_state(self.flight.truth, SEED), "terrain": self.terrain, **changes}
        settings = given.pop("settings", self.settings)
        measured = given.pop("measured", self.measured)
        times, lens = given.pop("times", self.times), given.pop("lens", self.lens)
        return replay(times, given.pop("detections", self.seen), lens, self.site, measured, settings, **given)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(tmp_path_factory.mktemp("approach"))


def test_the_replay_is_the_simulation(recorded: Recorded) -> None:
    """The same detections and logs through files: camera, runway on the earth, csv. Positions to 0.1 mm."""
    again = recorded.again()
    np.testing.assert_allclose(again.fused, recorded.flight.fused, atol=1e-4)
    np.testing.assert_allclose(again.vision_fixes.position, recorded.flight.vision_fixes.position, atol=1e-6)
    np.testing.assert_allclose(again.fused_covariance, recorded.flight.fused_covariance, rtol=1e-4, atol=1e-6)
    assert again.track.source.tolist() == recorded.flight.track.source.tolist()
    assert again.vision_fixes.reasons == recorded.flight.vision_fixes.reasons


def test_frames_are_looked_at_again_where_the_filter_expects_the_runway(recorded: Recorded) -> None:
    """Nothing is found at first; the filter, fed by the other sensors, points at where the runway then is."""
    asked: dict[int, Any] = {}

    class Looks:
        def at(self, n: int, expected: Any) -> Any:
            asked.setdefault(n, expected)
            return recorded.seen[n]

    empty = [poses[:0] for poses in recorded.seen]
    blind = recorded.again(detections=empty)
    assert not blind.corner_detections.seen.any()
    steered = recorded.again(detections=empty, roi_detector=Looks())
    np.testing.assert_allclose(steered.fused, recorded.again().fused, atol=1e-9)
    assert steered.vision_fixes.reasons == recorded.again().vision_fixes.reasons
    assert sorted(asked) == list(range(len(recorded.times)))
    for n, box in asked.items():
        corners = recorded.flight.corner_detections.pixels[n]
        assert (box[:2] < corners.min(0) + 5).all()  # which are noisy
        assert (box[2:] > corners.max(0) - 5).all()


def test_without_truth_there_is_a_page_and_a_log_all_the_same(recorded: Recorded) -> None:
    again = recorded.again()
    summary = summarise(again)
    assert "no true positions" in to_text(summary)
    page = render_page(again, summary)
    assert "true positions are unknown" in page
    assert "nan" not in " ".join(part.split('"')[0] for part in page.split(' d="')[1:])
    assert log_of(again)["frames"][0]["truth"]["position"] is None


def test_a_recorded_runway_lies_as_its_designator_says(recorded: Recorded) -> None:
    assert recorded.site.designator == recorded.flight.scenario.designator
    assert np.degrees(recorded.site.heading) == pytest.approx(10 * int(recorded.site.designator[:2]) % 360, abs=1e-6)
    nameless = from_corners(recorded.site.to_wgs84(recorded.site.corners))
    assert nameless.designator == recorded.site.designator


def test_seed_and_weather_are_of_simulations_alone(recorded: Recorded) -> None:
    assert log_of(recorded.flight)["settings"]["seed"] == SEED
    assert not {"seed", "weather"} & set(log_of(recorded.again())["settings"])


def test_truth_of_a_part_judges_that_part(recorded: Recorded) -> None:
    """Errors are those of the frames with a truth, as if the others were not there."""
    part = np.where(np.arange(len(recorded.times))[:, None] < 12, recorded.flight.position, np.nan)
    again = recorded.again(truth=part)
    summary = summarise(again)
    error = (again.fused - recorded.flight.position)[:12]
    for axis, name in enumerate("xyz"):
        expected = np.sqrt(np.mean(error[:, axis] ** 2))
        assert summary["root_mean_square_error"][name]["fused"] == pytest.approx(expected)
        assert np.isfinite(summary["root_mean_square_error"][name]["vision"])
    far = replace(again, vision_fixes=replace(again.vision_fixes, position=again.vision_fixes.position + 1e3))
    assert summarise(far)["vision_outside_95"] == summarise(far)["trusted_vision_outside_95"] == 1.0
    assert summary["truth_known"] == 12
    assert "12 frames with a known truth" in to_text(summary)


def test_with_truth_it_is_judged(recorded: Recorded) -> None:
    log = read_log(recorded.logs["gnss"].with_name("truth.csv"))
    places = np.array([m.value for m in measurements(log, "gnss", recorded.site, recorded.settings.sensors)])
    np.testing.assert_allclose(places, recorded.flight.position, atol=1e-6)
    again = recorded.again(truth=places)
    np.testing.assert_allclose(again.nees, recorded.flight.nees, rtol=1e-3)
    assert summarise(again)["fused_nees"] == pytest.approx(summarise(recorded.flight)["fused_nees"], rel=1e-4)


def test_it_begins_where_gnss_is_or_where_the_runway_is_seen_from(recorded: Recorded) -> None:
    begin = recorded.again(start=None)
    near = np.abs(begin.fused[3:] - recorded.flight.fused[3:]).max()
    assert near < 3.0
    logs: dict[Kind, Path] = {"attitude": recorded.logs["attitude"]}
    alone = settings_for(logs, recorded.times, camera=CameraErrors(clock=0.0))
    measured = read_measurements(logs, recorded.site, alone)
    assert "gnss, ils, radio, irs; vision alone" in missing(logs)
    found = recorded.again(start=None, settings=alone, measured=measured)
    error = np.linalg.norm(found.fused - recorded.flight.position, axis=1)
    sigma = np.sqrt(np.trace(found.fused_covariance, axis1=1, axis2=2))
    assert np.median(error / sigma) < 3


def test_some_wrong_first_fixes_do_not_move_where_it_begins(recorded: Recorded) -> None:
    fixes = [n for n, each in enumerate(recorded.measured) if each.source == "gnss"]
    wrong = list(recorded.measured)
    for n in fixes[:4]:
        wrong[n] = replace(wrong[n], value=np.array([9e4, -5e4, 1e4]))
    eye: Any = None
    start, other = (start_from(each, recorded.times, recorded.seen, eye) for each in (recorded.measured, wrong))
    places = np.array([start.position, other.position], dtype=float)
    assert np.abs(places - recorded.flight.truth.positions[0]).max() < 10
    assert np.ptp(np.array([start.velocity, other.velocity], dtype=float), axis=0).max() < 3


def test_without_an_attitude_the_whole_pose_is_solved_for(recorded: Recorded) -> None:
    logs: dict[Kind, Path] = {kind: path for kind, path in recorded.logs.items() if kind != "attitude"}
    settings = settings_for(logs, recorded.times)
    assert settings.attitude == "vision"
    assert "whole pose" in missing(logs)
    again = recorded.again(settings=settings, measured=read_measurements(logs, recorded.site, settings))
    assert again.vision_fixes.solved.any()


@pytest.mark.parametrize("rate", [10.0, 2.0])
@pytest.mark.parametrize("seed", [1, SEED, 5])
def test_an_offset_of_the_clocks_is_found_or_refused(rate: float, seed: int) -> None:
    """Noisy corners, stamped early by some tenths; by more than is looked for nothing may be found."""
    approach, truth, _ = approach_of(seed)
    settings = replace(SETTINGS, seed=seed)
    measured = simulate_sensors(approach, truth, settings)[1]
    lens = Lens(*settings.camera.believed(approach.world.camera, approach.world.mount, seed))
    times = np.arange(0.5, truth.times[-1] - 1, 1 / rate)
    seen = as_pose_distributions(sighted(approach, truth, times, np.random.default_rng(0)))
    for early in (0.0, 0.46, -1.5):
        assert estimate_offset(times - early, seen, lens, measured) == pytest.approx(early, abs=0.1)
    for early in (3.0, -6.0):
        with pytest.raises(HaloposeError, match="no offset within 2 s"):
            estimate_offset(times - early, seen, lens, measured)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"times": np.arange(32.0)[::-1]}, "out of order"),
        ({"times": np.arange(32.0) + 1e6}, "--offset"),
        ({"lens": "backwards"}, "behind the camera"),
        ({"times": np.array([])}, "no frames"),
    ],
)
def test_impossible_recordings_are_refused(recorded: Recorded, change: dict[str, Any], words: str) -> None:
    if change.get("lens") == "backwards":
        change = {"lens": Lens(recorded.lens.camera, Mount.looking(yaw=np.pi))}
    if "times" in change and len(change["times"]):
        change = {"times": change["times"][: len(recorded.times)]}
    with pytest.raises(HaloposeError, match=words) as caught:
        recorded.again(**change)
    assert "\n" not in str(caught.value)


def test_a_runway_without_a_survey_leaves_single_frames_without_a_level(recorded: Recorded) -> None:
    """Wrong runway data are not noticed in a frame, and those of the table are too likely to be wrong."""
    assert recorded.site.surveyed
    assert not read_runway("KSFO/28R").surveyed
    for prior, words in ((recorded.settings.runway_fault, False), (UNSURVEYED, True)):
        again = recorded.again(settings=replace(recorded.settings, runway_fault=prior))
        assert np.isinf(again.vision_fixes.levels).all() == words
        assert ("infinite" in to_text(summarise(again))) == words


def test_a_wrong_height_datum_and_a_magnetic_heading_are_named(recorded: Recorded) -> None:
    def checked(source: str, error: tuple[float, float, float]) -> list[str]:
        wrong = [replace(m, value=m.value + error) if m.source == source else m for m in recorded.measured]
        return check_inputs(recorded.times, recorded.seen, recorded.lens, recorded.site, wrong)

    assert checked("gnss", (0.0, 0.0, 0.0)) == []
    assert checked("gnss", (0.0, 60.0, 0.0)) == []
    [height] = checked("gnss", (0.0, 0.0, -32.0))
    assert re.search(r"3\d m below", height)
    [heading] = checked("attitude", (np.radians(-13.0), 0.0, 0.0))
    assert "-13." in heading or "-12.9" in heading
    assert "magnetic" in heading


@pytest.mark.parametrize("offset", [120.0, 250.0, 500.0])
@pytest.mark.parametrize("with_ils", [False, True])
def test_gnss_that_is_off_from_the_first_frame_is_flagged_in_time(
    recorded: Recorded, offset: float, with_ils: bool
) -> None:
    """The camera sees the runway elsewhere: flagged within 6 s, invalid until GNSS is excluded, never the localizer."""
    kinds = ("attitude", "gnss", "ils", "radio", "irs") if with_ils else ("attitude", "gnss")
    logs: dict[Kind, Path] = {kind: path for kind, path in recorded.logs.items() if kind in kinds}
    settings = settings_for(logs, recorded.times, SETTINGS)
    measured = [
        replace(m, value=m.value + np.array([0.0, offset, 0.0])) if m.source == "gnss" else m
        for m in read_measurements(logs, recorded.site, settings)
    ]
    flight = recorded.again(start=None, measured=measured, settings=settings)
    answers = flight.track.output
    valid = answers.valid(settings.approach_requirement)
    excluded = np.array(["GNSS excluded" in words for words in answers.flags])
    assert answers.flagged[recorded.times >= 6.0].all()
    assert not valid[~excluded].any()
    assert excluded.any() == with_ils
    assert not any("localizer excluded" in words for words in answers.flags)
    error = np.abs(flight.fused - recorded.flight.position)[:, 1]
    assert (error[valid] < 40).all()


def test_detections_that_were_discarded_are_counted(recorded: Recorded) -> None:
    wrong = [
        replace(m, value=m.value + np.array([0.0, 250.0, 0.0])) if m.source == "gnss" else m for m in recorded.measured
    ]
    summary = summarise(recorded.again(start=None, measured=wrong))
    assert summary["frames_with_detections"] == len(recorded.times)
    assert f"detections in {len(recorded.times)}" in to_text(summary)


@pytest.mark.parametrize("kind", ["attitude", "gnss", "ils", "radio", "irs"])
def test_a_log_on_another_clock_is_named(recorded: Recorded, kind: str) -> None:
    sources = {"ils": ("localizer", "glide_slope")}.get(kind, (kind,))
    late = [replace(m, time=m.time + 1.7e9) if m.source in sources else m for m in recorded.measured]
    with pytest.raises(HaloposeError, match=f"the log of {kind} from 17.* leave out --{kind}$"):
        recorded.again(measured=in_order(late))


def test_nowhere_to_begin_is_a_one_line_error(recorded: Recorded) -> None:
    blank = [poses[:0] for poses in recorded.seen]
    eye: Any = None
    with pytest.raises(HaloposeError, match="initial position"):
        start_from([], recorded.times, blank, eye)


def test_frames_without_times_are_one_line_errors(tmp_path: Path) -> None:
    with pytest.raises(HaloposeError, match="no images"):
        open_frames(tmp_path)
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(HaloposeError, match="--frame-rate"):
        open_frames(tmp_path)
    with pytest.raises(HaloposeError, match="neither a film"):
        open_frames(Path(__file__))
