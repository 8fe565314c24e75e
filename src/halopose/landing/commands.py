"""Commands around landings: land flies a simulated or a recorded approach, world draws data sets of runways."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from halopose.cli.options import Seed, finite
from halopose.cli.terminal import progress, say
from halopose.errors import HaloposeError

if TYPE_CHECKING:
    from halopose.landing.flight import Flight
    from halopose.landing.navigation.sensors import Sensors
    from halopose.landing.recordings.runway_sites import Site
    from halopose.prediction.predictor import Predictor
    from halopose.types import Progress

_ILS = ("localizer", "glide_slope")
_simulated = partial(typer.Option, rich_help_panel="Simulated flights")
_recorded = partial(typer.Option, rich_help_panel="Recorded flights")
_OF_SIMULATED = ("seed", "weather", "rate", "without", "outage", "record")
_OF_RECORDED = ("camera", "runway", "gnss", "ils", "radio", "irs", "truth", "offset", "frame_rate", "closer")


def land(
    context: typer.Context,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for animation, log and page.")] = Path(
        "landing"
    ),
    seed: Annotated[int, _simulated(min=0, help="Runway, light, flight and noise.")] = 0,
    weather: Annotated[
        Literal["clear", "haze", "dusk", "night", "fog"], _simulated(help="Fog is what the detector never saw.")
    ] = "clear",
    rate: Annotated[float, _simulated(help="Images a second.")] = 2.0,
    without: Annotated[
        str | None,
        _simulated(
            help="Sensors to leave out, with commas: gnss, ils, radio, irs (accelerations), attitude (of the IRS)."
        ),
    ] = None,
    outage: Annotated[
        list[str] | None, _simulated(help="A sensor's outage in seconds, such as gnss:20-60; repeat for more.")
    ] = None,
    attitude: Annotated[
        str,
        typer.Option(help="Of a simulated flight: irs, or vision to solve for it. Of a recorded one: its csv log."),
    ] = "irs",
    prune: Annotated[bool, typer.Option(help="Leave out corners called unreliable.")] = True,
    integrity: Annotated[bool, typer.Option(help="Check corners against each other before fusing.")] = True,
    alarm: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, callback=finite, help="Detections this unlike the data are not used; 0: all are."
        ),
    ] = 0.05,
    requirement: Annotated[
        Literal["lpv-200", "cat-1", "cat-2", "cat-3"],
        typer.Option(help="Whose alert limits and integrity risk to hold levels against."),
    ] = "lpv-200",
    widen: Annotated[
        bool,
        typer.Option("--widen", help="Larger ellipses for what is unlike the data; with --alarm 0 it is used."),
    ] = False,
    base: Annotated[Path | None, typer.Option(help="A runway detector; else the one that ships.")] = None,
    artifact: Annotated[Path | None, typer.Option(help="Its heads; else those that ship.")] = None,
    animation: Annotated[bool, typer.Option(help="Draw the animation.")] = True,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps.")] = None,
    record: Annotated[
        Path | None, _simulated(help="A folder to write the simulated flight to: film, camera, runway, logs.")
    ] = None,
    frames: Annotated[
        Path | None, _recorded(help="Land on these instead: a film, a folder of images or an MCAP file.")
    ] = None,
    camera: Annotated[Path | None, _recorded(help="Its calibration: yaml of OpenCV or ROS.")] = None,
    runway: Annotated[
        str | None, _recorded(help="A json file with four WGS84 corners, or a known one: KSFO/28R.")
    ] = None,
    gnss: Annotated[Path | None, _recorded(help="A csv log of positions.")] = None,
    ils: Annotated[Path | None, _recorded(help="A csv log of localizer and glide slope.")] = None,
    radio: Annotated[Path | None, _recorded(help="A csv log of a radio altimeter.")] = None,
    irs: Annotated[Path | None, _recorded(help="A csv log of accelerations.")] = None,
    truth: Annotated[Path | None, _recorded(help="A csv log of positions to judge by, never used.")] = None,
    offset: Annotated[str, _recorded(help="Seconds to add to the frames' times to give the logs', or auto.")] = "0",
    frame_rate: Annotated[float | None, _recorded(help="Frames a second, where the frames do not say.")] = None,
    conf: Annotated[float, typer.Option(min=0, max=1, help="Lowest score of a detection.")] = 0.7,
    closer: Annotated[
        bool,
        _recorded("--closer", help="Look again, at their own resolution, at frames larger than the input."),
    ] = False,
    write: Annotated[
        str | None,
        typer.Option(help="Positions for others to read, with commas: csv, mcap (ROS 2 messages), rerun."),
    ] = None,
) -> None:
    """Fly an approach by camera, simulated or recorded: corners, weighted PnP, integrity, fusion; a page."""
    from halopose.data.files import make_folder, write_json, write_text
    from halopose.landing import shipped_detectors
    from halopose.landing.flight import land as fly
    from halopose.landing.reports import flight_page, flight_pictures
    from halopose.landing.reports.flight_text import to_text
    from halopose.landing.settings import LandingSettings
    from halopose.landing.summary import summarise
    from halopose.prediction.uncertain_pose import UncertainPose

    if base is not None and artifact is None:
        raise HaloposeError("give --base and --artifact together: heads belong to one detector")
    if frame_rate is not None and not 1 / 60 <= frame_rate <= 1000:
        raise HaloposeError(f"--frame-rate goes from one a minute (0.017) to 1000 a second, got {frame_rate}")
    choices: dict[str, Any] = {
        "prune": prune, "integrity": integrity, "alarm": alarm, "requirement": requirement, "conf": conf
    }  # fmt: skip
    recorded = {"camera": camera, "runway": runway, "gnss": gnss, "ils": ils, "radio": radio, "irs": irs}
    _check_options(context, frames, attitude, offset)
    if frames is None:
        sensors = _sensors(without, outage or [])
        mode: Any = attitude  # checked by the settings
        settings = LandingSettings(
            seed=seed, weather=weather, rate=rate, attitude=mode, sensors=sensors, **choices
        )  # fmt: skip
    wanted = _formats(write)
    if animation:
        flight_pictures.check_animation(output / "landing.webp")
    make_folder(output)
    detector, heads = shipped_detectors.runway_detector, shipped_detectors.runway_artifact
    if frames is not None:
        detector, heads = shipped_detectors.footage_detector, shipped_detectors.footage_artifact
    model = UncertainPose.load(base or detector(), artifact or heads(), device=device, widen=widen)
    flight: Flight
    site: Site | None = None
    with progress() as step:
        if frames is not None:
            given = _Recorded(
                frames, {**recorded, "attitude": None if attitude in ("irs", "vision") else Path(attitude)}
            )
            shown = animation or "rerun" in wanted
            flight = given.replayed(model, choices, truth, offset, frame_rate, closer, step, pictured=shown)
            site = given.site
        else:
            flight = simulated = fly(model, settings, step)
            if record is not None:
                from halopose.landing.recordings.record_flight import record as write_recording

                write_recording(simulated, record)
    summary = summarise(flight)
    say(to_text(summary))
    if frames is not None:
        _say_doubts(summary)
    write_json(output / "log.json", {"summary": summary, **flight_page.log_of(flight)})
    pictured = flight_pictures.draw_film(flight) if animation else []
    film = flight_pictures.write_film(pictured, output / "landing.webp") if animation else None
    write_text(output / "landing.html", flight_page.render_page(flight, summary, flight_pictures.stills(pictured)))
    others = _write(flight, site, wanted, output)
    written = [path for path in (film, output / "landing.html", output / "log.json", *others) if path]
    say(f"-> {', '.join(str(path) for path in written)}")


def _say_doubts(summary: dict[str, Any]) -> None:
    """What to do where most of what was detected in a recording was not used, in one line."""
    from halopose.landing.association import NO_RUNWAY, NOT_WHERE_EXPECTED, OUT_OF_DISTRIBUTION

    lost = summary["frames_not_used_because"]
    detected = summary["frames"] - lost.get(NO_RUNWAY, 0)
    if 2 * lost.get(OUT_OF_DISTRIBUTION, 0) > summary["frames"]:
        say("most of what was detected is unlike the data of these heads: use it with --alarm 0 --widen")
    if 2 * lost.get(NOT_WHERE_EXPECTED, 0) > detected:
        say(
            "most of what was detected is not where the runway should be: check the units of the logs (degrees or "
            "radians, metres or feet), --offset, the camera's mount and which runway it is"
        )


def _check_options(context: typer.Context, frames: Path | None, attitude: str, offset: str) -> None:
    """Refuse options that a flight of the other kind takes: they would change nothing."""

    def named(options: tuple[str, ...]) -> str | None:
        sources = ((name, context.get_parameter_source(name)) for name in options)
        given = (name for name, source in sources if source is not None and source.name == "COMMANDLINE")
        return next((f"--{name.replace('_', '-')}" for name in given), None)

    if frames is None:
        logged = f"--attitude {attitude}" if attitude not in ("irs", "vision") else None
        stranger = named(_OF_RECORDED) or logged
        if stranger:
            raise HaloposeError(f"{stranger} belongs to a recorded flight: give --frames too")
        return
    stranger = named(_OF_SIMULATED) or ("--attitude irs" if attitude == "irs" and named(("attitude",)) else None)
    if stranger:
        raise HaloposeError(f"{stranger} belongs to a simulated flight: leave it out with --frames")
    if offset == "auto" and attitude in ("irs", "vision"):
        raise HaloposeError("--offset auto takes the turns of the aircraft from --attitude: give its csv log too")
    if offset != "auto":
        _seconds(offset)


_FORMATS = {"csv": "positions.csv", "mcap": "positions.mcap", "rerun": "landing.rrd"}


def _formats(given: str | None) -> list[str]:
    """What to write beside page and log, checked before anything flies."""
    from halopose.landing.recordings.optional_packages import need

    wanted = [name.strip() for name in given.split(",")] if given else []
    for name in wanted:
        if name not in _FORMATS:
            raise HaloposeError(f"--write knows {', '.join(_FORMATS)}, not {name!r}")
    if wanted:
        need("pymap3d")
    if "mcap" in wanted:
        need("mcap_ros2.writer"), need("rosbags.typesys")
    if "rerun" in wanted:
        need("rerun", "rerun")
    return wanted


def _write(flight: Flight, site: Site | None, wanted: list[str], output: Path) -> list[Path]:
    """Write a flight in the wanted formats; a simulated one is laid down at San Francisco."""
    if not wanted:
        return []
    from halopose.landing.recordings.position_log import positions_of, write_csv
    from halopose.landing.recordings.record_flight import site_of
    from halopose.landing.recordings.rerun_file import write_rerun
    from halopose.landing.recordings.ros_messages import write_mcap

    positions = positions_of(flight, site or site_of(flight))
    paths = {name: output / _FORMATS[name] for name in wanted}
    if "csv" in paths:
        write_csv(positions, paths["csv"])
    if "mcap" in paths:
        write_mcap(positions, paths["mcap"])
    if "rerun" in paths:
        write_rerun(flight, positions, paths["rerun"])
    return list(paths.values())


def world(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for images, labels and json.")],
    images: Annotated[int, typer.Option(min=1, max=1_000_000, help="Images of a split.")] = 200,
    weather: Annotated[
        str | None,
        typer.Option(help="Weathers, with commas, a split each; else train and val, a third as large, of all but fog."),
    ] = None,
    seed: Seed = 0,
    empty: Annotated[bool, typer.Option("--empty", help="Land without a runway: nothing is labelled.")] = False,
    footage: Annotated[
        bool,
        typer.Option(
            "--footage",
            help="As real cameras record: cockpits, rain, lenses, clutter, compression, worn airports.",
        ),
    ] = False,
    png: Annotated[bool, typer.Option("--png", help="PNG in place of JPEG.")] = False,
    processes: Annotated[int, typer.Option(min=1, max=256, help="Processes that draw.")] = 1,
) -> None:
    """Draw scenes of runways with exact corners: images, YOLO labels, and COCO json with poses and cameras."""
    from halopose.data.files import make_folder
    from halopose.landing.world.dataset_writer import write_dataset
    from halopose.landing.world.footage_style import PAVED
    from halopose.landing.world.scenes import SceneSettings, check_weather

    counts = {"train": images, "val": -(-images // 3)}
    if weather is not None:
        names = [name.strip() for name in weather.split(",")]
        for name in names:
            check_weather(name)
        counts = dict.fromkeys(names, images)
    make_folder(output)
    settings = SceneSettings(bare=empty, footage=footage, paved=PAVED if footage else 0.0)
    data = write_dataset(output, counts, seed, settings=settings, processes=processes, quality=0 if png else 95)
    say(f"{', '.join(f'{count} {split}' for split, count in counts.items())} -> {data}")


class _Recorded:
    """What a user gave of a recorded flight: frames, and files by the names of their options."""

    def __init__(self, frames: Path, given: dict[str, Any]) -> None:
        for name in ("camera", "runway"):
            if given[name] is None:
                raise HaloposeError(f"--frames needs --{name} too")
        self.frames, self.given = frames, given
        self.site: Site | None = None

    def replayed(
        self,
        model: Predictor,
        choices: dict[str, Any],
        truth: Path | None,
        offset: str,
        rate: float | None,
        closer: bool,
        step: Progress,
        *,
        pictured: bool,
    ) -> Flight:
        """The flight, and on the terminal what was not given and what follows from it."""
        import numpy as np

        from halopose.landing.frame_buffer import FrameBuffer
        from halopose.landing.recordings import replay as replaying
        from halopose.landing.recordings.cameras import read_camera
        from halopose.landing.recordings.frames import open_frames
        from halopose.landing.recordings.logs import KINDS, measurements, read_log, too_far
        from halopose.landing.recordings.runway_sites import read_runway

        lens = read_camera(self.given["camera"])
        self.site = site = read_runway(self.given["runway"])
        logs = {kind: self.given[kind] for kind in KINDS if self.given[kind] is not None}
        shift = 0.0 if offset == "auto" else _seconds(offset)
        frames = open_frames(self.frames, rate=rate, offset=shift)
        settings = replaying.settings_for(logs, frames.times, **choices)
        measured = replaying.read_measurements(logs, site, settings)
        judges = None if truth is None else read_log(truth)
        if offset != "auto":
            replaying.check_clocks(frames.times, measured)  # before all frames are looked at
        far = [] if "gnss" not in logs else [too_far(read_log(logs["gnss"]), site)]
        far += [] if judges is None else [too_far(judges, site)]
        for words in (site.note, replaying.missing(logs), *far):
            if words:
                say(words)
        album = FrameBuffer(len(frames.times)) if pictured else None
        times, seen = replaying.detections_in(model, frames, lens, settings.conf, step, album)
        found = [lens.rectified(poses) for poses in seen]
        if offset == "auto":
            shift = replaying.estimate_offset(times, found, lens, measured)
            say(f"the frames' clock is {shift:+.2f} s off the logs'")
            times = times + shift
        known = None
        if judges is not None:
            places = measurements(judges, "gnss", site, _with_gnss(settings.sensors))
            stamps, values = np.array([m.time for m in places]), np.array([m.value for m in places])
            known = np.stack([np.interp(times, stamps, axis, np.nan, np.nan) for axis in values.T], axis=1)
        again = replaying.second_looks(model, frames, lens, seen, settings.conf, step) if closer else None
        return replaying.replay(
            times, found, lens, site, measured, settings, truth=known, images=album or (), roi_detector=again
        )


def _with_gnss(sensors: Sensors) -> Sensors:
    """Sensors with GNSS on board, which positions to judge by are read as."""
    from dataclasses import replace

    from halopose.landing.navigation.sensors import GNSS

    return replace(sensors, gnss=GNSS)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise HaloposeError(f"--offset takes seconds or auto, got {text!r}")
    return seconds


def _sensors(without: str | None, outages: list[str]) -> Sensors:
    """The sensors on board, less those left out, with their outages."""
    from dataclasses import replace

    from halopose.landing.navigation.sensors import Sensors

    sensors = Sensors()
    for name in (part.strip() for part in without.split(",")) if without else ():
        sensors = replace(sensors, **dict.fromkeys(_names(name)))
    for text in outages:
        name, _, interval = (part.strip() for part in text.partition(":"))
        try:
            start, end = (float(value) for value in interval.split("-"))
        except ValueError:
            raise HaloposeError(f"--outage takes a sensor and seconds such as gnss:20-60, got {text!r}") from None
        for each in _names(name):
            sensor = getattr(sensors, each)
            if sensor is None:
                raise HaloposeError(f"--outage {text}: {name} is left out of the whole flight already")
            sensors = replace(sensors, **{each: replace(sensor, outages=(*sensor.outages, (start, end)))})
    return sensors


def _names(name: str) -> tuple[str, ...]:
    """Fields of ``Sensors`` that a user's name stands for."""
    known = {"gnss": ("gnss",), "ils": _ILS, "radio": ("radio",), "irs": ("irs",), "attitude": ("attitude",)}
    if name not in known:
        raise HaloposeError(f"unknown sensor {name!r}: {', '.join(known)}")
    return known[name]
