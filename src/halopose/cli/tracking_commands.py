"""Command for tracking objects through a film: track."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halopose.cli.export_commands import folder_of
from halopose.cli.options import (
    ArtifactElseShipped,
    BaseElseShipped,
    Classes,
    Confidence,
    Device,
    Iou,
    MaxDet,
    Monitor,
    OtherSize,
    RuntimeOption,
    Unsafe,
    VidStride,
    between,
    class_numbers,
    finite,
    refuse_with_deployed,
)
from halopose.cli.terminal import progress, say
from halopose.errors import HaloposeError


def track(
    context: typer.Context,
    film: Annotated[
        str,
        typer.Argument(
            help="A film, a folder of films, a camera, an address, or predictions.json of one film from `predict`."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for film, json and csv.")] = Path("tracks"),
    base: BaseElseShipped = None,
    artifact: ArtifactElseShipped = None,
    deployed: Annotated[
        Path | None, typer.Option("--deployed", help="Folder of `halopose export`, instead of --base.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.1, max=10000.0, help="Frames per second; default: the rate of the film.")
    ] = None,
    conf: Confidence = 0.1,
    score: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Lowest confidence of a detection that starts a track.")
    ] = 0.25,
    confirm: Annotated[int, typer.Option(min=1, max=1000, help="Number of detections that confirm a track.")] = 3,
    gap: Annotated[
        float, typer.Option(min=0.0, max=3600.0, help="Seconds for which an object may be undetected.")
    ] = 1.0,
    camera_motion: Annotated[
        bool, typer.Option("--camera-motion", help="Estimate the motion of a moving camera from the background.")
    ] = False,
    responsive: Annotated[
        float,
        typer.Option(
            callback=finite,
            help="Causal filter for display and control, with less jitter and lag and wider covariances: 1 is usual, "
            "more follows faster, less is calmer.",
        ),
    ] = 0.0,
    causal: Annotated[
        bool, typer.Option("--causal", help="Use nothing of later frames, as is always the case for a camera.")
    ] = False,
    iou: Iou = 0.7,
    imgsz: OtherSize = None,
    classes: Classes = None,
    max_det: MaxDet = None,
    vid_stride: VidStride = 1,
    probability: Annotated[
        float, typer.Option(callback=between, help="Probability of the drawn ellipses, between 0 and 1.")
    ] = 0.95,
    picture: Annotated[bool, typer.Option(help="Write the annotated film.")] = True,
    show: Annotated[
        bool, typer.Option("--show", help="Show annotated frames in a window, with frames/s; q or Escape ends.")
    ] = False,
    save_txt: Annotated[
        bool, typer.Option("--save-txt", help="Write labels/NAME.txt in YOLO format, with the identity at the end.")
    ] = False,
    monitor: Monitor = None,
    runtime: RuntimeOption = None,
    device: Device = None,
    unsafe: Unsafe = False,
) -> None:
    """Track objects through a film: identities, keypoints filtered and smoothed with their covariances.

    Example: halopose track film.mp4 -o tracks
    """
    from halopose.prediction.track_sources import (
        TrackFileSettings,
        check_track_outputs,
        track_files,
        track_predictions,
    )
    from halopose.prediction.uncertain_pose import UncertainPose
    from halopose.tracking.tracker import TrackSettings

    if deployed is not None:
        refuse_with_deployed(context, "device", "unsafe")
        base = folder_of(deployed)
    settings = TrackFileSettings(
        tracker=TrackSettings(score=score, confirm=confirm, gap=gap, responsive=responsive),
        conf=conf,
        iou=iou,
        imgsz=imgsz,
        rate=rate,
        probability=probability,
        camera_motion=camera_motion,
        causal=causal,
        pictures=picture,
        classes=class_numbers(classes),
        max_det=max_det,
        vid_stride=vid_stride,
        save_txt=save_txt,
        show=show,
        monitor=monitor,
    )
    if film.lower().endswith((".json", ".csv", ".h5", ".slp")) and "://" not in film:
        if monitor is not None:
            raise HaloposeError("--monitor looks at images: give the film, not its predictions.json")
        found = [track_predictions(Path(film), output, settings)]
    else:
        check_track_outputs(film, output, settings)
        model = UncertainPose.load(base, artifact, family="student-t", device=device, unsafe=unsafe, runtime=runtime)
        found = track_files(model, film, output, settings, progress)
    for each in found:
        say(str(each))
        if each.speed is not None:
            say(f"{each.frames} frames, per frame: {each.speed}")
        say(f"-> {', '.join(map(str, each.written))}")
