"""The command that follows objects through a film: track."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halopose.cli.export_commands import folder_of
from halopose.cli.options import (
    ArtifactElseShipped,
    BaseElseShipped,
    Confidence,
    Device,
    Iou,
    OtherSize,
    Unsafe,
    between,
    refuse_with_deployed,
)
from halopose.cli.terminal import progress, say
from halopose.errors import HaloposeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halopose.keypoints import Keypoints
    from halopose.poses import PoseDistributions
    from halopose.tracking.frame_store import FrameStore
    from halopose.tracking.motion import Motion, Warp
    from halopose.tracking.tracks import PoseTracks, TrackWindow
    from halopose.types import Progress

Film = Annotated[Path, typer.Argument(help="A film, or predictions.json of one from `halopose predict`.")]


def track(
    context: typer.Context,
    film: Film,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for film, json and csv.")] = Path("tracks"),
    base: BaseElseShipped = None,
    artifact: ArtifactElseShipped = None,
    deployed: Annotated[
        Path | None, typer.Option("--deployed", help="Folder of `halopose export`, not --base.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.1, max=10000.0, help="Frames a second; else what the film says.")
    ] = None,
    conf: Confidence = 0.1,
    score: Annotated[float, typer.Option(min=0.0, max=1.0, help="Confidence that begins a track.")] = 0.25,
    confirm: Annotated[int, typer.Option(min=1, max=1000, help="Detections that make a track.")] = 3,
    gap: Annotated[float, typer.Option(min=0.0, max=3600.0, help="Seconds that an object may be unseen.")] = 1.0,
    camera_motion: Annotated[
        bool, typer.Option("--camera-motion", help="The camera moves: follow objects against the background.")
    ] = False,
    causal: Annotated[
        bool, typer.Option("--causal", help="Draw and write what was known at the time; nothing of later frames.")
    ] = False,
    iou: Iou = 0.7,
    imgsz: OtherSize = None,
    probability: Annotated[
        float, typer.Option(callback=between, help="Probability that an ellipse holds, between 0 and 1.")
    ] = 0.95,
    picture: Annotated[bool, typer.Option(help="Write the annotated film.")] = True,
    device: Device = None,
    unsafe: Unsafe = False,
) -> None:
    """Follow objects through a film: identities, keypoints filtered and smoothed with their covariances."""
    from halopose.data.files import make_folder
    from halopose.data.films import film_facts
    from halopose.tracking.live_tracking import track_live_windows
    from halopose.tracking.track_files import TrackWriter
    from halopose.tracking.tracker import TrackSettings
    from halopose.tracking.tracks import NO_TRACK, WINDOW, track_windows

    if not film.is_file():
        raise HaloposeError(f"no file {film}: give a film, or predictions.json of one")
    settings = TrackSettings(score=score, confirm=confirm, gap=gap)
    listed = film.suffix.lower() == ".json"
    folder = make_folder(output)
    drawn = folder / f"{film.stem}.mp4" if picture and not listed else None
    written = [path for path in (drawn, folder / "tracks.json", folder / "tracks.csv") if path]
    if film.resolve() in [path.resolve() for path in written]:
        raise HaloposeError(f"what is written would take the place of {film}: choose another --output")
    frames: Sequence[PoseDistributions]
    if listed:
        frames, layout, known_rate = read_frames(film)
        warps, seconds = None, rate or known_rate or 25.0
        if rate is None and known_rate is None:
            say("the json does not say how fast the film is: 25 frames a second, or give --rate")
    else:
        from halopose.prediction.uncertain_pose import UncertainPose

        if deployed is not None:
            refuse_with_deployed(context, "device", "unsafe")
            base = folder_of(deployed)
        model = UncertainPose.load(base, artifact, family="student-t", device=device, unsafe=unsafe)
        layout, seconds = model.layout, rate or film_facts(film)[0]
        with progress() as step:
            frames, warps = _predicted(model, film, camera_motion, step, conf=conf, iou=iou, imgsz=imgsz)
    follow = track_live_windows if causal else track_windows
    windows = follow(frames, layout, rate=seconds, settings=settings, warps=warps, window=WINDOW)
    figures = _Figures()
    with TrackWriter(folder) as writer, _Drawing(film, drawn, seconds, probability) as drawing, progress() as step:
        for window in windows:
            if window.tracks is not None:
                writer.add(window.tracks)
                figures.add(window.tracks)
            drawing.add(window, step)
        if figures.motion is None:
            raise HaloposeError(NO_TRACK)
    figures.tell(len(frames), "assumed" if causal else "learnt")
    say(f"-> {', '.join(map(str, written))}")


def _predicted(
    model: Any, film: Path, camera_motion: bool, step: Progress, **options: Any
) -> tuple[FrameStore, list[Warp | None] | None]:
    """Poses of every frame, and how the picture moved where that is asked for."""
    from halopose.data.films import film_facts
    from halopose.tracking.camera_motion import CameraMotion
    from halopose.tracking.frame_store import FrameStore

    count, background = film_facts(film)[1], CameraMotion()
    frames = FrameStore()
    warps: list[Warp | None] = []
    for number, (image, poses) in enumerate(model.stream(film, **options), 1):
        frames.append(poses)
        if camera_motion:
            warps.append(background.update(image.pixels, poses.boxes))
        step("predicting", number, max(count, number))
    return frames, warps if camera_motion else None


def read_frames(path: Path) -> tuple[list[PoseDistributions], Keypoints, float | None]:
    """Poses of each frame of one film in a predictions.json, whose file names end in the numbers of the frames."""
    from halopose.data.coco import parse_predictions
    from halopose.data.files import read_json
    from halopose.data.films import by_film, frame_rate
    from halopose.keypoints import Keypoints

    content = read_json(path)
    poses = parse_predictions(path, content, None)
    films = by_film(path, content, poses)
    if len(films) > 1:
        raise HaloposeError(f"{path} holds {len(films)} films: track one at a time, give the film itself")
    return next(iter(films.values())), Keypoints.of(poses.keypoint_count), frame_rate(path, content)


class _Figures:
    """Figures of the tracks over all windows."""

    def __init__(self) -> None:
        self.identities: set[int] = set()
        self.observed = self.keypoints = 0
        self.motion: Motion | None = None

    def add(self, tracks: PoseTracks) -> None:
        self.identities.update(tracks.track_ids.tolist())
        self.observed += int(tracks.observed.sum())
        self.keypoints += tracks.observed.size
        self.motion = tracks.motion

    def tell(self, frames: int, how: str) -> None:
        motion = self.motion
        if motion is None:
            return
        bridged = 1 - self.observed / max(self.keypoints, 1)
        say(f"{len(self.identities)} tracks in {frames} frames; {bridged:.0%} of their keypoints bridged")
        say(
            f"{how}: {float(motion.share):.0%} of the errors' variance lasts, for {float(motion.memory):.2g} s; "
            f"accelerations {motion.acceleration.min():.2g} to {motion.acceleration.max():.2g} sizes / s^1.5"
        )


class _Drawing:
    """Annotated film, drawn window by window; without a target nothing is drawn."""

    def __init__(self, film: Path, target: Path | None, rate: float, probability: float) -> None:
        from halopose.data.films import FilmWriter
        from halopose.data.images import read_source

        self._writer = None if target is None else FilmWriter(target, rate)
        self._images = iter(()) if target is None else iter(read_source(film))
        self._probability = probability

    def __enter__(self) -> _Drawing:
        if self._writer is not None:
            self._writer.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._writer is not None:
            self._writer.__exit__(*error)

    def add(self, window: TrackWindow, step: Progress) -> None:
        """Draw the frames of a window."""
        if self._writer is None:
            return
        for number, image in zip(range(window.start, window.stop), self._images, strict=False):
            picture, tracks = image.pixels, window.tracks
            if tracks is not None:
                rows = tracks.rows(frame=number)
                picture = tracks.poses[rows].plot(
                    picture,
                    probability=self._probability,
                    names=tracks.layout.names,
                    limbs=tracks.layout.limbs,
                    labels=[f"#{identity}" for identity in tracks.track_ids[rows]],
                )
            self._writer.write(picture)
            step("drawing", number + 1, max(window.stop, number + 1))
