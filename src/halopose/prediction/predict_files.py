"""Prediction over many files: annotated pictures and films, and a predictions.json in COCO results format."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from halopose.data.coco import Numbering, read_numbering
from halopose.data.dataset import image_id, image_ids
from halopose.data.files import make_folder
from halopose.data.films import FilmWriter, film_facts
from halopose.data.images import NamedImage, write_image
from halopose.data.lock import locked
from halopose.data.sources import Source, find_sources
from halopose.data.storage.prediction_log import PredictionLog, run_state, source_state
from halopose.errors import HaloposeError
from halopose.poses import PoseDistributions
from halopose.prediction.predictor import Predictor
from halopose.types import Array, Progress

log = logging.getLogger(__name__)

MOST_FOLDERS = 10_000  # numbered output folders


@dataclass(frozen=True)
class PictureSettings:
    """What annotated pictures show.

    Attributes:
        probability: Probability of the ellipses.
        pruned: Draw pruned keypoints as well.
        boxes: Draw boxes and scores.
        legend: Explain the colours.
    """

    probability: float = 0.95
    pruned: bool = True
    boxes: bool = False
    legend: bool = False


@dataclass(frozen=True)
class PredictSettings:
    """How files are predicted.

    Attributes:
        conf: Lowest score of a detection.
        iou: Overlap of boxes above which non-maximum suppression removes the weaker one.
        imgsz: Input size in pixels; None: the model's.
        pictures: What annotated pictures and films show; None: none are written.
        joint: Write the joint degrees of freedom and correlations of keypoints as well.
        alarm: False-alarm rate at which detections and images are flagged as out of distribution; None: not flagged.
        exist_ok: Write into a folder that holds an earlier run, instead of numbering the folders.
    """

    conf: float = 0.25
    iou: float = 0.7
    imgsz: int | None = None
    pictures: PictureSettings | None = field(default_factory=PictureSettings)
    joint: bool = False
    alarm: float | None = None
    exist_ok: bool = False


@dataclass(frozen=True)
class PredictedFiles:
    """What a run over files has written.

    Attributes:
        folder: The folder with predictions.json and the pictures.
        sources: Number of images, films and streams that were given.
        done: Number of them that were predicted.
        skipped: One line for each that could not be read or predicted.
    """

    folder: Path
    sources: int
    done: int
    skipped: tuple[str, ...]


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

    Files that cannot be read are logged and skipped. A stopped run is resumed by the same call. A folder that holds
    an earlier run is left alone: the results go to ``folder2``, ``folder3`` and so on.

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
        >>> predicted = predict_files(UncertainPose.load("runway"), ["photo.jpg"], "poses")
        >>> predicted.done, predicted.folder.name
        (1, 'poses')
    """
    settings = settings or PredictSettings()
    found = find_sources([str(source) for source in sources])
    ids = None if truth is None else read_numbering(Path(truth))
    if settings.alarm is not None and not model.has_novelty:
        raise HaloposeError(
            "this artifact has no out-of-distribution model, which --alarm needs: add one with `halopose novelty`"
        )
    how = asdict(replace(settings, exist_ok=False))
    key = [*model.identity(), model.family, how, None if ids is None else asdict(ids)]
    states = {source.file_name: source_state(source.path) for source in found}
    target, resumed = _free_folder(Path(folder), settings.exist_ok, key, states)
    _check_outputs(found, target, settings, resumed)
    with ExitStack() as stack:
        stack.enter_context(locked(make_folder(target)))
        if not settings.exist_ok and run_state(target, key, states) == "other":
            raise HaloposeError(f"another process has just written to {target}: run the command again")
        run = _Run(model, target, settings, ids, PredictionLog(target, key, states))
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
        if folder.name in ("", "..") and number > 1:  # the current or the parent folder, which has no name of its own
            target = folder.resolve().with_name(f"{folder.resolve().name}{number}")
        state = run_state(target, key, states)
        if state != "other":
            if number > 1:
                log.info("%s holds an earlier run: writing to %s (--exist-ok replaces it)", folder, target)
            return target, state == "resumable"
        if number >= MOST_FOLDERS:
            break
    raise HaloposeError(f"{folder} and {MOST_FOLDERS} numbered folders hold earlier runs: choose another --output")


def _check_outputs(sources: Sequence[Source], folder: Path, settings: PredictSettings, overwrite: bool) -> None:
    """Refuse outputs that would replace a source, or a file that this command has not written."""
    inputs = {os.path.realpath(source.path): source.path for source in sources if source.path is not None}
    targets = [folder / "predictions.json"]
    if settings.pictures is not None:
        targets += [folder / f"{source.name}.{'mp4' if _is_film(source) else 'jpg'}" for source in sources]
    for target in targets:
        path = inputs.get(os.path.realpath(target))
        if path is not None:
            raise HaloposeError(f"the annotated copy {target} would replace the source {path}: choose another --output")
        if not overwrite and (target.exists() or target.is_symlink()):
            raise HaloposeError(f"{target} exists already: choose another --output, or replace it with --exist-ok")


def _is_film(source: Source) -> bool:
    return source.is_film or source.stream is not None


class _UnusableSource(HaloposeError):
    """A source that cannot be read or predicted; the other sources can."""


class _Run:
    """A run over sources into one folder."""

    def __init__(
        self, model: Predictor, folder: Path, settings: PredictSettings, ids: Numbering | None, results: PredictionLog
    ) -> None:
        self.model, self.folder, self.settings, self.ids, self.results = model, folder, settings, ids, results
        self.numbers: dict[str, int] = {}

    def over(self, sources: Sequence[Source], step: Progress) -> PredictedFiles:
        """Predict every source that is not finished yet."""
        names = [source.file_name for source in sources]
        self.numbers = dict(zip(names, image_ids(names), strict=True))
        left = [source for source in sources if source.file_name not in self.results.finished]
        if len(left) < len(sources):
            log.info("%d of %d were done before: resuming", len(sources) - len(left), len(sources))
        skipped: list[str] = []
        complete = False
        try:
            for number, source in enumerate(left):
                step("predicting", number, len(left))
                try:
                    self._source(source, step)
                except _UnusableSource as error:
                    skipped.append(str(error))
                    log.warning("skipped: %s", error)
            step("predicting", len(left), len(left))
            complete = True
        except KeyboardInterrupt:
            log.warning("stopped: finished results are kept in %s, and the same command resumes", self.folder)
            raise
        finally:
            done = _closed(self.results, complete)
        return PredictedFiles(self.folder, len(sources), done, tuple(skipped))

    def _source(self, source: Source, step: Progress) -> None:
        """Predict one source; an error leaves none of its results behind."""
        if _is_film(source):
            self._film(source, step)
            return
        for image in _read(source):
            poses = self._poses(image, source.file_name)
            picture = self._picture(image.pixels, poses)
            if picture is not None:
                write_image(self.folder / f"{image.name}.jpg", picture)
            log.info("%s: %s", image.name, _counts(poses, self.settings.alarm))
        self.results.done(source.file_name)

    def _film(self, source: Source, step: Progress) -> None:
        rate, length = film_facts(source.path) if source.path is not None else (25.0, 0)
        began = time.monotonic()
        number = 0
        with FilmWriter(self.folder / f"{source.name}.mp4", rate) as film:
            for number, image in enumerate(_read(source), 1):
                poses = self._poses(image, source.file_name, rate if source.path is not None else None)
                picture = self._picture(image.pixels, poses)
                if picture is not None:
                    film.write(picture)
                pace = 1000 * (time.monotonic() - began) / number
                step(f"{source.name} ({pace:.0f} ms/frame)", number, max(length, number))
        self.results.done(source.file_name)
        pace = 1000 * (time.monotonic() - began) / max(number, 1)
        log.info("%s: %d frames, %.0f ms/frame", source.name, number, pace)

    def _poses(self, image: NamedImage, file_name: str, frame_rate: float | None = None) -> PoseDistributions:
        """Predict an image and log its detections."""
        settings = self.settings
        try:
            poses = self.model.predict(image.pixels, conf=settings.conf, iou=settings.iou, imgsz=settings.imgsz)[0]
        except HaloposeError as error:
            raise _UnusableSource(f"{file_name}: {error}") from None
        name = file_name if image.path is not None else image.name
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
        self.results.add(file_name, entries)
        return poses

    def _picture(self, pixels: Array, poses: PoseDistributions) -> Array | None:
        drawing, layout = self.settings.pictures, self.model.layout
        if drawing is None:
            return None
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


def _read(source: Source) -> Iterator[NamedImage]:
    """Yield the images of a source; errors of reading concern this source alone."""
    images = source.images()
    while True:
        try:
            image = next(images)
        except StopIteration:
            return
        except HaloposeError as error:
            raise _UnusableSource(str(error)) from None
        yield image


def _closed(results: PredictionLog, complete: bool) -> int:
    """Write predictions.json; after an error a second error while writing adds nothing."""
    try:
        return results.close(complete)
    except HaloposeError:
        if complete:
            raise
        return 0


def _counts(poses: PoseDistributions, alarm: float | None) -> str:
    keep = np.asarray(poses.keep)
    text = f"{len(keep)} detections, {int(keep.sum())} of {keep.size} keypoints kept"
    if alarm is None:
        return text
    text += f", {int((~poses.in_distribution(alarm)).sum())} out of distribution"
    image = poses.image_novelty
    flagged = image is not None and image[0] <= alarm
    return f"{text}; the image is out of distribution, p = {image[0]:.3f}" if flagged and image is not None else text
