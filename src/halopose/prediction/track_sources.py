"""Tracks of films, cameras and streams: an annotated film, tracks.json and tracks.csv."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from halopose.background import ReadAhead
from halopose.data.coco import parse_predictions
from halopose.data.files import make_folder, write_text
from halopose.data.films import FRAMES_TO_MEASURE, AnnotatedFilm, by_film, frame_rate
from halopose.data.formats.reading import read_results
from halopose.data.images import NamedImage
from halopose.data.sources import Source, find_sources
from halopose.display import Window, check_screen
from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.origin import Speed
from halopose.pose_tables import to_yolo
from halopose.poses import PoseDistributions
from halopose.prediction.predict_files import chosen_detections
from halopose.prediction.predictor import Predictor
from halopose.prediction.speed_clock import SpeedClock
from halopose.prediction.stream_monitor import StreamMonitor
from halopose.tracking.camera_motion import CameraMotion
from halopose.tracking.frame_store import FrameStore
from halopose.tracking.live_tracking import track_live_windows
from halopose.tracking.motion import Motion, Warp
from halopose.tracking.track_files import TrackWriter
from halopose.tracking.tracker import TrackSettings
from halopose.tracking.tracks import NO_TRACK, WINDOW, PoseTracks, TrackWindow, track_windows
from halopose.types import Array, Progress

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackFileSettings:
    """Settings of tracking over films.

    Attributes:
        tracker: Thresholds of the tracker.
        conf: Lowest score of a detection.
        iou: Overlap of boxes above which non-maximum suppression removes the weaker one.
        imgsz: Input size in pixels; None: the model's.
        rate: Frames per second; None: that of the film.
        probability: Probability of the drawn ellipses.
        camera_motion: Estimate the motion of the camera from the background.
        causal: Use no later frames, as for a camera; a responsive tracker is always causal.
        pictures: Write the annotated film.
        classes: Classes to keep, counted from 0; None: all.
        max_det: Largest number of detections per frame; None: no limit but the model's.
        vid_stride: Use every n-th frame.
        save_txt: Write labels/NAME.txt for each frame, in YOLO's format with the identity at the end of a line.
        show: Show the annotated frames in a window.
        monitor: False-alarm probability of the calibration monitor; None: no monitor.
    """

    tracker: TrackSettings = field(default_factory=TrackSettings)
    conf: float = 0.1
    iou: float = 0.7
    imgsz: int | None = None
    rate: float | None = None
    probability: float = 0.95
    camera_motion: bool = False
    causal: bool = False
    pictures: bool = True
    classes: tuple[int, ...] | None = None
    max_det: int | None = None
    vid_stride: int = 1
    save_txt: bool = False
    show: bool = False
    monitor: float | None = None

    @property
    def live(self) -> bool:
        """Whether nothing of later frames is used."""
        return self.causal or self.tracker.responsive > 0


@dataclass
class TrackedFilm:
    """Result of tracking a film.

    Attributes:
        name: Name of the film.
        frames: Number of frames.
        identities: Numbers of the objects.
        observed: Number of keypoints with a detection.
        keypoints: Number of keypoints of all tracks in all frames.
        motion: Motion and error model; None without a track.
        causal: Whether no later frames were used.
        responsive: Whether the responsive filter was used.
        written: The files that were written.
        speed: Mean milliseconds per frame for reading, model, uncertainty, and drawing with writing; they overlap.
    """

    name: str
    frames: int = 0
    identities: set[int] = field(default_factory=set)
    observed: int = 0
    keypoints: int = 0
    motion: Motion | None = None
    causal: bool = False
    responsive: bool = False
    written: tuple[Path, ...] = ()
    speed: Speed | None = None

    def add(self, tracks: PoseTracks) -> None:
        """Count the tracks of a window of frames."""
        self.identities.update(tracks.track_ids.tolist())
        self.observed += int(tracks.observed.sum())
        self.keypoints += tracks.observed.size
        self.motion = tracks.motion

    def __str__(self) -> str:
        bridged = 1 - self.observed / max(self.keypoints, 1)
        text = f"{len(self.identities)} tracks in {self.frames} frames; {bridged:.0%} of their keypoints bridged"
        if self.motion is None:
            return text
        if self.responsive:
            return f"{text}\nresponsive filter: accelerations follow the speed"
        motion, how = self.motion, "assumed motion model" if self.causal else "fitted motion model"
        correlated = f"{float(motion.share):.0%} of the error variance correlated over {float(motion.memory):.2g} s"
        low, high = motion.acceleration.min(), motion.acceleration.max()
        return f"{text}\n{how}: {correlated}; accelerations {low:.2g} to {high:.2g} sizes / s^1.5"


def track_files(
    model: Predictor,
    source: str | Path,
    folder: Path | str,
    settings: TrackFileSettings | None = None,
    progress: Callable[[], AbstractContextManager[Progress]] | None = None,
) -> list[TrackedFilm]:
    """Track the objects of films, a camera or a stream.

    A film is read twice, so that the estimates of a frame use later frames. A camera, a stream or a film at an address
    is read once and tracked causally, until Ctrl-C or until the window is closed.

    Args:
        model: The predictor, with the Student-t.
        source: A film, a folder or pattern of films, the number of a camera, or an address.
        folder: Output folder; of several films, each has a subfolder.
        settings: Settings of prediction, tracking and drawing.
        progress: Returns a context manager that gives the progress callback.

    Raises:
        HaloposeError: There is no film, no object is found in a film, or an output would replace a film.
    """
    settings = settings or TrackFileSettings()
    if settings.show:
        check_screen()
    found = []
    for film, place in _films(source, Path(folder)):
        run = _TrackRun(model, film, place, settings, progress or _silent)
        found.append(run.twice() if film.path is not None else run.once())
    return found


def check_track_outputs(source: str | Path, folder: Path | str, settings: TrackFileSettings) -> None:
    """Check the source and the outputs before any work.

    Args:
        source: A film, a folder or pattern of films, the number of a camera, or an address.
        folder: Output folder.
        settings: Settings of tracking.
    """
    if settings.show:
        check_screen()
    for film, place in _films(source, Path(folder)):
        _outputs(place, film.path, place / f"{film.name}.mp4" if settings.pictures else None)


def _films(source: str | Path, folder: Path) -> list[tuple[Source, Path]]:
    """Films of a source, each with its output folder: of several films, each has a subfolder."""
    films = [each for each in find_sources([str(source)]) if each.is_film]
    if not films:
        raise HaloposeError(f"{source} is not a film: give a film, a folder of films, a camera or an address")
    return [(film, folder if len(films) == 1 else folder / film.name) for film in films]


def track_predictions(
    path: Path | str, folder: Path | str, settings: TrackFileSettings | None = None, progress: Progress | None = None
) -> TrackedFilm:
    """Track the objects of a film from the predictions.json that ``predict`` wrote for it.

    Args:
        path: The predictions of one film, whose file names end in the numbers of the frames.
        folder: Output folder.
        settings: Settings of tracking; nothing is drawn.
        progress: Called with the name of the step, the number of frames done and their total.

    Raises:
        HaloposeError: The file contains no frames or frames of several films, or no object is found.
    """
    settings, path = settings or TrackFileSettings(), Path(path)
    written = _outputs(Path(folder), path, None)
    frames, layout, known_rate = read_frames(path)
    if settings.rate is None and known_rate is None:
        log.info("the json does not state the frame rate: using 25 frames/s; give --rate if it differs")
    rate = settings.rate or known_rate or 25.0
    follow = track_live_windows if settings.live else track_windows
    windows = follow(frames, layout, rate=rate, settings=settings.tracker, window=WINDOW)
    responsive = settings.tracker.responsive > 0
    found = TrackedFilm(path.stem, len(frames), causal=settings.live, responsive=responsive, written=written)
    with TrackWriter(make_folder(folder)) as writer:
        for window in windows:
            if window.tracks is not None:
                writer.add(window.tracks)
                found.add(window.tracks)
        if found.motion is None:
            raise HaloposeError(NO_TRACK)
    return found


def read_frames(path: Path) -> tuple[list[PoseDistributions], Keypoints, float | None]:
    """Poses of each frame of one film in a predictions.json, keypoint layout, and frame rate if it is stated."""
    content = read_results(path)
    poses = parse_predictions(path, content, None)
    films = by_film(path, content, poses)
    if len(films) > 1:
        raise HaloposeError(f"{path} has frames of {len(films)} films: predict and track each film separately")
    return next(iter(films.values())), Keypoints.of(poses.keypoint_count), frame_rate(path, content)


def _outputs(folder: Path, source: Path | None, drawn: Path | None) -> tuple[Path, ...]:
    """Files that will be written; none may be the source."""
    written = tuple(path for path in (drawn, folder / "tracks.json", folder / "tracks.csv") if path)
    if source is not None and source.resolve() in [path.resolve() for path in written]:
        raise HaloposeError(f"an output file would replace the source {source}: choose another --output")
    return written


class _TrackRun:
    """Tracking of one film, camera or stream."""

    def __init__(
        self,
        model: Predictor,
        source: Source,
        folder: Path,
        settings: TrackFileSettings,
        progress: Callable[[], AbstractContextManager[Progress]],
    ) -> None:
        self.model, self.source, self.folder, self.settings = model, source, folder, settings
        self.progress = progress
        self.target = folder / f"{source.name}.mp4" if settings.pictures else None
        self.monitor = None if settings.monitor is None else StreamMonitor(model, settings.monitor)
        self.warps: list[Warp | None] = []
        self.clock = SpeedClock()
        written = _outputs(folder, source.path, self.target)
        self.found = TrackedFilm(source.name, responsive=settings.tracker.responsive > 0, written=written)

    def twice(self) -> TrackedFilm:
        """Predict the whole film, track it, and read it again to draw."""
        settings, store = self.settings, FrameStore()
        self.found.causal = settings.live
        rate = settings.rate
        with self.progress() as step:
            for number, (image, poses) in enumerate(self._predicted(), 1):
                rate = rate or image.rate
                store.append(poses)
                step("predicting", number, max(image.length, number))
        self.found.frames = len(store)
        warps = self.warps if settings.camera_motion else None
        follow = track_live_windows if settings.live else track_windows
        windows = follow(
            store, self.model.layout, rate=rate or 25.0, settings=settings.tracker, warps=warps, window=WINDOW
        )
        drawn = settings.pictures or settings.show or settings.save_txt
        images = self.source.images(settings.vid_stride) if drawn else iter(())
        with self.progress() as step:
            self._write(windows, images, step)
        return self.found

    def once(self) -> TrackedFilm:
        """Track each frame as it arrives."""
        settings = self.settings
        self.found.causal = True
        waiting: deque[NamedImage] = deque()
        with closing(self._predicted()) as predicted, self.progress() as step:
            rate = settings.rate
            first: list[tuple[NamedImage, PoseDistributions]] = []
            if rate is None:  # the tracker needs the time between frames
                rate, first = _measured_rate(predicted, self.source.is_endless)

            def frames() -> Iterator[PoseDistributions]:
                for image, poses in chain(first, predicted):
                    waiting.append(image)
                    self.found.frames += 1
                    step(self.source.name, self.found.frames, max(image.length, self.found.frames))
                    yield poses

            windows = track_live_windows(
                frames(),
                self.model.layout,
                rate=rate,
                settings=settings.tracker,
                warps=self.warps if settings.camera_motion else None,
                window=1,
            )
            self._write(windows, _popped(waiting), step)
        return self.found

    def _predicted(self) -> Generator[tuple[NamedImage, PoseDistributions]]:
        """Frames with their poses; Ctrl-C ends a source that has no end."""
        settings, source, background = self.settings, self.source, CameraMotion()
        with ReadAhead(source.images(settings.vid_stride), newest=source.is_endless) as images:
            try:
                for image in self.clock.timed(iter(images)):
                    found = self.model.predict(
                        image.pixels, conf=settings.conf, iou=settings.iou, imgsz=settings.imgsz
                    )[0]
                    self.clock.add(found)
                    if self.monitor is not None:
                        self.monitor.update(found, image.name, source.name, image.rate)
                    poses = chosen_detections(found, settings.classes, settings.max_det)
                    if settings.camera_motion:
                        self.warps.append(background.update(image.pixels, poses.boxes))
                    yield image, poses
            except KeyboardInterrupt:
                if not source.is_endless:
                    raise
                log.info("stopped")

    def _write(self, windows: Iterator[TrackWindow], images: Iterator[NamedImage], step: Progress) -> None:
        """Write tracks, annotated film, labels and window."""
        with ExitStack() as stack:
            writer = stack.enter_context(TrackWriter(make_folder(self.folder)))
            film = stack.enter_context(AnnotatedFilm(self.target, self.source.is_endless))
            window = stack.enter_context(Window(rate=True)) if self.settings.show else None
            for part in windows:
                if part.tracks is not None:
                    writer.add(part.tracks)
                    self.found.add(part.tracks)
                if not self._draw(part, images, film, window, step) and self.source.is_endless:
                    break
            if self.found.motion is None:
                raise HaloposeError(NO_TRACK)
        self.found.speed = self.clock.speed

    def _draw(
        self,
        part: TrackWindow,
        images: Iterator[NamedImage],
        film: AnnotatedFilm,
        window: Window | None,
        step: Progress,
    ) -> bool:
        """Draw the frames of a window of frames; returns False if the user closed the window on the screen."""
        if self.target is None and window is None and not self.settings.save_txt:
            return True
        for number, image in zip(range(part.start, part.stop), images, strict=False):
            with self.clock.drawing():
                picture = self._picture(image, part.tracks, number)
                film.write(picture, self.settings.rate or image.rate)
            if not self.source.is_endless:
                step("drawing", number + 1, max(part.stop, image.length))
            if window is not None and not window.show(picture):
                return False
        return True

    def _picture(self, image: NamedImage, tracks: PoseTracks | None, number: int) -> Array:
        """Annotated frame; its labels are written."""
        if tracks is None:
            return image.pixels
        rows = tracks.rows(frame=number)
        if self.settings.save_txt:
            self._write_labels(image, tracks, rows)
        return tracks.poses[rows].plot(
            image.pixels,
            probability=self.settings.probability,
            names=tracks.layout.names,
            limbs=tracks.layout.limbs,
            labels=[f"#{identity}" for identity in tracks.track_ids[rows]],
        )

    def _write_labels(self, image: NamedImage, tracks: PoseTracks, rows: Array) -> None:
        height, width = image.pixels.shape[:2]
        lines = to_yolo(tracks.poses[rows], width, height).splitlines()
        text = "".join(f"{line} {identity}\n" for line, identity in zip(lines, tracks.track_ids[rows], strict=True))
        write_text(self.folder / "labels" / f"{image.name}.txt", text)


def _measured_rate(
    predicted: Iterator[tuple[NamedImage, PoseDistributions]], endless: bool
) -> tuple[float, list[tuple[NamedImage, PoseDistributions]]]:
    """Frame rate of a source, stated or measured, and the frames that were read to find it."""
    first, began = [], 0.0
    for image, poses in predicted:
        began = began or time.monotonic()
        first.append((image, poses))
        if not endless:
            return image.rate or 25.0, first
        if len(first) >= FRAMES_TO_MEASURE:
            break
    duration = time.monotonic() - began
    stated = first[0][0].rate if first else None
    measured_rate = (len(first) - 1) / duration if len(first) > 1 and duration > 0 else 25.0
    return min(stated or measured_rate, max(measured_rate, 0.1)), first


def _popped(waiting: deque[NamedImage]) -> Iterator[NamedImage]:
    """Remove and yield images in order, while another iterator appends."""
    while waiting:
        yield waiting.popleft()


def _silent() -> AbstractContextManager[Progress]:
    return nullcontext(lambda what, done, total: None)
