"""Commands of the landing plug-in: ``land simulate``, ``land replay`` and ``world``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Optional

import typer

from halopose.cli.options import Monitor, Seed, add_command, finite
from halopose.cli.terminal import progress, say
from halopose.errors import HaloposeError

if TYPE_CHECKING:
    from halopose.landing.navigation.sensors import Sensors
    from halopose.landing.outputs import Landing, LandingOutputs
    from halopose.landing.recordings.logs import Kind

_Output = Annotated[Path, typer.Option("--output", "-o", help="Folder for the page, the log and the animation.")]
_Prune = Annotated[bool, typer.Option(help="Leave out corners that the artifact marks as unreliable.")]
_Integrity = Annotated[bool, typer.Option(help="Check the corners of a frame against each other before fusion.")]
_Alarm = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=1.0,
        callback=finite,
        help="Do not use out-of-distribution detections, at this false-alarm rate; 0 uses all detections.",
    ),
]
_Requirement = Annotated[
    Literal["lpv-200", "cat-1", "cat-2", "cat-3"],
    typer.Option(help="Operation whose alert limits and integrity risk apply."),
]
_Confidence = Annotated[float, typer.Option(min=0, max=1, help="Lowest score of a detection.")]
_Base = Annotated[
    Optional[Path],
    typer.Option(help="Runway detector, or a folder that `halopose export` wrote; default: the shipped detector."),
]
_Artifact = Annotated[Optional[Path], typer.Option(help="Artifact made for --base; default: the shipped artifact.")]
_Device = Annotated[Optional[str], typer.Option(help="cpu, cuda, cuda:1, mps.")]
_Widen = Annotated[
    bool,
    typer.Option("--widen", help="Enlarge the covariances of out-of-distribution detections; use with --alarm 0."),
]
_Animation = Annotated[bool, typer.Option(help="Draw the animation.")]
_Write = Annotated[
    Optional[str],
    typer.Option(help="Also write the positions as: csv, mcap (ROS 2 messages), rerun; comma separated."),
]

land_app = typer.Typer(
    name="land",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    rich_markup_mode=None,
)


@land_app.callback()
def land(context: typer.Context) -> None:
    """Fly an approach by camera, simulated or recorded. Without a command: land simulate with its defaults.

    Example: halopose land
    """
    if context.invoked_subcommand is not None:
        return
    say(
        "halopose land: running `halopose land simulate` with its defaults; "
        "`halopose land replay --help` is for recorded flights"
    )
    command = context.command.get_command(context, "simulate")  # type: ignore[attr-defined]
    with command.make_context("simulate", [], parent=context) as inner:
        command.invoke(inner)


def simulate(
    output: _Output = Path("landing"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of runway, light, flight and noise.")] = 0,
    weather: Annotated[
        Literal["clear", "haze", "dusk", "night", "fog"],
        typer.Option(help="Weather; the shipped detector was not trained on fog."),
    ] = "clear",
    rate: Annotated[float, typer.Option(help="Frames per second.")] = 2.0,
    without: Annotated[
        str | None,
        typer.Option(
            help="Sensors to leave out, comma separated: gnss, ils, radio, irs (accelerations), attitude (of the IRS)."
        ),
    ] = None,
    outage: Annotated[
        list[str] | None, typer.Option(help="Outage of a sensor in seconds, such as gnss:20-60; repeatable.")
    ] = None,
    attitude: Annotated[
        Literal["irs", "vision"], typer.Option(help="Source of the attitude: irs, or vision to solve for the pose.")
    ] = "irs",
    record: Annotated[
        Path | None,
        typer.Option(help="Folder to record the flight to (video, camera, runway, logs) for `land replay`."),
    ] = None,
    prune: _Prune = True,
    integrity: _Integrity = True,
    alarm: _Alarm = 0.05,
    monitor: Monitor = None,
    requirement: _Requirement = "lpv-200",
    conf: _Confidence = 0.7,
    base: _Base = None,
    artifact: _Artifact = None,
    device: _Device = None,
    widen: _Widen = False,
    animation: _Animation = True,
    write: _Write = None,
) -> None:
    """Simulate an approach: camera images, corners, weighted PnP, integrity, sensor fusion; writes a page and a log.

    Example: halopose land simulate --weather fog -o landing
    """
    from halopose.landing import run
    from halopose.landing.landing_settings import LandingSettings
    from halopose.landing.outputs import LandingOutputs
    from halopose.landing.shipped_detectors import check_model_options, load_detector

    check_model_options(base, artifact, device=device, widen=widen)
    settings = LandingSettings(
        seed=seed,
        weather=weather,
        rate=rate,
        attitude=attitude,
        sensors=_sensors(without, outage or []),
        prune=prune,
        integrity=integrity,
        alarm=alarm,
        requirement=requirement,
        conf=conf,
    )
    outputs = LandingOutputs(output, animation=animation, formats=_formats(write))
    outputs.make_folder()
    model = load_detector(base, artifact, device=device, widen=widen)
    with progress() as step:
        landing = run.simulate(model, settings, record_to=record, monitor=monitor, progress=step)
    _report(landing, outputs)


def replay(
    frames: Annotated[Path, typer.Option(help="Video, folder of images, or MCAP file.")],
    camera: Annotated[Path, typer.Option(help="Camera calibration: yaml file of OpenCV or ROS.")],
    runway: Annotated[str, typer.Option(help="Json file with four WGS84 corners, or a known runway: KSFO/28R.")],
    output: _Output = Path("landing"),
    others: Annotated[
        list[str] | None,
        typer.Option(
            help="Another runway nearby, given like --runway; repeatable. Other runways of the airport in the built-in "
            "table are known."
        ),
    ] = None,
    attitude: Annotated[Path | None, typer.Option(help="Csv log of attitudes; else the whole pose is solved.")] = None,
    gnss: Annotated[Path | None, typer.Option(help="Csv log of positions.")] = None,
    ils: Annotated[Path | None, typer.Option(help="Csv log of localizer and glide slope.")] = None,
    radio: Annotated[Path | None, typer.Option(help="Csv log of a radio altimeter.")] = None,
    irs: Annotated[Path | None, typer.Option(help="Csv log of accelerations.")] = None,
    terrain: Annotated[
        Path | None,
        typer.Option(
            help="Csv profile of the ground before the threshold; without it the radio altimeter is used from 300 m "
            "before the threshold on."
        ),
    ] = None,
    truth: Annotated[Path | None, typer.Option(help="Csv log of true positions; used for error figures only.")] = None,
    offset: Annotated[
        str, typer.Option(help="Seconds to add to the time stamps of the frames to get log time, or auto.")
    ] = "0",
    frame_rate: Annotated[
        float | None, typer.Option(help="Frames per second, if the frames have no time stamps.")
    ] = None,
    roi_refinement: Annotated[
        bool,
        typer.Option(
            "--roi-refinement", help="Detect again in a full-resolution crop, for frames larger than the model input."
        ),
    ] = False,
    prune: _Prune = True,
    integrity: _Integrity = True,
    alarm: _Alarm = 0.05,
    monitor: Monitor = None,
    requirement: _Requirement = "lpv-200",
    conf: _Confidence = 0.7,
    base: _Base = None,
    artifact: _Artifact = None,
    device: _Device = None,
    widen: _Widen = False,
    animation: _Animation = True,
    write: _Write = None,
) -> None:
    """Replay a recorded approach: detect the runway in its frames and fuse it with the logged sensors.

    Example: halopose land replay --frames frames --camera camera.yaml --runway KSFO/28R -o landing
    """
    from halopose.landing import run
    from halopose.landing.landing_settings import LandingSettings
    from halopose.landing.outputs import LandingOutputs
    from halopose.landing.recordings.recording import open_recording
    from halopose.landing.shipped_detectors import check_model_options, load_detector

    if frame_rate is not None and not 1 / 60 <= frame_rate <= 1000:
        raise HaloposeError(f"--frame-rate takes 0.017 to 1000 frames per second, got {frame_rate}")
    shift = _offset(offset)
    if shift == "auto" and attitude is None:
        raise HaloposeError("--offset auto compares with the attitude: give --attitude with its csv log")
    check_model_options(base, artifact, device=device, widen=widen)
    outputs = LandingOutputs(output, animation=animation, formats=_formats(write))
    given: dict[Kind, Path | None] = {"attitude": attitude, "gnss": gnss, "ils": ils, "radio": radio, "irs": irs}
    recording = open_recording(
        frames,
        camera,
        runway,
        logs={kind: path for kind, path in given.items() if path is not None},
        others=others or (),
        terrain=terrain,
        truth=truth,
        offset=shift,
        frame_rate=frame_rate,
        settings=LandingSettings(prune=prune, integrity=integrity, alarm=alarm, requirement=requirement, conf=conf),
    )
    outputs.make_folder()
    model = load_detector(base, artifact, footage=True, device=device, widen=widen)
    with progress() as step:
        landing = run.replay(
            model,
            recording,
            roi_refinement=roi_refinement,
            keep_images=outputs.need_images,
            monitor=monitor,
            progress=step,
        )
    _report(landing, outputs)


def _report(landing: Landing, outputs: LandingOutputs) -> None:
    """Print the summary and the advice, write the files, print their paths."""
    from halopose.landing.reports.flight_text import to_text

    say(to_text(landing.summary))
    for line in landing.advice:
        say(line)
    say(f"-> {', '.join(str(path) for path in outputs.write(landing))}")


def world(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for images, labels and json.")],
    images: Annotated[int, typer.Option(min=1, max=1_000_000, help="Images per split.")] = 200,
    weather: Annotated[
        str | None,
        typer.Option(
            help="Weathers, comma separated, one split each; default: train, and val with a third of the images, "
            "in all weathers except fog."
        ),
    ] = None,
    seed: Seed = 0,
    empty: Annotated[bool, typer.Option("--empty", help="Landscapes without a runway and without labels.")] = False,
    footage: Annotated[
        bool,
        typer.Option(
            "--footage",
            help="Images like real camera footage: cockpits, rain, lenses, clutter, compression, worn airports.",
        ),
    ] = False,
    png: Annotated[bool, typer.Option("--png", help="Write PNG instead of JPEG.")] = False,
    processes: Annotated[int, typer.Option(min=1, max=256, help="Parallel processes.")] = 1,
) -> None:
    """Render runway scenes with exact corners: images, YOLO labels, and COCO json with poses and cameras.

    Example: halopose world -o world
    """
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


add_command(land_app, simulate)
add_command(land_app, replay)


def _formats(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",")) if text else ()


def _offset(text: str) -> float | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise HaloposeError(f"--offset takes seconds or auto, got {text!r}")
    return seconds


# Fields of ``Sensors`` by the name on the command line.
_SENSORS = {
    "gnss": ("gnss",),
    "ils": ("localizer", "glide_slope"),
    "radio": ("radio",),
    "irs": ("irs",),
    "attitude": ("attitude",),
}


def _sensors(without: str | None, outages: list[str]) -> Sensors:
    """Return the sensors on board with their outages, from the texts of --without and --outage."""
    from dataclasses import replace

    from halopose.landing.navigation.sensors import Sensors

    sensors = Sensors()
    for name in (part.strip() for part in without.split(",")) if without else ():
        sensors = replace(sensors, **dict.fromkeys(_fields(name)))
    for text in outages:
        name, _, interval = (part.strip() for part in text.partition(":"))
        try:
            start, end = (float(value) for value in interval.split("-"))
        except ValueError:
            raise HaloposeError(f"--outage takes a sensor and seconds such as gnss:20-60, got {text!r}") from None
        for field in _fields(name):
            sensor = getattr(sensors, field)
            if sensor is None:
                raise HaloposeError(f"--outage {text}: --without already leaves out {name}")
            sensors = replace(sensors, **{field: replace(sensor, outages=(*sensor.outages, (start, end)))})
    return sensors


def _fields(name: str) -> tuple[str, ...]:
    if name not in _SENSORS:
        raise HaloposeError(f"unknown sensor {name!r}: give {', '.join(_SENSORS)}")
    return _SENSORS[name]
