"""The commands land simulate, land replay and world: flights with an oracle detector, files, and refused options."""

import csv
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halopose.cli.app import main
from halopose.data.dataset_loading import load_dataset
from halopose.geometry.camera import Camera
from halopose.install_advice import install_command
from halopose.landing.commands import _sensors
from halopose.landing.flight import navigate, rendered_images
from halopose.landing.landing_settings import LandingSettings
from halopose.landing.navigation.sensors import GNSS, Sensors
from halopose.landing.recordings.record_flight import record
from halopose.landing.world.approach import fly
from halopose.poses import PoseDistributions
from halopose.prediction.deployed_pose import DeployedPose
from halopose.prediction.uncertain_pose import UncertainPose
from halopose.types import Array
from tests.helpers.commands import refused, run
from tests.helpers.values import present
from tests.landing.test_flight import Oracle, approach_of

SLOW = ("--rate", "0.1", "--no-animation")
START = 3500.0  # metres before the threshold: 45 seconds


class Blind:
    """A detector that never finds anything."""

    def __init__(self, keypoints: int = 4) -> None:
        spread = np.zeros((0, keypoints, 2, 2))
        self.nothing = PoseDistributions(np.zeros((0, 4)), np.zeros(0), np.zeros((0, keypoints, 2)), spread, spread)

    def predict(self, image: Array, conf: float) -> list[PoseDistributions]:
        return [self.nothing]


@pytest.fixture
def land(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run ``halopose land COMMAND`` with an oracle detector and blank images; returns its log and its output."""

    def run(command: str, *options: Any, model: Any = None) -> Any:
        model = model or Oracle(LandingSettings(rate=0.1), START)
        monkeypatch.setattr("halopose.landing.flight.fly", partial(fly, start=START))
        blank = np.zeros((384, 640, 3), dtype=np.uint8)
        monkeypatch.setattr("halopose.landing.flight.render_scene", lambda scene: blank)
        monkeypatch.setattr("halopose.hosts.model_zoo.packaged_file", lambda name: tmp_path / name)
        monkeypatch.setattr("halopose.prediction.uncertain_pose.UncertainPose.load", lambda *given, **more: model)
        slow = SLOW[2:] if command == "replay" else SLOW
        words = "-o", tmp_path, *slow, *options
        monkeypatch.setattr(sys, "argv", ["halopose", "land", command, *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 0
        log = json.loads((tmp_path / "log.json").read_text(), parse_constant=pytest.fail)
        assert "</html>" in (tmp_path / "landing.html").read_text()
        return log, capsys.readouterr().out

    return run


def test_sensors_are_left_out_and_have_outages_by_name() -> None:
    sensors = _sensors("ils, radio", ["gnss:20-60", "gnss : 70-80.5"])
    assert [source for source, _ in sensors.on_board()] == ["irs", "gnss", "attitude"]
    assert present(sensors.gnss).outages == ((20.0, 60.0), (70.0, 80.5))
    assert present(sensors.gnss).noise == GNSS.noise
    assert _sensors(None, []) == Sensors()
    both = _sensors(None, ["ils:1-2"])
    assert present(both.localizer).outages == present(both.glide_slope).outages == ((1.0, 2.0),)


def test_flight_is_written_and_summarised(land: Callable[..., Any]) -> None:
    log, printed = land("simulate", "--outage", "gnss:20-60")
    assert log["summary"]["trusted"] >= 0.8 * log["summary"]["frames"]
    assert log["sensors"]["gnss"]["outages"] == [[20.0, 60.0]]
    assert "landing.html" in printed
    assert "landing.webp" not in printed


def test_positions_are_written_for_others(land: Callable[..., Any], tmp_path: Path) -> None:
    viewer = find_spec("rerun") is not None  # which Python 3.10 does not have
    log, printed = land("simulate", "--write", "csv, mcap,rerun" if viewer else "csv, mcap")
    with (tmp_path / "positions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["x_m"]) for row in rows] == [frame["fused"]["position"][0] for frame in log["frames"]]
    assert (tmp_path / "positions.mcap").read_bytes().startswith(b"\x89MCAP")
    assert not viewer or (tmp_path / "landing.rrd").stat().st_size > 1000
    assert "positions.mcap" in printed


def test_a_recorded_flight_is_landed_on_from_its_files(land: Callable[..., Any], tmp_path: Path) -> None:
    """Simulated, written as film, yaml, json and csv, and flown again from those with the same detections."""
    there = tmp_path / "approach"
    simulated, _ = land("simulate", "--record", there)
    names = ("gnss", "ils", "radio", "irs", "terrain", "truth")
    files = [item for name in names for item in (f"--{name}", there / f"{name}.csv")]
    named = (
        "--camera",
        there / "camera.yaml",
        "--runway",
        there / "runway.json",
        "--attitude",
        there / "attitude.csv",
    )
    recorded, printed = land("replay", "--frames", there / "video.mp4", *named, *files, "--write", "csv")
    assert recorded["summary"]["frames"] == simulated["summary"]["frames"]
    assert recorded["summary"]["trusted"] >= simulated["summary"]["trusted"] - 1
    last = [log["frames"][-1]["fused"]["position"] for log in (simulated, recorded)]
    np.testing.assert_allclose(last[1], last[0], atol=3.0)  # it begins elsewhere: at the first GNSS fixes
    assert "positions.csv" in printed
    assert "no terrain profile" not in printed
    with (tmp_path / "positions.csv").open(newline="") as file:
        assert all(37.5 < float(row["latitude_deg"]) < 37.7 for row in csv.DictReader(file))


@pytest.mark.parametrize("deployed", [False, True])
def test_large_frames_are_detected_again_where_the_filter_expects_the_runway(
    deployed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A video of three times the input width, 2.5 km from the runway, with the shipped detector and all logs."""
    approach, truth, _ = approach_of(3)
    large = Camera.from_fov(1920, 1152, np.radians(30))
    approach = replace(approach, world=replace(approach.world, camera=large))
    settings, times = LandingSettings(seed=3, rate=0.5), np.arange(0.0, 6.0, 2.0)
    images = tuple(rendered_images(approach, truth, times, None))
    nothing = [Blind().nothing] * len(times)
    there = record(navigate(approach, truth, times, nothing, settings, images), tmp_path / "approach")
    looked: list[tuple[int, ...]] = []
    kind: Any = DeployedPose if deployed else UncertainPose
    predict = kind.predict

    def seen(self: Any, source: Array, **options: Any) -> list[PoseDistributions]:
        looked.append(source.shape[:2])
        return list(predict(self, source, **options))

    monkeypatch.setattr(kind, "predict", seen)
    model: tuple[Any, ...] = ()
    if deployed:
        model = "--base", tmp_path / "deployed"
        run("export", "--base", "runway-footage", "-o", tmp_path / "deployed")
    names = ("attitude", "gnss", "ils", "radio", "irs", "truth")
    files = [item for name in names for item in (f"--{name}", there / f"{name}.csv")]
    lens = "--camera", there / "camera.yaml", "--runway", there / "runway.json"
    given = "--frames", there / "video.mp4", *lens, *files, "--conf", 0.5, "--alarm", 0, "--no-animation"
    run("land", "replay", *given, *model, "--roi-refinement", "-o", tmp_path / "refined")
    log = json.loads((tmp_path / "refined" / "log.json").read_text())
    assert log["summary"]["runway_detected"] == log["summary"]["frames"] == 3
    assert looked == [(1152, 1920)] * 3 + [(384, 640)] * 3


def test_images_are_kept_only_where_something_shows_them(
    land: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "approach"
    films: list[Array] = []
    land("simulate", "--record", there)
    files = "--frames", there / "video.mp4", "--camera", there / "camera.yaml", "--runway", there / "runway.json"
    given = *files, "--attitude", there / "attitude.csv", "--gnss", there / "gnss.csv"
    monkeypatch.setattr(
        "halopose.landing.frame_buffer.FrameBuffer.add", lambda buffer, image: pytest.fail("kept for nobody")
    )
    land("replay", *given)
    monkeypatch.undo()
    monkeypatch.setattr("halopose.landing.frame_buffer.FrameBuffer.__init__.__defaults__", (3,))
    monkeypatch.setattr(
        "halopose.landing.reports.flight_pictures.write_film", lambda frames, path: films.extend(frames)
    )
    log, _ = land("replay", *given, "--animation")
    assert log["summary"]["frames"] > 3 >= len(films) > 0


class Strange(Oracle):
    """Detections and images that are all out of distribution."""

    novelty_size = 999

    def predict(self, image: Array, conf: float) -> list[PoseDistributions]:
        unusual = np.full(1, 1e-3)
        return [
            replace(poses, novelty=np.full(len(poses), 1e-3), image_novelty=unusual)
            for poses in super().predict(image, conf)
        ]


def test_the_monitor_watches_simulated_and_recorded_flights(land: Callable[..., Any], tmp_path: Path) -> None:
    there = tmp_path / "approach"
    log, said = land(
        "simulate", "--rate", 1, "--monitor", 0.01, "--record", there, model=Strange(LandingSettings(rate=1), START)
    )
    assert log["summary"]["monitor"].startswith("alarm at image ")
    assert f"monitor: {log['summary']['monitor']}" in said
    files = "--frames", there / "video.mp4", "--camera", there / "camera.yaml", "--runway", there / "runway.json"
    given = *files, "--attitude", there / "attitude.csv", "--gnss", there / "gnss.csv", "--monitor", 0.01
    replayed, _ = land("replay", *given, model=Strange(LandingSettings(rate=1), START))
    assert replayed["summary"]["monitor"] == log["summary"]["monitor"]


def test_an_out_of_distribution_recording_is_reported(land: Callable[..., Any], tmp_path: Path) -> None:
    there = tmp_path / "approach"
    land("simulate", "--record", there)
    named = (
        "--camera",
        there / "camera.yaml",
        "--runway",
        there / "runway.json",
        "--attitude",
        there / "attitude.csv",
    )
    film = "--frames", there / "video.mp4", *named, "--gnss", there / "gnss.csv"
    log, printed = land("replay", *film, model=Strange(LandingSettings(rate=0.1), START))
    assert log["summary"]["trusted"] == 0
    assert "--alarm 0 --widen" in printed
    log, printed = land("replay", *film, "--alarm", "0", model=Strange(LandingSettings(rate=0.1), START))
    assert log["summary"]["trusted"] > 0
    assert "--widen" not in printed


def test_logs_in_other_units_are_reported(land: Callable[..., Any], tmp_path: Path) -> None:
    """Attitudes in radians under the name of degrees, as a user once wrote them."""
    there = tmp_path / "approach"
    land("simulate", "--record", there)
    text = (there / "attitude.csv").read_text()
    (there / "attitude.csv").write_text(text.replace("_rad", "_deg"))
    files = "--frames", there / "video.mp4", "--camera", there / "camera.yaml", "--runway", there / "runway.json"
    log, printed = land("replay", *files, "--attitude", there / "attitude.csv", "--gnss", there / "gnss.csv")
    assert log["summary"]["trusted"] == 0
    assert "units of the logs" in printed
    (there / "attitude.csv").write_text(text)
    assert (
        "units of the logs"
        not in land("replay", *files, "--attitude", there / "attitude.csv", "--gnss", there / "gnss.csv")[1]
    )


def test_a_parallel_runway_makes_detections_ambiguous(land: Callable[..., Any], tmp_path: Path) -> None:
    """Another runway at the same place: whatever fits the one fits the other, and nothing is used."""
    there = tmp_path / "approach"
    land("simulate", "--record", there)
    (there / "other.json").write_text((there / "runway.json").read_text())
    files = "--frames", there / "video.mp4", "--camera", there / "camera.yaml", "--runway", there / "runway.json"
    given = *files, "--attitude", there / "attitude.csv", "--gnss", there / "gnss.csv"
    assert land("replay", *given)[0]["summary"]["trusted"] > 0
    log, _ = land("replay", *given, "--others", there / "other.json")
    assert log["summary"]["trusted"] == 0
    assert any("ambiguous" in reason for reason in log["summary"]["frames_not_used_because"])


def test_nothing_detected_is_a_flight_too(land: Callable[..., Any]) -> None:
    log, printed = land("simulate", model=Blind())
    assert log["summary"]["runway_detected"] == log["summary"]["trusted"] == 0
    assert log["summary"]["root_mean_square_error"]["x"]["vision"] is None
    assert log["summary"]["root_mean_square_error"]["x"]["fused"] < 10
    assert "nan" not in printed


def test_a_camera_alone_flies_on(land: Callable[..., Any]) -> None:
    log, _ = land("simulate", "--without", "gnss,ils,radio,irs,attitude", "--attitude", "vision")
    assert list(log["sources"]) == ["vision"]
    assert log["summary"]["runway_detected"] == log["summary"]["frames"]
    assert all(frame["fused"]["position"] for frame in log["frames"])


def test_a_camera_alone_that_sees_nothing_only_loses_certainty(land: Callable[..., Any]) -> None:
    log, _ = land("simulate", "--without", "gnss,ils,radio,irs,attitude", "--attitude", "vision", model=Blind())
    assert log["sources"] == {}
    spread = [frame["fused"]["covariance"][0][0] for frame in log["frames"]]
    assert np.all(np.diff(spread) > 0)
    assert log["summary"]["fused_nees"] < 12


def test_without_an_attitude_there_is_no_position(land: Callable[..., Any]) -> None:
    log, _ = land("simulate", "--outage", "attitude:15-35")
    for frame in log["frames"]:
        silent = 15 <= frame["time"] < 35
        assert ("attitude" in (frame["vision"]["reason"] or "")) == silent
        assert (frame["vision"]["position"] is None) == silent
    log, _ = land("simulate", "--outage", "attitude:0-1000")
    assert log["summary"]["position_solved"] == 0
    assert log["summary"]["runway_detected"] == log["summary"]["frames"]


FILES = ("--frames", "film.mp4", "--camera", "camera.yaml", "--runway", "KSFO/28R")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["simulate", "--without", "gnss,sonar"], "unknown sensor 'sonar'"),
        (["simulate", "--outage", "sonar:1-2"], "unknown sensor 'sonar'"),
        (["simulate", "--outage", "gnss"], "--outage"),
        (["simulate", "--outage", "gnss:20"], "--outage"),
        (["simulate", "--outage", "gnss:60-20"], "end after it starts"),
        (["simulate", "--outage", "gnss:nan-20"], "end after it starts"),
        (["simulate", "--without", "gnss", "--outage", "gnss:1-2"], "--without"),
        (["simulate", "--without", "irs,attitude"], "--attitude vision"),
        (["simulate", "--rate", "0"], "rate should be"),
        (["simulate", "--rate", "inf"], "rate should be"),
        (["simulate", "--base", "mine.pt"], "--artifact"),
        (["simulate", "-o", __file__], "cannot write to"),
        (["simulate", "--seed", "-1"], "seed"),
        (["simulate", "--write", "csv,xml"], "'xml'"),
        (["simulate", "--gnss", "gnss.csv"], "No such option"),
        (["simulate", "--attitude", "a.csv"], "--attitude"),
        (["simulate", "--base", ".", "--artifact", "a.safetensors"], "exported folder"),
        (["replay", "--frames", "film.mp4"], "--camera"),
        (["replay", *FILES, "--weather", "fog"], "No such option"),
        (["replay", *FILES, "--offset", "auto"], "--attitude"),
        (["replay", *FILES, "--offset", "nan"], "--offset"),
        (["replay", *FILES, "--frame-rate", "1e-9"], "--frame-rate"),
        (["replay", *FILES], "camera.yaml"),
        (["fly"], "No such command"),
    ],
)
def test_mistakes_are_one_line_errors(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(monkeypatch, capsys, "land", *words)


def test_land_without_a_command_simulates(
    land: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its options may come from a configuration file, where the group has its commands under its name."""
    log, _ = land("simulate")  # the fixture installs the oracle
    model = Oracle(LandingSettings(rate=0.1), START)
    monkeypatch.setattr("halopose.prediction.uncertain_pose.UncertainPose.load", lambda *given, **more: model)
    (tmp_path / "config.yaml").write_text(
        f"land:\n  simulate:\n    rate: 0.1\n    animation: false\n    output: {tmp_path / 'default'}\n"
    )
    printed = run("--config", tmp_path / "config.yaml", "land")
    assert "land simulate" in printed.splitlines()[0]
    assert json.loads((tmp_path / "default" / "log.json").read_text())["summary"] == log["summary"]
    (tmp_path / "config.yaml").write_text("land: {rate: 1}")
    assert "simulate" in refused(monkeypatch, capsys, "--config", tmp_path / "config.yaml", "land")


def test_packages_for_the_animation_are_checked_before_the_flight(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(
        "halopose.prediction.uncertain_pose.UncertainPose.load", lambda *given, **more: pytest.fail("too late")
    )
    monkeypatch.setattr(sys, "argv", ["halopose", "land", "simulate", "-o", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert install_command("landing") in capsys.readouterr().err


def test_a_model_of_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("halopose.landing.flight.render_scene", lambda scene: np.zeros((384, 640, 3), dtype=np.uint8))
    monkeypatch.setattr("halopose.prediction.uncertain_pose.UncertainPose.load", lambda *given, **more: Blind(17))
    files = ["--base", "body.pt", "--artifact", "body.safetensors", "-o", str(tmp_path)]
    assert "17 keypoints" in refused(monkeypatch, capsys, "land", "simulate", *SLOW, *files)


def test_a_world_is_drawn_and_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "halopose.landing.world.dataset_writer.render_scene", lambda scene: np.zeros((384, 640, 3), np.uint8)
    )
    printed = run("world", "-o", tmp_path, "--images", 2, "--weather", "fog, clear", "--seed", 3, "--png")
    assert printed == f"2 fog, 2 clear -> {tmp_path / 'data.yaml'}\n"
    for split in ("fog", "clear"):
        dataset = load_dataset(tmp_path / "data.yaml", split)
        assert [len(record.objects) > 0 for record in dataset.records] == [True, True]
        content = json.loads((tmp_path / "annotations" / f"{split}.json").read_text())
        assert {image["weather"] for image in content["images"]} == {split}
        assert all(len(image["position"]) == 3 for image in content["images"])
    run("world", "-o", tmp_path / "both", "--images", 3)
    assert [len(load_dataset(tmp_path / "both" / "data.yaml", split)) for split in ("train", "val")] == [3, 1]
    assert "unknown weather 'hail'" in refused(monkeypatch, capsys, "world", "-o", tmp_path, "--weather", "fog,hail")


def test_an_empty_world_has_nothing_to_find(tmp_path: Path) -> None:
    run("world", "-o", tmp_path, "--images", 1, "--weather", "clear", "--seed", 3)
    run("world", "-o", tmp_path / "empty", "--images", 1, "--weather", "clear", "--seed", 3, "--empty")
    [full], [empty] = (load_dataset(folder / "data.yaml", "clear").records for folder in (tmp_path, tmp_path / "empty"))
    (image, objects), (bare, nothing) = full.read(), empty.read()
    assert len(objects) > len(nothing) == 0
    left, top, right, bottom = objects.boxes[0].round().astype(int)
    edges = [
        np.abs(np.diff(part[top:bottom, left:right].astype(float).mean(2), axis=1)).mean() for part in (image, bare)
    ]
    assert edges[0] > 2 * edges[1]  # markings and edges of the runway are gone
