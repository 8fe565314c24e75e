"""Command for keypoints in space from several films: triangulate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from halopose.cli.options import Confidence, Device, OtherSize, Unsafe
from halopose.cli.terminal import progress, say
from halopose.errors import HaloposeError

if TYPE_CHECKING:
    import numpy as np

    from halopose.keypoints import Keypoints
    from halopose.multiview.rig import CalibratedView
    from halopose.multiview.scene import ReconstructedScene
    from halopose.poses import PoseDistributions


def triangulate(
    cameras: Annotated[Path, typer.Argument(help="Calibration by OpenCV, Pose2Sim, Anipose or Qualisys.")],
    films: Annotated[
        list[Path], typer.Argument(help="One film per camera, in the same order, or one predictions.json of all.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Output folder.")] = Path("scene"),
    unit: Annotated[
        Literal["m", "cm", "mm"] | None, typer.Option(help="Unit of the calibration; default: the unit of its format.")
    ] = None,
    offsets: Annotated[
        str, typer.Option(help="Delay of each film in frames, separated by commas; or estimate, or none.")
    ] = "none",
    rate: Annotated[
        float | None, typer.Option(min=0.1, max=10000.0, help="Frames per second; default: the rate of the film.")
    ] = None,
    smooth: Annotated[bool, typer.Option(help="Smooth over time and bridge gaps.")] = False,
    up: Annotated[Literal["y", "z"], typer.Option(help="Axis that points up in TRC; OpenSim wants y.")] = "y",
    score: Annotated[float, typer.Option(min=0.0, max=1.0, help="Lowest confidence of a detection.")] = 0.25,
    base: Annotated[Path | None, typer.Option(help="A .pt checkpoint; default: YOLO11n-pose.")] = None,
    artifact: Annotated[Path | None, typer.Option(help="Artifact of the base model; default: the shipped one.")] = None,
    conf: Confidence = 0.1,
    imgsz: OtherSize = None,
    device: Device = None,
    unsafe: Unsafe = False,
) -> None:
    """Triangulate keypoints from several calibrated cameras, with 3x3 covariances: TRC, C3D, CSV and a page.

    Example: halopose triangulate cameras.toml cam1.mp4 cam2.mp4 -o scene
    """
    from halopose.data.files import make_folder, write_bytes, write_text
    from halopose.data.films import film_facts
    from halopose.multiview.rig import read_calibration
    from halopose.multiview.scene import SceneBuildSettings, build_scene, smooth_scene
    from halopose.multiview.scene_files import to_c3d, to_csv, to_trc
    from halopose.reports.scene_report import render_reconstruction

    views = read_calibration(cameras, unit)
    listed = len(films) == 1 and films[0].suffix.lower() == ".json"
    if listed:
        poses, layout, known_rate = _read(films[0], views)
        seconds = rate or known_rate or 25.0
        if rate is None and known_rate is None:
            say("the json has no frame rate: 25 frames/s are assumed; set it with --rate")
    else:
        if len(films) != len(views):
            raise HaloposeError(f"{cameras} has {len(views)} cameras: give as many films, in their order")
        from halopose.prediction.uncertain_pose import UncertainPose

        model = UncertainPose.load(base, artifact, family="student-t", device=device, unsafe=unsafe)
        layout, seconds, poses = model.layout, rate or film_facts(films[0])[0], []
        with progress() as step:
            for film in films:
                count, frames = film_facts(film)[1], []
                for _, one in model.stream(film, conf=conf, imgsz=imgsz):
                    frames.append(one)
                    step(film.stem, len(frames), max(count, len(frames)))
                poses.append(frames)
    folder = make_folder(output)
    apart = _offsets(offsets, views, poses)
    scene = build_scene(views, poses, layout, rate=seconds, offsets=apart, settings=SceneBuildSettings(score=score))
    _tell(scene)
    shown = smooth_scene(scene) if smooth else scene
    files = {folder / "scene.csv": to_csv(shown), folder / "scene.html": render_reconstruction(shown)}
    recordings = {}
    for person in shown.persons:
        name = f"person_{person.identity}"
        files[folder / f"{name}.trc"] = to_trc(person, shown, f"{name}.trc", up=up)
        recordings[folder / f"{name}.c3d"] = to_c3d(person, shown)
    for path, text in files.items():  # written last: a refused format leaves no partial output
        write_text(path, text)
    for path, content in recordings.items():
        write_bytes(path, content)
    say(f"-> {', '.join(map(str, (*files, *recordings)))}")


def _read(path: Path, views: list[CalibratedView]) -> tuple[list[list[PoseDistributions]], Keypoints, float | None]:
    """Return the poses of every camera's film, matched by name, or by order if no name matches."""
    from halopose.data.coco import parse_predictions
    from halopose.data.files import read_json
    from halopose.data.films import by_film, frame_rate
    from halopose.keypoints import Keypoints

    content = read_json(path)
    every = parse_predictions(path, content, None)
    films = by_film(path, content, every)
    missing = [view.name for view in views if view.name not in films]
    if len(missing) == len(views) == len(films):
        told = ", ".join(f"{film} of {view.name}" for film, view in zip(films, views, strict=True))
        say(f"films have other names than cameras, and are taken in the order of the json: {told}")
        return list(films.values()), Keypoints.of(every.keypoint_count), frame_rate(path, content)
    if missing:
        raise HaloposeError(f"{path} has films {', '.join(films)}, but none of camera {missing[0]}")
    return [films[view.name] for view in views], Keypoints.of(every.keypoint_count), frame_rate(path, content)


def _offsets(text: str, views: list[CalibratedView], poses: list[list[PoseDistributions]]) -> np.ndarray | None:
    import numpy as np

    from halopose.multiview.synchronise import estimate_offsets

    if text == "none":
        return None
    if text == "estimate":
        found = estimate_offsets(views, poses)
        told = ", ".join(f"{value:+.1f}" for value in found.frames)
        say(f"films are apart by {told} frames ({found.spread:.1f} between pairs): {found.whole.tolist()} taken")
        return found.whole
    try:
        values = np.array([int(part) for part in text.split(",")], dtype=np.int64)
    except (ValueError, OverflowError):
        raise HaloposeError(f"--offsets takes whole frames with commas, estimate or none, got {text!r}") from None
    if len(values) != len(views):
        raise HaloposeError(f"--offsets takes {len(views)} numbers, one for each camera, got {len(values)}")
    return values


def _tell(scene: ReconstructedScene) -> None:
    import numpy as np

    from halopose.multiview.leave_one_out import leave_one_out

    points = scene.points
    deviation = 1000 * np.sqrt(np.nanmedian(np.trace(points.covariance, axis1=1, axis2=2) / 3))
    gone = 1 - points.used.sum() / max(points.given.sum(), 1)
    count = len(scene.persons)
    noun = "person" if count == 1 else "persons"
    say(f"{count} {noun} in {scene.frames} frames; keypoints to {deviation:.0f} mm in the median")
    say(f"{gone:.1%} of the detected keypoints were excluded because other cameras contradict them")
    if len(scene.views) > 2:
        check = leave_one_out(scene.views, scene.gathered, others=min(3, len(scene.views) - 1), consistent=None)
        if check is not None:
            say(
                f"each camera predicted from the others: {check.coverage(0.95):.1%} of keypoints inside 95 % regions, "
                f"{check.coverage(0.5):.1%} inside 50 % (do not trust covariances that miss these by much)"
            )
