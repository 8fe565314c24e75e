"""Prediction over many files: annotated pictures and films, and a predictions.json in COCO results format."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import count, groupby
from pathlib import Path
from typing import Any

import numpy as np

from halopose.background import ReadAhead, TaskThread
from halopose.calibration.calibration_monitor import MonitorState
from halopose.data.coco import Numbering, parse_predictions, read_numbering
from halopose.data.dataset import image_id, image_ids
from halopose.data.files import make_folder, remove_partial, write_text
from halopose.data.films import AnnotatedFilm
from halopose.data.images import NamedImage, write_image
from halopose.data.lock import locked
from halopose.data.sources import Source, find_sources
from halopose.data.storage.own_files import open_without_links
from halopose.data.storage.prediction_log import PredictionLog, run_state, source_state
from halopose.display import Window, check_screen
from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.origin import Speed
from halopose.pose_tables import keypoint_columns, to_csv, to_yolo
from halopose.poses import PoseDistributions
from halopose.prediction.predictor import Predictor
from halopose.prediction.speed_clock import SpeedClock
from halopose.prediction.stream_monitor import StreamMonitor
from halopose.types import Array, Progress

log = logging.getLogger(__name__)

MOST_FOLDERS = 10_000  # numbered output folders


@dataclass(frozen=True)
class PictureSettings:
    """Content of annotated pictures.

    Attributes:
        probability: Probability of the ellipses.
        pruned: Draw pruned keypoints as well.
        boxes: Draw boxes and scores.
        legend: Draw a legend of the colours.
    """

    probability: float = 0.95
    pruned: bool = True
    boxes: bool = False
    legend: bool = False


@dataclass(frozen=True)
class PredictSettings:
    """Settings of prediction over files.

    Attributes:
        conf: Lowest score of a detection.
        iou: Overlap of boxes above which non-maximum suppression removes the weaker one.
        imgsz: Input size in pixels; None: the model's.
        pictures: Content of annotated pictures and films; None: none are written.
        joint: Write the joint degrees of freedom and correlations of keypoints as well.
        alarm: False-alarm rate at which detections and images are flagged as out of distribution; None: not flagged.
        monitor: False-alarm probability of the calibration monitor over the whole run; None: no monitor.
        exist_ok: Write into a folder that holds an earlier run, instead of numbering the folders.
        classes: Classes to keep, counted from 0 as in a data yaml; None: all.
        max_det: Largest number of detections per image, the most confident first; None: no limit but the model's.
        vid_stride: Use every n-th frame of films and streams.
        save_txt: Write labels/NAME.txt for each image, in YOLO's format.
        save_csv: Write keypoints.csv, a row for each keypoint.
        show: Show annotated images in a window, with the frames per second.
    """

    conf: float = 0.25
    iou: float = 0.7
    imgsz: int | None = None
    pictures: PictureSettings | None = field(default_factory=PictureSettings)
    joint: bool = False
    alarm: float | None = None
    monitor: float | None = None
    exist_ok: bool = False
    classes: tuple[int, ...] | None = None
    max_det: int | None = None
    vid_stride: int = 1
    save_txt: bool = False
    save_csv: bool = False
    show: bool = False

    def __post_init__(self) -> None:
        if self.max_det is not None and self.max_det < 1:
            raise HaloposeError(f"max_det must be 1 or more, got {self.max_det}")
        if self.vid_stride < 1:
            raise HaloposeError(f"vid_stride must be 1 or more, got {self.vid_stride}")
        if self.classes is not None and (not self.classes or min(self.classes) < 0):
            raise HaloposeError(f"classes are counted from 0, got {self.classes}")


@dataclass(frozen=True)
class PredictedFiles:
    """Result of a run over files.

    Attributes:
        folder: The folder with predictions.json and the pictures.
        sources: Number of images, films and streams that were given.
        done: Number of them that were predicted.
        skipped: One line for each source that could not be read or predicted.
        images: Number of images and frames that this run predicted.
        speed: Mean milliseconds per image for reading, model, uncertainty, and drawing with writing. They overlap.
        monitor: State of the calibration monitor after the last image, if there was one.
    """

    folder: Path
    sources: int
    done: int
    skipped: tuple[str, ...]
    images: int = 0
    speed: Speed | None = None
    monitor: MonitorState | None = None


def predict_files(
    model: Predictor,
    sources: Sequence[str | Path],
    folder: Path | str,
    settings: PredictSettings | None = None,
    *,
    truth: Path | str | None = None,
    progress: Callable[[], AbstractContextManager[Progress]] | None = None,
) -> PredictedFiles:
    """Predict images, films and streams: annotated copies, and predictions.json in COCO results format.

    Files that cannot be read are logged and skipped. The same call resumes a stopped run. A folder with an earlier run
    is not changed: the results are written to ``folder2``, ``folder3`` and so on.

    Args:
        model: The predictor.
        sources: Images, folders (with everything below them), patterns, films, addresses of streams; "-" is standard
            input.
        folder: Output folder.
        settings: How to predict and what to draw.
        truth: COCO json that states the ids of images, by file name, and of classes.
        progress: Returns a context manager that gives the progress callback.

    Raises:
        HaloposeError: A source is missing, an output would replace a source or a foreign file, another process
            writes into the folder, or the model lacks an out-of-distribution model that ``alarm`` needs.

    Example:
        >>> from halopose import UncertainPose
        >>> predicted = predict_files(UncertainPose.load(), ["photo.jpg"], "poses")
        >>> predicted.done, predicted.folder.name
        (1, 'poses')
    """
    settings = settings or PredictSettings()
    if settings.show:
        check_screen()
    found = find_sources([str(source) for source in sources])
    ids = None if truth is None else read_numbering(Path(truth))
    if settings.alarm is not None and not model.has_novelty:
        raise HaloposeError(
            "this artifact has no out-of-distribution model, which --alarm needs: add one with `halopose novelty`"
        )
    if settings.monitor is not None:
        StreamMonitor(model, settings.monitor)  # refused before a folder is made
    how = asdict(replace(settings, exist_ok=False, show=False))
    key = [*model.identity(), model.family, how, None if ids is None else asdict(ids)]
    states = {source.file_name: source_state(source.path) for source in found}
    target, resumed = _free_folder(Path(folder), settings.exist_ok, key, states)
    _check_outputs(found, target, settings, resumed)
    with ExitStack() as stack:
        stack.enter_context(locked(make_folder(target)))
        remove_partial(_outputs(found, target, settings))
        if not settings.exist_ok and run_state(target, key, states) == "other":
            raise HaloposeError(f"another process has just written to {target}: run the command again")
        window = stack.enter_context(Window(rate=True)) if settings.show else None
        run = _Run(model, target, settings, ids, PredictionLog(target, key, states), window)
        step = stack.enter_context((progress or _silent)())
        return run.over(found, step)


def _silent() -> AbstractContextManager[Progress]:
    return nullcontext(lambda what, done, total: None)


def _free_folder(folder: Path, exist_ok: bool, key: Any, states: dict[str, Any]) -> tuple[Path, bool]:
    """Return the folder to write to, and whether an earlier run there is resumed or replaced."""
    if exist_ok:
        return folder, True
    for number in count(1):
        target = folder if number == 1 else folder.with_name(f"{folder.resolve().name}{number}")
        if folder.name in ("", "..") and number > 1:  # the current or the parent folder: resolve its name
            target = folder.resolve().with_name(f"{folder.resolve().name}{number}")
        state = run_state(target, key, states)
        if state != "other":
            if number > 1:
                log.info("%s holds an earlier run: writing to %s (--exist-ok replaces it)", folder, target)
            return target, state == "resumable"
        if number >= MOST_FOLDERS:
            break
    raise HaloposeError(f"{folder} and {MOST_FOLDERS} numbered folders hold earlier runs: choose another --output")


def _outputs(sources: Sequence[Source], folder: Path, settings: PredictSettings) -> list[Path]:
    """Return the files that a run writes."""
    targets = [folder / "predictions.json"]
    targets += [folder / "keypoints.csv"] * settings.save_csv
    targets += [folder / "labels" / f"{source.name}.txt" for source in sources if settings.save_txt]
    if settings.pictures is not None:
        targets += [folder / f"{source.name}.{'mp4' if source.is_film else 'jpg'}" for source in sources]
    return targets


def _check_outputs(sources: Sequence[Source], folder: Path, settings: PredictSettings, overwrite: bool) -> None:
    """Refuse outputs that would replace a source, or a file that this command has not written."""
    inputs = {os.path.realpath(source.path): source.path for source in sources if source.path is not None}
    for target in _outputs(sources, folder, settings):
        path = inputs.get(os.path.realpath(target))
        if path is not None:
            raise HaloposeError(f"the annotated copy {target} would replace the source {path}: choose another --output")
        if not overwrite and (target.exists() or target.is_symlink()):
            raise HaloposeError(f"{target} exists already: choose another --output, or replace it with --exist-ok")


class _UnusableSource(HaloposeError):
    """A source that cannot be read or predicted; the other sources can."""


class _Stopped(Exception):
    """The user closed the window."""


class _Run:
    """A run over sources into one folder.

    A thread reads images ahead; another one draws and writes. Both overlap with the model.
    """

    def __init__(
        self,
        model: Predictor,
        folder: Path,
        settings: PredictSettings,
        ids: Numbering | None,
        results: PredictionLog,
        window: Window | None,
    ) -> None:
        self.model, self.folder, self.settings, self.ids, self.results = model, folder, settings, ids, results
        self.window = window
        self.numbers: dict[str, int] = {}
        self.clock = SpeedClock()
        self.monitor = None if settings.monitor is None else StreamMonitor(model, settings.monitor)

    def over(self, sources: Sequence[Source], step: Progress) -> PredictedFiles:
        """Predict every source that is not finished yet."""
        names = [source.file_name for source in sources]
        self.numbers = dict(zip(names, image_ids(names), strict=True))
        left = [source for source in sources if source.file_name not in self.results.finished]
        if len(left) < len(sources):
            log.info("%d of %d were done before: resuming", len(sources) - len(left), len(sources))
        skipped: list[str] = []
        done = 0
        complete = False
        try:
            for films, found in groupby(left, key=lambda source: source.is_film):
                group = list(found)
                with closing(self._films(group, step) if films else self._images(group)) as outcomes:
                    for error in outcomes:
                        step("predicting", done, len(left))
                        done += 1
                        if error is not None:
                            skipped.append(str(error))
                            log.warning("skipped: %s", error)
            step("predicting", len(left), len(left))
            complete = True
        except _Stopped:
            log.info("stopped: the window was closed")
        except KeyboardInterrupt:
            log.warning("stopped: finished results are kept in %s, and the same command resumes", self.folder)
            raise
        finally:
            done = self._closed(complete)
        watched = None if self.monitor is None else self.monitor.state
        return PredictedFiles(
            self.folder, len(sources), done, tuple(skipped), self.clock.images, self.clock.speed, watched
        )

    def _images(self, sources: Iterable[Source]) -> Generator[_UnusableSource | None]:
        """Predict images; yields for each the error that made it unusable, or None."""
        with ReadAhead(self.clock.timed(_each_image(sources))) as images, TaskThread() as tasks:
            for source, image in images:
                yield image if isinstance(image, _UnusableSource) else self._image(source, image, tasks)

    def _image(self, source: Source, image: NamedImage, tasks: TaskThread) -> _UnusableSource | None:
        try:
            poses = self._poses(image, source.file_name)
        except _UnusableSource as error:
            return error
        entries = self._entries(image, source.file_name, poses)
        picture = self._shown(image, poses)

        def finish() -> None:
            self.results.add(source.file_name, entries)
            with self.clock.drawing():
                self._write_labels(image, poses)
                drawn = self._picture(image.pixels, poses) if picture is None else picture
                if drawn is not None and self.settings.pictures is not None:
                    write_image(self.folder / f"{image.name}.jpg", drawn)
            self.results.done(source.file_name)
            log.info("%s: %s", image.name, _counts(poses, self.settings.alarm))

        tasks.submit(finish)
        return None

    def _films(self, sources: Iterable[Source], step: Progress) -> Generator[_UnusableSource | None]:
        """Predict films and streams, one after the other; yields as for images."""
        for source in sources:
            try:
                self._film(source, step)
            except _UnusableSource as error:
                yield error
            else:
                yield None

    def _film(self, source: Source, step: Progress) -> None:
        """Predict a film or a stream; an error leaves none of its results behind.

        A camera or stream ends when the user presses Ctrl-C or closes the window; what was recorded is kept.
        """
        began = time.monotonic()
        frames, stopped = 0, False
        target = self.folder / f"{source.name}.mp4" if self.settings.pictures is not None else None
        with AnnotatedFilm(target, source.is_endless) as film, TaskThread() as tasks:
            read = self.clock.timed(_read(source, self.settings.vid_stride))
            with ReadAhead(read, newest=source.is_endless and self.window is not None) as images:
                try:
                    for frames, image in enumerate(images, 1):
                        self._frame(source, image, film, tasks)
                        pace = 1000 * (time.monotonic() - began) / frames
                        step(f"{source.name} ({pace:.0f} ms/frame)", frames, max(image.length, frames))
                except KeyboardInterrupt:
                    if not source.is_endless:
                        raise
                    stopped = True
                except _Stopped:
                    stopped = True
            tasks.finish()
            self.results.done(source.file_name)
        pace = 1000 * (time.monotonic() - began) / max(frames, 1)
        log.info("%s: %d frames, %.0f ms/frame%s", source.name, frames, pace, ", stopped" if stopped else "")
        if stopped:
            raise _Stopped

    def _frame(self, source: Source, image: NamedImage, film: AnnotatedFilm, tasks: TaskThread) -> None:
        poses = self._poses(image, source.file_name)
        entries = self._entries(image, source.file_name, poses, None if source.is_endless else image.rate)
        picture = self._shown(image, poses)

        def finish() -> None:
            self.results.add(source.file_name, entries)
            with self.clock.drawing():
                self._write_labels(image, poses)
                drawn = self._picture(image.pixels, poses) if picture is None else picture
                if drawn is not None:
                    film.write(drawn, image.rate)

        tasks.submit(finish)

    def _poses(self, image: NamedImage, file_name: str) -> PoseDistributions:
        """Predict an image."""
        settings = self.settings
        try:
            found = self.model.predict(image.pixels, conf=settings.conf, iou=settings.iou, imgsz=settings.imgsz)[0]
        except HaloposeError as error:
            raise _UnusableSource(f"{file_name}: {error}") from None
        self.clock.add(found)
        if self.monitor is not None:
            self.monitor.update(found, image.name, None if image.frame is None else file_name, image.rate)
        return chosen_detections(found, settings.classes, settings.max_det)

    def _entries(
        self, image: NamedImage, file_name: str, poses: PoseDistributions, frame_rate: float | None = None
    ) -> list[dict[str, Any]]:
        """Entries of predictions.json for the detections of an image."""
        settings = self.settings
        name = file_name if image.frame is None else image.name
        if self.ids is not None and name not in self.ids.images:
            raise HaloposeError(f"the truth has no image {name}: leave --truth out, or give the matching file")
        identity = self.numbers.get(name, image_id(name)) if self.ids is None else self.ids.images[name]
        of_image: dict[str, Any] = {"image_id": identity, "file_name": name}
        if frame_rate is not None:
            of_image["frame_rate"] = frame_rate
        if settings.alarm is not None and poses.image_novelty is not None:
            of_image["image_novelty"] = float(poses.image_novelty[0])
        entries = [{**entry, **of_image} for entry in poses.to_json(settings.joint)]
        if self.ids is not None:
            for entry in entries:
                entry["category_id"] = self.ids.category(entry["category_id"])
        if settings.alarm is not None:
            for entry, inside in zip(entries, poses.in_distribution(settings.alarm).tolist(), strict=True):
                entry["in_distribution"] = inside
        return entries

    def _shown(self, image: NamedImage, poses: PoseDistributions) -> Array | None:
        """Show the annotated image in the window, if there is one, and return it."""
        if self.window is None:
            return None
        with self.clock.drawing():
            picture = self._picture(image.pixels, poses)
            if picture is not None and not self.window.show(picture):
                raise _Stopped
        return picture

    def _picture(self, pixels: Array, poses: PoseDistributions) -> Array | None:
        drawing, layout = self.settings.pictures, self.model.layout
        if drawing is None:
            if self.window is None:
                return None
            drawing = PictureSettings()
        return poses.plot(
            pixels,
            probability=drawing.probability,
            show_pruned=drawing.pruned,
            boxes=drawing.boxes,
            legend=drawing.legend,
            names=layout.names,
            limbs=layout.limbs,
            alarm=self.settings.alarm,
        )

    def _write_labels(self, image: NamedImage, poses: PoseDistributions) -> None:
        if self.settings.save_txt:
            height, width = image.pixels.shape[:2]
            write_text(self.folder / "labels" / f"{image.name}.txt", to_yolo(poses, width, height))

    def _closed(self, complete: bool) -> int:
        """Write predictions.json and the table; after an error a second error while writing adds nothing."""
        try:
            if self.settings.save_csv:
                _write_table(self.folder / "keypoints.csv", self.results, self.model.layout)
            return self.results.close(complete)
        except HaloposeError:
            if complete:
                raise
            return 0


def _each_image(sources: Iterable[Source]) -> Iterator[tuple[Source, NamedImage | _UnusableSource]]:
    """Yield each source with its image, or with the error if it cannot be read."""
    for source in sources:
        try:
            yield from ((source, image) for image in _read(source))
        except _UnusableSource as error:
            yield source, error


def _read(source: Source, stride: int = 1) -> Iterator[NamedImage]:
    """Yield the images of a source; an error of reading becomes ``_UnusableSource``."""
    images = source.images(stride)
    while True:
        try:
            image = next(images)
        except StopIteration:
            return
        except HaloposeError as error:
            raise _UnusableSource(str(error)) from None
        yield image


def chosen_detections(
    poses: PoseDistributions, classes: tuple[int, ...] | None, max_det: int | None
) -> PoseDistributions:
    """Keep the detections of some classes, up to a largest number, by descending score.

    Args:
        poses: Detections of one image.
        classes: Classes counted from 0, as in a data yaml; None for all.
        max_det: Largest number of detections; None for no limit.
    """
    if classes is not None:
        found = np.zeros(len(poses), dtype=int) if poses.class_ids is None else poses.class_ids - 1
        poses = poses[np.isin(found, classes)]
    if max_det is not None and len(poses) > max_det:
        poses = poses[np.sort(np.argsort(-poses.scores, kind="stable")[:max_det])]
    return poses


def _write_table(path: Path, results: PredictionLog, layout: Keypoints) -> None:
    """Write one row for each keypoint of the finished sources."""

    temporary = path.with_suffix(".writing")
    header = True
    try:
        with open_without_links(temporary, "wb") as file:
            for entries in filter(None, results.entries()):
                columns = keypoint_columns(parse_predictions(path, entries, None), layout.names)
                names = {"image": np.repeat([entry["file_name"] for entry in entries], len(layout))}
                file.write(to_csv({**names, **columns}, header).encode())
                header = False
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise HaloposeError(f"cannot write {path}: {error.strerror or error}") from None


def _counts(poses: PoseDistributions, alarm: float | None) -> str:
    keep = np.asarray(poses.keep)
    text = f"{len(keep)} detections, {int(keep.sum())} of {keep.size} keypoints kept"
    if alarm is None:
        return text
    text += f", {int((~poses.in_distribution(alarm)).sum())} out of distribution"
    image = poses.image_novelty
    flagged = image is not None and image[0] <= alarm
    return f"{text}; the image is out of distribution, p = {image[0]:.3f}" if flagged and image is not None else text
